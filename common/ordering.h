// Order between the blocks of a launch: how one block hands data to another while both run.
//
//   // the block that gives, after its threads have written `data`
//   __syncthreads();                                             // all of it is written
//   if (thread == 0) store_release(&flag, 1u);                   // and whoever sees the 1 sees all of it
//
//   // the block that takes
//   if (thread == 0) while (load_acquire(&flag) == 0) spin_hint();
//   __syncthreads();                                             // what thread 0 has seen, all threads have seen
//   ... = data[thread];
//
// Without them there is no order: a plain load may be kept in a register for ever, plain stores may arrive in any order.
// The words are in global memory, aligned, of 4 or 8 bytes: integers, floats, or a struct of two halves that are to
// change together (alignas(8)). An atomic (atomicAdd, atomicExch, atomicCAS, ...) alone moves its word and orders
// nothing else; with a __threadfence() by the same thread before it, it releases as store_release does, with one after
// it, it acquires. A word hands on what all atomics since its last store_release have released into it, so that
//
//   __syncthreads();
//   if (thread == 0) {
//     __threadfence();
//     atomicAdd(&arrived, 1u);
//     while (load_acquire(&arrived) < blocks) spin_hint();
//   }
//   __syncthreads();
//
// is a barrier of the grid. Where a word of 8 bytes is all that is handed on, half of it the value and half of it what
// says that the value is there, no order is needed: load_relaxed and store_relaxed move the word, whole, and order
// nothing else, which on a GPU saves a fence and a look. A block may wait for blocks that have begun and must not count on others: take numbers by an
// atomicAdd(&ticket, 1u) where a block needs those before it, and launch no more blocks than the device keeps at once
// where all need all.
//
// The CPU device keeps 64 at once (simt::RESIDENT_BLOCKS). It lets other blocks run where all threads of one wait: at
// barriers, at spin_hint(), at a second look at the same word; in the random schedule also at any of these loads and
// stores, now and then. Blocks that wait for what never comes end in an error that says so, no hang.
//
// The x-ray keeps for each release what was done before it: by its thread all up to it, by the threads of its block all
// before their last common barrier, by lanes of its warp what a __syncwarp made known; and, by other blocks, what an
// acquire had brought by then. An acquire gives that to its thread, the next __syncthreads to the block, the next
// __syncwarp to the lanes. Two blocks that touch the same bytes, one of them writing, without being ordered that way are
// told as a block race, unless both do it by atomics or by the loads and stores of this header. Volatile accesses count
// as plain ones. Not seen: that a plain store comes too early for blocks that have only looked by load_acquire before it.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/device.h"

namespace detail {
template <typename T>
using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;

template <typename T>
constexpr bool is_word =
    (sizeof(T) == 4 || sizeof(T) == 8) && alignof(T) == sizeof(T) && std::is_trivially_copyable_v<T>;
}  // namespace detail

#if defined(__CUDACC__)

// The word, and with it all that the thread which stored it had done or seen before.
template <typename T>
__device__ __forceinline__ T load_acquire(const T* address) {
  static_assert(detail::is_word<T>, "load_acquire takes a word of 4 or 8 bytes, aligned to its size");
  detail::Word<T> word;
  if constexpr (sizeof(T) == 4) asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
  else asm volatile("ld.acquire.gpu.b64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
  return std::bit_cast<T>(word);
}

// Stores the word after all that this thread has done or seen.
template <typename T>
__device__ __forceinline__ void store_release(T* address, std::type_identity_t<T> value) {
  static_assert(detail::is_word<T>, "store_release takes a word of 4 or 8 bytes, aligned to its size");
  const auto word = std::bit_cast<detail::Word<T>>(value);
  if constexpr (sizeof(T) == 4) asm volatile("st.release.gpu.b32 [%0], %1;" ::"l"(address), "r"(word) : "memory");
  else asm volatile("st.release.gpu.b64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

// The word alone, as it is in the memory that all blocks share.
template <typename T>
__device__ __forceinline__ T load_relaxed(const T* address) {
  static_assert(detail::is_word<T>, "load_relaxed takes a word of 4 or 8 bytes, aligned to its size");
  detail::Word<T> word;
  if constexpr (sizeof(T) == 4) asm volatile("ld.relaxed.gpu.b32 %0, [%1];" : "=r"(word) : "l"(address) : "memory");
  else asm volatile("ld.relaxed.gpu.b64 %0, [%1];" : "=l"(word) : "l"(address) : "memory");
  return std::bit_cast<T>(word);
}

template <typename T>
__device__ __forceinline__ void store_relaxed(T* address, std::type_identity_t<T> value) {
  static_assert(detail::is_word<T>, "store_relaxed takes a word of 4 or 8 bytes, aligned to its size");
  const auto word = std::bit_cast<detail::Word<T>>(value);
  if constexpr (sizeof(T) == 4) asm volatile("st.relaxed.gpu.b32 [%0], %1;" ::"l"(address), "r"(word) : "memory");
  else asm volatile("st.relaxed.gpu.b64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
}

// In a loop that waits for another block: leaves the memory to those who work.
__device__ __forceinline__ void spin_hint() { __nanosleep(32); }

#else  // the same on the CPU device, by common/simt/ordering.cpp

namespace simt {
uint64_t load_acquire(const void* address, int size);
void store_release(void* address, uint64_t word, int size);
uint64_t load_relaxed(const void* address, int size);
void store_relaxed(void* address, uint64_t word, int size);
bool keep_order();  // as the module loads: its kernels order blocks, which the x-ray has to follow
[[maybe_unused]] static const bool order_is_kept = keep_order();
}  // namespace simt

template <typename T>
__forceinline__ T load_acquire(const T* address) {
  static_assert(detail::is_word<T>, "load_acquire takes a word of 4 or 8 bytes, aligned to its size");
  return std::bit_cast<T>(detail::Word<T>(simt::load_acquire(address, sizeof(T))));
}

template <typename T>
__forceinline__ void store_release(T* address, std::type_identity_t<T> value) {
  static_assert(detail::is_word<T>, "store_release takes a word of 4 or 8 bytes, aligned to its size");
  simt::store_release(address, std::bit_cast<detail::Word<T>>(value), sizeof(T));
}

template <typename T>
__forceinline__ T load_relaxed(const T* address) {
  static_assert(detail::is_word<T>, "load_relaxed takes a word of 4 or 8 bytes, aligned to its size");
  return std::bit_cast<T>(detail::Word<T>(simt::load_relaxed(address, sizeof(T))));
}

template <typename T>
__forceinline__ void store_relaxed(T* address, std::type_identity_t<T> value) {
  static_assert(detail::is_word<T>, "store_relaxed takes a word of 4 or 8 bytes, aligned to its size");
  simt::store_relaxed(address, std::bit_cast<detail::Word<T>>(value), sizeof(T));
}

__forceinline__ void spin_hint() { __nanosleep(32); }

#endif
