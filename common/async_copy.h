// cp.async: copies from global to shared memory that go on while the thread computes.
//
//   async_copy<16>(&tile[row][k], &a(row, k));  // issued: neither the thread nor its registers wait
//   async_commit();                             // what was issued since the last one is a group
//   ...                                         // other work, other groups
//   async_wait<0>();                            // the groups are done: this thread may read what it copied
//   __syncthreads();                            // and now every thread may read what all have copied
//
// From its issue to the wait for its group nobody, not even the thread itself, may touch what a copy fills or write
// what it reads. The CPU device makes it at that wait, as late as it may be made, and never if there is none.
#pragma once

#include "common/device.h"

#if defined(__CUDACC__)

// Issues a copy of BYTES = 4, 8 or 16; both places are aligned to BYTES. By 16 it goes past the first-level cache.
template <int BYTES>
__device__ __forceinline__ void async_copy(void* shared, const void* global) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes at a time");
  const unsigned to = unsigned(__cvta_generic_to_shared(shared));
  const size_t from = __cvta_generic_to_global(global);
  if constexpr (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}

// Copies if `inside`. If not, nothing is read, `global` may be any address, and the BYTES in shared memory become zero:
// so a tile is filled past the edge of its matrix. (cp.async also takes a number of bytes, but what is known only while
// running costs a dozen instructions a copy; a predicate costs none.)
template <int BYTES>
__device__ __forceinline__ void async_copy(void* shared, const void* global, bool inside) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes at a time");
  const unsigned to = unsigned(__cvta_generic_to_shared(shared));
  const size_t from = __cvta_generic_to_global(global);
  if constexpr (BYTES == 16) {
    asm volatile("{ .reg .pred out; setp.eq.s32 out, %2, 0; cp.async.cg.shared.global [%0], [%1], 16, out; }" ::"r"(to),
                 "l"(from), "r"(int(inside))
                 : "memory");
  } else {
    asm volatile("{ .reg .pred out; setp.eq.s32 out, %3, 0; cp.async.ca.shared.global [%0], [%1], %2, out; }" ::"r"(to),
                 "l"(from), "n"(BYTES), "r"(int(inside))
                 : "memory");
  }
}

// Makes a group of what this thread issued since the last one; also of nothing, so that the steps of a loop, its last
// ones too, count alike.
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the LEFT newest groups of this thread are under way. What the older ones brought is visible to
// this thread, after a barrier to all. Copies that are in no group yet are not waited for.
template <int LEFT>
__device__ __forceinline__ void async_wait() {
  static_assert(LEFT >= 0, "async_wait<LEFT> says how many groups may still be under way");
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

#else  // the same on the CPU device, by common/simt/async_copy.cpp

namespace simt {
void async_copy(void* shared, const void* global, int size, bool inside);
void async_commit();
void async_wait(int left);
}  // namespace simt

template <int BYTES>
__forceinline__ void async_copy(void* shared, const void* global, bool inside = true) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes at a time");
  simt::async_copy(shared, global, BYTES, inside);
}

__forceinline__ void async_commit() { simt::async_commit(); }

template <int LEFT>
__forceinline__ void async_wait() {
  static_assert(LEFT >= 0, "async_wait<LEFT> says how many groups may still be under way");
  simt::async_wait(LEFT);
}

#endif
