// The phi functions: what is left of e^z behind its first terms. Real or complex, float or double, near 0 and far out.
//
//   phi_1(z) = (e^z - 1) / z       phi_2(z) = (e^z - 1 - z) / z^2       phi_3(z) = (e^z - 1 - z - z^2 / 2) / z^3
//
//   const T e = exponential(z);
//   const T one = phi<1>(z, e), two = phi<2>(z, e);  // e^z is computed once; phi<1>(z) computes its own
//   series<1>(z)                                     // for |z| < RADIUS<1> alone, and without a division
//
// At 0 they are 1, 1/2 and 1/6, and the formulas 0 / 0. Near it e^z and what is taken from it are almost the same, and
// of the difference a rounding error is left: (e^z - 1) / z is 5% off at z = 1e-6 in float. So near 0 they come from
// their series, the sum of z^k / (k + N)!, and far from 0 from each other: phi_N+1(z) = (phi_N(z) - 1 / N!) / z.
#pragma once

#include <cmath>

#include "common/complex.h"
#include "common/device.h"
#include "common/phase.h"

namespace detail {
template <typename T>
struct RealOf {
  using type = T;
};
template <typename R>
struct RealOf<Complex<R>> {
  using type = R;
};
}  // namespace detail

template <typename T>
using Real = typename detail::RealOf<T>::type;  // float of float and of Complex<float>

// ---------------------------------------------------------------------------------------------------------------------
// e^z. The turns of a complex one are counted by themselves, so that its angle may be large.
template <typename R>
__device__ __forceinline__ R exponential(R z) {
  return std::exp(z);
}
template <typename R>
__device__ __forceinline__ Complex<R> exponential(Complex<R> z) {
  R sine, cosine;
#if defined(__CUDACC__)
  const Turns<R> turns = turns_of(z.im);
  const R part = 2 * ((turns.rounded - rint(turns.rounded)) + turns.rest);  // of half a turn
  if constexpr (sizeof(R) == 4) sincospif(part, &sine, &cosine);
  else sincospi(part, &sine, &cosine);
#else
  sine = std::sin(z.im), cosine = std::cos(z.im);
#endif
  const R length = std::exp(z.re);
  return {length * cosine, length * sine};
}

// 1 / x. In float as the GPU has it, off by one unit in the last place at the most, which is one instruction.
template <typename R>
__device__ __forceinline__ R reciprocal(R x) {
#if defined(__CUDACC__)
  if constexpr (sizeof(R) == 4) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
  }
#endif
  return 1 / x;
}
template <typename R>
__device__ __forceinline__ Complex<R> reciprocal(Complex<R> x) {
  return conj(x) * reciprocal(x.re * x.re + x.im * x.im);
}

// Whether |z| < radius; not if it is NaN.
template <typename R>
__device__ __forceinline__ bool within(R z, R radius) {
  return std::abs(z) < radius;
}
template <typename R>
__device__ __forceinline__ bool within(Complex<R> z, R radius) {
  return z.re * z.re + z.im * z.im < radius * radius;
}

// ---------------------------------------------------------------------------------------------------------------------
namespace detail {
template <typename R>
constexpr R UNIT = sizeof(R) == 4 ? R(0x1p-24) : R(0x1p-53);  // the largest error of rounding 1

__host__ __device__ constexpr double factorial(int n) { return n < 2 ? 1 : n * factorial(n - 1); }

// How many powers of z the series of phi_N needs, so that the next one is a quarter of a rounding error at the radius.
template <int N, typename R>
__host__ __device__ constexpr int degree(double radius) {
  int k = 0;
  for (double power = radius; power * factorial(N) / factorial(k + 1 + N) > double(UNIT<R>) / 4; power *= radius) ++k;
  return k;
}

template <int N, int DEGREE, typename R>
struct Series {
  R term[DEGREE + 1] = {};  // 1 / (k + N)!
  __host__ __device__ constexpr Series() {
    for (int k = 0; k <= DEGREE; ++k) term[k] = R(1 / factorial(k + N));
  }
};
}  // namespace detail

// Where phi_N goes from its series to its formula, if nothing speaks for another place: the further out, the more terms
// has the series; the nearer to 0, the more is lost in the formula, the more so the larger N is. In halves, as not every
// compiler takes a template's number that is not whole.
template <int N>
constexpr int HALVES = N == 1 ? 1 : 2 * N;
template <int N>
constexpr double RADIUS = HALVES<N> / 2.;

// phi_N by its series, for |z| < RADIUS_IN_HALVES / 2.
template <int N, int RADIUS_IN_HALVES = HALVES<N>, typename R>
__device__ __forceinline__ R series(R z) {
  constexpr int DEGREE = detail::degree<N, R>(RADIUS_IN_HALVES / 2.);
  constexpr detail::Series<N, DEGREE, R> coefficient;
  R sum = coefficient.term[DEGREE];
  UNROLL
  for (int k = DEGREE - 1; k >= 0; --k) sum = sum * z + coefficient.term[k];
  return sum;
}

// Coefficients that are real make half the work: what is left of the polynomial in a division by (x - z)(x - conj(z)),
// all real, but for the last two steps.
template <int N, int RADIUS_IN_HALVES = HALVES<N>, typename R>
__device__ __forceinline__ Complex<R> series(Complex<R> z) {
  constexpr int DEGREE = detail::degree<N, R>(RADIUS_IN_HALVES / 2.);
  constexpr detail::Series<N, DEGREE, R> coefficient;
  const R twice = 2 * z.re, square = z.re * z.re + z.im * z.im;
  R sum = coefficient.term[DEGREE], before = 0;
  UNROLL
  for (int k = DEGREE - 1; k > 0; --k) {
    const R next = twice * sum + (coefficient.term[k] - square * before);
    before = sum, sum = next;
  }
  return {z.re * sum + (coefficient.term[0] - square * before), z.im * sum};
}

namespace detail {
template <typename R>
__device__ __forceinline__ R divided(R x, R y) {
  return x / y;
}
template <typename R>
__device__ __forceinline__ Complex<R> divided(Complex<R> x, Complex<R> y) {
  const R square = y.re * y.re + y.im * y.im;
  const Complex<R> product = x * conj(y);
  return {product.re / square, product.im / square};
}
}  // namespace detail

// phi_N of any z, whose e^z may be at hand. A value within one or two units in the last place of the type, given that
// the real part of z does not exceed what e^z can be; but where phi_1 is 0, at 2 pi i and its multiples, of what it is
// near them.
template <int N, typename T>
__device__ __forceinline__ T phi(T z, T e) {
  T far = e;
  UNROLL
  for (int n = 0; n < N; ++n) far = detail::divided(far - T(Real<T>(n < 2 ? 1.0 : 0.5)), z);
  return within(z, Real<T>(RADIUS<N>)) ? series<N>(z) : far;
}
template <int N, typename T>
__device__ __forceinline__ T phi(T z) {
  return phi<N>(z, exponential(z));
}

// The series of phi_N up to z^DEGREE, for whoever knows how small z is.
template <int N, int DEGREE>
__device__ __forceinline__ float short_series(float z) {
  constexpr detail::Series<N, DEGREE, float> coefficient;
  float sum = coefficient.term[DEGREE];
  UNROLL
  for (int k = DEGREE - 1; k >= 0; --k) sum = sum * z + coefficient.term[k];
  return sum;
}
