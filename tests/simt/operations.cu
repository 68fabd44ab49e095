// Correct kernels that use what the CPU device offers: warp operations, votes, reductions, atomics, counting barriers,
// dynamic shared memory, vector types, threads that return early. Values are checked against numpy.
#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

using In = View<const float, 1>;
using Out = View<float, 1>;
constexpr unsigned FULL = 0xffffffffu;

__global__ void shuffle(In x, Out y) { y(threadIdx.x) = __shfl_sync(FULL, x(threadIdx.x), 3 + int(threadIdx.x), 8); }
__global__ void shuffle_up(In x, Out y) { y(threadIdx.x) = __shfl_up_sync(FULL, x(threadIdx.x), 3); }
__global__ void shuffle_down(In x, Out y) { y(threadIdx.x) = __shfl_down_sync(FULL, x(threadIdx.x), 5, 16); }
__global__ void shuffle_xor(In x, Out y) { y(threadIdx.x) = __shfl_xor_sync(FULL, x(threadIdx.x), 9); }

__global__ void halves(In x, Out y) {  // two masks meet in one warp, in different branches
  const int i = threadIdx.x;
  if (i % 32 < 16) y(i) = __shfl_xor_sync(0x0000ffffu, x(i), 1);
  else y(i) = __shfl_xor_sync(0xffff0000u, x(i), 2);
}

__global__ void votes(In x, Out y) {
  const int i = threadIdx.x;
  const unsigned ballot = __ballot_sync(FULL, x(i) > 0);
  const int any = __any_sync(FULL, x(i) > 2), all = __all_sync(FULL, x(i) > -9);
  const unsigned match = __match_any_sync(FULL, int(x(i)));
  y(i) = float(__popc(ballot)) + 100 * float(any) + 1000 * float(all) + 10000 * float(__popc(match));
}

__global__ void reductions(In x, Out y) {
  const int i = threadIdx.x, v = int(x(i) * 8);
  y(i) = float(__reduce_add_sync(FULL, v) + 3 * __reduce_min_sync(FULL, v) + 7 * __reduce_max_sync(FULL, v));
}

__global__ void block_sum(In x, Out y) {  // lanes, then warps, then one for all
  __shared__ float part[32];
  float sum = x(threadIdx.x);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(FULL, sum, step);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0;
  for (unsigned w = 0; w < (blockDim.x + 31) / 32; ++w) sum += part[w];
  y(threadIdx.x) = sum;
}

__global__ void counting(In x, Out y) {
  const int positive = __syncthreads_count(x(threadIdx.x) > 0);
  const int some = __syncthreads_or(x(threadIdx.x) > 2), every = __syncthreads_and(x(threadIdx.x) > -9);
  y(threadIdx.x) = float(positive + 10000 * some + 100000 * every);
}

__global__ void early(In x, Out y) {  // half the threads leave; the barrier waits for the others alone
  __shared__ float tile[1024];
  const int i = threadIdx.x;
  if (i % 2) {
    y(i) = -1;
    return;
  }
  tile[i] = x(i);
  __syncthreads();
  y(i) = tile[(i + 2) % int(blockDim.x)];
}

inline float& state_of_a_library() {  // thread-local, but no shared memory of a block
  static thread_local float state = 7;
  return state;
}

__global__ void beside_a_library(In, Out y) {
  __shared__ float tile[1024];
  tile[threadIdx.x] = state_of_a_library();
  __syncthreads();
  y(threadIdx.x) = tile[blockDim.x - 1 - threadIdx.x];
}

__global__ void histogram(In x, Out y) {
  __shared__ int bins[16];
  if (threadIdx.x < 16) bins[threadIdx.x] = 0;
  __syncthreads();
  atomicAdd(&bins[int(x(threadIdx.x)) & 15], 1);
  __syncthreads();
  if (threadIdx.x < y.size[0]) y(threadIdx.x) = float(bins[threadIdx.x & 15]);
}

__global__ void reversed(In x, Out y) {
  DYNAMIC_SHARED(float, tile);
  tile[threadIdx.x] = x(threadIdx.x);
  __syncthreads();
  y(threadIdx.x) = tile[blockDim.x - 1 - threadIdx.x];
}

__global__ void wide_copy(In x, Out y) {
  const int i = 4 * int(threadIdx.x);
  if (i + 3 < x.size[0]) *reinterpret_cast<float4*>(&y(i)) = *reinterpret_cast<const float4*>(&x(i));
  else
    for (int k = i; k < x.size[0]; ++k) y(k) = x(k);
}

__global__ void transpose_conflicts(In x, Out y) {  // 32 x 32, no padding: a column lies in one bank
  __shared__ float tile[32][32];
  const int i = threadIdx.x / 32, j = threadIdx.x % 32;
  tile[i][j] = x(threadIdx.x);
  __syncthreads();
  y(threadIdx.x) = tile[j][i];
}

__global__ void transpose_padded(In x, Out y) {
  __shared__ float tile[32][33];
  const int i = threadIdx.x / 32, j = threadIdx.x % 32;
  tile[i][j] = x(threadIdx.x);
  __syncthreads();
  y(threadIdx.x) = tile[j][i];
}

// x holds a word offset for each lane, -1 for a lane that takes no part: one shared request of a given width.
template <typename Word>
__global__ void pattern_load(In x, Out y) {
  __shared__ __align__(128) float words[512];
  for (int i = threadIdx.x; i < 512; i += 32) words[i] = float(i);
  __syncthreads();
  const int offset = int(x(threadIdx.x));
  if (offset < 0) return;
  const Word word = *reinterpret_cast<const Word*>(&words[offset]);
  y(threadIdx.x) = reinterpret_cast<const float&>(word);
}

template <typename Word>
__global__ void pattern_store(In x, Out y) {
  __shared__ __align__(128) float words[512];
  const int offset = int(x(threadIdx.x));
  Word word;
  for (unsigned i = 0; i < sizeof(Word) / 4; ++i) reinterpret_cast<float*>(&word)[i] = y(threadIdx.x);
  if (offset >= 0) *reinterpret_cast<Word*>(&words[offset]) = word;
}

__global__ void long_block(In x, Out y) {  // one block that takes long, barrier after barrier
  float v = x(0);
  for (int i = 0; i < 2000000; ++i) {
    v += 1;
    __syncthreads();
  }
  y(threadIdx.x) = v;
}

__global__ void uneven(In x, Out y) {  // lanes make different numbers of accesses, far more than a log holds
  float sum = 0;
  for (int k = 0; k < 200 + 3 * int(threadIdx.x); ++k) sum += x(k % int(x.size[0]));
  y(threadIdx.x) = sum;
}

// Lanes with many accesses of their own. When they have made 64 each, 0 and 1 have met and so have 1 and 2, but nothing
// that 0 did is known to be whole, as 2 may still come to it.
__global__ void apart(In x, Out y) {
  const int i = threadIdx.x;
  float sum = 0;
  if (i > 0) sum = x(i);
  if (i == 0) {
    for (int k = 0; k < 63; ++k) sum += x(k);
  } else if (i == 1) {
    for (int k = 0; k < 62; ++k) sum -= x(k);
  } else {
    for (int k = 0; k < 200; ++k) sum = 2 * x(k) - sum;
  }
  if (i < 2) sum += x(i + 1);
  if (i == 0) {
    for (int k = 0; k < 200; ++k) sum = x(k) - sum;
  }
  y(i) = sum;
}

__global__ void catching_up(In x, Out y) {  // the last read is one request of lanes with more and with less before it
  __shared__ float tile[3][1024];
  const int i = threadIdx.x;
  if (i % 2) {
    tile[0][i] = x(i);
    tile[1][i] = x(i) + tile[0][i];
    tile[2][i] = x(i) + tile[1][i];
  } else {
    tile[2][i] = x(i);
    tile[0][i] = 0;
  }
  y(i) = tile[2][i];
}

__global__ void from_shared(In x, Out y) {  // reads what the thread before wrote to global memory, after a barrier
  y(threadIdx.x) = x(threadIdx.x);
  __syncthreads();
  const float other = y((threadIdx.x + 1) % blockDim.x);
  __syncthreads();
  y(threadIdx.x) = other;
}

__global__ void rounding(In x, Out y) {
  const float v = x(threadIdx.x);
  y(threadIdx.x) = threadIdx.x % 2 ? float(half(v)) : float(bfloat16(v));
}

__global__ void handshake(In x, Out y) {  // one warp waits in a loop for another
  __shared__ int flag;
  __shared__ float value;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x / 32 == 1) {
    while (atomicAdd(&flag, 0) == 0) {
    }
  } else if (threadIdx.x == 0) {
    atomicExch(&flag, 1);
  }
  __syncthreads();
  if (threadIdx.x == 0) value = x(0);
  __syncthreads();
  y(threadIdx.x) = value;
}

__global__ void spread(In x, Out y) {  // every block does its part, with an index in three dimensions
  const int64_t block = (int64_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t thread = (int64_t(threadIdx.z) * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int64_t i = block * blockDim.x * blockDim.y * blockDim.z + thread;
  if (i < y.size[0]) y(i) = 2 * x(i);
}

void run(const std::string& name, Input<1> x_any, Output<1> y_any, int64_t threads, Stream stream) {
  const In x = x_any.as<float>();
  const Out y = y_any.as<float>();
  const auto go = [&]<auto Kernel>(size_t shared = 0) {
    launch<Kernel>({1}, dim3(unsigned(threads)), shared, stream, x, y);
  };
#define KERNEL(kernel) \
  if (name == #kernel) return go.operator()<kernel>()
  KERNEL(shuffle);
  KERNEL(shuffle_up);
  KERNEL(shuffle_down);
  KERNEL(shuffle_xor);
  KERNEL(halves);
  KERNEL(votes);
  KERNEL(reductions);
  KERNEL(block_sum);
  KERNEL(counting);
  KERNEL(early);
  KERNEL(histogram);
  KERNEL(wide_copy);
  KERNEL(transpose_conflicts);
  KERNEL(transpose_padded);
  KERNEL(uneven);
  KERNEL(catching_up);
  KERNEL(from_shared);
  KERNEL(rounding);
  KERNEL(handshake);
  if (name == "apart") return go.operator()<apart>();
  if (name == "long_block") return go.operator()<long_block>();
  if (name == "pattern_load_1") return go.operator()<pattern_load<float>>();
  if (name == "pattern_load_2") return go.operator()<pattern_load<float2>>();
  if (name == "pattern_load_4") return go.operator()<pattern_load<float4>>();
  if (name == "pattern_store_1") return go.operator()<pattern_store<float>>();
  if (name == "pattern_store_2") return go.operator()<pattern_store<float2>>();
  if (name == "pattern_store_4") return go.operator()<pattern_store<float4>>();
  if (name == "beside_a_library") return go.operator()<beside_a_library>();
  if (name == "reversed") return go.operator()<reversed>(size_t(threads) * sizeof(float));
  if (name == "spread") return launch<spread>({3, 5, 2}, dim3(4, 3, 2), 0, stream, x, y);
  if (name == "wide_grid") return launch<spread>({1, 65536}, dim3(1), 0, stream, x, y);
  if (name == "wide_block") return launch<spread>({1}, dim3(2048), 0, stream, x, y);
  if (name == "much_shared") return go.operator()<reversed>(size_t(1) << 20);
  throw std::invalid_argument("no kernel " + name);
}
