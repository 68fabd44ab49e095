// Stage 21: S on the chip, split over the grid: a failure and its repair
//
// Problem   O = s (Q K^T) V for each batch and head: q, k [T, Dk], v [T, Dv], no softmax; any strides. Forward only.
// Before    Stage 20 sends S to device memory and back: 4 H T^2 bytes either way, for H = B N heads.
// Idea      A block keeps its tile of S in shared memory and multiplies it with its rows of V at once. But a row of O
//           needs all tiles of S in its row, and these lie in the shared memory of different blocks, which no other
//           block can see. As it failed, blocks add their parts to the same words of O, as if __syncthreads() kept
//           blocks apart. Repaired, each part goes to device memory of its own, and a second launch adds them up.
// Mapping   block: a TILE x TILE tile of S, all columns of V.  thread (x, y): rows y + DOWN i, column x of a tile.
//           second launch, thread: a word of O.
// Cost      float32, sizes of 32
//             global load sectors   H T^2 (2 Dk + Dv) / 256 and H T^2 Dv / 256 for the parts
//             global store sectors  H T^2 Dv / 256 for the parts, H T Dv / 8 for O
//             shared wavefronts     5 H T^2 (Dk + Dv) / 128 loads, no bank conflicts
//             barriers              (Dk + Dv) / 16 a block
// Limits    The parts take H T^2 Dv / 8 bytes: from Dv = 32 on they are as much as S or more, and make the same
//           journey. Nothing has been won. Not the tiles of S may be split over blocks but the rows of O: stage 22.
// Run       python -m stages run 21

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

constexpr int TILE = 32;  // rows of Q, and keys, of a block
constexpr int DOWN = 8;   // threads along the rows: eight warps, a row of a tile for each at a time
constexpr int EACH = TILE / DOWN;
constexpr int PAD = 1;            // a word, so that a column of K's tile lies in 32 banks
constexpr int SUM_THREADS = 256;  // of a block of the second kernel

// ---------------------------------------------------------------------------------------------------------------------
// What both versions share: the block's tile of S, which stays in shared memory, times its keys' rows of V. Each thread
// hands its sums to give(batch, head, slice, row, col, sum), `slice` being the number of the tile of keys.
// grid (B N * ceil(T / TILE) * ceil(T / TILE)), block (TILE, DOWN)
template <typename T, typename Give>
__device__ __forceinline__ void part(View<const T, 4> q, View<const T, 4> k, View<const T, 4> v, Accumulator<T> scale,
                                     Give give) {
  using Sum = Accumulator<T>;
  __shared__ Sum q_tile[TILE][TILE], k_tile[TILE][TILE + PAD], s_tile[TILE][TILE], v_tile[TILE][TILE];

  const int64_t heads = q.size[1], seq = q.size[2], inner = q.size[3], cols = v.size[3];
  const int64_t tiles = ceil_div(seq, TILE);
  const int64_t slice = blockIdx.x % tiles, key0 = slice * TILE;
  const int64_t row0 = blockIdx.x / tiles % tiles * TILE;
  const int64_t batch = blockIdx.x / tiles / tiles / heads, head = blockIdx.x / tiles / tiles % heads;
  const int x = threadIdx.x, y = threadIdx.y;

  Sum s[EACH] = {};
  for (int64_t k0 = 0; k0 < inner; k0 += TILE) {
    UNROLL
    for (int i = 0; i < EACH; ++i) {
      const int r = y + DOWN * i;
      const bool inside = k0 + x < inner;
      q_tile[r][x] = inside && row0 + r < seq ? Sum(q(batch, head, row0 + r, k0 + x)) : 0;
      k_tile[r][x] = inside && key0 + r < seq ? Sum(k(batch, head, key0 + r, k0 + x)) : 0;
    }
    __syncthreads();  // both tiles are whole before anyone reads them
    for (int i = 0; i < TILE; ++i) {
      const Sum word = k_tile[x][i];
      UNROLL
      for (int j = 0; j < EACH; ++j) s[j] += q_tile[y + DOWN * j][i] * word;
    }
    __syncthreads();  // everyone has read before the next step overwrites
  }
  UNROLL
  for (int i = 0; i < EACH; ++i) s_tile[y + DOWN * i][x] = scale * s[i];

  const int keys = int(min(int64_t(TILE), seq - key0));  // those that there are
  for (int64_t col0 = 0; col0 < cols; col0 += TILE) {
    UNROLL
    for (int i = 0; i < EACH; ++i) {
      const int r = y + DOWN * i;
      v_tile[r][x] = key0 + r < seq && col0 + x < cols ? Sum(v(batch, head, key0 + r, col0 + x)) : 0;
    }
    __syncthreads();  // V's tile, and before the first one that of S, is whole
    Sum sum[EACH] = {};
    for (int j = 0; j < keys; ++j) {
      const Sum word = v_tile[j][x];
      UNROLL
      for (int i = 0; i < EACH; ++i) sum[i] += s_tile[y + DOWN * i][j] * word;
    }
    UNROLL
    for (int i = 0; i < EACH; ++i) {
      const int64_t row = row0 + y + DOWN * i, col = col0 + x;
      if (row < seq && col < cols) give(batch, head, slice, row, col, sum[i]);
    }
    __syncthreads();  // everyone has read before the next tile of V overwrites
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// As it failed. "The first slice stores, the others add to it, and there is a barrier in every step."
template <typename T>
__global__ void qkv_as_it_failed(View<const T, 4> q,  // [batch, heads, seq, Dk]
                                 View<const T, 4> k,  // [batch, heads, seq, Dk]
                                 View<const T, 4> v,  // [batch, heads, seq, Dv]
                                 View<T, 4> o,        // [batch, heads, seq, Dv]
                                 Accumulator<T> scale) {
  const auto add = [&](int64_t batch, int64_t head, int64_t slice, int64_t row, int64_t col, Accumulator<T> sum) {
    // A barrier holds back the threads of one block. Nothing says that the first slice's block has been here, or that
    // two others are not here at once: both read, both add, and what one of them writes is lost.
    T& word = o(batch, head, row, col);
    word = T(slice == 0 ? sum : Accumulator<T>(word) + sum);
  };
  part(q, k, v, scale, add);
}

// ---------------------------------------------------------------------------------------------------------------------
// Repaired: each slice has memory of its own, and the next launch, which starts when this one has ended, adds them up.
template <typename T>
__global__ void qkv_parts(View<const T, 4> q,             // [batch, heads, seq, Dk]
                          View<const T, 4> k,             // [batch, heads, seq, Dk]
                          View<const T, 4> v,             // [batch, heads, seq, Dv]
                          View<Accumulator<T>, 5> parts,  // [slices, batch, heads, seq, Dv]
                          Accumulator<T> scale) {
  const auto keep = [&](int64_t batch, int64_t head, int64_t slice, int64_t row, int64_t col, Accumulator<T> sum) {
    parts(slice, batch, head, row, col) = sum;
  };
  part(q, k, v, scale, keep);
}

// grid (ceil(B N T Dv / SUM_THREADS)), block (SUM_THREADS)
template <typename T>
__global__ void qkv_sum(View<Accumulator<T>, 5> parts,  // [slices, batch, heads, seq, Dv]
                        View<T, 4> o) {                 // [batch, heads, seq, Dv]
  int64_t i = int64_t(blockIdx.x) * SUM_THREADS + threadIdx.x;
  if (i >= o.size[0] * o.size[1] * o.size[2] * o.size[3]) return;
  const int64_t col = i % o.size[3], row = i / o.size[3] % o.size[2];
  const int64_t heads = i / o.size[3] / o.size[2], head = heads % o.size[1], batch = heads / o.size[1];

  Accumulator<T> sum = 0;
  for (int64_t slice = 0; slice < parts.size[0]; ++slice) sum += parts(slice, batch, head, row, col);
  o(batch, head, row, col) = T(sum);
}

// ---------------------------------------------------------------------------------------------------------------------
int64_t blocks_for(const Output<4>& o) {
  const int64_t tiles = ceil_div(o.size[2], TILE);
  return o.size[0] * o.size[1] * tiles * tiles;
}

void qkv_as_it_failed(Input<4> q, Input<4> k, Input<4> v, Output<4> o, double scale, Stream stream) {
  dispatch_floating(o.dtype, [&]<typename T>() {
    launch<qkv_as_it_failed<T>>({blocks_for(o)}, dim3(TILE, DOWN), 0, stream, q.as<T>(), k.as<T>(), v.as<T>(),
                                o.as<T>(), Accumulator<T>(scale));
  });
}

void qkv(Input<4> q, Input<4> k, Input<4> v, Output<5> parts, Output<4> o, double scale, Stream stream) {
  dispatch_floating(o.dtype, [&]<typename T>() {
    const View<Accumulator<T>, 5> kept = parts.as<Accumulator<T>>();
    launch<qkv_parts<T>>({blocks_for(o)}, dim3(TILE, DOWN), 0, stream, q.as<T>(), k.as<T>(), v.as<T>(), kept,
                         Accumulator<T>(scale));
    const int64_t words = o.size[0] * o.size[1] * o.size[2] * o.size[3];
    launch<qkv_sum<T>>({ceil_div(words, SUM_THREADS)}, dim3(SUM_THREADS), 0, stream, kept, o.as<T>());
  });
}
