// Stage 33: the vLSTM tuned, every product at the rate of a matmul
//
// Problem   H, and the gradients of q, k, v, i and f, as in stage 32.
// Before    Stage 32 walks in the right way, but 4096 exponentials stand in each step between two products, operands
//           come word by word, everyone waits for them, and sixteen reads of shared memory feed 64 products.
// Idea      1 Between two different tiles D is a sum of two parts: D[t, j] = own[t] + (gates of the tiles between) +
//             after[j]. So exp(D - M) is a factor of the row times a factor of the key, 128 numbers for 4096
//             weights; only on the diagonal each weight has one of its own. With the largest `after` of the tile taken
//             from the key and given to the row, neither overflows.
//           2 What a row or a key brings along depends on the gates alone, also the maximum m. A kernel of its own
//             computes it for all products, and nothing is rescaled on the way.
//           3 The products of stages 13 and 14: 8 x 8 sums of a thread, reads of 16 bytes, two wavefronts each, copies
//             by cp.async into the one buffer while the other one is multiplied.
//           4 One kernel for H, dQ, dK and dV: out = ((X Y^T + b) * exp(D - M)) Z, causal or its transpose.
// Mapping   block: ROWS x COLS outputs, 4 warps; a warp has TILE rows; a step of the walk: TILE keys.
// Cost      the forward, float32, H = B N heads, n = T / 64, Dk of 32; Dv = 64 and T of 128, or Dv = 128 c and T of 64
//             blocks b              H n / 2                                 H c n
//             steps s               H n (n + 2) / 4                         H c n (n + 1) / 2
//             global load sectors   s (24 Dk + 592) + 64 b                  s (16 Dk + 1064) + 32 b
//             shared wavefronts     s (32 Dk + 2176) - b (16 Dk + 268)      s (24 Dk + 2144) + 418 b, loads
//                                   266 s + 216 b                           134 s + 204 b, stores
//                                   s (6 Dk + 128)                          s (4 Dk + 256), copies
//             barriers              s (Dk / 32 + 2) + 4 b                   s (Dk / 32 + 2) + 3 b
//           H T (Dv + 1) / 8 store sectors; for the gates 2 H n (n + 15) load sectors, 42 H n store sectors, 386 H n
//           and 6 H n shared wavefronts, loads and stores, 2 H n barriers
// Limits    X is copied anew in each step. Operands of 16 bits are converted by each thread that reads them; tensor
//           cores take them as they are (stage 34). Work grows with T^2, in stage 36 with T.
// Run       python -m stages run 33

#include "common/async_copy.h"
#include "common/device.h"
#include "common/gates.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/tile.h"
#include "common/vector.h"
#include "common/view.h"

enum Gate { EXP, SIGMOID, BARE };             // exp(i); sigmoid(i); sigmoid(i) and no normaliser
enum Role { OUTPUT, QUERIES, KEYS, VALUES };  // what a product computes: H, dQ, dK, dV

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr float LOWEST = -1e30f;  // below any exponent that counts, and finite: -infinity - LOWEST is a weight of 0

// How a block of T shares out its work.
template <typename T, int COLS_>
struct Plan {
  using Sum = Accumulator<T>;
  static constexpr int COLS = COLS_;                     // of the output in a block
  static constexpr int EACH = sizeof(Sum) == 8 ? 4 : 8;  // rows of a thread, and columns
  static constexpr int TILE = 8 * EACH;                  // rows of a warp, keys of a step
  static constexpr int ACROSS = COLS / (4 * EACH);       // warps side by side
  static constexpr int DOWN = WARPS / ACROSS;            // and below each other
  static constexpr int ROWS = DOWN * TILE;
  static constexpr int KEYS = TILE / (4 * ACROSS);                   // of a thread in a step
  static constexpr int WIDE = 16 / int(sizeof(Sum));                 // rows, or columns, that a thread reads at once
  static constexpr int TERMS = WIDE < 16 / KEYS ? WIDE : 16 / KEYS;  // and terms of a sum: they stay in 16 registers
  static constexpr int DEPTH = 128 / int(sizeof(Sum));               // of the pieces in which X and Y come
  static constexpr int GROUP = 16 / int(sizeof(T));                  // elements of a copy
  static constexpr int HALF = TILE / 2;                              // keys in a piece of Z
  static constexpr int RESIDENT = 2;                                 // blocks on a multiprocessor

  // Rows of Y are 16 bytes more than all banks apart: neighbours in a column are in different banks. Columns of X are
  // 16 bytes more, too, for the copies, which write down columns. Two keys' weights are half of all banks apart.
  static constexpr int PITCH = DEPTH + GROUP, X_PITCH = ROWS + WIDE, WEIGHTS_PITCH = ROWS + 4 * WIDE;

  union Piece {
    T y[TILE][PITCH];
    T values[HALF][COLS];
  };
  struct Shared {
    Piece pieces[2];
    Sum weights[TILE][WEIGHTS_PITCH];  // [key][row]
    Sum factors[TILE][TILE + 1];       // on the diagonal, [query][key]
    Sum row_factor[ROWS], row_bias[ROWS], key_factor[DOWN][TILE], key_bias[TILE];
    Sum log_f[TILE], input[TILE], level[TILE];  // on the diagonal
    Sum own_weight[ROWS];                       // of each row's own position, kept out of its sums
    Sum sums[2][ACROSS][ROWS];
  };
  using Turned = Sum[DEPTH][X_PITCH];  // a piece of X, [column][row]

  // X stays as long as it has no more than 32 KB. If it has more, two pieces of it are there at a time.
  static constexpr int SLOTS = 32 * 1024 / int(sizeof(Sum[DEPTH][ROWS]));
  static constexpr bool stays(int pieces) { return pieces <= SLOTS; }
  static_assert(RESIDENT * (sizeof(Shared) + SLOTS * sizeof(Turned) + 1024) <= 228 * 1024,
                "an H100's multiprocessor has 228 KB, and takes 1 more for each block");
};

// What the gates bring to D = own[t] + (gates of the tiles between) + after[j]: for each position, [batch, heads, seq],
// and for each tile of them, [batch, heads, tiles].
template <typename Sum>
struct Lines {
  View<Sum, 3> own;     // of a query t: the gates of its tile up to it, less M
  View<Sum, 3> factor;  // of a key j: exp(after[j] - the largest of its tile)
  View<Sum, 3> peak;    // that largest
  View<Sum, 3> total;   // the sum of a tile's log forget gates
  View<Sum, 3> level;   // M
  View<Sum, 3> bias;    // b
};

// ---------------------------------------------------------------------------------------------------------------------
// Starts the copy of a piece of a matrix, ROWS x COLS from (row0, col0) on; zeros stand for what the matrix has not.
template <int ROWS, int COLS, int PITCH, typename T>
__device__ __forceinline__ void start_copy(View<const T, 2> from, int64_t row0, int64_t col0, T* piece, bool groups) {
  const int rows = int(min(int64_t(ROWS), from.size[0] - row0)), cols = int(min(int64_t(COLS), from.size[1] - col0));
  if (groups) {
    constexpr int GROUP = 16 / int(sizeof(T)), SIDE = COLS / GROUP, STEP = THREADS / SIDE;
    static_assert(ROWS % STEP == 0, "every thread copies as many groups");
    const int row = threadIdx.x / SIDE, col = threadIdx.x % SIDE * GROUP, end = col < cols ? rows : 0;
    const T* word = &from(row0 + row, col0 + col);
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP, word += STEP * from.stride[0]) {
      async_copy<16>(piece + (row + r) * PITCH + col, word, r < end - row);
    }
  } else {
    constexpr int STEP = THREADS / COLS;
    const int row = threadIdx.x / COLS, col = threadIdx.x % COLS, end = col < cols ? rows : 0;
    const T* word = &from(row0 + row, col0 + col);
#pragma unroll 1
    for (int r = 0; r < ROWS; r += STEP, word += STEP * from.stride[0]) {
      const bool inside = r < end - row;
      if constexpr (sizeof(T) >= 4) {
        async_copy<sizeof(T)>(piece + (row + r) * PITCH + col, word, inside);
      } else {  // cp.async takes no less than 4 bytes
        const T value = inside ? *word : T(0);
        piece[(row + r) * PITCH + col] = value;
      }
    }
  }
}

// Starts the copy of a piece of X, which lies down turned. A warp takes eight columns of four rows: it asks for whole
// sectors, and writes to every bank once.
template <typename P, typename T>
__device__ __forceinline__ void start_turned_copy(View<const T, 2> from, int64_t row0, int64_t col0,
                                                  typename P::Turned& piece) {
  using Sum = typename P::Sum;
  constexpr int SIDE = 8, STEP = THREADS / SIDE;
  const int rows = int(min(int64_t(P::ROWS), from.size[0] - row0));
  const int cols = int(min(int64_t(P::DEPTH), from.size[1] - col0));
  const int row = threadIdx.x / SIDE;
#pragma unroll 1
  for (int col = threadIdx.x % SIDE; col < P::DEPTH; col += SIDE) {
    const int end = col < cols ? rows : 0;
    const T* word = &from(row0 + row, col0 + col);
#pragma unroll
    for (int r = 0; r < P::ROWS; r += STEP, word += STEP * from.stride[0]) {
      const bool inside = r < end - row;
      if constexpr (sizeof(T) >= 4) {
        async_copy<sizeof(T)>(&piece[col][row + r], word, inside);
      } else {  // cp.async takes no less than 4 bytes, and converts nothing
        const T value = inside ? *word : T(0);
        piece[col][row + r] = Sum(value);
      }
    }
  }
}

// In both products a thread reads the rows' factors WIDE rows at a time, for one term of their sums. The registers of a
// vector follow each other, and a register is in the even or the odd bank of the register file; an instruction that
// takes its three operands from one of them takes two cycles. Had it four terms of a row and four of a column, both
// factors of each product would be in the same bank.

// s[i][j] += sum of x[k][row i] y[4 j][k] over a piece.
template <typename P, typename T, typename Sum>
__device__ __forceinline__ void multiply_factors(Sum (&s)[P::EACH][P::EACH], const Sum* x, const T* y) {
#pragma unroll 1
  for (int k = 0; k < P::DEPTH; k += P::TERMS) {
    Vector<T, P::TERMS> y_part[P::KEYS];
#pragma unroll
    for (int j = 0; j < P::KEYS; ++j) y_part[j] = load_vector<P::TERMS>(y + 4 * j * P::PITCH + k);
#pragma unroll
    for (int e = 0; e < P::TERMS; ++e) {
      Vector<Sum, P::WIDE> x_part[P::EACH / P::WIDE];
#pragma unroll
      for (int i = 0; i < P::EACH / P::WIDE; ++i) {
        x_part[i] = load_vector<P::WIDE>(x + (k + e) * P::X_PITCH + 8 * P::WIDE * i);
      }
#pragma unroll
      for (int j = 0; j < P::KEYS; ++j) {
#pragma unroll
        for (int n = 0; n < P::EACH; ++n) {
          const int i = j % 2 ? P::EACH - 1 - n : n;  // there and back: from each product to the next one factor stays
          s[i][j] += x_part[i / P::WIDE][i % P::WIDE] * Sum(y_part[j][e]);
        }
      }
    }
  }
}

// out[i][j] += sum of weights[k][row i] values[k][column j] over half the keys of a step.
template <typename P, typename T, typename Sum>
__device__ __forceinline__ void multiply_values(Sum (&out)[P::EACH][P::EACH], const Sum* weights, const T* values) {
#pragma unroll 4
  for (int k = 0; k < P::HALF; ++k) {
    Vector<Sum, P::WIDE> part[P::EACH / P::WIDE];
    Vector<T, P::WIDE> value[P::EACH / P::WIDE];
#pragma unroll
    for (int i = 0; i < P::EACH / P::WIDE; ++i) {
      part[i] = load_vector<P::WIDE>(weights + k * P::WEIGHTS_PITCH + 8 * P::WIDE * i);
      value[i] = load_vector<P::WIDE>(values + k * P::COLS + 4 * P::WIDE * i);
    }
#pragma unroll
    for (int c = 0; c < P::EACH; ++c) {
      const Sum factor = Sum(value[c / P::WIDE][c % P::WIDE]);
#pragma unroll
      for (int i = 0; i < P::EACH; ++i) out[i][c] += part[i / P::WIDE][i % P::WIDE] * factor;
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// An input gate's part of D. Past the end: nothing comes in.
template <typename Sum, typename T>
__device__ __forceinline__ Sum input_of(View<const T, 3> i, int gate, int64_t batch, int64_t head, int64_t position) {
  if (position >= i.size[2]) return -INFINITY;
  const Sum value = Sum(i(batch, head, position));
  return gate == EXP ? value : log_sigmoid(value);
}

// A forget gate's part. Past the end: everything is kept.
template <typename Sum, typename T>
__device__ __forceinline__ Sum log_forget(View<const T, 3> f, int64_t batch, int64_t head, int64_t position) {
  return position < f.size[2] ? log_sigmoid(Sum(f(batch, head, position))) : 0;
}

// The gates and M of a tile on the diagonal.
template <typename P, typename T, typename Sum>
__device__ __forceinline__ void gates_of(View<const T, 3> i, View<const T, 3> f, View<Sum, 3> level, int gate,
                                         int64_t batch, int64_t head, int64_t first, typename P::Shared& shared) {
  const int64_t position = first + threadIdx.x;
  if (threadIdx.x < P::TILE) {
    shared.input[threadIdx.x] = input_of<Sum>(i, gate, batch, head, position);
    shared.log_f[threadIdx.x] = log_forget<Sum>(f, batch, head, position);
    shared.level[threadIdx.x] = position < level.size[2] ? level(batch, head, position) : Sum(INFINITY);
  }
}

// s exp(D - M) for each key of such a tile and each query from it on, D as a sum of the gates between. For either walk
// in the same order, so that a weight of dQ is, bit for bit, that of dK: df is made of a small difference of their sums.
template <typename P, typename Sum>
__device__ __forceinline__ void add_up(Sum scale, typename P::Shared& shared) {
  constexpr int EACH = P::TILE * P::TILE / THREADS;  // queries of a thread
  const int key = threadIdx.x % P::TILE, first = threadIdx.x / P::TILE * EACH;
  const Sum input = shared.input[key];
  Sum sum = 0;
#pragma unroll 8
  for (int query = 0; query < first; ++query) {
    const Sum step = shared.log_f[query];
    sum += query > key ? step : 0;
  }
#pragma unroll 8
  for (int query = first; query < first + EACH; ++query) {
    const Sum step = shared.log_f[query];
    sum += query > key ? step : 0;
    const Sum factor = scale * std::exp(sum + (input - shared.level[query]));
    const Sum weight = query < key ? 0 : factor;
    shared.factors[query][key] = weight;
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// out = ((X Y^T + b) * exp(D - M)) Z; what is done besides depends on the role.
// grid (B N * ceil(T / ROWS) * ceil(columns of out / COLS)), block (THREADS)
template <typename T, int COLS>
__global__ void __launch_bounds__(THREADS, Plan<T, COLS>::RESIDENT)
    vlstm_product(View<const T, 4> x,            // [batch, heads, seq, inner]: q, dh, v, k by role
                  View<const T, 4> y,            // [batch, heads, seq, inner]: k, v, dh, q
                  View<const T, 4> z,            // [batch, heads, seq, columns]: v, k, q, dh
                  View<const T, 4> self,         // q for dQ, k for dK
                  View<const T, 3> i,            // [batch, heads, seq]
                  View<const T, 3> f,            // [batch, heads, seq]
                  Lines<Accumulator<T>> lines,   //
                  View<T, 4> out,                // [batch, heads, seq, columns]
                  View<Accumulator<T>, 4> sums,  // [chunk, batch, heads, seq]: sums of the rows, l for H
                  View<Accumulator<T>, 4> own,   // [chunk, batch, heads, seq]: what the own position adds to them
                  Accumulator<T> scale, Accumulator<T> eps, int role, int gate, bool groups, bool out_groups) {
  using P = Plan<T, COLS>;
  using Sum = typename P::Sum;
  DYNAMIC_SHARED(typename P::Shared, shared);

  const int64_t heads = x.size[1], seq = x.size[2], inner = x.size[3];
  const bool dots = role == QUERIES || role == KEYS;  // the gates' gradients need q . dq and k . dk
  const bool up = role == KEYS || role == VALUES;  // the walk goes from the diagonal to the end, else to the beginning

  // Four lanes across, eight down, so that neighbours in pairs ask for the same rows and every other lane for the same
  // columns: then 16 bytes for each lane take two wavefronts instead of four.
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int lane_x = (lane & 1) | (lane >> 3 & 2), lane_y = lane >> 1 & 7;
  const int my_row = warp / P::ACROSS * P::TILE + lane_y * P::WIDE;        // the first of this thread's rows
  const int my_key = warp % P::ACROSS * (4 * P::KEYS) + lane_x;            // its first key
  const int my_col = warp % P::ACROSS * (4 * P::EACH) + lane_x * P::WIDE;  // its first column
  const auto row_of = [&](int a) { return my_row + 8 * P::WIDE * (a / P::WIDE) + a % P::WIDE; };

  // Blocks start in their order. The longest walks of all heads come first, the shortest last: so none is left with a
  // long one when the others are done. (All is counted along x: y and z of a grid end at 65535, heads and T need not.)
  const int chunks = int(max(ceil_div(out.size[3], COLS), int64_t(1)));
  const int tiles = int(ceil_div(seq, P::TILE)), blocks = int(ceil_div(tiles, P::DOWN));
  const int of_all = int(x.size[0] * heads);
  const int chunk = blockIdx.x % chunks, index = blockIdx.x / chunks % of_all, turn = blockIdx.x / chunks / of_all;
  const int tile0 = (up ? turn : blocks - 1 - turn) * P::DOWN;
  const int64_t row0 = int64_t(tile0) * P::TILE, col0 = int64_t(chunk) * COLS;
  const int batch = index / int(heads), head = index % int(heads);
  const View<const T, 2> x_head = matrix(x, batch, head), y_head = matrix(y, batch, head);
  const View<const T, 2> z_head = matrix(z, batch, head);

  const int pieces = int(max(ceil_div(inner, P::DEPTH), int64_t(1)));
  const bool stays = P::stays(pieces);
  auto* const turned = reinterpret_cast<typename P::Turned*>(shared + 1);
  const auto slot = [&](int piece) -> typename P::Turned& { return turned[stays ? piece : piece % 2]; };
  const auto start_factors = [&](int tile, int piece, typename P::Piece& to, bool with_x) {
    const int64_t key0 = int64_t(tile) * P::TILE, k0 = int64_t(piece) * P::DEPTH;
    if (with_x) start_turned_copy<P>(x_head, row0, k0, slot(piece));
    start_copy<P::TILE, P::DEPTH, P::PITCH>(y_head, key0, k0, &to.y[0][0], groups);
    async_commit();
  };
  const auto start_values = [&](int64_t key0, typename P::Piece& to) {
    start_copy<P::HALF, COLS, COLS>(z_head, key0, col0, &to.values[0][0], groups);
    async_commit();
  };

  // Each row of the block has a thread that knows it; so has each position of a step, for each tile of rows. Of the two
  // parts of a weight, the query's takes in the gates between, however the walk goes.
  const int64_t row = row0 + thread;
  const int row_tile = tile0 + thread / P::TILE, warp_tile = tile0 + warp / P::ACROSS;
  const bool owns_row = thread < P::ROWS && row < seq;
  struct Side {
    Sum own, factor, peak, bias, total;
  };
  const auto fetch = [&](int tile, int64_t position) {
    Side side = {-INFINITY, 0, 0, 0, 0};
    if (thread < P::ROWS && position < seq) {
      side = {lines.own(batch, head, position), lines.factor(batch, head, position), lines.peak(batch, head, tile), 0,
              lines.total(batch, head, tile)};
      if (role == QUERIES || role == KEYS) side.bias = lines.bias(batch, head, position);
    }
    return side;
  };
  Sum between = 0;
  const auto lay_down = [&](int tile, const Side& mine, const Side& other) {
    if (thread >= P::ROWS) return;
    const Side query = up ? other : mine, key = up ? mine : other;
    Sum query_factor = 0;
    if (up ? tile > row_tile : tile < row_tile) {
      query_factor = scale * std::exp(query.own + between + key.peak);
      between += other.total;
    }
    shared->row_factor[thread] = up ? key.factor : query_factor;
    shared->key_factor[thread / P::TILE][thread % P::TILE] = up ? query_factor : key.factor;
    if (thread < P::TILE) shared->key_bias[thread] = role == KEYS ? other.bias : 0;
  };
  const int first = up ? tile0 : min(tile0 + P::DOWN, tiles) - 1, steps = up ? tiles - tile0 : first + 1;
  start_factors(first, 0, shared->pieces[0], true);
  lay_down(first, fetch(row_tile, row), fetch(first, int64_t(first) * P::TILE + thread % P::TILE));
  if (thread < P::ROWS) shared->row_bias[thread] = role == QUERIES && owns_row ? lines.bias(batch, head, row) : 0;

  Sum sum[P::EACH][P::EACH] = {}, total[P::EACH] = {};
  int now = 0;
  for (int n = 0; n < steps; ++n) {
    const int tile = up ? first + n : first - n, next = up ? tile + 1 : tile - 1;
    const bool seen = up ? tile >= warp_tile : tile <= warp_tile, diagonal = tile >= tile0 && tile < tile0 + P::DOWN;

    if (diagonal) gates_of<P>(i, f, lines.level, gate, batch, head, int64_t(tile) * P::TILE, *shared);
    Sum s[P::EACH][P::EACH];  // of the step: first of S, then of out
    for (int piece = 0; piece < pieces; ++piece, now ^= 1) {
      async_wait<0>();
      __syncthreads();  // the piece is whole, and nobody reads the other buffer any more
      if (piece + 1 < pieces) start_factors(tile, piece + 1, shared->pieces[now ^ 1], n == 0 || !stays);
      else start_values(int64_t(tile) * P::TILE, shared->pieces[now ^ 1]);
      if (piece == 0) {
        if (diagonal) add_up<P>(scale, *shared);
        Sum key_bias[P::KEYS];
        UNROLL
        for (int b = 0; b < P::KEYS; ++b) key_bias[b] = shared->key_bias[my_key + 4 * b];
        UNROLL
        for (int a = 0; a < P::EACH; ++a) {
          const Sum row_bias = shared->row_bias[row_of(a)];
          UNROLL
          for (int b = 0; b < P::KEYS; ++b) s[a][b] = row_bias + key_bias[b];
        }
      }
      if (seen) multiply_factors<P>(s, &slot(piece)[0][my_row], &shared->pieces[now].y[my_key][0]);
    }

    if (diagonal) __syncthreads();  // all factors are there
    if (seen) {
      const auto weigh = [&](auto factor_of) {
        UNROLL
        for (int a = 0; a < P::EACH; a += P::WIDE) {
          Sum part[P::WIDE] = {};
          UNROLL
          for (int b = 0; b < P::KEYS; ++b) {
            Vector<Sum, P::WIDE> weights;
            UNROLL
            for (int e = 0; e < P::WIDE; ++e) {
              const Sum factor = factor_of(a + e, b), weight = s[a + e][b] * factor;
              weights[e] = factor == 0 ? 0 : weight;  // 0 also for NaN
              part[e] += weights[e];
            }
            store_vector(&shared->weights[my_key + 4 * b][row_of(a)], weights);
          }
          if (role == OUTPUT) {
            UNROLL
            for (int e = 0; e < P::WIDE; ++e) total[a + e] += part[e];
          }
        }
      };
      if (tile == warp_tile) {
        weigh([&](int a, int b) {
          const int r = row_of(a) % P::TILE, k = my_key + 4 * b;
          return up ? shared->factors[k][r] : shared->factors[r][k];
        });
      } else {
        Sum row_factor[P::EACH], key_factor[P::KEYS];
        UNROLL
        for (int a = 0; a < P::EACH; ++a) row_factor[a] = shared->row_factor[row_of(a)];
        UNROLL
        for (int b = 0; b < P::KEYS; ++b) key_factor[b] = shared->key_factor[warp / P::ACROSS][my_key + 4 * b];
        weigh([&](int a, int b) { return row_factor[a] * key_factor[b]; });
      }
      if (dots && tile == warp_tile) {  // those of the row's own position go elsewhere
        UNROLL
        for (int a = 0; a < P::EACH; ++a) {
          const int r = row_of(a), k = r % P::TILE;
          if (k % 4 == lane_x && k / (4 * P::KEYS) == warp % P::ACROSS) {
            shared->own_weight[r] = shared->weights[k][r];
            shared->weights[k][r] = 0;
          }
        }
      }
    }

    UNROLL
    for (int a = 0; a < P::EACH; ++a) {
      UNROLL
      for (int c = 0; c < P::EACH; ++c) s[a][c] = 0;
    }
    for (int half = 0; half < 2; ++half, now ^= 1) {
      async_wait<0>();
      __syncthreads();  // the piece, and before the first one the weights, are whole; the other buffer is free
      const bool more = half == 0 && n + 1 < steps;
      if (half == 0) start_values(int64_t(tile) * P::TILE + P::HALF, shared->pieces[now ^ 1]);
      else if (n + 1 < steps) start_factors(next, 0, shared->pieces[now ^ 1], !stays);
      const Side mine = more ? fetch(row_tile, row) : Side{},
                 other = more ? fetch(next, int64_t(next) * P::TILE + thread % P::TILE)
                              : Side{};  // on its way while the values are multiplied
      const auto& part = shared->pieces[now].values;
      if (seen) multiply_values<P>(s, &shared->weights[half * P::HALF][my_row], &part[0][my_col]);
      if (more) lay_down(next, mine, other);
    }
    if (seen) {
      UNROLL
      for (int a = 0; a < P::EACH; ++a) {
        UNROLL
        for (int c = 0; c < P::EACH; ++c) sum[a][c] += s[a][c];
      }
    }
  }

  // The sum of a row: l, or q . dq or k . dk. The weight of its own position is added to the latter two last: E[t, t]
  // is in both, and would hide what else there is where gates keep little.
  Sum own_total[P::EACH] = {};
  if (dots) {
    UNROLL
    for (int a = 0; a < P::EACH; ++a) {
      const int64_t at = row0 + row_of(a);
      const Sum weight = at < seq ? shared->own_weight[row_of(a)] : 0;
      total[a] = 0;
      UNROLL
      for (int c = 0; c < P::EACH; ++c) {
        const int64_t col = col0 + my_col + c / P::WIDE * 4 * P::WIDE + c % P::WIDE;
        if (at < seq && col < out.size[3]) {
          const Sum word = Sum(self(batch, head, at, col)), value = weight * Sum(z_head(at, col));
          total[a] += word * sum[a][c], own_total[a] += word * value;
          sum[a][c] += value;
        }
      }
    }
  }
  UNROLL
  for (int a = 0; a < P::EACH; ++a) {
    for (int flip = 1; flip < 32; flip *= 16) {
      total[a] += __shfl_xor_sync(~0u, total[a], flip), own_total[a] += __shfl_xor_sync(~0u, own_total[a], flip);
    }
    if (lane_x == 0) {
      shared->sums[0][warp % P::ACROSS][row_of(a)] = total[a];
      shared->sums[1][warp % P::ACROSS][row_of(a)] = own_total[a];
    }
  }
  __syncthreads();  // the sums of all warps are there
  if (owns_row) {
    Sum whole = 0, added = 0;
    UNROLL
    for (int part = 0; part < P::ACROSS; ++part) {
      whole += shared->sums[0][part][thread], added += shared->sums[1][part][thread];
    }
    if (dots || (role == OUTPUT && chunk == 0)) sums(chunk, batch, head, row) = whole;
    if (role == KEYS) own(chunk, batch, head, row) = added;
    if (role == OUTPUT) {
      // out / (max(|l|, exp(-m)) + eps), both sides times exp(m) where m < 0 and exp(-m) would overflow. Two halves of
      // it, each on its own in the range of the type: a weight of exp(-100) is lost only with the result.
      const Sum m = lines.level(batch, head, row);
      const Sum least = sizeof(Sum) == 8 ? 1e-300 : 1e-37;  // a normaliser of 0 would make 0 / 0 of a row of zeros
      const Sum half = std::exp(min(m, Sum(0)) / 2);
      const Sum floor = max(std::exp(-max(m, Sum(0))), least);
      const Sum divisor = max(std::abs(whole) * half * half, floor) + eps * half * half;
      shared->row_factor[thread] = half;
      shared->row_bias[thread] = gate == BARE ? half : half / divisor;
    }
  }
  __syncthreads();  // the rows' factors are there

  UNROLL
  for (int a = 0; a < P::EACH; ++a) {
    const int64_t at = row0 + row_of(a);
    const Sum one = role == OUTPUT ? shared->row_factor[row_of(a)] : 1;
    const Sum two = role == OUTPUT ? shared->row_bias[row_of(a)] : 1;
    UNROLL
    for (int c = 0; c < P::EACH; c += P::WIDE) {
      const int64_t col = col0 + my_col + 4 * c;
      Vector<T, P::WIDE> words;
      UNROLL
      for (int e = 0; e < P::WIDE; ++e) words[e] = T(sum[a][c + e] * one * two);
      if (out_groups) {
        if (at < seq && col < out.size[3]) store_vector(&out(batch, head, at, col), words);
      } else {
        UNROLL
        for (int e = 0; e < P::WIDE; ++e) {
          if (at < seq && col + e < out.size[3]) out(batch, head, at, col + e) = words[e];
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What the gates of a tile bring along: for each position the sum up to it, the largest D within the tile, and what it
// is as a key; for the tile the largest D at its end, and the sum.
// grid (B N * tiles), block (TILE)
template <typename T, int TILE>
__global__ void __launch_bounds__(TILE)
    vlstm_gates(View<const T, 3> i, View<const T, 3> f, View<Accumulator<T>, 3> own, View<Accumulator<T>, 3> highest,
                View<Accumulator<T>, 3> factor, View<Accumulator<T>, 3> peak, View<Accumulator<T>, 3> total, int gate) {
  using Sum = Accumulator<T>;
  __shared__ Sum log_f[TILE], input[TILE], after[TILE];
  const int64_t tiles = peak.size[2], tile = blockIdx.x % tiles, index = blockIdx.x / tiles;
  const int64_t batch = index / i.size[1], head = index % i.size[1], position = tile * TILE + threadIdx.x;
  const int t = threadIdx.x;
  input[t] = input_of<Sum>(i, gate, batch, head, position);
  log_f[t] = log_forget<Sum>(f, batch, head, position);
  __syncthreads();  // all gates are there
  Sum up_to = 0, rest = 0, top = LOWEST, most = LOWEST;
  for (int r = 0; r < TILE; ++r) {
    const Sum step = log_f[r], in = input[r];
    up_to += r <= t ? step : 0, rest += r > t ? step : 0;
    top = r <= t ? max(top + step, in) : top;
  }
  after[t] = rest += input[t];
  __syncthreads();  // all keys are there
  for (int r = 0; r < TILE; ++r) most = max(most, after[r]);
  if (position < i.size[2]) {
    own(batch, head, position) = up_to;
    highest(batch, head, position) = max(top, Sum(LOWEST));
    factor(batch, head, position) = std::exp(rest - most);
  }
  if (t == TILE - 1) peak(batch, head, tile) = most, total(batch, head, tile) = up_to;
}

// M of the forward, the largest D of a row: within its tile, or in a tile before it, carried to the row. `level` comes
// as the former, `own` as the sum of the gates up to the row.
// grid (B N * tiles), block (TILE)
template <typename Sum, int TILE>
__global__ void __launch_bounds__(TILE)
    vlstm_maximum(View<Sum, 3> level, View<Sum, 3> own, View<Sum, 3> peak, View<Sum, 3> total, int gate) {
  const int64_t tiles = peak.size[2], tile = blockIdx.x % tiles, index = blockIdx.x / tiles;
  const int64_t batch = index / level.size[1], head = index % level.size[1], row = tile * TILE + threadIdx.x;
  if (row >= level.size[2]) return;
  Sum carried = LOWEST;
  for (int64_t t = 0; t < tile; ++t) {
    const Sum sum = carried + total(batch, head, t), most = peak(batch, head, t);
    carried = max(sum, most);
  }
  const Sum before = own(batch, head, row), inside = level(batch, head, row);
  const Sum m = gate == EXP ? max(inside, carried + before) : 0;
  level(batch, head, row) = m;
  own(batch, head, row) = before - m;
}

// What the backward needs of each row: M = log N, b, and what eps sends back through the maximum. LANES take a row.
// grid (ceil(B N T / (THREADS / LANES))), block (THREADS)
constexpr int LANES = 8;
template <typename T>
__global__ void __launch_bounds__(THREADS)
    vlstm_rows(View<const T, 4> h, View<const T, 4> dh,
               View<const Accumulator<T>, 4> rows,  // [l or m, batch, heads, seq]
               View<Accumulator<T>, 3> own,         // comes without M
               View<Accumulator<T>, 3> level, View<Accumulator<T>, 3> bias, View<Accumulator<T>, 3> through,
               Accumulator<T> eps, int gate, bool normalizer) {
  using Sum = Accumulator<T>;
  const int64_t heads = h.size[1], seq = h.size[2];
  const int64_t index = int64_t(blockIdx.x) * (THREADS / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
  const bool inside = index < h.size[0] * heads * seq;
  const int64_t batch = index / seq / heads, head = index / seq % heads, row = index % seq;
  Sum dot = 0;
  if (inside) {
#pragma unroll 8
    for (int64_t c = lane; c < h.size[3]; c += LANES) dot += Sum(h(batch, head, row, c)) * Sum(dh(batch, head, row, c));
  }
  for (int flip = LANES / 2; flip; flip /= 2) dot += __shfl_xor_sync(~0u, dot, flip);
  if (inside && lane == 0) {
    const Sum l = rows(0, batch, head, row), m = rows(1, batch, head, row);
    const Sum size = gate == BARE ? 0 : m + std::log(std::abs(l));  // log |sum u|
    Sum log_n = max(size, Sum(0));
    if (gate != BARE) log_n += std::log1p(eps * std::exp(m - log_n));
    own(batch, head, row) -= log_n;
    level(batch, head, row) = log_n;
    bias(batch, head, row) = normalizer && size > 0 ? (l > 0 ? -dot : dot) : 0;
    through(batch, head, row) = normalizer && gate == EXP ? -dot * eps * std::exp(m - log_n) : 0;
  }
}

// The gradients of the gates, from q . dq and k . dk of each position and what went through the maximum. The largest D
// of a row is in the same key as that of the row before, or in the row's own: so a key's rows are a run, which begins
// with its own. df_k has the sum of q . dq - k . dk from k on. All of them should make 0: what they do make is
// rounding, which is taken back, from each position by the size of its terms. Each thread goes through as many
// positions, in float64.
// grid (B N), block (WALKERS)
constexpr int WALKERS = 256;
template <typename T>
__global__ void __launch_bounds__(WALKERS) vlstm_gate_gradients(
    View<const T, 3> i, View<const T, 3> f, View<const Accumulator<T>, 4> rows,  // [l or m, ..]
    View<Accumulator<T>, 3> through,
    View<Accumulator<T>, 5> parts,  // [q . dq, k . dk without E[t, t], that, chunk, batch, heads, seq]
    View<T, 3> di, View<T, 3> df, int gate) {
  using Sum = Accumulator<T>;
  __shared__ double sums[WALKERS], sizes[WALKERS], runs[WALKERS];
  __shared__ bool begun[WALKERS];
  const int64_t batch = blockIdx.x / i.size[1], head = blockIdx.x % i.size[1], seq = i.size[2];
  const int64_t each = ceil_div(seq, WALKERS), first = min(threadIdx.x * each, seq), last = min(first + each, seq);

  const auto part = [&](int which, int64_t at) {
    double sum = 0;
    for (int64_t chunk = 0; chunk < parts.size[1]; ++chunk) sum += parts(which, chunk, batch, head, at);
    return sum;
  };
  const auto begins = [&](int64_t at) { return Sum(i(batch, head, at)) == rows(1, batch, head, at); };

  double sum = 0, size = 0, run = 0;  // of q . dq - k . dk, of its terms' sizes, of what goes to the key of this run
  bool begin = false;
  for (int64_t at = last - 1; at >= first; --at) {
    const double query = part(0, at), key = part(1, at);
    sum += query - key, size += std::abs(query) + std::abs(key), run += through(batch, head, at);
    if (begins(at)) begin = true, run = 0;
  }
  sums[threadIdx.x] = sum, sizes[threadIdx.x] = size, runs[threadIdx.x] = run, begun[threadIdx.x] = begin;
  __syncthreads();  // everyone's sums are there
  double all = 0, all_size = 0;
  sum = size = run = 0;
  for (int other = WALKERS - 1; other >= 0; --other) {
    if (other == int(threadIdx.x)) sum = all, size = all_size;
    if (other > int(threadIdx.x)) run = runs[other] + (begun[other] ? 0 : run);
    all += sums[other], all_size += sizes[other];
  }
  for (int64_t at = last - 1; at >= first; --at) {
    const double query = part(0, at), key = part(1, at);
    sum += query - key, size += std::abs(query) + std::abs(key), run += through(batch, head, at);
    double own = key + part(2, at);
    if (begins(at)) own += run, run = 0;
    const Sum input = Sum(i(batch, head, at)), forget = Sum(f(batch, head, at));
    di(batch, head, at) = T(Sum(own) * (gate == EXP ? Sum(1) : std::exp(log_sigmoid(-input))));
    const double rounding = all_size > 0 ? all * (size / all_size) : 0;
    df(batch, head, at) = T(Sum(sum - rounding + run) * std::exp(log_sigmoid(-forget)));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Is a tensor made of 16-byte groups along its last dimension?
template <typename T>
bool in_groups(View<const T, 4> x) {
  return in_wide_groups(View<const T, 2>{x.data, {x.size[0], x.size[3]}, {x.stride[0], x.stride[3]}}, 1) &&
         x.stride[1] % (16 / sizeof(T)) == 0 && x.stride[2] % (16 / sizeof(T)) == 0;
}

// One of many.
template <typename T, int N>
View<T, N - 1> slice(const View<T, N>& x, int64_t at) {
  View<T, N - 1> result{x.data + at * x.stride[0], {}, {}};
  for (int d = 1; d < N; ++d) result.size[d - 1] = x.size[d], result.stride[d - 1] = x.stride[d];
  return result;
}

template <typename T>
constexpr int TILE = Plan<T, 64>::TILE;

template <typename T>
struct Gates {
  View<const T, 3> i, f;
  int gate;
  double scale, eps;
};

template <typename T, int COLS>
void product_of(int role, View<const T, 4> x, View<const T, 4> y, View<const T, 4> z, View<const T, 4> self,
                const Gates<T>& gates, Lines<Accumulator<T>> lines, View<T, 4> out, View<Accumulator<T>, 4> sums,
                View<Accumulator<T>, 4> own, Stream stream) {
  using P = Plan<T, COLS>;
  const int64_t chunks = max(ceil_div(out.size[3], COLS), int64_t(1));
  const int64_t blocks = out.size[0] * out.size[1] * ceil_div(ceil_div(out.size[2], P::TILE), P::DOWN) * chunks;
  const int pieces = int(max(ceil_div(x.size[3], P::DEPTH), int64_t(1)));
  const size_t bytes = sizeof(typename P::Shared) + (P::stays(pieces) ? pieces : 2) * sizeof(typename P::Turned);
  launch<vlstm_product<T, COLS>>({blocks}, dim3(THREADS), bytes, stream, x, y, z, self, gates.i, gates.f, lines, out,
                                 sums, own, Accumulator<T>(gates.scale), Accumulator<T>(gates.eps), role, gates.gate,
                                 in_groups(x) && in_groups(y) && in_groups(z), out.size[3] % P::WIDE == 0);
}

template <typename T>
void product(int role, View<const T, 4> x, View<const T, 4> y, View<const T, 4> z, View<const T, 4> self,
             const Gates<T>& gates, Lines<Accumulator<T>> lines, View<T, 4> out, View<Accumulator<T>, 4> sums,
             View<Accumulator<T>, 4> own, Stream stream) {
  constexpr int MOST = sizeof(T) == 8 ? 64 : 128;  // as wide as z, as far as registers go: float64 has half as many
  const auto run = out.size[3] > 64 ? product_of<T, MOST> : product_of<T, 64>;
  run(role, x, y, z, self, gates, lines, out, sums, own, stream);
}

void vlstm(Input<4> q, Input<4> k, Input<4> v, Input<3> i, Input<3> f, Output<4> h, Output<4> rows, Output<4> lines,
           Output<4> tiles, double scale, double eps, int gate, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    using Sum = Accumulator<T>;
    const Gates<T> gates{i.as<T>(), f.as<T>(), gate, scale, eps};
    const View<Sum, 4> row = rows.as<Sum>(), line = lines.as<Sum>(), tile = tiles.as<Sum>();
    const View<Sum, 3> own = slice(line, 0), factor = slice(line, 1), level = slice(row, 1);
    const View<Sum, 3> peak = slice(tile, 0), total = slice(tile, 1);
    const int64_t blocks = peak.size[0] * peak.size[1] * peak.size[2];
    launch<vlstm_gates<T, TILE<T>>>({blocks}, dim3(TILE<T>), 0, stream, gates.i, gates.f, own, level, factor, peak,
                                    total, gate);
    launch<vlstm_maximum<Sum, TILE<T>>>({blocks}, dim3(TILE<T>), 0, stream, level, own, peak, total, gate);
    product<T>(OUTPUT, q.as<T>(), k.as<T>(), v.as<T>(), q.as<T>(), gates, {own, factor, peak, total, level, level},
               h.as<T>(), row, row, stream);
  });
}

void vlstm_backward(Input<4> dh, Input<4> q, Input<4> k, Input<4> v, Input<3> i, Input<3> f, Input<4> h, Input<4> rows,
                    Output<4> dq, Output<4> dk, Output<4> dv, Output<3> di, Output<3> df, Output<4> lines,
                    Output<4> tiles, Output<5> parts, double scale, double eps, int gate, bool normalizer_gradient,
                    Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    using Sum = Accumulator<T>;
    const Gates<T> gates{i.as<T>(), f.as<T>(), gate, scale, eps};
    const View<Sum, 4> line = lines.as<Sum>(), tile = tiles.as<Sum>();
    const View<Sum, 3> own = slice(line, 0), factor = slice(line, 1), level = slice(line, 2), bias = slice(line, 3);
    const View<Sum, 3> through = slice(line, 4), peak = slice(tile, 0), total = slice(tile, 1);
    launch<vlstm_gates<T, TILE<T>>>({peak.size[0] * peak.size[1] * peak.size[2]}, dim3(TILE<T>), 0, stream, gates.i,
                                    gates.f, own, level, factor, peak, total, gate);
    launch<vlstm_rows<T>>({ceil_div(h.size[0] * h.size[1] * h.size[2], THREADS / LANES)}, dim3(THREADS), 0, stream,
                          h.as<T>(), dh.as<T>(), rows.as<Sum>(), own, level, bias, through, Sum(eps), gate,
                          normalizer_gradient);
    const Lines<Sum> all{own, factor, peak, total, level, bias};
    const View<Sum, 5> part = parts.as<Sum>();
    const View<Sum, 4> of_rows = slice(part, 0), of_keys = slice(part, 1), own_part = slice(part, 2);
    const auto q_ = q.as<T>(), k_ = k.as<T>(), v_ = v.as<T>(), dh_ = dh.as<T>();
    product<T>(QUERIES, dh_, v_, k_, q_, gates, all, dq.as<T>(), of_rows, of_rows, stream);
    product<T>(KEYS, v_, dh_, q_, k_, gates, all, dk.as<T>(), of_keys, own_part, stream);
    product<T>(VALUES, k_, q_, dh_, k_, gates, all, dv.as<T>(), of_keys, own_part, stream);
    launch<vlstm_gate_gradients<T>>({i.size[0] * i.size[1]}, dim3(WALKERS), 0, stream, gates.i, gates.f, rows.as<Sum>(),
                                    through, part, di.as<T>(), df.as<T>(), gate);
  });
}
