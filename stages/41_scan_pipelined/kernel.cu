// Stage 41: the first-order scan, later steps on their way while a thread walks
//
// Problem   h[t] = a[t] h[t - 1] + b[t] for each batch and channel, from h0 or 0: a, b, h [B, T, D], h0 [B, D]; any
//           strides, any direction. Backward: lambda[t] = g[t] + a[t + 1] lambda[t + 1];  db = lambda,
//           da[t] = lambda[t] h[t - 1],  dh0 = a[0] lambda[0].
// Before    Stage 40 moves no word twice, and waits: a thread has the words of one step under way. To keep its memory
//           busy an H100 needs about 2.3 MB on the way at any time, 17 KB for each multiprocessor.
// Idea      What a step needs is known long before its turn; only the state has to wait. So cp.async fetches whole tiles
//           of time ahead, 16 bytes a lane, into a ring in shared memory: one is walked, STAGES - 1 are on their way.
//           Results take the place of what they were made from, and leave as they came, 16 bytes a lane. A block is one
//           warp, so that a few thousand channels are many blocks, and all multiprocessors get about as many.
// Mapping   block: STRIP channels of one batch, all T steps.  tile: ROWS steps of them, 2 KiB of each tensor.
//           lane: one channel in the walk, two if their words have 16 bits; in a copy, 16 bytes of every STEP-th row.
// Cost      [B, T, D] row-major float32, T a multiple of 32, D of 64; N = B T D elements, C = B D channels
//             global sectors        as in stage 40, in a quarter of the requests but for h0 and dh0
//             shared wavefronts     forward 2 N / 32 copies, 3 N / 32 loads, N / 32 stores
//                                   backward (3 N + 3 C) / 32 copies, 5 N / 32 loads, (2 N + C) / 32 stores
//           with time_dim=2, and where else 16 bytes do not lie together, a lane copies word by word.
// Limits    A channel is one thread's, so a problem of few channels leaves most of the card idle however long it is:
//           stages 42 to 45 cut time in pieces. Words of 16 bits that are copied singly are waited for.
// Run       python -m stages run 41

#include "common/async_copy.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/tile.h"
#include "common/vector.h"
#include "common/view.h"

constexpr int LANES = 32;  // of a block
template <typename T>
constexpr int PAIR = sizeof(T) == 2 ? 2 : 1;  // channels of a lane: a row of a strip is 128 bytes, in double 256
template <typename T>
constexpr int STRIP = LANES * PAIR<T>;  // channels of a block
template <typename T>
constexpr int ROWS = 2048 / (STRIP<T> * int(sizeof(T)));  // steps of a tile
// Tiles in the ring, of which all but one are on their way: 16 KB of a block, in 16 bits 24 of half as many blocks. With
// more of them an H100 is slower, though there is room.
template <typename T>
constexpr int STAGES = sizeof(T) == 2 ? 7 : 5;
constexpr int STAGES_BACKWARD = 5;
template <typename T>
constexpr int WIDE = 16 / int(sizeof(T));  // elements that 16 bytes hold

template <typename T>
using Piece = T[ROWS<T>][STRIP<T>];  // [step][channel]: in a row every lane has a bank of its own

// ---------------------------------------------------------------------------------------------------------------------
// One strip of a tensor, tile by tile: where the next one is, and how much is left. GROUPS: 16 bytes lie together.
template <typename T, bool GROUPS>
struct Strip {
  static constexpr int ACROSS = STRIP<T> / WIDE<T>, STEP = LANES / ACROSS;  // lanes for a row, and rows at a time
  T* next;
  int64_t stride_t, stride_c, steps;
  int cols;

  __device__ Strip(const View<T, 3>& x, int64_t batch, int64_t step, int64_t channel)
      : next(&x(batch, step, channel)),
        stride_t(x.stride[1]),
        stride_c(x.stride[2]),
        steps(x.size[1] - step),
        cols(int(min(x.size[2] - channel, int64_t(STRIP<T>)))) {}

  // Starts the copies of the next tile; zeros stand for what lies past an edge.
  template <typename To>
  __device__ __forceinline__ void fetch(To& tile) {
    const int rows = int(min(steps, int64_t(ROWS<T>))), lane = threadIdx.x;
    if constexpr (GROUPS) {
      const int c = lane % ACROSS * WIDE<T>, r0 = lane / ACROSS;
      const T* from = next + r0 * stride_t + c;
      UNROLL
      for (int r = 0; r < ROWS<T>; r += STEP, from += STEP * stride_t) {
        async_copy<16>(&tile[r0 + r][c], from, r0 + r < rows && c < cols);
      }
    } else {
#pragma unroll 1
      for (int c = lane; c < STRIP<T>; c += LANES) {
        const T* from = next + c * stride_c;
        UNROLL
        for (int r = 0; r < ROWS<T>; ++r, from += stride_t) {
          const bool inside = r < rows && c < cols;
          if constexpr (sizeof(T) >= 4) {
            async_copy<sizeof(T)>(&tile[r][c], from, inside);
          } else {  // cp.async takes no less than 4 bytes
            tile[r][c] = inside ? *from : T(0);
          }
        }
      }
    }
    advance();
  }

  // Stores a tile as the next one.
  __device__ __forceinline__ void store(const Piece<T>& tile) {
    const int rows = int(min(steps, int64_t(ROWS<T>))), lane = threadIdx.x;
    if constexpr (GROUPS) {
      const int c = lane % ACROSS * WIDE<T>, r0 = lane / ACROSS;
      T* to = next + r0 * stride_t + c;
      UNROLL
      for (int r = 0; r < ROWS<T>; r += STEP, to += STEP * stride_t) {
        if (r0 + r < rows && c < cols) store_vector(to, load_vector<WIDE<T>>(&tile[r0 + r][c]));
      }
    } else {
      for (int c = lane; c < cols; c += LANES) {
        T* to = next + c * stride_c;
#pragma unroll 8
        for (int r = 0; r < rows; ++r, to += stride_t) *to = tile[r][c];
      }
    }
    advance();
  }

  __device__ __forceinline__ void advance() { next += ROWS<T> * stride_t, steps -= ROWS<T>; }
};

// A lane's words of a tile, all read before the first of them is used: one wait instead of one at each step.
template <typename T>
struct Words {
  Vector<T, PAIR<T>> word[ROWS<T>];

  __device__ explicit Words(const Piece<T>& tile) {
    UNROLL
    for (int r = 0; r < ROWS<T>; ++r) word[r] = load_vector<PAIR<T>>(&tile[r][threadIdx.x * PAIR<T>]);
  }
  __device__ Accumulator<T> operator()(int r, int i) const { return Accumulator<T>(word[r][i]); }
};

// ---------------------------------------------------------------------------------------------------------------------
// grid (B * ceil(D / STRIP)), block (STRIP)
template <typename T, bool GROUPS>
__global__ void __launch_bounds__(LANES) scan_pipelined(View<const T, 3> a,   // [batch, seq, channels]
                                                        View<const T, 3> b,   // [batch, seq, channels]
                                                        View<const T, 2> h0,  // [batch, channels], or empty
                                                        View<T, 3> h) {       // [batch, seq, channels]
  using Sum = Accumulator<T>;
  alignas(16) __shared__ Piece<T> a_ring[STAGES<T>], b_ring[STAGES<T>];

  const int64_t seq = h.size[1], strips = ceil_div(h.size[2], STRIP<T>);
  const int64_t batch = blockIdx.x / strips, channel0 = blockIdx.x % strips * STRIP<T>;
  const int lane = threadIdx.x, own = lane * PAIR<T>;

  Strip<const T, GROUPS> a_strip(a, batch, 0, channel0), b_strip(b, batch, 0, channel0);
  Strip<T, GROUPS> h_strip(h, batch, 0, channel0);
  const auto start = [&](int slot) {
    if (a_strip.steps > 0) a_strip.fetch(a_ring[slot]), b_strip.fetch(b_ring[slot]);
    async_commit();  // of nothing, at the end, so that groups and tiles count alike
  };
  for (int slot = 0; slot < STAGES<T> - 1; ++slot) start(slot);

  Sum state[PAIR<T>];
  UNROLL
  for (int i = 0; i < PAIR<T>; ++i) {
    state[i] = h0.size[0] && own + i < h_strip.cols ? Sum(h0(batch, channel0 + own + i)) : 0;
  }
  int now = 0, free = STAGES<T> - 1;
  for (int64_t t0 = 0; t0 < seq; t0 += ROWS<T>) {
    async_wait<STAGES<T> - 2>();  // this lane's part of the tile
    __syncwarp();                 // everyone's; and all have stored the tile before it, whose place is free
    start(free);
    const Words<T> a_words(a_ring[now]), b_words(b_ring[now]);
    UNROLL
    for (int r = 0; r < ROWS<T>; ++r) {
      Vector<T, PAIR<T>> states;
      UNROLL
      for (int i = 0; i < PAIR<T>; ++i) {
        state[i] = a_words(r, i) * state[i] + b_words(r, i);
        states[i] = T(state[i]);
      }
      store_vector(&b_ring[now][r][own], states);  // nobody else reads these words before all are there
    }
    __syncwarp();  // all channels of h are there
    h_strip.store(b_ring[now]);
    free = now, now = now + 1 < STAGES<T> ? now + 1 : 0;
  }
}

// All views run from the last step to the first, as the walk does: h[t + 1] is the state before step t.
// grid (B * ceil(D / STRIP)), block (STRIP)
template <typename T, bool GROUPS>
__global__ void __launch_bounds__(LANES) scan_pipelined_backward(View<const T, 3> g,   // [batch, seq, channels]
                                                                 View<const T, 3> a,   // [batch, seq, channels]
                                                                 View<const T, 3> h,   // [batch, seq, channels]
                                                                 View<const T, 2> h0,  // [batch, channels], or empty
                                                                 View<T, 3> da,        // [batch, seq, channels]
                                                                 View<T, 3> db,        // [batch, seq, channels]
                                                                 View<T, 2> dh0) {     // [batch, channels], or empty
  using Sum = Accumulator<T>;
  alignas(16) __shared__ Piece<T> g_ring[STAGES_BACKWARD], a_ring[STAGES_BACKWARD], h_ring[STAGES_BACKWARD];

  const int64_t seq = h.size[1], strips = ceil_div(h.size[2], STRIP<T>);
  const int64_t batch = blockIdx.x / strips, channel0 = blockIdx.x % strips * STRIP<T>;
  const int own = threadIdx.x * PAIR<T>;

  Strip<const T, GROUPS> g_strip(g, batch, 0, channel0), a_strip(a, batch, 0, channel0), h_strip(h, batch, 1, channel0);
  Strip<T, GROUPS> da_strip(da, batch, 0, channel0), db_strip(db, batch, 0, channel0);
  const auto start = [&](int slot) {
    if (g_strip.steps > 0) g_strip.fetch(g_ring[slot]), a_strip.fetch(a_ring[slot]), h_strip.fetch(h_ring[slot]);
    async_commit();
  };
  for (int slot = 0; slot < STAGES_BACKWARD - 1; ++slot) start(slot);

  Vector<T, PAIR<T>> first;
  UNROLL
  for (int i = 0; i < PAIR<T>; ++i) {
    first[i] = h0.size[0] && own + i < da_strip.cols ? h0(batch, channel0 + own + i) : T(0);
  }
  Sum carry[PAIR<T>] = {};  // what the steps that were walked give to the next one's state
  int now = 0, free = STAGES_BACKWARD - 1;
  for (int64_t t0 = 0; t0 < seq; t0 += ROWS<T>) {
    async_wait<STAGES_BACKWARD - 2>();
    __syncwarp();  // as in the forward: the tile is there, and the place of the one before it is free
    start(free);
    if (t0 + ROWS<T> >= seq) {
      const int rows = int(seq - t0);
      store_vector(&h_ring[now][rows - 1][own], first);  // there is no h before the first step
      for (int r = rows; r < ROWS<T>; ++r) {             // a = 1 and g = 0 change nothing
        UNROLL
        for (int i = 0; i < PAIR<T>; ++i) a_ring[now][r][own + i] = T(1.0f);
      }
    }
    const Words<T> g_words(g_ring[now]), a_words(a_ring[now]), h_words(h_ring[now]);
    UNROLL
    for (int r = 0; r < ROWS<T>; ++r) {
      Vector<T, PAIR<T>> of_a, of_b;
      UNROLL
      for (int i = 0; i < PAIR<T>; ++i) {
        const Sum lambda = g_words(r, i) + carry[i];
        carry[i] = a_words(r, i) * lambda;
        of_a[i] = T(lambda * h_words(r, i));
        of_b[i] = T(lambda);
      }
      store_vector(&h_ring[now][r][own], of_a);  // da and db take the place of h and g
      store_vector(&g_ring[now][r][own], of_b);
    }
    __syncwarp();  // all channels of da and db are there
    da_strip.store(h_ring[now]);
    db_strip.store(g_ring[now]);
    free = now, now = now + 1 < STAGES_BACKWARD ? now + 1 : 0;
  }
  UNROLL
  for (int i = 0; i < PAIR<T>; ++i) {
    if (dh0.size[0] && own + i < da_strip.cols) dh0(batch, channel0 + own + i) = T(carry[i]);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
template <typename... Views>
bool in_groups(const Views&... views) {
  return (in_wide_groups(views, 2) && ...);
}

// One of two kernels, a block for each strip.
template <auto BY_GROUPS, auto BY_WORDS, typename T, typename... Arguments>
void launch_strips(bool groups, const View<const T, 3>& a, Stream stream, Arguments... arguments) {
  const Grid grid{a.size[0] * ceil_div(a.size[2], STRIP<T>)};
  if (groups) launch<BY_GROUPS>(grid, dim3(LANES), 0, stream, arguments...);
  else launch<BY_WORDS>(grid, dim3(LANES), 0, stream, arguments...);
}

void scan(Input<3> a, Input<3> b, Input<2> h0, Output<3> h, bool reverse, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? flipped(x, 1) : x; };
    const auto av = in_time(a.as<T>()), bv = in_time(b.as<T>());
    const auto hv = in_time(h.as<T>());
    launch_strips<scan_pipelined<T, true>, scan_pipelined<T, false>>(in_groups(av, bv, hv), av, stream, av, bv,
                                                                     h0.as<T>(), hv);
  });
}

void scan_backward(Input<3> g, Input<3> a, Input<3> h, Input<2> h0, Output<3> da, Output<3> db, Output<2> dh0,
                   bool reverse, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? x : flipped(x, 1); };  // against the direction of the forward
    const auto gv = in_time(g.as<T>()), av = in_time(a.as<T>()), hv = in_time(h.as<T>());
    const auto dav = in_time(da.as<T>()), dbv = in_time(db.as<T>());
    launch_strips<scan_pipelined_backward<T, true>, scan_pipelined_backward<T, false>>(
        in_groups(gv, av, hv, dav, dbv), av, stream, gv, av, hv, h0.as<T>(), dav, dbv, dh0.as<T>());
  });
}
