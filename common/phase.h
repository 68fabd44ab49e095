// Phases as whole numbers: a turn is divided into 2^32 parts (2^64 for double), so that 2 pi wraps by itself.
//
//   Phase<float> phase = 0;
//   phase += phase_of(turns);                // exact, in any order, however long the sum; `turns` is an angle / 2 pi
//   const Complex<float> e = unit<float>(phase);  // cos + i sin
//   phase -= phase_of(turns);                // and it is what it was before
//
// A sum of angles in float32 has lost 1e-4 of a turn by the time it is 1000 turns long. This one has lost nothing: an
// error is made where an angle is rounded, once, and no later one is made worse by it.
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
  static constexpr float HALF = 0x1p31f;
};
template <>
struct PhaseOf<double> {
  using Unsigned = uint64_t;
  using Signed = int64_t;
  static constexpr double HALF = 0x1p63;
};
}  // namespace detail

template <typename T>
using Phase = typename detail::PhaseOf<T>::Unsigned;

// The whole turns are taken off first, which is exact. What is left is at most half a turn, and its half fits a signed
// number with room to spare. What is not finite gives any phase: see to it that it shows elsewhere.
template <typename T>
__device__ __forceinline__ Phase<T> phase_of(T turns) {
  const T rest = turns - std::rint(turns);
  return Phase<T>(typename detail::PhaseOf<T>::Signed(std::rint(rest * detail::PhaseOf<T>::HALF))) << 1;
}

// exp(2 pi i phase). In float, the GPU's own sine and cosine: between -pi and pi they are off by 4e-7 at most.
template <typename T>
__device__ __forceinline__ Complex<T> unit(Phase<T> phase) {
  const T angle = T(typename detail::PhaseOf<T>::Signed(phase)) * (T(3.14159265358979323846) / detail::PhaseOf<T>::HALF);
  T sine, cosine;
#if defined(__CUDACC__)
  if constexpr (sizeof(T) == 4) __sincosf(angle, &sine, &cosine);
  else sincos(angle, &sine, &cosine);
#else
  sine = std::sin(angle), cosine = std::cos(angle);
#endif
  return {cosine, sine};
}
