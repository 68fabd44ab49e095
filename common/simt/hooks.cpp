// What the compiler's instrumentation calls before every access of a kernel compiled with -fsanitize=thread, in place
// of libtsan, which is not linked: the access goes into the log of its lane.
#include <cstring>

#include "common/simt/log.h"

namespace simt {
namespace {

__attribute__((noinline)) void pause(Worker& worker) {
  Warp& warp = worker.warps[worker.warp];
  warp.paused |= 1u << worker.lane;
  warp.runnable &= ~(1u << worker.lane);
  yield(worker);
}

inline __attribute__((always_inline)) void append(uint64_t address, const void* pc, Op op, int log_size) {
  Here* place = here();
  Lane* lane = place->log;
  if (!lane) return;
  const uint32_t i = lane->count;
  lane->address[i * 32] = address;
  lane->key[i * 32] = make_key(uint32_t(uintptr_t(pc) - code_base), op, log_size);
  lane->count = i + 1;
  if (i + 1 >= lane->limit) pause(*place->worker);
}

inline __attribute__((always_inline)) void record(const void* address, const void* pc, Op op, int log_size) {
  const uintptr_t sp = stack_pointer();
  if (!on_fiber(sp) || on_fiber(uintptr_t(address))) return;
  append(uintptr_t(address), pc, op, log_size);
}

// An access of any length: the widest aligned pieces of at most 16 bytes.
void record_range(const void* address, size_t size, const void* pc, Op op) {
  uintptr_t a = uintptr_t(address);
  for (const uintptr_t end = a + size; a < end;) {
    int log_size = 4;
    while ((a & ((uintptr_t(1) << log_size) - 1)) || a + (uintptr_t(1) << log_size) > end) --log_size;
    record(reinterpret_cast<void*>(a), pc, op, log_size);
    a += uintptr_t(1) << log_size;
  }
}

}  // namespace

bool log_atomic(const void* address, int size, const void* caller) {
  record(address, caller, Op::atomic, size == 8 ? 3 : 2);
  Here* place = here();
  return place->log && hold_word(*place->worker, address);
}
void atomic_done(const void* address, bool stored) {
  xray_handed_on(address, stored ? Handing::atomic : Handing::relaxed_load);
}

namespace {

// Returns when all lanes of the warp wait, and what they did is counted.
void catch_up(Worker& worker) {
  Warp& warp = worker.warps[worker.warp];
  warp.catching_up |= 1u << worker.lane;
  warp.runnable &= ~(1u << worker.lane);
  yield(worker);
}

bool log_ordered(const void* address, int size, Op op, const void* caller) {
  Worker& worker = *here()->worker;
  probe(address);
  catch_up(worker);
  append(uintptr_t(address), caller, op, size == 8 ? 3 : 2);
  return follow_word(worker, address, make_key(uint32_t(uintptr_t(caller) - code_base), op, size == 8 ? 3 : 2));
}

}  // namespace

void xray_catch_up(Worker& worker) { catch_up(worker); }

bool xray_acquires(const void* address, int size, const void* caller) {
  return log_ordered(address, size, Op::acquire, caller);
}
bool xray_releases(const void* address, int size, const void* caller) {
  return log_ordered(address, size, Op::release, caller);
}
void xray_fence() {
  if (!order_is_kept) return;
  Worker& worker = *here()->worker;
  catch_up(worker);
  fence_order(worker);
}

void xray_copy(const void* to, const void* from, int size, bool inside, const void* caller) {
  append(with_part(uintptr_t(from), inside), caller, Op::copy_load, __builtin_ctz(unsigned(size)));
  append(uintptr_t(to), caller, Op::copy_store, __builtin_ctz(unsigned(size)));
}
void xray_copied(const void* to, int size, const void* caller) {
  append(uintptr_t(to), caller, Op::copied, __builtin_ctz(unsigned(size)));
}
void xray_store_row(const void* row, const void* caller) { append(uintptr_t(row), caller, Op::matrix_store, 4); }
void xray_matrix_row(const void* row, bool takes_part, const void* caller) {
  append(with_part(uintptr_t(row), takes_part), caller, Op::matrix_load, 4);
}

}  // namespace simt

#define PC __builtin_return_address(0)
#define HOOK extern "C" __attribute__((visibility("hidden"))) void
#define HOOKS(bytes, log_size)                                                                    \
  HOOK __tsan_read##bytes(void* a) { simt::record(a, PC, simt::Op::load, log_size); }             \
  HOOK __tsan_write##bytes(void* a) { simt::record(a, PC, simt::Op::store, log_size); }           \
  HOOK __tsan_unaligned_read##bytes(void* a) { simt::record(a, PC, simt::Op::load, log_size); }   \
  HOOK __tsan_unaligned_write##bytes(void* a) { simt::record(a, PC, simt::Op::store, log_size); } \
  HOOK __tsan_volatile_read##bytes(void* a) { simt::record(a, PC, simt::Op::load, log_size); }    \
  HOOK __tsan_volatile_write##bytes(void* a) { simt::record(a, PC, simt::Op::store, log_size); }
HOOKS(1, 0)
HOOKS(2, 1)
HOOKS(4, 2)
HOOKS(8, 3)
HOOKS(16, 4)
HOOK __tsan_read_range(void* a, size_t size) { simt::record_range(a, size, PC, simt::Op::load); }
HOOK __tsan_write_range(void* a, size_t size) { simt::record_range(a, size, PC, simt::Op::store); }
HOOK __tsan_func_entry(void*) {}
HOOK __tsan_func_exit() {}
HOOK __tsan_init() {}
HOOK __tsan_vptr_update(void**, void*) {}
extern "C" __attribute__((visibility("hidden"))) void* __tsan_memcpy(void* to, const void* from, size_t size) {
  simt::record_range(from, size, PC, simt::Op::load);
  simt::record_range(to, size, PC, simt::Op::store);
  return std::memcpy(to, from, size);
}
extern "C" __attribute__((visibility("hidden"))) void* __tsan_memmove(void* to, const void* from, size_t size) {
  simt::record_range(from, size, PC, simt::Op::load);
  simt::record_range(to, size, PC, simt::Op::store);
  return std::memmove(to, from, size);
}
extern "C" __attribute__((visibility("hidden"))) void* __tsan_memset(void* to, int value, size_t size) {
  simt::record_range(to, size, PC, simt::Op::store);
  return std::memset(to, value, size);
}

// C++ atomics in a kernel (and the guards of static variables on the host) come here.
#define ATOMIC_FETCH(T, bits, name)                                                 \
  HOOK_OF(T) __tsan_atomic##bits##_fetch_##name(volatile T* a, T value, int) {      \
    simt::record(const_cast<T*>(a), PC, simt::Op::atomic, __builtin_ctz(bits / 8)); \
    return __atomic_fetch_##name(a, value, __ATOMIC_SEQ_CST);                       \
  }
#define HOOK_OF(T) extern "C" __attribute__((visibility("hidden"))) T
#define ATOMICS(T, bits)                                                                                  \
  HOOK_OF(T) __tsan_atomic##bits##_load(const volatile T* a, int) {                                       \
    simt::record(const_cast<T*>(a), PC, simt::Op::atomic, __builtin_ctz(bits / 8));                       \
    return __atomic_load_n(a, __ATOMIC_SEQ_CST);                                                          \
  }                                                                                                       \
  HOOK_OF(void) __tsan_atomic##bits##_store(volatile T* a, T value, int) {                                \
    simt::record(const_cast<T*>(a), PC, simt::Op::atomic, __builtin_ctz(bits / 8));                       \
    __atomic_store_n(a, value, __ATOMIC_SEQ_CST);                                                         \
  }                                                                                                       \
  HOOK_OF(T) __tsan_atomic##bits##_exchange(volatile T* a, T value, int) {                                \
    simt::record(const_cast<T*>(a), PC, simt::Op::atomic, __builtin_ctz(bits / 8));                       \
    return __atomic_exchange_n(a, value, __ATOMIC_SEQ_CST);                                               \
  }                                                                                                       \
  HOOK_OF(int) __tsan_atomic##bits##_compare_exchange_strong(volatile T* a, T* seen, T value, int, int) { \
    simt::record(const_cast<T*>(a), PC, simt::Op::atomic, __builtin_ctz(bits / 8));                       \
    return __atomic_compare_exchange_n(a, seen, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);        \
  }                                                                                                       \
  HOOK_OF(T) __tsan_atomic##bits##_compare_exchange_val(volatile T* a, T seen, T value, int, int) {       \
    simt::record(const_cast<T*>(a), PC, simt::Op::atomic, __builtin_ctz(bits / 8));                       \
    __atomic_compare_exchange_n(a, &seen, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);              \
    return seen;                                                                                          \
  }                                                                                                       \
  HOOK_OF(int) __tsan_atomic##bits##_compare_exchange_weak(volatile T* a, T* seen, T value, int, int) {   \
    simt::record(const_cast<T*>(a), PC, simt::Op::atomic, __builtin_ctz(bits / 8));                       \
    return __atomic_compare_exchange_n(a, seen, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);        \
  }                                                                                                       \
  ATOMIC_FETCH(T, bits, add)                                                                              \
  ATOMIC_FETCH(T, bits, sub)                                                                              \
  ATOMIC_FETCH(T, bits, and)                                                                              \
  ATOMIC_FETCH(T, bits, or)                                                                               \
  ATOMIC_FETCH(T, bits, xor)
ATOMICS(uint8_t, 8)
ATOMICS(uint16_t, 16)
ATOMICS(uint32_t, 32)
ATOMICS(uint64_t, 64)
HOOK __tsan_atomic_thread_fence(int) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
HOOK __tsan_atomic_signal_fence(int) {}
