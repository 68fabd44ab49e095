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

namespace detail {
template <typename T>
struct PhaseOf;
template <>
struct PhaseOf<float> {
  using Unsigned = uint32_t;
  using Signed = int32_t;
  static constexpr float HALF = 0x1p31f;                 // of a turn
  static constexpr float PER_RADIAN = 0x1.45f306p-3f;    // 1 / 2 pi, rounded
  static constexpr float REST = 0x1.b939100000000p-28f;  // and what the rounding took
};
template <>
struct PhaseOf<double> {
  using Unsigned = uint64_t;
  using Signed = int64_t;
  static constexpr double HALF = 0x1p63;
  static constexpr double PER_RADIAN = 0x1.45f306dc9c883p-3;
  static constexpr double REST = -0x1.6b01ec5417056p-57;
};
}  // namespace detail

template <typename T>
using Phase = typename detail::PhaseOf<T>::Unsigned;

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

// An angle / 2 pi, in two parts: that of the product with 1 / 2 pi as it is rounded, without its whole turns, and what
// the rounding of the product and of 1 / 2 pi has left over. The second is tiny, but in a sum of many steps it counts:
// the same angle again and again is the same error again and again. What is not finite gives any phase: see to it that
// it shows elsewhere.
template <typename T>
__device__ __forceinline__ Phase<T> phase_of(T angle) {
  using Of = detail::PhaseOf<T>;
  using Signed = typename Of::Signed;
  const T turns = rounded_product(angle, Of::PER_RADIAN);
  const T left = std::fma(angle, Of::PER_RADIAN, -turns) + angle * Of::REST;
  const T part = turns - std::rint(turns);  // at most half a turn, so that its half fits with room to spare
  return Phase<T>(Phase<T>(Signed(std::rint(part * Of::HALF))) + Phase<T>(Signed(std::rint(left * Of::HALF)))) << 1;
}

// cos + i sin of a phase. In float by the GPU's own sine and cosine: between -pi and pi they are off by 4e-7 at most.
template <typename T>
__device__ __forceinline__ Complex<T> unit(Phase<T> phase) {
  const T half_turns = T(typename detail::PhaseOf<T>::Signed(phase)) / detail::PhaseOf<T>::HALF;
  T sine, cosine;
#if defined(__CUDACC__)
  if constexpr (sizeof(T) == 4) __sincosf(half_turns * 3.14159265f, &sine, &cosine);
  else sincospi(half_turns, &sine, &cosine);
#else
  const T angle = half_turns * T(3.14159265358979323846);
  sine = std::sin(angle), cosine = std::cos(angle);
#endif
  return {cosine, sine};
}
