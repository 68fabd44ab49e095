// The x-ray's results, and its two ends: the recording (python.cpp) and the tensors of a call (common/binding.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/simt/runtime.h"

namespace simt {

// What an instruction does. The two halves of an asynchronous copy are issued together; that it was waited for, copied,
// asks for nothing.
// A bulk load or store moves a box between global and shared memory, a product reads both its factors from shared memory:
// what they ask for does not go by the lanes of a warp.
enum class Op : uint8_t {
  load,
  store,
  atomic,
  copy_load,
  copy_store,
  copied,
  matrix_load,
  acquire,
  release,
  matrix_store,
  bulk_load,
  bulk_store,
  product
};
constexpr bool only_reads(Op op) {
  return op == Op::load || op == Op::copy_load || op == Op::matrix_load || op == Op::acquire;
}
constexpr bool only_writes(Op op) {
  return op == Op::store || op == Op::copy_store || op == Op::release || op == Op::matrix_store || op == Op::bulk_store;
}
constexpr bool is_ordered(Op op) { return op == Op::acquire || op == Op::release; }
constexpr bool may_meet(Op op) { return op == Op::atomic || is_ordered(op); }  // others of these in one word
enum class Space : uint8_t { global, shared };
enum class Role : uint8_t { input, output, inout };

struct LaunchFacts {
  std::string kernel;
  dim3 grid, block;
  uint64_t threads, blocks, barriers, warp_syncs;
  size_t dynamic_shared, static_shared;
};

struct TensorFacts {
  Role role;
  size_t bytes;
};

struct SiteFacts {
  int launch;
  uint64_t pc;  // offset of the return address in the module's file
  Op op;
  Space space;
  int tensor;  // -1 for shared memory
  std::string shared;
  int size;
  uint64_t requests, sectors, wavefronts, conflicts, lanes, bytes;
};

struct FaultFacts {
  std::string kind;
  int launch;
  uint64_t pc, other_pc;
  uint3 block, thread, other_block, other_thread;
  Space space;
  int tensor;
  std::string shared;
  int64_t offset;  // bytes from the start of the tensor or the shared variable
  uint64_t count;
};

struct TraceRow {
  int launch;
  uint64_t block;
  int warp;
  uint64_t pc;
  Op op;
  Space space;
  int tensor;
  std::string shared;
  int size;
  int64_t offset[32];  // -1: the lane took no part
};

struct Recording {
  std::vector<LaunchFacts> launches;
  std::vector<TensorFacts> tensors;
  std::vector<SiteFacts> sites;
  std::vector<FaultFacts> faults;
  std::vector<TraceRow> trace;
};

void xray_start(uint64_t trace_rows, int64_t trace_block);
Recording xray_stop();

// A call of a launcher: each tensor is moved into memory of the x-ray's own, with a guard around it, aligned as
// cudaMalloc gives it (of the place of a view, what the CPU's allocator does not decide is kept: 64 bytes); leaving the
// call moves the results back.
bool xray_open_call();
void* xray_tensor(void* data, int itemsize, int dims, const int64_t* size, const int64_t* stride, Role role);
void xray_close_call();

}  // namespace simt
