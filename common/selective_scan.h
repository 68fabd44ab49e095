// What the stages of the selective scan share: what a step of it computes, in which method, and its rows of time.
//
//   h = multiply_add(decay(a, dt), h, b * (dt * u));    // a = scaled(A), all of them real or complex
//   y = add_seen(y, c, h);
//
//   with_numbers(A.dtype, [&]<typename N>() {           // float, double, or complex numbers of them
//     with_method<N>(method, [&]<Method M>() { launch<kernel<N, M>>(...); });  // ANY for double
//   });
//   by_method<M>(method, [&]<Method L>() { return coefficients<L>(a, dt, z); });  // in the kernel: M, or what ANY is
//
//   Groups(x, first, tile).fetch(x, rows, rows, t, steps);  // Rows x, copied by all threads into a tile of shared memory
//   load_four(numbers, tile + row * x.pitch, k, x.dtype);   // and read from there
//
// Tensors are Rows: how wide their numbers are is asked where they are copied, what they are where they are used. So a
// walk through time is compiled once for all types that it computes with in float.
#pragma once

#include <cmath>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/async_copy.h"
#include "common/complex.h"
#include "common/device.h"
#include "common/discretize.h"
#include "common/numeric.h"
#include "common/phi.h"
#include "common/vector.h"
#include "common/view.h"

constexpr int CHUNK = 128;  // steps, before each of which a backward wants to know the states
constexpr int FOUR = 4;     // steps that lie together in shared memory
template <typename N>
constexpr int PARTS = int(sizeof(N) / sizeof(Real<N>));  // 2 of a complex number

// ---- methods --------------------------------------------------------------------------------------------------------
constexpr Method ANY = Method(9);  // one that is only known when the kernel runs: for types that are not for speed
template <Method M>
constexpr bool EXPONENT_ALONE = M == Method::mamba || M == Method::dirac;  // what a step needs of dt A is e^z
template <Method M>
constexpr bool DIVIDES = M == Method::zoh || M == Method::foh || M == ANY;  // or 1 / z, too
template <Method M>
constexpr bool LOOKS_BACK = M == Method::foh || M == ANY;  // or the input of the step before

// body.operator()<L>() with the method L, which is M unless that is ANY.
template <typename Body>
NOINLINE __device__ auto with_any(Method method, const Body& body) {
  switch (method) {
    case Method::zoh: return body.template operator()<Method::zoh>();
    case Method::foh: return body.template operator()<Method::foh>();
    case Method::bilinear: return body.template operator()<Method::bilinear>();
    case Method::highorder: return body.template operator()<Method::highorder>();
    case Method::poly: return body.template operator()<Method::poly>();
    case Method::rk4: return body.template operator()<Method::rk4>();
    case Method::dirac: return body.template operator()<Method::dirac>();
    case Method::backward_euler: return body.template operator()<Method::backward_euler>();
    default: return body.template operator()<Method::mamba>();
  }
}
template <Method M, typename Body>
__device__ __forceinline__ auto by_method(Method method, const Body& body) {
  if constexpr (M == ANY) return with_any(method, body);
  else return body.template operator()<M>();
}

// With TYPE_ONLY one method of each kind: an exponential, one beside a division, none.
template <typename N, typename Body>
void with_method(int method, Body&& body) {
  if constexpr (sizeof(Real<N>) == 8) {
    if (method >= 0 && method < int(ANY)) return body.template operator()<ANY>();
  }
  if constexpr (sizeof(Real<N>) == 4) {
    switch (Method(method)) {
      case Method::mamba: return body.template operator()<Method::mamba>();
      case Method::foh: return body.template operator()<Method::foh>();
      case Method::bilinear: return body.template operator()<Method::bilinear>();
#if !defined(TYPE_ONLY)
      case Method::zoh: return body.template operator()<Method::zoh>();
      case Method::highorder: return body.template operator()<Method::highorder>();
      case Method::poly: return body.template operator()<Method::poly>();
      case Method::rk4: return body.template operator()<Method::rk4>();
      case Method::dirac: return body.template operator()<Method::dirac>();
      case Method::backward_euler: return body.template operator()<Method::backward_euler>();
#endif
      default: break;
    }
  }
  throw std::invalid_argument("method " + std::to_string(method) + " is none that this module has");
}

// What is computed with: the type of A, of which there are as many as of the states.
template <typename Body>
void with_numbers(DType dtype, Body&& body) {
  if (dtype == DType::float32) return body.template operator()<float>();
#if !defined(TYPE_ONLY)
  if (dtype == DType::float64) return body.template operator()<double>();
  if (dtype == DType::complex64) return body.template operator()<Complex<float>>();
  if (dtype == DType::complex128) return body.template operator()<Complex<double>>();
#endif
  throw std::invalid_argument(std::string("this kernel does not compute with ") + name_of(dtype));
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------
template <typename T>
__device__ __forceinline__ T multiply_add(T x, T y, T z) {
  return x * y + z;
}
template <typename T>
__device__ __forceinline__ Complex<T> multiply_add(Complex<T> x, Complex<T> y, Complex<T> z) {
  return {z.re + x.re * y.re - x.im * y.im, z.im + x.re * y.im + x.im * y.re};
}

// What y takes of a state: c h, of complex numbers the real part.
template <typename T>
__device__ __forceinline__ T add_seen(T sum, T c, T h) {
  return sum + c * h;
}
template <typename T>
__device__ __forceinline__ T add_seen(T sum, Complex<T> c, Complex<T> h) {
  return sum + c.re * h.re - c.im * h.im;
}

// e^x for an x that was multiplied by PER_E. A float's is a power of 2, one instruction of a GPU, right to 2^-22.
template <typename T>
constexpr T PER_E = sizeof(T) == 4 ? T(1.44269504088896340736) : T(1);
__device__ __forceinline__ double power(double x) { return std::exp(x); }
__device__ __forceinline__ float power(float x) {
#if defined(__CUDACC__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::exp2(x);
#endif
}

// cos + i sin of the angle rate dt. What roundings take from the product and from its turns is kept, as each step turns a
// state further.
__device__ __forceinline__ Complex<double> direction(double rate, double dt) {
  return exponential(Complex<double>(0, rate * dt));
}
__device__ __forceinline__ Complex<float> direction(float rate, float dt) {
  const float angle = rate * dt, lost = std::fma(rate, dt, -angle);
  const Turns<float> turns = turns_of(angle);
  const float rest = turns.rest + lost * detail::PhaseOf<float>::PER_RADIAN;
  const float part = 2 * ((turns.rounded - rint(turns.rounded)) + rest);  // of half a turn
  float sine, cosine;
#if defined(__CUDACC__)
  sincospif(part, &sine, &cosine);
#else
  sine = std::sin(part * 3.14159265358979323846f), cosine = std::cos(part * 3.14159265358979323846f);
#endif
  return {cosine, sine};
}

// A so that e^(dt A) needs no multiplication but the one by dt, and e^(dt A) of that.
template <typename T>
__device__ __forceinline__ T scaled(T a) {
  return a * PER_E<T>;
}
template <typename T>
__device__ __forceinline__ Complex<T> scaled(Complex<T> a) {
  return {a.re * PER_E<T>, a.im};
}
template <typename T>
__device__ __forceinline__ T decay(T a_scaled, T dt) {
  return power(a_scaled * dt);
}
template <typename T>
__device__ __forceinline__ Complex<T> decay(Complex<T> a_scaled, T dt) {
  return direction(a_scaled.im, dt) * power(a_scaled.re * dt);
}

// log(1 + e), 0 < e <= 1. Of a small e by its series: beside 1 it would be rounded.
__device__ __forceinline__ double log_of_one_plus(double e) { return std::log1p(e); }
__device__ __forceinline__ float log_of_one_plus(float e) {
  float sum = 1.0f / 7;
  UNROLL
  for (int k = 6; k > 0; --k) sum = 1.0f / k - e * sum;
#if defined(__CUDACC__)
  const float whole = __logf(1 + e);
#else
  const float whole = std::log(1 + e);
#endif
  return e < 0.125f ? e * sum : whole;
}
template <typename T>
__device__ __forceinline__ T softplus(T x) {
  return (x > 0 ? x : T(0)) + log_of_one_plus(power((x > 0 ? -x : x) * PER_E<T>));
}
template <typename T>
__device__ __forceinline__ T silu(T x) {
  return x * reciprocal(T(1) + power(-x * PER_E<T>));
}

// A_bar. Of the two methods that divide it is 1 + A gain: near 1, where it counts for long what a step forgets, it is
// rounded once. Near 0, which backward_euler's is in large steps, it is not.
template <Method M, typename N>
__device__ __forceinline__ N left_of(N a, const Coefficients<N>& by) {
  if constexpr (M == Method::bilinear) return multiply_add(a, by.gain, N(1));
  if constexpr (M == Method::backward_euler) {
    return within(a * by.gain, Real<N>(0.5)) ? multiply_add(a, by.gain, N(1)) : by.a_bar;
  }
  return by.a_bar;
}

// ---- what is copied -------------------------------------------------------------------------------------------------
// A tensor whose last dimension is time, as copies see it: bytes.
template <int D>
struct Rows {
  unsigned char* data;
  int64_t size[D], stride[D];  // strides in bytes
  DType dtype;
  int bytes;   // of a number
  int pitch;   // of a tile's row in shared memory, in bytes: neighbouring rows begin in other banks
  int groups;  // of 16 bytes in a row: 2 to that power
  bool wide;   // rows are made of such groups

  Rows(const AnyView<D>& x, int steps) : data(static_cast<unsigned char*>(x.data)), dtype(x.dtype), groups(0) {
    bytes = size_of(dtype), pitch = steps * bytes + 16;
    while (16 << groups < steps * bytes) ++groups;
    wide = reinterpret_cast<uintptr_t>(data) % 16 == 0 && x.stride[D - 1] == 1 && x.size[D - 1] * bytes % 16 == 0;
    for (int i = 0; i < D; ++i) {
      size[i] = x.size[i], stride[i] = x.stride[i] * bytes;
      if (i < D - 1) wide &= size[i] <= 1 || stride[i] % 16 == 0;
    }
  }
};

// What a thread copies of a tensor whose rows are made of groups of 16 bytes: the same place in every `more`-th row.
struct Groups {
  const unsigned char* from;  // in its first row, at step 0
  unsigned char* to;
  int row0, at, more;

  template <int D>
  __device__ __forceinline__ Groups(const Rows<D>& x, const unsigned char* first, unsigned char* tile)
      : row0(threadIdx.x >> x.groups), at((threadIdx.x & ((1 << x.groups) - 1)) * 16), more(blockDim.x >> x.groups) {
    from = first + row0 * x.stride[D - 2] + at, to = tile + row0 * x.pitch + at;
  }

  // Starts the copies of a tile of `height` rows from step t on; zeros stand where there are no more steps or rows.
  template <int D>
  __device__ __forceinline__ void fetch(const Rows<D>& x, int height, int rows, int64_t t, int steps) const {
    const int there = at < steps * x.bytes ? rows : 0;
    const unsigned char* word = from + t * x.bytes;
    unsigned char* place = to;
#pragma unroll 1
    for (int row = row0; row < height; row += more, word += more * x.stride[D - 2], place += more * x.pitch) {
      async_copy<16>(place, word, row < there);
    }
  }
};

// A tensor of which that is not so: number by number, and a table of such in shared memory, where it is in nobody's way.
struct Numbers {
  const unsigned char* first;
  int64_t stride_r, stride_t;
  int tile, pitch, height, rows, bytes, late;  // late: is needed when a tile has been walked, not before

  template <int STEPS>
  __device__ __forceinline__ void fetch(unsigned char* shared, int64_t t, int steps) const {
    const bool down = stride_r < stride_t;  // rows lie closer than steps: neighbouring lanes take those
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < unsigned(height * STEPS); i += blockDim.x) {
      const int row = down ? i % unsigned(height) : i / STEPS, k = down ? i / unsigned(height) : i % STEPS;
      unsigned char* to = shared + tile + row * pitch + k * bytes;
      const unsigned char* word = first + row * stride_r + (t + k) * stride_t;
      const bool inside = row < rows && k < steps;
      if (bytes == 16) async_copy<16>(to, word, inside);
      else if (bytes == 8) async_copy<8>(to, word, inside);
      else if (bytes == 4) async_copy<4>(to, word, inside);
      else *reinterpret_cast<uint16_t*>(to) = inside ? *reinterpret_cast<const uint16_t*>(word) : uint16_t(0);
    }
  }
};

// body.operator()<T>() for the type T of a tensor's numbers, one of those that are computed with as N.
template <typename N, typename Body>
__device__ __forceinline__ void with_type(DType dtype, Body&& body) {
  if constexpr (std::is_same_v<N, float>) {
    if (dtype == DType::float16) return body.template operator()<half>();
    if (dtype == DType::bfloat16) return body.template operator()<bfloat16>();
  }
  body.template operator()<N>();
}

// A row of complex numbers is one of twice as many real ones.
template <int COUNT, typename T>
__device__ __forceinline__ void load_row(Complex<T> (&values)[COUNT], const Complex<T>* from) {
  T parts[2 * COUNT];
  load_row(parts, reinterpret_cast<const T*>(from));
  UNROLL
  for (int k = 0; k < COUNT; ++k) values[k] = Complex<T>(parts[2 * k], parts[2 * k + 1]);
}

// FOUR of a tensor's numbers that were copied.
template <typename N>
__device__ __forceinline__ void load_four(N (&numbers)[FOUR], const unsigned char* row, int k, DType dtype) {
  with_type<N>(dtype, [&]<typename From>() { load_row(numbers, reinterpret_cast<const From*>(row) + k); });
}
