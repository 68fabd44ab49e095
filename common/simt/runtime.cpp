// The CPU device: fibers, the scheduler of a block, launches over the cores.
#include "common/simt/runtime.h"

#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

extern "C" {
// Saves the callee-saved registers on the stack and its pointer in *from, continues where `to` was saved.
__attribute__((visibility("hidden"))) void simt_switch(void** from, void* to);
__attribute__((visibility("hidden"))) void simt_resume();  // its second half, entered by the signal handler

struct tls_place {
  unsigned long module, offset;
};
void* __tls_get_addr(tls_place*);
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
  const unsigned t = unsigned(thread), x = launch->block.x, y = launch->block.y;
  return {t % x, t / x % y, t / (x * y)};
}

// ---- stacks -------------------------------------------------------------------------------------------------------
namespace {

constexpr int MAX_WORKERS = 64;
constexpr size_t SLAB_SIZE = size_t(MAX_THREADS) * STACK_SIZE;
constexpr size_t SLAB_GUARD =
    size_t(2) << 20;  // below each worker's stacks; as large as a large page, to keep them aligned
constexpr size_t LARGE_PAGES = size_t(16) << 20;  // of a worker's stacks: 256 of them, the usual block
uintptr_t stacks_low = 0, stacks_high = 0;
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

bool on_fiber(uintptr_t address) { return address - stacks_low < stacks_high - stacks_low; }

// ---- the scheduler of a block -------------------------------------------------------------------------------------
namespace {

uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

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

std::string head(const Worker& worker) {
  return "kernel " + std::string(worker.launch->kernel) + ", block " + describe(worker.block_index) + ": ";
}

// An address in the module's code as a token that Python turns into file and line.
std::string code_place(uintptr_t pc) {
  char text[40];
  std::snprintf(text, sizeof text, "{pc:0x%zx}", size_t(pc - module().base));
  return text;
}

std::string hex(unsigned value) {
  char text[16];
  std::snprintf(text, sizeof text, "0x%08x", value);
  return text;
}

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
  ++worker.switches;
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
    ++worker.switches;
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
      // Everyone waits for a change, which may still come from a block on another core: but not for ever.
      if (worker.spins_watched != worker.switches) {
        worker.spins_watched = worker.switches;
        worker.spins_since = std::chrono::steady_clock::now();
      }
      if (++worker.spins % 64) continue;
      std::this_thread::yield();
      const auto waited = std::chrono::steady_clock::now() - worker.spins_since;
      if (std::chrono::duration<double>(waited).count() < config.timeout) continue;
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
  here.block = worker.block_index;
  here.block_size = worker.launch->block;
  here.grid_size = worker.launch->grid;
  here.log = nullptr;
  if (worker.xray) xray_begin_thread(worker, here, worker.lane);
}

void fail(Worker& worker, std::string why) {
  worker.fault = std::move(why);
  simt_switch(&worker.current().sp, worker.main_sp);  // never resumed
}

std::string too_much_local_memory() {
  return "more local memory than its " + std::to_string(STACK_SIZE / 1024) + " KiB";
}

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
    ++worker.switches;
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
  if (choose(worker)) {
    Thread& next = worker.current();
    if (&next == &thread) return;
    if (!next.sp) next.sp = fresh_stack(worker);
    to = next.sp;
  }
  if (worker.pause_due) {
    worker.resume_sp = to;
    to = worker.main_sp;
  }
  simt_switch(&thread.sp, to);
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

void spin(const void* caller) {
  Worker& worker = *here()->worker;
  Thread& thread = worker.current();
  Warp& warp = worker.warps[worker.warp];
  thread.wait = Wait::spin;
  thread.caller = caller;
  warp.spinning |= 1u << worker.lane;
  warp.runnable &= ~(1u << worker.lane);
  yield(worker);
  thread.wait = Wait::nothing;
}

void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
unsigned active_mask() {
  const Worker& worker = *here()->worker;
  return worker.warps[worker.warp].alive;
}
unsigned lane_id() { return unsigned(here()->worker->lane); }
void* dynamic_shared() { return here()->worker->dynamic_shared; }

void trap(const char* why, const char* file, int line) {
  Worker& worker = *here()->worker;
  Thread& thread = worker.current();
  thread.file = file, thread.line = line;
  fail(worker, head(worker) + "thread " + describe(here()->thread) + " stopped at " + why + ", " + place_of(thread));
  __builtin_unreachable();
}

// ---- signals: a crash inside a kernel, a thread that never ends ---------------------------------------------------
namespace {

int watchdog_signal() { return SIGRTMIN + 5; }

uintptr_t program_counter(const ucontext_t* context) {
#if defined(__x86_64__)
  return uintptr_t(context->uc_mcontext.gregs[REG_RIP]);
#else
  return uintptr_t(context->uc_mcontext.pc);
#endif
}
uintptr_t stack_pointer_of(const ucontext_t* context) {
#if defined(__x86_64__)
  return uintptr_t(context->uc_mcontext.gregs[REG_RSP]);
#else
  return uintptr_t(context->uc_mcontext.sp);
#endif
}
void continue_at(ucontext_t* context, void (*code)(), void* sp) {
#if defined(__x86_64__)
  context->uc_mcontext.gregs[REG_RIP] = greg_t(code);
  context->uc_mcontext.gregs[REG_RSP] = greg_t(sp);
#else
  context->uc_mcontext.pc = uintptr_t(code);
  context->uc_mcontext.sp = uintptr_t(sp);
#endif
}

// Makes the interrupted fiber continue in its worker's main context instead.
void leave_fiber(Worker& worker, ucontext_t* context, int signal, uintptr_t address) {
  worker.crash_signal = signal;
  worker.crash_address = address;
  worker.crash_pc = program_counter(context);
  worker.crash_sp = stack_pointer_of(context);
  continue_at(context, simt_resume, worker.main_sp);
}

// Whose stacks an address lies on, told by the address alone: what is on the stack may be overwritten.
Worker* worker_at(uintptr_t sp) {
  return on_fiber(sp) ? worker_of_slab[(sp - stacks_low) / (SLAB_GUARD + SLAB_SIZE)] : nullptr;
}

// Whose the signals were before us, the latest last. Other modules of this kind install handlers of their own over ours
// and pass on to us what is not theirs: then the next older one is asked.
struct Before {
  struct sigaction actions[16];
  int count = 0, depth = 0;
} before[32];

void on_crash(int signal, siginfo_t* info, void* raw) {
  auto* context = static_cast<ucontext_t*>(raw);
  if (Worker* worker = worker_at(stack_pointer_of(context))) {
    return leave_fiber(*worker, context, signal, uintptr_t(info->si_addr));
  }
  Before& others = before[signal];
  const int index = others.count - 1 - others.depth;
  if (index >= 0 && others.actions[index].sa_flags & SA_SIGINFO) {
    ++others.depth;
    others.actions[index].sa_sigaction(signal, info, raw);
    --others.depth;
  } else if (index >= 0 && others.actions[index].sa_handler != SIG_DFL && others.actions[index].sa_handler != SIG_IGN) {
    ++others.depth;
    others.actions[index].sa_handler(signal);
    --others.depth;
  } else {
    ::signal(signal, SIG_DFL);  // the access happens again, and ends the process as it would have without us
  }
}

// The timer brings its worker along, so that the handler of any module of this kind serves the timers of all.
void on_watchdog(int, siginfo_t* info, void* raw) {
  auto* worker = static_cast<Worker*>(info->si_value.sival_ptr);
  worker->tick(*worker, raw);
}

void tick(Worker& worker, void* raw) {
  auto* context = static_cast<ucontext_t*>(raw);
  if (worker_at(stack_pointer_of(context)) != &worker) return;
  // Threads that wait for each other in loops are told by the scheduler, which knows where.
  const uint64_t progress = worker.switches + worker.spins;
  if (worker.busy.load(std::memory_order_relaxed) || progress != worker.watched) {
    worker.watched = progress;
    return;
  }
  leave_fiber(worker, context, 0, 0);
}

bool same(const struct sigaction& a, const struct sigaction& b) { return a.sa_handler == b.sa_handler; }

// A launch asks the system once whether the crash handlers are still ours; everything else was done before.
void ensure_signals() {
  struct sigaction current;
  sigaction(SIGSEGV, nullptr, &current);
  if (current.sa_flags & SA_SIGINFO && current.sa_sigaction == on_crash) return;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  struct sigaction action = {};
  action.sa_sigaction = on_crash;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) {
    sigaction(signal, &action, &current);
    if (same(current, action)) continue;
    Before& others = before[signal];
    int kept = 0;
    for (int i = 0; i < others.count; ++i) {
      if (!same(others.actions[i], current) && kept < 15) others.actions[kept++] = others.actions[i];
    }
    others.actions[kept++] = current;
    others.count = kept;
  }
  action.sa_sigaction = on_watchdog;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigaction(watchdog_signal(), &action, nullptr);
}

// The handlers need a stack that is not the fiber's, which may be the one that overflowed. One for each OS thread.
struct SignalStack {
  std::unique_ptr<char[]> memory;
  void ensure() {
    if (memory) return;
    memory.reset(new char[SIGNAL_STACK]);
    stack_t before_us;
    sigaltstack(nullptr, &before_us);
    if (!(before_us.ss_flags & SS_DISABLE)) return;  // somebody else's serves as well
    stack_t own = {};
    own.ss_sp = memory.get();
    own.ss_size = SIGNAL_STACK;
    sigaltstack(&own, nullptr);
  }
  ~SignalStack() {
    stack_t now;
    sigaltstack(nullptr, &now);
    if (!memory || now.ss_sp != memory.get()) return;
    now.ss_flags = SS_DISABLE;
    sigaltstack(&now, nullptr);
  }
};
thread_local SignalStack signal_stack;

// A clock of the worker's own CPU time, so that a busy machine is not taken for a stuck thread. It goes on ticking
// after the launch, once in a while, which costs less than to start and stop it.
void ensure_watchdog(Worker& worker) {
  static thread_local const pid_t thread = pid_t(syscall(SYS_gettid));
  if (worker.timer_thread == thread && worker.timer_timeout == config.timeout) return;
  if (worker.timer_thread != thread) {
    if (worker.timer_thread) timer_delete(worker.timer);
    worker.tick = tick;
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = watchdog_signal();
    event.sigev_value.sival_ptr = &worker;
    event._sigev_un._tid = thread;
    worker.timer_thread = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &worker.timer) == 0 ? thread : 0;
    if (!worker.timer_thread) return;
  }
  worker.timer_timeout = config.timeout;
  const double half = std::max(config.timeout, 0.01) / 2;
  itimerspec when = {};
  when.it_value.tv_sec = when.it_interval.tv_sec = time_t(half);
  when.it_value.tv_nsec = when.it_interval.tv_nsec = long((half - double(time_t(half))) * 1e9);
  timer_settime(worker.timer, 0, &when, nullptr);
}

// The kernel's own place, for a thread that was stopped inside the device's code or a library: the first return address
// on its stack that lies in the kernel.
uintptr_t kernel_place(const Worker& worker) {
  const auto entry = uintptr_t(worker.launch->entry);
  if (function_at(worker.crash_pc) == entry || is_device_function(worker.crash_pc)) return worker.crash_pc + 1;
  const uintptr_t end = (worker.crash_sp | (STACK_SIZE - 1)) + 1;
  for (uintptr_t word = worker.crash_sp & ~uintptr_t(7); word < end; word += 8) {
    const uintptr_t value = *reinterpret_cast<const uintptr_t*>(word);
    if (function_at(value) == entry) return value;
  }
  return worker.crash_pc + 1;
}

std::string explain_crash(Worker& worker) {
  const std::string thread = "thread " + describe(worker.thread_index(worker.warp * 32 + worker.lane));
  const Module& m = module();
  const uintptr_t pc = kernel_place(worker);  // as if it had returned there
  const std::string place = pc >= m.low && pc < m.high ? " at " + code_place(pc) : "";
  if (worker.crash_signal == 0) {
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%g", config.timeout);
    const std::string others = who_waits(worker);
    return head(worker) + "timeout: " + thread + " ran for " + seconds + " s" + place +
           " without returning or reaching a barrier" + (others.empty() ? "" : "; " + others);
  }
  const char* const name = strsignal(worker.crash_signal);
  std::string what = name ? name : "signal";
  if (worker.crash_signal == SIGSEGV || worker.crash_signal == SIGBUS) {
    if (worker.crash_address - uintptr_t(worker.slab) + SLAB_GUARD < SLAB_GUARD) {
      what = "used " + too_much_local_memory();
    } else {
      const std::string where = xray_place(reinterpret_cast<void*>(worker.crash_address));
      char address[32];
      std::snprintf(address, sizeof address, "0x%zx", size_t(worker.crash_address));
      what =
          "access to memory that is not there, address " + std::string(address) + (where.empty() ? "" : ", " + where);
    }
  }
  return head(worker) + "crash: " + thread + place + ": " + what;
}

}  // namespace

// ---- the module: where it lies, its shared variables --------------------------------------------------------------
namespace {

thread_local char tls_anchor;  // makes the module have a thread-local segment

int find_module(dl_phdr_info* info, size_t, void* raw) {
  auto& found = *static_cast<std::pair<Module, std::string>*>(raw);
  const uintptr_t own = uintptr_t(&config);
  uintptr_t low = UINTPTR_MAX, high = 0;
  size_t tls_size = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type == PT_LOAD) {
      low = std::min(low, uintptr_t(info->dlpi_addr + header.p_vaddr));
      high = std::max(high, uintptr_t(info->dlpi_addr + header.p_vaddr + header.p_memsz));
    }
    if (header.p_type == PT_TLS) tls_size = header.p_memsz;
  }
  if (own < low || own >= high) return 0;
  found.first.base = info->dlpi_addr;
  found.first.low = low, found.first.high = high;
  found.first.tls_index = info->dlpi_tls_modid, found.first.tls_size = tls_size;
  found.second = info->dlpi_name;
  return 1;
}

struct Symbols {
  std::map<uintptr_t, std::string> functions;  // address -> mangled name
  std::vector<SharedVariable> variables;
};

// _ZZ <function> E <length> <name>: a variable of a function. Those of libraries are not kernels' shared memory.
void add_variable(Symbols& symbols, const std::string& mangled, size_t offset, size_t size) {
  if (mangled.rfind("_ZZ", 0) != 0 || mangled.find("pybind11") != std::string::npos) return;
  if (mangled.rfind("_ZZN4simt", 0) == 0 || mangled.rfind("_ZZNSt", 0) == 0 || mangled.rfind("_ZZNKSt", 0) == 0) return;
  for (size_t e = mangled.rfind('E'); e != std::string::npos && e > 3; e = mangled.rfind('E', e - 1)) {
    char* name = nullptr;
    const unsigned long length = std::strtoul(mangled.c_str() + e + 1, &name, 10);
    if (length == 0 || length > std::strlen(name) || (name[length] && name[length] != '_')) continue;
    symbols.variables.push_back({std::string(name, length), "_Z" + mangled.substr(3, e - 3), offset, size, false});
    return;
  }
}

// Reads the module's own symbol table: functions, and thread-local variables that stand inside a function.
Symbols read_symbols(const std::string& path, uintptr_t base) {
  Symbols result;
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return result;
  struct stat status;
  fstat(file, &status);
  const size_t size = size_t(status.st_size);
  void* memory = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (memory == MAP_FAILED) return result;
  const char* bytes = static_cast<const char*>(memory);
  const auto* elf = reinterpret_cast<const ElfW(Ehdr)*>(bytes);
  const auto* sections = reinterpret_cast<const ElfW(Shdr)*>(bytes + elf->e_shoff);
  for (int s = 0; s < elf->e_shnum; ++s) {
    if (sections[s].sh_type != SHT_SYMTAB) continue;
    const auto* symbols = reinterpret_cast<const ElfW(Sym)*>(bytes + sections[s].sh_offset);
    const char* names = bytes + sections[sections[s].sh_link].sh_offset;
    for (size_t i = 0; i < sections[s].sh_size / sizeof(ElfW(Sym)); ++i) {
      const std::string name = names + symbols[i].st_name;
      const int type = symbols[i].st_info & 0xf;
      if (symbols[i].st_shndx == SHN_UNDEF) continue;
      if (type == STT_FUNC) result.functions.emplace(base + symbols[i].st_value, name);
      if (type == STT_TLS) add_variable(result, name, symbols[i].st_value, symbols[i].st_size);
    }
  }
  munmap(memory, size);
  return result;
}

struct Loaded {
  Module module;
  Symbols symbols;
};

const Loaded& loaded() {
  static const Loaded result = [] {
    tls_anchor = 0;
    std::pair<Module, std::string> found;
    dl_iterate_phdr(find_module, &found);
    Loaded all{found.first, read_symbols(found.second.empty() ? "/proc/self/exe" : found.second, found.first.base)};
    all.module.shared = all.symbols.variables;
    return all;
  }();
  return result;
}

}  // namespace

const Module& module() { return loaded().module; }

uintptr_t function_at(uintptr_t pc) {
  const auto& functions = loaded().symbols.functions;
  const auto next = functions.upper_bound(pc);
  return next == functions.begin() || pc >= module().high ? 0 : std::prev(next)->first;
}

bool is_device_function(uintptr_t pc) {
  const auto function = loaded().symbols.functions.find(function_at(pc));
  if (function == loaded().symbols.functions.end()) return false;
  const std::string& name = function->second;
  return name.find("4simt") == std::string::npos && name.rfind("__tsan", 0) != 0 && name.rfind("simt_", 0) != 0;
}

namespace {
std::vector<const void*>& kernels() {
  static std::vector<const void*> all;
  return all;
}
}  // namespace

bool register_kernel(const void* entry) {
  kernels().push_back(entry);
  return true;
}

const std::vector<SharedVariable>& shared_variables_of(const void* entry) {
  static std::mutex mutex;
  static std::map<const void*, std::vector<SharedVariable>> known;
  std::lock_guard lock(mutex);
  auto [result, fresh] = known.try_emplace(entry);
  if (fresh) {
    const Symbols& symbols = loaded().symbols;
    result->second = symbols.variables;
    for (auto& variable : result->second) variable.owned = true;
    for (const void* other : kernels()) {
      const auto name = symbols.functions.find(uintptr_t(other));
      if (other == entry || name == symbols.functions.end()) continue;
      for (auto& variable : result->second) variable.owned &= variable.kernel != name->second;
    }
  }
  return result->second;
}

// ---- launches -----------------------------------------------------------------------------------------------------
namespace {

std::mutex pool_mutex;
std::condition_variable pool_changed;
std::vector<std::unique_ptr<Worker>> pool;  // all that were ever made
std::vector<Worker*> idle;

Worker* take_worker(bool wait) {
  std::unique_lock lock(pool_mutex);
  static std::once_flag once;
  std::call_once(once, reserve_stacks);
  while (idle.empty() && pool.size() == MAX_WORKERS) {
    if (!wait) return nullptr;
    pool_changed.wait(lock);
  }
  if (idle.empty()) {
    auto worker = std::make_unique<Worker>();
    worker->slab = reinterpret_cast<char*>(stacks_low + pool.size() * (SLAB_GUARD + SLAB_SIZE) + SLAB_GUARD);
    if (mprotect(worker->slab, SLAB_SIZE, PROT_READ | PROT_WRITE)) {
      throw std::runtime_error("the CPU device could not get memory for its stacks");
    }
    madvise(worker->slab, LARGE_PAGES, MADV_HUGEPAGE);  // where the system has none, it goes on without
    worker->free_stacks.reserve(MAX_THREADS);
    worker->dynamic_shared = static_cast<char*>(std::aligned_alloc(1024, MAX_SHARED + 1024));
    worker_of_slab[pool.size()] = worker.get();
    pool.push_back(std::move(worker));
    return pool.back().get();
  }
  Worker* worker = idle.back();
  idle.pop_back();
  return worker;
}

void return_worker(Worker* worker) {
  std::lock_guard lock(pool_mutex);
  idle.push_back(worker);
  pool_changed.notify_one();
}

// What one launch shares over its workers.
struct Job {
  const Launch& launch;
  const std::vector<SharedVariable>& shared;
  std::atomic<uint64_t> next{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::string fault;
  bool was_interrupted = false;
  uint64_t step = 1, start = 0;  // of the random order

  Job(const Launch& launch, const std::vector<SharedVariable>& shared) : launch(launch), shared(shared) {}
};

uint64_t block_at(const Job& job, uint64_t i) {
  switch (config.order) {
    case Order::forward: return i;
    case Order::reverse: return job.launch.blocks - 1 - i;
    case Order::random: break;
  }
  return uint64_t((__uint128_t(i) * job.step + job.start) % job.launch.blocks);
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
  worker.random = config.seed * 0x9e3779b97f4a7c15u + block;
  // Poison: what a kernel reads before anyone wrote it is NaN in every floating-point type.
  for (const auto& variable : *worker.shared) {
    if (variable.owned) std::memset(worker.tls + variable.offset, 0xff, variable.size);
  }
  if (launch.dynamic_shared) std::memset(worker.dynamic_shared, 0xff, launch.dynamic_shared);
  if (worker.xray) xray_begin_block(worker);
}

// False: a fault, told in worker.fault.
bool run_block(Worker& worker) {
  worker.crash_signal = -1;
  worker.warp = pick(worker, worker.runnable_warps);
  if (!choose(worker)) return true;
  simt_switch(&worker.main_sp, fresh_stack(worker));
  while (worker.pause_due && worker.crash_signal < 0) {
    worker.pause_due = false;
    worker.asked = Clock::now();
    if (worker.ask()) {
      worker.was_interrupted = true;
      worker.fault = "interrupted";
      break;
    }
    if (worker.resume_sp == worker.main_sp) break;  // the block has ended meanwhile
    simt_switch(&worker.main_sp, worker.resume_sp);
  }
  if (worker.crash_signal >= 0) worker.fault = explain_crash(worker);
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

void work(Job& job, Worker& worker, bool launching, const std::function<void()>& after_first) {
  const Launch& launch = job.launch;
  worker.launch = &launch;
  worker.in_order = config.order == Order::forward;
  worker.thread_count = int(launch.block.x * launch.block.y * launch.block.z);
  worker.warp_count = (worker.thread_count + 31) / 32;
  worker.fault.clear();
  worker.barriers = worker.warp_syncs = 0;
  tls_anchor = 0;
  tls_place place{module().tls_index, 0};
  worker.tls = static_cast<char*>(__tls_get_addr(&place));
  worker.shared = &job.shared;
  worker.xray = xray_attach(worker);

  signal_stack.ensure();
  ensure_watchdog(worker);

  const auto begin = worker.asked = Clock::now();
  worker.ask = launching ? interrupted : nullptr;
  worker.pause_due = worker.was_interrupted = false;
  bool first = true;
  while (!job.stop.load(std::memory_order_relaxed)) {
    const uint64_t i = job.next.fetch_add(1, std::memory_order_relaxed);
    if (i >= launch.blocks) break;
    begin_block(worker, block_at(job, i));
    if (!run_block(worker)) {
      std::lock_guard lock(job.mutex);
      job.was_interrupted |= worker.was_interrupted;
      if (job.fault.empty()) job.fault = worker.fault;
      job.stop = true;
      break;
    }
    if (!launching) continue;
    const auto now = Clock::now();
    if (first && now - begin > std::chrono::microseconds(20)) first = false, after_first();
    if (worker.ask && now - worker.asked > ASK_EVERY) {
      worker.asked = now;
      if (worker.ask()) job.was_interrupted = job.stop = true;
    }
  }

  if (worker.xray) xray_detach(worker);
  worker.xray = nullptr;
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

}  // namespace

void launch(const Launch& launch) {
  check(launch);
  if (!launch.blocks) return;
  Job job(launch, shared_variables_of(launch.entry));
  if (config.order == Order::random) {
    uint64_t state = config.seed;
    job.start = next_random(state) % launch.blocks;
    do job.step = next_random(state) % launch.blocks | 1;
    while (gcd(job.step, launch.blocks) != 1);
  }
  ensure_signals();
  xray_begin_launch(launch, job.shared);

  // The launching thread begins alone; only a launch that lasts is worth waking other cores for.
  std::vector<std::thread> helpers;
  Worker* own = take_worker(true);
  const auto start_helpers = [&] {
    const uint64_t left = launch.blocks - std::min(launch.blocks, job.next.load());
    const int wanted = int(std::min<uint64_t>(left, uint64_t(worker_limit() - 1)));
    for (int i = 0; i < wanted; ++i) {
      Worker* worker = take_worker(false);
      if (!worker) break;
      helpers.emplace_back([&job, worker] {
        work(job, *worker, false, {});
        return_worker(worker);
      });
    }
  };
  work(job, *own, true, start_helpers);
  return_worker(own);
  for (auto& helper : helpers) helper.join();
  xray_end_launch();
  if (job.was_interrupted) throw Interrupted();
  if (!job.fault.empty()) throw Fault(job.fault);
}

}  // namespace simt
