// Stage 32: the gradients of the vLSTM, by the kernel of its forward
//
// Problem   H as in stage 31, and from its gradient G those of q, k, v, i and f: through the normaliser and, with eps,
//           through the maximum of the row as well. normalizer_gradient=False: as if both were constants.
// Before    Stage 31 keeps none of its weights. Autograd through the formula keeps T x T words, several times.
// Idea      N = max(|sum u|, 1) + eps exp(m), M = log N, and b = -(G . H) sign(sum u) where |sum u| > 1, else 0:
//             H = s (Q K^T exp(D - M)) V             dQ = s ((G V^T + b) exp(D - M)) K
//             dK = s ((V G^T + b) exp(D - M)^T) Q    dV = s (K Q^T exp(D - M)^T) G
//           One kernel, four times. H takes m for M and divides at the end; m_t = max(m_{t-1} + log sigmoid(f_t), i_t)
//           comes of the gates alone, before. With E = dD, di_j is the sum of column j of E, which is k_j . dk_j,
//           and df_k / sigmoid(-f_k) the sum of all rows t >= k, q_t . dq_t, less that of their columns. E[t, t] is in
//           both: it is left out, lest it hide the rest. The maximum of row t is in key t where m_t = i_t, else where
//           that of the row before is (at a tie the later key has it): what eps gives is a sum over a run of rows.
// Mapping   product: as in stage 31; for dK and dV rows are keys, from the diagonal on to the last query. maxima and
//           gates: a warp for each head. rows: a warp for each row. No atomics: equal bit for bit on every run.
// Cost      float32, H = B N heads, n = T / 64, T of 64, Dk of 16, Dv = 64 or of 128; c = ceil(Dv / 128) chunks
//           the forward: stage 23, causal, and for the gates (the backward: backward_cost in stage.py)
//             global load sectors   8 H c n (n + 1) + 8 H n (c + 2), store sectors 16 H n
//             shared wavefronts     a step: 640 loads, 132 stores; a block: 16 loads a warp, 6 stores
//             barriers              a step 1, a block 1
// Limits    Q K^T and G V^T are computed twice for the gradients: six products, five would do. In 16 bits b takes
//           H as it is rounded. df has the digits of the sums' terms, and those may cancel. No tensor cores: stage 33.
// Run       python -m stages run 32

#include "common/device.h"
#include "common/gates.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/register_tile.h"
#include "common/view.h"

enum Gate { EXP, SIGMOID, BARE };  // exp(i); sigmoid(i); sigmoid(i) and no normaliser
enum Product { H, DQ, DK, DV };    // what the one kernel computes

constexpr int TILE = 64;  // rows of Q in a block, and keys in a step: a square of S fits into static shared memory

constexpr int WARP = 32;
constexpr int WARPS = 4;  // in a block of which each takes a row

// m before the first key: below any D that counts, and finite, so that D = -infinity has no weight beside it.
constexpr float LOWEST = -1e30f;

// How a block of T shares out its work: the tiles and the products of stage 22, and what the gates need.
template <typename T, int CHUNK>
struct Plan : RegisterTile<T, TILE, CHUNK> {
  using Sum = Accumulator<T>;
  static constexpr int RESIDENT = sizeof(Sum) == 8 ? 2 : CHUNK == 64 ? 4 : 3;  // blocks that registers have to hold
  using Line = Sum[TILE];                                                      // a word for each row or key
  static_assert(Plan::THREADS >= TILE && TILE >= 2 * Plan::SIDE_X,
                "a thread for each row; a square for two dots of each thread");
};

// The least normaliser of weights exp(D - m), in the logarithm: 0 would make 0 / 0 of a row of zeros.
template <typename Sum>
constexpr Sum LEAST_LOG = sizeof(Sum) == 8 ? -690 : -85;

// ---------------------------------------------------------------------------------------------------------------------
// The logarithm of a gate, exp(x) or sigmoid(x); 0 past the end.
template <typename Sum, typename T>
__device__ __forceinline__ Sum log_gate(View<const T, 3> x, int64_t batch, int64_t head, int64_t at, bool exponential) {
  if (at >= x.size[2]) return 0;
  const Sum word = Sum(x(batch, head, at));
  return exponential ? word : log_sigmoid(word);
}

// How many blocks share the columns: one at least, for the words that a row has once.
__host__ __device__ inline int64_t chunks_of(int64_t cols, int chunk) { return max(ceil_div(cols, chunk), int64_t(1)); }

// ---------------------------------------------------------------------------------------------------------------------
// m, the largest D of each row, or 0 for a sigmoid, whose D is never above 0. Of two steps of the recurrence, older
// first, m -> max(m + a, i) and m -> max(m + a', i'), one of its form is made: m -> max(m + a + a', max(i + a', i')).
// grid (B N), block (WARP)
template <typename T>
__global__ void vlstm_maxima(View<const T, 3> i,            // [batch, heads, seq]
                             View<const T, 3> f,            // [batch, heads, seq]
                             View<Accumulator<T>, 4> rows,  // [2, batch, heads, seq]: l, m
                             int gate) {
  using Sum = Accumulator<T>;
  const int lane = threadIdx.x;
  const int64_t seq = i.size[2], batch = blockIdx.x / i.size[1], head = blockIdx.x % i.size[1];
  Sum before = LOWEST;  // m of the row before the WARP in hand
  for (int64_t t0 = 0; t0 < seq; t0 += WARP) {
    const int64_t t = t0 + lane;
    Sum a = log_gate<Sum>(f, batch, head, t, false), m = log_gate<Sum>(i, batch, head, t, true);
    for (int reach = 1; reach != WARP; reach *= 2) {
      const Sum older_a = __shfl_up_sync(~0u, a, reach), older_m = __shfl_up_sync(~0u, m, reach);
      if (lane >= reach) m = max(older_m + a, m), a += older_a;
    }
    m = max(max(before + a, m), Sum(LOWEST));
    before = __shfl_sync(~0u, m, WARP - 1);
    if (t < seq) rows(1, batch, head, t) = gate == EXP ? m : 0;
  }
}

// O = s ((Q K^T + b) * exp(D - M)) V. For the gradients others are in the places of Q, K, V and O, and for those of k
// and v a row is a key, and what is called key here is a query. D is [query, key], and b and M are the queries'.
// grid (B N * ceil(T / TILE) * chunks of O), block (THREADS)
template <typename T, int CHUNK>
__global__ void __launch_bounds__(Plan<T, CHUNK>::THREADS, Plan<T, CHUNK>::RESIDENT)
    vlstm_product(View<const T, 4> q,             // [batch, heads, seq, Dk]: q, dh, v, k
                  View<const T, 4> k,             // [batch, heads, seq, Dk]: k, v, dh, q
                  View<const T, 4> v,             // [batch, heads, seq, Dv]: v, k, q, dh
                  View<T, 4> o,                   // [batch, heads, seq, Dv]: h, dq, dk, dv
                  View<const T, 4> own,           // [batch, heads, seq, Dv]: -, q, k, -
                  View<const T, 3> i,             // [batch, heads, seq]
                  View<const T, 3> f,             // [batch, heads, seq]
                  View<Accumulator<T>, 4> rows,   // [.., batch, heads, seq]: l and m for H, or b and M
                  View<Accumulator<T>, 5> parts,  // [3, chunks, batch, heads, seq]: sums of E, see vlstm_gates
                  Accumulator<T> scale, Accumulator<T> eps, int gate, int product) {
  using P = Plan<T, CHUNK>;
  using Sum = typename P::Sum;
  constexpr int KEYS = TILE / P::SIDE_X;  // of a thread in a step
  __shared__ typename P::Piece q_piece, k_piece;
  __shared__ typename P::Square s_tile;  // first D - M, then the weights
  __shared__ typename P::Values v_piece;
  __shared__ typename P::Line log_f, key_part, bias, diagonal, half, rest;

  const int64_t heads = q.size[1], seq = q.size[2];
  const int64_t inner = max(q.size[3], int64_t(1));  // where Dk is 0, a piece of zeros passes
  const bool causal = product == H || product == DQ, dots = product == DQ || product == DK;
  const int x = threadIdx.x % P::SIDE_X, y = threadIdx.x / P::SIDE_X;

  // Everything is counted along one grid dimension: y and z of a grid end at 65535, batch x heads and T need not.
  const int chunks = int(chunks_of(o.size[3], CHUNK)), tiles = int(ceil_div(seq, TILE));
  const int chunk = blockIdx.x % chunks, turn = blockIdx.x / chunks % tiles;
  const int64_t col0 = int64_t(chunk) * CHUNK;
  const int64_t row0 = int64_t(causal ? tiles - 1 - turn : turn) * TILE;  // the longest walks start first
  const int batch = blockIdx.x / chunks / tiles / int(heads), head = blockIdx.x / chunks / tiles % int(heads);
  const View<const T, 2> q_head = matrix(q, batch, head);
  const View<const T, 2> k_head = matrix(k, batch, head);
  const View<const T, 2> v_head = matrix(v, batch, head);

  const int row = threadIdx.x;  // whose sums this thread keeps, if it is one of the tile
  const bool has_row = row < min(int64_t(TILE), seq - row0);
  Sum row_part = 0, l = 0;  // what D - M has of the row alone; the sum of its weights
  Sum start = 0;            // the gates of the tiles passed
  if (has_row && causal) row_part = -rows(1, batch, head, row0 + row);
  if (has_row && !causal) row_part = log_gate<Sum>(i, batch, head, row0 + row, gate == EXP);
  if (row < TILE) bias[row] = has_row && product == DQ ? rows(0, batch, head, row0 + row) : 0;

  // A step sums up on its own, and what it has is added to the sums of the walk. Each addition to a float that grows
  // rounds: TILE times, and then T / TILE times, instead of T times.
  Sum out[P::EACH][P::EACH] = {};
  const int64_t steps = causal ? row0 / TILE + 1 : tiles - row0 / TILE;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t key0 = row0 + (causal ? -step : step) * TILE;
    if (row < TILE) {
      const int64_t at = key0 + row;
      const bool inside = at < seq;
      log_f[row] = log_gate<Sum>(f, batch, head, at, false);
      if (causal) key_part[row] = log_gate<Sum>(i, batch, head, at, gate == EXP);
      else key_part[row] = inside ? -rows(1, batch, head, at) : 0;
      if (product == DK) bias[row] = inside ? rows(0, batch, head, at) : 0;
    }
    __syncthreads();  // the gates are there before anyone adds them up

    // D - M of the row, away from the diagonal; -infinity where query and key do not see each other. The gate of a
    // query is part of D, and that of a key is not.
    if (row < TILE) {
      Sum local = 0;
      for (int n = 0; n < TILE; ++n) {
        const int key = causal ? TILE - 1 - n : n;
        const bool cut = step == 0, hidden = cut && (causal ? key > row : key < row);
        const Sum gate_of_key = log_f[key], both = row_part + key_part[key];
        if (!causal) local += hidden || (cut && key == row) ? 0 : gate_of_key;
        s_tile[key][row] = hidden ? Sum(-INFINITY) : both + (start + local);
        if (causal) local += hidden ? 0 : gate_of_key;
      }
      start += local;
    }

    Sum s[P::EACH][P::EACH] = {};  // of the step: first of S, then of O
    for (int64_t k0 = 0; k0 < inner; k0 += P::DEPTH) {
      load_rows<P>(q_head, row0, k0, q_piece);
      load_rows<P>(k_head, key0, k0, k_piece);
      __syncthreads();  // both pieces, and before the first ones D, are whole before anyone reads them
      multiply<P, KEYS>(s, q_piece, k_piece, P::DEPTH);
      __syncthreads();  // everyone has read before the next pieces overwrite
    }
    UNROLL
    for (int a = 0; a < P::EACH; ++a) {
      UNROLL
      for (int b = 0; b < KEYS; ++b) {
        const int r = y + P::SIDE_Y * a, key = x + P::SIDE_X * b;
        const Sum d = s_tile[key][r];
        Sum weight = scale * (s[a][b] + bias[causal ? r : key]) * std::exp(d);
        if (d == Sum(-INFINITY)) weight = 0;  // also where s is infinite or NaN
        if (dots && step == 0 && key == r) diagonal[r] = weight, weight = 0;
        s_tile[key][r] = weight;
      }
      UNROLL
      for (int c = 0; c < P::EACH; ++c) s[a][c] = 0;
    }

    // Only the keys that there are: past them S would be 0 times what q has, and that may be infinite.
    const int keys = int(min(int64_t(TILE), seq - key0));
    for (int j0 = 0; j0 < keys; j0 += P::DEPTH) {
      load_values<P>(v_head, key0 + j0, col0, v_piece);
      __syncthreads();  // the piece, and before the first one the tile of S, is whole
      multiply<P, P::EACH>(s, s_tile + j0, v_piece, min(P::DEPTH, keys - j0));
      __syncthreads();  // everyone has read before the next piece, or the next tile of D, overwrites
    }
    UNROLL
    for (int a = 0; a < P::EACH; ++a) {
      UNROLL
      for (int c = 0; c < P::EACH; ++c) out[a][c] += s[a][c];
    }
    if (product == H && row < TILE) {
      Sum sum = 0;
      for (int key = 0; key < TILE; ++key) sum += s_tile[key][row];  // until this thread overwrites it
      l += sum;
    }
  }

  // H = out / (max(|l|, exp(-m)) + eps), both times exp(m) where m < 0 and exp(-m) would overflow. Two halves of it,
  // each on its own in the range of the type: a weight of exp(-100) is lost only with the result.
  if (product == H && row < TILE) {
    const Sum m = -row_part, root = std::exp(min(m, Sum(0)) / 2);
    const Sum least = std::exp(max(-max(m, Sum(0)), LEAST_LOG<Sum>));
    half[row] = root;
    rest[row] = gate == BARE ? 1 : root / (max(std::abs(l) * root * root, least) + eps * root * root);
    if (has_row && chunk == 0) rows(0, batch, head, row0 + row) = l;
  }
  __syncthreads();  // the factors are there before anyone multiplies by them
  UNROLL
  for (int a = 0; a < P::EACH; ++a) {
    const int r = y + P::SIDE_Y * a;
    const Sum first = product == H ? half[r] : 1, second = product == H ? rest[r] : 1, alone = dots ? diagonal[r] : 0;
    Sum dot = 0, dot_aside = 0;  // own . o without the diagonal, and what it adds
    UNROLL
    for (int c = 0; c < P::EACH; ++c) {
      const int64_t col = col0 + x + P::SIDE_X * c;
      if (row0 + r >= seq || col >= o.size[3]) continue;
      Sum value = out[a][c] * first * second;
      if (dots) {
        const Sum word = Sum(own(batch, head, row0 + r, col)), aside = alone * Sum(v_head(row0 + r, col));
        dot += word * value;
        dot_aside += word * aside;
        value += aside;
      }
      o(batch, head, row0 + r, col) = T(value);
    }
    if (dots) s_tile[x][r] = dot, s_tile[P::SIDE_X + x][r] = dot_aside;
  }
  if (!dots) return;

  __syncthreads();  // the dots are there before anyone adds them up
  if (has_row) {
    Sum dot = 0, dot_aside = 0;
    for (int n = 0; n < P::SIDE_X; ++n) dot += s_tile[n][row], dot_aside += s_tile[P::SIDE_X + n][row];
    parts(product == DQ ? 0 : 1, chunk, batch, head, row0 + row) = dot;
    if (product == DK) parts(2, chunk, batch, head, row0 + row) = dot + dot_aside;
  }
}

// What the gradients need of a row: b, M, and x, the gradient of its maximum; in logarithms, exp(m) may be anything.
// grid (ceil(B N T / WARPS)), block (WARP, WARPS)
template <typename T>
__global__ void vlstm_rows(View<const T, 4> dh,                 // [batch, heads, seq, Dv]
                           View<const T, 4> h,                  // [batch, heads, seq, Dv]
                           View<const Accumulator<T>, 4> rows,  // [2, batch, heads, seq]: l, m
                           View<Accumulator<T>, 4> lines,       // [3, batch, heads, seq]: b, M, x
                           Accumulator<T> log_eps, int gate, bool normalizer_gradient) {
  using Sum = Accumulator<T>;
  const int64_t index = int64_t(blockIdx.x) * WARPS + threadIdx.y, heads = h.size[1], seq = h.size[2];
  const int64_t batch = index / seq / heads, head = index / seq % heads, t = index % seq;
  if (batch >= h.size[0]) return;

  Sum dot = 0;
  for (int64_t c = threadIdx.x; c < h.size[3]; c += WARP) dot += Sum(dh(batch, head, t, c)) * Sum(h(batch, head, t, c));
  for (int flip = WARP / 2; flip; flip /= 2) dot += __shfl_xor_sync(~0u, dot, flip);
  if (threadIdx.x) return;

  const Sum l = rows(0, batch, head, t), m = rows(1, batch, head, t), sum = m + std::log(std::abs(l));  // of |u|
  const Sum least = max(m + LEAST_LOG<Sum>, Sum(0)), top = max(sum, least), peak = m + log_eps;
  const Sum n = gate == BARE ? 0 : top - log_sigmoid(top - peak);  // of exp(top) + exp(peak)
  lines(0, batch, head, t) = normalizer_gradient && top != least ? -dot * std::copysign(Sum(1), l) : 0;
  lines(1, batch, head, t) = n;
  lines(2, batch, head, t) = normalizer_gradient && gate == EXP ? -dot * std::exp(peak - n) : 0;
}

// The gradients of the gates, from the sums of E over the rows and columns. df_k = sigmoid(-f_k) times all E[t, j] with
// t >= k > j: what the rows from k on have more than the columns from k on. All rows have as much as all columns; what
// rounding has made of that is taken off, from each sum in proportion to the size of its terms.
// grid (B N), block (WARP)
template <typename T>
__global__ void vlstm_gates(View<const T, 3> i,                  // [batch, heads, seq]
                            View<const T, 3> f,                  // [batch, heads, seq]
                            View<const Accumulator<T>, 4> rows,  // [2, batch, heads, seq]: l, m
                            View<Accumulator<T>, 4> lines,       // [3, batch, heads, seq]: b, M, x
                            View<Accumulator<T>, 5> parts,       // [3, chunks, batch, heads, seq]: rows and columns
                            View<T, 3> di,                       // [batch, heads, seq]     without the diagonal, and
                            View<T, 3> df,                       // [batch, heads, seq]     columns with it
                            int gate) {
  using Sum = Accumulator<T>;
  const int lane = threadIdx.x;
  const int64_t seq = i.size[2], batch = blockIdx.x / i.size[1], head = blockIdx.x % i.size[1];
  const auto part = [&](int which, int64_t t) {
    Sum sum = 0;
    for (int64_t chunk = 0; chunk < parts.size[1]; ++chunk) sum += parts(which, chunk, batch, head, t);
    return sum;
  };

  double all = 0, all_size = 0;  // of the terms, and of the terms without their signs
  for (int64_t t = lane; t < seq; t += WARP) {
    const Sum row = part(0, t), column = part(1, t);
    all += double(row) - double(column), all_size += std::abs(row) + std::abs(column);
  }
  for (int flip = WARP / 2; flip; flip /= 2) {
    all += __shfl_xor_sync(~0u, all, flip), all_size += __shfl_xor_sync(~0u, all_size, flip);
  }

  double after = 0, after_size = 0, run_after = 0;  // sums from the position after the WARP in hand
  for (int64_t t0 = (seq - 1) / WARP * WARP; t0 >= 0; t0 -= WARP) {
    const int64_t t = t0 + lane;
    const bool inside = t < seq;
    const Sum row = inside ? part(0, t) : 0, column = inside ? part(1, t) : 0,
              x = inside ? lines(2, batch, head, t) : 0;
    const Sum input = log_gate<Sum>(i, batch, head, t, true);

    // The maximum of row t is in key t, and a run of rows begins whose maximum is there, or it is where that of the row
    // before is. In `run` the x of a row and of those after it are summed up, to the end of their run.
    const bool begins = inside && rows(1, batch, head, t) == input;
    double sum = double(row) - double(column), size = std::abs(row) + std::abs(column), run = begins ? 0 : x;
    int open = !begins;
    for (int reach = 1; reach != WARP; reach *= 2) {
      const double sum_next = __shfl_down_sync(~0u, sum, reach), size_next = __shfl_down_sync(~0u, size, reach);
      const double run_next = __shfl_down_sync(~0u, run, reach);
      const int open_next = __shfl_down_sync(~0u, open, reach);
      if (lane + reach >= WARP) continue;
      sum += sum_next, size += size_next;
      if (open) run += run_next, open = open_next;
    }
    sum += after, size += after_size;
    if (open) run += run_after;
    const double run_next = __shfl_down_sync(~0u, run, 1);
    const double peak = begins ? x + (lane == WARP - 1 ? run_after : run_next) : 0;
    after = __shfl_sync(~0u, sum, 0), after_size = __shfl_sync(~0u, size, 0), run_after = __shfl_sync(~0u, run, 0);
    if (inside) {
      const double across = sum - all * (size / max(all_size, 1e-300));
      const Sum through = gate == EXP ? 1 : std::exp(log_sigmoid(-input));
      di(batch, head, t) = T((part(2, t) + Sum(peak)) * through);
      df(batch, head, t) = T(Sum(across + run) * std::exp(log_sigmoid(-Sum(f(batch, head, t)))));
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
template <typename T, int CHUNK>
void start(Output<4> o, Input<4> q, Input<4> k, Input<4> v, Input<4> own, Input<3> i, Input<3> f, Output<4> rows,
           View<Accumulator<T>, 5> parts, double scale, double eps, int gate, Product product, Stream stream) {
  using Sum = Accumulator<T>;
  const int64_t blocks = o.size[0] * o.size[1] * ceil_div(o.size[2], TILE) * chunks_of(o.size[3], CHUNK);
  launch<vlstm_product<T, CHUNK>>({blocks}, dim3(Plan<T, CHUNK>::THREADS), 0, stream, q.as<T>(), k.as<T>(), v.as<T>(),
                                  o.as<T>(), own.as<T>(), i.as<T>(), f.as<T>(), rows.as<Sum>(), parts, Sum(scale),
                                  Sum(eps), gate, int(product));
}

template <typename T, typename... Arguments>
void start_product(Output<4> o, Arguments... arguments) {
  constexpr int WIDE = sizeof(T) == 8 ? 64 : 128;  // as wide as o, as far as registers go: float64 has half as many
  if (o.size[3] > 64) start<T, WIDE>(o, arguments...);
  else start<T, 64>(o, arguments...);
}

void vlstm(Input<4> q, Input<4> k, Input<4> v, Input<3> i, Input<3> f, Output<4> h, Output<4> rows, double scale,
           double eps, int gate, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    using Sum = Accumulator<T>;
    launch<vlstm_maxima<T>>({h.size[0] * h.size[1]}, dim3(WARP), 0, stream, i.as<T>(), f.as<T>(), rows.as<Sum>(), gate);
    start_product<T>(h, q, k, v, q, i, f, rows, View<Sum, 5>(), scale, eps, gate, H, stream);
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
    const auto gradient = [&](Product product, Output<4> o, Input<4> q, Input<4> k, Input<4> v, Input<4> own) {
      start_product<T>(o, q, k, v, own, i, f, lines, parts.as<Sum>(), scale, eps, gate, product, stream);
    };
    gradient(DQ, dq, dh, v, k, q);
    gradient(DK, dk, v, dh, q, k);
    gradient(DV, dv, k, q, dh, v);
    launch<vlstm_gates<T>>({heads}, dim3(WARP), 0, stream, i.as<T>(), f.as<T>(), rows.as<Sum>(), lines.as<Sum>(),
                           parts.as<Sum>(), di.as<T>(), df.as<T>(), gate);
  });
}
