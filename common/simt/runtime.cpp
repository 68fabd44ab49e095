// The CPU device: fibers, the scheduler of a block, launches over the cores.
#include "common/simt/runtime.h"

#include <sys/mman.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

extern "C" {
// Saves the callee-saved registers on the stack and its pointer in *from, continues where `to` was saved.
__attribute__((visibility("hidden"))) void simt_switch(void** from, void* to);
}

// The last step is a jump and not a return: a processor guesses where a return goes from the last call, which was
// another fiber's, and where a jump goes from the jumps before it, which it learns. (A tiled matmul went from 41 to 24
// ms.)
#if defined(__x86_64__)
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch,@function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
.globl simt_resume
.hidden simt_resume
simt_resume:
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
)");
#elif defined(__aarch64__)
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch,%function
simt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
.globl simt_resume
.hidden simt_resume
simt_resume:
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  br x30
)");
#endif

namespace simt {

Config config;
bool (*interrupted)() = nullptr;

using Clock = std::chrono::steady_clock;
constexpr auto ASK_EVERY = std::chrono::milliseconds(100);  // how often a launch looks for an interrupt

int worker_limit() {
  const int cores = std::max(1u, std::thread::hardware_concurrency());
  return config.workers > 0 ? std::min(config.workers, 64) : std::min(cores, 64);
}

std::string describe(uint3 i) {
  char text[48];
  std::snprintf(text, sizeof text, "(%u, %u, %u)", i.x, i.y, i.z);
  return text;
}

uint3 Worker::thread_index(int thread) const {
  const unsigned t = unsigned(thread - rank_of(thread) * block_threads), x = launch->block.x, y = launch->block.y;
  return {t % x, t / x % y, t / (x * y)};
}

// ---- stacks -------------------------------------------------------------------------------------------------------
uintptr_t stacks_low = 0, stacks_high = 0;

namespace {

constexpr int MAX_WORKERS = 2 * RESIDENT_BLOCKS;                // of all launches together
constexpr size_t SLAB_SIZE = size_t(MAX_THREADS) * STACK_SIZE;  // the stacks of a worker
constexpr size_t LARGE_PAGES = size_t(16) << 20;                // of them: 256 stacks, the usual block
Worker* worker_of_slab[MAX_WORKERS];

// One reservation for all stacks, so that "is this address on a stack" is one comparison.
void reserve_stacks() {
  const size_t size = (SLAB_SIZE + SLAB_GUARD) * MAX_WORKERS;
  void* memory = mmap(nullptr, size + SLAB_GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("the CPU device could not reserve address space for its stacks");
  stacks_low = (uintptr_t(memory) + SLAB_GUARD - 1) & ~(SLAB_GUARD - 1);
  stacks_high = stacks_low + size;
}

void thread_main();

Here* top_of(Worker& worker, int stack) { return here_of(uintptr_t(worker.slab) + size_t(stack) * STACK_SIZE); }

// Between two stacks lies no guard page: it would keep the system from backing stacks with large pages, and a switch
// from one to the next costs a translation miss without them. The compiler refuses a frame that comes near a stack's
// size; what recursion uses beyond is found by marks at the stack's end, or, at the end of all stacks, by a guard.
constexpr uint64_t MARK = 0x5af0c0de5af0c0deu;
constexpr int MARKS = 8, MARK_STRIDE = 16;  // words: one in each 128 bytes of the last KiB

uint64_t* end_of(Worker& worker, int stack) {
  return reinterpret_cast<uint64_t*>(worker.slab + size_t(stack) * STACK_SIZE);
}
void prepare_stack(Worker& worker, int stack) {
  top_of(worker, stack)->worker = &worker;
  for (int i = 0; i < MARKS; ++i) end_of(worker, stack)[i * MARK_STRIDE] = MARK;
}
bool has_overflowed(Worker& worker, int stack) {
  uint64_t changed = 0;
  for (int i = 0; i < MARKS; ++i) changed |= end_of(worker, stack)[i * MARK_STRIDE] ^ MARK;
  return changed != 0;
}

int take_stack(Worker& worker) {
  if (!worker.free_stacks.empty()) {
    const int stack = worker.free_stacks.back();
    worker.free_stacks.pop_back();
    return stack;
  }
  const int stack = worker.stacks_made++;
  prepare_stack(worker, stack);
  return stack;
}

void* fresh_stack(Worker& worker) {
  const int stack = take_stack(worker);
  auto* word = reinterpret_cast<uintptr_t*>(top_of(worker, stack));
#if defined(__x86_64__)
  *--word = 0;  // the return address of thread_main, which never returns
  *--word = uintptr_t(&thread_main);
  for (int i = 0; i < 6; ++i) *--word = 0;
#else
  word -= 20;
  for (int i = 0; i < 20; ++i) word[i] = 0;
  word[11] = uintptr_t(&thread_main);  // x30
#endif
  return word;
}

int stack_of(Worker& worker, const Here* place) {
  return int((uintptr_t(place) - uintptr_t(worker.slab)) / STACK_SIZE);
}

}  // namespace

// Whose stacks an address lies on, told by the address alone: what is on the stack may be overwritten.
Worker* worker_at(uintptr_t sp) {
  return on_fiber(sp) ? worker_of_slab[(sp - stacks_low) / (SLAB_GUARD + SLAB_SIZE)] : nullptr;
}

// ---- the scheduler of a block -------------------------------------------------------------------------------------
uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

namespace {

int pick(Worker& worker, unsigned candidates) {
  switch (config.order) {
    case Order::forward: return __builtin_ctz(candidates);
    case Order::reverse: return 31 - __builtin_clz(candidates);
    case Order::random: break;
  }
  for (unsigned skip = unsigned(next_random(worker.random) % unsigned(__builtin_popcount(candidates))); skip; --skip) {
    candidates &= candidates - 1;
  }
  return __builtin_ctz(candidates);
}

std::string place_of(const Thread& thread) {
  const char* slash = std::strrchr(thread.file, '/');
  return std::string(slash ? slash + 1 : thread.file) + ":" + std::to_string(thread.line);
}

}  // namespace

std::string head(const Worker& worker) {
  const std::string which = worker.cluster == 1 ? "" : ", in a cluster of " + std::to_string(worker.cluster);
  return "kernel " + std::string(worker.launch->kernel) + ", block " + describe(worker.block_index) + which + ": ";
}

// An address in the module's code as a token that Python turns into file and line.
std::string code_place(uintptr_t pc) {
  char text[40];
  std::snprintf(text, sizeof text, "{pc:0x%zx}", size_t(pc - module().base));
  return text;
}

namespace {

std::string hex(unsigned value) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", value);
  return text;
}

}  // namespace

// "48 threads wait at __syncthreads, kernel.cu:42, thread (0, 0, 0) first; 16 have returned"
std::string who_waits(const Worker& worker) {
  std::map<std::string, std::pair<int, int>> groups;  // text -> count, first
  int returned = 0;
  for (int t = 0; t < worker.thread_count; ++t) {
    const Thread& thread = worker.threads[t];
    if (thread.wait == Wait::done) {
      ++returned;
      continue;
    }
    std::string text;
    if (thread.wait == Wait::barrier) text = "at " + std::string(thread.what) + ", " + place_of(thread);
    if (thread.wait == Wait::warp) {
      text = "at " + std::string(thread.what) + ", " + place_of(thread) + ", for the lanes of mask " + hex(thread.mask);
    }
    if (thread.wait == Wait::event)
      text = "at " + std::string(thread.what) + ", " + place_of(thread) + event_of(worker, t);
    if (thread.wait == Wait::spin) text = "in a loop at " + code_place(uintptr_t(thread.caller));
    auto [entry, fresh] = groups.try_emplace(text, 0, t);
    ++entry->second.first;
  }
  std::string result;
  for (const auto& [text, group] : groups) {
    if (text.empty()) continue;
    result += (result.empty() ? "" : "; ") + std::to_string(group.first) + (group.first == 1 ? " thread" : " threads") +
              (group.first == 1 ? " waits " : " wait ") + text + " (first: thread " +
              describe(worker.thread_index(group.second)) + ")";
  }
  if (returned) result += "; " + std::to_string(returned) + (returned == 1 ? " has returned" : " have returned");
  return result;
}

namespace {

void release_barrier(Worker& worker) {
  if (worker.xray) xray_barrier(worker);
  worker.barrier_result = worker.barrier_predicates;
  worker.barrier_threads = worker.at_barrier;
  worker.barrier_predicates = worker.at_barrier = 0;
  for (int t = 0; t < worker.thread_count; ++t) {
    if (worker.threads[t].wait == Wait::barrier) worker.threads[t].wait = Wait::nothing;
  }
  for (int w = 0; w < worker.warp_count; ++w) {
    worker.warps[w].runnable = worker.warps[w].alive;
    if (worker.warps[w].alive) worker.runnable_warps |= 1u << w;
  }
  ++worker.barriers;
  increment(worker.switches);
  // A block may last: now and then its launcher looks whether it is still wanted.
  if (worker.ask && worker.barriers % 64 == 0 && Clock::now() - worker.asked > ASK_EVERY) worker.pause_due = true;
}

// Finishes every warp operation whose lanes have all come; false: none did.
bool complete_meetings(Worker& worker, int w) {
  Warp& warp = worker.warps[w];
  bool progress = false;
  for (unsigned left = warp.meeting; left;) {
    const int first = __builtin_ctz(left);
    const Thread& thread = worker.threads[w * 32 + first];
    unsigned group = 0;
    void* arguments[32] = {};
    for (unsigned rest = left; rest; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      const Thread& other = worker.threads[w * 32 + lane];
      if (other.mask == thread.mask && other.operation == thread.operation) {
        group |= 1u << lane;
        arguments[lane] = other.argument;
      }
    }
    left &= ~group;
    // Lanes that have returned, or that the block does not have, are not waited for, as in CUDA.
    const unsigned needed = thread.mask & warp.alive;
    if ((group & needed) != needed) continue;
    if (thread.operation) thread.operation(arguments, needed);
    else if (worker.xray) xray_sync_warp(worker, w, needed);
    ++worker.warp_syncs;
    increment(worker.switches);
    warp.meeting &= ~group;
    warp.runnable |= group;
    progress = true;
  }
  if (progress) worker.runnable_warps |= 1u << w;
  return progress;
}

// Sets worker.warp and worker.lane to a thread that can run. False: the block is finished, or stuck (worker.fault).
bool choose(Worker& worker) {
  for (;;) {
    Warp& warp = worker.warps[worker.warp];
    if (warp.runnable) {
      worker.lane = pick(worker, warp.runnable);
      return true;
    }
    worker.runnable_warps &= ~(1u << worker.warp);
    if (worker.xray) xray_flush_warp(worker);
    if (warp.paused) {
      warp.runnable = warp.paused;
      warp.paused = 0;
      worker.runnable_warps |= 1u << worker.warp;
      continue;
    }
    if (warp.catching_up) {
      warp.runnable = warp.catching_up;
      warp.catching_up = 0;
      worker.runnable_warps |= 1u << worker.warp;
      continue;
    }
    if (warp.meeting && complete_meetings(worker, worker.warp)) continue;
    if (worker.runnable_warps) {
      worker.warp = pick(worker, worker.runnable_warps);
      continue;
    }
    if (!worker.alive) return false;
    if (worker.at_barrier == worker.alive) {
      release_barrier(worker);
      worker.warp = pick(worker, worker.runnable_warps);
      continue;
    }
    if (worker.hopper_used && release_events(worker)) {
      worker.warp = pick(worker, worker.runnable_warps);
      continue;
    }
    bool spinning = false;
    for (int w = 0; w < worker.warp_count; ++w) {
      if (!worker.warps[w].spinning) continue;
      spinning = true;
      worker.warps[w].runnable |= worker.warps[w].spinning;
      worker.warps[w].spinning = 0;
      worker.runnable_warps |= 1u << w;
    }
    if (spinning) {
      worker.warp = pick(worker, worker.runnable_warps);
      // Everyone waits for a change, which another block may bring. (An atomic that changed nothing may be no wait.)
      increment(worker.spins);
      if (worker.waits_for_blocks || worker.spins % 64 == 0) worker.pause_due = worker.gives_way = true;
      worker.waits_for_blocks = false;
      continue;
    }
    worker.fault = head(worker) + "deadlock: " + who_waits(worker);
    return false;
  }
}

void begin_thread(Worker& worker, Here& here) {
  const int t = worker.warp * 32 + worker.lane;
  worker.threads[t].wait = Wait::nothing;
  here.self = &worker.threads[t];
  here.thread = worker.thread_index(t);
  here.block = worker.block_index_of(t);
  here.block_size = worker.launch->block;
  here.grid_size = worker.launch->grid;
  here.log = nullptr;
  if (worker.xray) xray_begin_thread(worker, here, worker.lane);
}

}  // namespace

void fail(Worker& worker, std::string why) {
  worker.fault = std::move(why);
  simt_switch(&worker.current().sp, worker.main_sp);
  __builtin_unreachable();
}

std::string too_much_local_memory() {
  return "more local memory than its " + std::to_string(STACK_SIZE / 1024) + " KiB";
}

namespace {

[[gnu::noinline, gnu::cold]] void fail_overflow(Worker& worker) {
  fail(worker, head(worker) + "thread " + describe(here()->thread) + " used " + too_much_local_memory());
}

// What runs on every stack: threads, one after the other, as long as the next one has not begun elsewhere.
void thread_main() {
  Here& place = *here();
  Worker& worker = *place.worker;
  for (;;) {
    begin_thread(worker, place);
    worker.launch->run(worker.launch->arguments);

    if (has_overflowed(worker, stack_of(worker, &place))) [[unlikely]]
      fail_overflow(worker);
    Thread& thread = worker.current();
    Warp& warp = worker.warps[worker.warp];
    thread.wait = Wait::done;
    warp.runnable &= ~(1u << worker.lane);
    warp.alive &= ~(1u << worker.lane);
    --worker.alive;
    increment(worker.switches);
    void* to = worker.main_sp;
    if (choose(worker)) {
      to = worker.current().sp;
      if (!to) continue;
    }
    worker.free_stacks.push_back(stack_of(worker, &place));
    void* never;
    simt_switch(&never, to);
  }
}

}  // namespace

[[gnu::noinline]] void yield(Worker& worker) {
  Thread& thread = worker.current();
  void* to = worker.main_sp;
  if (choose(worker) && !worker.pause_due) {
    Thread& next = worker.current();
    if (&next == &thread) return;
    if (!next.sp) next.sp = fresh_stack(worker);
    to = next.sp;
  }
  simt_switch(&thread.sp, to);  // where a pause is due run_block goes on, with the thread that was chosen
}

namespace {
[[gnu::noinline, gnu::cold]] void fail_divergent(Worker& worker, const Thread& thread) {
  const Thread& first = *worker.barrier_first;
  fail(worker, head(worker) + "divergent barrier: thread " +
                   describe(worker.thread_index(int(&first - worker.threads))) + " waits at " + first.what + ", " +
                   place_of(first) + ", thread " + describe(worker.thread_index(int(&thread - worker.threads))) +
                   " at " + thread.what + ", " + place_of(thread));
}
}  // namespace

// The hot path of every tiled kernel: it calls nothing but the switch, and keeps nothing on the stack.
void barrier(const char* what, const char* file, int line) {
  Here& place = *here();
  Worker& worker = *place.worker;
  Thread& thread = *place.self;
  if (worker.cluster > 1) return barrier_in_cluster(worker, what, file, line);
  thread.wait = Wait::barrier;
  thread.what = what, thread.file = file, thread.line = line;
  if (worker.at_barrier++ == 0) {
    worker.barrier_file = file, worker.barrier_line = line, worker.barrier_first = &thread;
  } else if (worker.barrier_line != line || worker.barrier_file != file) {
    return fail_divergent(worker, thread);
  }
  Warp& warp = worker.warps[worker.warp];
  warp.runnable &= ~(1u << worker.lane);
  // The usual next thread is the warp's next lane. To find it from this thread's own record, and not from what the
  // last one wrote, takes the wait for memory out of the chain from switch to switch.
  Thread& next = *(&thread + 1);
  if (worker.in_order && worker.lane < 31 && warp.runnable >> (worker.lane + 1) & 1 && next.sp) {
    ++worker.lane;
    return simt_switch(&thread.sp, next.sp);
  }
  yield(worker);
}

int barrier_count(int predicate, const char* what, const char* file, int line, int* threads) {
  Worker& worker = *here()->worker;
  worker.barrier_predicates += predicate != 0;
  barrier(what, file, line);
  if (threads) *threads = worker.barrier_threads;
  return worker.barrier_result;
}

void meet(unsigned mask, WarpOperation operation, void* argument, const char* what, const char* file, int line) {
  Worker& worker = *here()->worker;
  Thread& thread = worker.current();
  Warp& warp = worker.warps[worker.warp];
  thread.wait = Wait::warp;
  thread.mask = mask, thread.operation = operation, thread.argument = argument;
  thread.what = what, thread.file = file, thread.line = line;
  if (!(mask >> worker.lane & 1)) {
    fail(worker, head(worker) + what + ", " + place_of(thread) + ": thread " + describe(here()->thread) + " is lane " +
                     std::to_string(worker.lane) + ", which its own mask " + hex(mask) + " leaves out");
  }
  warp.meeting |= 1u << worker.lane;
  warp.runnable &= ~(1u << worker.lane);
  yield(worker);
  thread.wait = Wait::nothing;
}

void meet_and_order(unsigned mask, const char* what, const char* file, int line) {
  meet(mask, nullptr, nullptr, what, file, line);
}

void spin(const void* caller, bool for_blocks) {
  Worker& worker = *here()->worker;
  Thread& thread = worker.current();
  Warp& warp = worker.warps[worker.warp];
  worker.waits_for_blocks |= for_blocks;
  thread.wait = Wait::spin;
  thread.caller = caller;
  if (worker.looked) worker.looks[&thread - worker.threads] = {};
  warp.spinning |= 1u << worker.lane;
  warp.runnable &= ~(1u << worker.lane);
  yield(worker);
  thread.wait = Wait::nothing;
}

unsigned active_mask() {
  const Worker& worker = *here()->worker;
  return worker.warps[worker.warp].alive;
}
unsigned lane_id() { return unsigned(here()->worker->lane); }
void* dynamic_shared() {
  const Worker& worker = *here()->worker;
  return worker.dynamic_shared + size_t(worker.rank_of(worker.warp * 32 + worker.lane)) * worker.block_shared;
}

void trap(const char* why, const char* file, int line) {
  Worker& worker = *here()->worker;
  Thread& thread = worker.current();
  thread.file = file, thread.line = line;
  fail(worker, head(worker) + "thread " + describe(here()->thread) + " stopped at " + why + ", " + place_of(thread));
}

// ---- launches -----------------------------------------------------------------------------------------------------
namespace {

std::mutex pool_mutex;
std::condition_variable pool_changed;
std::vector<std::unique_ptr<Worker>> pool;  // all that were ever made
std::vector<Worker*> idle;

// The stacks of spare workers lie in small pages: there may be many, each with as much as its threads touched.
Worker* take_worker(bool wait, bool spare) {
  std::unique_lock lock(pool_mutex);
  static std::once_flag once;
  std::call_once(once, reserve_stacks);
  while (idle.empty() && pool.size() == MAX_WORKERS) {
    if (!wait) return nullptr;
    pool_changed.wait(lock);
  }
  auto found = std::find_if(idle.rbegin(), idle.rend(), [&](const Worker* worker) { return worker->spare == spare; });
  if (found == idle.rend() && pool.size() < MAX_WORKERS) {
    auto worker = std::make_unique<Worker>();
    worker->spare = spare;
    worker->slab = reinterpret_cast<char*>(stacks_low + pool.size() * (SLAB_GUARD + SLAB_SIZE) + SLAB_GUARD);
    if (mprotect(worker->slab, SLAB_SIZE, PROT_READ | PROT_WRITE)) {
      throw std::runtime_error("the CPU device could not get memory for its stacks");
    }
    if (spare) madvise(worker->slab, SLAB_SIZE, MADV_NOHUGEPAGE);
    else madvise(worker->slab, LARGE_PAGES, MADV_HUGEPAGE);  // where the system has none, it goes on without
    worker->free_stacks.reserve(MAX_THREADS);
    worker->dynamic_room = MAX_SHARED + 1024;
    worker->dynamic_shared = static_cast<char*>(std::aligned_alloc(1024, worker->dynamic_room));
    worker_of_slab[pool.size()] = worker.get();
    pool.push_back(std::move(worker));
    return pool.back().get();
  }
  if (found == idle.rend()) found = idle.rbegin();
  Worker* worker = *found;
  idle.erase(std::next(found).base());
  return worker;
}

void return_worker(Worker* worker) {
  if (worker->spare) {  // the next launch that needs it may be long in coming: its stacks' memory goes back
    madvise(worker->slab, SLAB_SIZE, MADV_DONTNEED);
    worker->free_stacks.clear();
    worker->stacks_made = 0;
  }
  std::lock_guard lock(pool_mutex);
  idle.push_back(worker);
  pool_changed.notify_one();
}

}  // namespace

// What one launch shares over its workers.
struct Job {
  const Launch& launch;
  const std::vector<SharedVariable>& shared;
  const int cluster;     // blocks that run as one
  const uint64_t units;  // that begin by themselves: clusters, or else blocks
  std::atomic<uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;  // of everything below
  std::string fault;
  bool was_interrupted = false;
  uint64_t step = 1, start = 0;   // of the random order
  uint64_t random = config.seed;  // who goes next
  std::vector<Worker*> workers;   // each has a block, or looks for one
  std::vector<Worker*> waiting;   // those whose block waits for others and has given its core away, the longest first
  std::vector<std::thread> threads;
  Clock::time_point looked = Clock::now();  // for blocks that wait for ever
  int quiet = 0;                            // times in a row that none did anything else

  Job(const Launch& launch, const std::vector<SharedVariable>& shared, int cluster)
      : launch(launch), shared(shared), cluster(cluster), units(launch.blocks / uint64_t(cluster)) {}
  int running() const { return int(workers.size() - waiting.size()); }
  uint64_t not_begun() const { return units - std::min(units, next.load()); }
  void end() {
    stop = true;
    for (Worker* worker : waiting) worker->turn.notify_one();
  }
};

namespace {

// ---- blocks that wait for blocks ----------------------------------------------------------------------------------
// A block that waits keeps its worker, with its stacks, its shared memory and its OS thread, which sleeps until it is
// its turn again; its core goes to a block that has not begun, on a worker more, or else to the block that has waited
// longest. So no more blocks run at once than there are cores to use, however many wait.

void work(Job& job, Worker& worker, bool launching, uint64_t first);

void enlist(Job& job, Worker& worker) {
  job.workers.push_back(&worker);
  worker.job = &job;
  worker.has_turn = true;
  worker.switches_seen = ~uint64_t(0);
}

bool begin_another(Job& job) {
  if (!job.not_begun() || int(job.workers.size()) >= RESIDENT_BLOCKS) return false;
  Worker* worker = take_worker(false, int(job.workers.size()) >= worker_limit());
  if (!worker) return false;
  enlist(job, *worker);
  const uint64_t first = job.next.fetch_add(1, std::memory_order_relaxed);
  try {
    job.threads.emplace_back([&job, worker, first] {
      work(job, *worker, false, first);
      return_worker(worker);
    });
    return true;
  } catch (const std::system_error&) {
    job.workers.pop_back();
    return_worker(worker);
    job.fault = "the system has no thread for another block of kernel " + std::string(job.launch.kernel);
    job.end();
    return false;
  }
}

// Puts all cores to use. (The mutex is held.)
void fill_cores(Job& job) {
  while (!job.stop && job.running() < worker_limit()) {
    const bool random = config.order == Order::random && !job.waiting.empty();
    if ((!random || next_random(job.random) % 4 == 0) && begin_another(job)) continue;
    if (job.waiting.empty()) return;
    const auto next = job.waiting.begin() + (random ? int64_t(next_random(job.random) % job.waiting.size()) : 0);
    (*next)->has_turn = true;
    (*next)->turn.notify_one();
    job.waiting.erase(next);
  }
}

// Has no block done anything for a while but look at what has not changed?
bool is_stuck(Job& job) {
  const auto now = Clock::now();
  if (std::chrono::duration<double>(now - job.looked).count() < config.timeout / 3) return false;
  job.looked = now;
  bool quiet = true;
  for (Worker* worker : job.workers) {
    const uint64_t switches = worker->switches, spins = worker->spins;
    const bool computes = worker->has_turn && spins == worker->spins_seen;
    quiet = quiet && switches == worker->switches_seen && !computes;
    worker->switches_seen = switches, worker->spins_seen = spins;
  }
  job.quiet = quiet ? job.quiet + 1 : 0;
  return job.quiet == 2;
}

std::string who_else_waits(const Job& job) {
  if (job.units == 1) return "";
  const std::string begun = std::to_string(job.workers.size());
  if (const uint64_t left = job.not_begun()) {
    return "; so do all " + begun + " blocks that have begun and not ended, and " + std::to_string(left) +
           " never began: at most " + std::to_string(RESIDENT_BLOCKS) + " blocks may wait for one another here";
  }
  return "; so do all blocks that have not ended, " + begun + " of " + std::to_string(job.units) +
         ": what they wait for was never written";
}

// Lets other blocks run until it is this one's turn again. False: there is nothing to wait for (worker.fault).
bool give_way(Worker& worker) {
  Job& job = *worker.job;
  std::unique_lock lock(job.mutex);
  if (!job.stop && is_stuck(job)) {
    worker.fault = head(worker) + "deadlock: " + who_waits(worker) + who_else_waits(job);
    return false;
  }
  worker.has_turn = false;
  job.waiting.push_back(&worker);
  fill_cores(job);
  if (worker.has_turn) {
    lock.unlock();
    std::this_thread::yield();  // to a block on another core, or another process
    return true;
  }
  while (!worker.has_turn && !job.stop) {
    worker.turn.wait_for(lock, ASK_EVERY);
    if (!worker.ask) continue;
    lock.unlock();
    worker.was_interrupted = worker.ask();
    lock.lock();
    if (worker.was_interrupted) break;
  }
  std::erase(job.waiting, &worker);
  const bool goes_on = worker.has_turn && !job.stop && !worker.was_interrupted;
  worker.has_turn = true;
  if (!goes_on) worker.fault = "the launch has ended";
  return goes_on;
}

// ---- blocks one after another -------------------------------------------------------------------------------------

uint64_t block_at(const Job& job, uint64_t i) {
  switch (config.order) {
    case Order::forward: return i;
    case Order::reverse: return job.units - 1 - i;
    case Order::random: break;
  }
  return uint64_t((__uint128_t(i) * job.step + job.start) % job.units);
}

void begin_block(Worker& worker, uint64_t block) {
  const Launch& launch = *worker.launch;
  worker.block = block;
  worker.block_index = {unsigned(block % launch.grid.x), unsigned(block / launch.grid.x % launch.grid.y),
                        unsigned(block / launch.grid.x / launch.grid.y)};
  worker.alive = worker.thread_count;
  worker.at_barrier = worker.barrier_predicates = 0;
  for (int w = 0; w < worker.warp_count; ++w) {
    const int lanes = std::min(32, worker.thread_count - w * 32);
    worker.warps[w] = {};
    worker.warps[w].runnable = worker.warps[w].alive = lanes == 32 ? ~0u : (1u << lanes) - 1;
  }
  worker.runnable_warps = worker.warp_count == 32 ? ~0u : (1u << worker.warp_count) - 1;
  for (int t = 0; t < worker.thread_count; ++t) worker.threads[t].sp = nullptr, worker.threads[t].wait = Wait::nothing;
  if (worker.looked) std::fill_n(worker.looks, worker.thread_count, Looks());
  worker.looked = false;
  worker.random = config.seed * 0x9e3779b97f4a7c15u + block;
  // Poison: what a kernel reads before anyone wrote it is NaN in every floating-point type.
  for (const auto& variable : *worker.shared) {
    if (variable.owned) std::memset(worker.tls + variable.offset, 0xff, variable.size);
  }
  if (launch.dynamic_shared) {
    std::memset(worker.dynamic_shared, 0xff, size_t(worker.cluster - 1) * worker.block_shared + launch.dynamic_shared);
  }
  if (worker.xray) xray_begin_block(worker);
}

// False: a fault, told in worker.fault.
bool run_block(Worker& worker) {
  worker.crash_signal = -1;
  worker.warp = pick(worker, worker.runnable_warps);
  if (!choose(worker)) return true;
  simt_switch(&worker.main_sp, fresh_stack(worker));
  while (worker.pause_due && worker.crash_signal < 0 && worker.fault.empty() && worker.alive) {
    worker.pause_due = false;
    if (worker.gives_way) {
      worker.gives_way = false;
      if (!give_way(worker)) break;
    }
    if (worker.ask && Clock::now() - worker.asked > ASK_EVERY) {
      worker.asked = Clock::now();
      if ((worker.was_interrupted = worker.ask())) {
        worker.fault = "interrupted";
        break;
      }
    }
    Thread& next = worker.current();
    if (!next.sp) next.sp = fresh_stack(worker);
    simt_switch(&worker.main_sp, next.sp);
  }
  worker.pause_due = worker.gives_way = worker.waits_for_blocks = false;
  if (worker.crash_signal >= 0) worker.fault = explain_crash(worker);
  if (worker.copies_used) drop_copies(worker);
  if (worker.hopper_used) end_events(worker);
  if (worker.fault.empty()) {
    if (worker.xray) xray_end_block(worker);
    return true;
  }
  // The other threads' stacks are left as they are and used anew.
  worker.busy = false;
  worker.free_stacks.clear();
  for (int stack = worker.stacks_made; stack-- > 0;) {
    prepare_stack(worker, stack);  // one of them may have run over
    worker.free_stacks.push_back(stack);
  }
  return false;
}

// Runs blocks, from that of index `first` on, until none is left.
void work(Job& job, Worker& worker, bool launching, uint64_t first) {
  const Launch& launch = job.launch;
  worker.launch = &launch;
  worker.in_order = config.order == Order::forward;
  worker.cluster = job.cluster;
  worker.block_threads = int(launch.block.x * launch.block.y * launch.block.z);
  worker.block_shared = (launch.dynamic_shared + 1023) / 1024 * 1024;
  if (const size_t room = size_t(job.cluster) * worker.block_shared; room > worker.dynamic_room) {
    std::free(worker.dynamic_shared);
    worker.dynamic_room = room;
    worker.dynamic_shared = static_cast<char*>(std::aligned_alloc(1024, room));
  }
  worker.thread_count = worker.block_threads * job.cluster;
  worker.warp_count = (worker.thread_count + 31) / 32;
  worker.fault.clear();
  worker.barriers = worker.warp_syncs = 0;
  worker.tls = thread_local_segment();
  worker.shared = &job.shared;
  worker.xray = xray_attach(worker);

  ensure_signal_stack();
  ensure_watchdog(worker);

  const auto begin = worker.asked = Clock::now();
  worker.ask = launching ? interrupted : nullptr;
  worker.was_interrupted = false;
  bool alone = launching;
  for (uint64_t i = first; i < job.units && !job.stop.load(std::memory_order_relaxed);
       i = job.next.fetch_add(1, std::memory_order_relaxed)) {
    begin_block(worker, block_at(job, i) * uint64_t(job.cluster));
    if (!run_block(worker)) {
      std::lock_guard lock(job.mutex);
      job.was_interrupted |= worker.was_interrupted;
      if (job.fault.empty()) job.fault = worker.fault;
      job.end();
      break;
    }
    if (!launching) continue;
    const auto now = Clock::now();
    if (alone && now - begin > std::chrono::microseconds(20)) {
      std::lock_guard lock(job.mutex);
      alone = false, fill_cores(job);
    }
    if (worker.ask && now - worker.asked > ASK_EVERY) {
      worker.asked = now;
      if (worker.ask()) {
        std::lock_guard lock(job.mutex);
        job.was_interrupted = true, job.end();
      }
    }
  }

  if (worker.xray) xray_detach(worker);
  worker.xray = nullptr;
  std::lock_guard lock(job.mutex);
  std::erase(job.workers, &worker);
  fill_cores(job);
}

uint64_t gcd(uint64_t a, uint64_t b) { return b ? gcd(b, a % b) : a; }

void check(const Launch& launch) {
  const dim3 g = launch.grid, b = launch.block;
  const auto refuse = [&](const std::string& what) {
    throw std::invalid_argument("kernel " + std::string(launch.kernel) + " cannot be launched with grid " +
                                describe({g.x, g.y, g.z}) + ", block " + describe({b.x, b.y, b.z}) + ": " + what);
  };
  if (g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) refuse("a grid has at most (2147483647, 65535, 65535) blocks");
  if (b.x == 0 || b.y == 0 || b.z == 0) refuse("a block needs at least one thread");
  if (b.x > 1024 || b.y > 1024 || b.z > 64 || uint64_t(b.x) * b.y * b.z > MAX_THREADS) {
    refuse("a block has at most 1024 threads and 64 in z");
  }
  if (launch.dynamic_shared > MAX_SHARED) {
    refuse(std::to_string(launch.dynamic_shared) + " bytes of dynamic shared memory, at most " +
           std::to_string(MAX_SHARED) + " are allowed");
  }
}

void check_clusters(const Job& job) {
  const dim3 g = job.launch.grid, b = job.launch.block;
  const auto refuse = [&](const std::string& what) {
    throw std::invalid_argument("kernel " + std::string(job.launch.kernel) + " cannot be launched in clusters of " +
                                std::to_string(job.cluster) + " blocks: " + what);
  };
  if (g.x % unsigned(job.cluster) || g.y != 1 || g.z != 1) refuse("its grid has " + describe({g.x, g.y, g.z}));
  const unsigned threads = b.x * b.y * b.z;
  if (threads % 128 || threads * unsigned(job.cluster) > unsigned(MAX_THREADS)) {
    refuse("the CPU device runs a cluster as one block, of at most 1024 threads, each block whole groups of 128; got " +
           std::to_string(threads) + " a block");
  }
  for (const SharedVariable& variable : job.shared) {
    if (variable.owned) refuse("the CPU device has dynamic shared memory for each of them, but one " + variable.name);
  }
}

}  // namespace

void launch_clusters(const Launch& launch, int cluster);
void launch(const Launch& launch) { launch_clusters(launch, 1); }

void launch_clusters(const Launch& launch, int cluster) {
  check(launch);
  if (!launch.blocks) return;
  Job job(launch, shared_variables_of(launch.entry), cluster);
  if (cluster > 1) check_clusters(job);
  if (config.order == Order::random) {
    uint64_t state = config.seed;
    job.start = next_random(state) % job.units;
    do job.step = next_random(state) % job.units | 1;
    while (gcd(job.step, job.units) != 1);
  }
  ensure_signals();
  xray_begin_launch(launch, job.shared);

  // The launching thread begins alone; only a launch that lasts is worth waking other cores for.
  Worker* own = take_worker(true, false);
  enlist(job, *own);
  work(job, *own, true, job.next++);
  return_worker(own);
  for (size_t i = 0;; ++i) {  // one of them may begin another
    std::unique_lock lock(job.mutex);
    if (i == job.threads.size()) break;
    std::thread thread = std::move(job.threads[i]);
    lock.unlock();
    thread.join();
  }
  xray_end_launch();
  if (job.was_interrupted) throw Interrupted();
  if (!job.fault.empty()) throw Fault(job.fault);
}

}  // namespace simt
