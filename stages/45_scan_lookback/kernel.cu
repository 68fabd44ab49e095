// Stage 45: the first-order scan in one pass, tiles of time handing on their state
//
// Problem   h[t] = a[t] h[t - 1] + b[t] for each batch and channel, from h0 or 0: a, b, h [B, T, D], h0 [B, D]; any
//           strides, any direction. Backward: lambda[t] = g[t] + a[t + 1] lambda[t + 1];  db = lambda,
//           da[t] = lambda[t] h[t - 1],  dh0 = a[0] lambda[0].
// Before    In stages 40 to 44 one block goes through all of a channel's time, so that a few long rows leave most of the
//           card idle. To cut time between blocks took two more launches, or to read a and b twice.
// Idea      A tile of time is a block's. It reads its steps once and keeps them in shared memory; it tells what they make
//           of any state, their map a state + b; it looks back to the newest tile that has told the state after it, and
//           applies the maps since then. So nobody waits for a whole chain of blocks: maps are told as soon as they are
//           read (Merrill and Garland, Single-pass parallel prefix scan with decoupled look-back, 2016).
//           Progress: blocks take tiles by a ticket, so in the order in which they begin, and a chain's from the first to
//           the last. A block waits only for blocks that run already, and the oldest of those waits for nobody.
//           Repeatable: how far a block looks back is chance, so maps of tiles are never combined with each other, but
//           applied to the state one by one: wherever that begins, the same operations in the same order. It costs one
//           multiplication and addition after the other, 4 cycles a tile, where a tree would take log2 of them.
// Mapping   chain: what is scanned by itself. With time_dim=1 a strip of channels, which is a warp's: a lane walks through
//           one channel of STEPS steps. With time_dim=2 one channel: a lane has GROUPS times 16 bytes of steps, joined as
//           in stage 44; a tile is up to WARPS warps, fewer if so few would have work.
// Cost      float32, N = B T D elements, chains of R tiles, all blocks one after another, so that the tile before has told
//           the state; each word of a, b, h, g, da, db moves once as in stages 41 and 44, 16 bytes a lane, and besides
//             told    3 words a tile and channel are stored, 1 is read; 2 more are read for each tile more looked back:
//                     3 / 64 of the words of a strip's tile, hardly any of a row's
//             flags   2 stores of one word and one load of up to 32 words a tile; and one atomic, the ticket
//             barriers  1 a tile of a strip, 3 a tile of a row
// Limits    Chains of one tile are what stages 41 and 44 are there for. A channel alone as [B, T, 1] is one lane's: as
//           [B, 1, T] it is a block's. Products of a above 3e38 in a tile are infinite, whatever b was.
// Run       python -m stages run 45

#include <type_traits>

#include "common/async_copy.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/ordering.h"
#include "common/tile.h"
#include "common/vector.h"
#include "common/view.h"

constexpr unsigned ALL = 0xffffffff;
constexpr int LINE = 32;   // words of 128 bytes: the ticket has a line for itself, the flags come after it
constexpr int WARPS = 8;   // of a tile of one channel, at most
constexpr int GROUPS = 4;  // of 16 bytes that a lane takes of each tensor in it
template <typename T>
constexpr int WIDE = 16 / int(sizeof(T));  // steps of such a group
constexpr int STRIP = 32;                  // channels of a strip
template <typename T>
constexpr int STEPS = 256 / int(sizeof(T));  // of its tiles: 8 KiB of each tensor, so that 9 to 13 fit a multiprocessor

template <typename T>
using Piece = T[STEPS<T>][STRIP];  // [step][channel]: in a row every lane has a bank of its own

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

// The same bytes as another type.
template <typename To, typename From>
__device__ __forceinline__ To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return *reinterpret_cast<const To*>(&from);
}

// ---------------------------------------------------------------------------------------------------------------------
// What a piece of time makes of the state before it. The product is kept in double: rounded to float at each step, with a
// a little below 1, it always loses to the same side, and a thousand tiles add that up.
template <typename Sum>
struct Map {
  double a = 1;
  Sum b = 0;  // of no step

  // b is where the piece leads from 0, also if a, a product, has overflowed: infinity times 0 would be NaN.
  __device__ __forceinline__ Sum operator()(Sum state) const { return state == 0 ? b : Sum(a) * state + b; }
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
  unsigned* flags;    // of the chain's tiles
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
    __syncwarp();  // and they go on together
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
// A tile of a strip: where it is, and how much of it is there. WHOLE: 16 bytes lie together.
template <typename T, bool WHOLE>
struct Strip {
  static constexpr int ACROSS = STRIP / WIDE<T>, STEP = 32 / ACROSS;  // lanes for a row, and rows at a time
  static constexpr int BATCH = 16;                                    // words on their way in registers
  T* data;
  int64_t stride_t, stride_c;
  int rows, cols;

  __device__ __forceinline__ Strip(const View<T, 3>& x, int64_t batch, int64_t t, int64_t channel)
      : data(&x(batch, t, channel)),
        stride_t(x.stride[1]),
        stride_c(x.stride[2]),
        rows(int(min(x.size[1] - t, int64_t(STEPS<T>)))),
        cols(int(min(x.size[2] - channel, int64_t(STRIP)))) {}

  // Starts the copies of all that is there; a warp's.
  template <typename To>
  __device__ __forceinline__ void fetch(To& tile) const {
    const int lane = lane_id();
    if constexpr (WHOLE) {
      const int c = lane % ACROSS * WIDE<T>;
      const T* from = data + lane / ACROSS * stride_t + c;
#pragma unroll 8
      for (int r = lane / ACROSS; r < rows; r += STEP, from += STEP * stride_t) {
        if (c < cols) async_copy<16>(&tile[r][c], from);
      }
    } else if (lane < cols) {
      const T* from = data + lane * stride_c;
#pragma unroll BATCH
      for (int r = 0; r < rows; ++r, from += stride_t) {
        if constexpr (sizeof(T) >= 4) async_copy<sizeof(T)>(&tile[r][lane], from);
        else tile[r][lane] = *from;  // cp.async takes no less than 4 bytes
      }
    }
  }

  __device__ __forceinline__ void store(const Piece<T>& tile) const {
    const int lane = lane_id();
    if constexpr (WHOLE) {
      const int c = lane % ACROSS * WIDE<T>;
      T* to = data + lane / ACROSS * stride_t + c;
#pragma unroll 8
      for (int r = lane / ACROSS; r < rows; r += STEP, to += STEP * stride_t) {
        if (c < cols) store_vector(to, load_vector<WIDE<T>>(&tile[r][c]));
      }
    } else if (lane < cols) {
      T* to = data + lane * stride_c;
#pragma unroll 8
      for (int r = 0; r < rows; ++r, to += stride_t) *to = tile[r][lane];
    }
  }
};

// The state of a lane's channel before a tile, from the tile's map; `first` is before the first one.
template <typename Sum>
__device__ __forceinline__ Sum look_back(const Place<Sum>& place, Map<Sum> own, Sum first) {
  constexpr int AT_ONCE = 8;  // maps on their way
  const auto told = [&](int64_t tile, Told what) -> Sum& { return place.told(place.chain, tile, what, lane_id()); };
  Sum state = first;
  if (place.tile > 0) {
    if (!place.last()) {
      told(place.tile, A) = Sum(own.a), told(place.tile, B) = own.b;
      place.tell(MAP);
    }
    const int64_t known = place.newest_state();
    state = told(known, AFTER);
#pragma unroll 1
    for (int64_t next = known + 1; next < place.tile; next += AT_ONCE) {
      const int count = int(min(place.tile - next, int64_t(AT_ONCE)));
      Map<Sum> maps[AT_ONCE];
      UNROLL
      for (int k = 0; k < AT_ONCE; ++k) {
        if (k < count) maps[k] = {told(next + k, A), told(next + k, B)};
      }
      UNROLL
      for (int k = 0; k < AT_ONCE; ++k) {
        if (k < count) state = maps[k](state);
      }
    }
  }
  if (!place.last()) {
    told(place.tile, AFTER) = own(state);
    place.tell(STATE);
  }
  return state;
}

// grid (chains * tiles), block (32)
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(32) scan_strips(View<const T, 3> a,              // [batch, seq, channels]
                                                  View<const T, 3> b,              // [batch, seq, channels]
                                                  View<const T, 2> h0,             // [batch, channels], or empty
                                                  View<T, 3> h,                    // [batch, seq, channels]
                                                  View<float, 1> words,            // ticket and flags, zeros
                                                  View<Accumulator<T>, 4> told) {  // [chain, tile, what, channel]
  using Sum = Accumulator<T>;
  alignas(16) __shared__ Piece<T> a_tile, b_tile;
  const Place<Sum> place(words, told);
  const int64_t strips = ceil_div(h.size[2], STRIP), batch = place.chain / strips;
  const int64_t channel0 = place.chain % strips * STRIP, t0 = place.tile * STEPS<T>;
  const int lane = lane_id();

  const Strip<T, WHOLE> h_strip(h, batch, t0, channel0);
  Strip<const T, WHOLE>(a, batch, t0, channel0).fetch(a_tile);
  Strip<const T, WHOLE>(b, batch, t0, channel0).fetch(b_tile);
  async_commit();
  const bool own = lane < h_strip.cols;
  Sum state = place.tile == 0 && own && h0.size[0] ? Sum(h0(batch, channel0 + lane)) : Sum(0);
  async_wait<0>();
  __syncwarp();  // all lanes' copies are there

  Map<Sum> map;
  if (own) {
#pragma unroll 16
    for (int r = 0; r < h_strip.rows; ++r) {
      const Sum a_now = Sum(a_tile[r][lane]);
      map = {double(a_now) * map.a, a_now * map.b + Sum(b_tile[r][lane])};
    }
  }
  state = look_back(place, map, state);
  if (own) {
#pragma unroll 16
    for (int r = 0; r < h_strip.rows; ++r) {
      state = Sum(a_tile[r][lane]) * state + Sum(b_tile[r][lane]);
      b_tile[r][lane] = T(state);  // h takes the place of b
    }
  }
  __syncwarp();  // all channels of h are there
  h_strip.store(b_tile);
}

// All views run from the last step to the first, as the scan does: h[t + 1] is the state before step t. What is handed
// on is a[t] lambda[t], what later steps give to the next state: a step makes a (g + carry) of it.
// grid (chains * tiles), block (32)
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(32)
    scan_strips_backward(View<const T, 3> g,              // [batch, seq, channels]
                         View<const T, 3> a,              // [batch, seq, channels]
                         View<const T, 3> h,              // [batch, seq, channels]
                         View<const T, 2> h0,             // [batch, channels], or empty
                         View<T, 3> da,                   // [batch, seq, channels]
                         View<T, 3> db,                   // [batch, seq, channels]
                         View<T, 2> dh0,                  // [batch, channels], or empty
                         View<float, 1> words,            // ticket and flags, zeros
                         View<Accumulator<T>, 4> told) {  // [chain, tile, what, channel]
  using Sum = Accumulator<T>;
  alignas(16) __shared__ Piece<T> g_tile, a_tile, h_tile;
  const Place<Sum> place(words, told);
  const int64_t strips = ceil_div(da.size[2], STRIP), batch = place.chain / strips;
  const int64_t channel0 = place.chain % strips * STRIP, t0 = place.tile * STEPS<T>;
  const int lane = lane_id();

  const Strip<T, WHOLE> da_strip(da, batch, t0, channel0), db_strip(db, batch, t0, channel0);
  Strip<const T, WHOLE>(g, batch, t0, channel0).fetch(g_tile);
  Strip<const T, WHOLE>(a, batch, t0, channel0).fetch(a_tile);
  Strip<const T, WHOLE>(h, batch, t0 + 1, channel0).fetch(h_tile);
  async_commit();
  const int rows = da_strip.rows;
  const bool own = lane < da_strip.cols, first = place.last();  // the tile in which time begins
  const T start = first && own && h0.size[0] ? h0(batch, channel0 + lane) : T(0.0f);
  async_wait<0>();
  __syncwarp();  // all lanes' copies are there

  Map<Sum> map;
  if (own) {
    if (first) h_tile[rows - 1][lane] = start;  // there is no h before the first step
#pragma unroll 16
    for (int r = 0; r < rows; ++r) {
      const Sum a_now = Sum(a_tile[r][lane]);
      map = {double(a_now) * map.a, a_now * (Sum(g_tile[r][lane]) + map.b)};
    }
  }
  Sum carry = look_back(place, map, Sum(0));
  if (own) {
#pragma unroll 16
    for (int r = 0; r < rows; ++r) {
      const Sum lambda = Sum(g_tile[r][lane]) + carry;
      carry = Sum(a_tile[r][lane]) * lambda;
      h_tile[r][lane] = T(lambda * Sum(h_tile[r][lane]));  // da and db take the place of h and g
      g_tile[r][lane] = T(lambda);
    }
    if (first && dh0.size[0]) dh0(batch, channel0 + lane) = T(carry);
  }
  __syncwarp();  // all channels of da and db are there
  da_strip.store(h_tile);
  db_strip.store(g_tile);
}

// ---------------------------------------------------------------------------------------------------------------------
// A lane's groups of a tile of a row: in shared memory each has a place that only this lane reads. STEP: 1 or -1 if steps
// lie side by side in this direction, in whole groups of 16 bytes, 0 if anyhow.
template <typename T, int STEP>
struct Row {
  using Items = Vector<std::remove_const_t<T>, WIDE<T>>;
  T* data;
  int64_t seq, stride;

  __device__ __forceinline__ Row(const View<T, 3>& x, int64_t batch, int64_t channel)
      : data(&x(batch, 0, channel)), seq(x.size[1]), stride(STEP ? STEP : x.stride[1]) {}

  // Starts the copy of the group that begins at step t; `outside` stands for steps past the end.
  __device__ __forceinline__ void fetch(Items* place, int64_t t, T outside) const {
    if constexpr (STEP) {
      if (t < seq) async_copy<16>(place, group(t));
    } else {
      UNROLL
      for (int i = 0; i < WIDE<T>; ++i) {
        if (t + i < seq) {
          if constexpr (sizeof(T) >= 4) async_copy<sizeof(T)>(&(*place)[i], data + (t + i) * stride);
          else (*place)[i] = data[(t + i) * stride];  // cp.async takes no less than 4 bytes
        } else {
          (*place)[i] = outside;
        }
      }
    }
    if (STEP && t >= seq) {
      Items items;
      UNROLL
      for (int i = 0; i < WIDE<T>; ++i) items[i] = outside;
      *place = items;
    }
  }

  __device__ __forceinline__ void store(int64_t t, const Items& items) const {
    if constexpr (STEP) {
      if (t < seq) store_vector(group(t), in_time(items));
    } else {
      UNROLL
      for (int i = 0; i < WIDE<T>; ++i) {
        if (t + i < seq) data[(t + i) * stride] = items[i];
      }
    }
  }

  // In the order of time from that of memory, and back.
  static __device__ __forceinline__ Items in_time(Items items) {
    Items result;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) result[i] = items[STEP == -1 ? WIDE<T> - 1 - i : i];
    return result;
  }

 private:
  __device__ __forceinline__ T* group(int64_t t) const { return STEP == 1 ? data + t : data - t - (WIDE<T> - 1); }
};

// Where a lane has its groups of one of several tensors, 32 groups apart.
template <typename T>
__device__ __forceinline__ Vector<T, WIDE<T>>* places(Vector<T, WIDE<T>>* tile, int tensor) {
  return tile + (tensor * (int(blockDim.x) / 32) + warp_id()) * GROUPS * 32 + lane_id();
}

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
__device__ __forceinline__ Around<Sum> look_back_by_warp(const Place<Sum>& place, Map<Sum> own, Sum first) {
  const auto told = [&](int64_t tile, Told what) -> Sum& { return place.told(place.chain, tile, what, 0); };
  Sum state = first;
  if (place.tile > 0) {
    if (!place.last()) {
      if (lane_id() == 0) told(place.tile, A) = Sum(own.a), told(place.tile, B) = own.b;
      place.tell(MAP);
    }
    const int64_t known = place.newest_state();
    state = told(known, AFTER);
    for (int64_t next = known + 1; next < place.tile; next += 32) {
      const int count = int(min(place.tile - next, int64_t(32)));
      Map<Sum> map;
      if (lane_id() < count) map = {told(next + lane_id(), A), told(next + lane_id(), B)};
#pragma unroll 4
      for (int k = 0; k < count; ++k) state = shuffle(map, k)(state);
    }
  }
  const Sum after = own(state);
  if (!place.last()) {
    if (lane_id() == 0) told(place.tile, AFTER) = after;
    place.tell(STATE);
  }
  return {state, after};
}

// The state before each of a thread's groups, from their maps, and that after the tile.
template <typename Sum>
__device__ __forceinline__ Sum states_before(const Place<Sum>& place, const Map<Sum> (&own)[GROUPS], Sum first,
                                             Sum (&before)[GROUPS]) {
  __shared__ double a_of_warps[WARPS];
  __shared__ Sum b_of_warps[WARPS];
  __shared__ Sum state_before, state_after;  // the tile
  Map<Sum> upto[GROUPS], of_warp;            // the map of a group's lanes up to this one
  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    Map<Sum> map = own[v];
    UNROLL
    for (int distance = 1; distance <= 16; distance *= 2) {
      const Map<Sum> older = shuffle_up(map, distance);
      if (lane_id() >= distance) map = combine(older, map);  // the map of 2 distance lanes, or of all from lane 0 on
    }
    upto[v] = map;
    of_warp = combine(of_warp, shuffle(map, 31));
  }
  if (lane_id() == 0) a_of_warps[warp_id()] = of_warp.a, b_of_warps[warp_id()] = of_warp.b;
  __syncthreads();  // the maps of all warps are there
  if (warp_id() == 0) {
    Map<Sum> of_all;
    for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) {
      of_all = combine(of_all, Map<Sum>{a_of_warps[warp], b_of_warps[warp]});
    }
    const Around<Sum> around = look_back_by_warp(place, of_all, first);
    if (lane_id() == 0) state_before = around.before, state_after = around.after;
  }
  __syncthreads();  // the state before the tile is there
  Sum state = state_before;
  for (int warp = 0; warp < warp_id(); ++warp) {
    const Map<Sum> map{a_of_warps[warp], b_of_warps[warp]};
    state = map(state);
  }
  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    const Map<Sum> older = shuffle_up(upto[v], 1);
    before[v] = lane_id() > 0 ? older(state) : state;
    state = shuffle(upto[v], 31)(state);
  }
  return state_after;
}

// grid (chains * tiles), block (32 W)
template <typename T, int STEP>
__global__ void __launch_bounds__(32 * WARPS, STEP && sizeof(T) < 8 ? 4 : 1)
    scan_rows(View<const T, 3> a,              // [batch, seq, channels]
              View<const T, 3> b,              // [batch, seq, channels]
              View<const T, 2> h0,             // [batch, channels], or empty
              View<T, 3> h,                    // [batch, seq, channels]
              View<float, 1> words,            // ticket and flags, zeros
              View<Accumulator<T>, 4> told) {  // [chain, tile, what, 1]
  using Sum = Accumulator<T>;
  using Items = Vector<T, WIDE<T>>;
  const Place<Sum> place(words, told);
  const int64_t batch = place.chain / h.size[2], channel = place.chain % h.size[2];

  const Row<const T, STEP> a_row(a, batch, channel), b_row(b, batch, channel);
  const Row<T, STEP> h_row(h, batch, channel);
  DYNAMIC_SHARED(Items, tile);
  Items *const a_tile = places<T>(tile, 0), *const b_tile = places<T>(tile, 1);
  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    a_row.fetch(&a_tile[v * 32], step_of<T>(place.tile, v), T(1.0f));  // (1, 0) changes nothing
    b_row.fetch(&b_tile[v * 32], step_of<T>(place.tile, v), T(0.0f));
  }
  async_commit();
  const Sum first = place.tile == 0 && h0.size[0] ? Sum(h0(batch, channel)) : Sum(0);
  async_wait<0>();  // a lane reads what it has copied itself

  Map<Sum> own[GROUPS];
  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    const Items a_now = a_row.in_time(a_tile[v * 32]), b_now = b_row.in_time(b_tile[v * 32]);
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      own[v] = {double(Sum(a_now[i])) * own[v].a, Sum(a_now[i]) * own[v].b + Sum(b_now[i])};
    }
  }
  Sum before[GROUPS];
  states_before(place, own, first, before);

  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    const Items a_now = a_row.in_time(a_tile[v * 32]), b_now = b_row.in_time(b_tile[v * 32]);
    Sum state = before[v];
    Items h_now;
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
__global__ void __launch_bounds__(32 * WARPS, STEP && sizeof(T) < 8 ? 4 : 1)
    scan_rows_backward(View<const T, 3> g,              // [batch, seq, channels]
                       View<const T, 3> a,              // [batch, seq, channels]
                       View<const T, 3> h,              // [batch, seq, channels]
                       View<const T, 2> h0,             // [batch, channels], or empty
                       View<T, 3> da,                   // [batch, seq, channels]
                       View<T, 3> db,                   // [batch, seq, channels]
                       View<T, 2> dh0,                  // [batch, channels], or empty
                       View<float, 1> words,            // ticket and flags, zeros
                       View<Accumulator<T>, 4> told) {  // [chain, tile, what, 1]
  using Sum = Accumulator<T>;
  using Items = Vector<T, WIDE<T>>;
  const Place<Sum> place(words, told);
  const int64_t batch = place.chain / da.size[2], channel = place.chain % da.size[2], seq = da.size[1];

  const Row<const T, STEP> g_row(g, batch, channel), a_row(a, batch, channel), h_row(h, batch, channel);
  const Row<T, STEP> da_row(da, batch, channel), db_row(db, batch, channel);
  const T start = h0.size[0] ? h0(batch, channel) : T(0.0f);  // stands where h has ended: before the first step
  DYNAMIC_SHARED(Items, tile);
  Items *const g_tile = places<T>(tile, 0), *const a_tile = places<T>(tile, 1), *const h_tile = places<T>(tile, 2);
  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    g_row.fetch(&g_tile[v * 32], step_of<T>(place.tile, v), T(0.0f));
    a_row.fetch(&a_tile[v * 32], step_of<T>(place.tile, v), T(1.0f));
    h_row.fetch(&h_tile[v * 32], step_of<T>(place.tile, v), start);
  }
  async_commit();
  const int64_t next = step_of<T>(place.tile, GROUPS);  // in lane 0 the step after those of its warp
  const T after_warp = lane_id() == 0 && next < seq ? h(batch, next, channel) : start;
  async_wait<0>();  // a lane reads what it has copied itself

  Map<Sum> own[GROUPS];
  UNROLL
  for (int v = 0; v < GROUPS; ++v) {
    const Items g_now = g_row.in_time(g_tile[v * 32]), a_now = a_row.in_time(a_tile[v * 32]);
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      own[v] = {double(Sum(a_now[i])) * own[v].a, Sum(a_now[i]) * (Sum(g_now[i]) + own[v].b)};
    }
  }
  Sum before[GROUPS];
  const Sum after_tile = states_before(place, own, Sum(0), before);
  if (threadIdx.x == 0 && place.last() && dh0.size[0]) dh0(batch, channel) = T(after_tile);

  T next_group = after_warp;  // in lane 0 the state after the last step of lane 31
  UNROLL
  for (int v = GROUPS - 1; v >= 0; --v) {
    const Items g_now = g_row.in_time(g_tile[v * 32]), a_now = a_row.in_time(a_tile[v * 32]);
    const Items h_now = h_row.in_time(h_tile[v * 32]);
    // The state after a lane's steps is the first of the next lane.
    const Sum after = __shfl_sync(ALL, Sum(lane_id() == 0 ? next_group : h_now[0]), (lane_id() + 1) % 32);
    next_group = h_now[0];
    Sum carry = before[v];
    Items da_now, db_now;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      const Sum lambda = Sum(g_now[i]) + carry;
      da_now[i] = T(lambda * (i + 1 < WIDE<T> ? Sum(h_now[(i + 1) % WIDE<T>]) : after));
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
void check(const View<T, 3>& x, const View<float, 1>& words, const View<Accumulator<T>, 4>& told) {
  const int64_t width = told.size[3], strips = width == 1 ? x.size[2] : ceil_div(x.size[2], width);
  const int64_t most = width == 1 ? GROUPS * 32 * WIDE<T> * WARPS : STEPS<T>;
  if ((width != 1 && width != STRIP) || told.size[2] != 3 || told.size[0] != x.size[0] * strips ||
      told.size[1] * most < x.size[1] || words.size[0] < LINE + told.size[0] * told.size[1]) {
    throw std::invalid_argument("scan_lookback: its scratch memory does not fit the problem");
  }
}

// As many warps as let the tiles that there are hold all steps.
template <typename T>
dim3 row_block(int64_t seq, int64_t tiles) {
  return dim3(unsigned(32 * ceil_div(ceil_div(seq, GROUPS * 32 * WIDE<T>), max(tiles, int64_t(1)))));
}

void scan(Input<3> a, Input<3> b, Input<2> h0, Output<3> h, InOut<1> words, Output<4> told, bool reverse,
          Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? flipped(x, 1) : x; };
    const auto av = a.as<T>(), bv = b.as<T>();
    const auto hv = h.as<T>();
    const auto told_view = told.as<Accumulator<T>>();
    check(hv, words.as<float>(), told_view);
    const auto run = [&]<auto KERNEL>(dim3 block, size_t shared) {
      launch<KERNEL>({told.size[0] * told.size[1]}, block, shared, stream, in_time(av), in_time(bv), h0.as<T>(),
                     in_time(hv), words.as<float>(), told_view);
    };
    if (told.size[3] == 1) {
      const dim3 block = row_block<T>(h.size[1], told.size[1]);
      const size_t shared = 2 * block.x * GROUPS * 16;
      if (!in_groups<1>(av, bv, hv)) run.template operator()<scan_rows<T, 0>>(block, shared);
      else if (reverse) run.template operator()<scan_rows<T, -1>>(block, shared);
      else run.template operator()<scan_rows<T, 1>>(block, shared);
    } else {
      if (in_groups<2>(av, bv, hv)) run.template operator()<scan_strips<T, true>>(dim3(32), 0);
      else run.template operator()<scan_strips<T, false>>(dim3(32), 0);
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
    check(dav, words.as<float>(), told_view);
    const auto run = [&]<auto KERNEL>(dim3 block, size_t shared) {
      launch<KERNEL>({told.size[0] * told.size[1]}, block, shared, stream, in_time(gv), in_time(av), in_time(hv),
                     h0.as<T>(), in_time(dav), in_time(dbv), dh0.as<T>(), words.as<float>(), told_view);
    };
    if (told.size[3] == 1) {
      const dim3 block = row_block<T>(h.size[1], told.size[1]);
      const size_t shared = 3 * block.x * GROUPS * 16;
      if (!in_groups<1>(gv, av, hv, dav, dbv)) run.template operator()<scan_rows_backward<T, 0>>(block, shared);
      else if (reverse) run.template operator()<scan_rows_backward<T, 1>>(block, shared);
      else run.template operator()<scan_rows_backward<T, -1>>(block, shared);
    } else {
      if (in_groups<2>(gv, av, hv, dav, dbv)) run.template operator()<scan_strips_backward<T, true>>(dim3(32), 0);
      else run.template operator()<scan_strips_backward<T, false>>(dim3(32), 0);
    }
  });
}
