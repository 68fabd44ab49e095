// Stage 14: matmul, the next patches on their way while this one is computed
//
// Problem   C[M,N] = A[M,K] B[K,N]; any strides.
// Before    Stage 13 computes nothing while its block waits for the next patches, and moves every word by itself.
// Idea      cp.async starts a copy into shared memory, and the thread goes on. There is room for STAGES pairs of
//           patches: one is computed, the others are on their way. One barrier a step then says two things: the next
//           patches are there for all, and the last ones are free. Registers do the same on a smaller scale: the
//           operands of k + 1 are read, 16 bytes at a time, while those of k multiply.
// Mapping   block: ROWS x COLS patch of C.  warp: 64 x COLS / 2 of it, four down and two across.
//           lane: 8 x EACH outputs, in groups of 16 bytes. A's patch lies transposed, so that a lane's rows are side by
//           side as its columns are.
// Cost      row-major float32, M a multiple of ROWS = 256, N of COLS = 128, K of 32
//             global load sectors   3 M N K / 2048
//             shared wavefronts     3 M N K / 1024 loads, 9 M N K / 8192 copies
//             barriers              1 + K / DEPTH a block
// Limits    Nine of ten instructions are multiply-adds by now, and a multiprocessor starts four in a cycle: ordinary
//           cores can do little more. Stage 15 multiplies on the tensor cores.
// Run       python -m stages run 14

#include "common/async_copy.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/tile.h"
#include "common/vector.h"
#include "common/view.h"

constexpr int DEPTH = 8;      // of a patch along k: written out, 16 would not stay in the instruction cache
constexpr int THREADS = 256;  // eight warps, all that a multiprocessor's registers have room for
constexpr int ROWS = 256;     // of the patch of C
constexpr int DOWN = 8;       // rows of a lane
constexpr int GROUP = 8;      // blocks that share columns of B before the next ones begin
template <typename T>
constexpr int STAGES = sizeof(T) == 8 ? 2 : 3;  // pairs of patches, as many as 48 KiB hold
template <typename T>
constexpr int EACH = sizeof(T) == 8 ? 8 : 16;  // columns of a lane
template <typename T>
constexpr int COLS = 8 * EACH<T>;  // of the patch of C
template <typename T>
constexpr int WIDE = 16 / int(sizeof(T));  // elements that 16 bytes hold

// How a patch, [k][i], is copied: in groups of 16 bytes along i, by elements along k, or by elements along i.
enum class By { groups, k, i };

// Elements below each other get different banks; whole groups stay where the cache lines do.
template <typename T, By BY>
constexpr int PAD = BY == By::groups ? 0 : WIDE<T>;

template <typename T, By BY_A, By BY_B>
struct Patches {
  alignas(16) T a[DEPTH][ROWS + PAD<T, BY_A>];
  alignas(16) T b[DEPTH][COLS<T> + PAD<T, BY_B>];
};

// ---------------------------------------------------------------------------------------------------------------------
// Starts the copies of a patch, of which the matrix has `depth` x `width`; zeros stand for the rest.
template <By BY, int WIDTH, typename T>
__device__ __forceinline__ void start_copy(T* patch, const T* from, int64_t stride_k, int64_t stride_i, int64_t depth,
                                           int64_t width) {
  constexpr int PITCH = WIDTH + PAD<T, BY>;
  const int thread = threadIdx.x;
  const int ks = int(min(depth, int64_t(DEPTH))), is = int(min(width, int64_t(WIDTH)));
  if constexpr (BY == By::groups) {
    constexpr int GROUPS = WIDTH / WIDE<T>, STEP = THREADS / GROUPS;
    const int i = thread % GROUPS * WIDE<T>, k0 = thread / GROUPS;
    from += k0 * stride_k + i;
#pragma unroll
    for (int k = 0; k < DEPTH; k += STEP, from += STEP * stride_k) {
      async_copy<16>(patch + (k0 + k) * PITCH + i, from, k0 + k < ks && i < is);
    }
  } else if constexpr (BY == By::k) {
    // A warp takes a sector of four rows of the matrix, which it transposes: to 32 different banks.
    constexpr int STEP = THREADS / DEPTH;
    const int i0 = thread / DEPTH, k = thread % DEPTH;
    from += i0 * stride_i + k;
#pragma unroll
    for (int i = 0; i < WIDTH; i += STEP, from += STEP * stride_i) {
      async_copy<sizeof(T)>(patch + k * PITCH + i0 + i, from, k < ks && i0 + i < is);
    }
  } else {
    constexpr int STEP = THREADS / WIDTH;
    const int i = thread % WIDTH, k0 = thread / WIDTH;
    from += i * stride_i + k0 * stride_k;
#pragma unroll
    for (int k = 0; k < DEPTH; k += STEP, from += STEP * stride_k) {
      const bool inside = k0 + k < ks && i < is;
      if constexpr (sizeof(T) >= 4) {
        async_copy<sizeof(T)>(patch + (k0 + k) * PITCH + i, from, inside);
      } else {  // cp.async takes no less than 4 bytes
        const T word = inside ? *from : T(0);
        patch[(k0 + k) * PITCH + i] = word;
      }
    }
  }
}

// grid (ceil(M / ROWS) * ceil(N / COLS)), block (THREADS)
template <typename T, By BY_A, By BY_B>
__global__ void __launch_bounds__(THREADS, 1) matmul_pipelined(View<const T, 2> a,  // [M, K]
                                                               View<const T, 2> b,  // [K, N]
                                                               View<T, 2> c,        // [M, N]
                                                               bool wide_c) {       // rows of 16-byte groups
  using Pair = Patches<T, BY_A, BY_B>;
  __shared__ Pair patches[STAGES<T>];

  const int64_t rows = c.size[0], cols = c.size[1];
  const Tile tile = tile_of_block<GROUP>(blockIdx.x, ceil_div(rows, ROWS), ceil_div(cols, COLS<T>));
  const int64_t row0 = tile.row * ROWS, col0 = tile.col * COLS<T>;

  // Four lanes across, eight down, so that neighbours in pairs ask for the same rows and every other lane for the same
  // columns: then 16 bytes for each lane take two wavefronts instead of four.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int x = (lane & 1) | (lane >> 1 & 2), y = (lane >> 1 & 1) | (lane >> 2 & 6);
  const auto row_of = [&](int i) { return warp / 2 * (ROWS / 4) + (y + i / WIDE<T> * 8) * WIDE<T> + i % WIDE<T>; };
  const auto col_of = [&](int j) { return warp % 2 * (COLS<T> / 2) + (x + j / WIDE<T> * 4) * WIDE<T> + j % WIDE<T>; };

  const T* next_a = &a(row0, 0);
  const T* next_b = &b(0, col0);
  int64_t left = a.size[1];
  const auto start = [&](Pair& to) {
    start_copy<BY_A, ROWS>(&to.a[0][0], next_a, a.stride[1], a.stride[0], left, rows - row0);
    start_copy<BY_B, COLS<T>>(&to.b[0][0], next_b, b.stride[0], b.stride[1], left, cols - col0);
    async_commit();
    next_a += DEPTH * a.stride[1], next_b += DEPTH * b.stride[0], left -= DEPTH;
  };

  Vector<T, WIDE<T>> a_part[2][DOWN / WIDE<T>], b_part[2][EACH<T> / WIDE<T>];  // of this k and of the next
  const auto read = [&](int to, const Pair& patch, int k) {
#pragma unroll
    for (int i = 0; i < DOWN; i += WIDE<T>) a_part[to][i / WIDE<T>] = load_vector<WIDE<T>>(&patch.a[k][row_of(i)]);
#pragma unroll
    for (int j = 0; j < EACH<T>; j += WIDE<T>) b_part[to][j / WIDE<T>] = load_vector<WIDE<T>>(&patch.b[k][col_of(j)]);
  };

  for (int stage = 0; stage < STAGES<T> - 1; ++stage) start(patches[stage]);
  async_wait<STAGES<T> - 2>();  // this thread's part of the first patch
  __syncthreads();              // everyone's
  read(0, patches[0], 0);

  Accumulator<T> sum[DOWN][EACH<T>] = {};
  int now = 0, free = STAGES<T> - 1;
#pragma unroll 1
  for (int64_t k0 = 0; k0 < a.size[1]; k0 += DEPTH) {
    const int next = now + 1 < STAGES<T> ? now + 1 : 0;
#pragma unroll
    for (int k = 0; k < DEPTH; ++k) {
      if (k == 0) start(patches[free]);
      if (k + 1 < DEPTH) {
        read((k + 1) % 2, patches[now], k + 1);
      } else {
        async_wait<STAGES<T> - 2>();
        __syncthreads();  // the next patches are there, and nobody reads these any more
        read((k + 1) % 2, patches[next], 0);
      }
#pragma unroll
      for (int i = 0; i < DOWN; ++i) {
#pragma unroll
        for (int j = 0; j < EACH<T>; ++j) {
          const T a_word = a_part[k % 2][i / WIDE<T>][i % WIDE<T>], b_word = b_part[k % 2][j / WIDE<T>][j % WIDE<T>];
          sum[i][j] += Accumulator<T>(a_word) * Accumulator<T>(b_word);
        }
      }
    }
    free = now, now = next;
  }

  UNROLL
  for (int i = 0; i < DOWN; ++i) {
    const int64_t row = row0 + row_of(i);
    UNROLL
    for (int j = 0; j < EACH<T>; j += WIDE<T>) {
      const int64_t col = col0 + col_of(j);
      Vector<T, WIDE<T>> out;
      UNROLL
      for (int e = 0; e < WIDE<T>; ++e) out[e] = T(sum[i][j + e]);
      if (wide_c) {
        if (row < rows && col < cols) store_vector(&c(row, col), out);
      } else {
        UNROLL
        for (int e = 0; e < WIDE<T>; ++e) {
          if (row < rows && col + e < cols) c(row, col + e) = out[e];
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
template <typename T, By BY_A, By BY_B>
void launch_by(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const int64_t patches = ceil_div(c.size[0], ROWS) * ceil_div(c.size[1], COLS<T>);
  launch<matmul_pipelined<T, BY_A, BY_B>>({patches}, dim3(THREADS), 0, stream, a.as<T>(), b.as<T>(), c.as<T>(),
                                          in_wide_groups(c.as<T>(), 1));
}

void matmul(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  dispatch_floating(c.dtype, [&]<typename T>() {
    if constexpr (sizeof(T) >= 4) {
      const bool groups_a = in_wide_groups(a.as<T>(), 0), groups_b = in_wide_groups(b.as<T>(), 1);
      if ((groups_a || a.stride[1] == 1) && (groups_b || b.stride[0] == 1)) {
        const auto run = groups_a   ? groups_b ? launch_by<T, By::groups, By::groups> : launch_by<T, By::groups, By::k>
                         : groups_b ? launch_by<T, By::k, By::groups>
                                    : launch_by<T, By::k, By::k>;
        return run(a, b, c, stream);
      }
    }
    launch_by<T, By::i, By::i>(a, b, c, stream);
  });
}
