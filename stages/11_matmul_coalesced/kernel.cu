// Stage 11: matmul, neighbouring threads read neighbouring addresses
//
// Problem   C[M,N] = A[M,K] B[K,N]; any strides.
// Before    Stage 10 asks for 32 sectors to use 4 bytes of each: 33 M N K / 32 load sectors.
// Idea      The 32 lanes of a warp are neighbours along threadIdx.x, and a row-major matrix has its neighbours along
//           the columns. So threadIdx.x must count columns: then a warp's words of B and of C lie side by side and
//           share sectors. Only the two lines that give a thread its row and its column change.
// Mapping   block: ROWS x COLS patch of C.  thread (x, y): C[row0 + y][col0 + x].  warp: 32 columns of one row.
// Cost      row-major float32, M a multiple of 8, N of 32, K of 8
//             global load requests  M N K / 16
//             global load sectors   5 M N K / 32        (A: one word for all, 1 sector;  B: 32 neighbours, 4 sectors)
//             global store sectors  M N / 8
// Limits    Each warp still fetches its operands itself: a row of A crosses the bus N / 32 times, a column of B
//           M times. Stage 12 lets a block fetch them once for all its warps.
// Run       python -m stages run 11

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

constexpr int ROWS = 8;   // of C in a block, along threadIdx.y: eight warps
constexpr int COLS = 32;  // of C in a block, along threadIdx.x: exactly one warp

// ---------------------------------------------------------------------------------------------------------------------
// grid (ceil(M / ROWS) * ceil(N / COLS)), block (COLS, ROWS)
template <typename T>
__global__ void matmul_coalesced(View<const T, 2> a,  // [M, K]
                                 View<const T, 2> b,  // [K, N]
                                 View<T, 2> c) {      // [M, N]
  const int64_t rows = c.size[0], cols = c.size[1], inner = a.size[1];

  // The patches are counted along one grid dimension: gridDim.y would end at 65535, a tall matrix does not.
  const int64_t across = ceil_div(cols, COLS);
  const int64_t row = blockIdx.x / across * ROWS + threadIdx.y;
  const int64_t col = blockIdx.x % across * COLS + threadIdx.x;
  if (row >= rows || col >= cols) return;

  Accumulator<T> sum = 0;
  for (int64_t k = 0; k < inner; ++k) sum += Accumulator<T>(a(row, k)) * Accumulator<T>(b(k, col));
  c(row, col) = T(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
void matmul(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const int64_t patches = ceil_div(c.size[0], ROWS) * ceil_div(c.size[1], COLS);
  dispatch_floating(c.dtype, [&]<typename T>() {
    launch<matmul_coalesced<T>>({patches}, dim3(COLS, ROWS), 0, stream, a.as<T>(), b.as<T>(), c.as<T>());
  });
}
