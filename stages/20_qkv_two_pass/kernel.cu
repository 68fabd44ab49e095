// Stage 20: (Q K^T) V in two passes, S in device memory
//
// Problem   O = s (Q K^T) V for each batch and head: q, k [T, Dk], v [T, Dv], no softmax; any strides.
// Before    Stage 13 multiplies two matrices. This is a product of three: S = s Q K^T is T x T, O = S V.
// Idea      One after the other, as on paper: a first kernel computes S and puts it into device memory, a second one
//           reads it back. S has a row and a column for each t, so it outgrows all other tensors as T grows. It is kept
//           in the type of the sums: rounded to 16 bits it would lose more than the result may.
// Mapping   both: a block has a TILE x TILE patch of S, or of O.
//           thread (x, y): rows y + SIDE i and columns x + SIDE j of it.
// Cost      float32, for H = B N heads, T and Dv of 64, Dk of 16
//             global load sectors   H T^2 (Dk + Dv) / 256        (half of those with Dv are S)
//             global store sectors  H T^2 / 8 for S, H T Dv / 8 for O
//             shared wavefronts     H T^2 (Dk + Dv) / 128 loads, no bank conflicts
//             barriers              Dk / 8 a block of the first kernel, T / 8 of the second
// Limits    S: 4 H T^2 bytes, written once and read Dv / 64 times. At T = 2048, Dk = Dv = 64 it is 8 times as large as
//           q, k, v and o together. Who wants it on the chip, and starts in the wrong place, arrives at stage 21; stage
//           22 keeps it there.
// Run       python -m stages run 20

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

constexpr int TILE = 64;  // rows and columns of a block's patch

// How a block of T shares out its work. Shared memory holds what sums are made of, already in the sums' type.
template <typename T>
struct Plan {
  using Sum = Accumulator<T>;
  static constexpr int EACH = sizeof(Sum) == 8 ? 4 : 8;  // rows and columns of a thread
  static constexpr int SIDE = TILE / EACH;               // threads along either side
  static constexpr int THREADS = SIDE * SIDE;
  static constexpr int DEPTH = 64 / sizeof(Sum);             // of the pieces in which Dk and keys pass
  static constexpr int LANES = 128 / sizeof(Sum);            // that one wavefront can serve
  static constexpr int RESIDENT = sizeof(Sum) == 8 ? 2 : 6;  // blocks that registers have to hold

  // A piece is [along the sum][rows], but it is written by lanes that mostly run along the sum: a row of the piece
  // apart, all in one bank. The padding moves each by the number of banks that the lanes along the rows take up.
  static constexpr int PIECE_PAD = LANES / DEPTH;
  using Piece = Sum[DEPTH][TILE + PIECE_PAD];  // of Q, K or S
  using Values = Sum[DEPTH][TILE];             // of V, [key][column]
  static_assert(LANES % DEPTH == 0, "a wavefront has to serve all lanes along a sum");
};

// ---------------------------------------------------------------------------------------------------------------------
// DEPTH columns of TILE rows of x, turned: neighbouring lanes read along a row. Past an edge stands a zero.
template <typename P, typename U>
__device__ __forceinline__ void load_rows(View<U, 2> x, int64_t row0, int64_t col0, typename P::Piece& piece) {
  constexpr int STEP = P::THREADS / P::DEPTH;  // rows at a time
  const int k = threadIdx.x % P::DEPTH, r0 = threadIdx.x / P::DEPTH;
  const bool inside = col0 + k < x.size[1];
  const int rows = int(min(int64_t(TILE), x.size[0] - row0));
  const U* word = &x(row0 + r0, col0 + k);
  UNROLL
  for (int i = 0; i < TILE / STEP; ++i, word += STEP * x.stride[0]) {
    piece[k][r0 + STEP * i] = inside && r0 + STEP * i < rows ? typename P::Sum(*word) : 0;
  }
}

// DEPTH rows of TILE columns of x, as they lie.
template <typename P, typename U>
__device__ __forceinline__ void load_values(View<U, 2> x, int64_t row0, int64_t col0, typename P::Values& piece) {
  constexpr int STEP = P::THREADS / TILE;
  const int c = threadIdx.x % TILE, k0 = threadIdx.x / TILE;
  const bool inside = col0 + c < x.size[1];
  const int rows = int(min(int64_t(P::DEPTH), x.size[0] - row0));
  const U* word = &x(row0 + k0, col0 + c);
  UNROLL
  for (int i = 0; i < P::DEPTH / STEP; ++i, word += STEP * x.stride[0]) {
    piece[k0 + STEP * i][c] = inside && k0 + STEP * i < rows ? typename P::Sum(*word) : 0;
  }
}

// sum[i][j] += a[k][y + SIDE i] b[k][x + SIDE j] for all k: 2 EACH reads, one wavefront each, for EACH EACH terms.
template <typename P, typename Sum, int A, int B>
__device__ __forceinline__ void multiply(Sum (&sum)[P::EACH][P::EACH], const Sum (*a)[A], const Sum (*b)[B]) {
  const int x = threadIdx.x % P::SIDE, y = threadIdx.x / P::SIDE;
#pragma unroll 1  // two at a time would need registers that the sums have
  for (int k = 0; k < P::DEPTH; ++k) {
    Sum a_part[P::EACH], b_part[P::EACH];
    UNROLL
    for (int i = 0; i < P::EACH; ++i) a_part[i] = a[k][y + P::SIDE * i];
    UNROLL
    for (int j = 0; j < P::EACH; ++j) b_part[j] = b[k][x + P::SIDE * j];
    UNROLL
    for (int i = 0; i < P::EACH; ++i) {
      UNROLL
      for (int j = 0; j < P::EACH; ++j) sum[i][j] += a_part[i] * b_part[j];
    }
  }
}

// The thread's patch of a result, as far as the result goes.
template <typename P, typename U, typename Sum>
__device__ __forceinline__ void store(const Sum (&sum)[P::EACH][P::EACH], View<U, 2> to, int64_t row0, int64_t col0) {
  const int x = threadIdx.x % P::SIDE, y = threadIdx.x / P::SIDE;
  UNROLL
  for (int i = 0; i < P::EACH; ++i) {
    UNROLL
    for (int j = 0; j < P::EACH; ++j) {
      const int64_t row = row0 + y + P::SIDE * i, col = col0 + x + P::SIDE * j;
      if (row < to.size[0] && col < to.size[1]) to(row, col) = U(sum[i][j]);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// grid (B N * ceil(T / TILE) * ceil(T / TILE)), block (THREADS)
template <typename T>
__global__ void __launch_bounds__(Plan<T>::THREADS, Plan<T>::RESIDENT)
    qkv_scores(View<const T, 4> q,         // [batch, heads, seq, Dk]
               View<const T, 4> k,         // [batch, heads, seq, Dk]
               View<Accumulator<T>, 4> s,  // [batch, heads, seq, seq]
               Accumulator<T> scale) {
  using P = Plan<T>;
  __shared__ typename P::Piece q_piece, k_piece;

  // Everything is counted along one grid dimension: y and z of a grid end at 65535, batch x heads and T need not.
  const int64_t heads = q.size[1], tiles = ceil_div(q.size[2], TILE);
  const int64_t key0 = blockIdx.x % tiles * TILE, row0 = blockIdx.x / tiles % tiles * TILE;
  const int64_t head = blockIdx.x / tiles / tiles;
  const View<const T, 2> q_head = matrix(q, head / heads, head % heads);
  const View<const T, 2> k_head = matrix(k, head / heads, head % heads);

  typename P::Sum sum[P::EACH][P::EACH] = {};
  for (int64_t k0 = 0; k0 < q.size[3]; k0 += P::DEPTH) {
    load_rows<P>(q_head, row0, k0, q_piece);
    load_rows<P>(k_head, key0, k0, k_piece);
    __syncthreads();  // both pieces are whole before anyone reads them
    multiply<P>(sum, q_piece, k_piece);
    __syncthreads();  // everyone has read before the next pieces overwrite
  }
  UNROLL
  for (auto& row : sum) {
    UNROLL
    for (auto& word : row) word *= scale;
  }
  store<P>(sum, matrix(s, head / heads, head % heads), row0, key0);
}

// ---------------------------------------------------------------------------------------------------------------------
// grid (B N * ceil(T / TILE) * ceil(Dv / TILE)), block (THREADS)
template <typename T>
__global__ void __launch_bounds__(Plan<T>::THREADS, Plan<T>::RESIDENT)
    qkv_values(View<Accumulator<T>, 4> s,  // [batch, heads, seq, seq]
               View<const T, 4> v,         // [batch, heads, seq, Dv]
               View<T, 4> o) {             // [batch, heads, seq, Dv]
  using P = Plan<T>;
  __shared__ typename P::Piece s_piece;
  __shared__ typename P::Values v_piece;

  const int64_t heads = v.size[1], seq = v.size[2];
  const int64_t across = ceil_div(v.size[3], TILE), tiles = ceil_div(seq, TILE);
  const int64_t col0 = blockIdx.x % across * TILE, row0 = blockIdx.x / across % tiles * TILE;
  const int64_t head = blockIdx.x / across / tiles;
  const View<typename P::Sum, 2> s_head = matrix(s, head / heads, head % heads);
  const View<const T, 2> v_head = matrix(v, head / heads, head % heads);

  typename P::Sum sum[P::EACH][P::EACH] = {};
  for (int64_t key0 = 0; key0 < seq; key0 += P::DEPTH) {
    load_rows<P>(s_head, row0, key0, s_piece);
    load_values<P>(v_head, key0, col0, v_piece);
    __syncthreads();  // both pieces are whole before anyone reads them
    multiply<P>(sum, s_piece, v_piece);
    __syncthreads();  // everyone has read before the next pieces overwrite
  }
  store<P>(sum, matrix(o, head / heads, head % heads), row0, col0);
}

// ---------------------------------------------------------------------------------------------------------------------
void qkv(Input<4> q, Input<4> k, Input<4> v, Output<4> s, Output<4> o, double scale, Stream stream) {
  const int64_t tiles = o.size[0] * o.size[1] * ceil_div(o.size[2], TILE);  // of rows, in all heads
  dispatch_floating(o.dtype, [&]<typename T>() {
    using P = Plan<T>;
    const View<typename P::Sum, 4> scores = s.as<typename P::Sum>();
    launch<qkv_scores<T>>({tiles * ceil_div(o.size[2], TILE)}, dim3(P::THREADS), 0, stream, q.as<T>(), k.as<T>(),
                          scores, typename P::Sum(scale));
    launch<qkv_values<T>>({tiles * ceil_div(o.size[3], TILE)}, dim3(P::THREADS), 0, stream, scores, v.as<T>(),
                          o.as<T>());
  });
}
