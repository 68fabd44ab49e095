// Stage 10: matmul, one thread for each output
//
// Problem   C[M,N] = A[M,K] B[K,N]; any strides, so a transposed operand is a view and never a copy.
// Before    Stage 00 had one element a thread and no reuse. Here every element of A is needed N times, of B M times.
// Idea      The formula as it stands: thread (row, col) walks along K and sums. It counts rows along threadIdx.x, as on
//           paper one counts rows first. The kernel is right, and slow for a reason that its source does not show.
// Mapping   block: ROWS x COLS patch of C.  thread (x, y): C[row0 + x][col0 + y].  warp: 32 rows of one column.
// Cost      row-major float32, M a multiple of 32, N of 8, K of 8
//             global load requests  M N K / 16          (one of A and one of B for each warp and k)
//             global load sectors   33 M N K / 32       (A: 32 rows, 32 sectors;  B: one word for all, 1 sector)
//             global store sectors  M N                 (32 rows again)
// Limits    A request of A fetches 32 sectors of 32 bytes to use 4 bytes of each. Stage 11 changes two lines.
// Run       python -m stages run 10

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

constexpr int ROWS = 32;  // of C in a block, along threadIdx.x: exactly one warp
constexpr int COLS = 8;   // of C in a block, along threadIdx.y: eight warps

// ---------------------------------------------------------------------------------------------------------------------
// grid (ceil(M / ROWS) * ceil(N / COLS)), block (ROWS, COLS)
template <typename T>
__global__ void matmul_naive(View<const T, 2> a,  // [M, K]
                             View<const T, 2> b,  // [K, N]
                             View<T, 2> c) {      // [M, N]
  const int64_t rows = c.size[0], cols = c.size[1], inner = a.size[1];

  // The patches are counted along one grid dimension: gridDim.y would end at 65535, a tall matrix does not.
  const int64_t across = ceil_div(cols, COLS);
  const int64_t row = blockIdx.x / across * ROWS + threadIdx.x;
  const int64_t col = blockIdx.x % across * COLS + threadIdx.y;
  if (row >= rows || col >= cols) return;

  Accumulator<T> sum = 0;
  for (int64_t k = 0; k < inner; ++k) sum += Accumulator<T>(a(row, k)) * Accumulator<T>(b(k, col));
  c(row, col) = T(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
void matmul(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const int64_t patches = ceil_div(c.size[0], ROWS) * ceil_div(c.size[1], COLS);
  dispatch_floating(c.dtype, [&]<typename T>() {
    launch<matmul_naive<T>>({patches}, dim3(ROWS, COLS), 0, stream, a.as<T>(), b.as<T>(), c.as<T>());
  });
}
