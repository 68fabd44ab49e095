// Release and acquire on the CPU device: the accesses themselves, and where others get to run.
#include "common/ordering.h"

#include "common/simt/runtime.h"

namespace simt {
namespace {

constexpr int MANY_LOOKS = 64;  // at one word after another: perhaps in a loop that waits for one of them

// In the random schedule others run between any two steps of a protocol, also where nobody has to wait.
void perhaps_let_others_run(Worker& worker, const void* caller) {
  if (config.order == Order::random && next_random(worker.random) % 4 == 0) spin(caller, true);
}

// `what`: acquire or release, or what orders nothing without a fence.
uint64_t load(const void* address, int size, Handing what, const void* caller) {
  Here& place = *here();
  Worker& worker = *place.worker;
  Looks& looks = worker.looks[place.self - worker.threads];
  if (looks.last == address || looks.count == MANY_LOOKS) spin(caller, true);  // a loop that waits
  else perhaps_let_others_run(worker, caller);
  looks.last = address, ++looks.count;
  worker.looked = true;
  const bool held = place.log && xray_acquires(address, size, caller);
  const uint64_t word = size == 4 ? __atomic_load_n(static_cast<const uint32_t*>(address), __ATOMIC_ACQUIRE)
                                  : __atomic_load_n(static_cast<const uint64_t*>(address), __ATOMIC_ACQUIRE);
  if (held) xray_handed_on(address, what);
  return word;
}

void store(void* address, uint64_t word, int size, Handing what, const void* caller) {
  Here& place = *here();
  Worker& worker = *place.worker;
  perhaps_let_others_run(worker, caller);
  const bool held = place.log && xray_releases(address, size, caller);
  if (size == 4) __atomic_store_n(static_cast<uint32_t*>(address), uint32_t(word), __ATOMIC_RELEASE);
  else __atomic_store_n(static_cast<uint64_t*>(address), word, __ATOMIC_RELEASE);
  if (held) xray_handed_on(address, what);
  increment(worker.switches);  // this may be what others wait for
  perhaps_let_others_run(worker, caller);
}

}  // namespace

uint64_t load_acquire(const void* address, int size) {
  return load(address, size, Handing::acquire, __builtin_return_address(0));
}
void store_release(void* address, uint64_t word, int size) {
  store(address, word, size, Handing::release, __builtin_return_address(0));
}
uint64_t load_relaxed(const void* address, int size) {
  return load(address, size, Handing::relaxed_load, __builtin_return_address(0));
}
void store_relaxed(void* address, uint64_t word, int size) {
  store(address, word, size, Handing::relaxed_store, __builtin_return_address(0));
}

void fence(bool for_blocks) {
  if (for_blocks && here()->log) xray_fence();
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

}  // namespace simt
