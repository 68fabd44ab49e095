// Stage 45: the first-order scan in one pass, tiles of time handing on their state
//
// Problem   h[t] = a[t] h[t - 1] + b[t] for each batch and channel, from h0 or 0: a, b, h [B, T, D], h0 [B, D]; any
//           strides, any direction. Backward: lambda[t] = g[t] + a[t + 1] lambda[t + 1];  db = lambda,
//           da[t] = lambda[t] h[t - 1],  dh0 = a[0] lambda[0].
// Before    In stages 40 to 44 one block goes through all of a channel's time, so that a few long rows leave most of the
//           card idle. To cut time between blocks took two more launches, or to read a and b twice.
// Idea      A tile of time is a block's. It reads its steps once and keeps them in registers; it tells their map, state ->
//           a state + b, before it knows the state; it looks back over the tiles before it to the newest one that has
//           told its state, takes the maps from there on, and tells its own state. Nobody waits for a chain of blocks:
//           maps are there as soon as tiles are read (Merrill and Garland, Single-pass parallel prefix scan with
//           decoupled look-back, 2016).
//           Progress: blocks take tiles by a ticket, in the order in which they begin, a chain's tiles from the first to
//           the last. So a block waits only for blocks that run already; the oldest of those waits for nobody.
//           Repeatable: how far it looks back is chance. So maps are never combined with each other, but applied to the
//           state, one after the other: the same operations in the same order, from wherever it is that they begin.
//           That costs a multiplication and an addition a tile, one after the other, beside the wait for memory.
// Mapping   chain: what is scanned by itself. With time_dim=1 a strip of channels, a warp's; lane: 4 bytes of each step,
//           1 channel or 2; tile: STEPS steps. With time_dim=2 one channel; lane: GROUPS times 16 bytes of steps;
//           tile: up to WARPS warps, fewer if T is small.
// Cost      float32, N = B T D elements, C = B D channels, R tiles in a chain, each of which finds the state of the one
//           before it, as when blocks run one after another; every word of a, b, h, g, da, db moves once, and
//             told                  3 N / STEPS words with time_dim=1, 3 C R with time_dim=2, but for the last tiles;
//                                   N / STEPS read, or C R, and twice as many for each tile more that is looked back
//             flags                 2 stores and one load of up to 32 a tile, and one atomic for its ticket
// Limits    A chain of one tile is what stages 41 and 44 do better. A channel alone as [B, T, 1] is one lane's: as
//           [B, 1, T] it is a block's. Products of a above 3e38 in a tile are infinite, whatever b was.
// Run       python -m stages run 45

#include <type_traits>

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/ordering.h"
#include "common/tile.h"
#include "common/vector.h"
#include "common/view.h"

constexpr unsigned ALL = 0xffffffff;
constexpr int LINE = 32;    // words of 128 bytes: the ticket has a line for itself, the flags come after it
constexpr int WARPS = 8;    // of a tile of one channel, at most
constexpr int GROUPS = 4;   // of 16 bytes that a lane takes of each tensor in it
template <typename T>
constexpr int WIDE = 16 / int(sizeof(T));  // steps of such a group
template <typename T>
constexpr int LANES = sizeof(T) < 4 ? 2 : 1;  // channels of a lane in a strip
template <typename T>
constexpr int STEPS = sizeof(T) == 8 ? 32 : 64;  // of a tile of a strip: 128 registers, 16 KiB a warp
template <typename T>
constexpr int STEPS_BACKWARD = STEPS<T> * 3 / 4;  // of three tensors, 144 registers

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

// The same bytes as another type.
template <typename To, typename From>
__device__ __forceinline__ To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return *reinterpret_cast<const To*>(&from);
}

// ---------------------------------------------------------------------------------------------------------------------
// What a piece of time makes of the state before it.
template <typename Sum>
struct Map {
  Sum a = 1, b = 0;  // of no step

  // b is where the piece leads from 0, also if a, a product, has overflowed: infinity times 0 would be NaN.
  __device__ __forceinline__ Sum operator()(Sum state) const { return state == 0 ? b : a * state + b; }
};

// Two pieces, the older one first: not the same as the other way round.
template <typename Sum>
__device__ __forceinline__ Map<Sum> combine(Map<Sum> older, Map<Sum> newer) {
  return {newer.a * older.a, newer(older.b)};
}

template <typename Sum>
__device__ __forceinline__ Map<Sum> shuffle(Map<Sum> map, int lane) {
  return {__shfl_sync(ALL, map.a, lane), __shfl_sync(ALL, map.b, lane)};
}

template <typename Sum>
__device__ __forceinline__ Map<Sum> shuffle_up(Map<Sum> map, int distance) {
  return {__shfl_up_sync(ALL, map.a, distance), __shfl_up_sync(ALL, map.b, distance)};
}

// ---------------------------------------------------------------------------------------------------------------------
// A tile among those of its chain, and what they tell each other.
enum Flag : unsigned { NOTHING, MAP, STATE };  // what a tile has told: its map, or also the state after it
enum Told { A, B, AFTER };                     // the map's two parts, and the state

template <typename Sum>
struct Place {
  int64_t chain, tile, tiles;
  unsigned* flags;  // of the chain's tiles
  View<Sum, 4> told;  // [chain, tile, what, channel]

  // Takes the next ticket. Chains go side by side, so that those before it in its own chain are further on than it.
  __device__ __forceinline__ Place(const View<float, 1>& words, const View<Sum, 4>& told)
      : tiles(told.size[1]), told(told) {
    __shared__ unsigned ticket;
    unsigned* const first = reinterpret_cast<unsigned*>(words.data);
    if (threadIdx.x == 0) ticket = atomicAdd(first, 1u);
    __syncthreads();  // the ticket is there
    chain = ticket % told.size[0], tile = ticket / told.size[0];
    flags = first + LINE + chain * tiles;
  }

  __device__ __forceinline__ bool last() const { return tile + 1 == tiles; }

  // By one warp: what its lanes have written to `told` is for all to see.
  __device__ __forceinline__ void tell(Flag flag) const {
    __syncwarp();  // all lanes have written
    if (lane_id() == 0) store_release(&flags[tile], flag);
  }

  // By one warp: the newest tile before this one that has told its state; all since then have told their maps.
  __device__ __forceinline__ int64_t newest_state() const {
    int64_t end = tile;
    while (true) {
      const int64_t other = end - 1 - lane_id();
      const unsigned flag = other >= 0 ? load_acquire(&flags[other]) : unsigned(NOTHING);
      const unsigned states = __ballot_sync(ALL, flag == STATE);
      const unsigned stops = __ballot_sync(ALL, flag != MAP);
      const int nearest = __ffs(int(stops)) - 1;
      if (stops == 0) {
        end -= 32;  // further back
      } else if (states >> nearest & 1) {
        __syncwarp();  // what a lane has seen, all lanes have seen
        return end - 1 - nearest;
      } else {
        spin_hint();
        end = tile;  // from the beginning: nearer ones may have told their states by now
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// A lane's channels in a strip: word by word, or if they lie side by side, 4 bytes of 16-bit numbers at once.
template <typename T, bool TOGETHER>
struct Strip {
  using Words = Vector<std::remove_const_t<T>, LANES<T>>;
  T* data;
  int64_t stride_t, stride_c;
  int rows, cols;  // that are there from here on

  __device__ __forceinline__ Strip(const View<T, 3>& x, int64_t batch, int64_t t, int64_t channel, int steps)
      : data(&x(batch, t, channel)),
        stride_t(x.stride[1]),
        stride_c(x.stride[2]),
        rows(int(min(x.size[1] - t, int64_t(steps)))),
        cols(int(min(max(x.size[2] - channel, int64_t(0)), int64_t(LANES<T>)))) {}

  // Asks for all words; `outside` stands for those past an edge.
  template <int N>
  __device__ __forceinline__ void load(Words (&words)[N], T outside) const {
    const T* from = data;
    UNROLL
    for (int r = 0; r < N; ++r, from += stride_t) {
      UNROLL
      for (int i = 0; i < LANES<T>; ++i) words[r][i] = outside;
      if constexpr (TOGETHER) {
        if (r < rows && cols > 0) words[r] = load_vector<LANES<T>>(from);
      } else {
        UNROLL
        for (int i = 0; i < LANES<T>; ++i) {
          if (r < rows && i < cols) words[r][i] = from[i * stride_c];
        }
      }
    }
  }

  __device__ __forceinline__ void store(int r, const Words& words) const {
    T* const to = data + r * stride_t;
    if constexpr (TOGETHER) {
      if (r < rows && cols > 0) store_vector(to, words);
    } else {
      UNROLL
      for (int i = 0; i < LANES<T>; ++i) {
        if (r < rows && i < cols) to[i * stride_c] = words[i];
      }
    }
  }
};

// Of a lane's channels the states before a tile, from its maps; `state` holds those before the first tile.
template <typename Sum, int N>
__device__ __forceinline__ void look_back(const Place<Sum>& place, const Map<Sum> (&own)[N], Vector<Sum, N>& state) {
  constexpr int AT_ONCE = 8;  // maps on their way
  const auto slot = [&](int64_t tile, Told what) { return &place.told(place.chain, tile, what, lane_id() * N); };
  Vector<Sum, N> part;
  if (place.tile > 0) {
    if (!place.last()) {
      UNROLL
      for (int i = 0; i < N; ++i) part[i] = own[i].a;
      store_vector(slot(place.tile, A), part);
      UNROLL
      for (int i = 0; i < N; ++i) part[i] = own[i].b;
      store_vector(slot(place.tile, B), part);
      place.tell(MAP);
    }
    const int64_t known = place.newest_state();
    state = load_vector<N>(slot(known, AFTER));
#pragma unroll 1
    for (int64_t first = known + 1; first < place.tile; first += AT_ONCE) {
      Vector<Sum, N> a[AT_ONCE], b[AT_ONCE];
      UNROLL
      for (int k = 0; k < AT_ONCE; ++k) {
        if (first + k < place.tile) a[k] = load_vector<N>(slot(first + k, A)), b[k] = load_vector<N>(slot(first + k, B));
      }
      UNROLL
      for (int k = 0; k < AT_ONCE; ++k) {
        if (first + k < place.tile) {
          UNROLL
          for (int i = 0; i < N; ++i) state[i] = Map<Sum>{a[k][i], b[k][i]}(state[i]);
        }
      }
    }
  }
  if (!place.last()) {
    UNROLL
    for (int i = 0; i < N; ++i) part[i] = own[i](state[i]);
    store_vector(slot(place.tile, AFTER), part);
    place.tell(STATE);
  }
}

// grid (chains * tiles), block (32)
template <typename T, bool TOGETHER>
__global__ void __launch_bounds__(32) scan_strips(View<const T, 3> a,                  // [batch, seq, channels]
                                                  View<const T, 3> b,                  // [batch, seq, channels]
                                                  View<const T, 2> h0,                 // [batch, channels], or empty
                                                  View<T, 3> h,                        // [batch, seq, channels]
                                                  View<float, 1> words,                // ticket and flags, zeros
                                                  View<Accumulator<T>, 4> told) {      // [chain, tile, what, channel]
  using Sum = Accumulator<T>;
  constexpr int N = LANES<T>;
  const Place<Sum> place(words, told);
  const int64_t strips = ceil_div(h.size[2], 32 * N), batch = place.chain / strips;
  const int64_t channel = (place.chain % strips * 32 + lane_id()) * N, t0 = place.tile * STEPS<T>;

  const Strip<T, TOGETHER> h_strip(h, batch, t0, channel, STEPS<T>);
  Vector<T, N> a_words[STEPS<T>], b_words[STEPS<T>];
  Strip<const T, TOGETHER>(a, batch, t0, channel, STEPS<T>).load(a_words, T(1.0f));  // (1, 0) changes nothing
  Strip<const T, TOGETHER>(b, batch, t0, channel, STEPS<T>).load(b_words, T(0.0f));

  Vector<Sum, N> state;
  UNROLL
  for (int i = 0; i < N; ++i) {
    state[i] = place.tile == 0 && h0.size[0] && i < h_strip.cols ? Sum(h0(batch, channel + i)) : Sum(0);
  }
  Map<Sum> own[N];
  UNROLL
  for (int r = 0; r < STEPS<T>; ++r) {
    UNROLL
    for (int i = 0; i < N; ++i) {
      own[i].a = Sum(a_words[r][i]) * own[i].a;
      own[i].b = Sum(a_words[r][i]) * own[i].b + Sum(b_words[r][i]);
    }
  }
  look_back(place, own, state);

  UNROLL
  for (int r = 0; r < STEPS<T>; ++r) {
    Vector<T, N> h_words;
    UNROLL
    for (int i = 0; i < N; ++i) {
      state[i] = Sum(a_words[r][i]) * state[i] + Sum(b_words[r][i]);
      h_words[i] = T(state[i]);
    }
    h_strip.store(r, h_words);
  }
}

// All views run from the last step to the first, as the scan does: h[t + 1] is the state before step t. What is handed
// on is a[t] lambda[t], what later steps give to the next state: a step makes a (g + carry) of it.
// grid (chains * tiles), block (32)
template <typename T, bool TOGETHER>
__global__ void __launch_bounds__(32) scan_strips_backward(View<const T, 3> g,              // [batch, seq, channels]
                                                           View<const T, 3> a,              // [batch, seq, channels]
                                                           View<const T, 3> h,              // [batch, seq, channels]
                                                           View<const T, 2> h0,             // [batch, channels], or empty
                                                           View<T, 3> da,                   // [batch, seq, channels]
                                                           View<T, 3> db,                   // [batch, seq, channels]
                                                           View<T, 2> dh0,                  // [batch, channels], or empty
                                                           View<float, 1> words,            // ticket and flags, zeros
                                                           View<Accumulator<T>, 4> told) {  // [chain, tile, what, channel]
  using Sum = Accumulator<T>;
  constexpr int N = LANES<T>, S = STEPS_BACKWARD<T>;
  const Place<Sum> place(words, told);
  const int64_t strips = ceil_div(da.size[2], 32 * N), batch = place.chain / strips;
  const int64_t channel = (place.chain % strips * 32 + lane_id()) * N, t0 = place.tile * S;

  const Strip<T, TOGETHER> da_strip(da, batch, t0, channel, S), db_strip(db, batch, t0, channel, S);
  Vector<T, N> g_words[S], a_words[S], h_words[S];
  Strip<const T, TOGETHER>(g, batch, t0, channel, S).load(g_words, T(0.0f));
  Strip<const T, TOGETHER>(a, batch, t0, channel, S).load(a_words, T(1.0f));
  Strip<const T, TOGETHER>(h, batch, t0 + 1, channel, S).load(h_words, T(0.0f));

  Vector<Sum, N> carry;
  Vector<T, N> start;  // the state before the first step
  Map<Sum> own[N];
  UNROLL
  for (int i = 0; i < N; ++i) {
    carry[i] = 0;
    start[i] = place.last() && h0.size[0] && i < da_strip.cols ? h0(batch, channel + i) : T(0.0f);
  }
  UNROLL
  for (int r = 0; r < S; ++r) {
    UNROLL
    for (int i = 0; i < N; ++i) {
      own[i].a = Sum(a_words[r][i]) * own[i].a;
      own[i].b = Sum(a_words[r][i]) * (Sum(g_words[r][i]) + own[i].b);
    }
  }
  look_back(place, own, carry);

  UNROLL
  for (int r = 0; r < S; ++r) {
    Vector<T, N> da_words, db_words;
    UNROLL
    for (int i = 0; i < N; ++i) {
      const Sum lambda = Sum(g_words[r][i]) + carry[i];
      const T before = place.last() && r + 1 == da_strip.rows ? start[i] : h_words[r][i];
      carry[i] = Sum(a_words[r][i]) * lambda;
      da_words[i] = T(lambda * Sum(before));
      db_words[i] = T(lambda);
    }
    da_strip.store(r, da_words), db_strip.store(r, db_words);
  }
  if (place.last() && dh0.size[0]) {
    UNROLL
    for (int i = 0; i < N; ++i) {
      if (i < da_strip.cols) dh0(batch, channel + i) = T(carry[i]);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// One row of a tensor. STEP: 1 or -1 if steps lie side by side in this direction, in groups of 16 bytes, 0 if anyhow.
template <typename T, int STEP>
struct Row {
  using Items = Vector<std::remove_const_t<T>, WIDE<T>>;
  using Words = Vector<uint32_t, 4>;  // on their way: to unpack 16-bit numbers, or to turn them around, is to wait
  T* data;
  int64_t seq, stride;

  __device__ __forceinline__ Row(const View<T, 3>& x, int64_t batch, int64_t channel)
      : data(&x(batch, 0, channel)), seq(x.size[1]), stride(STEP ? STEP : x.stride[1]) {}

  // Asks for the group that begins at step t.
  __device__ __forceinline__ Words load(int64_t t, T outside) const {
    Items items;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) items[i] = outside;
    Words words = bits_of<Words>(items);
    if constexpr (STEP) {
      if (t < seq) words = load_vector<4>(reinterpret_cast<const uint32_t*>(group(t)));
    } else {
      UNROLL
      for (int i = 0; i < WIDE<T>; ++i) {
        if (t + i < seq) items[i] = data[(t + i) * stride];
      }
      words = bits_of<Words>(items);
    }
    return words;
  }

  __device__ __forceinline__ void store(int64_t t, const Items& items) const {
    if constexpr (STEP) {
      if (t < seq) store_vector(group(t), turned(items));
    } else {
      UNROLL
      for (int i = 0; i < WIDE<T>; ++i) {
        if (t + i < seq) data[(t + i) * stride] = items[i];
      }
    }
  }

  // In the order of time from that of memory, and back.
  static __device__ __forceinline__ Items turned(const Items& items) {
    Items result;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) result[i] = items[STEP >= 0 ? i : WIDE<T> - 1 - i];
    return result;
  }
  static __device__ __forceinline__ Items in_time(const Words& words) { return turned(bits_of<Items>(words)); }

 private:
  __device__ __forceinline__ T* group(int64_t t) const { return STEP > 0 ? data + t : data - t - (WIDE<T> - 1); }
};

// The step at which a thread's group begins.
template <typename T>
__device__ __forceinline__ int64_t step_of(int64_t tile, int group) {
  const int64_t piece = (tile * (blockDim.x / 32) + warp_id()) * GROUPS + group;
  return (piece * 32 + lane_id()) * WIDE<T>;
}

// The state before a tile of one channel, and the one after it, from its map; `first` is before the first tile.
template <typename Sum>
struct Around {
  Sum before, after;
};

template <typename Sum>
__device__ __forceinline__ Around<Sum> look_back(const Place<Sum>& place, Map<Sum> own, Sum first) {
  const auto slot = [&](int64_t tile, Told what) -> Sum& { return place.told(place.chain, tile, what, 0); };
  Sum state = first;
  if (place.tile > 0) {
    if (!place.last()) {
      if (lane_id() == 0) slot(place.tile, A) = own.a, slot(place.tile, B) = own.b;
      place.tell(MAP);
    }
    const int64_t known = place.newest_state();
    state = slot(known, AFTER);
    for (int64_t next = known + 1; next < place.tile; next += 32) {
      const int count = int(min(place.tile - next, int64_t(32)));
      Map<Sum> map;
      if (lane_id() < count) map = {slot(next + lane_id(), A), slot(next + lane_id(), B)};
#pragma unroll 4
      for (int k = 0; k < count; ++k) state = shuffle(map, k)(state);
    }
  }
  const Sum after = own(state);
  if (!place.last()) {
    if (lane_id() == 0) slot(place.tile, AFTER) = after;
    place.tell(STATE);
  }
  return {state, after};
}

// The state before each of a thread's groups, from their maps, and that after the tile.
template <typename Sum>
__device__ __forceinline__ Sum states_before(const Place<Sum>& place, const Map<Sum> (&own)[GROUPS], Sum first,
                                             Sum (&before)[GROUPS]) {
  __shared__ Map<Sum> of_warps[WARPS];
  __shared__ Around<Sum> of_tile;
  Map<Sum> inside[GROUPS], whole[GROUPS], of_warp;
  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    Map<Sum> map = own[v];
    UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      const Map<Sum> older = shuffle_up(map, distance);
      if (lane_id() >= distance) map = combine(older, map);  // the map of 2 distance lanes, or of all from lane 0 on
    }
    whole[v] = shuffle(map, 31), inside[v] = shuffle_up(map, 1);
    of_warp = combine(of_warp, whole[v]);
  }
  if (lane_id() == 0) of_warps[warp_id()] = of_warp;
  __syncthreads();  // the maps of all warps are there
  if (warp_id() == 0) {
    Map<Sum> of_all;
    for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) of_all = combine(of_all, of_warps[warp]);
    const Around<Sum> around = look_back(place, of_all, first);
    if (lane_id() == 0) of_tile = around;
  }
  __syncthreads();  // the state before the tile is there
  Sum state = of_tile.before;
  for (int warp = 0; warp < warp_id(); ++warp) state = of_warps[warp](state);
  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    before[v] = lane_id() > 0 ? inside[v](state) : state;
    state = whole[v](state);
  }
  return of_tile.after;
}

// grid (chains * tiles), block (32 W)
template <typename T, int STEP>
__global__ void __launch_bounds__(32 * WARPS, 4) scan_rows(View<const T, 3> a,              // [batch, seq, channels]
                                                           View<const T, 3> b,              // [batch, seq, channels]
                                                           View<const T, 2> h0,             // [batch, channels], or empty
                                                           View<T, 3> h,                    // [batch, seq, channels]
                                                           View<float, 1> words,            // ticket and flags, zeros
                                                           View<Accumulator<T>, 4> told) {  // [chain, tile, what, 1]
  using Sum = Accumulator<T>;
  const Place<Sum> place(words, told);
  const int64_t batch = place.chain / h.size[2], channel = place.chain % h.size[2];

  const Row<const T, STEP> a_row(a, batch, channel), b_row(b, batch, channel);
  const Row<T, STEP> h_row(h, batch, channel);
  Vector<uint32_t, 4> a_words[GROUPS], b_words[GROUPS];
  UNROLL
  for (int v = 0; v < GROUPS; ++v) a_words[v] = a_row.load(step_of<T>(place.tile, v), T(1.0f));  // (1, 0)
  UNROLL
  for (int v = 0; v < GROUPS; ++v) b_words[v] = b_row.load(step_of<T>(place.tile, v), T(0.0f));  // changes nothing

  const Sum first = place.tile == 0 && h0.size[0] ? Sum(h0(batch, channel)) : Sum(0);
  Map<Sum> own[GROUPS];
  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    const auto a_now = a_row.in_time(a_words[v]), b_now = b_row.in_time(b_words[v]);
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      own[v].a = Sum(a_now[i]) * own[v].a;
      own[v].b = Sum(a_now[i]) * own[v].b + Sum(b_now[i]);
    }
  }
  Sum before[GROUPS];
  states_before(place, own, first, before);

  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    const auto a_now = a_row.in_time(a_words[v]), b_now = b_row.in_time(b_words[v]);
    Sum state = before[v];
    Vector<T, WIDE<T>> h_now;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      state = Sum(a_now[i]) * state + Sum(b_now[i]);
      h_now[i] = T(state);
    }
    h_row.store(step_of<T>(place.tile, v), h_now);
  }
}

// Time is turned around as in scan_strips_backward.
// grid (chains * tiles), block (32 W)
template <typename T, int STEP>
__global__ void __launch_bounds__(32 * WARPS, 2) scan_rows_backward(View<const T, 3> g,     // [batch, seq, channels]
                                                                    View<const T, 3> a,     // [batch, seq, channels]
                                                                    View<const T, 3> h,     // [batch, seq, channels]
                                                                    View<const T, 2> h0,    // [batch, channels], or empty
                                                                    View<T, 3> da,          // [batch, seq, channels]
                                                                    View<T, 3> db,          // [batch, seq, channels]
                                                                    View<T, 2> dh0,         // [batch, channels], or empty
                                                                    View<float, 1> words,   // ticket and flags, zeros
                                                                    View<Accumulator<T>, 4> told) {  // [chain, tile, what, 1]
  using Sum = Accumulator<T>;
  const Place<Sum> place(words, told);
  const int64_t batch = place.chain / da.size[2], channel = place.chain % da.size[2], seq = da.size[1];

  const Row<const T, STEP> g_row(g, batch, channel), a_row(a, batch, channel), h_row(h, batch, channel);
  const Row<T, STEP> da_row(da, batch, channel), db_row(db, batch, channel);
  const T start = h0.size[0] ? h0(batch, channel) : T(0.0f);  // stands where h has ended: before the first step
  Vector<uint32_t, 4> g_words[GROUPS], a_words[GROUPS], h_words[GROUPS];
  UNROLL
  for (int v = 0; v < GROUPS; ++v) g_words[v] = g_row.load(step_of<T>(place.tile, v), T(0.0f));
  UNROLL
  for (int v = 0; v < GROUPS; ++v) a_words[v] = a_row.load(step_of<T>(place.tile, v), T(1.0f));
  UNROLL
  for (int v = 0; v < GROUPS; ++v) h_words[v] = h_row.load(step_of<T>(place.tile, v), start);
  const int64_t next = step_of<T>(place.tile, GROUPS);  // in lane 0 the step after those of its warp
  const T after_warp = lane_id() == 0 && next < seq ? h(batch, next, channel) : start;

  Map<Sum> own[GROUPS];
  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    const auto g_now = g_row.in_time(g_words[v]), a_now = a_row.in_time(a_words[v]);
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      own[v].a = Sum(a_now[i]) * own[v].a;
      own[v].b = Sum(a_now[i]) * (Sum(g_now[i]) + own[v].b);
    }
  }
  Sum before[GROUPS];
  const Sum after_tile = states_before(place, own, Sum(0), before);
  if (threadIdx.x == 0 && place.last() && dh0.size[0]) dh0(batch, channel) = T(after_tile);

  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    const auto g_now = g_row.in_time(g_words[v]), a_now = a_row.in_time(a_words[v]), h_now = h_row.in_time(h_words[v]);
    // The state after a lane's steps is the first of the next lane; lane 0 has that of the next group for lane 31.
    const Sum next_group = v + 1 < GROUPS ? Sum(h_row.in_time(h_words[v + 1 < GROUPS ? v + 1 : 0])[0]) : Sum(after_warp);
    const Sum after = __shfl_sync(ALL, lane_id() == 0 ? next_group : Sum(h_now[0]), (lane_id() + 1) % 32);
    Sum carry = before[v];
    Vector<T, WIDE<T>> da_now, db_now;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      const Sum lambda = Sum(g_now[i]) + carry;
      da_now[i] = T(lambda * (i + 1 < WIDE<T> ? Sum(h_now[i + 1 < WIDE<T> ? i + 1 : 0]) : after));
      db_now[i] = T(lambda);
      carry = Sum(a_now[i]) * lambda;
    }
    da_row.store(step_of<T>(place.tile, v), da_now), db_row.store(step_of<T>(place.tile, v), db_now);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
template <int DIM, typename... Views>
bool in_groups(const Views&... views) {
  return (in_wide_groups(views, DIM) && ...);
}

// How time is cut is said by `told`: [chain, tile, 3, channel], one channel if a chain is a row. Checked, since nothing
// of a kernel would tell.
template <typename T>
void check(const View<T, 3>& x, const View<float, 1>& words, const View<Accumulator<T>, 4>& told, int steps) {
  const int64_t width = told.size[3], strips = width == 1 ? x.size[2] : ceil_div(x.size[2], width);
  const int64_t most = width == 1 ? GROUPS * 32 * WIDE<T> * WARPS : steps;
  if ((width != 1 && width != 32 * LANES<T>) || told.size[2] != 3 || told.size[0] != x.size[0] * strips ||
      told.size[1] * most < x.size[1] || words.size[0] < LINE + told.size[0] * told.size[1]) {
    throw std::invalid_argument("scan_lookback: its scratch memory does not fit the problem");
  }
}

// As many warps as let the tiles that there are hold all steps.
template <typename T>
dim3 row_block(int64_t seq, int64_t tiles) {
  return dim3(unsigned(32 * max(ceil_div(ceil_div(seq, GROUPS * 32 * WIDE<T>), tiles), int64_t(1))));
}

void scan(Input<3> a, Input<3> b, Input<2> h0, Output<3> h, InOut<1> words, Output<4> told, bool reverse,
          Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? flipped(x, 1) : x; };
    const auto av = a.as<T>(), bv = b.as<T>();
    const auto hv = h.as<T>();
    const auto told_view = told.as<Accumulator<T>>();
    check(hv, words.as<float>(), told_view, STEPS<T>);
    const auto run = [&]<auto KERNEL>(dim3 block) {
      launch<KERNEL>({told.size[0] * told.size[1]}, block, 0, stream, in_time(av), in_time(bv), h0.as<T>(), in_time(hv),
                     words.as<float>(), told_view);
    };
    if (told.size[3] == 1) {
      const dim3 block = row_block<T>(h.size[1], told.size[1]);
      if (!in_groups<1>(av, bv, hv)) run.template operator()<scan_rows<T, 0>>(block);
      else if (reverse) run.template operator()<scan_rows<T, -1>>(block);
      else run.template operator()<scan_rows<T, 1>>(block);
    } else {
      if (in_groups<2>(av, bv, hv)) run.template operator()<scan_strips<T, true>>(dim3(32));
      else run.template operator()<scan_strips<T, false>>(dim3(32));
    }
  });
}

void scan_backward(Input<3> g, Input<3> a, Input<3> h, Input<2> h0, Output<3> da, Output<3> db, Output<2> dh0,
                   InOut<1> words, Output<4> told, bool reverse, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? x : flipped(x, 1); };  // against the direction of the forward
    const auto gv = g.as<T>(), av = a.as<T>(), hv = h.as<T>();
    const auto dav = da.as<T>(), dbv = db.as<T>();
    const auto told_view = told.as<Accumulator<T>>();
    check(dav, words.as<float>(), told_view, STEPS_BACKWARD<T>);
    const auto run = [&]<auto KERNEL>(dim3 block) {
      launch<KERNEL>({told.size[0] * told.size[1]}, block, 0, stream, in_time(gv), in_time(av), in_time(hv), h0.as<T>(),
                     in_time(dav), in_time(dbv), dh0.as<T>(), words.as<float>(), told_view);
    };
    if (told.size[3] == 1) {
      const dim3 block = row_block<T>(h.size[1], told.size[1]);
      if (!in_groups<1>(gv, av, hv, dav, dbv)) run.template operator()<scan_rows_backward<T, 0>>(block);
      else if (reverse) run.template operator()<scan_rows_backward<T, 1>>(block);
      else run.template operator()<scan_rows_backward<T, -1>>(block);
    } else {
      if (in_groups<2>(gv, av, hv, dav, dbv)) run.template operator()<scan_strips_backward<T, true>>(dim3(32));
      else run.template operator()<scan_strips_backward<T, false>>(dim3(32));
    }
  });
}
