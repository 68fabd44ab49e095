// What common/hopper.h is for, each also with something left out. The line of a fault ends in a comment that names it:
// tests/test_hopper.py holds the x-ray to these lines. They also compile with nvcc, for sm_90a.
#include "common/device.h"
#include "common/hopper.h"
#include "common/launch.h"
#include "common/view.h"

using Out = View<half, 2>;
constexpr int HEIGHT = 16;  // rows of a box

enum Missing { NOTHING, WAIT, ARRIVE, FENCE, INIT, BYTES, MEET };

__device__ __forceinline__ half& element(half* box, int row, int col) {
  return box[row * BOX + swizzled(row, col / 8) * 8 + col % 8];
}

struct OneBox {
  half box[HEIGHT * BOX];
  MBarrier full, free;
};

__device__ __forceinline__ void init_all(MBarrier& full, MBarrier& free, int readers) {
  if (threadIdx.x == 0) {
    init(full, 1), init(free, readers);
    fence_async();
  }
  __syncthreads();
}

// y[16][64] = the box of x at (row 3, column 40), with zeros past the edges of x.
template <Missing MISSING>
__global__ void box(const __grid_constant__ TensorMap x, Out y) {
  DYNAMIC_SHARED(OneBox, shared);
  if (MISSING != INIT) init_all(shared->full, shared->free, 1);
  if (threadIdx.x == 0) {
    arrive_expecting(shared->full, int(sizeof shared->box) + (MISSING == BYTES ? 16 : 0));
    load_box(shared->box, x, 40, 3, shared->full);  // other: box_no_wait
  }
  if (MISSING != WAIT) wait(shared->full, 0);
  for (int i = threadIdx.x; i < HEIGHT * BOX; i += blockDim.x) {
    y(i / BOX, i % BOX) = element(shared->box, i / BOX, i % BOX);  // fault: box_no_wait
  }
  if (MISSING == WAIT) wait(shared->full, 0);
}

// y[16][64] = the sum of x's boxes below each other, which come into one place: two warps read it, and free it.
template <Missing MISSING>
__global__ void ring(const __grid_constant__ TensorMap x, Out y, int boxes) {
  DYNAMIC_SHARED(OneBox, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  init_all(shared->full, shared->free, MISSING == ARRIVE ? 1 : 2);
  if (warp == 2) {
    for (int i = 0; lane == 0 && i < boxes; ++i) {
      wait(shared->free, (i + 1) % 2);
      arrive_expecting(shared->full, sizeof shared->box);
      load_box(shared->box, x, 0, i * HEIGHT, shared->full);  // fault: ring_one_arrives, ring_no_meeting
    }
    return;
  }
  float sum[HEIGHT * BOX / 64] = {};
  for (int i = 0; i < boxes; ++i) {
    wait(shared->full, i % 2);
    for (int n = 0; n < HEIGHT * BOX / 64; ++n) {
      const int at = n * 64 + int(threadIdx.x);
      sum[n] += float(element(shared->box, at / BOX, at % BOX));  // other: ring_one_arrives, ring_no_meeting
    }
    if (MISSING != MEET) __syncwarp();  // what one lane says, it says for all
    if (lane == 0 && (MISSING != ARRIVE || warp == 0)) arrive(shared->free);
  }
  for (int n = 0; n < HEIGHT * BOX / 64; ++n) {
    const int at = n * 64 + int(threadIdx.x);
    y(at / BOX, at % BOX) = half(sum[n]);
  }
}

// y[64][128] = A B. A is x[64][64], or x transposed; B its columns twice, or its rows and zeros: each as it lies.
struct Factors {
  half a[64 * BOX], b[128 * BOX];
  MBarrier full, free;
};
template <bool A_BY_K, bool B_BY_K, bool BY_THREADS = false, Missing MISSING = NOTHING>
__global__ void product(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap tall, Out y) {
  DYNAMIC_SHARED(Factors, shared);
  init_all(shared->full, shared->free, 1);
  if (threadIdx.x == 0) {
    arrive_expecting(shared->full, sizeof shared->a + sizeof shared->b);
    load_box(shared->a, x, 0, 0, shared->full);
    if (B_BY_K) {
      load_box(shared->b, tall, 0, 0, shared->full);
    } else {
      load_box(shared->b, x, 0, 0, shared->full);
      load_box(shared->b + 64 * BOX, x, 0, 0, shared->full);
    }
  }
  if (MISSING != WAIT) wait(shared->full, 0);
  if (BY_THREADS) {  // A twice itself
    for (int i = threadIdx.x; i < 64 * BOX; i += blockDim.x) {
      shared->a[i] = half(2 * float(shared->a[i]));  // other: product_no_fence
    }
    if (MISSING != FENCE) fence_async();
    __syncthreads();
  }
  float sum[64] = {};
  wgmma_fence();
  for (int k = 0; k < DEPTH; k += 16) {
    wgmma<half, A_BY_K, B_BY_K>(sum, shared->a + k * (A_BY_K ? 1 : BOX),  // fault: product_no_wait, product_no_fence
                                shared->b + k * (B_BY_K ? 1 : BOX));
  }
  wgmma_commit();
  wgmma_wait<0>(sum);
  const int row0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, col0 = threadIdx.x % 4 * 2;
  for (int i = 0; i < 64; ++i) y(row0 + i / 2 % 2 * 8, i / 4 * 8 + col0 + i % 2) = half(sum[i]);
  if (MISSING == WAIT) wait(shared->full, 0);
}

// y = x, a box of it in each block of a cluster of two, of which each loads half for both.
struct Half {
  half box[2 * HEIGHT * BOX];
  MBarrier full, free;
};
template <Missing MISSING>
__global__ void cluster(const __grid_constant__ TensorMap x, Out y) {
  DYNAMIC_SHARED(Half, shared);
  const int rank = cluster_rank();
  init_all(shared->full, shared->free, 2);
  if (MISSING != INIT) cluster_sync();  // the other block's barriers are there, too
  if (threadIdx.x == 0) {
    arrive_expecting(shared->full, sizeof shared->box);
    load_box_to(3, shared->box + rank * HEIGHT * BOX, x, 0, rank * HEIGHT, shared->full);  // fault: cluster_no_start
    arrive_at(1 - rank, shared->free);
    arrive(shared->free);
  }
  if (MISSING != WAIT) wait(shared->full, 0);
  for (int i = threadIdx.x; i < 2 * HEIGHT * BOX; i += blockDim.x) {
    y(rank * 2 * HEIGHT + i / BOX, i % BOX) = element(shared->box, i / BOX, i % BOX);  // fault: cluster_no_wait
  }
  if (MISSING == WAIT) wait(shared->full, 0);
  wait(shared->free, 0);
  cluster_sync();
}

// A box goes to global memory and is filled anew before, or after, it was read.
template <Missing MISSING>
__global__ void store(const __grid_constant__ TensorMap to, Out) {
  DYNAMIC_SHARED(OneBox, shared);
  for (int turn = 0; turn < 2; ++turn) {
    for (int i = threadIdx.x; i < HEIGHT * BOX; i += blockDim.x) {
      element(shared->box, i / BOX, i % BOX) = half(float(turn * 1000 + i % 512));  // fault: store_no_wait
    }
    fence_async();
    sync_group<64>(1);
    if (threadIdx.x == 0) {
      store_box(to, 0, turn * HEIGHT, shared->box);  // other: store_no_wait
      store_commit();
      if (MISSING != WAIT) store_wait<0>();
    }
    sync_group<64>(1);
  }
  if (MISSING == WAIT && threadIdx.x == 0) store_wait<0>();
}

void run(const std::string& name, Input<2> x_any, Output<2> y_any, Stream stream) {
  const auto x = x_any.as<half>();
  const Out y = y_any.as<half>();
  const TensorMap boxes = tensor_map(x, 1, HEIGHT), squares = tensor_map(x, 1, 64), tall = tensor_map(x, 1, 128);
#define BOX_KERNEL(key, threads, Shared, ...) \
  if (name == key) return launch<__VA_ARGS__>({1}, dim3(threads), sizeof(Shared), stream, boxes, y)
#define PRODUCT(key, ...) \
  if (name == key) return launch<product<__VA_ARGS__>>({1}, dim3(128), sizeof(Factors), stream, squares, tall, y)
#define RING(key, missing) \
  if (name == key)         \
  return launch<ring<missing>>({1}, dim3(96), sizeof(OneBox), stream, boxes, y, int(x.size[0] / HEIGHT))
#define CLUSTER(key, missing) \
  if (name == key) return launch_clusters<cluster<missing>>(2, {2}, dim3(128), sizeof(Half), stream, boxes, y)
#define STORE(key, missing) \
  if (name == key) return launch<store<missing>>({1}, dim3(64), sizeof(OneBox), stream, tensor_map(y, 1, HEIGHT), y)
  BOX_KERNEL("box", 64, OneBox, box<NOTHING>);
  BOX_KERNEL("box_no_wait", 64, OneBox, box<WAIT>);
  BOX_KERNEL("box_no_init", 64, OneBox, box<INIT>);
  BOX_KERNEL("box_more_bytes", 64, OneBox, box<BYTES>);
  RING("ring", NOTHING);
  RING("ring_one_arrives", ARRIVE);
  RING("ring_no_meeting", MEET);
  PRODUCT("product_true_true", true, true);
  PRODUCT("product_true_false", true, false);
  PRODUCT("product_false_true", false, true);
  PRODUCT("product_false_false", false, false);
  PRODUCT("product_by_threads", true, false, true);
  PRODUCT("product_no_fence", true, false, true, FENCE);
  PRODUCT("product_no_wait", true, false, false, WAIT);
  CLUSTER("cluster", NOTHING);
  CLUSTER("cluster_no_wait", WAIT);
  CLUSTER("cluster_no_start", INIT);
  STORE("store", NOTHING);
  STORE("store_no_wait", WAIT);
  throw std::invalid_argument("no kernel " + name);
}
