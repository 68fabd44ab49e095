// Tensor cores: ldmatrix, which brings a warp's fragments from shared memory, and mma.sync, which multiplies them.
//
// All 32 lanes of a warp call these functions together. A fragment is what a lane holds of a matrix, in registers of 32
// bits. Of D[16][8] += A[16][K] B[K][8] a lane, with g = lane / 4 and t = lane % 4, holds
//
//   half, bfloat16: K = 16, two values a register, the first of them in the low half
//     a[0] = A[g][2t .. 2t+1]      a[1] = A[g+8][2t .. 2t+1]      b[0] = B[2t .. 2t+1][g]
//     a[2] = A[g][2t+8 .. 2t+9]    a[3] = A[g+8][2t+8 .. 2t+9]    b[1] = B[2t+8 .. 2t+9][g]
//   Tf32: K = 8, one value a register, a float whose 13 low bits are ignored
//     a[0] = A[g][t]               a[1] = A[g+8][t]               b[0] = B[t][g]
//     a[2] = A[g][t+4]             a[3] = A[g+8][t+4]             b[1] = B[t+4][g]
//   double: K = 8, one value a register pair, and where that value belongs as for Tf32
//   and of D, in all cases,
//     d[0] = D[g][2t]      d[1] = D[g][2t+1]      d[2] = D[g+8][2t]      d[3] = D[g+8][2t+1]
//
// What a register packs lies along K. So load_matrices brings `a` from an A stored by rows and `b` from a B stored by
// columns, a matrix of 8 rows of 16 bytes a register; from a B stored by rows load_matrices_transposed does.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "common/device.h"
#include "common/numeric.h"

struct Tf32;  // names the products of floats with 10 bits of mantissa

template <typename T>
constexpr bool is_factor = std::is_same_v<T, half> || std::is_same_v<T, bfloat16> || std::is_same_v<T, Tf32>;

#if defined(__CUDACC__)

// Lane l gives the address of a row, 16 aligned bytes of shared memory: row l % 8 of matrix l / 8. Then fragment[i] of
// lane l holds the values 2 (l % 4) and 2 (l % 4) + 1, of two bytes each, of row l / 4 of matrix i.
__device__ __forceinline__ void load_matrices(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(unsigned(__cvta_generic_to_shared(row)))
               : "memory");
}

// Two matrices: the addresses of lanes 0 to 15 count, those of the others are ignored.
__device__ __forceinline__ void load_matrices(uint32_t (&fragment)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(fragment[0]), "=r"(fragment[1])
               : "r"(unsigned(__cvta_generic_to_shared(row)))
               : "memory");
}

// Each matrix is transposed on the way: fragment[i] of lane l holds the values l / 4 of the rows 2 (l % 4) and
// 2 (l % 4) + 1 of matrix i.
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&fragment)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(unsigned(__cvta_generic_to_shared(row)))
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&fragment)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(fragment[0]), "=r"(fragment[1])
               : "r"(unsigned(__cvta_generic_to_shared(row)))
               : "memory");
}

#define MMA(shape_and_types)                                                                                          \
  asm volatile("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

// D += A B of a warp, T one of half, bfloat16 and Tf32. Products are exact, sums are floats, in no specified order.
template <typename T>
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  static_assert(is_factor<T>, "tensor cores multiply half, bfloat16 or Tf32 here");
  if constexpr (std::is_same_v<T, half>) MMA("m16n8k16.row.col.f32.f16.f16.f32");
  else if constexpr (std::is_same_v<T, bfloat16>) MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  else MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
}
#undef MMA

// The same of doubles, each product and sum rounded once. A GPU does it in four parts of 8 x 4 by 4 x 8.
__device__ __forceinline__ void mma(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%0, %1};"
                   : "+d"(d[2 * row]), "+d"(d[2 * row + 1])
                   : "d"(a[2 * half + row]), "d"(b[half]));
    }
  }
}

// The nearest value with 10 bits of mantissa, of two equally near the one farther from zero. Infinities and NaN stay.
__device__ __forceinline__ uint32_t to_tf32(float value) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

#else  // the same on the CPU device, by common/simt/mma.cpp

namespace simt {
enum class Factor { half, bfloat16, tf32 };
void load_matrices(uint32_t* fragment, int count, bool transposed, const void* row, const char* file, int line);
void mma(Factor factor, float* d, const uint32_t* a, const uint32_t* b, const char* file, int line);
void mma(double* d, const double* a, const double* b, const char* file, int line);
}  // namespace simt

__forceinline__ void load_matrices(uint32_t (&fragment)[4], const void* row, SIMT_CALLER) {
  simt::load_matrices(fragment, 4, false, row, file, line);
}
__forceinline__ void load_matrices(uint32_t (&fragment)[2], const void* row, SIMT_CALLER) {
  simt::load_matrices(fragment, 2, false, row, file, line);
}
__forceinline__ void load_matrices_transposed(uint32_t (&fragment)[4], const void* row, SIMT_CALLER) {
  simt::load_matrices(fragment, 4, true, row, file, line);
}
__forceinline__ void load_matrices_transposed(uint32_t (&fragment)[2], const void* row, SIMT_CALLER) {
  simt::load_matrices(fragment, 2, true, row, file, line);
}

template <typename T>
__forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], SIMT_CALLER) {
  static_assert(is_factor<T>, "tensor cores multiply half, bfloat16 or Tf32 here");
  using simt::Factor;
  constexpr Factor FACTOR = std::is_same_v<T, half>       ? Factor::half
                            : std::is_same_v<T, bfloat16> ? Factor::bfloat16
                                                          : Factor::tf32;
  simt::mma(FACTOR, d, a, b, file, line);
}
__forceinline__ void mma(double (&d)[4], const double (&a)[4], const double (&b)[2], SIMT_CALLER) {
  simt::mma(d, a, b, file, line);
}

__forceinline__ uint32_t to_tf32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return value == value ? (bits + 0x1000u) & 0xffffe000u : 0x7fffffffu;
}

#endif
