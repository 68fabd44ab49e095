// Stage 15: matmul on the tensor cores
//
// Problem   C[M,N] = A[M,K] B[K,N]; any strides; float16, bfloat16, and float32 rounded to TF32.
// Before    Stage 14 keeps the ordinary cores busy: one instruction, one multiply-add a lane.
// Idea      mma.sync: a warp multiplies 16 x 16 by 16 x 8 elements in one instruction, 64 multiply-adds a lane, sums in
//           float32. It wants its operands spread over the lanes in a fixed way, and ldmatrix reads them so: 8 rows of
//           16 bytes at a time, from a tile as it lies in memory, or transposed on the way. Eight rows of a tile
//           below each other would meet in the same banks; a swizzle puts the 16-byte chunks of each row in an order
//           of its own, without padding. The pipeline is stage 14's.
// Mapping   block: ROWS x COLS of C, 8 warps.  warp: 64 x 64 of it.  lane: what mma gives it of each 16 x 8.
// Cost      row-major, 16 bits, M a multiple of ROWS = 256, N of COLS = 128, K of 64
//             global load sectors   3 M N K / 4096
//             shared wavefronts     M N K / 2048 loads, 3 M N K / 16384 copies
//             barriers              2 + K / 64 a block
// Limits    mma.sync reaches two thirds of what the tensor cores of a Hopper can do. For the rest, operands must
//           come to them straight from shared memory: wgmma, and the copy engine to feed it.
// Run       python -m stages run 15

#include "common/async_copy.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/mma.h"
#include "common/numeric.h"
#include "common/tile.h"
#include "common/vector.h"
#include "common/view.h"

constexpr int STAGES = 3;  // pairs of tiles, 48 KiB each
constexpr int WARPS_DOWN = 4, WARPS_ACROSS = 2, THREADS = 32 * WARPS_DOWN * WARPS_ACROSS;
constexpr int SIDE = 64;  // of a warp's patch of C: 128 sums a lane
constexpr int ROWS = SIDE * WARPS_DOWN, COLS = SIDE * WARPS_ACROSS;
constexpr int CHUNKS = 8;  // of 16 bytes: how deep a tile is along k. A row of so many is 128 bytes, all the banks
constexpr int GROUP = 8;   // blocks that share columns of B before the next ones begin
template <typename T>
constexpr int WIDE = 16 / int(sizeof(T));  // elements of a chunk
template <typename T>
constexpr int DEPTH = CHUNKS * WIDE<T>;
template <typename T>
using Factor = std::conditional_t<std::is_same_v<T, float>, Tf32, T>;

// The tiles of a step, each as its matrix lies in memory: [row][k] or [k][row], [k][col] or [col][k].
template <typename T>
struct Tiles {
  T a[ROWS * DEPTH<T>];
  T b[COLS * DEPTH<T>];
};

// ---------------------------------------------------------------------------------------------------------------------
// Where a chunk of a row lies in a tile of PITCH chunks a row. The swizzle gives any 8 rows below each other a
// different order, so that one chunk of all of them is 8 different bank groups, and any 4 rows different pairs.
template <int PITCH>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  return row * PITCH + (chunk ^ (row % 4 * 2 + row / 4 % 2));
}

// How a tile is copied: by chunks of its rows, by elements with neighbouring threads along a row, or along a column.
enum class By { chunks, row, col };

// Starts the copies of a tile, of which the matrix has `height` x `width`; zeros stand for the rest.
template <By BY, int HEIGHT, int WIDTH, typename T>
__device__ __forceinline__ void start_copy(T* tile, const T* from, int64_t row_stride, int64_t col_stride,
                                           int64_t height, int64_t width) {
  constexpr int PITCH = WIDTH / WIDE<T>;
  const int thread = threadIdx.x;
  const int rows = int(min(height, int64_t(HEIGHT))), cols = int(min(width, int64_t(WIDTH)));
  if constexpr (BY == By::chunks) {
    constexpr int STEP = THREADS / PITCH;
    const int row0 = thread / PITCH, chunk = thread % PITCH;
    from += row0 * row_stride + chunk * WIDE<T>;
#pragma unroll
    for (int row = 0; row < HEIGHT; row += STEP, from += STEP * row_stride) {
      const bool inside = row0 + row < rows && chunk * WIDE<T> < cols;
      async_copy<16>(tile + swizzled<PITCH>(row0 + row, chunk) * WIDE<T>, from, inside);
    }
  } else {
    constexpr int ALONG = BY == By::row ? WIDTH : HEIGHT, STEP = THREADS / ALONG;
    const int along = thread % ALONG, across = thread / ALONG;
    const int64_t step = BY == By::row ? row_stride : col_stride;
    from += along * (BY == By::row ? col_stride : row_stride) + across * step;
#pragma unroll 2
    for (int i = across; i < HEIGHT * WIDTH / ALONG; i += STEP, from += STEP * step) {
      const int row = BY == By::row ? i : along, col = BY == By::row ? along : i;
      const bool inside = row < rows && col < cols;
      T* const to = tile + swizzled<PITCH>(row, col / WIDE<T>) * WIDE<T> + col % WIDE<T>;
      if constexpr (sizeof(T) >= 4) {
        async_copy<sizeof(T)>(to, from, inside);
      } else {  // cp.async takes no less than 4 bytes
        const T word = inside ? *from : T(0);
        *to = word;
      }
    }
  }
}

// Reads 16 elements at i0 along the rows of A, or the columns of B, and a pair of chunks along k, for mma: four
// matrices of 8 rows of 16 bytes, of A those of the lower k first, of B those of the lower columns.
template <bool IS_A, bool BY_K, int WIDTH, typename T>
__device__ __forceinline__ void read(uint32_t (&part)[4], const T* tile, int i0, int pair) {
  const int lane = threadIdx.x % 32, first = lane / 8 % 2, second = lane / 16;
  const int i_half = IS_A ? first : second, k_half = IS_A ? second : first;  // of the matrix whose row this lane names
  // i0 and 16 times pair are multiples of 8 rows, which the swizzle does not tell apart.
  if constexpr (BY_K) {
    const int at = swizzled<CHUNKS>(lane % 8 + i_half * 8, pair * 2 + k_half) + i0 * CHUNKS;
    load_matrices(part, tile + at * WIDE<T>);
  } else {
    static_assert(sizeof(T) == 2, "ldmatrix transposes elements of two bytes");
    constexpr int PITCH = WIDTH / WIDE<T>;
    const int at = swizzled<PITCH>(lane % 8 + k_half * 8, i0 % SIDE / WIDE<T> + i_half) + pair * 16 * PITCH;
    load_matrices_transposed(part, tile + at * WIDE<T> + i0 / SIDE * SIDE);
  }
}

// float32 is rounded to TF32, which mma would cut; 16-bit fragments are as mma wants them.
template <typename T>
__device__ __forceinline__ void round_factors(uint32_t (&part)[4]) {
  if constexpr (std::is_same_v<T, float>) {
#pragma unroll
    for (uint32_t& word : part) word = to_tf32(__uint_as_float(word));
  }
}

// grid (ceil(M / ROWS) * ceil(N / COLS)), block (THREADS)
// A_BY_K, B_BY_K: their tiles have k along their rows.
template <typename T, bool A_BY_K, bool B_BY_K, By BY_A, By BY_B>
__global__ void __launch_bounds__(THREADS, 1) matmul_tensor(View<const T, 2> a,  // [M, K]
                                                            View<const T, 2> b,  // [K, N]
                                                            View<T, 2> c,        // [M, N]
                                                            bool wide_c) {       // rows of whole chunks
  DYNAMIC_SHARED(Tiles<T>, tiles);

  const int64_t rows = c.size[0], cols = c.size[1];
  const Tile block = tile_of_block<GROUP>(blockIdx.x, ceil_div(rows, ROWS), ceil_div(cols, COLS));
  const int64_t row0 = block.row * ROWS, col0 = block.col * COLS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp / WARPS_ACROSS * SIDE, warp_col = warp % WARPS_ACROSS * SIDE;

  const T* next_a = &a(row0, 0);
  const T* next_b = &b(0, col0);
  int64_t left = a.size[1];
  const auto start = [&](Tiles<T>& to) {
    if constexpr (A_BY_K) start_copy<BY_A, ROWS, DEPTH<T>>(to.a, next_a, a.stride[0], a.stride[1], rows - row0, left);
    else start_copy<BY_A, DEPTH<T>, ROWS>(to.a, next_a, a.stride[1], a.stride[0], left, rows - row0);
    if constexpr (B_BY_K) start_copy<BY_B, COLS, DEPTH<T>>(to.b, next_b, b.stride[1], b.stride[0], cols - col0, left);
    else start_copy<BY_B, DEPTH<T>, COLS>(to.b, next_b, b.stride[0], b.stride[1], left, cols - col0);
    async_commit();
    next_a += DEPTH<T> * a.stride[1], next_b += DEPTH<T> * b.stride[0], left -= DEPTH<T>;
  };

  uint32_t a_part[2][SIDE / 16][4], b_part[2][SIDE / 16][4];  // of this pair of chunks and of the next
  const auto read_pair = [&](int to, const Tiles<T>& from, int pair) {
#pragma unroll
    for (int i = 0; i < SIDE / 16; ++i) read<true, A_BY_K, ROWS>(a_part[to][i], from.a, warp_row + i * 16, pair);
#pragma unroll
    for (int j = 0; j < SIDE / 16; ++j) read<false, B_BY_K, COLS>(b_part[to][j], from.b, warp_col + j * 16, pair);
  };

  for (int stage = 0; stage < STAGES - 1; ++stage) start(tiles[stage]);
  async_wait<STAGES - 2>();  // this thread's part of the first tiles
  __syncthreads();           // everyone's
  read_pair(0, tiles[0], 0);

  float sum[SIDE / 16][SIDE / 8][4] = {};
  int now = 0, free = STAGES - 1;
#pragma unroll 1
  for (int64_t k0 = 0; k0 < a.size[1]; k0 += DEPTH<T>) {
    const int next = now + 1 < STAGES ? now + 1 : 0;
#pragma unroll
    for (int pair = 0; pair < CHUNKS / 2; ++pair) {
      if (pair + 1 < CHUNKS / 2) {
        read_pair((pair + 1) % 2, tiles[now], pair + 1);
      } else {
        async_wait<STAGES - 2>();
        __syncthreads();  // the next tiles are there, and nobody reads these any more
        read_pair((pair + 1) % 2, tiles[next], 0);
      }
      if (pair == 0) start(tiles[free]);
#pragma unroll
      for (int i = 0; i < SIDE / 16; ++i) round_factors<T>(a_part[pair % 2][i]), round_factors<T>(b_part[pair % 2][i]);
#pragma unroll
      for (int i = 0; i < SIDE / 16; ++i) {
#pragma unroll
        for (int n = 0; n < SIDE / 8; ++n) {
          const int j = i % 2 ? SIDE / 8 - 1 - n : n;  // to and fro: the turn finds its B in the operand cache
          const uint32_t b_half[2] = {b_part[pair % 2][j / 2][j % 2 * 2], b_part[pair % 2][j / 2][j % 2 * 2 + 1]};
          mma<Factor<T>>(sum[i][j], a_part[pair % 2][i], b_half);
        }
      }
    }
    free = now, now = next;
  }

  // mma leaves a lane two neighbours of a row, 4 or 8 bytes. By way of shared memory a warp writes whole rows.
  constexpr int PITCH = SIDE / WIDE<T>;
  async_wait<0>();
  __syncthreads();  // nothing arrives and nobody reads any more: the tiles' memory is free
  T* const patch = reinterpret_cast<T*>(tiles) + warp * SIDE * SIDE;
#pragma unroll
  for (int i = 0; i < SIDE / 8; ++i) {
#pragma unroll
    for (int j = 0; j < SIDE / 8; ++j) {
      const int row = i * 8 + lane / 4, col = j * 8 + lane % 4 * 2;
      Vector<T, 2> out;
      out[0] = T(sum[i / 2][j][i % 2 * 2]), out[1] = T(sum[i / 2][j][i % 2 * 2 + 1]);
      store_vector(patch + swizzled<PITCH>(row, col / WIDE<T>) * WIDE<T> + col % WIDE<T>, out);
    }
  }
  __syncwarp();  // the patch is this warp's own
  UNROLL
  for (int i = 0; i < SIDE * PITCH / 32; ++i) {
    const int row = (i * 32 + lane) / PITCH, chunk = lane % PITCH;
    const int64_t to_row = row0 + warp_row + row, to_col = col0 + warp_col + chunk * WIDE<T>;
    if (to_row < rows && to_col < cols) {
      const auto out = load_vector<WIDE<T>>(patch + swizzled<PITCH>(row, chunk) * WIDE<T>);
      if (wide_c) {
        store_vector(&c(to_row, to_col), out);
      } else {
        UNROLL
        for (int e = 0; e < WIDE<T>; ++e) {
          if (to_col + e < cols) c(to_row, to_col + e) = out[e];
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
template <typename T, bool A_BY_K, bool B_BY_K, By BY_A = By::chunks, By BY_B = By::chunks>
void launch_as(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const int64_t blocks = ceil_div(c.size[0], ROWS) * ceil_div(c.size[1], COLS);
  launch<matmul_tensor<T, A_BY_K, B_BY_K, BY_A, BY_B>>({blocks}, dim3(THREADS), STAGES * sizeof(Tiles<T>), stream,
                                                       a.as<T>(), b.as<T>(), c.as<T>(), in_wide_groups(c.as<T>(), 1));
}

template <typename T>
void launch_halves(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const bool a_rows = in_wide_groups(a.as<T>(), 1), a_cols = in_wide_groups(a.as<T>(), 0);
  const bool b_rows = in_wide_groups(b.as<T>(), 1), b_cols = in_wide_groups(b.as<T>(), 0);
  if (a_rows && b_rows) launch_as<T, true, false>(a, b, c, stream);
  else if (a_rows && b_cols) launch_as<T, true, true>(a, b, c, stream);
  else if (a_cols && b_rows) launch_as<T, false, false>(a, b, c, stream);
  else if (a_cols && b_cols) launch_as<T, false, true>(a, b, c, stream);
  else launch_as<T, true, false, By::row, By::row>(a, b, c, stream);
}

// Of float32 ldmatrix reads only tiles with k along their rows: other matrices are transposed by their copy.
void launch_floats(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const bool a_rows = in_wide_groups(a.as<float>(), 1), b_cols = in_wide_groups(b.as<float>(), 0);
  if (a_rows && b_cols) launch_as<float, true, true>(a, b, c, stream);
  else if (a_rows) launch_as<float, true, true, By::chunks, By::col>(a, b, c, stream);
  else if (b_cols) launch_as<float, true, true, By::col, By::chunks>(a, b, c, stream);
  else launch_as<float, true, true, By::col, By::col>(a, b, c, stream);
}

void matmul(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  dispatch_floating(c.dtype, [&]<typename T>() {
    if constexpr (sizeof(T) == 8) throw std::invalid_argument("float64 is multiplied on ordinary cores, by stage 14");
    else if constexpr (sizeof(T) == 4) launch_floats(a, b, c, stream);
    else launch_halves<T>(a, b, c, stream);
  });
}
