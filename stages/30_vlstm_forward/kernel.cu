// Stage 30: the vLSTM forward, gates and normaliser fused
//
// Problem   H = u V / max(|sum_j u|, 1) for each batch and head, u = s (Q K^T) exp(D), D[t, j] = log sigmoid(f_{j+1}) +
//           .. + log sigmoid(f_t) + i_j for j <= t: q, k [T, Dk], v [T, Dv], i, f [T]; any strides.
// Before    Stage 23, whose weights are 1. exp(D) overflows, D would be T x T words, as S was in stage 20, and what a
//           row is divided by is known after its last key only.
// Idea      All three go along with the walk. m is the largest D of a row so far, the weights are s (Q K^T) exp(D - m),
//           and when a tile raises m to m', what was summed shrinks by exp(m - m'). l is the sum of the weights, and
//           max(|l|, exp(-m)) divides once, at the end. D is added up gate by gate, from the last key of a tile to the
//           first: a sum and no difference of sums, so that no digits are lost and f = -infinity is a reset.
// Mapping   block: TILE rows x CHUNK columns of H, the products as in stage 23. What a row has once, D of its keys, m,
//           l and the divisor, is in the hands of one thread, thread r for row r; all others get it by shared memory.
// Cost      float32, H = B N heads, n = T / 64, T of 64, Dk of 16, Dv = 64 or of 128; c = ceil(Dv / 128) chunks
//           stage 23, causal, and for the gates
//             global load sectors   8 H c n (n + 2) + 4 H c n (n - 1) (n - 2) / 3, the latter between two tiles
//             shared wavefronts     a step: 640 loads, 16 more a warp, 138 stores; a block: 96, 16 more a warp, 6
//             barriers              a step 1, a block 3
// Limits    The gates between a tile of keys and the rows are added up anew for each pair of tiles: stage 31. While 64
//           threads add up D, no others multiply. Each chunk of a Dv past CHUNK computes D and S anew. No backward.
// Run       python -m stages run 30

#include "common/device.h"
#include "common/gates.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/register_tile.h"
#include "common/view.h"

enum Gate { EXP, SIGMOID, BARE };  // exp(i); sigmoid(i); sigmoid(i) and no normaliser

constexpr int TILE = 64;  // rows of Q in a block, and keys in a step: a square of S fits into static shared memory

// m before the first key: below any D that counts, and finite, so that D = -infinity has no weight beside it.
constexpr float LOWEST = -1e30f;

// How a block of T shares out its work: the tiles and the products of stage 22, and what the gates need.
template <typename T, int CHUNK>
struct Plan : RegisterTile<T, TILE, CHUNK> {
  using Sum = Accumulator<T>;
  static constexpr int RESIDENT = sizeof(Sum) == 8 ? 2 : CHUNK == 64 ? 4 : 3;  // blocks that registers have to hold
  using Line = Sum[TILE];                                                      // a word for each row or key

  // The least normaliser: 0 would make 0 / 0 of a row of zeros.
  static constexpr Sum LEAST = sizeof(Sum) == 8 ? 1e-300 : 1e-37;
};

// ---------------------------------------------------------------------------------------------------------------------
// The logarithm of a gate, exp(x) or sigmoid(x); 0 past the end.
template <typename Sum, typename T>
__device__ __forceinline__ Sum log_gate(View<const T, 3> x, int64_t batch, int64_t head, int64_t at, bool exponential) {
  if (at >= x.size[2]) return 0;
  const Sum word = Sum(x(batch, head, at));
  return exponential ? word : log_sigmoid(word);
}

// ---------------------------------------------------------------------------------------------------------------------
// grid (B N * ceil(T / TILE) * ceil(Dv / CHUNK)), block (THREADS)
template <typename T, int CHUNK>
__global__ void __launch_bounds__(Plan<T, CHUNK>::THREADS, Plan<T, CHUNK>::RESIDENT)
    vlstm_forward(View<const T, 4> q,  // [batch, heads, seq, Dk]
                  View<const T, 4> k,  // [batch, heads, seq, Dk]
                  View<const T, 4> v,  // [batch, heads, seq, Dv]
                  View<const T, 3> i,  // [batch, heads, seq]
                  View<const T, 3> f,  // [batch, heads, seq]
                  View<T, 4> h,        // [batch, heads, seq, Dv]
                  Accumulator<T> scale, Accumulator<T> eps, int gate) {
  using P = Plan<T, CHUNK>;
  using Sum = typename P::Sum;
  constexpr int KEYS = TILE / P::SIDE_X;  // of a thread in a step
  __shared__ typename P::Piece q_piece, k_piece;
  __shared__ typename P::Square s_tile;  // first D, then the weights
  __shared__ typename P::Values v_piece;
  __shared__ typename P::Line log_f, input, between, top, factor;

  const int64_t heads = q.size[1], seq = q.size[2];
  const int64_t inner = max(q.size[3], int64_t(1));  // where Dk is 0, a piece of zeros passes
  const int x = threadIdx.x % P::SIDE_X, y = threadIdx.x / P::SIDE_X;
  const int own = threadIdx.x;  // the row whose sums this thread keeps, if it is one of the tile

  // Everything is counted along one grid dimension: y and z of a grid end at 65535, batch x heads and T need not.
  const int chunks = int(ceil_div(h.size[3], CHUNK)), tiles = int(ceil_div(seq, TILE));
  const int chunk = blockIdx.x % chunks, turn = blockIdx.x / chunks % tiles;
  const int64_t col0 = int64_t(chunk) * CHUNK;
  const int64_t row0 = int64_t(tiles - 1 - turn) * TILE;  // the longest walks start first
  const int batch = blockIdx.x / chunks / tiles / int(heads), head = blockIdx.x / chunks / tiles % int(heads);
  const View<const T, 2> q_head = matrix(q, batch, head);
  const View<const T, 2> k_head = matrix(k, batch, head);
  const View<const T, 2> v_head = matrix(v, batch, head);

  // A step sums up on its own, and what it has is added to the sums of the walk. Each addition to a float that grows
  // rounds: TILE times, and then T / TILE times, instead of T times.
  Sum out[P::EACH][P::EACH] = {};
  Sum m = gate == EXP ? Sum(LOWEST) : 0, l = 0;  // of the own row; a sigmoid's D is never above 0

  // The gates of the rows' tile up to and with the own row, which D has for every key before the tile.
  Sum before = 0;
  if (own < TILE) log_f[own] = log_gate<Sum>(f, batch, head, row0 + own, false);
  __syncthreads();  // the gates are there before anyone adds them up
  if (own < TILE) {
    for (int r = 0; r <= own; ++r) before += log_f[r];
  }
  __syncthreads();  // everyone has read before the first step's gates overwrite

  for (int64_t key0 = 0; key0 <= row0; key0 += TILE) {
    if (own < TILE) {
      log_f[own] = log_gate<Sum>(f, batch, head, key0 + own, false);
      input[own] = log_gate<Sum>(i, batch, head, key0 + own, gate == EXP);
      Sum sum = 0;
      for (int64_t r = key0 + TILE + own; r < row0; r += TILE) sum += log_gate<Sum>(f, batch, head, r, false);
      between[own] = sum;
    }
    __syncthreads();  // the gates are there before anyone adds them up

    // D of the own row, added up from the last key to the first; -infinity where the row does not see the key.
    if (own < TILE) {
      const bool diagonal = key0 == row0;
      Sum start = diagonal ? 0 : before, local = 0, highest = m;
      for (int r = 0; r < TILE; ++r) start += between[r];
      for (int key = TILE - 1; key >= 0; --key) {
        const bool hidden = diagonal && key > own;
        const Sum step = log_f[key], sum = start + (local + input[key]), d = hidden ? Sum(-INFINITY) : sum;
        s_tile[key][own] = d;
        highest = max(highest, d);
        local += hidden ? 0 : step;
      }
      factor[own] = std::exp(m - highest);
      l *= std::exp(m - highest);
      top[own] = m = highest;
    }

    Sum s[P::EACH][P::EACH] = {};  // of the step: first of S, then of H
    for (int64_t k0 = 0; k0 < inner; k0 += P::DEPTH) {
      load_rows<P>(q_head, row0, k0, q_piece);
      load_rows<P>(k_head, key0, k0, k_piece);
      __syncthreads();  // both pieces, and before the first ones D, are whole before anyone reads them
      multiply<P, KEYS>(s, q_piece, k_piece, P::DEPTH);
      __syncthreads();  // everyone has read before the next pieces overwrite
    }
    UNROLL
    for (int a = 0; a < P::EACH; ++a) {
      const int row = y + P::SIDE_Y * a;
      const Sum shrink = factor[row], highest = top[row];
      UNROLL
      for (int c = 0; c < P::EACH; ++c) out[a][c] *= shrink;
      UNROLL
      for (int b = 0; b < KEYS; ++b) {
        Sum& place = s_tile[x + P::SIDE_X * b][row];
        const Sum d = place, weight = scale * s[a][b] * std::exp(d - highest);
        place = d == Sum(-INFINITY) ? 0 : weight;  // 0 also where s is infinite or NaN
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
    if (own < TILE) {
      Sum sum = 0;
      for (int key = 0; key < TILE; ++key) sum += s_tile[key][own];  // until this thread overwrites it
      l += sum;
    }
  }

  // H = out / (max(|l|, exp(-m)) + eps), both times exp(m) where m < 0 and exp(-m) would overflow. Two halves of it,
  // each on its own in the range of the type: a weight of exp(-100) is lost only with the result.
  if (own < TILE) {
    const Sum half = std::exp(min(m, Sum(0)) / 2), least = max(std::exp(-max(m, Sum(0))), P::LEAST);
    const Sum divisor = max(std::abs(l) * half * half, least) + eps * half * half;
    top[own] = half;
    factor[own] = gate == BARE ? 1 : half / divisor;
  }
  __syncthreads();  // the factors are there before anyone multiplies by them
  UNROLL
  for (int a = 0; a < P::EACH; ++a) {
    const int row = y + P::SIDE_Y * a;
    const Sum half = top[row], rest = factor[row];
    UNROLL
    for (int c = 0; c < P::EACH; ++c) {
      const int64_t col = col0 + x + P::SIDE_X * c;
      if (row0 + row < seq && col < h.size[3]) h(batch, head, row0 + row, col) = T(out[a][c] * half * rest);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
template <typename T, int CHUNK>
void start(Input<4> q, Input<4> k, Input<4> v, Input<3> i, Input<3> f, Output<4> h, double scale, double eps, int gate,
           Stream stream) {
  const int64_t blocks = h.size[0] * h.size[1] * ceil_div(h.size[2], TILE) * ceil_div(h.size[3], CHUNK);
  launch<vlstm_forward<T, CHUNK>>({blocks}, dim3(Plan<T, CHUNK>::THREADS), 0, stream, q.as<T>(), k.as<T>(), v.as<T>(),
                                  i.as<T>(), f.as<T>(), h.as<T>(), Accumulator<T>(scale), Accumulator<T>(eps), gate);
}

void vlstm(Input<4> q, Input<4> k, Input<4> v, Input<3> i, Input<3> f, Output<4> h, double scale, double eps, int gate,
           Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    constexpr int WIDE = sizeof(T) == 8 ? 64 : 128;  // as wide as v, as far as registers go: float64 has half as many
    if (h.size[3] > 64) start<T, WIDE>(q, k, v, i, f, h, scale, eps, gate, stream);
    else start<T, 64>(q, k, v, i, f, h, scale, eps, gate, stream);
  });
}
