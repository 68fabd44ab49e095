// Asynchronous copies on the CPU device: kept for each thread and made at the wait that asks for their group, as late
// as a GPU may make them. Whoever forgets the wait, or the commit, finds in shared memory what was there before.
#include "common/async_copy.h"

#include "common/simt/runtime.h"

namespace simt {
namespace {

// Memory is asked for while no signal may end the fiber: the heap's lock would stay taken.
struct Busy {
  Worker& worker;
  explicit Busy(Worker& worker) : worker(worker) { worker.busy.store(true, std::memory_order_relaxed); }
  ~Busy() { worker.busy.store(false, std::memory_order_relaxed); }
};

Copies& copies_of(Worker& worker) {
  if (worker.copies.empty()) worker.copies.resize(MAX_THREADS);
  worker.copies_used = true;
  return worker.copies[size_t(worker.warp * 32 + worker.lane)];
}

}  // namespace

void async_copy(void* shared, const void* global, int size, bool inside) {
  const void* const caller = __builtin_return_address(0);
  Worker& worker = *here()->worker;
  xray_copy(shared, global, size, inside, caller);
  if (inside) probe(global);
  probe(shared);  // here and not at the wait, which is another line
  const Busy busy(worker);
  Copies& copies = copies_of(worker);
  copies.waiting.push_back({shared, global, copies.groups, size, inside});
}

void async_commit() {
  Worker& worker = *here()->worker;
  const Busy busy(worker);
  ++copies_of(worker).groups;
}

void async_wait(int left) {
  const void* const caller = __builtin_return_address(0);
  Worker& worker = *here()->worker;
  if (!worker.copies_used) return;
  Copies& copies = copies_of(worker);
  const auto first = copies.waiting.begin(), end = copies.waiting.end();
  auto copy = first;
  for (; copy != end && int64_t(copy->group) + left < int64_t(copies.groups); ++copy) {
    if (copy->inside) std::memcpy(copy->to, copy->from, size_t(copy->size));
    else std::memset(copy->to, 0, size_t(copy->size));
    xray_copied(copy->to, copy->size, caller);
  }
  copies.waiting.erase(first, copy);
}

void drop_copies(Worker& worker) {
  for (int t = 0; t < worker.thread_count; ++t) {
    worker.copies[size_t(t)].waiting.clear();
    worker.copies[size_t(t)].groups = 0;
  }
  worker.copies_used = false;
}

}  // namespace simt
