// A block's share of (Q K^T) V, both products with their sums in registers: stage 13 teaches one, stage 22 the two.
//
//   struct Plan : RegisterTile<T, 64, CHUNK> {};             // 64 rows of Q and keys in a step, CHUNK columns of V
//   load_rows<Plan>(q_head, row0, k0, q_piece);              // a piece of Q, and one of K; after a barrier
//   multiply<Plan, KEYS>(s, q_piece, k_piece, Plan::DEPTH);  // s[i][j] of rows y + SIDE_Y i, keys x + SIDE_X j
//   load_values<Plan>(v_head, key0, col0, v_piece);          // a piece of V; after a barrier
//   multiply<Plan, Plan::EACH>(out, s_tile, v_piece, keys);  // out[i][j] of rows y + SIDE_Y i, columns x + SIDE_X j
#pragma once

#include <cstdint>

#include "common/device.h"
#include "common/numeric.h"
#include "common/view.h"

// Who has what. Shared memory holds what sums are made of, already in the sums' type.
template <typename T, int TILE_, int CHUNK_>
struct RegisterTile {
  using Sum = Accumulator<T>;
  static constexpr int TILE = TILE_;                     // rows of a block, and keys in a step
  static constexpr int CHUNK = CHUNK_;                   // columns of a block
  static constexpr int EACH = sizeof(Sum) == 8 ? 4 : 8;  // rows of a thread, and columns
  static constexpr int SIDE_X = CHUNK / EACH;            // threads across
  static constexpr int SIDE_Y = TILE / EACH;             // threads down
  static constexpr int THREADS = SIDE_X * SIDE_Y;
  static constexpr int DEPTH = 64 / sizeof(Sum);   // of the pieces in which Dk and keys pass
  static constexpr int LANES = 128 / sizeof(Sum);  // that one wavefront can serve

  // A tile is [along the sum][rows], but it is written by lanes that mostly run along the sum: a row of the tile apart,
  // all in one bank. The padding moves each by the number of banks that the lanes along the rows take up.
  static constexpr int PIECE_PAD = LANES / DEPTH;
  static constexpr int SQUARE_PAD = LANES / SIDE_X;
  using Piece = Sum[DEPTH][TILE + PIECE_PAD];   // of Q or K
  using Square = Sum[TILE][TILE + SQUARE_PAD];  // of S, [key][row]
  using Values = Sum[DEPTH][CHUNK];             // of V, [key][column]
  static_assert(LANES % DEPTH == 0 && LANES % SIDE_X == 0, "a wavefront has to serve all lanes along a sum");
};

// DEPTH columns of TILE rows of x, turned: neighbouring lanes read along a row. Past an edge stands a zero.
template <typename P, typename T>
__device__ __forceinline__ void load_rows(View<const T, 2> x, int64_t row0, int64_t col0, typename P::Piece& piece) {
  constexpr int STEP = P::THREADS / P::DEPTH;  // rows at a time
  const int k = threadIdx.x % P::DEPTH, r0 = threadIdx.x / P::DEPTH;
  const bool inside = col0 + k < x.size[1];
  const int rows = int(min(int64_t(P::TILE), x.size[0] - row0));
  const T* word = &x(row0 + r0, col0 + k);
  UNROLL
  for (int i = 0; i < P::TILE / STEP; ++i, word += STEP * x.stride[0]) {
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

// sum[i][j] += a[k][y + SIDE_Y i] b[k][x + SIDE_X j] for k < depth and j < J: EACH + J reads, one wavefront each, for
// EACH J terms.
template <typename P, int J, typename Sum, int WIDTH, int A, int B>
__device__ __forceinline__ void multiply(Sum (&sum)[P::EACH][WIDTH], const Sum (*a)[A], const Sum (*b)[B], int depth) {
  static_assert(J <= WIDTH, "no more columns than the sums have");
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
