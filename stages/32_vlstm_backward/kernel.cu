// Stage 32: the gradients of the vLSTM, by the kernel of its forward
//
// Problem   H of stage 31, and from the gradient G of H those of q, k, v, i and f, true ones: the normaliser, and with
//           eps the maximum of the row, are not constants. normalizer_gradient=False: they are.
// Before    Stage 31 finds m on its walk and shrinks what was summed. It keeps nothing, and autograd through the formula
//           keeps some five matrices of T x T words.
// Idea      With N = max(|sum u|, 1) + eps exp(m) for each row, M = log N and b = -(G . H) sign(sum u) where |sum u| > 1:
//             H = s (Q K^T exp(D - M)) V             dQ = s ((G V^T + b) exp(D - M)) K
//             dK = s ((V G^T + b) exp(D - M)^T) Q    dV = s (K Q^T exp(D - M)^T) G
//           One kernel, four times. H takes m for M and divides at the end; m needs gates alone, m_t = max(m_{t-1} +
//           log sigmoid(f_t), i_t), and so comes first. The gates need sums of E = dD over rows and columns: q_t . dq_t
//           and k_j . dk_j. di_j = k_j . dk_j, df_k = sigmoid(-f_k) sum_{t >= k} (q_t . dq_t - k_t . dk_t). E[t, t] is
//           in both: they are taken before the diagonal is added, or it would hide the rest where little is kept.
//           The maximum of row t sits in key t where m_t = i_t, and else in the key of row t - 1: what eps exp(m) gives
//           is a sum over a run of rows. Where two keys tie, the later one gets all.
// Mapping   product: as in stage 31, a block: TILE rows x CHUNK columns, the walk starts at the diagonal; rows are keys,
//           keys are queries, and the walk goes up, for dK and dV. rows: a warp a row. maxima, gates: a warp a head.
// Cost      float32, H = B N heads, T of 64, Dk, Dv = 64 or of 128.
//             TODO
// Limits    Q K^T and G V^T are computed twice each. The scans have a warp for each head. Without tensor cores.
//           Products of weights far above 1 (a sum that cancels) are as exact as the gates' sums are.
// Run       python -m stages run 32

#include "common/device.h"
#include "common/gates.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

enum Gate { EXP, SIGMOID, BARE };  // exp(i); sigmoid(i); sigmoid(i) and no normaliser
enum Product { H, DQ, DK, DV };

constexpr int TILE = 64;  // rows of Q in a block, and keys in a step: a square of S fits into static shared memory
constexpr int WARP = 32;
constexpr int WARPS = 4;  // of a block that takes a row with each

// m before the first key: lower than any D that counts, and finite, so that D = -infinity has no weight at once.
constexpr float LOWEST = -1e30f;

// How a block of T shares out its work. Shared memory holds what sums are made of, already in the sums' type.
template <typename T, int CHUNK_>
struct Plan {
  using Sum = Accumulator<T>;
  static constexpr int CHUNK = CHUNK_;                   // columns of H in a block
  static constexpr int EACH = sizeof(Sum) == 8 ? 4 : 8;  // rows of a thread, and columns of H
  static constexpr int SIDE_X = CHUNK / EACH;            // threads across
  static constexpr int SIDE_Y = TILE / EACH;             // threads down
  static constexpr int THREADS = SIDE_X * SIDE_Y;
  static constexpr int DEPTH = 64 / sizeof(Sum);   // of the pieces in which Dk and keys pass
  static constexpr int LANES = 128 / sizeof(Sum);  // that one wavefront can serve
  static constexpr int RESIDENT = sizeof(Sum) == 8 ? 2 : CHUNK == 64 ? 4 : 3;  // blocks that registers have to hold

  // A tile is [along the sum][rows], but it is written by lanes that mostly run along the sum: a row of the tile apart,
  // all in one bank. The padding moves each by the number of banks that the lanes along the rows take up.
  static constexpr int PIECE_PAD = LANES / DEPTH;
  static constexpr int SQUARE_PAD = LANES / SIDE_X;
  using Piece = Sum[DEPTH][TILE + PIECE_PAD];   // of Q or K
  using Square = Sum[TILE][TILE + SQUARE_PAD];  // of S, [key][row]
  using Values = Sum[DEPTH][CHUNK];             // of V, [key][column]
  using Line = Sum[TILE];                       // a word for each row or key
  static_assert(LANES % DEPTH == 0 && LANES % SIDE_X == 0, "a wavefront has to serve all lanes along a sum");
  static_assert(THREADS >= TILE && TILE >= 2 * SIDE_X, "a thread for each row; two dots of each thread in a square");
};

// The least normaliser of the weights exp(D - m): 0 would make 0 / 0 of a row of zeros.
template <typename Sum>
constexpr Sum LEAST_LOG = sizeof(Sum) == 8 ? -690 : -85;

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
// How many blocks share the columns: one at least, for the words that a row has once.
__host__ __device__ inline int64_t chunks_of(int64_t cols, int chunk) { return max(ceil_div(cols, chunk), int64_t(1)); }

// The logarithm of the input gate.
template <typename Sum>
__device__ __forceinline__ Sum log_input(Sum i, int gate) {
  return gate == EXP ? i : log_sigmoid(i);
}

// D - M of a tile, into the square, by the row's thread. D is a sum of the gates after the key up to and with the row:
// key by key away from the diagonal, and `start` is what the tiles passed have had. A row of the square is a query and
// its keys come before it, or it is a key, and the queries come after it.
template <typename P>
__device__ __forceinline__ void lay_exponents(bool causal, bool diagonal, const typename P::Line& log_f,
                                              const typename P::Line& key_part, typename P::Sum row_part,
                                              typename P::Sum& start, typename P::Square& d_tile) {
  using Sum = typename P::Sum;
  const int row = threadIdx.x;
  if (row >= TILE) return;
  Sum local = 0;
  for (int n = 0; n < TILE; ++n) {
    const int key = causal ? TILE - 1 - n : n;
    const bool seen = !diagonal || (causal ? key <= row : key >= row);
    const bool passed = causal ? seen : seen && !(diagonal && key == row);  // the gate of the query itself is in D
    if (!causal && passed) local += log_f[key];
    d_tile[key][row] = seen ? (row_part + key_part[key]) + (start + local) : Sum(-INFINITY);
    if (causal && passed) local += log_f[key];
  }
  start += local;
}

// ---------------------------------------------------------------------------------------------------------------------
// m, the largest D of each row, as rows[1]; 0 for a sigmoid, whose D is never above 0. Two steps of the recurrence
// are one of its form: x -> max(x + a, i).
// grid (B N), block (WARP)
template <typename T>
__global__ void vlstm_maxima(View<const T, 3> i,            // [batch, heads, seq]
                             View<const T, 3> f,            // [batch, heads, seq]
                             View<Accumulator<T>, 4> rows,  // [2, batch, heads, seq]
                             int gate) {
  using Sum = Accumulator<T>;
  const int lane = threadIdx.x;
  const int64_t seq = i.size[2], batch = blockIdx.x / i.size[1], head = blockIdx.x % i.size[1];
  Sum before = LOWEST;  // m of the row before the 32 in hand
  for (int64_t t0 = 0; t0 < seq; t0 += WARP) {
    const int64_t t = t0 + lane;
    Sum a = t < seq ? log_sigmoid(Sum(f(batch, head, t))) : 0, top = t < seq ? Sum(i(batch, head, t)) : LOWEST;
    for (int reach = 1; reach < WARP; reach *= 2) {
      const Sum older_a = __shfl_up_sync(~0u, a, reach), older_top = __shfl_up_sync(~0u, top, reach);
      if (lane >= reach) top = max(top, older_top + a), a += older_a;
    }
    top = max(top, before + a);
    before = __shfl_sync(~0u, top, WARP - 1);
    if (t < seq) rows(1, batch, head, t) = gate == EXP ? max(top, Sum(LOWEST)) : 0;
  }
}

// s ((X Y^T + b) * exp(D - M)) Z: H, dQ, dK or dV. For H, M is m, and the row is divided at the end.
// grid (B N * ceil(T / TILE) * chunks of out), block (THREADS)
template <typename T, int CHUNK>
__global__ void __launch_bounds__(Plan<T, CHUNK>::THREADS, Plan<T, CHUNK>::RESIDENT)
    vlstm_product(View<const T, 4> x,             // [batch, heads, seq, ..]: q, dh, v or k
                  View<const T, 4> y,             // [batch, heads, seq, ..]: k, v, dh or q
                  View<const T, 4> z,             // [batch, heads, seq, ..]: v, k, q or dh
                  View<T, 4> out,                 // [batch, heads, seq, ..]: h, dq, dk or dv
                  View<const T, 4> own,           // [batch, heads, seq, ..]: what out is the gradient of
                  View<const T, 3> i,             // [batch, heads, seq]
                  View<const T, 3> f,             // [batch, heads, seq]
                  View<Accumulator<T>, 4> rows,   // [.., batch, heads, seq]: b and M of each query; for H: l and m
                  View<Accumulator<T>, 5> parts,  // [3, chunks, batch, heads, seq]: dots of rows, keys, whole keys
                  Accumulator<T> scale, Accumulator<T> eps, int gate, int product) {
  using P = Plan<T, CHUNK>;
  using Sum = typename P::Sum;
  constexpr int KEYS = TILE / P::SIDE_X;  // of a thread in a step
  __shared__ typename P::Piece x_piece, y_piece;
  __shared__ typename P::Square s_tile;
  __shared__ typename P::Values z_piece;
  __shared__ typename P::Line log_f, key_part, bias, last;

  const int64_t heads = x.size[1], seq = x.size[2], inner = x.size[3], cols = out.size[3];
  const int across = threadIdx.x % P::SIDE_X, down = threadIdx.x / P::SIDE_X;
  const bool causal = product == H || product == DQ, dots = product == DQ || product == DK;

  // Everything is counted along one grid dimension: y and z of a grid end at 65535, batch x heads and T need not.
  const int chunks = int(chunks_of(cols, CHUNK)), tiles = int(ceil_div(seq, TILE));
  const int chunk = blockIdx.x % chunks, turn = blockIdx.x / chunks % tiles;
  const int64_t col0 = int64_t(chunk) * CHUNK;
  const int64_t row0 = int64_t(causal ? tiles - 1 - turn : turn) * TILE;  // the longest walks start first
  const int batch = blockIdx.x / chunks / tiles / int(heads), head = blockIdx.x / chunks / tiles % int(heads);
  const View<const T, 2> x_head = matrix(x, batch, head);
  const View<const T, 2> y_head = matrix(y, batch, head);
  const View<const T, 2> z_head = matrix(z, batch, head);

  // The row's thread: what D - M has of the row alone, the gates passed, and the sum of its weights.
  const int row = threadIdx.x;
  const bool has_row = row < TILE && row0 + row < seq;
  Sum row_part = 0, start = 0, total = 0;
  if (has_row) row_part = causal ? -rows(1, batch, head, row0 + row) : log_input(Sum(i(batch, head, row0 + row)), gate);
  if (row < TILE) bias[row] = has_row && product == DQ ? rows(0, batch, head, row0 + row) : 0;

  Sum sum[P::EACH][P::EACH] = {};
  for (int64_t key0 = row0; key0 >= 0 && key0 < seq; key0 += causal ? -TILE : TILE) {
    if (row < TILE) {
      const int64_t at = key0 + row;
      log_f[row] = at < seq ? log_sigmoid(Sum(f(batch, head, at))) : 0;
      key_part[row] = at >= seq ? 0 : causal ? log_input(Sum(i(batch, head, at)), gate) : -rows(1, batch, head, at);
      if (product == DK) bias[row] = at < seq ? rows(0, batch, head, at) : 0;
    }
    __syncthreads();  // the gates are there before anyone adds them up
    lay_exponents<P>(causal, key0 == row0, log_f, key_part, row_part, start, s_tile);

    Sum s[P::EACH][KEYS] = {};
    for (int64_t k0 = 0; k0 < inner; k0 += P::DEPTH) {
      load_rows<P>(x_head, row0, k0, x_piece);
      load_rows<P>(y_head, key0, k0, y_piece);
      __syncthreads();  // both pieces are whole before anyone reads them
      multiply<P>(s, x_piece, y_piece, P::DEPTH);
      __syncthreads();  // everyone has read before the next pieces overwrite
    }
    if (inner == 0) __syncthreads();  // the exponents are whole; above, the pieces' barriers have seen to it

    UNROLL
    for (int a = 0; a < P::EACH; ++a) {
      UNROLL
      for (int b = 0; b < KEYS; ++b) {
        const int r = down + P::SIDE_Y * a, key = across + P::SIDE_X * b;
        const Sum exponent = s_tile[key][r];
        Sum weight = scale * (s[a][b] + bias[causal ? r : key]) * std::exp(exponent);
        if (exponent == Sum(-INFINITY)) weight = 0;  // also where s is NaN or infinite
        if (dots && key0 == row0 && key == r) last[r] = weight, weight = 0;
        s_tile[key][r] = weight;
      }
    }

    // Only the keys that there are: past them S would be 0 times what q has, and that may be infinite.
    const int keys = int(min(int64_t(TILE), seq - key0));
    for (int j0 = 0; j0 < keys; j0 += P::DEPTH) {
      const int depth = min(P::DEPTH, keys - j0);
      load_values<P>(z_head, key0 + j0, col0, z_piece);
      __syncthreads();  // the piece, and before the first one the tile of S, is whole
      if (product == H && row < TILE) {
        for (int j = 0; j < depth; ++j) total += s_tile[j0 + j][row];
      }
      multiply<P>(sum, s_tile + j0, z_piece, depth);
      __syncthreads();  // everyone has read before the next piece, or the next tile of S, overwrites
    }
  }

  if (product == H && row < TILE) {
    // sum / (max(|total|, exp(-m)) + eps), both sides times exp(m) where m < 0 and exp(-m) would overflow. Two halves of
    // it, each on its own in the range of the type: a weight of exp(-100) is lost only with the result.
    const Sum m = -row_part, half = std::exp(min(m, Sum(0)) / 2);
    const Sum least = std::exp(max(-max(m, Sum(0)), LEAST_LOG<Sum>));
    const Sum divisor = max(std::abs(total) * half * half, least) + eps * half * half;
    last[row] = half * half * (gate == BARE ? 1 : 1 / divisor);
    if (has_row && chunk == 0) rows(0, batch, head, row0 + row) = total;
  }
  __syncthreads();  // the last line is whole

  UNROLL
  for (int a = 0; a < P::EACH; ++a) {
    const int r = down + P::SIDE_Y * a;
    Sum dot = 0, diagonal = 0;  // own . out of this thread's columns, without and on the diagonal
    UNROLL
    for (int c = 0; c < P::EACH; ++c) {
      const int64_t col = col0 + across + P::SIDE_X * c;
      if (row0 + r >= seq || col >= cols) continue;
      Sum value = sum[a][c];
      if (product == H) value *= last[r];
      if (dots) {
        const Sum itself = last[r] * Sum(z_head(row0 + r, col)), word = Sum(own(batch, head, row0 + r, col));
        dot += word * value;
        diagonal += word * itself;
        value += itself;
      }
      out(batch, head, row0 + r, col) = T(value);
    }
    if (dots) s_tile[across][r] = dot, s_tile[P::SIDE_X + across][r] = diagonal;
  }
  if (!dots) return;

  __syncthreads();  // the dots are there before they are added up
  if (has_row) {
    Sum dot = 0, diagonal = 0;
    for (int n = 0; n < P::SIDE_X; ++n) dot += s_tile[n][row], diagonal += s_tile[P::SIDE_X + n][row];
    parts(product == DQ ? 0 : 1, chunk, batch, head, row0 + row) = dot;
    if (product == DK) parts(2, chunk, batch, head, row0 + row) = dot + diagonal;
  }
}

// What the gradients need of a row: b, M, and x, the gradient of its maximum.
// grid (ceil(B N T / WARPS)), block (WARP, WARPS)
template <typename T>
__global__ void vlstm_rows(View<const T, 4> dh,                       // [batch, heads, seq, Dv]
                           View<const T, 4> h,                        // [batch, heads, seq, Dv]
                           View<const Accumulator<T>, 4> rows,        // [2, batch, heads, seq]: l, m
                           View<Accumulator<T>, 4> lines,             // [3, batch, heads, seq]: b, M, x
                           Accumulator<T> log_eps, int gate, bool normalizer_gradient) {
  using Sum = Accumulator<T>;
  const int64_t index = int64_t(blockIdx.x) * WARPS + threadIdx.y, heads = h.size[1], seq = h.size[2];
  const int64_t batch = index / seq / heads, head = index / seq % heads, t = index % seq;
  if (batch >= h.size[0]) return;

  Sum dot = 0;
  for (int64_t c = threadIdx.x; c < h.size[3]; c += WARP) dot += Sum(dh(batch, head, t, c)) * Sum(h(batch, head, t, c));
  for (int flip = WARP / 2; flip; flip /= 2) dot += __shfl_xor_sync(~0u, dot, flip);
  if (threadIdx.x) return;

  // In logarithms, for exp(m) is anything: |sum u|, the least that the normaliser may be, eps exp(m), and N.
  const Sum l = rows(0, batch, head, t), m = rows(1, batch, head, t);
  const Sum sum = m + std::log(std::abs(l)), least = max(m + LEAST_LOG<Sum>, Sum(0)), peak = m + log_eps;
  const Sum n = max(sum, least) - log_sigmoid(max(sum, least) - peak);
  lines(0, batch, head, t) = normalizer_gradient && sum > least ? (l < 0 ? dot : -dot) : 0;
  lines(1, batch, head, t) = gate == BARE ? 0 : n;
  lines(2, batch, head, t) = normalizer_gradient && gate == EXP ? -dot * std::exp(peak - n) : 0;
}

// The gradients of the gates: sums from the end.
// grid (B N), block (WARP)
template <typename T>
__global__ void vlstm_gates(View<const T, 3> i,                        // [batch, heads, seq]
                            View<const T, 3> f,                        // [batch, heads, seq]
                            View<const Accumulator<T>, 4> rows,        // [2, batch, heads, seq]: l, m
                            View<Accumulator<T>, 4> lines,             // [3, batch, heads, seq]: b, M, x
                            View<Accumulator<T>, 5> parts,             // [3, chunks, batch, heads, seq]
                            View<T, 3> di,                             // [batch, heads, seq]
                            View<T, 3> df,                             // [batch, heads, seq]
                            int gate) {
  using Sum = Accumulator<T>;
  const int lane = threadIdx.x;
  const int64_t seq = i.size[2], batch = blockIdx.x / i.size[1], head = blockIdx.x % i.size[1];
  Sum after = 0, run_after = 0;  // sums from the position after the 32 in hand
  for (int64_t t0 = (seq - 1) / WARP * WARP; t0 >= 0; t0 -= WARP) {
    const int64_t t = t0 + lane;
    const bool inside = t < seq;
    Sum dot[3] = {};  // q . dq and k . dk without the diagonal, k . dk
    for (int n = 0; n < 3; ++n) {
      for (int64_t chunk = 0; inside && chunk < parts.size[1]; ++chunk) dot[n] += parts(n, chunk, batch, head, t);
    }
    const Sum input = inside ? Sum(i(batch, head, t)) : 0, x = inside ? lines(2, batch, head, t) : 0;

    // The run of rows whose maximum is in one key begins with the row of that key: what comes after is summed up to there.
    const bool begins = inside && rows(1, batch, head, t) == input;
    Sum sum = dot[0] - dot[1], run = begins ? 0 : x;
    bool cut = begins;
    for (int reach = 1; reach < WARP; reach *= 2) {
      const Sum next = __shfl_down_sync(~0u, sum, reach), run_next = __shfl_down_sync(~0u, run, reach);
      const bool cut_next = __shfl_down_sync(~0u, cut, reach);
      if (lane + reach < WARP) {
        sum += next;
        if (!cut) run += run_next;
        cut |= cut_next;
      }
    }
    sum += after;
    if (!cut) run += run_after;
    const Sum run_next = __shfl_down_sync(~0u, run, 1);
    const Sum peak = begins ? x + (lane == WARP - 1 ? run_after : run_next) : 0;
    after = __shfl_sync(~0u, sum, 0);
    run_after = __shfl_sync(~0u, run, 0);
    if (inside) {
      const Sum through = gate == EXP ? 1 : std::exp(log_sigmoid(-input));
      di(batch, head, t) = T((dot[2] + peak) * through);
      df(batch, head, t) = T((sum + run) * std::exp(log_sigmoid(-Sum(f(batch, head, t)))));
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
template <typename T, int CHUNK, typename... Arguments>
void start(Stream stream, View<const T, 4> x, View<const T, 4> y, View<const T, 4> z, View<T, 4> out,
           Arguments... arguments) {
  const int64_t blocks = out.size[0] * out.size[1] * ceil_div(out.size[2], TILE) * chunks_of(out.size[3], CHUNK);
  launch<vlstm_product<T, CHUNK>>({blocks}, dim3(Plan<T, CHUNK>::THREADS), 0, stream, x, y, z, out, arguments...);
}

template <typename T, typename... Arguments>
void multiply_views(Stream stream, View<const T, 4> x, View<const T, 4> y, View<const T, 4> z, View<T, 4> out,
           Arguments... arguments) {
  constexpr int WIDE = sizeof(T) == 8 ? 64 : 128;  // as wide as out, as far as registers go: float64 has half as many
  if (out.size[3] > 64) start<T, WIDE>(stream, x, y, z, out, arguments...);
  else start<T, 64>(stream, x, y, z, out, arguments...);
}

void vlstm(Input<4> q, Input<4> k, Input<4> v, Input<3> i, Input<3> f, Output<4> h, Output<4> rows, double scale,
           double eps, int gate, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    using Sum = Accumulator<T>;
    launch<vlstm_maxima<T>>({h.size[0] * h.size[1]}, dim3(WARP), 0, stream, i.as<T>(), f.as<T>(), rows.as<Sum>(), gate);
    multiply_views<T>(stream, q.as<T>(), k.as<T>(), v.as<T>(), h.as<T>(), q.as<T>(), i.as<T>(), f.as<T>(),
                      rows.as<Sum>(), View<Sum, 5>(), Sum(scale), Sum(eps), gate, H);
  });
}

void vlstm_backward(Input<4> dh, Input<4> q, Input<4> k, Input<4> v, Input<3> i, Input<3> f, Input<4> h, Input<4> rows,
                    Output<4> dq, Output<4> dk, Output<4> dv, Output<3> di, Output<3> df, Output<4> lines,
                    Output<5> parts, double scale, double eps, int gate, bool normalizer_gradient, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    using Sum = Accumulator<T>;
    const int64_t heads = i.size[0] * i.size[1];
    launch<vlstm_rows<T>>({ceil_div(heads * i.size[2], WARPS)}, dim3(WARP, WARPS), 0, stream, dh.as<T>(), h.as<T>(),
                          rows.as<Sum>(), lines.as<Sum>(), Sum(std::log(eps)), gate, normalizer_gradient);
    const auto gradient = [&](Product product, auto x, auto y, auto z, auto out, auto own) {
      multiply_views<T>(stream, x.template as<T>(), y.template as<T>(), z.template as<T>(), out.template as<T>(),
                        own.template as<T>(), i.as<T>(), f.as<T>(), lines.as<Sum>(), parts.as<Sum>(), Sum(scale),
                        Sum(eps), gate, product);
    };
    gradient(DQ, dh, v, k, dq, q);
    gradient(DK, v, dh, q, dk, k);
    gradient(DV, k, q, dh, dv, v);
    launch<vlstm_gates<T>>({heads}, dim3(WARP), 0, stream, i.as<T>(), f.as<T>(), rows.as<Sum>(), lines.as<Sum>(),
                           parts.as<Sum>(), di.as<T>(), df.as<T>(), gate);
  });
}
