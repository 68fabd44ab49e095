// Stage 12: matmul through shared memory
//
// Problem   C[M,N] = A[M,K] B[K,N]; any strides.
// Before    Stage 11 reads in whole sectors, but every warp fetches its operands itself: 5 M N K / 32 load sectors.
// Idea      A block owns a TILE x TILE patch of C and walks along K. In each step its threads fetch one patch of A and
//           one of B, together and once; then all of them read from shared memory, which is on the chip.
// Mapping   block: patch of C.  thread (x, y): C[row0 + y][col0 + x].  warp: one row of the patch.
// Cost      row-major float32, sizes that are multiples of TILE = 32
//             global load sectors   M N K / 128         (20 times less)
//             shared wavefronts     M N K / 16 loads, M N K / 512 stores, no bank conflicts
//             barriers              2 K / TILE a block
// Limits    Two shared reads for each multiply-add: the shared memory pipe is now the wall. Stage 13 takes it down.
// Run       python -m stages run 12

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

constexpr int TILE = 32;  // one warp for each row of the patch, so that a row is one request of four sectors

// ---------------------------------------------------------------------------------------------------------------------
// grid (ceil(M / TILE) * ceil(N / TILE)), block (TILE, TILE)
template <typename T>
__global__ void matmul_shared(View<const T, 2> a,  // [M, K]
                              View<const T, 2> b,  // [K, N]
                              View<T, 2> c) {      // [M, N]
  __shared__ T a_tile[TILE][TILE];
  __shared__ T b_tile[TILE][TILE];

  const int64_t rows = c.size[0], cols = c.size[1], inner = a.size[1];
  const int x = threadIdx.x, y = threadIdx.y;
  const int64_t across = ceil_div(cols, TILE);
  const int64_t row = blockIdx.x / across * TILE + y;
  const int64_t col = blockIdx.x % across * TILE + x;

  Accumulator<T> sum = 0;
  for (int64_t k0 = 0; k0 < inner; k0 += TILE) {
    // Past an edge a zero stands in: it adds nothing, and no thread leaves before the barriers.
    a_tile[y][x] = row < rows && k0 + x < inner ? a(row, k0 + x) : T(0);
    b_tile[y][x] = k0 + y < inner && col < cols ? b(k0 + y, col) : T(0);
    __syncthreads();  // both patches are whole before anyone reads them

    for (int k = 0; k < TILE; ++k) {
      // a: one word for the whole warp, a broadcast.  b: 32 neighbours, one wavefront.
      sum += Accumulator<T>(a_tile[y][k]) * Accumulator<T>(b_tile[k][x]);
    }
    __syncthreads();  // everyone has read before the next step overwrites
  }
  if (row < rows && col < cols) c(row, col) = T(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
void matmul(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const int64_t patches = ceil_div(c.size[0], TILE) * ceil_div(c.size[1], TILE);
  dispatch_floating(c.dtype, [&]<typename T>() {
    launch<matmul_shared<T>>({patches}, dim3(TILE, TILE), 0, stream, a.as<T>(), b.as<T>(), c.as<T>());
  });
}
