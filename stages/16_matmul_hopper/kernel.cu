// Stage 16: matmul by Hopper's own instructions
//
// Problem   C[M,N] = A[M,K] B[K,N]; float16 and bfloat16; rows, or columns, that begin at multiples of 16 bytes.
// Before    Stage 15's warps do everything: they copy, they read fragments into registers, and then they multiply.
// Idea      Who multiplies does nothing else. A copy engine (TMA) brings boxes of A and B, asked by a single thread, the
//           producer; the tensor cores take both operands straight from shared memory (wgmma), asked by two groups of
//           four warps, the consumers. Barriers that count arrivals and bytes (mbarrier) say which tiles are full and
//           which are free, so that neither side waits for the other but where it has to. The producer hands most of
//           its registers to the consumers. Two blocks below each other, a cluster, need the same B: each loads half
//           of it, and the copy engine brings it to both. A block takes one tile of C after the other: while the last
//           one is written, by the copy engine too, the next one's A and B are on their way.
// Mapping   grid: a block for each multiprocessor.  cluster: 2 blocks, 256 x 256 of C at a time.  block: 128 x 256.
//           consumer: 64 x 256.  thread: what wgmma gives it of each 16 x 8, 128 sums.
// Cost      row-major, M a multiple of CLUSTER ROWS = 256, N of COLS = 256, K of 64
//             boxes                 3 M N K / 2^21 loaded, M N / 4096 stored
//             sectors               M N K / 2048 loaded, M N / 16 stored
//             products              M N K / 65536 of a warp
//             shared wavefronts     M N / 64 stores
//             barriers              2 a block, 16 a tile
// Limits    Both consumers write C at the same time, and nobody multiplies then. A tile of B comes from the
//           second-level cache half as often as without clusters; A still comes once for each 256 columns of C.
// Needs     compute capability 9.0
// Run       python -m stages run 16

#include "common/device.h"
#include "common/hopper.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/tile.h"
#include "common/view.h"

constexpr int STAGES = 4;     // pairs of tiles, 48 KiB each
constexpr int CONSUMERS = 2;  // warpgroups
constexpr int THREADS = WARPGROUP * (CONSUMERS + 1);
constexpr int SIDE = 64;  // rows of a consumer: what a wgmma multiplies
constexpr int ROWS = SIDE * CONSUMERS, COLS = 256;
constexpr int CLUSTER = 2;  // blocks below each other: each loads a part of B's tile for all of them
constexpr int PART = COLS / CLUSTER;
constexpr unsigned ALL = (1 << CLUSTER) - 1;  // of its blocks
constexpr int GROUP = 8;  // clusters below each other that share columns of B, before the next columns begin

template <typename T>
struct Tiles {
  T a[ROWS * DEPTH];
  T b[COLS * DEPTH];
};

template <typename T>
struct Shared {
  Tiles<T> tiles[STAGES];
  T out[CONSUMERS][2][SIDE * BOX];  // boxes of C on their way to memory
  MBarrier full[STAGES], free[STAGES];
};

// Where producer and consumers are in the ring of tiles. The parity is that of the round.
struct Place {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
};

// The elements of a tile that a wgmma takes begin so much after those of the wgmma before it.
template <bool BY_K>
constexpr int STEP = BY_K ? 16 : 16 * BOX;

// ---------------------------------------------------------------------------------------------------------------------
// Asks for all boxes of HEIGHT rows of A, or columns of B, and DEPTH along k: for this block, or for the whole cluster.
template <bool BY_K, int HEIGHT, bool FOR_ALL, typename T>
__device__ __forceinline__ void load_tile(T* tile, const TensorMap& map, int64_t i0, int64_t k0, MBarrier& full) {
  UNROLL
  for (int i = 0; i < HEIGHT; i += BY_K ? HEIGHT : BOX) {
    const int64_t along = BY_K ? k0 : i0 + i, across = BY_K ? i0 : k0;
    if constexpr (FOR_ALL) load_box_to(ALL, tile + i * DEPTH, map, along, across, full);
    else load_box(tile + i * DEPTH, map, along, across, full);
  }
}

// The sums of a consumer as T, to C: a box of 64 columns after the other, by way of two places in shared memory.
template <typename T>
__device__ __forceinline__ void store_rows(const float (&sum)[COLS / 2], T (&out)[2][SIDE * BOX], const TensorMap& c,
                                           int64_t row0, int64_t col0, int consumer) {
  const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;
  // A lane names a place for all: of 16 rows of its warp, the columns 0 to 7 or 8 to 15.
  const int row = thread / 32 * 16 + lane % 16;
  UNROLL
  for (int col = 0; col < COLS; col += BOX) {
    T* const box = out[col / BOX % 2];
    if (thread == 0) store_wait<1>();     // the box that was here has been read
    sync_group<WARPGROUP>(1 + consumer);  // and everyone knows
    UNROLL
    for (int j = 0; j < BOX; j += 16) {
      uint32_t fragment[4];
      UNROLL
      for (int i = 0; i < 4; ++i) {
        const float* pair = sum + (col + j) / 2 + i * 2;
        fragment[i] = pack<T>(pair[0], pair[1]);
      }
      store_matrices(box + row * BOX + swizzled(row, j / 8 + lane / 16) * 8, fragment);
    }
    fence_async();
    sync_group<WARPGROUP>(1 + consumer);  // all rows are there
    if (thread == 0) {
      store_box(c, col0 + col, row0, box);
      store_commit();
    }
  }
}

// grid (a block for each multiprocessor), block (THREADS)
// A_BY_K, B_BY_K: elements of A, B that follow each other along k lie side by side.
template <typename T, bool A_BY_K, bool B_BY_K>
__global__ void __launch_bounds__(THREADS, 1) matmul_hopper(const __grid_constant__ TensorMap a,  // [M, K]
                                                            const __grid_constant__ TensorMap b,  // [K, N]
                                                            const __grid_constant__ TensorMap c,  // [M, N]
                                                            int64_t down, int64_t across,         // tiles of clusters
                                                            int64_t steps) {                      // along k, of DEPTH
  DYNAMIC_SHARED(Shared<T>, shared);
  const int consumer = threadIdx.x / WARPGROUP, thread = threadIdx.x % WARPGROUP;
  const int rank = cluster_rank();
  const int64_t cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) init(shared->full[i], 1), init(shared->free[i], CONSUMERS * CLUSTER);
    fence_async();
  }
  cluster_sync();  // the barriers are there, those of the other blocks, too

  Place at;
  if (consumer == CONSUMERS) {  // the producer
    give_registers<40>();
    for (int64_t n = cluster; thread == 0 && n < down * across; n += clusters) {
      const Tile tile = tile_of_block<GROUP>(n, down, across);
      const int64_t row0 = (tile.row * CLUSTER + rank) * ROWS;
      const int64_t col0 = tile.col * COLS + rank * PART;
      const bool back = n / clusters % 2 == 1;  // along k: what the last tile read last may still be in the L2
      for (int64_t step = 0; step < steps; ++step, at.next()) {
        const int64_t k0 = (back ? steps - 1 - step : step) * DEPTH;
        wait(shared->free[at.stage], at.parity ^ 1);
        MBarrier& full = shared->full[at.stage];
        Tiles<T>& to = shared->tiles[at.stage];
        arrive_expecting(full, sizeof to);
        load_tile<A_BY_K, ROWS, false>(to.a, a, row0, k0, full);
        load_tile<B_BY_K, PART, true>(to.b + rank * PART * DEPTH, b, col0, k0, full);
      }
    }
  } else {
    take_registers<232>();
    const bool speaks = thread < CLUSTER;  // for its warpgroup, to the producer of that rank
    for (int64_t n = cluster; n < down * across; n += clusters) {
      const Tile tile = tile_of_block<GROUP>(n, down, across);
      const int64_t row0 = (tile.row * CLUSTER + rank) * ROWS + consumer * SIDE;
      float sum[COLS / 2] = {};
      int before = 0;
      for (int64_t step = 0; step < steps; ++step, at.next()) {
        wait(shared->full[at.stage], at.parity);
        const Tiles<T>& from = shared->tiles[at.stage];
        wgmma_fence();
        UNROLL
        for (int k = 0; k < DEPTH / 16; ++k) {
          wgmma<T, A_BY_K, B_BY_K>(sum, from.a + consumer * SIDE * DEPTH + k * STEP<A_BY_K>, from.b + k * STEP<B_BY_K>);
        }
        wgmma_commit();
        wgmma_wait<1>();  // the step before is done
        if (speaks && step > 0) arrive_at(thread, shared->free[before]);
        before = at.stage;
      }
      wgmma_wait<0>(sum);
      if (speaks) arrive_at(thread, shared->free[before]);
      store_rows(sum, shared->out[consumer], c, row0, tile.col * COLS, consumer);
    }
    if (thread == 0) store_wait<0>();
  }
  cluster_sync();  // nobody arrives here any more
}

// ---------------------------------------------------------------------------------------------------------------------
template <typename T, bool A_BY_K, bool B_BY_K>
void launch_as(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const int64_t rows = c.size[0], cols = c.size[1], depth = a.size[1];
  if (rows == 0 || cols == 0) return;
  const int64_t down = ceil_div(rows, ROWS * CLUSTER), across = ceil_div(cols, COLS);
  const TensorMap to = tensor_map(c.as<T>(), 1, SIDE);
  // Without steps nothing is read of A and B: any map does.
  const TensorMap a_map = depth == 0 ? to : tensor_map(a.as<T>(), A_BY_K ? 1 : 0, A_BY_K ? ROWS : DEPTH);
  const TensorMap b_map = depth == 0 ? to : tensor_map(b.as<T>(), B_BY_K ? 0 : 1, B_BY_K ? PART : DEPTH);
  // Tiles come in rounds. No more clusters than keep the last one full, too: the power that others save is theirs.
  const int64_t rounds = ceil_div(down * across, multiprocessors(stream) / CLUSTER);
  const int64_t clusters = ceil_div(down * across, rounds);
  launch_clusters<matmul_hopper<T, A_BY_K, B_BY_K>>(CLUSTER, {clusters * CLUSTER}, dim3(THREADS), sizeof(Shared<T>),
                                                    stream, a_map, b_map, to, down, across, ceil_div(depth, DEPTH));
}

template <typename T>
void launch_halves(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const bool a_by_k = a.stride[1] == 1, b_by_k = b.stride[1] != 1;
  if (a_by_k && b_by_k) launch_as<T, true, true>(a, b, c, stream);
  else if (a_by_k) launch_as<T, true, false>(a, b, c, stream);
  else if (b_by_k) launch_as<T, false, true>(a, b, c, stream);
  else launch_as<T, false, false>(a, b, c, stream);
}

void matmul(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  dispatch_floating(c.dtype, [&]<typename T>() {
    if constexpr (sizeof(T) == 2) launch_halves<T>(a, b, c, stream);
    else
      throw std::invalid_argument(std::string("wgmma multiplies float16 and bfloat16 here, got ") + name_of(c.dtype));
  });
}
