// Stage 47: the first-order scan of complex numbers
//
// Problem   h[t] = a[t] h[t - 1] + b[t] for each batch and channel, from h0 or 0: a, b, h [B, T, D], h0 [B, D]; any
//           strides, any direction, real or complex. Backward, the bar being the complex conjugate:
//           lambda[t] = g[t] + conj(a[t + 1]) lambda[t + 1];  db = lambda,  da[t] = lambda[t] conj(h[t - 1]),
//           dh0 = conj(a[0]) lambda[0].
// Before    A real a makes a state grow, shrink or change its sign. With a complex one it also turns, by the angle of
//           a in each step: diagonal state space models are made of such channels, which swing.
// Idea      A complex number is one word of 8 or 16 bytes, its parts side by side, so whatever moves words stays as it
//           was in stage 41: only the arithmetic changes. A product is four multiplications, and what comes back
//           through one is multiplied by the conjugate of the other factor, as a turn is undone by the turn back.
// Mapping   As in stage 41. block: STRIP channels of one batch, all T steps.  tile: ROWS steps of them, 2 KiB of each
//           tensor.  lane: one channel in the walk; in a copy, 16 bytes, two numbers of complex64, of every STEP-th row.
// Cost      [B, T, D] row-major complex64, T a multiple of 32, D of 64; N = B T D elements, C = B D channels
//             global load sectors   forward (2 N + C) / 4, backward 3 N / 4
//             global store sectors  forward N / 4, backward (2 N + C) / 4: each word moves once, the least there is
//             shared wavefronts     forward 4 N / 32 copies, 6 N / 32 loads, 2 N / 32 stores; backward (6 N + 2 C) / 32
//                                   copies, 10 N / 32 loads, (4 N + 2 C) / 32 stores: a row of words has two lines
//           real numbers cost what they cost in stage 41, complex128 twice what complex64 costs.
// Limits    As in stage 41: a channel is one thread's, so few channels leave most of the card idle. And a and b are
//           read: where a comes from angles, exp(i theta), it need not be in memory at all, as stage 48 shows.
// Run       python -m stages run 47

#include "common/async_copy.h"
#include "common/complex.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/tile.h"
#include "common/vector.h"
#include "common/view.h"

constexpr int STRIP = 32;  // channels of a block, a lane each: 12288 channels are 384 blocks, 3 a multiprocessor
constexpr int STAGES = 5;  // tiles in the ring: 12 to 16 KB of a block are on their way in the forward
template <typename T>
constexpr int ROWS = 64 / int(sizeof(T));  // steps of a tile
template <typename T>
constexpr int WIDE = 16 / int(sizeof(T));  // elements that 16 bytes hold

template <typename T>
using Piece = T[ROWS<T>][STRIP];  // [step][channel]: in a row every lane has a bank of its own

// ---------------------------------------------------------------------------------------------------------------------
// One strip of a tensor, tile by tile: where the next one is, and how much is left. GROUPS: 16 bytes lie together.
template <typename T, bool GROUPS>
struct Strip {
  static constexpr int ACROSS = STRIP / WIDE<T>, STEP = STRIP / ACROSS;  // lanes for a row, and rows at a time
  static constexpr int BATCH = ROWS<T> < 16 ? ROWS<T> : 16;              // words on their way in registers
  T* next;
  int64_t stride_t, stride_c, steps;
  int cols;

  __device__ Strip(const View<T, 3>& x, int64_t batch, int64_t step, int64_t channel)
      : next(&x(batch, step, channel)),
        stride_t(x.stride[1]),
        stride_c(x.stride[2]),
        steps(x.size[1] - step),
        cols(int(min(x.size[2] - channel, int64_t(STRIP)))) {}

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
      const T* from = next + lane * stride_c;
#pragma unroll 1
      for (int r0 = 0; r0 < ROWS<T>; r0 += BATCH) {
        UNROLL
        for (int r = r0; r < r0 + BATCH; ++r, from += stride_t) {
          const bool inside = r < rows && lane < cols;
          if constexpr (sizeof(T) >= 4) {
            async_copy<sizeof(T)>(&tile[r][lane], from, inside);
          } else {  // cp.async takes no less than 4 bytes
            tile[r][lane] = inside ? *from : T(0);
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
      T* to = next + lane * stride_c;
#pragma unroll 8
      for (int r = 0; r < rows; ++r, to += stride_t) {
        if (lane < cols) *to = tile[r][lane];
      }
    }
    advance();
  }

  __device__ __forceinline__ void advance() { next += ROWS<T> * stride_t, steps -= ROWS<T>; }
};

// A lane's words of a tile, all read before the first of them is used: one wait instead of one at each step.
template <typename T>
struct Words {
  T word[ROWS<T>];

  __device__ explicit Words(const Piece<T>& tile) {
    UNROLL
    for (int r = 0; r < ROWS<T>; ++r) word[r] = tile[r][threadIdx.x];
  }
  __device__ Accumulator<T> operator[](int r) const { return Accumulator<T>(word[r]); }
};

// ---------------------------------------------------------------------------------------------------------------------
// grid (B * ceil(D / STRIP)), block (STRIP)
template <typename T, bool GROUPS>
__global__ void __launch_bounds__(STRIP) scan_complex(View<const T, 3> a,   // [batch, seq, channels]
                                                      View<const T, 3> b,   // [batch, seq, channels]
                                                      View<const T, 2> h0,  // [batch, channels], or empty
                                                      View<T, 3> h) {       // [batch, seq, channels]
  using Sum = Accumulator<T>;
  alignas(16) __shared__ Piece<T> a_ring[STAGES], b_ring[STAGES];

  const int64_t seq = h.size[1], strips = ceil_div(h.size[2], STRIP);
  const int64_t batch = blockIdx.x / strips, channel0 = blockIdx.x % strips * STRIP;
  const int lane = threadIdx.x;

  Strip<const T, GROUPS> a_strip(a, batch, 0, channel0), b_strip(b, batch, 0, channel0);
  Strip<T, GROUPS> h_strip(h, batch, 0, channel0);
  const auto start = [&](int slot) {
    if (a_strip.steps > 0) a_strip.fetch(a_ring[slot]), b_strip.fetch(b_ring[slot]);
    async_commit();  // of nothing, at the end, so that groups and tiles count alike
  };
  for (int slot = 0; slot < STAGES - 1; ++slot) start(slot);

  Sum state = h0.size[0] && lane < h_strip.cols ? Sum(h0(batch, channel0 + lane)) : 0;
  int now = 0, free = STAGES - 1;
  for (int64_t t0 = 0; t0 < seq; t0 += ROWS<T>) {
    async_wait<STAGES - 2>();  // this lane's part of the tile
    __syncwarp();              // everyone's; and all have stored the tile before it, whose place is free
    start(free);
    const Words<T> a_words(a_ring[now]), b_words(b_ring[now]);
    UNROLL
    for (int r = 0; r < ROWS<T>; ++r) {
      state = a_words[r] * state + b_words[r];
      b_ring[now][r][lane] = T(state);  // nobody else reads this word before all are there
    }
    __syncwarp();  // all channels of h are there
    h_strip.store(b_ring[now]);
    free = now, now = now + 1 < STAGES ? now + 1 : 0;
  }
}

// All views run from the last step to the first, as the walk does: h[t + 1] is the state before step t.
// grid (B * ceil(D / STRIP)), block (STRIP)
template <typename T, bool GROUPS>
__global__ void __launch_bounds__(STRIP) scan_complex_backward(View<const T, 3> g,   // [batch, seq, channels]
                                                               View<const T, 3> a,   // [batch, seq, channels]
                                                               View<const T, 3> h,   // [batch, seq, channels]
                                                               View<const T, 2> h0,  // [batch, channels], or empty
                                                               View<T, 3> da,        // [batch, seq, channels]
                                                               View<T, 3> db,        // [batch, seq, channels]
                                                               View<T, 2> dh0) {     // [batch, channels], or empty
  using Sum = Accumulator<T>;
  alignas(16) __shared__ Piece<T> g_ring[STAGES], a_ring[STAGES], h_ring[STAGES];

  const int64_t seq = h.size[1], strips = ceil_div(h.size[2], STRIP);
  const int64_t batch = blockIdx.x / strips, channel0 = blockIdx.x % strips * STRIP;
  const int lane = threadIdx.x;

  Strip<const T, GROUPS> g_strip(g, batch, 0, channel0), a_strip(a, batch, 0, channel0), h_strip(h, batch, 1, channel0);
  Strip<T, GROUPS> da_strip(da, batch, 0, channel0), db_strip(db, batch, 0, channel0);
  const auto start = [&](int slot) {
    if (g_strip.steps > 0) g_strip.fetch(g_ring[slot]), a_strip.fetch(a_ring[slot]), h_strip.fetch(h_ring[slot]);
    async_commit();
  };
  for (int slot = 0; slot < STAGES - 1; ++slot) start(slot);

  const bool own = lane < da_strip.cols;
  const T first = own && h0.size[0] ? h0(batch, channel0 + lane) : T(0);
  Sum carry = 0;  // what the steps that were walked give to the next one's state
  int now = 0, free = STAGES - 1;
  for (int64_t t0 = 0; t0 < seq; t0 += ROWS<T>) {
    async_wait<STAGES - 2>();
    __syncwarp();  // as in the forward: the tile is there, and the place of the one before it is free
    start(free);
    if (t0 + ROWS<T> >= seq) {
      const int rows = int(seq - t0);
      h_ring[now][rows - 1][lane] = first;                                  // there is no h before the first step
      for (int r = rows; r < ROWS<T>; ++r) a_ring[now][r][lane] = T(1.0f);  // a = 1 and g = 0 change nothing
    }
    const Words<T> g_words(g_ring[now]), a_words(a_ring[now]), h_words(h_ring[now]);
    UNROLL
    for (int r = 0; r < ROWS<T>; ++r) {
      const Sum lambda = g_words[r] + carry;
      carry = conj(a_words[r]) * lambda;
      h_ring[now][r][lane] = T(lambda * conj(h_words[r]));  // da and db take the place of h and g
      g_ring[now][r][lane] = T(lambda);
    }
    __syncwarp();  // all channels of da and db are there
    da_strip.store(h_ring[now]);
    db_strip.store(g_ring[now]);
    free = now, now = now + 1 < STAGES ? now + 1 : 0;
  }
  if (own && dh0.size[0]) dh0(batch, channel0 + lane) = T(carry);
}

// ---------------------------------------------------------------------------------------------------------------------
template <typename... Views>
bool in_groups(const Views&... views) {
  return (in_wide_groups(views, 2) && ...);
}

// One of two kernels, a block for each strip.
template <auto BY_GROUPS, auto BY_WORDS, typename... Arguments>
void launch_strips(bool groups, Input<3> a, Stream stream, Arguments... arguments) {
  const Grid grid{a.size[0] * ceil_div(a.size[2], STRIP)};
  if (groups) launch<BY_GROUPS>(grid, dim3(STRIP), 0, stream, arguments...);
  else launch<BY_WORDS>(grid, dim3(STRIP), 0, stream, arguments...);
}

void scan(Input<3> a, Input<3> b, Input<2> h0, Output<3> h, bool reverse, Stream stream) {
  dispatch_number(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? flipped(x, 1) : x; };
    const auto av = in_time(a.as<T>()), bv = in_time(b.as<T>());
    const auto hv = in_time(h.as<T>());
    launch_strips<scan_complex<T, true>, scan_complex<T, false>>(in_groups(av, bv, hv), a, stream, av, bv, h0.as<T>(),
                                                                 hv);
  });
}

void scan_backward(Input<3> g, Input<3> a, Input<3> h, Input<2> h0, Output<3> da, Output<3> db, Output<2> dh0,
                   bool reverse, Stream stream) {
  dispatch_number(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? x : flipped(x, 1); };  // against the direction of the forward
    const auto gv = in_time(g.as<T>()), av = in_time(a.as<T>()), hv = in_time(h.as<T>());
    const auto dav = in_time(da.as<T>()), dbv = in_time(db.as<T>());
    launch_strips<scan_complex_backward<T, true>, scan_complex_backward<T, false>>(
        in_groups(gv, av, hv, dav, dbv), a, stream, gv, av, hv, h0.as<T>(), dav, dbv, dh0.as<T>());
  });
}
