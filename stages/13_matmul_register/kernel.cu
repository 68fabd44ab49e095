// Stage 13: matmul, a tile of C in each thread's registers
//
// Problem   C[M,N] = A[M,K] B[K,N]; any strides.
// Before    Stage 12 reads two words of shared memory for each multiply-add: M N K / 16 wavefronts.
// Idea      A thread computes EACH x EACH outputs instead of one. For a step along k it takes EACH words of A and
//           of B into registers and multiplies all pairs: 2 EACH reads for EACH EACH multiply-adds, a quarter of a read
//           for one. Which outputs it owns decides about bank conflicts: columns x, x + SIDE, x + 2 SIDE, ... leave
//           neighbours to neighbouring lanes; columns EACH x + 0, 1, 2, ... would put the lanes EACH words apart.
// Mapping   block: TILE x TILE patch of C, SIDE x SIDE threads.  warp: two values of y, all SIDE of x.
//           thread (x, y): C[row0 + y + SIDE i][col0 + x + SIDE j] for i, j < EACH.
// Cost      row-major float32, M and N multiples of TILE = 128, K of DEPTH = 8
//             global load sectors   M N K / 512         (a quarter of stage 12's)
//             shared wavefronts     M N K / 128 loads, M N K / 2048 stores, no bank conflicts
//             barriers              2 K / DEPTH a block
// Limits    While a block waits for its next patches it computes nothing, and each word comes by a load and a store of
//           its own. Stage 14 copies 16 bytes at a time, and ahead of need.
// Run       python -m stages run 13

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

constexpr int SIDE = 16;           // threads of a block along either side of its patch: 256 in all
constexpr int EACH = 8;            // outputs of a thread along either side: 64 sums, the most that leaves room to work
constexpr int TILE = SIDE * EACH;  // of C
constexpr int DEPTH = 8;           // of the patches along k: eight floats are a whole sector of a row of A
constexpr int THREADS = SIDE * SIDE;
template <typename T>
constexpr int RESIDENT = sizeof(T) == 8 ? 1 : 2;  // blocks that a multiprocessor's registers have to hold

// ---------------------------------------------------------------------------------------------------------------------
// grid (ceil(M / TILE) * ceil(N / TILE)), block (THREADS)
template <typename T>
__global__ void __launch_bounds__(THREADS, RESIDENT<T>) matmul_register(View<const T, 2> a,  // [M, K]
                                                                        View<const T, 2> b,  // [K, N]
                                                                        View<T, 2> c) {      // [M, N]
  __shared__ T a_tile[TILE][DEPTH];
  __shared__ T b_tile[DEPTH][TILE];

  const int64_t rows = c.size[0], cols = c.size[1], inner = a.size[1];
  const int thread = threadIdx.x, x = thread % SIDE, y = thread / SIDE;
  const int64_t across = ceil_div(cols, TILE);
  const int64_t row0 = blockIdx.x / across * TILE;
  const int64_t col0 = blockIdx.x % across * TILE;

  Accumulator<T> sum[EACH][EACH] = {};
  for (int64_t k0 = 0; k0 < inner; k0 += DEPTH) {
    // A warp fetches four rows of A's patch, a sector each, or a quarter of a row of B's. Past an edge stands a zero.
    for (int i = thread; i < TILE * DEPTH; i += THREADS) {
      const int r = i / DEPTH, k = i % DEPTH;
      const T word = row0 + r < rows && k0 + k < inner ? a(row0 + r, k0 + k) : T(0);
      a_tile[r][k] = word;
    }
    for (int i = thread; i < DEPTH * TILE; i += THREADS) {
      const int k = i / TILE, r = i % TILE;
      const T word = k0 + k < inner && col0 + r < cols ? b(k0 + k, col0 + r) : T(0);
      b_tile[k][r] = word;
    }
    __syncthreads();  // both patches are whole before anyone reads them

#pragma unroll 1  // two at a time would need registers that the sums have
    for (int k = 0; k < DEPTH; ++k) {
      Accumulator<T> a_part[EACH], b_part[EACH];
      UNROLL
      for (int i = 0; i < EACH; ++i) {
        a_part[i] = Accumulator<T>(a_tile[y + SIDE * i][k]);  // a warp asks for two words: one wavefront
        b_part[i] = Accumulator<T>(b_tile[k][x + SIDE * i]);  // for SIDE neighbours, twice: one wavefront
      }
      UNROLL
      for (int i = 0; i < EACH; ++i) {
        UNROLL
        for (int j = 0; j < EACH; ++j) sum[i][j] += a_part[i] * b_part[j];
      }
    }
    __syncthreads();  // everyone has read before the next step overwrites
  }

  UNROLL
  for (int i = 0; i < EACH; ++i) {
    UNROLL
    for (int j = 0; j < EACH; ++j) {
      const int64_t row = row0 + y + SIDE * i, col = col0 + x + SIDE * j;
      if (row < rows && col < cols) c(row, col) = T(sum[i][j]);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
void matmul(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const int64_t patches = ceil_div(c.size[0], TILE) * ceil_div(c.size[1], TILE);
  dispatch_floating(c.dtype, [&]<typename T>() {
    launch<matmul_register<T>>({patches}, dim3(THREADS), 0, stream, a.as<T>(), b.as<T>(), c.as<T>());
  });
}
