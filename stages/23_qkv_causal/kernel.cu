// Stage 23: the causal mask, and skipping what it hides
//
// Problem   O = s mask(Q K^T) V for each batch and head, q, k [T, Dk], v [T, Dv]; causal: weight 0 for keys j > t.
// Before    Stage 22 takes T / 64 steps for each of T / 64 tiles of rows. With a mask, half of them would fetch and
//           multiply for nothing.
// Idea      The mask cuts S along its diagonal, and a tile of S is a square: on the diagonal, or all seen, or all
//           hidden. A block ends its walk where the hidden tiles begin, and only on the diagonal looks at single
//           elements. The transposed mask, j >= t, serves the gradients: there a block begins its walk at the diagonal.
// Mapping   as in stage 22, block: TILE rows x CHUNK columns of O; but the blocks with the longest walks come first.
// Cost      float32, causal, for H = B N heads, T of 64, Dk of 16, Dv = 64 or of 128; c = ceil(Dv / 128) chunks
//           stage 22 with n (n + 1) / 2 of its n^2 tiles of S, n = T / 64:
//             global load sectors   H T (T + 64) (2 Dk c + Dv) / 1024
//             shared wavefronts     Dv = 64: H T (T + 64) (Dk + Dv) / 256 loads, no bank conflicts
//             barriers              (Dk + 64) / 8 for each of a block's 1, 2, .. n steps
// Limits    On the diagonal half of the products are thrown away, 1 / (n + 1) of them all. As in stage 22, S is
//           computed anew for each chunk of a Dv past CHUNK, without tensor cores.
// Run       python -m stages run 23

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

enum Mask { NONE, CAUSAL, ANTICAUSAL };  // all keys, j <= t, j >= t

constexpr int TILE = 64;  // rows of Q in a block, and keys in a step: a square of S fits into static shared memory

// How a block of T shares out its work. Shared memory holds what sums are made of, already in the sums' type.
template <typename T, int CHUNK_>
struct Plan {
  using Sum = Accumulator<T>;
  static constexpr int CHUNK = CHUNK_;                   // columns of O in a block
  static constexpr int EACH = sizeof(Sum) == 8 ? 4 : 8;  // rows of a thread, and columns of O
  static constexpr int SIDE_X = CHUNK / EACH;            // threads across
  static constexpr int SIDE_Y = TILE / EACH;             // threads down
  static constexpr int THREADS = SIDE_X * SIDE_Y;
  static constexpr int DEPTH = 64 / sizeof(Sum);   // of the pieces in which Dk and keys pass
  static constexpr int LANES = 128 / sizeof(Sum);  // that one wavefront can serve
  static constexpr int RESIDENT = sizeof(Sum) == 8 ? 2 : CHUNK == 64 ? 6 : 4;  // blocks that registers have to hold

  // A tile is [along the sum][rows], but it is written by lanes that mostly run along the sum: a row of the tile apart,
  // all in one bank. The padding moves each by the number of banks that the lanes along the rows take up.
  static constexpr int PIECE_PAD = LANES / DEPTH;
  static constexpr int SQUARE_PAD = LANES / SIDE_X;
  using Piece = Sum[DEPTH][TILE + PIECE_PAD];   // of Q or K
  using Square = Sum[TILE][TILE + SQUARE_PAD];  // of S, [key][row]
  using Values = Sum[DEPTH][CHUNK];             // of V, [key][column]
  static_assert(LANES % DEPTH == 0 && LANES % SIDE_X == 0, "a wavefront has to serve all lanes along a sum");
};

// ---------------------------------------------------------------------------------------------------------------------
// DEPTH columns of TILE rows of x, turned: neighbouring lanes read along a row. Past an edge stands a zero.
template <typename P, typename T>
__device__ __forceinline__ void load_rows(View<const T, 2> x, int64_t row0, int64_t col0, typename P::Piece& piece) {
  constexpr int STEP = P::THREADS / P::DEPTH;  // rows at a time
  const int k = threadIdx.x % P::DEPTH, r0 = threadIdx.x / P::DEPTH;
  const bool inside = col0 + k < x.size[1];
  const int rows = int(min(int64_t(TILE), x.size[0] - row0));
  const T* word = &x(row0 + r0, col0 + k);
  UNROLL
  for (int i = 0; i < TILE / STEP; ++i, word += STEP * x.stride[0]) {
    piece[k][r0 + STEP * i] = inside && r0 + STEP * i < rows ? typename P::Sum(*word) : 0;
  }
}

// DEPTH rows of CHUNK columns of x, as they lie.
template <typename P, typename T>
__device__ __forceinline__ void load_values(View<const T, 2> x, int64_t row0, int64_t col0, typename P::Values& piece) {
  constexpr int STEP = P::THREADS / P::CHUNK;
  const int c = threadIdx.x % P::CHUNK, k0 = threadIdx.x / P::CHUNK;
  const bool inside = col0 + c < x.size[1];
  const int rows = int(min(int64_t(P::DEPTH), x.size[0] - row0));
  const T* word = &x(row0 + k0, col0 + c);
  UNROLL
  for (int i = 0; i < P::DEPTH / STEP; ++i, word += STEP * x.stride[0]) {
    piece[k0 + STEP * i][c] = inside && k0 + STEP * i < rows ? typename P::Sum(*word) : 0;
  }
}

// sum[i][j] += a[k][y + SIDE_Y i] b[k][x + SIDE_X j] for k < depth: EACH + J reads, one wavefront each, for EACH J
// terms.
template <typename P, int J, typename Sum, int A, int B>
__device__ __forceinline__ void multiply(Sum (&sum)[P::EACH][J], const Sum (*a)[A], const Sum (*b)[B], int depth) {
  const int x = threadIdx.x % P::SIDE_X, y = threadIdx.x / P::SIDE_X;
#pragma unroll 1  // two at a time would need registers that the sums have
  for (int k = 0; k < depth; ++k) {
    Sum a_part[P::EACH], b_part[J];
    UNROLL
    for (int i = 0; i < P::EACH; ++i) a_part[i] = a[k][y + P::SIDE_Y * i];
    UNROLL
    for (int j = 0; j < J; ++j) b_part[j] = b[k][x + P::SIDE_X * j];
    UNROLL
    for (int i = 0; i < P::EACH; ++i) {
      UNROLL
      for (int j = 0; j < J; ++j) sum[i][j] += a_part[i] * b_part[j];
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// grid (B N * ceil(T / TILE) * ceil(Dv / CHUNK)), block (THREADS)
template <typename T, int CHUNK>
__global__ void __launch_bounds__(Plan<T, CHUNK>::THREADS, Plan<T, CHUNK>::RESIDENT)
    qkv_causal(View<const T, 4> q,  // [batch, heads, seq, Dk]
               View<const T, 4> k,  // [batch, heads, seq, Dk]
               View<const T, 4> v,  // [batch, heads, seq, Dv]
               View<T, 4> o,        // [batch, heads, seq, Dv]
               Accumulator<T> scale, int mask) {
  using P = Plan<T, CHUNK>;
  using Sum = typename P::Sum;
  __shared__ typename P::Piece q_piece, k_piece;
  __shared__ typename P::Square s_tile;
  __shared__ typename P::Values v_piece;

  const int64_t heads = q.size[1], seq = q.size[2], inner = q.size[3];
  const int x = threadIdx.x % P::SIDE_X, y = threadIdx.x / P::SIDE_X;

  // Everything is counted along one grid dimension: y and z of a grid end at 65535, batch x heads and T need not.
  const int64_t chunks = ceil_div(v.size[3], CHUNK), tiles = ceil_div(seq, TILE);
  const int64_t col0 = blockIdx.x % chunks * CHUNK;
  const int64_t turn = blockIdx.x / chunks % tiles;
  const int64_t row0 = (mask == CAUSAL ? tiles - 1 - turn : turn) * TILE;  // the longest walks start first
  const int64_t head = blockIdx.x / chunks / tiles;
  const View<const T, 2> q_head = matrix(q, head / heads, head % heads);
  const View<const T, 2> k_head = matrix(k, head / heads, head % heads);
  const View<const T, 2> v_head = matrix(v, head / heads, head % heads);

  Sum out[P::EACH][P::EACH] = {};
  const int64_t first = mask == ANTICAUSAL ? row0 : 0, last = mask == CAUSAL ? row0 + TILE : seq;
  for (int64_t key0 = first; key0 < last; key0 += TILE) {
    Sum s[P::EACH][TILE / P::SIDE_X] = {};
    for (int64_t k0 = 0; k0 < inner; k0 += P::DEPTH) {
      load_rows<P>(q_head, row0, k0, q_piece);
      load_rows<P>(k_head, key0, k0, k_piece);
      __syncthreads();  // both pieces are whole before anyone reads them
      multiply<P>(s, q_piece, k_piece, P::DEPTH);
      __syncthreads();  // everyone has read before the next pieces overwrite
    }
    UNROLL
    for (int i = 0; i < P::EACH; ++i) {
      UNROLL
      for (int j = 0; j < TILE / P::SIDE_X; ++j) {
        const int row = y + P::SIDE_Y * i, key = x + P::SIDE_X * j;
        const bool hidden = key0 == row0 && (mask == CAUSAL ? key > row : mask == ANTICAUSAL && key < row);
        s_tile[key][row] = hidden ? 0 : s[i][j];
      }
    }

    // Only the keys that there are: past them S would be 0 times what q has, and that may be infinite.
    const int keys = int(min(int64_t(TILE), seq - key0));
    for (int j0 = 0; j0 < keys; j0 += P::DEPTH) {
      load_values<P>(v_head, key0 + j0, col0, v_piece);
      __syncthreads();  // the piece, and before the first one the tile of S, is whole
      multiply<P>(out, s_tile + j0, v_piece, min(P::DEPTH, keys - j0));
      __syncthreads();  // everyone has read before the next piece, or the next tile of S, overwrites
    }
  }

  UNROLL
  for (int i = 0; i < P::EACH; ++i) {
    UNROLL
    for (int j = 0; j < P::EACH; ++j) {
      const int64_t row = row0 + y + P::SIDE_Y * i, col = col0 + x + P::SIDE_X * j;
      if (row < seq && col < v.size[3]) o(head / heads, head % heads, row, col) = T(scale * out[i][j]);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
template <typename T, int CHUNK>
void start(Input<4> q, Input<4> k, Input<4> v, Output<4> o, double scale, int mask, Stream stream) {
  const int64_t blocks = o.size[0] * o.size[1] * ceil_div(o.size[2], TILE) * ceil_div(o.size[3], CHUNK);
  launch<qkv_causal<T, CHUNK>>({blocks}, dim3(Plan<T, CHUNK>::THREADS), 0, stream, q.as<T>(), k.as<T>(), v.as<T>(),
                               o.as<T>(), Accumulator<T>(scale), mask);
}

void qkv(Input<4> q, Input<4> k, Input<4> v, Output<4> o, double scale, int mask, Stream stream) {
  dispatch_floating(o.dtype, [&]<typename T>() {
    constexpr int WIDE = sizeof(T) == 8 ? 64 : 128;  // as wide as v, as far as registers go: float64 has half as many
    if (o.size[3] > 64) start<T, WIDE>(q, k, v, o, scale, mask, stream);
    else start<T, 64>(q, k, v, o, scale, mask, stream);
  });
}
