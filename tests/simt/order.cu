// Blocks that wait for blocks: chains, tickets, look-back, barriers of the grid; each also with one thing left out. The
// line of a fault ends in a comment that names it: tests/test_simt.py holds the x-ray to these lines. They also compile
// with nvcc.
#include "common/device.h"
#include "common/launch.h"
#include "common/ordering.h"
#include "common/view.h"

using In = View<const float, 1>;
using Out = View<float, 1>;
constexpr int N = 64;  // threads of a block: two warps

enum Missing { NOTHING, RELEASE, ACQUIRE, BEFORE, AFTER, FENCE, ORDER };  // BEFORE, AFTER: the barrier there

__device__ __forceinline__ unsigned* word(Out words, int64_t i) { return reinterpret_cast<unsigned*>(&words(i)); }

// y(block) of N values = x(block) + what the block before has written: block after block.
template <Missing MISSING>
__global__ void chain(In x, Out y, Out words) {
  const int64_t block = blockIdx.x, i = block * N + threadIdx.x;
  const int64_t before = (block - 1) * N + (N - 1 - int(threadIdx.x));  // another thread's
  if (block > 0) {
    if (threadIdx.x == 0) {
      if (MISSING == ACQUIRE) {
        volatile unsigned* const flag = word(words, block - 1);
        while (*flag == 0) __nanosleep(32);  // fault: chain_no_acquire
      } else if (MISSING == ORDER) {
        while (load_relaxed(word(words, block - 1)) == 0) spin_hint();
      } else {
        while (load_acquire(word(words, block - 1)) == 0) spin_hint();  // fault: chain_no_release
      }
    }
    if (MISSING != AFTER) __syncthreads();  // what thread 0 has seen all may read
  }
  float value = x(i);
  if (block > 0) value += y(before);  // fault: chain_no_acquire, chain_no_release, chain_no_barrier, chain_none_after
  y(i) = value;
  if (MISSING != BEFORE) __syncthreads();  // all of it is written
  if (threadIdx.x == 0) {
    if (MISSING == RELEASE) *word(words, block) = 1;
    else if (MISSING == ORDER) store_relaxed(word(words, block), 1u);
    else store_release(word(words, block), 1u);
  }
}

// The same by atomics and fences, its blocks numbered in the order in which they begin.
template <Missing MISSING>
__global__ void fenced(In x, Out y, Out words) {
  __shared__ unsigned ticket;
  if (threadIdx.x == 0) ticket = atomicAdd(word(words, 0), 1u);
  __syncthreads();
  const int64_t block = ticket, i = block * N + threadIdx.x;
  float value = x(i);
  if (block > 0) {
    if (threadIdx.x == 0) {
      while (atomicAdd(word(words, block), 0u) == 0) spin_hint();
      if (MISSING != ACQUIRE) __threadfence();
    }
    __syncthreads();
    value += y((block - 1) * N + (N - 1 - int(threadIdx.x)));  // fault: fenced_once, fenced_after
  }
  y(i) = value;
  __syncthreads();
  if (threadIdx.x == 0) {
    if (MISSING != FENCE) __threadfence();
    atomicExch(word(words, block + 1), 1u);
  }
}

// Sums of all before, by looking back: a block tells its own sum at once, and the sum from the first block on as soon as
// it has it. Each pair of a value and what it is changes as one word of 8 bytes, so nothing but the word is handed on.
struct alignas(8) Sum {
  float value;
  unsigned kind;  // 0: not there, 1: of the block, 2: of all blocks up to it
};

__global__ void look_back(In x, Out y, Out words) {
  __shared__ unsigned ticket;
  __shared__ float part[N], before;
  if (threadIdx.x == 0) ticket = atomicAdd(word(words, 0), 1u);
  __syncthreads();
  const int64_t block = ticket, i = block * N + threadIdx.x;
  part[threadIdx.x] = x(i);
  __syncthreads();
  if (threadIdx.x == 0) {
    Sum* const sums = reinterpret_cast<Sum*>(&words(2));
    float sum = 0;
    for (int k = 0; k < N; ++k) sum += part[k];
    if (block > 0) store_relaxed(&sums[block], Sum{sum, 1});
    float all = 0;
    for (int64_t other = block - 1; other >= 0; --other) {
      Sum found;
      while ((found = load_relaxed(&sums[other])).kind == 0) spin_hint();
      all += found.value;
      if (found.kind == 2) break;
    }
    before = all;
    store_relaxed(&sums[block], Sum{all + sum, 2});
  }
  __syncthreads();
  float sum = before;
  for (int k = 0; k <= int(threadIdx.x); ++k) sum += part[k];
  y(i) = sum;
}

// The sums in memory of their own, the flags beside them, looked at by a warp at once: all its lanes wait.
template <Missing MISSING>
__global__ void look_by_warp(In x, Out y, Out words) {
  __shared__ float before;
  const int64_t block = blockIdx.x;
  const int lane = threadIdx.x;
  if (lane < 32) {
    if (lane == 0) {
      y(block) = x(block);  // of the block
      store_release(word(words, block), 1u);
    }
    float sum = 0;
    for (int64_t other = lane; other < block; other += 32) {
      if (MISSING != ACQUIRE)
        while (load_acquire(word(words, other)) == 0) spin_hint();
      sum += y(other);  // fault: warp_no_acquire
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) before = sum;
  }
  __syncthreads();
  if (lane == 0) y(gridDim.x + block) = before + x(block);
}

// Nobody goes on before all blocks have come. `round` counts from 1.
template <Missing MISSING>
__device__ __forceinline__ void grid_barrier(unsigned* arrived, unsigned round) {
  if (MISSING != BEFORE) __syncthreads();  // all of the block has come
  if (threadIdx.x == 0) {
    if (MISSING != FENCE) __threadfence();
    atomicAdd(arrived, 1u);
    if (MISSING != ACQUIRE)
      while (load_acquire(arrived) < round * gridDim.x) spin_hint();
  }
  if (MISSING != AFTER) __syncthreads();  // and thread 0 has seen that all others have
}

// Values go round: in every step a block takes those of the block before it. y holds two states, taken in turn.
template <Missing MISSING>
__global__ void carousel(In x, Out y, Out words) {
  const int64_t blocks = gridDim.x, size = blocks * N, own = blockIdx.x * N + threadIdx.x;
  const int64_t other = (own + size - N - 1) % size;
  y(own) = x(own);
  unsigned round = 0;
  for (int step = 0; step < 5; ++step) {
    grid_barrier<MISSING>(word(words, 0), ++round);
    y((step + 1) % 2 * size + own) = y(step % 2 * size + other) + 1;  // fault: round
  }
}

// One barrier a step is too few where the state is one: who is early overwrites what another block has not read.
template <bool BOTH>
__global__ void in_place(In x, Out y, Out words) {
  const int64_t size = int64_t(gridDim.x) * N, own = blockIdx.x * N + threadIdx.x;
  y(own) = x(own);
  unsigned round = 0;
  for (int step = 0; step < 3; ++step) {
    grid_barrier<NOTHING>(word(words, 0), ++round);
    const float value = y((own + N) % size) + y((own + 2 * N) % size);  // fault: in_place_one_barrier
    if (BOTH) grid_barrier<NOTHING>(word(words, 0), ++round);
    y(own) = value;
  }
}

// What is written after the release is no part of it.
template <bool LATE>
__global__ void late(In x, Out y, Out words) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    if (!LATE) y(0) = x(0);
    store_release(word(words, 0), 1u);
    if (LATE) y(0) = x(0);  // fault: write_after_release
  } else {
    while (load_acquire(word(words, 0)) == 0) spin_hint();
    y(blockIdx.x) = y(0);
  }
}

// What is read before the acquire is not ordered by it.
__global__ void early(In x, Out y, Out words) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    y(0) = x(0);
    store_release(word(words, 0), 1u);
  } else {
    const float value = y(0);  // fault: read_before_acquire
    while (load_acquire(word(words, 0)) == 0) spin_hint();
    y(blockIdx.x) = value;
  }
}

// A hands on to B and B to C: what A has written C may read.
__global__ void handed_through(In x, Out y, Out words) {
  if (blockIdx.x == 0) y(threadIdx.x) = x(threadIdx.x);
  __syncthreads();
  if (blockIdx.x > 0 && threadIdx.x == 0) {
    while (load_acquire(word(words, blockIdx.x)) == 0) spin_hint();
  }
  __syncthreads();
  if (threadIdx.x == 33)
    store_release(word(words, blockIdx.x + 1), 1u);  // another thread than the one that has seen it
  if (blockIdx.x > 0) y(blockIdx.x * N + threadIdx.x) = y(N - 1 - int(threadIdx.x));
}

// Threads of one block, by a word in global memory.
__global__ void inside(In x, Out y, Out words) {
  const int64_t block = blockIdx.x;
  if (threadIdx.x == 0) {
    y(2 * block) = x(block);
    store_release(word(words, block), 1u);
  } else if (threadIdx.x == 40) {
    while (load_acquire(word(words, block)) == 0) spin_hint();
    y(2 * block + 1) = y(2 * block);
  }
}

// ---- waiting for ever ---------------------------------------------------------------------------------------------
__global__ void never_written(In x, Out y, Out words) {
  y(blockIdx.x * N + threadIdx.x) = x(threadIdx.x);
  if (blockIdx.x % 2 == 0) return;
  while (load_acquire(word(words, 0)) == 0) spin_hint();  // fault: never_written
}

__global__ void plain_spin(In x, Out y, Out words) {
  if (threadIdx.x != 0) return;
  volatile unsigned* const flag = word(words, 0);
  if (blockIdx.x == 0) {
    while (*flag == 0) {  // fault: plain_spin
    }
  } else {
    store_release(word(words, 0), 1u);
  }
  y(blockIdx.x) = x(0);
}

__global__ void all_need_all(In x, Out y, Out words) {
  if (threadIdx.x == 0) {
    y(blockIdx.x) = x(0);
    __threadfence();
    atomicAdd(word(words, 0), 1u);
    while (load_acquire(word(words, 0)) < gridDim.x) {  // fault: all_need_all
    }
  }
  __syncthreads();
}

void run(const std::string& name, Input<1> x_any, Output<1> y_any, InOut<1> words_any, int64_t blocks, Stream stream) {
  const In x = x_any.as<float>();
  const Out y = y_any.as<float>(), words = words_any.as<float>();
  const auto go = [&]<auto Kernel>() { launch<Kernel>({blocks}, dim3(N), 0, stream, x, y, words); };
#define KERNEL(key, ...) \
  if (name == key) return go.operator()<__VA_ARGS__>()
  KERNEL("chain", chain<NOTHING>);
  KERNEL("chain_no_release", chain<RELEASE>);
  KERNEL("chain_no_acquire", chain<ACQUIRE>);
  KERNEL("chain_relaxed", chain<ORDER>);
  KERNEL("chain_no_barrier", chain<BEFORE>);
  KERNEL("chain_none_after", chain<AFTER>);
  KERNEL("fenced", fenced<NOTHING>);
  KERNEL("fenced_once", fenced<FENCE>);
  KERNEL("fenced_after", fenced<ACQUIRE>);
  KERNEL("look_back", look_back);
  KERNEL("look_by_warp", look_by_warp<NOTHING>);
  KERNEL("warp_no_acquire", look_by_warp<ACQUIRE>);
  KERNEL("round", carousel<NOTHING>);
  KERNEL("round_no_fence", carousel<FENCE>);
  KERNEL("round_no_acquire", carousel<ACQUIRE>);
  KERNEL("round_none_before", carousel<BEFORE>);
  KERNEL("round_none_after", carousel<AFTER>);
  KERNEL("in_place", in_place<true>);
  KERNEL("in_place_one_barrier", in_place<false>);
  KERNEL("write_before_release", late<false>);
  KERNEL("write_after_release", late<true>);
  KERNEL("read_before_acquire", early);
  KERNEL("handed_through", handed_through);
  KERNEL("inside", inside);
  KERNEL("never_written", never_written);
  KERNEL("plain_spin", plain_spin);
  KERNEL("all_need_all", all_need_all);
  throw std::invalid_argument("no kernel " + name);
}
