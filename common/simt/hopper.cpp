// Hopper's machine on the CPU device: barriers that count bytes, copies of boxes, products of a warpgroup. All that goes
// on by itself there is done here as late as it may be: a box comes when no thread can run without it, a product is made
// when its group is waited for, a box goes to global memory when its thread waits for that, or never.
#include "common/hopper.h"

#include <deque>
#include <unordered_map>

#include "common/simt/xray.h"

namespace simt {
namespace {

constexpr int REGISTERS = 65536;  // of a multiprocessor
constexpr int GROUPS = MAX_WARPS / 4;
constexpr int NAMED = 16;
constexpr int MOST_BLOCKS = MAX_THREADS / WARPGROUP;  // of a cluster

// Memory is asked for while no signal may end the fiber: the heap's lock would stay taken.
struct Busy {
  Worker& worker;
  explicit Busy(Worker& worker) : worker(worker) { worker.busy.store(true, std::memory_order_relaxed); }
  ~Busy() { worker.busy.store(false, std::memory_order_relaxed); }
};

struct Barrier {
  int arrivals = 0, left = 0;  // that a phase takes, that it still lacks
  int64_t bytes = 0;           // that it still lacks
  uint32_t phase = 0;
  Knowledge gathered, known;  // what those who arrived had done: in this phase, in the last one
};

struct Load {
  std::vector<Chunk> chunks;
  Barrier* barrier;
  const void* place;  // of the barrier
  int bytes;
};

struct Store {
  std::vector<Chunk> chunks;
  uint32_t group;
};
struct Stores {
  std::deque<Store> waiting;
  uint32_t groups = 0;
};

struct Asked {
  Product product;
  float* sum;
  uint32_t group;
};
struct Products {
  std::deque<Asked> waiting;
  uint32_t groups = 0;
  bool fenced = false;
};

// A barrier of some of the threads: of those that a number names, or of a warpgroup.
struct Meeting {
  int here = 0, threads = 0;
  uint64_t times = 0;  // that it was met
  Knowledge gathered, known;
};

// What a thread waits for.
struct Event {
  enum Kind { none, phase, meeting, registers } kind = none;
  const Barrier* barrier = nullptr;
  const void* place = nullptr;
  uint32_t parity = 0;
  const Meeting* met = nullptr;
  uint64_t times = 0;
  int count = 0, rank = 0;  // of registers, and whose
};

}  // namespace

struct Hopper {
  std::unordered_map<const void*, Barrier> barriers;
  std::deque<Load> loads;
  std::vector<Stores> stores;
  std::vector<Products> products;
  std::vector<Event> events;
  Meeting groups[GROUPS], cluster;
  struct Block {
    Meeting named[NAMED], all;
    int registers_free = 0;
  } blocks[MOST_BLOCKS];
  int registers[MAX_WARPS] = {};  // of each thread of a warp
};

namespace {

int current(const Worker& worker) { return worker.warp * 32 + worker.lane; }
int own_rank(const Worker& worker) { return worker.rank_of(current(worker)); }

// The same place in another block of the cluster.
uintptr_t in_block(const Worker& worker, const void* place, int rank) {
  return uintptr_t(place) + uintptr_t(int64_t(rank - own_rank(worker)) * int64_t(worker.block_shared));
}

Hopper& hopper_of(Worker& worker) {
  if (worker.hopper_used) return *worker.hopper;
  const Busy busy(worker);
  worker.hopper = std::make_shared<Hopper>();
  Hopper& hopper = *worker.hopper;
  const auto threads = size_t(worker.thread_count);
  hopper.stores.resize(threads), hopper.products.resize(threads), hopper.events.resize(threads);
  const int each = std::min(255, REGISTERS / worker.block_threads) / 8 * 8;
  std::fill(std::begin(hopper.registers), std::end(hopper.registers), each);
  for (auto& block : hopper.blocks) block.registers_free = REGISTERS - each * worker.block_threads;
  worker.hopper_used = true;
  if (worker.xray) xray_begin_knowledge(worker);
  return hopper;
}

bool has_come(const Hopper& hopper, const Event& event) {
  switch (event.kind) {
    case Event::phase: return (event.barrier->phase & 1) != event.parity;
    case Event::meeting: return event.met->times != event.times;
    case Event::registers: return hopper.blocks[event.rank].registers_free >= event.count;
    case Event::none: break;
  }
  return true;
}

// Lets all threads go on whose event has come, at once, so that the lanes of a warp stay together.
void wake(Worker& worker) {
  const Hopper& hopper = *worker.hopper;
  for (int w = 0; w < worker.warp_count; ++w) {
    Warp& warp = worker.warps[w];
    for (unsigned rest = warp.waiting; rest; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      if (!has_come(hopper, hopper.events[size_t(w * 32 + lane)])) continue;
      warp.waiting &= ~(1u << lane), warp.runnable |= 1u << lane;
      worker.runnable_warps |= 1u << w;
    }
  }
  increment(worker.switches);
}

void wait_for(Worker& worker, const Event& event, const char* what, const char* file, int line) {
  Hopper& hopper = *worker.hopper;
  Thread& thread = worker.current();
  Warp& warp = worker.warps[worker.warp];
  hopper.events[size_t(current(worker))] = event;
  thread.wait = Wait::event;
  thread.what = what, thread.file = file, thread.line = line;
  warp.waiting |= 1u << worker.lane;
  warp.runnable &= ~(1u << worker.lane);
  yield(worker);
  thread.wait = Wait::nothing;
}

[[noreturn]] void refuse(Worker& worker, const std::string& why, const char* file, int line) {
  const char* slash = std::strrchr(file, '/');
  fail(worker, head(worker) + "thread " + describe(here()->thread) + ", " + (slash ? slash + 1 : file) + ":" +
                   std::to_string(line) + ": " + why);
}

// ---- barriers -----------------------------------------------------------------------------------------------------
std::string place_in(const Worker& worker, const void* place) {
  const auto offset = static_cast<const char*>(place) - worker.dynamic_shared;
  if (offset < 0 || size_t(offset) >= size_t(worker.cluster) * worker.block_shared)
    return "outside of dynamic shared memory";
  std::string text = "at byte " + std::to_string(size_t(offset) % worker.block_shared) + " of dynamic shared memory";
  if (worker.cluster > 1) text += " of block " + std::to_string(size_t(offset) / worker.block_shared);
  return text;
}

Barrier& barrier_at(Worker& worker, const void* place, const char* what, const char* file, int line) {
  Hopper& hopper = hopper_of(worker);
  const auto found = hopper.barriers.find(place);
  if (found == hopper.barriers.end()) {
    refuse(worker, std::string(what) + ": the barrier " + place_in(worker, place) + " has had no init", file, line);
  }
  return found->second;
}

void end_phase(Worker& worker, Barrier& barrier) {
  if (barrier.left || barrier.bytes) return;
  ++barrier.phase;
  barrier.left = barrier.arrivals;
  barrier.known.swap(barrier.gathered);
  barrier.gathered.clear();
  wake(worker);
}

// ---- copies -------------------------------------------------------------------------------------------------------
uintptr_t swap_chunks(uintptr_t address) { return address ^ (address >> 7 & 7) << 4; }

// The 16-byte chunks of a box, in shared memory and, as far as the matrix goes, in global memory.
std::vector<Chunk> chunks_of(const TensorMap& map, int64_t along, int64_t across, const void* shared) {
  std::vector<Chunk> chunks;
  chunks.reserve(size_t(map.box_height) * 8);
  const int wide = 16 / map.itemsize;
  for (int row = 0; row < map.box_height; ++row) {
    for (int chunk = 0; chunk < 8; ++chunk) {
      const int64_t i = along + chunk * wide, j = across + row;
      const bool inside = j >= 0 && j < map.height && i >= 0 && i < map.width;
      const int64_t bytes = inside ? std::min<int64_t>(wide, map.width - i) * map.itemsize : 0;
      chunks.push_back({swap_chunks(uintptr_t(shared) + size_t(row) * 128 + size_t(chunk) * 16),
                        inside ? uintptr_t(map.data) + uintptr_t(j * map.pitch + i * map.itemsize) : 0, int(bytes)});
    }
  }
  return chunks;
}

void check_box(Worker& worker, const void* shared, const char* what, const char* file, int line) {
  if (uintptr_t(shared) % 1024 == 0) return;
  refuse(worker, std::string(what) + ": the box " + place_in(worker, shared) + " does not begin at a multiple of 1024",
         file, line);
}

void land(Worker& worker, Hopper& hopper, size_t which) {
  const Busy busy(worker);
  const Load load = std::move(hopper.loads[which]);
  hopper.loads.erase(hopper.loads.begin() + int64_t(which));
  for (const Chunk& chunk : load.chunks) {
    char* const to = reinterpret_cast<char*>(chunk.shared);
    std::memset(to, 0, 16);
    if (chunk.bytes) std::memcpy(to, reinterpret_cast<const void*>(chunk.global), size_t(chunk.bytes));
  }
  if (worker.xray) xray_landed(worker, load.chunks, load.place, load.barrier->gathered);
  load.barrier->bytes -= load.bytes;
  end_phase(worker, *load.barrier);
}

// Which of the copies under way comes next: nothing says that they come in the order in which they were asked for.
void land_one(Worker& worker, Hopper& hopper) {
  const size_t count = hopper.loads.size();
  land(worker, hopper,
       config.order == Order::forward   ? 0
       : config.order == Order::reverse ? count - 1
                                        : size_t(next_random(worker.random) % count));
}

// ---- products -----------------------------------------------------------------------------------------------------
// The place of element k of row or column i, that of the first element being given.
uintptr_t element(const void* first, bool by_k, int i, int k) {
  const auto begin = uintptr_t(first);
  return swap_chunks(by_k ? begin + size_t(i) * 128 + size_t(k) * 2
                          : begin + size_t(i / BOX) * DEPTH * 128 + size_t(k) * 128 + size_t(i % BOX) * 2);
}

void read_operand(std::vector<float>& to, const void* first, bool by_k, int count, bool is_half) {  // [k][i]
  to.resize(size_t(16 * count));
  for (int k = 0; k < 16; ++k) {
    for (int i = 0; i < count; ++i) {
      uint16_t bits;
      std::memcpy(&bits, reinterpret_cast<const void*>(element(first, by_k, i, k)), 2);
      to[size_t(k * count + i)] = is_half ? half_to_float(bits) : std::bit_cast<float>(uint32_t(bits) << 16);
    }
  }
}

std::vector<Chunk> operands_of(const Product& product) {
  std::vector<Chunk> chunks;
  const auto add = [&](const void* first, bool by_k, int count) {
    for (int i = 0; i < count; i += by_k ? 1 : 8) {
      for (int k = 0; k < 16; k += by_k ? 8 : 1) chunks.push_back({element(first, by_k, i, k), 0, 16});
    }
  };
  add(product.a, product.a_by_k, 64), add(product.b, product.b_by_k, product.columns);
  return chunks;
}

bool same(const Product& x, const Product& y) {
  return x.a == y.a && x.b == y.b && x.columns == y.columns && x.is_half == y.is_half && x.a_by_k == y.a_by_k &&
         x.b_by_k == y.b_by_k;
}

// Makes the products of a warpgroup whose groups are waited for. False: its threads have asked for different ones.
bool multiply(Worker& worker, Hopper& hopper, int first, int left) {
  const Busy busy(worker);
  Products& ours = hopper.products[size_t(first)];
  size_t count = 0;
  while (count < ours.waiting.size() && int64_t(ours.waiting[count].group) + left < int64_t(ours.groups)) ++count;
  for (int t = first; t < first + WARPGROUP; ++t) {
    const Products& own = hopper.products[size_t(t)];
    if (own.groups != ours.groups || own.waiting.size() < count) return false;
    for (size_t i = 0; i < count; ++i) {
      if (!same(own.waiting[i].product, ours.waiting[i].product)) return false;
    }
  }
  std::vector<float> a, b, d;
  for (size_t i = 0; i < count;) {
    // Products that follow each other mostly add to the same sums.
    const int columns = ours.waiting[i].product.columns;
    float* sums[WARPGROUP];
    for (int t = 0; t < WARPGROUP; ++t) sums[t] = hopper.products[size_t(first + t)].waiting[i].sum;
    const auto each = [&](auto body) {  // body(sum of a thread, of D)
      for (int t = 0; t < WARPGROUP; ++t) {
        const int row = t / 32 * 16 + t % 32 / 4, col = t % 4 * 2;
        for (int n = 0; n < columns / 2; ++n) {
          body(sums[t][n], d[size_t((row + n / 2 % 2 * 8) * columns + n / 4 * 8 + col + n % 2)]);
        }
      }
    };
    d.resize(size_t(64 * columns));
    each([](float& sum, float& of_d) { of_d = sum; });
    const float* const sum = ours.waiting[i].sum;
    for (; i < count && ours.waiting[i].sum == sum && ours.waiting[i].product.columns == columns; ++i) {
      const Product& product = ours.waiting[i].product;
      read_operand(a, product.a, product.a_by_k, 64, product.is_half);
      read_operand(b, product.b, product.b_by_k, columns, product.is_half);
      for (int row = 0; row < 64; ++row) {
        float* const to = &d[size_t(row * columns)];
        for (int k = 0; k < 16; ++k) {
          const float factor = a[size_t(k * 64 + row)];
          const float* const of_b = &b[size_t(k * columns)];
          for (int col = 0; col < columns; ++col) to[col] += factor * of_b[col];
        }
      }
    }
    each([](float& sum, float& of_d) { sum = of_d; });
  }
  if (worker.xray) {
    for (size_t i = 0; i < count; ++i) {
      xray_read_over(worker, operands_of(ours.waiting[i].product), &hopper.groups[first / WARPGROUP]);
    }
    Knowledge done;
    xray_agent_done(worker, &hopper.groups[first / WARPGROUP], done);
    for (int t = first; t < first + WARPGROUP; ++t) xray_take(worker, t, done);
  }
  for (int t = first; t < first + WARPGROUP; ++t) {
    auto& waiting = hopper.products[size_t(t)].waiting;
    waiting.erase(waiting.begin(), waiting.begin() + int64_t(count));
  }
  return true;
}

}  // namespace

namespace {

// The barrier of all threads of some blocks of a cluster that have not returned.
void meet_all(Worker& worker, Meeting& meeting, int first, int end) {
  meeting.threads = 0;
  std::vector<int> threads;
  for (int t = first * worker.block_threads; t < end * worker.block_threads; ++t) {
    if (worker.threads[t].wait == Wait::done) continue;
    ++meeting.threads;
    if (worker.xray) threads.push_back(t);
  }
  if (!meeting.here || meeting.here < meeting.threads) return;
  if (worker.xray) xray_learn(worker, threads);
  meeting.here = 0, ++meeting.times;
  worker.barriers += uint64_t(end - first);
  wake(worker);
}

void wait_for_all(Worker& worker, Meeting& meeting, const char* what, const char* file, int line) {
  if (worker.xray) xray_catch_up(worker);
  ++meeting.here;
  Event event;
  event.kind = Event::meeting, event.met = &meeting, event.times = meeting.times;
  wait_for(worker, event, what, file, line);
}

}  // namespace

void barrier_in_cluster(Worker& worker, const char* what, const char* file, int line) {
  wait_for_all(worker, hopper_of(worker).blocks[own_rank(worker)].all, what, file, line);
}

// ---- what the scheduler asks --------------------------------------------------------------------------------------
// Called when no thread can run: barriers of blocks and clusters are met where all who are left have come; then copies
// come, one by one, until a thread can run.
bool release_events(Worker& worker) {
  Hopper& hopper = *worker.hopper;
  for (int rank = 0; rank < worker.cluster; ++rank) meet_all(worker, hopper.blocks[rank].all, rank, rank + 1);
  meet_all(worker, hopper.cluster, 0, worker.cluster);
  while (!worker.runnable_warps && !hopper.loads.empty()) land_one(worker, hopper);
  return worker.runnable_warps != 0;
}

std::string event_of(const Worker& worker, int thread) {
  const Event& event = worker.hopper->events[size_t(thread)];
  if (event.kind == Event::phase) {
    std::string text = ", for parity " + std::to_string(event.parity) + " of the barrier " +
                       place_in(worker, event.place) + ", in its phase " + std::to_string(event.barrier->phase) +
                       ", which lacks " + std::to_string(event.barrier->left) + " of " +
                       std::to_string(event.barrier->arrivals) + " arrivals";
    if (event.barrier->bytes) text += " and " + std::to_string(event.barrier->bytes) + " bytes";
    return text;
  }
  if (event.kind == Event::meeting) {
    return ", where " + std::to_string(event.met->here) + " of " + std::to_string(event.met->threads) +
           " threads have come";
  }
  return ", for " + std::to_string(event.count) + " more registers, of which " +
         std::to_string(worker.hopper->blocks[event.rank].registers_free) + " are free";
}

void end_events(Worker& worker) {
  Hopper& hopper = *worker.hopper;
  if (worker.fault.empty() && !hopper.loads.empty()) {
    worker.fault = head(worker) + "the block has ended, and " + std::to_string(hopper.loads.size()) +
                   " boxes are still on their way into its shared memory";
  }
  worker.hopper.reset();
  worker.hopper_used = false;
}

// ---- what a kernel asks -------------------------------------------------------------------------------------------
void init(void* place, int arrivals, const char* file, int line) {
  Worker& worker = *here()->worker;
  Hopper& hopper = hopper_of(worker);
  if (uintptr_t(place) % 8 || arrivals < 1 || arrivals >= 1 << 20) {
    refuse(worker,
           "init: a barrier is 8 aligned bytes, for 1 to 2^20 - 1 arrivals; got " + std::to_string(arrivals) + " " +
               place_in(worker, place),
           file, line);
  }
  probe(place);
  if (worker.xray) xray_barrier_made(worker, place, __builtin_return_address(0));
  const Busy busy(worker);
  Barrier& barrier = hopper.barriers[place];
  barrier = {};
  barrier.arrivals = barrier.left = arrivals;
}

void fence_async() {
  Worker& worker = *here()->worker;
  hopper_of(worker);
  if (worker.xray) xray_fence_async(worker);
}

namespace {

void arrive_at_barrier(Worker& worker, void* place, int bytes, const char* what, const void* caller, const char* file,
                       int line) {
  Barrier& barrier = barrier_at(worker, place, what, file, line);
  if (worker.xray) {
    xray_use_barrier(worker, place, false, caller);
    const Busy busy(worker);
    xray_give(worker, barrier.gathered);
  }
  if (!barrier.left) {
    refuse(worker,
           std::string(what) + ": all " + std::to_string(barrier.arrivals) + " arrivals of this phase of the barrier " +
               place_in(worker, place) + " have been",
           file, line);
  }
  barrier.bytes += bytes, --barrier.left;
  end_phase(worker, barrier);
}

// Shared memory of a block is there as long as the block is.
void check_rank(Worker& worker, int rank, const char* what, const char* file, int line) {
  if (rank < 0 || rank >= worker.cluster) {
    refuse(worker,
           std::string(what) + ": a cluster of " + std::to_string(worker.cluster) + " has no block " +
               std::to_string(rank),
           file, line);
  }
  for (int t = rank * worker.block_threads; t < (rank + 1) * worker.block_threads; ++t) {
    if (worker.threads[t].wait != Wait::done) return;
  }
  refuse(worker, std::string(what) + ": block " + std::to_string(rank) + " of the cluster has ended", file, line);
}

}  // namespace

void arrive(void* place, int bytes, bool expecting, const char* file, int line) {
  arrive_at_barrier(*here()->worker, place, bytes, expecting ? "arrive_expecting" : "arrive",
                    __builtin_return_address(0), file, line);
}

void wait(void* place, uint32_t parity, const char* file, int line) {
  Worker& worker = *here()->worker;
  Barrier& barrier = barrier_at(worker, place, "wait", file, line);
  if (worker.xray) xray_use_barrier(worker, place, false, __builtin_return_address(0));
  // In the random schedule copies also come earlier than they have to.
  if (config.order == Order::random && !worker.hopper->loads.empty() && next_random(worker.random) % 4 == 0) {
    land_one(worker, *worker.hopper);
  }
  if ((barrier.phase & 1) == (parity & 1)) {
    Event event;
    event.kind = Event::phase, event.barrier = &barrier, event.place = place, event.parity = parity & 1;
    wait_for(worker, event, "wait", file, line);
  }
  if (!worker.xray) return;
  const Busy busy(worker);
  xray_take(worker, current(worker), barrier.known);
}

int cluster_rank() { return own_rank(*here()->worker); }

void cluster_sync(const char* file, int line) {
  Worker& worker = *here()->worker;
  wait_for_all(worker, hopper_of(worker).cluster, "cluster_sync", file, line);
}

void arrive_at(void* place, int rank, const char* file, int line) {
  Worker& worker = *here()->worker;
  check_rank(worker, rank, "arrive_at", file, line);
  arrive_at_barrier(worker, reinterpret_cast<void*>(in_block(worker, place, rank)), 0, "arrive_at",
                    __builtin_return_address(0), file, line);
}

void sync_group(int number, int threads, const char* file, int line) {
  Worker& worker = *here()->worker;
  Hopper& hopper = hopper_of(worker);
  if (number < 1 || number >= NAMED) {
    refuse(worker, "sync_group: barriers 1 to 15 are there, got " + std::to_string(number), file, line);
  }
  Meeting& meeting = hopper.blocks[own_rank(worker)].named[number];
  if (worker.xray) {
    xray_catch_up(worker);
    const Busy busy(worker);
    xray_give(worker, meeting.gathered);
  }
  if (meeting.here && meeting.threads != threads) {
    refuse(worker,
           "sync_group: " + std::to_string(threads) + " threads are to meet at barrier " + std::to_string(number) +
               ", where others wait for " + std::to_string(meeting.threads),
           file, line);
  }
  meeting.threads = threads;
  if (++meeting.here < threads) {
    Event event;
    event.kind = Event::meeting, event.met = &meeting, event.times = meeting.times;
    wait_for(worker, event, "sync_group", file, line);
  } else {
    meeting.here = 0, ++meeting.times;
    meeting.known.swap(meeting.gathered);
    meeting.gathered.clear();
    ++worker.barriers;
    wake(worker);
  }
  if (!worker.xray) return;
  const Busy busy(worker);
  xray_take(worker, current(worker), meeting.known);
}

void load_box(void* to, const TensorMap& map, int64_t along, int64_t across, void* place, unsigned blocks,
              const char* file, int line) {
  const void* const caller = __builtin_return_address(0);
  Worker& worker = *here()->worker;
  check_box(worker, to, "load_box", file, line);
  probe(to), probe(static_cast<char*>(to) + size_t(map.box_height) * 128 - 1);
  if (!blocks) blocks = 1u << own_rank(worker);
  bool first = true;  // what is read is read once
  for (; blocks; blocks &= blocks - 1, first = false) {
    const int rank = __builtin_ctz(blocks);
    check_rank(worker, rank, "load_box", file, line);
    void* const there = reinterpret_cast<void*>(in_block(worker, place, rank));
    Barrier& barrier = barrier_at(worker, there, "load_box", file, line);
    if (worker.xray) xray_use_barrier(worker, there, true, caller);
    const Busy busy(worker);
    Load load{chunks_of(map, along, across, reinterpret_cast<const void*>(in_block(worker, to, rank))), &barrier, there,
              map.box_height * 128};
    if (worker.xray) xray_load(worker, load.chunks, first ? map.data : nullptr, caller);
    worker.hopper->loads.push_back(std::move(load));
  }
}

void store_box(const TensorMap& map, int64_t along, int64_t across, const void* from, const char* file, int line) {
  Worker& worker = *here()->worker;
  Hopper& hopper = hopper_of(worker);
  check_box(worker, from, "store_box", file, line);
  probe(from), probe(static_cast<const char*>(from) + size_t(map.box_height) * 128 - 1);
  if (worker.xray) xray_catch_up(worker);
  const Busy busy(worker);
  Stores& stores = hopper.stores[size_t(current(worker))];
  Store store{chunks_of(map, along, across, from), stores.groups};
  std::erase_if(store.chunks, [](const Chunk& chunk) { return !chunk.bytes; });
  if (worker.xray) xray_store(worker, store.chunks, map.data, &stores, __builtin_return_address(0));
  stores.waiting.push_back(std::move(store));
}

void store_commit() {
  Worker& worker = *here()->worker;
  ++hopper_of(worker).stores[size_t(current(worker))].groups;
}

void store_wait(int left) {
  Worker& worker = *here()->worker;
  Stores& stores = hopper_of(worker).stores[size_t(current(worker))];
  if (worker.xray) xray_catch_up(worker);
  const Busy busy(worker);
  while (!stores.waiting.empty() && int64_t(stores.waiting.front().group) + left < int64_t(stores.groups)) {
    const Store& store = stores.waiting.front();
    for (const Chunk& chunk : store.chunks) {
      std::memcpy(reinterpret_cast<void*>(chunk.global), reinterpret_cast<const void*>(chunk.shared),
                  size_t(chunk.bytes));
    }
    if (worker.xray) {
      xray_read_over(worker, store.chunks, &stores);
      Knowledge done;
      xray_agent_done(worker, &stores, done);
      xray_take(worker, current(worker), done);
    }
    stores.waiting.pop_front();
  }
}

void wgmma_fence() {
  Worker& worker = *here()->worker;
  hopper_of(worker).products[size_t(current(worker))].fenced = true;
}

void wgmma(const Product& product, float* sum, const char* file, int line) {
  Worker& worker = *here()->worker;
  Hopper& hopper = hopper_of(worker);
  const int thread = current(worker);
  Products& products = hopper.products[size_t(thread)];
  if (!products.fenced) {
    refuse(worker, "wgmma without a wgmma_fence since its last wait: the sums may not be what they seem", file, line);
  }
  for (const void* place : {product.a, product.b}) {
    if (uintptr_t(place) % 16) refuse(worker, "wgmma: an operand does not begin at a multiple of 16 bytes", file, line);
  }
  probe(product.a), probe(product.b);
  if (worker.xray && worker.lane == 0) {
    xray_catch_up(worker);
    const Busy busy(worker);
    xray_product(worker, operands_of(product), &hopper.groups[thread / WARPGROUP], __builtin_return_address(0));
  }
  const Busy busy(worker);
  products.waiting.push_back({product, sum, products.groups});
}

void wgmma_commit() {
  Worker& worker = *here()->worker;
  ++hopper_of(worker).products[size_t(current(worker))].groups;
}

void wgmma_wait(int left, const char* file, int line) {
  Worker& worker = *here()->worker;
  Hopper& hopper = hopper_of(worker);
  const int group = current(worker) / WARPGROUP;
  hopper.products[size_t(current(worker))].fenced = false;
  Meeting& meeting = hopper.groups[group];
  meeting.threads = WARPGROUP;
  if (++meeting.here < WARPGROUP) {
    Event event;
    event.kind = Event::meeting, event.met = &meeting, event.times = meeting.times;
    return wait_for(worker, event, "wgmma_wait", file, line);
  }
  if (!multiply(worker, hopper, group * WARPGROUP, left)) {
    refuse(worker, "wgmma_wait: the threads of a warpgroup have asked for different products", file, line);
  }
  meeting.here = 0, ++meeting.times;
  wake(worker);
}

// ---- stmatrix -------------------------------------------------------------------------------------------------------
namespace {

constexpr unsigned WARP = 0xffffffffu;

struct Rows {
  void* row;
  const uint32_t* fragment;
  unsigned met = 0;
};

void store_all(void* const* arguments, unsigned mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) static_cast<Rows*>(arguments[lane])->met = mask;
  }
  if (mask != WARP) return;
  for (int i = 0; i < 4; ++i) {
    for (int row = 0; row < 8; ++row) {
      uint32_t words[4];
      for (int t = 0; t < 4; ++t) words[t] = static_cast<Rows*>(arguments[row * 4 + t])->fragment[i];
      std::memcpy(static_cast<Rows*>(arguments[8 * i + row])->row, words, 16);
    }
  }
}

}  // namespace

void store_matrices(void* row, const uint32_t* fragment, const char* file, int line) {
  xray_store_row(row, __builtin_return_address(0));
  probe(row);
  Rows argument{row, fragment};
  meet(WARP, store_all, &argument, "store_matrices", file, line);
  if (argument.met != WARP) trap("store_matrices, which needs all 32 lanes of the warp", file, line);
}

// ---- registers ------------------------------------------------------------------------------------------------------
void change_registers(int count, bool take, const char* file, int line) {
  Worker& worker = *here()->worker;
  Hopper& hopper = hopper_of(worker);
  if (worker.lane != 0) return;  // a warp's lanes have as many each: the first one speaks for all
  int& own = hopper.registers[worker.warp];
  if (take ? count < own : count > own) {
    refuse(worker,
           std::string(take ? "take" : "give") + "_registers<" + std::to_string(count) + ">: a thread has " +
               std::to_string(own),
           file, line);
  }
  const int change = 32 * (count - own);
  int& free = hopper.blocks[own_rank(worker)].registers_free;
  while (change > free) {
    Event event;
    event.kind = Event::registers, event.count = change, event.rank = own_rank(worker);
    wait_for(worker, event, "take_registers", file, line);
  }
  free -= change;
  own = count;
  wake(worker);
}

}  // namespace simt
