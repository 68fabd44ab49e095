// The CPU device, inside: what runtime.cpp (fibers, scheduling, launches) and xray.cpp (counts, faults) share.
#pragma once

#include <sys/types.h>
#include <time.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/simt/launch.h"
#include "common/simt/simt.h"

// The second half of the switch between fibers: continues what the stack pointer was left at. (runtime.cpp)
extern "C" __attribute__((visibility("hidden"))) void simt_resume();

namespace simt {

// Deadlock, divergent barrier, a crash inside a kernel. {pc:0x..} in its text is an offset in the module's file.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The launch was given up because the caller's interrupt arrived (Ctrl-C); the interrupt itself is the caller's.
struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("interrupted") {}
};

enum class Order { forward, reverse, random };

struct Config {
  Order order = Order::forward;
  uint64_t seed = 0;
  int workers = 0;        // OS threads for the blocks of a launch, 0: one a core
  double timeout = 10.0;  // seconds a thread may run without ever letting another one run, or blocks wait for blocks
};
extern Config config;
int worker_limit();

// Called now and then from the launching thread; true: give up.
extern bool (*interrupted)();

constexpr int MAX_THREADS = 1024, MAX_WARPS = 32;
constexpr size_t MAX_SHARED = 227 * 1024;  // what a block of an H100 can have
constexpr size_t SIGNAL_STACK = 64 * 1024;
constexpr size_t SLAB_GUARD =
    size_t(2) << 20;  // below a worker's stacks; as large as a large page, to keep them aligned

// A `__shared__` variable: a thread-local symbol of the module that belongs to a function.
struct SharedVariable {
  std::string name, kernel;  // kernel: mangled name of the function it stands in
  size_t offset, size;       // in the module's thread-local segment
  bool owned;                // by the kernel of the present launch, or by a device function that it may call
};
struct Module {
  uintptr_t base = 0, low = 0, high = 0;  // load address, extent of its segments
  size_t tls_index = 0, tls_size = 0;
  std::vector<SharedVariable> shared;
};
const Module& module();
char* thread_local_segment();           // the module's, on this OS thread
uintptr_t function_at(uintptr_t pc);    // the start of the module's function that holds an address, 0 for none
bool is_device_function(uintptr_t pc);  // of the kernel's file, not of the CPU device
const std::vector<SharedVariable>& shared_variables_of(const void* entry);  // with owned set

enum class Wait : uint8_t { nothing, barrier, warp, spin, event, done };

struct Thread {
  void* sp = nullptr;  // where it left off; null: not begun
  const char* what = nullptr;
  const char* file = nullptr;
  int line = 0;
  Wait wait = Wait::nothing;
  unsigned mask = 0;
  WarpOperation operation = nullptr;
  void* argument = nullptr;
  const void* caller = nullptr;  // of what waits in a loop
};
static_assert(sizeof(Thread) == 64);  // a line of the cache for each

// What a thread has looked at by load_acquire since it let others run.
struct Looks {
  const void* last = nullptr;
  int count = 0;
};

struct Warp {
  unsigned runnable = 0, alive = 0, meeting = 0, spinning = 0, paused = 0;
  unsigned waiting = 0;      // lanes, for an event (hopper.cpp)
  unsigned catching_up = 0;  // lanes about to do what orders them with other blocks: the x-ray counts what was before
};

// The asynchronous copies of a thread that have not been made. (async_copy.cpp)
struct Copy {
  void* to;
  const void* from;
  uint32_t group;  // how many groups were closed before it was issued
  int size;
  bool inside;  // not: zeros
};
struct Copies {
  std::vector<Copy> waiting;
  uint32_t groups = 0;  // that were closed
};

struct XrayWorker;
struct Job;
struct Hopper;  // the machine of common/hopper.h (hopper.cpp)

struct Worker {
  Thread threads[MAX_THREADS + 1];
  Warp warps[MAX_WARPS];
  unsigned runnable_warps = 0, meeting_warps = 0, spinning_warps = 0;
  int thread_count = 0, warp_count = 0, alive = 0, at_barrier = 0;  // of all blocks of a cluster, which run as one
  int warp = 0, lane = 0;                                           // who runs
  int barrier_predicates = 0, barrier_result = 0, barrier_threads = 0, barrier_line = 0;
  const char* barrier_file = nullptr;
  Thread* barrier_first = nullptr;
  bool in_order = true;  // forward

  const Launch* launch = nullptr;
  int cluster = 1;          // blocks
  int block_threads = 0;    // of each of them
  size_t block_shared = 0;  // bytes from the dynamic shared memory of one to that of the next
  uint64_t block = 0;       // linear index, of the first one
  uint3 block_index{};
  uint64_t random = 0;

  char* slab = nullptr;  // the stacks
  int stacks_made = 0;
  std::vector<int> free_stacks;
  void* main_sp = nullptr;

  char* dynamic_shared = nullptr;
  size_t dynamic_room = 0;  // bytes
  char* tls = nullptr;      // the module's thread-local segment on this OS thread
  const std::vector<SharedVariable>* shared = nullptr;

  bool (*ask)() = nullptr;  // the launching thread's: is there an interrupt?
  std::chrono::steady_clock::time_point asked;
  bool pause_due = false, was_interrupted = false;

  std::atomic<uint64_t> switches{0};  // progress
  std::atomic<uint64_t> spins{0};     // times that all threads waited for a change
  uint64_t watched = 0;               // what the watchdog saw of it
  std::atomic<bool> busy{false};      // inside the device's own code: the watchdog waits

  Job* job = nullptr;
  bool waits_for_blocks = false;  // a thread has said that it waits for what another block does
  bool gives_way = false;         // to another block, at the next pause
  bool spare = false;             // made for a block that runs while another one waits
  bool has_turn = true;
  std::condition_variable turn;
  uint64_t switches_seen = 0, spins_seen = 0;      // when the launch was last looked at for blocks that wait for ever
  void (*tick)(Worker&, void* context) = nullptr;  // what the watchdog does
  timer_t timer{};
  pid_t timer_thread = 0;
  double timer_timeout = 0;
  int crash_signal = -1;  // 0: the watchdog
  uintptr_t crash_address = 0, crash_pc = 0, crash_sp = 0;
  std::string fault;
  uint64_t barriers = 0, warp_syncs = 0;

  Looks looks[MAX_THREADS];
  bool looked = false;  // the present block has

  std::vector<Copies> copies;  // of each thread; of no thread before a kernel makes the first one
  bool copies_used = false;    // by the present block

  std::shared_ptr<Hopper> hopper;
  bool hopper_used = false;  // by the present block

  XrayWorker* xray = nullptr;  // set while a recording is on

  Thread& current() { return threads[warp * 32 + lane]; }
  int rank_of(int thread) const { return cluster == 1 ? 0 : thread / block_threads; }  // of its block in the cluster
  uint3 thread_index(int thread) const;
  uint3 block_index_of(int thread) const {
    return {block_index.x + unsigned(rank_of(thread)), block_index.y, block_index.z};
  }
};

extern uintptr_t stacks_low, stacks_high;  // where the stacks of all workers lie
inline bool on_fiber(uintptr_t address) { return address - stacks_low < stacks_high - stacks_low; }
Worker* worker_at(uintptr_t sp);
std::string describe(uint3 index);

// ---- texts of faults ----------------------------------------------------------------------------------------------
std::string head(const Worker& worker);
std::string code_place(uintptr_t pc);
std::string who_waits(const Worker& worker);
std::string too_much_local_memory();

// ---- signals.cpp --------------------------------------------------------------------------------------------------
void ensure_signals();
void ensure_signal_stack();
void ensure_watchdog(Worker& worker);
std::string explain_crash(Worker& worker);

// Lets the next thread run; returns when the caller runs again.
void yield(Worker& worker);

// Counters that one thread changes and others read.
inline void increment(std::atomic<uint64_t>& counter) {
  counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}
uint64_t next_random(uint64_t& state);

// Ends the launch with a fault. The thread that calls it does not run again.
[[noreturn]] void fail(Worker& worker, std::string why);

// Reads a byte, so that an address that is nowhere crashes here.
inline void probe(const void* address) { static_cast<void>(*static_cast<const volatile char*>(address)); }

// Forgets the copies of a block that has ended: what no thread has waited for is never made.
void drop_copies(Worker& worker);

// ---- hopper.cpp ---------------------------------------------------------------------------------------------------
bool release_events(Worker& worker);  // no thread can run: does any go on now?
std::string event_of(const Worker& worker, int thread);
void end_events(Worker& worker);                                                        // of a block that has ended
void barrier_in_cluster(Worker& worker, const char* what, const char* file, int line);  // of the thread's own block

// ---- what the runtime asks of the x-ray ---------------------------------------------------------------------------
void xray_begin_launch(const Launch& launch, const std::vector<SharedVariable>& shared);
void xray_end_launch();
XrayWorker* xray_attach(Worker& worker);  // null when no recording is on
void xray_detach(Worker& worker);
void xray_begin_block(Worker& worker);
void xray_end_block(Worker& worker);
void xray_begin_thread(Worker& worker, Here& here, int lane);
void xray_flush_warp(Worker& worker);  // the warp has no lane left that can run: count what its lanes logged
void xray_barrier(Worker& worker);
void xray_sync_warp(Worker& worker, int warp, unsigned mask);
// Called by the thread that does it, with the place of the call in the kernel. (hooks.cpp)
void xray_copy(const void* to, const void* from, int size, bool inside, const void* caller);
void xray_copied(const void* to, int size, const void* caller);
void xray_matrix_row(const void* row, bool takes_part, const void* caller);
// Of what orders blocks: counts all that the warp did before, then the access. True: nobody else's release, acquire or
// atomic comes in between until the access itself is done, and xray_handed_on has said what it was.
enum class Handing { acquire, release, atomic, relaxed_load, relaxed_store };
bool xray_acquires(const void* address, int size, const void* caller);
bool xray_releases(const void* address, int size, const void* caller);
void xray_handed_on(const void* address, Handing what);
void xray_fence();
void xray_store_row(const void* row, const void* caller);
void xray_catch_up(Worker& worker);  // returns when what the warp's lanes did before is counted

// Of Hopper's machine. (xray.cpp, but for the last one of them) What a thread knows that others have done, and how far
// copies and products have come: times, of each thread of the block and of each of those that work beside them, who are
// told apart by any address of their own.
using Knowledge = std::vector<uint32_t>;
void xray_begin_knowledge(Worker& worker);
void xray_learn(Worker& worker, const std::vector<int>& threads);   // all that any of them has done, each of them knows
void xray_give(Worker& worker, Knowledge& to);                      // all that the running thread has done, and knows
void xray_take(Worker& worker, int thread, const Knowledge& from);  // a thread knows it from now on
void xray_agent_done(Worker& worker, const void* agent, Knowledge& to);
void xray_fence_async(Worker& worker);
void xray_barrier_made(Worker& worker, const void* barrier, const void* caller);
void xray_use_barrier(Worker& worker, const void* barrier, bool by_copies, const void* caller);
struct Chunk {  // 16 bytes of shared memory, and of global memory as many as there are
  uintptr_t shared, global;
  int bytes;
};
// These two begin; `matrix`, the first of its bytes, is none where a box that goes to several blocks has been read.
void xray_load(Worker& worker, const std::vector<Chunk>& chunks, const void* matrix, const void* caller);
void xray_store(Worker& worker, const std::vector<Chunk>& chunks, const void* matrix, const void* agent,
                const void* caller);
void xray_landed(Worker& worker, const std::vector<Chunk>& chunks, const void* barrier, Knowledge& to);
void xray_product(Worker& worker, const std::vector<Chunk>& chunks, const void* agent, const void* caller);
void xray_read_over(Worker& worker, const std::vector<Chunk>& chunks, const void* agent);

std::string xray_place(const void* address);  // "in tensor 2, 8 bytes past its end", for a crash

}  // namespace simt
