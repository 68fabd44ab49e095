// Vector<T, N>: N values that move by one instruction, 4, 8 or 16 bytes wide.
//
//   const Vector<float, 4> part = *reinterpret_cast<const Vector<float, 4>*>(&tile[row][k]);  // LDS.128
//   const auto part = load_vector<4>(&tile[row][k]);                                           // the same
//   store_vector(&c(row, col), part);
//
//   double numbers[4];
//   load_row(numbers, &tile[row][k]);  // all of an array, 16 bytes at a time: two loads, one if the tile is of float
//   store_row(&tile[row][k], numbers);
//
// The place is aligned to the whole width: a GPU refuses another one, the x-ray tells it.
#pragma once

#include "common/device.h"

template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  static constexpr int BYTES = int(sizeof(T)) * N;
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "one instruction moves 4, 8 or 16 bytes");

  T value[N];

  __host__ __device__ T& operator[](int i) { return value[i]; }
  __host__ __device__ const T& operator[](int i) const { return value[i]; }

#if !defined(__CUDACC__)
  SIMT_WIDE(Vector, uint32_t, BYTES / 4)  // a compiler for a CPU might copy value by value
#endif
};

template <int N, typename T>
__device__ __forceinline__ Vector<T, N> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}

template <typename T, int N>
__device__ __forceinline__ void store_vector(T* to, const Vector<T, N>& vector) {
  *reinterpret_cast<Vector<T, N>*>(to) = vector;
}

// COUNT neighbours, by as few loads as there can be.
template <int COUNT, typename From, typename T>
__device__ __forceinline__ void load_row(T (&values)[COUNT], const From* from) {
  constexpr int WIDE = COUNT * int(sizeof(From)) < 16 ? COUNT : 16 / int(sizeof(From));
  UNROLL
  for (int k = 0; k < COUNT; k += WIDE) {
    const auto group = load_vector<WIDE>(from + k);
    UNROLL
    for (int i = 0; i < WIDE; ++i) values[k + i] = T(group[i]);
  }
}

// And by as few stores.
template <int COUNT, typename To, typename T>
__device__ __forceinline__ void store_row(To* to, const T (&values)[COUNT]) {
  constexpr int WIDE = COUNT * int(sizeof(To)) < 16 ? COUNT : 16 / int(sizeof(To));
  UNROLL
  for (int k = 0; k < COUNT; k += WIDE) {
    Vector<To, WIDE> group;
    UNROLL
    for (int i = 0; i < WIDE; ++i) group[i] = To(values[k + i]);
    store_vector(to + k, group);
  }
}
