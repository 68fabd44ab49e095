// Number types (complex ones are in complex.h), what they accumulate in, and how a launcher goes from a tensor's dtype to a type.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/device.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
using half = __half;
using bfloat16 = __nv_bfloat16;
#else
#include "common/simt/half.h"
using half = simt::Half;
using bfloat16 = simt::BFloat16;
#endif

enum class DType { float64, float32, float16, bfloat16, complex128, complex64, int64, int32 };

inline const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::float64: return "float64";
    case DType::float32: return "float32";
    case DType::float16: return "float16";
    case DType::bfloat16: return "bfloat16";
    case DType::complex128: return "complex128";
    case DType::complex64: return "complex64";
    case DType::int64: return "int64";
    case DType::int32: return "int32";
  }
  return "unknown";
}

inline int size_of(DType dtype) {
  switch (dtype) {
    case DType::complex128: return 16;
    case DType::complex64:
    case DType::int64:
    case DType::float64: return 8;
    case DType::int32:
    case DType::float32: return 4;
    default: return 2;
  }
}

template <typename T>
struct Traits;
template <>
struct Traits<double> {
  static constexpr DType dtype = DType::float64;
  using Accumulator = double;
};
template <>
struct Traits<float> {
  static constexpr DType dtype = DType::float32;
  using Accumulator = float;
};
template <>
struct Traits<half> {
  static constexpr DType dtype = DType::float16;
  using Accumulator = float;
};
template <>
struct Traits<bfloat16> {
  static constexpr DType dtype = DType::bfloat16;
  using Accumulator = float;
};

template <typename T>
constexpr DType dtype_of = Traits<T>::dtype;

// Sums are kept wider than 16 bits: float for half, bfloat16 and float, double for double.
template <typename T>
using Accumulator = typename Traits<T>::Accumulator;

// dispatch_floating(dtype, [&]<typename T>() { ... }) calls the body with the dtype's type. With TYPE_ONLY=half, say, for
// trying out many changes of a kernel, a module takes that type alone and is compiled in a fraction of the time.
template <typename Body>
void dispatch_floating(DType dtype, Body&& body) {
#if defined(TYPE_ONLY)
  constexpr DType only = dtype_of<TYPE_ONLY>;
  if (dtype != only) throw std::invalid_argument(std::string("this module was built for ") + name_of(only) + " alone");
  body.template operator()<TYPE_ONLY>();
#else
  switch (dtype) {
    case DType::float64: return body.template operator()<double>();
    case DType::float32: return body.template operator()<float>();
    case DType::float16: return body.template operator()<half>();
    case DType::bfloat16: return body.template operator()<bfloat16>();
    default: throw std::invalid_argument(std::string("this kernel does not take ") + name_of(dtype));
  }
#endif
}

// The same for kernels that take no 16-bit numbers.
template <typename Body>
void dispatch_wide(DType dtype, Body&& body) {
  if (dtype == DType::float32) return body.template operator()<float>();
#if !defined(TYPE_ONLY)
  if (dtype == DType::float64) return body.template operator()<double>();
#endif
  throw std::invalid_argument(std::string("this kernel does not take ") + name_of(dtype));
}
