// Stage 45: the first-order scan in one pass, tiles of time handing on their state
//
// Problem   h[t] = a[t] h[t - 1] + b[t] for each batch and channel, from h0 or 0: a, b, h [B, T, D], h0 [B, D]; any
//           strides, any direction. Backward: lambda[t] = g[t] + a[t + 1] lambda[t + 1];  db = lambda,
//           da[t] = lambda[t] h[t - 1],  dh0 = a[0] lambda[0].
// Before    In stages 40 to 44 one block goes through all of a channel's time, so that a few long rows leave most of the
//           card idle. To cut time between blocks took two more launches, or to read a and b twice.
// Idea      A tile of time is a block's. It reads its steps once and keeps them in shared memory; it tells what they make
//           of any state, their map a state + b; it looks back at the tiles before it, for the newest that has told the
//           state after it, and applies the maps since then. So nobody waits for a whole chain of blocks: maps are told
//           as soon as they are read (Merrill and Garland, Single-pass parallel prefix scan with decoupled look-back,
//           2016). What is told are words of 8 bytes, half of each a number and half what the number is: a word that is
//           there needs no flag and no fence, and is found in one look.
//           Progress: blocks take tiles by a ticket, so in the order in which they begin, and a chain's from the first to
//           the last. A block waits only for blocks that run already, and the oldest of those waits for nobody.
//           Repeatable: how far a block looks back is chance, so maps of tiles are never combined with each other, but
//           applied to the state one by one: wherever that begins, the same operations in the same order.
// Mapping   chain: what is scanned by itself. With time_dim=1 a strip of channels, 128 bytes side by side, in double 256:
//           a tile is up to STRIP_WARPS warps, a lane walks through STEPS steps of one channel, two in 16 bits. With
//           time_dim=2 one channel: a tile is up to ROW_WARPS warps, a lane has GROUPS times 16 bytes of steps, and the
//           lanes' maps are joined as in stage 44.
// Cost      float32, N = B T D elements, chains of R tiles of W warps, all blocks one after another, so that the tile
//           before has told the state; each word of a, b, h, g, da, db moves once, 16 bytes a lane, and besides
//             told    2 words of 8 bytes a tile and channel are stored, and the second once more, for the state; a strip
//                     looks at those of up to WINDOW tiles, an eighth of a tensor's bytes, a row of up to 32, hardly any:
//                     they come from the second-level cache
//             ticket  one atomic a tile
//             barriers  3 a tile
//           The words are zeros before the launch, which is one more launch.
// Limits    Chains of few tiles are what stages 41 and 44 are there for. A channel alone as [B, T, 1] is one lane's: as
//           [B, 1, T] it is a block's. Products of a above 3e38 in a tile are infinite, whatever b was.
// Run       python -m stages run 45

#include <type_traits>

#include "common/async_copy.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/ordering.h"
#include "common/scan.h"
#include "common/tile.h"
#include "common/vector.h"
#include "common/view.h"

constexpr unsigned ALL = 0xffffffff;
constexpr int LANES = 32;
constexpr int LINE = 16;  // words of 128 bytes: the ticket has a line for itself
template <typename T>
constexpr int WIDE = 16 / int(sizeof(T));  // steps of 16 bytes

// A tile of a strip of channels: up to STRIP_WARPS warps, each with 8 KiB of every tensor.
constexpr int STRIP_WARPS = 4, STRIP_THREADS = STRIP_WARPS * LANES;
constexpr int WINDOW = 8;  // tiles that a lane looks back at
template <typename T>
constexpr int PAIR = sizeof(T) == 2 ? 2 : 1;  // channels of a lane
template <typename T>
constexpr int STRIP = LANES * PAIR<T>;  // channels: 128 bytes side by side, in double 256
template <typename T>
constexpr int STEPS = 8192 / (STRIP<T> * int(sizeof(T)));  // of a warp

// A tile of one channel: up to ROW_WARPS warps, each with GROUPS times 16 bytes a lane.
constexpr int ROW_WARPS = 8, ROW_THREADS = ROW_WARPS * LANES;
constexpr int GROUPS = 8;
constexpr int BLOCKS = 3, BLOCKS_BACKWARD = 2;  // that a multiprocessor has at a time
template <typename T>
constexpr int PIECE = LANES * GROUPS * WIDE<T>;  // steps of a warp

template <typename T>
struct alignas(16) Piece {
  T word[STEPS<T>][STRIP<T>];  // [step][channel]: in a row every lane has a bank of its own

  __device__ T* operator[](int step) { return word[step]; }
  __device__ const T* operator[](int step) const { return word[step]; }
};

__device__ __forceinline__ int lane_id() { return threadIdx.x % LANES; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / LANES; }

// The same bytes as another type.
template <typename To, typename From>
__device__ __forceinline__ To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return *reinterpret_cast<const To*>(&from);
}

template <typename Sum>
__device__ __forceinline__ LongMap<Sum> shuffle(const LongMap<Sum>& map, int lane) {
  return {__shfl_sync(ALL, map.a, lane), __shfl_sync(ALL, map.low, lane), __shfl_sync(ALL, map.b, lane)};
}

template <typename Sum>
__device__ __forceinline__ LongMap<Sum> shuffle_up(const LongMap<Sum>& map, int distance) {
  return {__shfl_up_sync(ALL, map.a, distance), __shfl_up_sync(ALL, map.low, distance),
          __shfl_up_sync(ALL, map.b, distance)};
}

// ---------------------------------------------------------------------------------------------------------------------
// What tiles tell each other of a channel: two numbers, in words of 8 bytes, half of each a part of the number and half
// what the number is. A word is there or not, by itself, so that no fence and no flag has to say when.
enum What : uint32_t { NOTHING, MAP, STATE };  // of the tile, or after it: then the map does not matter any more
struct alignas(8) Word {
  uint32_t part, what;
};
template <typename Sum>
constexpr int PARTS = int(sizeof(Sum)) / 4;
template <typename Sum>
struct alignas(Sum) Parts {
  uint32_t part[PARTS<Sum>];
};

template <typename Sum>
__device__ __forceinline__ void tell(Word* words, Sum number, What what) {
  const auto parts = bits_of<Parts<Sum>>(number);
  UNROLL
  for (int i = 0; i < PARTS<Sum>; ++i) store_relaxed(&words[i], Word{parts.part[i], what});
}

template <typename Sum>
struct Told {
  What what = NOTHING;
  Sum number;

  __device__ __forceinline__ explicit Told(const Word* words) {
    Parts<Sum> parts;
    UNROLL
    for (int i = 0; i < PARTS<Sum>; ++i) {
      const Word word = load_relaxed(&words[i]);
      parts.part[i] = word.part;
      what = i == 0 || word.what == what ? What(word.what) : NOTHING;  // one half is new, the other not yet
    }
    number = bits_of<Sum>(parts);
  }
};

// A tile among those of its chain.
template <typename Sum>
struct Place {
  int64_t chain, tile, tiles, width;
  Word* told;  // of the chain: [tile][a, b][channel]

  // Takes the next ticket. Chains go side by side, so that the tiles before it in its own are further on than it.
  __device__ __forceinline__ Place(const View<double, 1>& words, int64_t chains, int64_t tiles, int64_t width)
      : tiles(tiles), width(width) {
    __shared__ unsigned ticket;
    if (threadIdx.x == 0) ticket = atomicAdd(reinterpret_cast<unsigned*>(words.data), 1u);
    __syncthreads();  // the ticket is there
    chain = ticket % chains, tile = ticket / chains;
    told = reinterpret_cast<Word*>(words.data) + LINE + chain * tiles * 2 * width * PARTS<Sum>;
  }

  __device__ __forceinline__ bool last() const { return tile + 1 == tiles; }

  __device__ __forceinline__ Word* a_of(int64_t tile, int64_t channel) const {
    return told + (tile * 2 * width + channel) * PARTS<Sum>;
  }
  __device__ __forceinline__ Word* b_of(int64_t tile, int64_t channel) const {
    return a_of(tile, channel) + width * PARTS<Sum>;
  }

  // The first tile has no use for its map, and of the last one nobody asks.
  __device__ __forceinline__ void tell_map(int64_t channel, const LongMap<Sum>& map) const {
    if (tile == 0 || last()) return;
    tell(a_of(tile, channel), map.a, MAP);
    tell(b_of(tile, channel), map.b, MAP);
  }
  __device__ __forceinline__ void tell_state(int64_t channel, Sum state) const {
    if (!last()) tell(b_of(tile, channel), state, STATE);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// A tile of a strip: where it is, and how much of it is there. WHOLE: 16 bytes lie together.
template <typename T, bool WHOLE>
struct Strip {
  static constexpr int ACROSS = STRIP<T> / WIDE<T>, STEP = LANES / ACROSS;  // lanes for a row, and rows at a time
  T* data;
  int64_t stride_t, stride_c;
  int rows, cols;

  __device__ __forceinline__ Strip(const View<T, 3>& x, int64_t batch, int64_t t, int64_t channel)
      : data(&x(batch, t, channel)),
        stride_t(x.stride[1]),
        stride_c(x.stride[2]),
        rows(int(min(x.size[1] - t, int64_t(STEPS<T>)))),
        cols(int(min(x.size[2] - channel, int64_t(STRIP<T>)))) {}

  // Starts a warp's copies of the steps that are there; zeros stand for channels that are not.
  template <typename To>
  __device__ __forceinline__ void fetch(To& tile) const {
    const int lane = lane_id();
    if constexpr (WHOLE) {
      const int c = lane % ACROSS * WIDE<T>;
      const T* from = data + lane / ACROSS * stride_t + c;
#pragma unroll 8
      for (int r = lane / ACROSS; r < rows; r += STEP, from += STEP * stride_t) {
        async_copy<16>(&tile[r][c], from, c < cols);
      }
    } else {
      for (int c = lane; c < STRIP<T>; c += LANES) {
        const T* from = data + c * stride_c;
        const bool inside = c < cols;
#pragma unroll 16
        for (int r = 0; r < rows; ++r, from += stride_t) {
          if constexpr (sizeof(T) >= 4) async_copy<sizeof(T)>(&tile[r][c], from, inside);
          else tile[r][c] = inside ? *from : T(0.0f);  // cp.async takes no less than 4 bytes
        }
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
    } else {
      for (int c = lane; c < cols; c += LANES) {
        T* to = data + c * stride_c;
#pragma unroll 8
        for (int r = 0; r < rows; ++r, to += stride_t) *to = tile[r][c];
      }
    }
  }
};

// The states before a tile, of a lane's channels, which are LANES apart in what is told; of the first tile it is there.
// From the oldest tile of the window to the newest: a state is taken, a map is applied to what is known.
template <int PAIR, typename Sum>
__device__ __forceinline__ void look_back(const Place<Sum>& place, Sum (&state)[PAIR]) {
  if (place.tile == 0) return;
  while (true) {
    bool known = true;
    UNROLL
    for (int i = 0; i < PAIR; ++i) {
      What what[WINDOW] = {};  // nothing, if there is no such tile
      Sum a[WINDOW], b[WINDOW];
      UNROLL
      for (int k = 0; k < WINDOW; ++k) {
        const int64_t tile = place.tile - WINDOW + k;
        if (tile < 0) continue;
        const Told<Sum> of_a(place.a_of(tile, i * LANES + lane_id())), of_b(place.b_of(tile, i * LANES + lane_id()));
        a[k] = of_a.number, b[k] = of_b.number;
        what[k] = of_b.what == MAP && of_a.what != MAP ? NOTHING : of_b.what;
      }
      bool there = false;
      UNROLL
      for (int k = 0; k < WINDOW; ++k) {
        if (what[k] == STATE) there = true, state[i] = b[k];
        else if (what[k] == MAP) state[i] = LongMap<Sum>{a[k], 0, b[k]}(state[i]);
        else there = false;
      }
      known = known && there;
    }
    if (known) return;
    do {
      spin_hint();
    } while (Told<Sum>(place.b_of(place.tile - 1, lane_id())).what == NOTHING);  // before that there is no use in more
  }
}

// The states before a warp's piece of the tile, from the maps of all pieces; `state` is that before the first tile.
template <int PAIR, typename Sum>
__device__ __forceinline__ void hand_on(const Place<Sum>& place, const LongMap<Sum> (&own)[PAIR], Sum (&state)[PAIR]) {
  __shared__ Sum a_of_warps[STRIP_WARPS][PAIR][LANES], low_of_warps[STRIP_WARPS][PAIR][LANES];
  __shared__ Sum b_of_warps[STRIP_WARPS][PAIR][LANES], before[PAIR][LANES];
  const int lane = lane_id(), warps = int(blockDim.x) / LANES;
  const auto of_warp = [&](int warp, int i) {
    return LongMap<Sum>{a_of_warps[warp][i][lane], low_of_warps[warp][i][lane], b_of_warps[warp][i][lane]};
  };
  UNROLL
  for (int i = 0; i < PAIR; ++i) {
    a_of_warps[warp_id()][i][lane] = own[i].a, low_of_warps[warp_id()][i][lane] = own[i].low;
    b_of_warps[warp_id()][i][lane] = own[i].b;
  }
  __syncthreads();  // the maps of all warps are there
  if (warp_id() == 0) {
    LongMap<Sum> map[PAIR];
    UNROLL
    for (int i = 0; i < PAIR; ++i) {
      for (int warp = 0; warp < warps; ++warp) map[i] = combine(map[i], of_warp(warp, i));
      map[i] = map[i].rounded();  // as it is told: this block and others do the same with it
      place.tell_map(i * LANES + lane, map[i]);
    }
    look_back(place, state);
    UNROLL
    for (int i = 0; i < PAIR; ++i) {
      place.tell_state(i * LANES + lane, map[i](state[i]));
      before[i][lane] = state[i];
    }
  }
  __syncthreads();  // the states before the tile are there
  UNROLL
  for (int i = 0; i < PAIR; ++i) {
    state[i] = before[i][lane];
    for (int warp = 0; warp < warp_id(); ++warp) state[i] = of_warp(warp, i)(state[i]);
  }
}

// grid (chains * tiles), block (LANES W)
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(STRIP_THREADS, 2)
    scan_strips(View<const T, 3> a,     // [batch, seq, channels]
                View<const T, 3> b,     // [batch, seq, channels]
                View<const T, 2> h0,    // [batch, channels], or empty
                View<T, 3> h,           // [batch, seq, channels]
                View<double, 1> words,  // the ticket, and what is told: zeros
                int64_t chains, int64_t tiles) {
  using Sum = Accumulator<T>;
  DYNAMIC_SHARED(Piece<T>, pieces);
  Piece<T>&a_tile = pieces[2 * warp_id()], &b_tile = pieces[2 * warp_id() + 1];
  const Place<Sum> place(words, chains, tiles, STRIP<T>);
  const int64_t strips = ceil_div(h.size[2], STRIP<T>), batch = place.chain / strips;
  const int64_t channel0 = place.chain % strips * STRIP<T>;
  const int64_t t0 = (place.tile * (blockDim.x / LANES) + warp_id()) * STEPS<T>;

  const Strip<T, WHOLE> h_strip(h, batch, t0, channel0);
  Strip<const T, WHOLE>(a, batch, t0, channel0).fetch(a_tile);
  Strip<const T, WHOLE>(b, batch, t0, channel0).fetch(b_tile);
  async_commit();
  const int own = lane_id() * PAIR<T>, count = h_strip.cols - own;  // the lane's channels, if there are so many
  Sum state[PAIR<T>];
  UNROLL
  for (int i = 0; i < PAIR<T>; ++i) {
    state[i] = place.tile == 0 && h0.size[0] && i < count ? Sum(h0(batch, channel0 + own + i)) : Sum(0);
  }
  async_wait<0>();
  __syncwarp();  // all lanes' copies are there

  LongMap<Sum> map[PAIR<T>];
#pragma unroll 16
  for (int r = 0; r < h_strip.rows; ++r) {
    const auto a_now = load_vector<PAIR<T>>(&a_tile[r][own]), b_now = load_vector<PAIR<T>>(&b_tile[r][own]);
    UNROLL
    for (int i = 0; i < PAIR<T>; ++i) map[i].take(Sum(a_now[i]), Sum(a_now[i]) * map[i].b + Sum(b_now[i]));
  }
  hand_on(place, map, state);
#pragma unroll 16
  for (int r = 0; r < h_strip.rows; ++r) {
    const auto a_now = load_vector<PAIR<T>>(&a_tile[r][own]), b_now = load_vector<PAIR<T>>(&b_tile[r][own]);
    Vector<T, PAIR<T>> h_now;
    UNROLL
    for (int i = 0; i < PAIR<T>; ++i) {
      state[i] = Sum(a_now[i]) * state[i] + Sum(b_now[i]);
      h_now[i] = T(state[i]);
    }
    store_vector(&b_tile[r][own], h_now);  // h takes the place of b
  }
  __syncwarp();  // all channels of h are there
  h_strip.store(b_tile);
}

// All views run from the last step to the first, as the scan does: h[t + 1] is the state before step t. What is handed
// on is a[t] lambda[t], what later steps give to the next state: a step makes a (g + carry) of it.
// grid (chains * tiles), block (LANES W)
template <typename T, bool WHOLE>
__global__ void __launch_bounds__(STRIP_THREADS, 2)
    scan_strips_backward(View<const T, 3> g,     // [batch, seq, channels]
                         View<const T, 3> a,     // [batch, seq, channels]
                         View<const T, 3> h,     // [batch, seq, channels]
                         View<const T, 2> h0,    // [batch, channels], or empty
                         View<T, 3> da,          // [batch, seq, channels]
                         View<T, 3> db,          // [batch, seq, channels]
                         View<T, 2> dh0,         // [batch, channels], or empty
                         View<double, 1> words,  // the ticket, and what is told: zeros
                         int64_t chains, int64_t tiles) {
  using Sum = Accumulator<T>;
  DYNAMIC_SHARED(Piece<T>, pieces);
  Piece<T>&g_tile = pieces[3 * warp_id()], &a_tile = pieces[3 * warp_id() + 1], &h_tile = pieces[3 * warp_id() + 2];
  const Place<Sum> place(words, chains, tiles, STRIP<T>);
  const int64_t strips = ceil_div(da.size[2], STRIP<T>), batch = place.chain / strips;
  const int64_t channel0 = place.chain % strips * STRIP<T>;
  const int64_t t0 = (place.tile * (blockDim.x / LANES) + warp_id()) * STEPS<T>;

  const Strip<T, WHOLE> da_strip(da, batch, t0, channel0), db_strip(db, batch, t0, channel0);
  Strip<const T, WHOLE>(g, batch, t0, channel0).fetch(g_tile);
  Strip<const T, WHOLE>(a, batch, t0, channel0).fetch(a_tile);
  Strip<const T, WHOLE>(h, batch, t0 + 1, channel0).fetch(h_tile);
  async_commit();
  const int rows = da_strip.rows, own = lane_id() * PAIR<T>, count = da_strip.cols - own;
  const bool first = rows > 0 && t0 + rows == da.size[1];  // the piece in which time begins
  Vector<T, PAIR<T>> start;
  UNROLL
  for (int i = 0; i < PAIR<T>; ++i) {
    start[i] = first && h0.size[0] && i < count ? h0(batch, channel0 + own + i) : T(0.0f);
  }
  async_wait<0>();
  __syncwarp();  // all lanes' copies are there

  if (first) store_vector(&h_tile[rows - 1][own], start);  // there is no h before the first step
  LongMap<Sum> map[PAIR<T>];
#pragma unroll 16
  for (int r = 0; r < rows; ++r) {
    const auto g_now = load_vector<PAIR<T>>(&g_tile[r][own]), a_now = load_vector<PAIR<T>>(&a_tile[r][own]);
    UNROLL
    for (int i = 0; i < PAIR<T>; ++i) map[i].take(Sum(a_now[i]), Sum(a_now[i]) * (Sum(g_now[i]) + map[i].b));
  }
  Sum carry[PAIR<T>] = {};
  hand_on(place, map, carry);
#pragma unroll 16
  for (int r = 0; r < rows; ++r) {
    const auto g_now = load_vector<PAIR<T>>(&g_tile[r][own]), a_now = load_vector<PAIR<T>>(&a_tile[r][own]);
    const auto h_now = load_vector<PAIR<T>>(&h_tile[r][own]);
    Vector<T, PAIR<T>> da_now, db_now;
    UNROLL
    for (int i = 0; i < PAIR<T>; ++i) {
      const Sum lambda = Sum(g_now[i]) + carry[i];
      carry[i] = Sum(a_now[i]) * lambda;
      da_now[i] = T(lambda * Sum(h_now[i]));
      db_now[i] = T(lambda);
    }
    store_vector(&h_tile[r][own], da_now);  // da and db take the place of h and g
    store_vector(&g_tile[r][own], db_now);
  }
  const bool last_warp = place.last() && warp_id() + 1 == int(blockDim.x) / LANES;  // past it nothing is left to take
  UNROLL
  for (int i = 0; i < PAIR<T>; ++i) {
    if (last_warp && dh0.size[0] && i < count) dh0(batch, channel0 + own + i) = T(carry[i]);
  }
  __syncwarp();  // all channels of da and db are there
  da_strip.store(h_tile);
  db_strip.store(g_tile);
}

// ---------------------------------------------------------------------------------------------------------------------
// Where a lane's group lies in shared memory: so that 8 lanes, each at its first one, say, find them in all the banks.
__device__ __forceinline__ int place_of(int lane, int group) {
  return lane * GROUPS + (group ^ (lane * GROUPS / 8 % GROUPS));
}
__device__ __forceinline__ int place_of(int of_warp) { return place_of(of_warp / GROUPS, of_warp % GROUPS); }

// One channel. A warp copies a piece of it, 16 bytes a lane, neighbours side by side; then a lane takes GROUPS such groups
// that follow each other. STEP: 1 or -1 if steps lie side by side in this direction, in whole groups, 0 if anyhow.

template <typename T, int STEP>
struct Row {
  using Items = Vector<std::remove_const_t<T>, WIDE<T>>;
  T* data;
  int64_t seq, stride;

  __device__ __forceinline__ Row(const View<T, 3>& x, int64_t batch, int64_t channel)
      : data(&x(batch, 0, channel)), seq(x.size[1]), stride(STEP ? STEP : x.stride[1]) {}

  // Starts the copies of the piece that begins at step t0; `outside` stands for steps past the end.
  __device__ __forceinline__ void fetch(Items* places, int64_t t0, T outside) const {
    if constexpr (STEP) {
      Items none;
      UNROLL
      for (int i = 0; i < WIDE<T>; ++i) none[i] = outside;
      UNROLL
      for (int group = lane_id(); group < LANES * GROUPS; group += LANES) {
        const int64_t t = t0 + group * WIDE<T>;
        if (t < seq) async_copy<16>(&places[place_of(group)], of_group(t));
        else places[place_of(group)] = none;
      }
    } else {
#pragma unroll 8
      for (int i = lane_id(); i < PIECE<T>; i += LANES) {
        if (t0 + i >= seq) word(places, i) = outside;
        else if constexpr (sizeof(T) >= 4) async_copy<sizeof(T)>(&word(places, i), data + (t0 + i) * stride);
        else word(places, i) = data[(t0 + i) * stride];  // cp.async takes no less than 4 bytes
      }
    }
  }

  __device__ __forceinline__ void store(const Items* places, int64_t t0) const {
    if constexpr (STEP) {
      UNROLL
      for (int group = lane_id(); group < LANES * GROUPS; group += LANES) {
        const int64_t t = t0 + group * WIDE<T>;
        if (t < seq) store_vector(of_group(t), places[place_of(group)]);
      }
    } else {
#pragma unroll 8
      for (int i = lane_id(); i < PIECE<T>; i += LANES) {
        if (t0 + i < seq) data[(t0 + i) * stride] = word(places, i);
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
  // The 16 bytes of WIDE steps from t on.
  __device__ __forceinline__ T* of_group(int64_t t) const { return STEP == 1 ? data + t : data - t - (WIDE<T> - 1); }

  template <typename To>
  static __device__ __forceinline__ auto& word(To* places, int i) {
    return places[place_of(i / WIDE<T>)][i % WIDE<T>];
  }
};

// By a warp, of one channel: the state before a tile. Each lane looks at one of the LANES tiles before.
template <typename Sum>
__device__ __forceinline__ Sum look_back_by_warp(const Place<Sum>& place, Sum first) {
  if (place.tile == 0) return first;
  const int64_t other = place.tile - LANES + lane_id();
  while (true) {
    What what = NOTHING;
    LongMap<Sum> map;
    if (other >= 0) {
      const Told<Sum> of_a(place.a_of(other, 0)), of_b(place.b_of(other, 0));
      map.a = of_a.number, map.b = of_b.number;
      what = of_b.what == MAP && of_a.what != MAP ? NOTHING : of_b.what;
    }
    // Newer tiles have higher lanes. From the newest state on there have to be all maps.
    const int state_at = 31 - __clz(int(__ballot_sync(ALL, what == STATE)));
    const int nothing_at = 31 - __clz(int(__ballot_sync(ALL, what == NOTHING)));
    if (state_at > nothing_at) {
      Sum state = __shfl_sync(ALL, map.b, state_at);
#pragma unroll 4
      for (int k = state_at + 1; k < LANES; ++k) state = shuffle(map, k)(state);
      return state;
    }
    spin_hint();
  }
}

// The state before a lane's steps, which `own` is the map of; `after` becomes that after the tile.
template <typename Sum>
__device__ __forceinline__ Sum state_before(const Place<Sum>& place, LongMap<Sum> own, Sum first, Sum& after) {
  __shared__ Sum a_of_warps[ROW_WARPS], low_of_warps[ROW_WARPS], b_of_warps[ROW_WARPS];
  __shared__ Sum before_tile, after_tile;
  const auto of_warp = [&](int warp) { return LongMap<Sum>{a_of_warps[warp], low_of_warps[warp], b_of_warps[warp]}; };
  UNROLL
  for (int distance = 1; distance <= 16; distance *= 2) {
    const LongMap<Sum> older = shuffle_up(own, distance);
    if (lane_id() >= distance) own = combine(older, own);  // the map of 2 distance lanes, or of all from lane 0 on
  }
  if (lane_id() == LANES - 1) {
    a_of_warps[warp_id()] = own.a, low_of_warps[warp_id()] = own.low, b_of_warps[warp_id()] = own.b;
  }
  const LongMap<Sum> older = shuffle_up(own, 1);
  __syncthreads();  // the maps of all warps are there
  if (warp_id() == 0) {
    LongMap<Sum> of_all;
    for (int warp = 0; warp < int(blockDim.x) / LANES; ++warp) of_all = combine(of_all, of_warp(warp));
    of_all = of_all.rounded();  // as it is told: this block and others do the same with it
    if (lane_id() == 0) place.tell_map(0, of_all);
    const Sum state = look_back_by_warp(place, first);
    if (lane_id() == 0) {
      before_tile = state, after_tile = of_all(state);
      place.tell_state(0, after_tile);
    }
  }
  __syncthreads();  // the state before the tile is there
  Sum state = before_tile;
  for (int warp = 0; warp < warp_id(); ++warp) state = of_warp(warp)(state);
  after = after_tile;
  return lane_id() > 0 ? older(state) : state;
}

// grid (chains * tiles), block (LANES W)
template <typename T, int STEP>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS)
    scan_rows(View<const T, 3> a,     // [batch, seq, channels]
              View<const T, 3> b,     // [batch, seq, channels]
              View<const T, 2> h0,    // [batch, channels], or empty
              View<T, 3> h,           // [batch, seq, channels]
              View<double, 1> words,  // the ticket, and what is told: zeros
              int64_t chains, int64_t tiles) {
  using Sum = Accumulator<T>;
  using Items = Vector<T, WIDE<T>>;
  const Place<Sum> place(words, chains, tiles, 1);
  const int64_t batch = place.chain / h.size[2], channel = place.chain % h.size[2];
  const int64_t t0 = (place.tile * (blockDim.x / LANES) + warp_id()) * PIECE<T>;
  const int lane = lane_id();

  const Row<const T, STEP> a_row(a, batch, channel), b_row(b, batch, channel);
  const Row<T, STEP> h_row(h, batch, channel);
  DYNAMIC_SHARED(Items, tile);
  Items *const a_tile = tile + warp_id() * 2 * LANES * GROUPS, *const b_tile = a_tile + LANES * GROUPS;
  a_row.fetch(a_tile, t0, T(1.0f));  // (1, 0) changes nothing
  b_row.fetch(b_tile, t0, T(0.0f));
  async_commit();
  const Sum first = place.tile == 0 && h0.size[0] ? Sum(h0(batch, channel)) : Sum(0);
  async_wait<0>();
  __syncwarp();  // all lanes' copies are there

  LongMap<Sum> own;
#pragma unroll 4
  for (int group = 0; group < GROUPS; ++group) {
    const Items a_now = a_row.in_time(a_tile[place_of(lane, group)]);
    const Items b_now = b_row.in_time(b_tile[place_of(lane, group)]);
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) own.take(Sum(a_now[i]), Sum(a_now[i]) * own.b + Sum(b_now[i]));
  }
  Sum after;
  Sum state = state_before(place, own, first, after);
#pragma unroll 4
  for (int group = 0; group < GROUPS; ++group) {
    const Items a_now = a_row.in_time(a_tile[place_of(lane, group)]);
    const Items b_now = b_row.in_time(b_tile[place_of(lane, group)]);
    Items h_now;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      state = Sum(a_now[i]) * state + Sum(b_now[i]);
      h_now[i] = T(state);
    }
    b_tile[place_of(lane, group)] = h_row.in_time(h_now);  // h takes the place of b
  }
  __syncwarp();  // all lanes' h are there
  h_row.store(b_tile, t0);
}

// Time is turned around as in scan_strips_backward.
// grid (chains * tiles), block (LANES W)
template <typename T, int STEP>
__global__ void __launch_bounds__(ROW_THREADS, BLOCKS_BACKWARD)
    scan_rows_backward(View<const T, 3> g,     // [batch, seq, channels]
                       View<const T, 3> a,     // [batch, seq, channels]
                       View<const T, 3> h,     // [batch, seq, channels]
                       View<const T, 2> h0,    // [batch, channels], or empty
                       View<T, 3> da,          // [batch, seq, channels]
                       View<T, 3> db,          // [batch, seq, channels]
                       View<T, 2> dh0,         // [batch, channels], or empty
                       View<double, 1> words,  // the ticket, and what is told: zeros
                       int64_t chains, int64_t tiles) {
  using Sum = Accumulator<T>;
  using Items = Vector<T, WIDE<T>>;
  const Place<Sum> place(words, chains, tiles, 1);
  const int64_t batch = place.chain / da.size[2], channel = place.chain % da.size[2];
  const int64_t t0 = (place.tile * (blockDim.x / LANES) + warp_id()) * PIECE<T>, end = t0 + PIECE<T>;
  const int lane = lane_id();

  const Row<const T, STEP> g_row(g, batch, channel), a_row(a, batch, channel), h_row(h, batch, channel);
  const Row<T, STEP> da_row(da, batch, channel), db_row(db, batch, channel);
  const T start = h0.size[0] ? h0(batch, channel) : T(0.0f);  // stands where h has ended: before the first step
  DYNAMIC_SHARED(Items, tile);
  Items* const g_tile = tile + warp_id() * 3 * LANES * GROUPS;
  Items *const a_tile = g_tile + LANES * GROUPS, *const h_tile = a_tile + LANES * GROUPS;
  g_row.fetch(g_tile, t0, T(0.0f));
  a_row.fetch(a_tile, t0, T(1.0f));
  h_row.fetch(h_tile, t0, start);
  async_commit();
  const T after_piece = lane == LANES - 1 && end < da.size[1] ? h(batch, end, channel) : start;
  async_wait<0>();
  __syncwarp();  // all lanes' copies are there

  LongMap<Sum> own;
#pragma unroll 4
  for (int group = 0; group < GROUPS; ++group) {
    const Items g_now = g_row.in_time(g_tile[place_of(lane, group)]);
    const Items a_now = a_row.in_time(a_tile[place_of(lane, group)]);
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) own.take(Sum(a_now[i]), Sum(a_now[i]) * (Sum(g_now[i]) + own.b));
  }
  Sum after_tile;
  Sum carry = state_before(place, own, Sum(0), after_tile);
  if (threadIdx.x == 0 && place.last() && dh0.size[0]) dh0(batch, channel) = T(after_tile);

  Items h_now = h_row.in_time(h_tile[place_of(lane, 0)]);
  const Sum after_lane = __shfl_down_sync(ALL, Sum(h_now[0]), 1);  // the state after a lane's steps
  const Sum after = lane < LANES - 1 ? after_lane : Sum(after_piece);
#pragma unroll 4
  for (int group = 0; group < GROUPS; ++group) {
    const Items g_now = g_row.in_time(g_tile[place_of(lane, group)]);
    const Items a_now = a_row.in_time(a_tile[place_of(lane, group)]);
    const bool more = group + 1 < GROUPS;
    const Items h_next = more ? h_row.in_time(h_tile[place_of(lane, (group + 1) % GROUPS)]) : h_now;
    const Sum after_group = more ? Sum(h_next[0]) : after;
    Items da_now, db_now;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      const Sum lambda = Sum(g_now[i]) + carry;
      da_now[i] = T(lambda * (i + 1 < WIDE<T> ? Sum(h_now[(i + 1) % WIDE<T>]) : after_group));
      db_now[i] = T(lambda);
      carry = Sum(a_now[i]) * lambda;
    }
    h_tile[place_of(lane, group)] = da_row.in_time(da_now);  // da and db take the place of h and g
    g_tile[place_of(lane, group)] = db_row.in_time(db_now);
    h_now = h_next;
  }
  __syncwarp();  // all lanes' da and db are there
  da_row.store(h_tile, t0);
  db_row.store(g_tile, t0);
}

// ---------------------------------------------------------------------------------------------------------------------
template <int DIM, typename... Views>
bool in_groups(const Views&... views) {
  return (in_wide_groups(views, DIM) && ...);
}

// How time is cut: tiles of a chain, which is a strip of channels, or one channel. Checked, since nothing of a kernel
// would tell.
template <typename T>
struct Cut {
  int64_t chains, tiles;
  dim3 block;

  Cut(const View<T, 3>& x, bool rows, int64_t tiles, const View<double, 1>& words) : tiles(tiles) {
    const int64_t width = rows ? 1 : STRIP<T>, piece = rows ? PIECE<T> : STEPS<T>,
                  most = rows ? ROW_WARPS : STRIP_WARPS;
    chains = x.size[0] * ceil_div(x.size[2], width);
    if (tiles * piece * most < x.size[1] || words.size[0] < LINE + chains * tiles * 2 * width * PARTS<Accumulator<T>>) {
      throw std::invalid_argument("scan_lookback: its scratch memory does not fit the problem");
    }
    // As many warps as let the tiles that there are hold all steps.
    block = dim3(unsigned(LANES * ceil_div(ceil_div(x.size[1], piece), max(tiles, int64_t(1)))));
  }

  template <auto KERNEL, typename... Arguments>
  void strips(int tensors, Stream stream, Arguments... arguments) const {
    launch<KERNEL>({chains * tiles}, block, block.x / LANES * tensors * sizeof(Piece<T>), stream, arguments..., chains,
                   tiles);
  }
  template <auto KERNEL, typename... Arguments>
  void rows(int tensors, Stream stream, Arguments... arguments) const {
    launch<KERNEL>({chains * tiles}, block, block.x * tensors * GROUPS * 16, stream, arguments..., chains, tiles);
  }
};

void scan(Input<3> a, Input<3> b, Input<2> h0, Output<3> h, InOut<1> words, bool rows, int64_t tiles, bool reverse,
          Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? flipped(x, 1) : x; };
    const auto av = a.as<T>(), bv = b.as<T>();
    const auto hv = h.as<T>();
    const Cut<T> cut(hv, rows, tiles, words.as<double>());
    const auto by_strips = [&]<auto KERNEL>() {
      cut.template strips<KERNEL>(2, stream, in_time(av), in_time(bv), h0.as<T>(), in_time(hv), words.as<double>());
    };
    const auto by_rows = [&]<auto KERNEL>() {
      cut.template rows<KERNEL>(2, stream, in_time(av), in_time(bv), h0.as<T>(), in_time(hv), words.as<double>());
    };
    if (!rows && in_groups<2>(av, bv, hv)) by_strips.template operator()<scan_strips<T, true>>();
    else if (!rows) by_strips.template operator()<scan_strips<T, false>>();
    else if (!in_groups<1>(av, bv, hv)) by_rows.template operator()<scan_rows<T, 0>>();
    else if (reverse) by_rows.template operator()<scan_rows<T, -1>>();
    else by_rows.template operator()<scan_rows<T, 1>>();
  });
}

void scan_backward(Input<3> g, Input<3> a, Input<3> h, Input<2> h0, Output<3> da, Output<3> db, Output<2> dh0,
                   InOut<1> words, bool rows, int64_t tiles, bool reverse, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? x : flipped(x, 1); };  // against the direction of the forward
    const auto gv = g.as<T>(), av = a.as<T>(), hv = h.as<T>();
    const auto dav = da.as<T>(), dbv = db.as<T>();
    const Cut<T> cut(dav, rows, tiles, words.as<double>());
    const auto by_strips = [&]<auto KERNEL>() {
      cut.template strips<KERNEL>(3, stream, in_time(gv), in_time(av), in_time(hv), h0.as<T>(), in_time(dav),
                                  in_time(dbv), dh0.as<T>(), words.as<double>());
    };
    const auto by_rows = [&]<auto KERNEL>() {
      cut.template rows<KERNEL>(3, stream, in_time(gv), in_time(av), in_time(hv), h0.as<T>(), in_time(dav),
                                in_time(dbv), dh0.as<T>(), words.as<double>());
    };
    if (!rows && in_groups<2>(gv, av, hv, dav, dbv)) by_strips.template operator()<scan_strips_backward<T, true>>();
    else if (!rows) by_strips.template operator()<scan_strips_backward<T, false>>();
    else if (!in_groups<1>(gv, av, hv, dav, dbv)) by_rows.template operator()<scan_rows_backward<T, 0>>();
    else if (reverse) by_rows.template operator()<scan_rows_backward<T, 1>>();
    else by_rows.template operator()<scan_rows_backward<T, -1>>();
  });
}
