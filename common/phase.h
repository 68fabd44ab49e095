// Phases as whole numbers: a turn is divided into 2^32 parts (2^64 for double), so that 2 pi wraps by itself.
//
//   Phase<float> phase = 0;
//   phase += phase_of(angle);                     // in radians; exact, in any order, however long the sum
//   const Complex<float> e = unit<float>(phase);  // cos + i sin
//   phase -= phase_of(angle);                     // and it is what it was before
//
// A sum of angles in float32 that is 1000 turns long is kept to 1e-4 of a turn. This one loses nothing: an error is
// made where an angle is rounded, once, and no later one is made worse by it.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/complex.h"
#include "common/device.h"
#include "common/numeric.h"

namespace detail {
template <typename T>
struct PhaseOf;
template <>
struct PhaseOf<float> {
  using Unsigned = uint32_t;
  using Signed = int32_t;
  static constexpr float HALF = 0x1p31f;                 // of a turn
  static constexpr float WHOLE = 0x1.8p54f;              // beside it in a sum only whole turns last
  static constexpr float PER_RADIAN = 0x1.45f306p-3f;    // 1 / 2 pi, rounded
  static constexpr float REST = 0x1.b939100000000p-28f;  // and what the rounding took
};
template <>
struct PhaseOf<double> {
  using Unsigned = uint64_t;
  using Signed = int64_t;
  static constexpr double HALF = 0x1p63;
  static constexpr double WHOLE = 0x1.8p115;
  static constexpr double PER_RADIAN = 0x1.45f306dc9c883p-3;
  static constexpr double REST = -0x1.6b01ec5417056p-57;
};
}  // namespace detail

template <typename T>
using Phase = typename detail::PhaseOf<T>::Unsigned;

// In tensors they are whole numbers, too: torch's are signed, which are the same bits.
template <>
struct Traits<Phase<float>> {
  static constexpr DType dtype = DType::int32;
};
template <>
struct Traits<Phase<double>> {
  static constexpr DType dtype = DType::int64;
};

// x y, rounded by itself: not as a part of what a compiler makes of the sums that it stands in.
template <typename T>
__device__ __forceinline__ T rounded_product(T x, T y) {
#if defined(__CUDACC__)
  if constexpr (sizeof(T) == 4) return __fmul_rn(x, y);
  else return __dmul_rn(x, y);
#else
  return x * y;
#endif
}

// An angle / 2 pi, in two parts: the product with 1 / 2 pi as it is rounded, and what the rounding of the product and of
// 1 / 2 pi has left over. The second is tiny, but in a sum of many steps it counts: the same angle again and again is
// the same error again and again.
template <typename T>
struct Turns {
  T rounded, rest;
};
template <typename T>
__device__ __forceinline__ Turns<T> turns_of(T angle) {
  using Of = detail::PhaseOf<T>;
  const T turns = rounded_product(angle, Of::PER_RADIAN);
  return {turns, std::fma(angle, Of::PER_RADIAN, -turns) + angle * Of::REST};
}

// A number of 2^-31 (2^-63) turns, without the whole ones. What is not finite gives any phase: see to it that it shows
// elsewhere.
template <typename T>
__device__ __forceinline__ Phase<T> phase_of_parts(T parts) {
  using Of = detail::PhaseOf<T>;
  const T whole = (parts + Of::WHOLE) - Of::WHOLE;  // rounded, as nothing less than a turn is left in the sum
  const T left = parts - whole;                     // at most half a turn, which is all that an integer holds
#if defined(__CUDACC__)
  if constexpr (sizeof(T) == 4) return Phase<T>(__float2int_rn(left)) << 1;
  else return Phase<T>(__double2ll_rn(left)) << 1;
#else
  return Phase<T>(typename Of::Signed(std::rint(left))) << 1;
#endif
}

template <typename T>
__device__ __forceinline__ Phase<T> phase_of(T angle) {
  const Turns<T> turns = turns_of(angle);
  return phase_of_parts(turns.rounded * detail::PhaseOf<T>::HALF) +
         phase_of_parts(turns.rest * detail::PhaseOf<T>::HALF);
}

// cos + i sin of a phase; NaN, if `nan` is, else that is 0. In float by the GPU's own sine and cosine: between -pi and
// pi they are off by 4e-7 at most.
template <typename T>
__device__ __forceinline__ Complex<T> unit(Phase<T> phase, T nan = 0) {
  using Of = detail::PhaseOf<T>;
  const T angle = T(typename Of::Signed(phase)) * T(3.14159265358979323846 / Of::HALF) + nan;
  T sine, cosine;
#if defined(__CUDACC__)
  if constexpr (sizeof(T) == 4) __sincosf(angle, &sine, &cosine);
  else sincospi(T(typename Of::Signed(phase)) / Of::HALF + nan, &sine, &cosine);
#else
  sine = std::sin(angle), cosine = std::cos(angle);
#endif
  return {cosine, sine};
}
