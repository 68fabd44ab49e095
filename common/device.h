// The one include of a kernel: CUDA under nvcc, the CPU device under g++ and clang++.
//
// A kernel written against this header runs unchanged on both. What CUDA has and C++ lacks (qualifiers, threadIdx,
// barriers, warp operations, atomics) comes from cuda_runtime.h on the one side and from simt/simt.h on the other; what
// neither spells the same way is a macro or a function here.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_runtime.h>

// Dynamic shared memory as `T* name`. (`extern __shared__` cannot be written so that a C++ compiler takes it.)
#define DYNAMIC_SHARED(T, name)                                           \
  extern __shared__ __align__(1024) unsigned char dynamic_shared_bytes[]; \
  T* const name = reinterpret_cast<T*>(dynamic_shared_bytes)

#else
#include "common/simt/simt.h"

#define DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(::simt::dynamic_shared())
#endif

// Before a loop of few steps, known to the compiler, over what is to stay in registers: no loop is left of it. The
// x-ray then tells its steps apart as a GPU does, also where lanes leave some of them out.
#if defined(__CUDACC__) || defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 64")
#endif

template <typename A, typename B>
__host__ __device__ constexpr int64_t ceil_div(A value, B divisor) {
  return (int64_t(value) + int64_t(divisor) - 1) / int64_t(divisor);
}
