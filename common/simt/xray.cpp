// The x-ray: what a kernel's accesses cost and where they are wrong, counted, never timed.
//
// A kernel compiled with -fsanitize=thread calls __tsan_read4(address) and its kin before every access; they are
// defined at the end of this file (libtsan is not linked). Each lane of a warp logs its accesses. When all lanes wait
// or their logs are full, the logs are laid side by side: the n-th access of the same instruction by the lanes is one
// request, as it is on a GPU whose lanes run together. A request is counted (sectors, wavefronts) and each of its
// accesses is checked against a shadow of the memory that tells who wrote and read it last.
#include "common/simt/counting.h"
#include "common/simt/log.h"
#include "common/simt/order.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>

namespace simt {

uintptr_t code_base = 0;
bool order_is_kept = false;

namespace {

// ---- the shadow ---------------------------------------------------------------------------------------------------
constexpr uint64_t NOBODY = 0, MANY = ~uint64_t(0);
constexpr uint64_t IN_FLIGHT = (uint64_t(1) << 28) - 1;  // the epoch, never reached, of a copy that is under way
constexpr uint64_t LANDED = IN_FLIGHT - 1;               // the epoch, never reached, of what no thread but a copy wrote
constexpr int AGENTS = 2048;            // the first "lane" of those who work beside the threads: copies, products
constexpr int MOST_AGENTS = 96;         // of a block
constexpr uint32_t NOT_OVER = ~0u;      // the time of what still goes on
constexpr uint64_t EARLIER = MANY - 1;  // written by an earlier launch of the call, for all blocks of this one to see

struct Reader {
  uint64_t block = NOBODY;  // linear index + 1
  uint64_t moment = 0;
  uint32_t key = 0;
  uint32_t lanes = 0;  // 0 while block is set: lanes of several warps
};

struct Cell {
  uint64_t write_block = NOBODY, write_moment = 0;
  Reader read;
  uint32_t write_key = 0;
  uint16_t write_lane = 0;
};

// A stretch of memory that a kernel may touch: a tensor, a shared variable, or the module's own constants (ignored).
struct Target {
  uintptr_t low = 0, high = 0;
  enum Kind : uint8_t { tensor, shared, ignored } kind = ignored;
  Role role = Role::inout;
  int index = -1;  // of the tensor, or of the shared variable
  std::vector<Cell> cells;
  std::unordered_map<size_t, std::vector<Reader>> readers;  // of cells that MANY read, where blocks are ordered
  int shift = 2;                                            // log2 of the bytes a cell stands for
  std::vector<bool> gaps;                                   // of a view with holes: which elements are not its own
  int itemsize = 1;
  std::atomic_flag lock = ATOMIC_FLAG_INIT;

  void refine(int to) {  // smaller accesses appear: what a cell says is true of each of its parts
    std::vector<Cell> finer(cells.size() << (shift - to));
    for (size_t i = 0; i < finer.size(); ++i) finer[i] = cells[i >> (shift - to)];
    cells = std::move(finer);
    std::unordered_map<size_t, std::vector<Reader>> parts;
    for (const auto& [i, some] : readers) {
      for (size_t part = 0; part < size_t(1) << (shift - to); ++part) parts[(i << (shift - to)) + part] = some;
    }
    readers = std::move(parts);
    shift = to;
  }
};

struct Tensor {
  char* original;
  char* copy;
  Role role;
  int itemsize, dims;
  std::vector<int64_t> size, stride;
  size_t bytes;
  std::unique_ptr<Target> target;

  template <typename Body>
  void each_element(Body body) const {  // body(byte offset), every element once
    std::vector<int64_t> at(size.size(), 0);
    for (int64_t s : size) {
      if (s == 0) return;
    }
    for (;;) {
      int64_t offset = 0;
      for (int d = 0; d < dims; ++d) offset += at[d] * stride[d];
      body(offset * itemsize);
      int d = dims - 1;
      while (d >= 0 && ++at[d] == size[d]) at[d--] = 0;
      if (d < 0) return;
    }
  }
};

struct Count {
  uint64_t requests = 0, sectors = 0, wavefronts = 0, conflicts = 0, lanes = 0;
};

using FaultName = std::tuple<std::string, uint32_t, uint32_t, int, int>;  // kind, key, other key, kind of target, index

struct State {
  std::mutex mutex;       // of everything below
  std::mutex call_mutex;  // held from opening a call to closing it
  std::atomic<bool> on{false};
  Recording recording;
  uint64_t trace_rows = 0;
  int64_t trace_block = -1;

  std::vector<Tensor> tensors;  // of the present call
  char* arena = nullptr;
  size_t arena_size = 0, gap = 0;
  const Launch* launch = nullptr;
  std::vector<SharedVariable> shared;
  std::map<std::tuple<uint32_t, Target::Kind, int>, Count> counts;
  std::map<FaultName, FaultFacts> faults;
  uint64_t barriers = 0, warp_syncs = 0;
} state;

History history;  // of the present launch

}  // namespace

struct XrayWorker {
  alignas(64) uint64_t address[LOG_ROWS][32];
  uint32_t key[LOG_ROWS][32];
  Lane lanes[32];
  Worker* worker;
  std::vector<Target*> targets;  // tensors, then shared memory, then what is ignored
  std::vector<std::unique_ptr<Target>> own;
  uint64_t copied_from[32];  // by the lanes of the asynchronous copy whose load came last; 0: nothing
  uint64_t epoch = 0;
  uint32_t clock[MAX_WARPS][32][32];  // clock[w][a][b]: up to when lane a knows what lane b did
  bool clocks_used = false;

  // Where threads are ordered by Hopper's barriers (columns > 0): until when each thread knows what each thread, and
  // each agent beside them, did; what threads have made known to the agents; who reads shared memory beside them.
  struct Use {
    int agent;  // or the thread itself
    uint32_t time, key;
    int thread;  // that asked for it
    uintptr_t low, high;
  };
  int columns = 0;
  std::vector<uint32_t> knows, agent_time, fenced;
  std::unordered_map<const void*, int> agent_of;
  std::unordered_map<const void*, std::pair<int, uint32_t>> barrier_made;  // by whom, when
  std::unordered_map<uintptr_t, std::vector<Use>> uses;                    // of something of 16 bytes, while it matters

  struct Site {
    uint32_t key = 0;
    Target* target = nullptr;
    Count* count = nullptr;
  };
  Site cache[1024];
  std::map<std::tuple<uint32_t, Target::Kind, int>, Count> counts;
  std::map<FaultName, FaultFacts> faults;
  std::vector<TraceRow> trace;

  // What the present block knows of others, as numbers of releases.
  struct Acquired {
    uint64_t moment;
    int lane;
    uint32_t release;
  };
  struct Known {
    uint32_t from;
    std::vector<uint32_t> releases;
  };
  struct Fence {
    Release release;
    uint32_t number = 0;  // once it was handed on
  };
  uint32_t settled = 0;                                     // known to all threads since a barrier
  std::vector<Acquired> acquired;                           // by a thread since then
  std::unordered_map<uint64_t, Known> last_known;           // of a block, as `settled` has it
  std::unordered_map<int, std::vector<uint32_t>> glimpsed;  // by a thread's atomics since its last fence
  std::unordered_map<int, Fence> fences;                    // the last one of a thread
};

namespace {

void report(XrayWorker& x, const char* kind, uint32_t key, int thread, const Target* target, uintptr_t address,
            uint32_t other_key = 0, uint64_t other_block = 0, int other_thread = -1) {
  const FaultName name{kind, key, other_key, target ? int(target->kind) : -1, target ? target->index : -1};
  auto [entry, fresh] = x.faults.try_emplace(name);
  FaultFacts& fault = entry->second;
  ++fault.count;
  if (!fresh) return;
  fault.kind = kind;
  fault.pc = pc_of(key), fault.other_pc = pc_of(other_key);
  fault.block = x.worker->block_index_of(thread);
  fault.thread = x.worker->thread_index(thread);
  const dim3 grid = x.worker->launch->grid;
  if (other_block != NOBODY && other_block != MANY) {
    const uint64_t b = other_block - 1;
    fault.other_block = {unsigned(b % grid.x), unsigned(b / grid.x % grid.y), unsigned(b / grid.x / grid.y)};
  } else {
    fault.other_block = fault.block;
  }
  if (x.worker->cluster > 1 && other_thread >= 0) fault.other_block = x.worker->block_index_of(other_thread);
  fault.other_thread = other_thread >= 0 ? x.worker->thread_index(other_thread) : uint3{};
  fault.space = target && target->kind == Target::shared ? Space::shared : Space::global;
  fault.tensor = target && target->kind == Target::tensor ? target->index : -1;
  fault.shared = target && target->kind == Target::shared
                     ? (target->index < 0 ? "dynamic shared memory" : state.shared[size_t(target->index)].name)
                     : "";
  fault.offset = target ? int64_t(address - target->low) : 0;
  if (x.worker->cluster > 1 && fault.space == Space::shared) fault.offset %= int64_t(x.worker->block_shared);
}

// When a lane of this warp does what it does. Until a warp barrier is met all lanes are at one moment.
inline uint64_t now(const XrayWorker& x, int lane) {
  const int warp = x.worker->warp;
  return make_moment(x.epoch, warp, x.clocks_used ? x.clock[warp][lane][lane] : 1);
}

// Was what lane `other` of this warp did at `moment` made known to `lane` by a warp barrier since?
bool known(const XrayWorker& x, int lane, int other, uint64_t moment) {
  return x.clock[x.worker->warp][lane][other] >= time_of(moment);
}

// ---- order between the threads of a block, by Hopper's barriers ---------------------------------------------------
inline uint32_t time_of_thread(const XrayWorker& x, int thread) {
  return x.clock[thread / 32][thread % 32][thread % 32];
}

uint32_t& known_time(XrayWorker& x, int thread, int of) {
  const int column = of >= AGENTS ? x.worker->thread_count + of - AGENTS : of;
  return x.knows[size_t(thread) * size_t(x.columns) + size_t(column)];
}

// Does a thread know that another one, or an agent, had got so far?
bool knows(XrayWorker& x, int thread, int of, uint32_t time) {
  return x.columns && time != NOT_OVER && (thread == of || known_time(x, thread, of) >= time);
}

// What others read and a thread writes: each read has to be over, and known to be.
void check_uses(XrayWorker& x, Target& target, uint32_t key, int thread, uintptr_t address, int size) {
  const auto found = x.uses.find(address / 16 * 16);
  if (found == x.uses.end()) return;
  const auto met = [&](const XrayWorker::Use& use) {
    return use.low < address + uintptr_t(size) && address < use.high;
  };
  for (const XrayWorker::Use& use : found->second) {
    if (!met(use) || knows(x, thread, use.agent, use.time)) continue;
    report(x, use.time == NOT_OVER ? "read in flight" : "race", key, thread, &target, address, use.key,
           x.worker->block + 1, use.thread);
  }
  std::erase_if(found->second, [&](const auto& use) { return met(use) && use.time != NOT_OVER; });
}

void note_use(XrayWorker& x, const XrayWorker::Use& use) {
  auto& uses = x.uses[use.low / 16 * 16];
  const auto own = std::find_if(uses.begin(), uses.end(), [&](const auto& other) {
    return other.agent == use.agent && other.low == use.low && other.high == use.high;
  });
  if (own == uses.end()) uses.push_back(use);
  else *own = use;
}

void note_thread_read(XrayWorker& x, const Target& target, size_t cell, uint32_t key, int thread, uint32_t time) {
  const uintptr_t low = target.low + (cell << target.shift);
  note_use(x, {thread, time, key, thread, low, low + (uintptr_t(1) << target.shift)});
}

// ---- order between blocks -----------------------------------------------------------------------------------------
// Is what this block acquired known to a lane: by itself, or by a warp barrier since?
bool reached(const XrayWorker& x, int lane, const XrayWorker::Acquired& acquired) {
  if (warp_of(acquired.moment) != x.worker->warp) return false;
  return acquired.lane == lane || known(x, lane, acquired.lane, acquired.moment);
}

std::vector<uint32_t> releases_before(const XrayWorker& x, int lane) {
  std::vector<uint32_t> all;
  if (x.settled) all.push_back(x.settled);
  for (const auto& acquired : x.acquired) {
    if (reached(x, lane, acquired)) all.push_back(acquired.release);
  }
  return all;
}

// Did a release reach this lane after which `lanes` of a block had done what they did at a moment?
bool ordered(XrayWorker& x, int lane, uint64_t block, uint64_t moment, uint32_t lanes) {
  if (!x.settled && x.acquired.empty()) return false;
  std::lock_guard lock(history.mutex);
  XrayWorker::Known& known = x.last_known[block];
  if (history.cover(known.releases, moment, lanes)) return true;
  if (known.from != x.settled) {
    known = {x.settled, history.last_of(block, {x.settled})};
    if (history.cover(known.releases, moment, lanes)) return true;
  }
  return !x.acquired.empty() && history.cover(history.last_of(block, releases_before(x, lane)), moment, lanes);
}

// What a lane releases now. What it does next is no part of it.
Release release_of(XrayWorker& x, int lane) {
  Release release;
  release.block = x.worker->block + 1;
  release.epoch = x.epoch;
  release.warp = x.worker->warp;
  auto& times = x.clock[x.worker->warp][lane];
  std::memcpy(release.time, times, sizeof times);
  release.before = releases_before(x, lane);
  ++times[lane];
  x.clocks_used = true;
  return release;
}

void acquire(XrayWorker& x, int lane, uint32_t release) {
  if (!release) return;
  std::vector<uint32_t> own;
  for (const auto& acquired : x.acquired) {
    if (acquired.lane == lane && warp_of(acquired.moment) == x.worker->warp) own.push_back(acquired.release);
  }
  if (!own.empty() && own.back() == release) return;  // nothing new, as in most loops that wait
  if (own.size() >= 64) {                             // and no barrier between them
    own.push_back(release);
    release = history.put_together(std::move(own));
    std::erase_if(x.acquired, [&](const auto& acquired) {
      return acquired.lane == lane && warp_of(acquired.moment) == x.worker->warp;
    });
  }
  x.acquired.push_back({now(x, lane), lane, release});
}

// ---- accesses against the shadow ----------------------------------------------------------------------------------
// One more block that reads a cell: they are told apart only where order between blocks may matter later.
[[gnu::noinline]] void note_reader(Target& target, Cell& cell, const Reader& reader) {
  std::vector<Reader>& all = target.readers[size_t(&cell - target.cells.data())];
  if (cell.read.block != MANY) all.assign(1, cell.read);
  // Of blocks that run by turns an earlier read is among the last ones; if it is not, it is kept beside the new one.
  const auto end = all.rbegin() + std::min<int64_t>(int64_t(all.size()), 2 * RESIDENT_BLOCKS);
  const auto last = std::find_if(all.rbegin(), end, [&](const Reader& r) { return r.block == reader.block; });
  if (last == end) all.push_back(reader);
  else if (epoch_of(last->moment) != epoch_of(reader.moment)) *last = reader;
  else if (last->moment == reader.moment && last->lanes) last->lanes |= reader.lanes;
  else if (warp_of(last->moment) == warp_of(reader.moment) && last->lanes) *last = reader;
  else last->lanes = 0;  // several warps
  cell.read.block = MANY;
}

// Notes that `lanes` of this warp, at `moment`, read what a cell stands for.
inline void note_read(const XrayWorker& x, Target& target, Cell& cell, uint32_t key, uint64_t block, uint64_t moment,
                      uint32_t lanes) {
  const bool shared = target.kind == Target::shared;
  if (cell.read.block == block) {
    if (cell.read.moment == moment) {
      if (cell.read.lanes) cell.read.lanes |= lanes;
    } else if (epoch_of(cell.read.moment) != x.epoch ||
               (warp_of(cell.read.moment) == warp_of(moment) && cell.read.lanes)) {
      cell.read.moment = moment, cell.read.lanes = lanes, cell.read.key = key;
    } else {
      cell.read.lanes = 0;  // several warps
    }
  } else if (shared || cell.read.block == NOBODY) {
    cell.read.block = block, cell.read.moment = moment, cell.read.lanes = lanes, cell.read.key = key;
  } else if (order_is_kept) {
    note_reader(target, cell, {block, moment, key, lanes});
  } else {
    cell.read.block = MANY;
  }
}

// Was the cell last written before the block's last barrier? Then any of its threads may read it.
inline bool settled(const XrayWorker& x, const Cell& cell, uint64_t block) {
  return cell.write_block == block && epoch_of(cell.write_moment) < x.epoch;
}

inline bool in_flight(const Cell& cell, uint64_t block) {
  return cell.write_block == block && epoch_of(cell.write_moment) == IN_FLIGHT;
}
int writer_of(const Cell& cell) { return warp_of(cell.write_moment) * 32 + cell.write_lane; }

// Other blocks have read what this one writes. They need no longer be known: who comes after the write comes after them.
[[gnu::noinline]] void check_readers(XrayWorker& x, Target& target, Cell& cell, uint32_t key, int lane,
                                     uintptr_t address) {
  const auto check = [&](const Reader& reader) {
    if (reader.block == x.worker->block + 1 || ordered(x, lane, reader.block, reader.moment, reader.lanes)) return;
    report(x, "block race", key, x.worker->warp * 32 + lane, &target, address, reader.key, reader.block);
  };
  const auto many = target.readers.find(size_t(&cell - target.cells.data()));
  if (cell.read.block != MANY || many == target.readers.end()) return check(cell.read);
  for (const Reader& reader : many->second) check(reader);
  target.readers.erase(many);
  cell.read = {};
}

// One access of one thread, of `size` bytes, against the shadow: is it ordered after what others did, was it ever
// written?
void touch(XrayWorker& x, Target& target, uint32_t key, int lane, uintptr_t address, int size, uint64_t moment) {
  const Op op = op_of(key);
  const int warp = x.worker->warp;
  if (const int most = __builtin_ctz(unsigned(size)); most < target.shift) target.refine(most);
  const uint64_t block = x.worker->block + 1;
  const uint32_t bit = 1u << lane;
  const bool shared = target.kind == Target::shared;
  size_t at = (address - target.low) >> target.shift;
  for (const size_t end = at + (size_t(size) >> target.shift); at < end; ++at) {
    Cell& cell = target.cells[at];
    if (only_reads(op) && settled(x, cell, block)) {
      if (x.columns && shared) note_thread_read(x, target, at, key, warp * 32 + lane, time_of(moment));
      else if (op != Op::acquire) note_read(x, target, cell, key, block, moment, bit);
      continue;
    }
    if (x.columns && shared && cell.write_block == block && cell.write_lane >= AGENTS &&
        !knows(x, warp * 32 + lane, cell.write_lane, time_of(cell.write_moment))) {
      report(x, "race", key, warp * 32 + lane, &target, address, cell.write_key, block, 0);
      continue;
    }
    if (in_flight(cell, block)) {
      report(x, "copy in flight", key, warp * 32 + lane, &target, address, cell.write_key, block, writer_of(cell));
      continue;
    }
    const bool written = shared ? cell.write_block == block : cell.write_block != NOBODY;
    if (!only_writes(op) && !written && (shared || target.role == Role::output)) {
      report(x, "uninitialised read", key, warp * 32 + lane, &target, address);
    }
    if (written && cell.write_block != EARLIER && !(may_meet(op) && may_meet(op_of(cell.write_key)))) {
      if (cell.write_block != block) {
        if (!ordered(x, lane, cell.write_block, cell.write_moment, 1u << cell.write_lane))
          report(x, "block race", key, warp * 32 + lane, &target, address, cell.write_key, cell.write_block);
      } else if (epoch_of(cell.write_moment) == x.epoch) {
        const int writer = writer_of(cell);
        if (writer != warp * 32 + lane &&
            !(warp_of(cell.write_moment) == warp && known(x, lane, cell.write_lane, cell.write_moment)) &&
            !knows(x, warp * 32 + lane, writer, time_of(cell.write_moment)) &&
            !ordered(x, lane, block, cell.write_moment, 1u << cell.write_lane)) {
          report(x, "race", key, warp * 32 + lane, &target, address, cell.write_key, block, writer);
        }
      }
    }
    if (only_reads(op)) {
      if (x.columns && shared) note_thread_read(x, target, at, key, warp * 32 + lane, time_of(moment));
      else if (op != Op::acquire) note_read(x, target, cell, key, block, moment, bit);
      continue;
    }
    if (cell.read.block == block) {
      if (epoch_of(cell.read.moment) == x.epoch) {
        int reader = -1;
        if (!cell.read.lanes) reader = 32 * (warp_of(cell.read.moment));
        else if (warp_of(cell.read.moment) != warp) {
          bool all = true;  // known
          for (uint32_t rest = cell.read.lanes; rest; rest &= rest - 1) {
            const int other = warp_of(cell.read.moment) * 32 + __builtin_ctz(rest);
            all = all && knows(x, warp * 32 + lane, other, time_of(cell.read.moment));
          }
          if (!all) reader = warp_of(cell.read.moment) * 32 + __builtin_ctz(cell.read.lanes);
        } else {
          for (uint32_t rest = cell.read.lanes & ~bit; rest; rest &= rest - 1) {
            const int other = __builtin_ctz(rest);
            if (!known(x, lane, other, cell.read.moment)) reader = warp * 32 + other;
          }
        }
        if (reader >= 0 && !ordered(x, lane, block, cell.read.moment, cell.read.lanes & ~bit)) {
          report(x, "race", key, warp * 32 + lane, &target, address, cell.read.key, block, reader);
        }
      }
    } else if (!shared && cell.read.block != NOBODY) {
      check_readers(x, target, cell, key, lane, address);
    }
    const uintptr_t place = target.low + (at << target.shift);
    if (x.columns && shared) check_uses(x, target, key, warp * 32 + lane, place, 1 << target.shift);
    cell.write_block = block, cell.write_key = key;
    cell.write_moment = op == Op::copy_store ? make_moment(IN_FLIGHT, warp, time_of(moment)) : moment;
    cell.write_lane = uint16_t(lane);
  }
}

// ---- counting -----------------------------------------------------------------------------------------------------

Target* find_target(XrayWorker& x, uintptr_t address) {
  for (Target* target : x.targets) {
    if (address >= target->low && address < target->high) return target;
  }
  return nullptr;
}

void trace(XrayWorker& x, uint32_t key, const uint64_t* address, uint32_t mask, const Target& target) {
  if (x.trace.size() >= state.trace_rows) return;
  if (state.trace_block >= 0 && uint64_t(state.trace_block) != x.worker->block) return;
  TraceRow row;
  row.launch = int(state.recording.launches.size());
  row.block = x.worker->block;
  row.warp = x.worker->warp;
  row.pc = pc_of(key);
  row.op = op_of(key);
  row.size = size_of(key);
  row.space = target.kind == Target::shared ? Space::shared : Space::global;
  row.tensor = target.kind == Target::tensor ? target.index : -1;
  row.shared = target.kind == Target::shared
                   ? (target.index < 0 ? "dynamic shared memory" : state.shared[size_t(target.index)].name)
                   : "";
  for (int lane = 0; lane < 32; ++lane) row.offset[lane] = mask >> lane & 1 ? int64_t(address[lane] - target.low) : -1;
  x.trace.push_back(std::move(row));
}

Passes passes_of(const XrayWorker& x, Op op, const uint64_t* address, uint32_t mask, int size) {
  if (op == Op::copy_store) return count_copy_passes(address, x.copied_from, mask, size);
  if (op == Op::matrix_load || op == Op::matrix_store) return count_matrix_passes(address, mask);
  return count_passes(address, mask, size, op == Op::load);
}

// A request, or the part of it that falls into one target.
void count_request(XrayWorker& x, XrayWorker::Site& site, const uint64_t* address, uint32_t mask, bool first_part) {
  Target& target = *site.target;
  if (target.kind == Target::ignored) return;
  const Op op = op_of(site.key);
  const int size = size_of(site.key);
  if (op > Op::atomic && target.kind != (op == Op::copy_load || is_ordered(op) ? Target::tensor : Target::shared)) {
    const int lane = __builtin_ctz(mask);
    return report(x, "wrong memory", site.key, x.worker->warp * 32 + lane, &target, address[lane]);
  }
  Count& count = *site.count;
  count.requests += first_part;
  count.lanes += uint64_t(__builtin_popcount(mask));
  if (target.kind == Target::tensor) count.sectors += count_sectors(address, mask, size);
  else {
    const Passes passes = passes_of(x, op, address, mask, size);
    count.wavefronts += passes.wavefronts;
    count.conflicts += passes.conflicts;
  }
  if (state.trace_rows) trace(x, site.key, address, mask, target);

  if (!target.gaps.empty()) {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      const size_t offset = address[lane] - target.low, end = offset + size_t(size);
      for (size_t i = offset / size_t(target.itemsize); i * size_t(target.itemsize) < end; ++i) {
        if (!target.gaps[i]) continue;
        report(x, "out of bounds", site.key, x.worker->warp * 32 + lane, &target,
               target.low + i * size_t(target.itemsize));
        break;
      }
    }
  }
  if (target.kind == Target::tensor && target.role == Role::input) {
    if (!only_reads(op)) {
      const int lane = __builtin_ctz(mask);
      report(x, "write to input", site.key, x.worker->warp * 32 + lane, &target, address[lane]);
    }
    return;
  }
  // What orders blocks was checked when it was done. (follow_word)
  if (is_ordered(op)) return;
  const bool contended = target.kind == Target::tensor;  // several workers share a tensor's shadow
  if (contended) {
    while (target.lock.test_and_set(std::memory_order_acquire)) {
    }
  }
  const uint64_t block = x.worker->block + 1, moment = make_moment(x.epoch, x.worker->warp, 1);
  uint32_t left = mask;
  if (op == Op::load && size == 1 << target.shift && !x.clocks_used) {
    // The usual loads, quickly: what was settled before, read by one lane or by neighbours together.
    for (uint32_t rest = mask; rest;) {
      const uint64_t place = address[__builtin_ctz(rest)];
      uint32_t together = 0;
      for (; rest && address[__builtin_ctz(rest)] == place; rest &= rest - 1) together |= rest & -rest;
      Cell& cell = target.cells[(place - target.low) >> target.shift];
      if (!settled(x, cell, block)) continue;
      note_read(x, target, cell, site.key, block, moment, together);
      left &= ~together;
    }
  }
  for (; left; left &= left - 1) {
    const int lane = __builtin_ctz(left);
    touch(x, target, site.key, lane, address[lane], size, x.clocks_used ? now(x, lane) : moment);
  }
  if (contended) target.lock.clear(std::memory_order_release);
}

XrayWorker::Site& site_for(XrayWorker& x, uint32_t key, Target* target) {
  XrayWorker::Site& site = x.cache[(key * 0x9e3779b1u) >> 22];
  if (site.key != key || (target && site.target != target)) {
    site.key = key;
    site.target = target;
    site.count = target ? &x.counts[{key, target->kind, target->index}] : nullptr;
  }
  return site;
}

void process_request(XrayWorker& x, uint32_t key, const uint64_t* address, uint32_t mask) {
  const uint64_t size = uint64_t(size_of(key));
  uint64_t low = ~uint64_t(0), high = 0, bits = 0;
  if (mask == ~0u) {
    for (int lane = 0; lane < 32; ++lane) {
      low = std::min(low, address[lane]);
      high = std::max(high, address[lane]);
      bits |= address[lane];
    }
  } else {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      const uint64_t a = address[__builtin_ctz(rest)];
      low = std::min(low, a), high = std::max(high, a), bits |= a;
    }
  }
  high += size;
  XrayWorker::Site& site = site_for(x, key, nullptr);
  if (!site.target || low < site.target->low || high > site.target->high) {
    Target* target = find_target(x, low);
    if (!target || high > target->high) {  // lanes in several targets, or outside all
      bool first_part = true;
      for (uint32_t rest = mask; rest;) {
        const int lane = __builtin_ctz(rest);
        Target* own = find_target(x, address[lane]);
        if (!own || address[lane] + size > own->high) {
          // Outside all: name the nearest tensor or shared variable.
          Target* nearest = nullptr;
          uint64_t distance = ~uint64_t(0);
          for (Target* t : x.targets) {
            if (t->kind == Target::ignored) continue;
            const uint64_t d = address[lane] < t->low ? t->low - address[lane] : address[lane] - t->low;
            const uint64_t e = address[lane] < t->low ? d : d < t->high - t->low ? 0 : address[lane] - t->high;
            if (e < distance) distance = e, nearest = t;
          }
          report(x, "out of bounds", key, x.worker->warp * 32 + lane, nearest, address[lane]);
          rest &= rest - 1;
          continue;
        }
        uint32_t part = 0;
        for (uint32_t more = rest; more; more &= more - 1) {
          const int other = __builtin_ctz(more);
          if (address[other] >= own->low && address[other] + size <= own->high) part |= 1u << other;
        }
        count_request(x, site_for(x, key, own), address, part, first_part);
        first_part = first_part && own->kind == Target::ignored;
        rest &= ~part;
      }
      return;
    }
    site_for(x, key, target);
  }
  if (bits & (size - 1) && site.target->kind != Target::ignored) {
    for (uint32_t rest = mask; rest; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      if (address[lane] & (size - 1)) {
        report(x, "misaligned", key, x.worker->warp * 32 + lane, site.target, address[lane]);
        return;  // its cells would overlap others': the fault says enough
      }
    }
  }
  count_request(x, site, address, mask, true);
}

// An instruction that all lanes run, though some of them read nothing.
void process_part(XrayWorker& x, uint32_t key, const uint64_t* logged, uint32_t mask) {
  uint64_t address[32];
  uint32_t part = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    address[lane] = address_in(logged[lane]);
    const bool reads = takes_part(logged[lane]);
    if (reads) part |= 1u << lane;
    if (op_of(key) == Op::copy_load) x.copied_from[lane] = reads ? address[lane] : 0;
  }
  if (part) process_request(x, key, address, part);
}

// Copies that their threads have waited for: what they fill counts as written now.
void land_copies(XrayWorker& x, uint32_t key, const uint64_t* address, uint32_t mask) {
  const int size = size_of(key), warp = x.worker->warp;
  const uint64_t block = x.worker->block + 1;
  Target* target = nullptr;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const uint64_t first = address[lane], last = first + uint64_t(size) - 1;
    if (!target || first < target->low || last >= target->high) target = find_target(x, first);
    if (!target || target->kind != Target::shared || last >= target->high) continue;  // told when it was issued
    for (size_t at = (first - target->low) >> target->shift; at <= (last - target->low) >> target->shift; ++at) {
      Cell& cell = target->cells[at];
      if (in_flight(cell, block) && writer_of(cell) == warp * 32 + lane) cell.write_moment = now(x, lane);
    }
  }
}

inline void process(XrayWorker& x, uint32_t key, const uint64_t* logged, uint32_t mask) {
  const Op op = op_of(key);
  if (op == Op::copy_load || op == Op::matrix_load) process_part(x, key, logged, mask);
  else if (op == Op::copied) land_copies(x, key, logged, mask);
  else process_request(x, key, logged, mask);
}

// Lanes that went different ways: the n-th access by an instruction is put together from the lanes that made it.
// A lane whose log is full may have its share of the last requests still to come: those stay in the log.
void match_requests(XrayWorker& x, unsigned paused) {
  struct Group {
    uint32_t key, mask;
    uint64_t address[32];
  };
  static thread_local std::vector<Group> groups;
  static thread_local std::unordered_map<uint32_t, std::vector<int>> by_key;
  groups.clear();
  by_key.clear();
  std::unordered_map<uint32_t, uint32_t> occurrences[32];
  uint32_t rows = 0;
  for (const Lane& lane : x.lanes) rows = std::max(rows, lane.count);
  static thread_local std::vector<int> group_of;
  group_of.assign(LOG_ROWS * 32, -1);
  for (uint32_t i = 0; i < rows; ++i) {
    for (int lane = 0; lane < 32; ++lane) {
      if (i >= x.lanes[lane].count) continue;
      const uint32_t key = x.key[i][lane];
      const uint32_t n = occurrences[lane][key]++;
      std::vector<int>& list = by_key[key];
      if (n == list.size()) {
        list.push_back(int(groups.size()));
        groups.push_back({key, 0, {}});
      }
      Group& group = groups[size_t(list[n])];
      group.mask |= 1u << lane;
      group.address[lane] = x.address[i][lane];
      group_of[i * 32 + uint32_t(lane)] = list[n];
    }
  }
  // A request is whole unless a paused lane is missing that may still come to it: one that took no part in anything
  // that the request's lanes did later. The first one held back holds back all that its lanes did after.
  std::vector<bool> held(groups.size(), false);
  if (paused) {
    std::vector<uint32_t> past(groups.size(), 0);  // lanes that are known to have gone by
    for (int lane = 0; lane < 32; ++lane) {
      uint32_t later = 0;
      for (uint32_t i = x.lanes[lane].count; i-- > 0;) {
        const size_t g = size_t(group_of[i * 32 + uint32_t(lane)]);
        past[g] |= later;
        later |= groups[g].mask;
      }
    }
    bool all = true;
    for (size_t g = 0; g < groups.size(); ++g) {
      held[g] = (paused & ~groups[g].mask & ~past[g]) != 0;
      all = all && held[g];
    }
    if (all) std::fill(held.begin(), held.end(), false);  // the lanes went separate ways for good
    for (bool changed = true; changed;) {
      changed = false;
      for (int lane = 0; lane < 32; ++lane) {
        bool after = false;
        for (uint32_t i = 0; i < x.lanes[lane].count; ++i) {
          const size_t g = size_t(group_of[i * 32 + uint32_t(lane)]);
          if (after && !held[g]) held[g] = changed = true;
          after = after || held[g];
        }
      }
    }
    // But of a lane whose log is full something has to go, or its next access would find no room.
    for (int lane = 0; lane < 32; ++lane) {
      bool stuck = x.lanes[lane].count == LOG_ROWS;
      for (uint32_t i = 0; stuck && i < LOG_ROWS; ++i) stuck = held[size_t(group_of[i * 32 + uint32_t(lane)])];
      if (stuck) std::fill(held.begin(), held.end(), false);
    }
    bool none = true;
    for (size_t g = 0; g < groups.size(); ++g) none = none && held[g];
    if (none) std::fill(held.begin(), held.end(), false);
  }
  // In the order of each lane: a request is due when it is the next of all its lanes. Lanes that did the same in
  // different orders may wait for one another: then the first one goes.
  std::vector<bool> done = held;
  std::vector<size_t> waiting;
  for (size_t g = 0; g < groups.size(); ++g) {
    if (!held[g]) waiting.push_back(g);
  }
  uint32_t next[32] = {};
  const auto is_due = [&](size_t g) {
    for (uint32_t rest = groups[g].mask; rest; rest &= rest - 1) {
      const int lane = __builtin_ctz(rest);
      while (done[size_t(group_of[next[lane] * 32 + uint32_t(lane)])]) ++next[lane];
      if (group_of[next[lane] * 32 + uint32_t(lane)] != int(g)) return false;
    }
    return true;
  };
  for (bool first_goes = false; !waiting.empty();) {
    size_t kept = 0;
    for (size_t g : waiting) {
      if (!first_goes && !is_due(g)) {
        waiting[kept++] = g;
        continue;
      }
      process(x, groups[g].key, groups[g].address, groups[g].mask);
      done[g] = true;
      first_goes = false;
    }
    first_goes = kept == waiting.size();
    waiting.resize(kept);
  }
  for (int lane = 0; lane < 32; ++lane) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < x.lanes[lane].count; ++i) {
      if (!held[size_t(group_of[i * 32 + uint32_t(lane)])]) continue;
      x.address[kept][lane] = x.address[i][lane];
      x.key[kept][lane] = x.key[i][lane];
      ++kept;
    }
    x.lanes[lane].count = kept;
  }
}

}  // namespace

void xray_flush_warp(Worker& worker) {
  XrayWorker& x = *worker.xray;
  uint32_t present = 0, rows = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if (!x.lanes[lane].count) continue;
    present |= 1u << lane;
    rows = std::max(rows, x.lanes[lane].count);
  }
  if (!present) return;
  worker.busy.store(true, std::memory_order_relaxed);
  bool together = true;
  for (uint32_t rest = present; rest; rest &= rest - 1) together &= x.lanes[__builtin_ctz(rest)].count == rows;
  if (together && present == ~0u) {
    uint32_t differ = 0;
    for (uint32_t i = 0; i < rows; ++i) {
      const uint32_t first = x.key[i][0];
      for (int lane = 0; lane < 32; ++lane) differ |= x.key[i][lane] ^ first;
    }
    together = differ == 0;
  } else if (together) {
    const int first = __builtin_ctz(present);
    for (uint32_t i = 0; together && i < rows; ++i) {
      for (uint32_t rest = present; rest; rest &= rest - 1)
        together &= x.key[i][__builtin_ctz(rest)] == x.key[i][first];
    }
  }
  if (together) {
    const int first = __builtin_ctz(present);
    for (uint32_t i = 0; i < rows; ++i) process(x, x.key[i][first], x.address[i], present);
    for (Lane& lane : x.lanes) lane.count = 0;
  } else {
    match_requests(x, worker.warps[worker.warp].paused);
  }
  worker.busy.store(false, std::memory_order_relaxed);
}

namespace {
// Adds to `all` what a thread has done, and knows.
void add_knowledge(const XrayWorker& x, int thread, Knowledge& all) {
  const uint32_t* const row = &x.knows[size_t(thread) * size_t(x.columns)];
  for (int i = 0; i < x.columns; ++i) all[size_t(i)] = std::max(all[size_t(i)], row[i]);
  const int warp = thread / 32;
  const int lanes = std::min(32, x.worker->thread_count - warp * 32);
  for (int lane = 0; lane < lanes; ++lane) {  // and what warp barriers have told it; of itself all up to now
    uint32_t& time = all[size_t(warp * 32 + lane)];
    time = std::max(time, x.clock[warp][thread % 32][lane]);
  }
}
}  // namespace

void xray_barrier(Worker& worker) {
  XrayWorker& x = *worker.xray;
  ++x.epoch;
  if (x.columns) {
    std::vector<int> all(size_t(worker.thread_count));
    for (int thread = 0; thread < worker.thread_count; ++thread) all[size_t(thread)] = thread;
    xray_learn(worker, all);
  }
  if (x.acquired.empty()) return;
  std::vector<uint32_t> all;
  if (x.settled) all.push_back(x.settled);
  for (const auto& acquired : x.acquired) all.push_back(acquired.release);
  worker.busy.store(true, std::memory_order_relaxed);
  history.mutex.lock();
  x.settled = history.put_together(std::move(all));
  history.mutex.unlock();
  worker.busy.store(false, std::memory_order_relaxed);
  x.acquired.clear();
}

void xray_sync_warp(Worker& worker, int warp, unsigned mask) {
  XrayWorker& x = *worker.xray;
  auto& clock = x.clock[warp];
  x.clocks_used = true;
  uint32_t joined[32] = {};
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const auto& row = clock[__builtin_ctz(rest)];
    for (int lane = 0; lane < 32; ++lane) joined[lane] = std::max(joined[lane], row[lane]);
  }
  if (x.columns) {
    std::vector<int> lanes;
    for (unsigned rest = mask; rest; rest &= rest - 1) lanes.push_back(warp * 32 + __builtin_ctz(rest));
    xray_learn(worker, lanes);
  }
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    std::memcpy(clock[lane], joined, sizeof joined);
    ++clock[lane][lane];
  }
}

void xray_begin_thread(Worker& worker, Here& here, int lane) { here.log = &worker.xray->lanes[lane]; }

void xray_begin_block(Worker& worker) {
  XrayWorker& x = *worker.xray;
  x.epoch = 0;
  x.columns = 0;
  if (x.clocks_used) {
    std::memset(x.clock, 0, sizeof x.clock);
    for (auto& warp : x.clock) {
      for (int lane = 0; lane < 32; ++lane) warp[lane][lane] = 1;
    }
    x.clocks_used = false;
  }
  if (order_is_kept) {
    x.settled = 0;
    x.acquired.clear(), x.last_known.clear(), x.glimpsed.clear(), x.fences.clear();
  }
  for (Lane& lane : x.lanes) lane.count = 0;
  if (config.order == Order::random) {  // also the moments at which lanes catch up with each other are drawn
    uint64_t mix = (config.seed + 1) * 0x9e3779b97f4a7c15u ^ (worker.block + 1) * 0xd1342543de82ef95u;
    const uint32_t limit = 1 + uint32_t((mix >> 33) % LOG_ROWS);
    for (Lane& lane : x.lanes) lane.limit = limit;
  }
}

void xray_end_block(Worker& worker) { xray_flush_warp(worker); }

XrayWorker* xray_attach(Worker& worker) {
  if (!state.on || !state.launch) return nullptr;
  code_base = module().base;
  auto* x = new XrayWorker;
  x->worker = &worker;
  for (int lane = 0; lane < 32; ++lane) x->lanes[lane] = {0, LOG_ROWS, &x->address[0][lane], &x->key[0][lane]};
  x->clocks_used = true;  // so that the first block sets them
  for (Tensor& tensor : state.tensors) x->targets.push_back(tensor.target.get());
  const auto add = [&](uintptr_t low, size_t size, Target::Kind kind, int index, bool cells) {
    auto target = std::make_unique<Target>();
    target->low = low, target->high = low + size;
    target->kind = kind, target->index = index;
    if (cells) target->cells.resize((size + 15) / 4);
    x->targets.push_back(target.get());
    x->own.push_back(std::move(target));
  };
  for (size_t i = 0; i < state.shared.size(); ++i) {
    if (!state.shared[i].owned) continue;
    add(uintptr_t(worker.tls) + state.shared[i].offset, state.shared[i].size, Target::shared, int(i), true);
  }
  if (state.launch->dynamic_shared) {
    const size_t others = size_t(worker.cluster - 1) * worker.block_shared;
    add(uintptr_t(worker.dynamic_shared), others + state.launch->dynamic_shared, Target::shared, -1, true);
  }
  add(module().low, module().high - module().low, Target::ignored, -1, false);
  return x;
}

void xray_detach(Worker& worker) {
  std::unique_ptr<XrayWorker> x(worker.xray);
  std::lock_guard lock(state.mutex);
  if (!worker.fault.empty()) xray_flush_warp(worker);  // what led to it
  for (const auto& [key, count] : x->counts) {
    Count& sum = state.counts[key];
    sum.requests += count.requests, sum.sectors += count.sectors;
    sum.wavefronts += count.wavefronts, sum.conflicts += count.conflicts;
    sum.lanes += count.lanes;
  }
  for (auto& [name, fault] : x->faults) {
    auto [entry, fresh] = state.faults.try_emplace(name, fault);
    if (!fresh) entry->second.count += fault.count;
  }
  for (auto& row : x->trace) {
    if (state.recording.trace.size() < state.trace_rows) state.recording.trace.push_back(std::move(row));
  }
  state.barriers += worker.barriers;
  state.warp_syncs += worker.warp_syncs;
}

void xray_begin_launch(const Launch& launch, const std::vector<SharedVariable>& shared) {
  if (!state.on) return;
  state.launch = &launch;
  state.shared = shared;
  state.counts.clear();
  state.faults.clear();
  state.barriers = state.warp_syncs = 0;
  history.clear();
  for (Tensor& tensor : state.tensors) {  // launches of one stream do not overlap
    tensor.target->readers.clear();
    for (Cell& cell : tensor.target->cells) {
      if (cell.write_block != NOBODY) cell.write_block = EARLIER;
      cell.read.block = NOBODY;
    }
  }
}

void xray_end_launch() {
  if (!state.on || !state.launch) return;
  Recording& r = state.recording;
  const Launch& launch = *state.launch;
  const int index = int(r.launches.size());
  size_t static_shared = 0;
  for (const auto& variable : state.shared) static_shared += variable.owned ? variable.size : 0;
  r.launches.push_back({launch.kernel, launch.grid, launch.block,
                        launch.blocks * launch.block.x * launch.block.y * launch.block.z, launch.blocks, state.barriers,
                        state.warp_syncs, launch.dynamic_shared, static_shared});
  for (const auto& [name, count] : state.counts) {
    const auto [key, kind, target] = name;
    const bool is_box = op_of(key) == Op::bulk_load || op_of(key) == Op::bulk_store;  // perhaps past the edges
    if (kind == Target::ignored || (!count.lanes && !is_box)) continue;
    const bool is_shared = kind == Target::shared;
    r.sites.push_back({index, pc_of(key), op_of(key), is_shared ? Space::shared : Space::global,
                       is_shared ? -1 : target,
                       !is_shared   ? ""
                       : target < 0 ? "dynamic shared memory"
                                    : state.shared[size_t(target)].name,
                       size_of(key), count.requests, count.sectors, count.wavefronts, count.conflicts, count.lanes,
                       count.lanes * uint64_t(size_of(key))});
  }
  for (auto& [name, fault] : state.faults) {
    fault.launch = index;
    r.faults.push_back(fault);
  }
  state.launch = nullptr;
}

// ---- Hopper's machine ---------------------------------------------------------------------------------------------
void xray_begin_knowledge(Worker& worker) {
  XrayWorker& x = *worker.xray;
  x.clocks_used = true;
  x.columns = worker.thread_count + MOST_AGENTS;
  x.knows.assign(size_t(worker.thread_count) * size_t(x.columns), 0);
  x.agent_time.clear(), x.agent_of.clear(), x.barrier_made.clear(), x.uses.clear();
  x.fenced.assign(size_t(worker.thread_count), 0);
}

void xray_learn(Worker& worker, const std::vector<int>& threads) {
  XrayWorker& x = *worker.xray;
  Knowledge all(size_t(x.columns));
  for (int thread : threads) add_knowledge(x, thread, all);
  for (int thread : threads) {
    xray_take(worker, thread, all);
    ++x.clock[thread / 32][thread % 32][thread % 32];  // what it does next is no part of it
  }
}

void xray_give(Worker& worker, Knowledge& to) {
  XrayWorker& x = *worker.xray;
  to.resize(size_t(x.columns));
  add_knowledge(x, worker.warp * 32 + worker.lane, to);
  ++x.clock[worker.warp][worker.lane][worker.lane];  // what it does next is no part of it
}

void xray_take(Worker& worker, int thread, const Knowledge& from) {
  XrayWorker& x = *worker.xray;
  if (from.empty()) return;
  uint32_t* const row = &x.knows[size_t(thread) * size_t(x.columns)];
  for (int i = 0; i < x.columns; ++i) row[i] = std::max(row[i], from[size_t(i)]);
  const int warp = thread / 32, lanes = std::min(32, worker.thread_count - warp * 32);
  for (int lane = 0; lane < lanes; ++lane) {
    uint32_t& time = x.clock[warp][thread % 32][lane];
    if (lane != thread % 32) time = std::max(time, from[size_t(warp * 32 + lane)]);
  }
}

namespace {

int agent(XrayWorker& x, const void* who) {
  const auto [entry, fresh] = x.agent_of.try_emplace(who, AGENTS + int(x.agent_time.size()));
  if (fresh) x.agent_time.push_back(0);
  if (x.agent_time.size() > MOST_AGENTS) {
    fail(*x.worker, head(*x.worker) + "more than " + std::to_string(MOST_AGENTS) +
                        " barriers and groups, which is as many as the x-ray follows");
  }
  return entry->second;
}

uint32_t key_of(const void* caller, Op op) { return make_key(uint32_t(uintptr_t(caller) - code_base), op, 4); }

// The cells of 16 bytes of shared memory; none where they are no part of it, which is told.
struct Cells {
  Target* target;
  Cell *begin, *end;
};
Cells cells_of(XrayWorker& x, uint32_t key, int thread, uintptr_t address) {
  Target* const target = find_target(x, address);
  if (!target || target->kind != Target::shared || address + 16 > target->high) {
    report(x, target ? "wrong memory" : "out of bounds", key, thread, target, address);
    return {nullptr, nullptr, nullptr};
  }
  Cell* const first = &target->cells[(address - target->low) >> target->shift];
  return {target, first, first + (16 >> target->shift)};
}

// An agent begins to read 16 bytes for a thread: they have to be there, known to be, and made known to agents.
void begin_read(XrayWorker& x, uint32_t key, int thread, uintptr_t address, int reader) {
  const Cells cells = cells_of(x, key, thread, address);
  const uint64_t block = x.worker->block + 1;
  const char* fault = nullptr;
  const Cell* other = nullptr;
  for (const Cell* cell = cells.begin; cell < cells.end && !fault; ++cell) {
    const int writer = cell->write_lane >= AGENTS ? cell->write_lane : writer_of(*cell);
    const uint32_t time = time_of(cell->write_moment);
    other = cell;
    if (cell->write_block != block) fault = "uninitialised read", other = nullptr;
    else if (in_flight(*cell, block)) fault = "copy in flight";
    else if (!knows(x, thread, writer, time)) fault = "race";
    else if (writer < AGENTS && x.fenced[size_t(writer)] < time) fault = "missing fence";
  }
  if (fault) {
    report(x, fault, key, thread, cells.target, address, other ? other->write_key : 0, other ? block : 0,
           !other || other->write_lane >= AGENTS ? 0 : writer_of(*other));
  }
  note_use(x, {reader, NOT_OVER, key, thread, address, address + 16});
}

// Counts the request for a box of a matrix, also for one past its edges, and the sectors, row by row, and finds what is
// outside of its tensor.
void count_box(XrayWorker& x, uint32_t key, int thread, const std::vector<Chunk>& chunks, const void* matrix) {
  Target* const whole = find_target(x, uintptr_t(matrix));
  if (whole && whole->kind == Target::tensor) ++site_for(x, key, whole).count->requests;
  for (size_t i = 0; i < chunks.size();) {
    const uintptr_t low = chunks[i].global;
    if (!low) {
      ++i;
      continue;
    }
    uintptr_t high = low;
    uint64_t lanes = 0;
    for (; i < chunks.size() && chunks[i].global == high && chunks[i].bytes; ++i, ++lanes) {
      high += uintptr_t(chunks[i].bytes);
    }
    Target* const target = find_target(x, low);
    if (!target || target->kind != Target::tensor || high > target->high) {
      report(x, "out of bounds", key, thread, target, low);
      continue;
    }
    Count& count = *site_for(x, key, target).count;
    count.lanes += lanes;
    count.sectors += ((high - 1) >> 5) - (low >> 5) + 1;
  }
}

}  // namespace

void xray_agent_done(Worker& worker, const void* who, Knowledge& to) {
  XrayWorker& x = *worker.xray;
  to.resize(size_t(x.columns));
  const int i = agent(x, who) - AGENTS;
  to[size_t(worker.thread_count + i)] = x.agent_time[size_t(i)];
}

void xray_fence_async(Worker& worker) {
  xray_catch_up(worker);
  XrayWorker& x = *worker.xray;
  uint32_t& time = x.clock[worker.warp][worker.lane][worker.lane];
  x.fenced[size_t(worker.warp * 32 + worker.lane)] = time++;
}

void xray_barrier_made(Worker& worker, const void* barrier, const void*) {
  XrayWorker& x = *worker.xray;
  const int thread = worker.warp * 32 + worker.lane;
  x.barrier_made[barrier] = {thread, time_of_thread(x, thread)};
}

void xray_use_barrier(Worker& worker, const void* barrier, bool by_copies, const void* caller) {
  xray_catch_up(worker);
  XrayWorker& x = *worker.xray;
  worker.busy.store(true, std::memory_order_relaxed);
  const int thread = worker.warp * 32 + worker.lane;
  const auto [maker, time] = x.barrier_made[barrier];
  const uint32_t key = key_of(caller, by_copies ? Op::bulk_load : Op::atomic);
  Target* const target = find_target(x, uintptr_t(barrier));
  const auto tell = [&](const char* what) {
    report(x, what, key, thread, target, uintptr_t(barrier), 0, x.worker->block + 1, maker);
  };
  if (!knows(x, thread, maker, time)) tell("race");
  else if (by_copies && x.fenced[size_t(maker)] < time) tell("missing fence");
  worker.busy.store(false, std::memory_order_relaxed);
}

void xray_load(Worker& worker, const std::vector<Chunk>& chunks, const void* matrix, const void* caller) {
  XrayWorker& x = *worker.xray;
  const int lane = worker.lane, thread = worker.warp * 32 + lane;
  const uint32_t key = key_of(caller, Op::bulk_load);
  const uint64_t block = worker.block + 1;
  if (matrix) count_box(x, key, thread, chunks, matrix);
  for (const Chunk& chunk : chunks) {
    const Cells cells = cells_of(x, key, thread, chunk.shared);
    if (!cells.target) continue;
    // As a store by the thread that asks for it would be, and then it is under way.
    touch(x, *cells.target, make_key(uint32_t(pc_of(key)), Op::copy_store, 4), lane, chunk.shared, 16, now(x, lane));
    for (Cell* cell = cells.begin; cell < cells.end; ++cell) {
      cell->write_block = block, cell->write_key = key, cell->write_lane = uint16_t(lane);
      cell->write_moment = make_moment(IN_FLIGHT, worker.warp, time_of(now(x, lane)));
      cell->read = {};
    }
  }
}

void xray_landed(Worker& worker, const std::vector<Chunk>& chunks, const void* barrier, Knowledge& to) {
  XrayWorker& x = *worker.xray;
  const int by = agent(x, barrier);
  const uint32_t time = ++x.agent_time[size_t(by - AGENTS)];
  for (const Chunk& chunk : chunks) {
    Target* const target = find_target(x, chunk.shared);
    if (!target || target->kind != Target::shared || chunk.shared + 16 > target->high) continue;
    Cell* const first = &target->cells[(chunk.shared - target->low) >> target->shift];
    for (Cell* cell = first; cell < first + (16 >> target->shift); ++cell) {
      cell->write_lane = uint16_t(by), cell->write_moment = make_moment(LANDED, 0, time);
    }
  }
  xray_agent_done(worker, barrier, to);
}

void xray_store(Worker& worker, const std::vector<Chunk>& chunks, const void* matrix, const void* who,
                const void* caller) {
  XrayWorker& x = *worker.xray;
  const int lane = worker.lane, thread = worker.warp * 32 + lane, reader = agent(x, who);
  const uint32_t key = key_of(caller, Op::bulk_store);
  count_box(x, key, thread, chunks, matrix);
  for (const Chunk& chunk : chunks) {
    begin_read(x, key, thread, chunk.shared, reader);
    Target* const target = find_target(x, chunk.global);
    if (!target || target->kind != Target::tensor || chunk.global + uintptr_t(chunk.bytes) > target->high) continue;
    if (target->role == Role::input) {
      report(x, "write to input", key, thread, target, chunk.global);
      continue;
    }
    while (target->lock.test_and_set(std::memory_order_acquire)) {
    }
    for (int i = 0; i < chunk.bytes; i += target->itemsize) {
      touch(x, *target, key, lane, chunk.global + uintptr_t(i), target->itemsize, now(x, lane));
    }
    target->lock.clear(std::memory_order_release);
  }
}

void xray_product(Worker& worker, const std::vector<Chunk>& chunks, const void* who, const void* caller) {
  XrayWorker& x = *worker.xray;
  const int thread = worker.warp * 32 + worker.lane, reader = agent(x, who);
  const uint32_t key = key_of(caller, Op::product);
  for (const Chunk& chunk : chunks) begin_read(x, key, thread, chunk.shared, reader);
  if (Target* const target = find_target(x, chunks[0].shared)) {
    Count& count = *site_for(x, key, target).count;
    ++count.requests;
    if (worker.warp % 4 == 0) count.lanes += chunks.size();  // the four warps of a group share what is read
  }
}

void xray_read_over(Worker& worker, const std::vector<Chunk>& chunks, const void* who) {
  XrayWorker& x = *worker.xray;
  const int reader = agent(x, who);
  const uint32_t time = ++x.agent_time[size_t(reader - AGENTS)];
  for (const Chunk& chunk : chunks) {
    for (auto& use : x.uses[chunk.shared]) {
      if (use.agent == reader) use.time = time;
    }
  }
}

// ---- what orders blocks -------------------------------------------------------------------------------------------

bool keep_order() { return order_is_kept = true; }

bool hold_word(Worker& worker, const void* address) {
  if (!order_is_kept) return false;
  const Target* target = find_target(*worker.xray, uintptr_t(address));
  if (!target || target->kind != Target::tensor) return false;
  worker.busy.store(true, std::memory_order_relaxed);
  history.mutex.lock();
  return true;
}

bool follow_word(Worker& worker, const void* address, uint32_t key) {
  XrayWorker& x = *worker.xray;
  const int lane = worker.lane, size = size_of(key);
  Target* target = find_target(x, uintptr_t(address));
  if (target && target->kind == Target::tensor && target->role != Role::input && uintptr_t(address) % size == 0 &&
      uintptr_t(address) + size <= target->high) {
    worker.busy.store(true, std::memory_order_relaxed);
    while (target->lock.test_and_set(std::memory_order_acquire)) {
    }
    touch(x, *target, key, lane, uintptr_t(address), size, now(x, lane));
    target->lock.clear(std::memory_order_release);
    worker.busy.store(false, std::memory_order_relaxed);
  }
  return hold_word(worker, address);
}

void xray_handed_on(const void* address, Handing what) {
  Worker& worker = *here()->worker;
  XrayWorker& x = *worker.xray;
  const int lane = worker.lane, thread = worker.warp * 32 + lane;
  const uint32_t before = what == Handing::relaxed_store ? 0 : history.handed_on(address);
  switch (what) {
    case Handing::acquire: acquire(x, lane, before); break;
    case Handing::release: history.hand_on(address, history.add(release_of(x, lane))); break;
    case Handing::relaxed_store: history.hand_on(address, 0); [[fallthrough]];
    case Handing::atomic:
      if (const auto fence = x.fences.find(thread); fence != x.fences.end()) {
        uint32_t& number = fence->second.number;
        if (!number) number = history.add(fence->second.release);
        if (before != number) {
          history.hand_on(address, before ? history.put_together({before, number}) : number);
        }
      }
      [[fallthrough]];
    case Handing::relaxed_load:
      if (!before) break;
      if (auto& seen = x.glimpsed[thread]; seen.empty() || seen.back() != before) seen.push_back(before);
  }
  history.mutex.unlock();
  worker.busy.store(false, std::memory_order_relaxed);
}

void fence_order(Worker& worker) {
  XrayWorker& x = *worker.xray;
  const int lane = worker.lane, thread = worker.warp * 32 + lane;
  worker.busy.store(true, std::memory_order_relaxed);
  if (const auto glimpsed = x.glimpsed.find(thread); glimpsed != x.glimpsed.end()) {
    const std::lock_guard lock(history.mutex);
    for (uint32_t release : glimpsed->second) acquire(x, lane, release);
    x.glimpsed.erase(glimpsed);
  }
  x.fences[thread] = {release_of(x, lane)};
  worker.busy.store(false, std::memory_order_relaxed);
}

// ---- the recording, the tensors of a call -------------------------------------------------------------------------

void xray_start(uint64_t trace_rows, int64_t trace_block) {
  std::lock_guard lock(state.call_mutex);
  state.recording = {};
  state.trace_rows = trace_rows;
  state.trace_block = trace_block;
  state.on = true;
}

Recording xray_stop() {
  std::lock_guard lock(state.call_mutex);
  state.on = false;
  if (state.arena) munmap(state.arena, state.arena_size);  // a process may have a hundred modules, and their x-rays
  state.arena = nullptr;
  return std::move(state.recording);
}

bool xray_open_call() {
  if (!state.on) return false;
  state.call_mutex.lock();
  state.tensors.clear();
  state.recording.tensors.clear();
  return true;
}

namespace {

constexpr size_t SLACK = 64 * 1024;  // readable around a tensor, so that a near miss is counted and told, not a crash

void make_arena() {
  if (state.arena) return;
  for (size_t size = size_t(1) << 40; size >= size_t(1) << 34; size >>= 2) {
    void* memory = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) continue;
    state.arena = static_cast<char*>(memory);
    state.arena_size = size;
    state.gap = size >> 7;  // what a wrapped 32-bit index can miss by, where there is room for it
    return;
  }
  throw std::runtime_error("the x-ray could not reserve address space for its tensors");
}

}  // namespace

void* xray_tensor(void* data, int itemsize, int dims, const int64_t* size, const int64_t* stride, Role role) {
  make_arena();
  Tensor t;
  t.original = static_cast<char*>(data);
  t.role = role;
  t.itemsize = itemsize, t.dims = dims;
  t.size.assign(size, size + dims), t.stride.assign(stride, stride + dims);
  int64_t elements = 1, last = 0;
  for (int d = 0; d < dims; ++d) elements *= size[d], last += (size[d] - 1) * stride[d];
  t.bytes = elements ? size_t(last + 1) * size_t(itemsize) : 0;

  const size_t used =
      state.tensors.empty() ? 0 : size_t(state.tensors.back().copy - state.arena) + state.tensors.back().bytes + SLACK;
  const size_t page = size_t(sysconf(_SC_PAGESIZE));
  const size_t start = (used + state.gap + page - 1) / page * page;
  const size_t extent = (t.bytes + 2 * SLACK + 512 + page - 1) / page * page;
  if (start + extent > state.arena_size || mprotect(state.arena + start, extent, PROT_READ | PROT_WRITE)) {
    throw std::runtime_error("the x-ray has no room for a tensor of " + std::to_string(t.bytes) + " bytes");
  }
  t.copy = state.arena + start + SLACK + (uintptr_t(data) & 63);
  std::memset(state.arena + start, 0xff, extent);
  const bool holes = int64_t(t.bytes) != elements * itemsize;
  t.target = std::make_unique<Target>();
  Target& target = *t.target;
  if (holes && elements) target.gaps.assign(t.bytes / size_t(itemsize), true);
  t.each_element([&](int64_t offset) {
    if (role != Role::output) std::memcpy(t.copy + offset, t.original + offset, size_t(itemsize));
    if (holes) target.gaps[size_t(offset) / size_t(itemsize)] = false;
  });
  target.low = uintptr_t(t.copy), target.high = target.low + t.bytes;
  target.kind = Target::tensor, target.role = role, target.index = int(state.tensors.size());
  target.itemsize = itemsize;
  target.shift = __builtin_ctz(unsigned(itemsize));
  if (role != Role::input) target.cells.resize(t.bytes / size_t(itemsize) + 1);
  state.recording.tensors.push_back({role, size_t(elements) * size_t(itemsize)});
  char* const copy = t.copy;
  state.tensors.push_back(std::move(t));
  return copy;
}

void xray_close_call() {
  for (Tensor& tensor : state.tensors) {
    if (tensor.role != Role::input) {
      tensor.each_element([&](int64_t offset) {
        std::memcpy(tensor.original + offset, tensor.copy + offset, size_t(tensor.itemsize));
      });
    }
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    const uintptr_t low = (uintptr_t(tensor.copy) - SLACK) / page * page;
    const size_t extent = (tensor.bytes + 2 * SLACK + 512 + page - 1) / page * page;
    madvise(reinterpret_cast<void*>(low), extent, MADV_DONTNEED);
    mprotect(reinterpret_cast<void*>(low), extent, PROT_NONE);
  }
  state.tensors.clear();
  state.call_mutex.unlock();
}

std::string xray_place(const void* address) {
  const auto a = uintptr_t(address);
  if (!state.on || a - uintptr_t(state.arena) >= state.arena_size) return "";
  std::string best;
  uint64_t distance = ~uint64_t(0);
  for (const Tensor& t : state.tensors) {
    const uintptr_t low = t.target->low, high = t.target->high;
    const uint64_t d = a < low ? low - a : a - high;
    if (d >= distance) continue;
    distance = d;
    best = std::to_string(d) + " bytes " + (a < low ? "before" : "past the end of") +
           " tensor {tensor:" + std::to_string(t.target->index) + "}";
  }
  return best;
}

}  // namespace simt
