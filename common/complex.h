// Complex<R>: a complex number of two floats or doubles that lie side by side and move by one instruction.
//
//   h = a * h + b              // four multiplications and as many additions
//   carry = conj(a) * lambda   // conj leaves real numbers as they are: one text serves both
#pragma once

#include "common/device.h"
#include "common/numeric.h"

template <typename R>
struct alignas(2 * sizeof(R)) Complex {
  R re, im;

  __host__ __device__ Complex(R re, R im = 0) : re(re), im(im) {}
#if defined(__CUDACC__)
  Complex() = default;
#else
  SIMT_WIDE(Complex, R, 2)  // a compiler for a CPU might copy part by part
#endif

  __host__ __device__ friend Complex operator+(Complex x, Complex y) { return {x.re + y.re, x.im + y.im}; }
  __host__ __device__ friend Complex operator*(Complex x, Complex y) {
    return {x.re * y.re - x.im * y.im, x.re * y.im + x.im * y.re};
  }
  __host__ __device__ friend Complex operator-(Complex x, Complex y) { return {x.re - y.re, x.im - y.im}; }
  __host__ __device__ friend Complex operator*(Complex x, R y) { return {x.re * y, x.im * y}; }
};

template <typename T>
__host__ __device__ T conj(T x) {
  return x;
}
template <typename R>
__host__ __device__ Complex<R> conj(Complex<R> x) {
  return {x.re, -x.im};
}

template <typename T>
__host__ __device__ T real_part(T x) {
  return x;
}
template <typename R>
__host__ __device__ R real_part(Complex<R> x) {
  return x.re;
}

// body(x), of a complex number body of each part: what shuffles lanes does it for numbers of either kind.
template <typename T, typename Body>
__host__ __device__ __forceinline__ T by_parts(T x, const Body& body) {
  return body(x);
}
template <typename R, typename Body>
__host__ __device__ __forceinline__ Complex<R> by_parts(Complex<R> x, const Body& body) {
  return {body(x.re), body(x.im)};
}

template <>
struct Traits<Complex<float>> {
  static constexpr DType dtype = DType::complex64;
  using Accumulator = Complex<float>;
};
template <>
struct Traits<Complex<double>> {
  static constexpr DType dtype = DType::complex128;
  using Accumulator = Complex<double>;
};

// dispatch_floating, and complex numbers besides.
template <typename Body>
void dispatch_number(DType dtype, Body&& body) {
#if !defined(TYPE_ONLY)
  if (dtype == DType::complex64) return body.template operator()<Complex<float>>();
  if (dtype == DType::complex128) return body.template operator()<Complex<double>>();
#endif
  dispatch_floating(dtype, body);
}
