// Correct kernels that copy asynchronously and by vectors. They also compile with nvcc.
#include "common/async_copy.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/vector.h"
#include "common/view.h"

using In = View<const float, 1>;
using Out = View<float, 1>;
constexpr int MOST = 1024;  // threads of a block

// Each thread copies BYTES if all of them are inside x, else zeros.
template <int BYTES>
__global__ void edge(In x, Out y) {
  constexpr int EACH = BYTES / 4;
  __shared__ __align__(16) float tile[MOST * EACH];
  const int i = int(threadIdx.x) * EACH;
  async_copy<BYTES>(&tile[i], &x(i), i + EACH <= x.size[0]);
  async_commit();
  async_wait<0>();
  for (int k = 0; k < EACH; ++k) y(i + k) = tile[i + k];
}

// The block walks over x, STAGES - 1 tiles ahead of what it adds up.
template <int STAGES>
__global__ void pipeline(In x, Out y) {
  __shared__ float tile[STAGES][MOST];
  const int thread = threadIdx.x, threads = blockDim.x, tiles = int(x.size[0]) / threads;
  const auto issue = [&](int step) {
    if (step < tiles) async_copy<4>(&tile[step % STAGES][thread], &x(step * threads + thread));
    async_commit();
  };
  for (int step = 0; step < STAGES - 1; ++step) issue(step);
  float sum = 0;
  for (int step = 0; step < tiles; ++step) {
    async_wait<STAGES - 2>();
    __syncthreads();  // this step's tile is there, and everyone has read the tile that is overwritten now
    issue(step + STAGES - 1);
    sum += tile[step % STAGES][threads - 1 - thread];
  }
  y(thread) = sum;
}

// The same with tiles that are no multiple of the block: some lanes copy more than others, some nothing.
template <int STAGES>
__global__ void ragged(In x, Out y) {
  constexpr int WIDTH = 75;
  __shared__ float tile[STAGES][WIDTH];
  const int thread = threadIdx.x, threads = blockDim.x, tiles = int(x.size[0]) / WIDTH;
  const auto issue = [&](int step) {
    if (step < tiles) {
      for (int i = thread; i < WIDTH; i += threads) async_copy<4>(&tile[step % STAGES][i], &x(step * WIDTH + i));
    }
    async_commit();
  };
  for (int step = 0; step < STAGES - 1; ++step) issue(step);
  float sum = 0;
  for (int step = 0; step < tiles; ++step) {
    async_wait<STAGES - 2>();
    __syncthreads();
    issue(step + STAGES - 1);
    sum += tile[step % STAGES][(7 * thread + 3) % WIDTH];
  }
  y(thread) = sum;
}

// A lane's part of a tile is read by its own warp alone.
__global__ void by_warps(In x, Out y) {
  __shared__ float tile[MOST];
  const int i = threadIdx.x;
  async_copy<4>(&tile[i], &x(i));
  async_commit();
  async_wait<0>();
  __syncwarp();
  y(i) = tile[i ^ 1];
}

// Waits for a group, not for the newest two: what those bring is not there yet, on the CPU device never.
__global__ void groups(In x, Out y) {
  __shared__ float tile[4][MOST];
  const int i = threadIdx.x;
  for (int group = 0; group < 3; ++group) {
    async_copy<4>(&tile[group][i], &x(i));
    async_commit();
  }
  async_copy<4>(&tile[3][i], &x(i));  // in no group
  async_wait<2>();
  float found = tile[0][i];
  async_wait<1>();
  found += 2 * tile[1][i];
  async_wait<0>();
  y(i) = found + 4 * tile[2][i];
}

template <typename T, int N>
__global__ void vectors(In x, Out y) {
  __shared__ __align__(16) T tile[MOST * N];
  const int i = int(threadIdx.x) * N;
  for (int k = 0; k < N; ++k) tile[i + k] = T(x(i + k));
  __syncthreads();
  const int j = int(blockDim.x) * N - N - i;
  const Vector<T, N> part = *reinterpret_cast<const Vector<T, N>*>(&tile[j]);
  __syncthreads();
  store_vector(&tile[j], part);
  __syncthreads();
  const auto same = load_vector<N>(&tile[j]);
  for (int k = 0; k < N; ++k) y(j + k) = float(same[k]) + float(part[k]);
}

template <typename Word>
__global__ void built_in(In x, Out y) {
  constexpr int EACH = sizeof(Word) / 4;
  __shared__ __align__(16) float tile[MOST * EACH];
  const int i = int(threadIdx.x) * EACH, j = int(blockDim.x) * EACH - EACH - i;
  for (int k = 0; k < EACH; ++k) tile[i + k] = x(i + k);
  __syncthreads();
  const Word part = *reinterpret_cast<const Word*>(&tile[j]);
  __syncthreads();
  *reinterpret_cast<Word*>(&tile[i]) = part;
  for (int k = 0; k < EACH; ++k) y(i + k) = tile[i + k];
}

void run(const std::string& name, Input<1> x_any, Output<1> y_any, int64_t threads, Stream stream) {
  const In x = x_any.as<float>();
  const Out y = y_any.as<float>();
  const auto go = [&]<auto Kernel>() { launch<Kernel>({1}, dim3(unsigned(threads)), 0, stream, x, y); };
#define KERNEL(key, ...) \
  if (name == key) return go.operator()<__VA_ARGS__>()
  KERNEL("edge_4", edge<4>);
  KERNEL("edge_8", edge<8>);
  KERNEL("edge_16", edge<16>);
  KERNEL("pipeline_2", pipeline<2>);
  KERNEL("pipeline_3", pipeline<3>);
  KERNEL("pipeline_4", pipeline<4>);
  KERNEL("ragged_3", ragged<3>);
  KERNEL("by_warps", by_warps);
  KERNEL("groups", groups);
  KERNEL("vectors_float_2", vectors<float, 2>);
  KERNEL("vectors_float_4", vectors<float, 4>);
  KERNEL("vectors_double_2", vectors<double, 2>);
  KERNEL("vectors_half_4", vectors<half, 4>);
  KERNEL("vectors_half_8", vectors<half, 8>);
  KERNEL("vectors_bfloat16_2", vectors<bfloat16, 2>);
  KERNEL("vectors_bfloat16_8", vectors<bfloat16, 8>);
  KERNEL("built_in_float2", built_in<float2>);
  KERNEL("built_in_float4", built_in<float4>);
  KERNEL("built_in_uint4", built_in<uint4>);
  throw std::invalid_argument("no kernel " + name);
}
