// Kernels with one planted fault each, and their correct twins. The line of a fault ends in a comment that names it,
// that of the copy that it meets in another: tests/test_simt.py holds the x-ray to these lines.
#include "common/async_copy.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/mma.h"
#include "common/view.h"

using In = View<const float, 1>;
using Out = View<float, 1>;
constexpr int N = 64;  // threads of a block: two warps

// ---- races in shared memory ---------------------------------------------------------------------------------------
template <bool BARRIER>
__global__ void neighbour(In x, Out y) {
  __shared__ float tile[N];
  tile[threadIdx.x] = x(threadIdx.x);
  if (BARRIER) __syncthreads();
  y(threadIdx.x) = tile[N - 1 - threadIdx.x];  // fault: no_barrier
}

template <bool BARRIER>
__global__ void reuse(In x, Out y) {
  __shared__ float tile[N];
  float sum = 0;
  for (int step = 0; step < 3; ++step) {
    tile[threadIdx.x] = x(threadIdx.x) * float(step);  // fault: no_second_barrier
    __syncthreads();
    sum += tile[(threadIdx.x + 32) % N];
    if (BARRIER) __syncthreads();
  }
  y(threadIdx.x) = sum;
}

template <bool BARRIER>
__global__ void lanes(In x, Out y) {
  __shared__ float tile[N];
  tile[threadIdx.x] = x(threadIdx.x);
  if (BARRIER) __syncwarp();
  y(threadIdx.x) = tile[threadIdx.x ^ 1];  // fault: no_warp_barrier
}

template <bool BOTH>
__global__ void half_warps(In x, Out y) {
  __shared__ float tile[N];
  const unsigned half = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  tile[threadIdx.x] = x(threadIdx.x);
  __syncwarp(half);
  y(threadIdx.x) = tile[threadIdx.x ^ (BOTH ? 16 : 1)];  // fault: other_half
}

__global__ void same_word(In x, Out y) {
  __shared__ float word;
  word = x(threadIdx.x);  // fault: same_word
  __syncthreads();
  y(threadIdx.x) = word;
}

// ---- asynchronous copies ------------------------------------------------------------------------------------------
enum Missing { NOTHING, COMMIT, WAIT, BARRIER };

template <Missing MISSING>
__global__ void copied(In x, Out y) {
  __shared__ float tile[N];
  async_copy<4>(&tile[threadIdx.x], &x(threadIdx.x));  // copy: no_commit, no_wait, no_barrier_after_wait
  if (MISSING != COMMIT) async_commit();
  if (MISSING != WAIT) async_wait<0>();
  if (MISSING != BARRIER) __syncthreads();
  y(threadIdx.x) = tile[N - 1 - threadIdx.x];  // fault: no_commit, no_wait, no_barrier_after_wait
}

template <int LEFT>
__global__ void two_groups(In x, Out y) {
  __shared__ float tile[2][N];
  async_copy<4>(&tile[0][threadIdx.x], &x(threadIdx.x));
  async_commit();
  async_copy<4>(&tile[1][threadIdx.x], &x(threadIdx.x));  // copy: wait_too_short
  async_commit();
  async_wait<LEFT>();
  y(threadIdx.x) = tile[0][threadIdx.x] + tile[1][threadIdx.x];  // fault: wait_too_short
  async_wait<0>();
}

template <bool BARRIER>
__global__ void refill(In x, Out y) {
  __shared__ float tile[N];
  float sum = 0;
  for (int step = 0; step < 3; ++step) {
    async_copy<4>(&tile[threadIdx.x], &x(threadIdx.x));  // copy: refill_too_early
    async_commit();
    async_wait<0>();
    __syncthreads();
    sum += tile[N - 1 - threadIdx.x];  // fault: refill_too_early
    if (BARRIER) __syncthreads();
  }
  y(threadIdx.x) = sum;
}

__global__ void store_in_flight(In x, Out y) {
  __shared__ float tile[N];
  async_copy<4>(&tile[threadIdx.x], &x(threadIdx.x));  // copy: store_in_flight
  tile[threadIdx.x] = 0;                               // fault: store_in_flight
  async_commit();
  async_wait<0>();
  y(threadIdx.x) = tile[threadIdx.x];
}

__global__ void two_copies(In x, Out y) {
  __shared__ float tile[N];
  async_copy<4>(&tile[threadIdx.x], &x(threadIdx.x));  // copy: two_copies
  async_copy<4>(&tile[threadIdx.x], &x(0));            // fault: two_copies
  async_commit();
  async_wait<0>();
  y(threadIdx.x) = tile[threadIdx.x];
}

// 16 bytes from the thread's own place on, of which four threads' make a part of the tile.
template <int SHIFT>
__global__ void four_at_once(In x, Out y) {
  __shared__ __align__(16) float tile[N + 4];
  const int i = 4 * int(threadIdx.x);
  if (i < N) async_copy<16>(&tile[i], &x(i + SHIFT));  // fault: copy_misaligned, copy_past
  async_commit();
  async_wait<0>();
  __syncthreads();
  y(threadIdx.x) = tile[threadIdx.x];
}

__global__ void copy_unwritten(In x, Out y) {
  __shared__ float tile[N];
  async_copy<4>(&tile[threadIdx.x], &y(threadIdx.x));  // fault: copy_unwritten
  async_commit();
  async_wait<0>();
  y(threadIdx.x) = tile[threadIdx.x] + x(threadIdx.x);
}

__global__ void copy_from_shared(In x, Out y) {
  __shared__ float from[N], to[N];
  from[threadIdx.x] = x(threadIdx.x);
  async_copy<4>(&to[threadIdx.x], &from[threadIdx.x]);  // fault: copy_from_shared
  async_commit();
  async_wait<0>();
  y(threadIdx.x) = to[threadIdx.x];
}

__global__ void copy_to_global(In x, Out y) {
  async_copy<4>(&y(threadIdx.x), &x(threadIdx.x));  // fault: copy_to_global
}

// ---- ldmatrix, mma ------------------------------------------------------------------------------------------------
template <int SHIFT, bool BARRIER>
__global__ void rows(In x, Out y) {
  __shared__ __align__(16) uint16_t tile[2 * N + 8];  // the last row is never written
  tile[2 * threadIdx.x] = tile[2 * threadIdx.x + 1] = uint16_t(x(threadIdx.x));
  if (BARRIER) __syncthreads();
  uint32_t fragment[4];
  load_matrices(fragment, &tile[threadIdx.x % 16 * 8 + SHIFT]);  // fault: row_race, row_unwritten, row_misaligned
  y(threadIdx.x) = float(fragment[0] & 0xffff);
}

__global__ void rows_in_flight(In x, Out y) {
  __shared__ __align__(16) float tile[N];
  async_copy<4>(&tile[threadIdx.x], &x(threadIdx.x));  // copy: rows_in_flight
  __syncthreads();
  uint32_t fragment[2];
  load_matrices(fragment, &tile[threadIdx.x % 16 * 4]);  // fault: rows_in_flight
  y(threadIdx.x) = float(fragment[0] & 0xffff);
}

__global__ void rows_of_global(In x, Out y) {
  uint32_t fragment[2];
  load_matrices(fragment, &x(threadIdx.x % 16 * 4));  // fault: rows_of_global
  y(threadIdx.x) = float(fragment[0] & 0xffff);
}

__global__ void missing_lane(In x, Out y) {
  __shared__ __align__(16) float tile[N];
  tile[threadIdx.x] = x(threadIdx.x);
  uint32_t fragment[2] = {};
  __syncthreads();
  if (threadIdx.x != 5) load_matrices_transposed(fragment, &tile[threadIdx.x % 16 * 4]);  // fault: missing_lane
  __syncthreads();
  y(threadIdx.x) = float(fragment[0]);
}

__global__ void lane_gone(In x, Out y) {
  if (threadIdx.x == 40) return;
  float d[4] = {};
  const uint32_t a[4] = {}, b[2] = {};
  mma<half>(d, a, b);  // fault: lane_gone
  y(threadIdx.x) = x(threadIdx.x) + d[0];
}

// ---- races between blocks -----------------------------------------------------------------------------------------
__global__ void first_launch(In x, Out y) { y(blockIdx.x * N + threadIdx.x) = x(threadIdx.x); }
__global__ void second_launch(In, Out y) {
  if (blockIdx.x == 0) y(threadIdx.x) = y(N + threadIdx.x);  // fault: unwritten_by_both_launches
}

__global__ void blocks_write(In x, Out y) {
  y(threadIdx.x) = x(blockIdx.x);  // fault: blocks_write
}

__global__ void block_reads(In x, Out y) {
  const int i = blockIdx.x * N + threadIdx.x;
  y(i) = x(i);
  const int other = (i + N) % int(y.size[0]);
  y(i) += 0 * y(other);  // fault: block_reads
}

// ---- memory -------------------------------------------------------------------------------------------------------
__global__ void read_past(In x, Out y) {
  const int i = threadIdx.x;
  y(i) = x(i + 1);  // fault: read_past
}

__global__ void read_before(In x, Out y) {
  const int i = threadIdx.x;
  y(i) = x(i - 1);  // fault: read_before
}

__global__ void write_past(In x, Out y) {
  const int i = threadIdx.x;
  y(i) = x(i);
  if (i == N - 1) y(i + 1) = 0;  // fault: write_past
}

__global__ void atomic_past(In x, Out y) {
  y(threadIdx.x) = 0;
  if (threadIdx.x == N - 1) atomicAdd(&y(threadIdx.x + 1), x(0));  // fault: atomic_past
}

__global__ void read_gap(In x, Out y) {
  const int i = threadIdx.x;
  y(i) = (&x(i))[1];  // fault: read_gap
}

__global__ void read_far(In x, Out y) {
  const int64_t far = int64_t(1) << 28;
  y(threadIdx.x) = x(far + threadIdx.x);  // fault: read_far
}

__global__ void write_input(In x, Out y) {
  const_cast<float&>(x(threadIdx.x)) = 1;  // fault: write_input
  y(threadIdx.x) = 0;
}

__global__ void shared_past(In x, Out y) {
  __shared__ float tile[N];
  tile[threadIdx.x] = x(threadIdx.x);
  __syncthreads();
  const float* end = tile + threadIdx.x;
  y(threadIdx.x) = end[1];  // fault: shared_past
}

__global__ void unwritten_shared(In x, Out y) {
  __shared__ float tile[N];
  if (threadIdx.x < N - 1) tile[threadIdx.x] = x(threadIdx.x);
  __syncthreads();
  y(threadIdx.x) = tile[threadIdx.x];  // fault: unwritten_shared
}

__global__ void unwritten_output(In x, Out y) {
  y(threadIdx.x) += x(threadIdx.x);  // fault: unwritten_output
}

__global__ void misaligned(In x, Out y) {
  const float4 v = *reinterpret_cast<const float4*>(&x(threadIdx.x + 1));  // fault: misaligned
  y(threadIdx.x) = v.x;
}

// ---- waiting for ever ---------------------------------------------------------------------------------------------
__global__ void divergent(In x, Out y) {
  if (threadIdx.x < 32) {
    __syncthreads();  // fault: divergent
  } else {
    __syncthreads();
  }
  y(threadIdx.x) = x(threadIdx.x);
}

__global__ void deadlock(In x, Out y) {
  float v = x(threadIdx.x);
  if (threadIdx.x % 2) {
    __syncthreads();  // fault: deadlock
  } else {
    v = __shfl_xor_sync(0xffffffffu, v, 2);
  }
  y(threadIdx.x) = v;
}

__global__ void spin(In x, Out y) {
  __shared__ int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  while (atomicAdd(&flag, 0) == 0) {  // fault: spin
  }
  y(threadIdx.x) = x(0);
}

__global__ void endless(In x, Out y) {
  volatile float v = x(0);
  while (v == v) {  // fault: endless
  }
  y(threadIdx.x) = v;
}

__global__ void wrong_mask(In x, Out y) {
  y(threadIdx.x) = __shfl_sync(0x0000ffffu, x(threadIdx.x), 0);  // fault: wrong_mask
}

// ---- crashes ------------------------------------------------------------------------------------------------------
__global__ void null_pointer(In x, Out y) {
  const float* nowhere = &x(0) - (reinterpret_cast<uintptr_t>(&x(0)) - 64) / sizeof(float);
  y(threadIdx.x) = nowhere[threadIdx.x];  // fault: null_pointer
}

__global__ void divide(In x, Out y) {
  volatile int zero = x(0) > 1e30f;
  y(threadIdx.x) = float(int(threadIdx.x) / zero);  // fault: divide
}

// Inside the shared memory, and outside the row: only the x-ray is built to tell.
__global__ void past_row(In x, Out y) {
  __shared__ float tile[8][8];
  tile[threadIdx.x / 8][threadIdx.x % 8] = x(threadIdx.x);
  __syncthreads();
  y(threadIdx.x) = tile[threadIdx.x / 8 % 7][threadIdx.x % 8 + 1];  // fault: past_row
}

__global__ void past_local(In x, Out y) {
  float local[4] = {};
  const int last = int(x(0)) + 3;
  for (int i = 0; i <= last; ++i) local[i] += x(i);  // fault: past_local
  y(threadIdx.x) = local[0];
}

__device__ __attribute__((noinline)) float recurse(int depth, float v) {
  volatile float local[100];
  local[depth % 100] = v;
  if (depth > 0) v += recurse(depth - 1, local[depth % 100]);
  return v + local[depth % 100];
}

__global__ void local_memory(In x, Out y) { y(threadIdx.x) = recurse(300, x(0)); }  // 120 KiB, and back

__global__ void no_end(In x, Out y) { y(threadIdx.x) = recurse(1 << 30, x(0)); }

__global__ void trap(In x, Out y) {
  y(threadIdx.x) = x(threadIdx.x);
  if (threadIdx.x == 40) __trap();  // fault: trap
}

void run(const std::string& name, Input<1> x_any, Output<1> y_any, int64_t blocks, Stream stream) {
  const In x = x_any.as<float>();
  const Out y = y_any.as<float>();
  const auto go = [&]<auto Kernel>() { launch<Kernel>({blocks}, dim3(N), 0, stream, x, y); };
#define TWO_KERNEL(key, first, second) \
  if (name == key) return go.operator()<first>(), go.operator()<second>()
#define KERNEL(key, ...) \
  if (name == key) return go.operator()<__VA_ARGS__>()
  KERNEL("neighbour", neighbour<true>);
  KERNEL("no_barrier", neighbour<false>);
  KERNEL("reuse", reuse<true>);
  KERNEL("no_second_barrier", reuse<false>);
  KERNEL("lanes", lanes<true>);
  KERNEL("no_warp_barrier", lanes<false>);
  KERNEL("half_warps", half_warps<false>);
  KERNEL("other_half", half_warps<true>);
  KERNEL("same_word", same_word);
  KERNEL("copied", copied<NOTHING>);
  KERNEL("no_commit", copied<COMMIT>);
  KERNEL("no_wait", copied<WAIT>);
  KERNEL("no_barrier_after_wait", copied<BARRIER>);
  KERNEL("two_groups", two_groups<0>);
  KERNEL("wait_too_short", two_groups<1>);
  KERNEL("refill", refill<true>);
  KERNEL("refill_too_early", refill<false>);
  KERNEL("store_in_flight", store_in_flight);
  KERNEL("two_copies", two_copies);
  KERNEL("four_at_once", four_at_once<0>);
  KERNEL("copy_misaligned", four_at_once<1>);
  KERNEL("copy_past", four_at_once<4>);
  KERNEL("copy_unwritten", copy_unwritten);
  KERNEL("copy_from_shared", copy_from_shared);
  KERNEL("copy_to_global", copy_to_global);
  KERNEL("rows", rows<0, true>);
  KERNEL("row_race", rows<0, false>);
  KERNEL("row_unwritten", rows<8, true>);
  KERNEL("row_misaligned", rows<1, true>);
  KERNEL("rows_in_flight", rows_in_flight);
  KERNEL("rows_of_global", rows_of_global);
  KERNEL("missing_lane", missing_lane);
  KERNEL("lane_gone", lane_gone);
  KERNEL("blocks_write", blocks_write);
  KERNEL("block_reads", block_reads);
  TWO_KERNEL("block_of_an_earlier_launch", first_launch, second_launch);
  TWO_KERNEL("unwritten_by_both_launches", first_launch, second_launch);
  KERNEL("read_past", read_past);
  KERNEL("read_before", read_before);
  KERNEL("write_past", write_past);
  KERNEL("atomic_past", atomic_past);
  KERNEL("read_gap", read_gap);
  KERNEL("read_far", read_far);
  KERNEL("write_input", write_input);
  KERNEL("shared_past", shared_past);
  KERNEL("unwritten_shared", unwritten_shared);
  KERNEL("unwritten_output", unwritten_output);
  KERNEL("misaligned", misaligned);
  KERNEL("divergent", divergent);
  KERNEL("deadlock", deadlock);
  KERNEL("spin", spin);
  KERNEL("endless", endless);
  KERNEL("wrong_mask", wrong_mask);
  KERNEL("null_pointer", null_pointer);
  KERNEL("divide", divide);
  KERNEL("past_row", past_row);
  KERNEL("past_local", past_local);
  KERNEL("local_memory", local_memory);
  KERNEL("no_end", no_end);
  KERNEL("trap", trap);
  throw std::invalid_argument("no kernel " + name);
}
