// The CPU device, as a kernel sees it: CUDA's qualifiers, built-in variables, barriers, warp operations and atomics.
//
// Each CUDA thread is a fiber with a stack of its own. A thread runs until it must wait (at a barrier, for the other
// lanes of a warp operation, or because the x-ray's log is full), then the next one continues; a block stays on one OS
// thread, so its `static thread_local` variables are its shared memory. The scheduler is in runtime.cpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __constant__ static const
// The tag becomes a part of the variable's symbol, by which the CPU device knows shared memory from other variables.
#if defined(__clang__)
#define __shared__ static thread_local __attribute__((abi_tag("shared")))
#else  // constinit, so that g++ does not ask at every use whether it is constructed
#define __shared__ static thread_local constinit __attribute__((abi_tag("shared")))
#endif
#define __restrict__ __restrict
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

// Code of the device itself, which the x-ray must not see as the kernel's.
#if defined(__clang__)
#define SIMT_UNSEEN __attribute__((disable_sanitizer_instrumentation))
#else
#define SIMT_UNSEEN __attribute__((no_sanitize("thread")))
#endif

// Where in the source a call stands, at no cost while it runs: default arguments take the caller's place.
#define SIMT_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()

// ---- vector types -------------------------------------------------------------------------------------------------
// Copied through one wide access, as the GPU does, so that the x-ray sees 16 bytes where the code says float4; inlined
// always, so that it sees them in the kernel's line.
namespace simt {
template <typename T, int N>
__forceinline__ void copy_wide(void* to, const void* from) {
  typedef T Wide __attribute__((vector_size(sizeof(T) * N), may_alias));
  *static_cast<Wide*>(to) = *static_cast<const Wide*>(from);
}
}  // namespace simt

#define SIMT_WIDE(name, T, N)                                                      \
  name() = default;                                                                \
  __forceinline__ name(const name& other) { simt::copy_wide<T, N>(this, &other); } \
  __forceinline__ name& operator=(const name& other) {                             \
    simt::copy_wide<T, N>(this, &other);                                           \
    return *this;                                                                  \
  }

#define SIMT_VECTOR2(name, T)          \
  struct alignas(2 * sizeof(T)) name { \
    T x, y;                            \
    name(T x, T y) : x(x), y(y) {}     \
    SIMT_WIDE(name, T, 2)              \
  };                                   \
  inline name make_##name(T x, T y) { return {x, y}; }

#define SIMT_VECTOR4(name, T)                            \
  struct alignas(4 * sizeof(T)) name {                   \
    T x, y, z, w;                                        \
    name(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {} \
    SIMT_WIDE(name, T, 4)                                \
  };                                                     \
  inline name make_##name(T x, T y, T z, T w) { return {x, y, z, w}; }

// clang-format off
SIMT_VECTOR2(float2, float)
SIMT_VECTOR4(float4, float)
SIMT_VECTOR2(int2, int)
SIMT_VECTOR4(int4, int)
SIMT_VECTOR2(uint2, unsigned)
SIMT_VECTOR4(uint4, unsigned)
SIMT_VECTOR2(double2, double)
// clang-format on

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

// ---- where a thread is --------------------------------------------------------------------------------------------
namespace simt {

struct Worker;
struct Thread;
struct Lane;

// Stacks are aligned to their size, so a thread finds its own record from the stack pointer alone: no thread-local
// lookup, nothing to rewrite when another thread continues.
constexpr uintptr_t STACK_SIZE = 64 * 1024;

struct alignas(64) Here {
  uint3 thread, block;
  dim3 block_size, grid_size;
  Worker* worker;
  Thread* self;
  Lane* log;  // the x-ray's, null without it
};

SIMT_UNSEEN inline __attribute__((always_inline)) uintptr_t stack_pointer() {
  uintptr_t sp;
#if defined(__x86_64__)
  asm("mov %%rsp, %0" : "=r"(sp));
#elif defined(__aarch64__)
  asm("mov %0, sp" : "=r"(sp));
#else
#error "the CPU device knows x86-64 and aarch64"
#endif
  return sp;
}

// Stacks lie 64 KiB apart, so equal places in them share cache sets; each has its record, and all below it, three lines
// lower than its neighbour.
SIMT_UNSEEN inline __attribute__((always_inline)) Here* here_of(uintptr_t sp) {
  const uintptr_t top = (sp | (STACK_SIZE - 1)) + 1;
  return reinterpret_cast<Here*>(top - sizeof(Here) - 3 * (sp / (STACK_SIZE / 64) & 63 * 64));
}
SIMT_UNSEEN inline __attribute__((always_inline)) Here* here() { return here_of(stack_pointer()); }

}  // namespace simt

#define threadIdx (::simt::here()->thread)
#define blockIdx (::simt::here()->block)
#define blockDim (::simt::here()->block_size)
#define gridDim (::simt::here()->grid_size)
constexpr int warpSize = 32;

// ---- waiting ------------------------------------------------------------------------------------------------------
namespace simt {

// Waits until all threads of the block that have not returned are at the barrier.
void barrier(const char* what, const char* file, int line);

// Waits until all lanes of `mask` have come to the same operation; then one of them runs operation(arguments, mask) for
// all, arguments[lane] being what that lane brought, and all continue.
using WarpOperation = void (*)(void* const* arguments, unsigned mask);
void meet(unsigned mask, WarpOperation operation, void* argument, const char* what, const char* file, int line);
void meet_and_order(unsigned mask, const char* what, const char* file, int line);  // __syncwarp: memory too

unsigned active_mask();
void fence(bool for_blocks);
void* dynamic_shared();
// Lets others run: called where a thread may be waiting in a loop, or is, for what another block does.
void spin(const void* caller, bool for_blocks = false);
[[noreturn]] void trap(const char* why, const char* file, int line);
unsigned lane_id();

}  // namespace simt

inline void __syncthreads(SIMT_CALLER) { simt::barrier("__syncthreads", file, line); }
inline void __syncwarp(unsigned mask = 0xffffffffu, SIMT_CALLER) {
  simt::meet_and_order(mask, "__syncwarp", file, line);
}
inline void __threadfence() { simt::fence(true); }
inline void __threadfence_block() { simt::fence(false); }
inline __attribute__((noinline)) void __nanosleep(unsigned) { simt::spin(__builtin_return_address(0), true); }
[[noreturn]] inline void __trap(SIMT_CALLER) { simt::trap("__trap", file, line); }
inline unsigned __activemask() { return simt::active_mask(); }

// ---- barriers that count ------------------------------------------------------------------------------------------
namespace simt {
int barrier_count(int predicate, const char* what, const char* file, int line, int* threads);
}
inline int __syncthreads_count(int predicate, SIMT_CALLER) {
  return simt::barrier_count(predicate, "__syncthreads_count", file, line, nullptr);
}
inline int __syncthreads_or(int predicate, SIMT_CALLER) {
  return simt::barrier_count(predicate, "__syncthreads_or", file, line, nullptr) != 0;
}
inline int __syncthreads_and(int predicate, SIMT_CALLER) {
  int threads = 0;
  const int yes = simt::barrier_count(predicate, "__syncthreads_and", file, line, &threads);
  return yes == threads;
}

// ---- warp operations ----------------------------------------------------------------------------------------------
namespace simt {

template <typename T>
struct Shuffle {
  T value, result;
  int source;  // lane to read, -1: none, the own value stays
};

template <typename T>
SIMT_UNSEEN void shuffle_all(void* const* arguments, unsigned mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    auto* own = static_cast<Shuffle<T>*>(arguments[lane]);
    const int source = own->source < 0 ? lane : own->source;
    // A lane outside the mask has nothing to give; CUDA leaves the value undefined, here it is poison.
    if (mask >> source & 1) own->result = static_cast<Shuffle<T>*>(arguments[source])->value;
    else std::memset(static_cast<void*>(&own->result), 0xff, sizeof(T));
  }
}

template <typename T>
SIMT_UNSEEN T shuffle(unsigned mask, T value, int source, const char* what, const char* file, int line) {
  static_assert(std::is_trivially_destructible_v<T> && sizeof(T) <= 16);
  Shuffle<T> argument{value, value, source};
  meet(mask, shuffle_all<T>, &argument, what, file, line);
  return argument.result;
}

struct Vote {
  unsigned predicate, result;
};
template <typename T>
struct Match {
  T value;
  unsigned result;
};

SIMT_UNSEEN inline void ballot_all(void* const* arguments, unsigned mask) {
  unsigned result = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) result |= unsigned(static_cast<Vote*>(arguments[lane])->predicate != 0) << lane;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) static_cast<Vote*>(arguments[lane])->result = result;
  }
}

SIMT_UNSEEN inline unsigned ballot(unsigned mask, int predicate, const char* what, const char* file, int line) {
  Vote argument{unsigned(predicate != 0), 0};
  meet(mask, ballot_all, &argument, what, file, line);
  return argument.result;
}

template <typename T>
SIMT_UNSEEN void match_all(void* const* arguments, unsigned mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    auto* own = static_cast<Match<T>*>(arguments[lane]);
    own->result = 0;
    for (int other = 0; other < 32; ++other) {
      if (mask >> other & 1 && static_cast<Match<T>*>(arguments[other])->value == own->value)
        own->result |= 1u << other;
    }
  }
}

struct Add {
  template <typename T>
  static T apply(T a, T b) {
    return a + b;
  }
};
struct Min {
  template <typename T>
  static T apply(T a, T b) {
    return b < a ? b : a;
  }
};
struct Max {
  template <typename T>
  static T apply(T a, T b) {
    return a < b ? b : a;
  }
};
struct And {
  template <typename T>
  static T apply(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <typename T>
  static T apply(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <typename T>
  static T apply(T a, T b) {
    return a ^ b;
  }
};
struct Exchange {
  template <typename T>
  static T apply(T, T b) {
    return b;
  }
};

template <typename T, typename Operation>
SIMT_UNSEEN void reduce_all(void* const* arguments, unsigned mask) {
  const int first = __builtin_ctz(mask);
  T sum = *static_cast<T*>(arguments[first]);
  for (int lane = first + 1; lane < 32; ++lane) {
    if (mask >> lane & 1) sum = Operation::apply(sum, *static_cast<T*>(arguments[lane]));
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) *static_cast<T*>(arguments[lane]) = sum;
  }
}

template <typename Operation, typename T>
SIMT_UNSEEN T reduce(unsigned mask, T value, const char* what, const char* file, int line) {
  meet(mask, reduce_all<T, Operation>, &value, what, file, line);
  return value;
}

}  // namespace simt

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, SIMT_CALLER) {
  const int lane = int(simt::lane_id());
  return simt::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), "__shfl_sync", file, line);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, SIMT_CALLER) {
  const int lane = int(simt::lane_id()), source = lane ^ flip;
  return simt::shuffle(mask, value, source < (lane & ~(width - 1)) + width ? source : -1, "__shfl_xor_sync", file,
                       line);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_CALLER) {
  const int lane = int(simt::lane_id()), source = lane - int(delta);
  return simt::shuffle(mask, value, source >= (lane & ~(width - 1)) ? source : -1, "__shfl_up_sync", file, line);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SIMT_CALLER) {
  const int lane = int(simt::lane_id()), source = lane + int(delta);
  return simt::shuffle(mask, value, source < (lane & ~(width - 1)) + width ? source : -1, "__shfl_down_sync", file,
                       line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SIMT_CALLER) {
  return simt::ballot(mask, predicate, "__ballot_sync", file, line);
}
inline int __any_sync(unsigned mask, int predicate, SIMT_CALLER) {
  return simt::ballot(mask, predicate, "__any_sync", file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SIMT_CALLER) {
  return simt::ballot(mask, predicate, "__all_sync", file, line) == mask;
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value, SIMT_CALLER) {
  simt::Match<T> argument{value, 0};
  simt::meet(mask, simt::match_all<T>, &argument, "__match_any_sync", file, line);
  return argument.result;
}

#define SIMT_REDUCE(name, Operation)                                        \
  template <typename T>                                                     \
  T name(unsigned mask, T value, SIMT_CALLER) {                             \
    static_assert(std::is_integral_v<T>, "CUDA reduces integers this way"); \
    return simt::reduce<simt::Operation>(mask, value, #name, file, line);   \
  }
SIMT_REDUCE(__reduce_add_sync, Add)
SIMT_REDUCE(__reduce_min_sync, Min)
SIMT_REDUCE(__reduce_max_sync, Max)
SIMT_REDUCE(__reduce_and_sync, And)
SIMT_REDUCE(__reduce_or_sync, Or)
SIMT_REDUCE(__reduce_xor_sync, Xor)

// ---- atomics ------------------------------------------------------------------------------------------------------
namespace simt {

// Tells the x-ray, and does nothing without it. True: it wants to know when the atomic is done.
bool log_atomic(const void* address, int size, const void* caller);
void atomic_done(const void* address, bool stored);

template <typename Operation, typename T>
SIMT_UNSEEN __attribute__((always_inline)) inline T atomic(T* address, T value, const void* caller) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8);
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  auto* word = reinterpret_cast<Word*>(address);
  const bool watched = log_atomic(address, sizeof(T), caller);
  Word seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    T old, next;
    std::memcpy(&old, &seen, sizeof(T));
    next = Operation::apply(old, value);
    Word desired;
    std::memcpy(&desired, &next, sizeof(T));
    if (!__atomic_compare_exchange_n(word, &seen, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) continue;
    if (watched) atomic_done(address, true);
    if (desired == seen) spin(caller);  // nothing changed: this may be a loop that waits for someone
    return old;
  }
}

template <typename T>
SIMT_UNSEEN __attribute__((always_inline)) inline T compare_and_swap(T* address, T expected, T desired,
                                                                     const void* caller) {
  const bool watched = log_atomic(address, sizeof(T), caller);
  T seen = expected;
  __atomic_compare_exchange_n(address, &seen, desired, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  if (watched) atomic_done(address, seen == expected);
  if (seen != expected) spin(caller);  // someone else was first: let them finish
  return seen;
}

}  // namespace simt

// Not inlined, so that the x-ray can name the line of the call.
#define SIMT_ATOMIC(name, Operation)                                                        \
  template <typename T>                                                                     \
  SIMT_UNSEEN __attribute__((noinline)) T name(T* address, std::type_identity_t<T> value) { \
    return simt::atomic<simt::Operation>(address, value, __builtin_return_address(0));      \
  }
SIMT_ATOMIC(atomicAdd, Add)
SIMT_ATOMIC(atomicMin, Min)
SIMT_ATOMIC(atomicMax, Max)
SIMT_ATOMIC(atomicAnd, And)
SIMT_ATOMIC(atomicOr, Or)
SIMT_ATOMIC(atomicXor, Xor)
SIMT_ATOMIC(atomicExch, Exchange)
template <typename T>
SIMT_UNSEEN __attribute__((noinline)) T atomicCAS(T* address, std::type_identity_t<T> expected,
                                                  std::type_identity_t<T> desired) {
  return simt::compare_and_swap(address, expected, desired, __builtin_return_address(0));
}

// ---- small things -------------------------------------------------------------------------------------------------
template <typename T>
T __ldg(const T* address) {
  return *address;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
using std::max;
using std::min;
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __double2hiint(double x) { return int(std::bit_cast<uint64_t>(x) >> 32); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __fdividef(float a, float b) { return a / b; }
