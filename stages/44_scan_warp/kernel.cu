// Stage 44: the first-order scan, time cut in pieces: threads, then warps, then chunks
//
// Problem   h[t] = a[t] h[t - 1] + b[t] for each batch and channel, from h0 or 0: a, b, h [B, T, D], h0 [B, D]; any
//           strides, any direction. Backward: lambda[t] = g[t] + a[t + 1] lambda[t + 1];  db = lambda,
//           da[t] = lambda[t] h[t - 1],  dh0 = a[0] lambda[0].
// Before    Stages 40 and 41 walk: a channel is one thread's, however long it is. Stages 42 and 43 cut time in pieces,
//           a step each, and pass every one of them through shared memory and a barrier log2 times.
// Idea      A piece of time is a map, state -> a state + b. A thread makes one of all its steps in registers; the maps
//           of 32 threads are combined by shuffles; one map a warp goes through shared memory, with one barrier. Then
//           every thread knows the state before its steps, and walks through them. A state is carried from chunk to
//           chunk, while the words of the next one are on their way.
// Mapping   block: one channel of one batch.  thread: WIDE consecutive steps of a chunk, 16 bytes, which are one load
//           and one store if steps lie side by side.  warp: 32 WIDE steps.  chunk: up to WARPS of those.
// Cost      with time_dim=2, [B, D, T] row-major float32, T a multiple of 128; N = B T D elements, C = B D channels,
//           R chunks of W warps in a channel, M = ceil(T / 128) warps that have steps to take
//             global load sectors   forward 2 N / 8 + C W, backward 3 N / 8 + C (M + W - 1)
//             global store sectors  forward N / 8, backward 2 N / 8 + C: each word moves once
//             shared wavefronts     3 C R W stores, 3 C R W^2 loads, and C R barriers: of maps, no word of a tensor
//           with time_dim=1, [B, T, D], and where else 16 bytes do not lie together, a lane takes every 32nd word of
//           its warp, and the words change places in shared memory: striped in memory, blocked in registers.
// Limits    A channel is one block's: a few dozen of them, however long, leave multiprocessors idle (stage 45). Steps
//           that lie apart cost a sector each (stage 41). Where a product of a overflows, so does what it multiplies.
// Run       python -m stages run 44

#include <cmath>
#include <type_traits>

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/tile.h"
#include "common/vector.h"
#include "common/view.h"

constexpr int WARPS = 8;  // of a block, at most
// Blocks that a multiprocessor has at a time. A thread has 16 bytes of every tensor under way: 40 KB of a and b in all,
// 48 KB of g, a and h, where it takes 17 to keep memory busy. Words that are loaded singly have a register each.
constexpr int BLOCKS = 5, BLOCKS_BACKWARD = 4, BLOCKS_ANYHOW = 2;
constexpr unsigned ALL = 0xffffffff;  // lanes
template <typename T>
constexpr int WIDE = 16 / int(sizeof(T));  // steps of a thread: what 16 bytes hold
template <typename T>
using Items = Vector<std::remove_const_t<T>, WIDE<T>>;

// The same bytes as another type.
template <typename To, typename From>
__device__ __forceinline__ To bits_of(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  return *reinterpret_cast<const To*>(&from);
}

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / 32; }

// ---------------------------------------------------------------------------------------------------------------------
// What a piece of time makes of the state before it: state -> (a + low) state + b. Products of numbers just below 1 are
// rounded down nearly every time; what that took from a is kept in low, or it would add up from piece to piece.
template <typename Sum>
struct Map {
  Sum a = 1, low = 0, b = 0;  // of no step

  // From 0 a piece leads to b, also if a has overflowed, and low with it: infinity times 0 would be NaN.
  __device__ __forceinline__ Sum operator()(Sum state) const {
    const Sum main = a * state, rest = low * state;
    return (state == 0 ? 0 : main) + ((state == 0 || std::isinf(main) ? 0 : rest) + b);
  }
};

// The product of (a1 + low1) and (a2 + low2).
template <typename Sum>
__device__ __forceinline__ void multiply(Sum a1, Sum low1, Sum a2, Sum low2, Sum& a, Sum& low) {
  a = a2 * a1;
  low = std::fma(a2, a1, -a) + (a2 * low1 + low2 * a1);
}

// Two pieces, the older one first: not the same as the other way round.
template <typename Sum>
__device__ __forceinline__ Map<Sum> combine(Map<Sum> older, Map<Sum> newer) {
  Map<Sum> both;
  multiply(older.a, older.low, newer.a, newer.low, both.a, both.low);
  both.b = newer(older.b);
  return both;
}

// The map that the lane so far below has; of no step, if there is none.
template <typename Sum>
__device__ __forceinline__ Map<Sum> shuffle_up(Map<Sum> map, int distance) {
  const Sum a = __shfl_up_sync(ALL, map.a, distance), low = __shfl_up_sync(ALL, map.low, distance);
  const Sum b = __shfl_up_sync(ALL, map.b, distance);
  const bool there = lane_id() >= distance;
  return {there ? a : 1, there ? low : 0, there ? b : 0};
}

// Those of a block's warps.
template <typename Sum>
struct Maps {
  Sum a[WARPS], low[WARPS], b[WARPS];
};

// The state before a thread's steps, which `own` is the map of; `carry`, that before the chunk, becomes that after it.
template <typename Sum>
__device__ __forceinline__ Sum state_before(Map<Sum> own, Sum& carry, Maps<Sum>& warps) {
  UNROLL
  for (int distance = 1; distance <= 16; distance *= 2) {
    own = combine(shuffle_up(own, distance), own);  // now the map of 2 distance lanes, or of all from lane 0 on
  }
  if (lane_id() == 31) {
    warps.a[warp_id()] = own.a, warps.low[warp_id()] = own.low, warps.b[warp_id()] = own.b;
  }
  const Map<Sum> older = shuffle_up(own, 1);
  __syncthreads();  // the maps of all warps are there

  Sum state = carry;
#pragma unroll 4
  for (int warp = 0; warp < int(blockDim.x) / 32; ++warp) {  // a step each: few
    const Map<Sum> map{warps.a[warp], warps.low[warp], warps.b[warp]};
    if (warp == warp_id()) state = carry;
    carry = map(carry);
  }
  return older(state);
}

// ---------------------------------------------------------------------------------------------------------------------
// One row of a tensor, of which a thread takes some words of every chunk. STEP: 1 or -1 if steps lie side by side in
// this direction, in groups of 16 bytes, 0 if anyhow.
template <typename T, int STEP>
struct Row {
  // What is on its way stays as it comes: to unpack 16-bit numbers, or to turn them around, is to wait for them.
  using Words = std::conditional_t<STEP != 0, Vector<uint32_t, 4>, Items<T>>;
  T* data;
  int64_t seq, stride;

  __device__ __forceinline__ Row(const View<T, 3>& x, int64_t batch, int64_t channel)
      : data(&x(batch, 0, channel)), seq(x.size[1]), stride(STEP ? STEP : x.stride[1]) {}

  // Asks for a thread's words of the chunk that begins at step t0: WIDE consecutive ones, or every 32nd of its warp's.
  __device__ __forceinline__ Words load(int64_t t0, T outside) const {
    const int64_t t = t0 + first();
    Items<T> items;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) items[i] = outside;
    Words words = bits_of<Words>(items);
    if constexpr (STEP) {
      if (t < seq) words = load_vector<4>(reinterpret_cast<const uint32_t*>(group(t)));
    } else {
      const T* from = data + t * stride;
      UNROLL
      for (int i = 0; i < WIDE<T>; ++i, from += 32 * stride) {
        if (t + 32 * i < seq) words[i] = *from;
      }
    }
    return words;
  }

  // In lane 31 the word after those of its warp.
  __device__ __forceinline__ std::remove_const_t<T> load_after(int64_t t0, T outside) const {
    const int64_t t = t0 + (warp_id() + 1) * 32 * WIDE<T>;
    return lane_id() == 31 && t < seq ? data[t * stride] : outside;
  }

  __device__ __forceinline__ void store(int64_t t0, const Items<T>& items) const {
    const int64_t t = t0 + first();
    if (STEP) {
      if (t < seq) store_vector(reinterpret_cast<uint32_t*>(group(t)), bits_of<Vector<uint32_t, 4>>(turned(items)));
    } else {
      const Items<T> striped = exchange<false>(items);
      T* to = data + t * stride;
      UNROLL
      for (int i = 0; i < WIDE<T>; ++i, to += 32 * stride) {
        if (t + 32 * i < seq) *to = striped[i];
      }
    }
  }

  // The steps of the thread, in their order, of the words that it has loaded.
  static __device__ __forceinline__ Items<T> blocked(const Words& words) {
    if constexpr (STEP) return turned(bits_of<Items<T>>(words));
    else return exchange<true>(words);
  }

 private:
  static __device__ __forceinline__ int first() {
    return STEP ? int(threadIdx.x) * WIDE<T> : warp_id() * 32 * WIDE<T> + lane_id();
  }

  // The 16 bytes of WIDE steps from t on.
  __device__ __forceinline__ T* group(int64_t t) const { return STEP == 1 ? data + t : data - t - (WIDE<T> - 1); }

  // In the order of time from that of memory, and back.
  static __device__ __forceinline__ Items<T> turned(const Items<T>& items) {
    Items<T> result;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) result[i] = items[STEP == 1 ? i : WIDE<T> - 1 - i];
    return result;
  }

  // Every 32nd word of a warp to 16 bytes of consecutive ones, or the other way round.
  template <bool TO_BLOCKED>
  static __device__ __forceinline__ Items<T> exchange(const Items<T>& items) {
    alignas(16) __shared__ std::remove_const_t<T> words[WARPS][32 * WIDE<T>];
    auto* const of_warp = words[warp_id()];
    Items<T> result;
    if (TO_BLOCKED) {
      UNROLL
      for (int i = 0; i < WIDE<T>; ++i) of_warp[32 * i + lane_id()] = items[i];
      __syncwarp();  // all words of the warp are there
      result = load_vector<WIDE<T>>(&of_warp[lane_id() * WIDE<T>]);
    } else {
      store_vector(&of_warp[lane_id() * WIDE<T>], items);
      __syncwarp();  // all words of the warp are there
      UNROLL
      for (int i = 0; i < WIDE<T>; ++i) result[i] = of_warp[32 * i + lane_id()];
    }
    __syncwarp();  // all have read, the place is free
    return result;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// grid (B D), block (32 W)
template <typename T, int STEP>
__global__ void __launch_bounds__(32 * WARPS, STEP ? BLOCKS : BLOCKS_ANYHOW)
    scan_warp(View<const T, 3> a,   // [batch, seq, channels]
              View<const T, 3> b,   // [batch, seq, channels]
              View<const T, 2> h0,  // [batch, channels], or empty
              View<T, 3> h) {       // [batch, seq, channels]
  using Sum = Accumulator<T>;
  __shared__ Maps<Sum> warps[2];
  const unsigned channels = unsigned(h.size[2]);  // a grid has less than 2^31 blocks
  const int64_t batch = blockIdx.x / channels, channel = blockIdx.x % channels;
  const int chunk = blockDim.x * WIDE<T>;

  Row<const T, STEP> a_row(a, batch, channel), b_row(b, batch, channel);
  Row<T, STEP> h_row(h, batch, channel);
  auto a_next = a_row.load(0, T(1.0f)), b_next = b_row.load(0, T(0.0f));  // (1, 0) changes nothing

  Sum carry = h0.size[0] ? Sum(h0(batch, channel)) : 0;
  int slot = 0;
  for (int64_t t0 = 0; t0 < h.size[1]; t0 += chunk) {
    const Items<T> a_now = a_row.blocked(a_next), b_now = b_row.blocked(b_next);
    a_next = a_row.load(t0 + chunk, T(1.0f)), b_next = b_row.load(t0 + chunk, T(0.0f));

    Map<Sum> own;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      multiply(own.a, own.low, Sum(a_now[i]), Sum(0), own.a, own.low);
      own.b = Sum(a_now[i]) * own.b + Sum(b_now[i]);
    }
    Sum state = state_before(own, carry, warps[slot]);
    slot = 1 - slot;  // who is late reads the maps of this chunk while others write those of the next

    Items<T> h_now;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      state = Sum(a_now[i]) * state + Sum(b_now[i]);
      h_now[i] = T(state);
    }
    h_row.store(t0, h_now);
  }
}

// All views run from the last step to the first, as the scan does: h[t + 1] is the state before step t. What is carried
// is a[t] lambda[t], what later steps give to the next state: a step makes a (g + carry) of it.
// grid (B D), block (32 W)
template <typename T, int STEP>
__global__ void __launch_bounds__(32 * WARPS, STEP ? BLOCKS_BACKWARD : BLOCKS_ANYHOW)
    scan_warp_backward(View<const T, 3> g,   // [batch, seq, channels]
                       View<const T, 3> a,   // [batch, seq, channels]
                       View<const T, 3> h,   // [batch, seq, channels]
                       View<const T, 2> h0,  // [batch, channels], or empty
                       View<T, 3> da,        // [batch, seq, channels]
                       View<T, 3> db,        // [batch, seq, channels]
                       View<T, 2> dh0) {     // [batch, channels], or empty
  using Sum = Accumulator<T>;
  __shared__ Maps<Sum> warps[2];
  const unsigned channels = unsigned(h.size[2]);
  const int64_t batch = blockIdx.x / channels, channel = blockIdx.x % channels;
  const int chunk = blockDim.x * WIDE<T>;

  Row<const T, STEP> g_row(g, batch, channel), a_row(a, batch, channel), h_row(h, batch, channel);
  Row<T, STEP> da_row(da, batch, channel), db_row(db, batch, channel);
  const T start = h0.size[0] ? h0(batch, channel) : T(0.0f);  // stands where h has ended: before the first step
  T after_next = h_row.load_after(0, start);
  auto g_next = g_row.load(0, T(0.0f)), a_next = a_row.load(0, T(1.0f)), h_next = h_row.load(0, start);

  Sum carry = 0;
  int slot = 0;
  for (int64_t t0 = 0; t0 < h.size[1]; t0 += chunk) {
    const Items<T> g_now = g_row.blocked(g_next), a_now = a_row.blocked(a_next), h_now = h_row.blocked(h_next);
    const T after_warp = after_next;
    after_next = h_row.load_after(t0 + chunk, start);
    g_next = g_row.load(t0 + chunk, T(0.0f)), a_next = a_row.load(t0 + chunk, T(1.0f));
    h_next = h_row.load(t0 + chunk, start);

    Map<Sum> own;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      multiply(own.a, own.low, Sum(a_now[i]), Sum(0), own.a, own.low);
      own.b = Sum(a_now[i]) * (Sum(g_now[i]) + own.b);
    }
    Sum state = state_before(own, carry, warps[slot]);
    slot = 1 - slot;  // as in the forward

    const Sum after_lane = __shfl_down_sync(ALL, Sum(h_now[0]), 1);
    const Sum after = lane_id() < 31 ? after_lane : Sum(after_warp);
    Items<T> da_now, db_now;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) {
      const Sum lambda = Sum(g_now[i]) + state;
      da_now[i] = T(lambda * (i + 1 < WIDE<T> ? Sum(h_now[i + 1]) : after));
      db_now[i] = T(lambda);
      state = Sum(a_now[i]) * lambda;
    }
    da_row.store(t0, da_now), db_row.store(t0, db_now);
  }
  if (threadIdx.x == 0 && dh0.size[0]) dh0(batch, channel) = T(carry);
}

// ---------------------------------------------------------------------------------------------------------------------
// The steps of all views lie side by side, in whole groups of 16 bytes.
template <typename... Views>
bool in_groups(const Views&... views) {
  return (in_wide_groups(views, 1) && ...);
}

// One of three kernels, a block for each channel: as many warps as its steps need, in chunks of one size; two of them at
// least, so that one is on its way while the other is worked at.
template <auto ANYHOW, auto ONWARDS, auto BACKWARDS, typename T, typename... Arguments>
void launch_rows(bool groups, bool turned, const View<T, 3>& x, Stream stream, Arguments... arguments) {
  const int64_t warps = ceil_div(x.size[1], 32 * WIDE<T>), chunks = max(ceil_div(warps, WARPS), min(warps, int64_t(2)));
  const Grid grid{x.size[0] * x.size[2]};
  const dim3 block(unsigned(32 * ceil_div(max(warps, int64_t(1)), max(chunks, int64_t(1)))));
  if (!groups) launch<ANYHOW>(grid, block, 0, stream, arguments...);
  else if (turned) launch<BACKWARDS>(grid, block, 0, stream, arguments...);
  else launch<ONWARDS>(grid, block, 0, stream, arguments...);
}

void scan(Input<3> a, Input<3> b, Input<2> h0, Output<3> h, bool reverse, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? flipped(x, 1) : x; };
    const auto av = a.as<T>(), bv = b.as<T>();
    const auto hv = h.as<T>();
    launch_rows<scan_warp<T, 0>, scan_warp<T, 1>, scan_warp<T, -1>>(in_groups(av, bv, hv), reverse, hv, stream,
                                                                    in_time(av), in_time(bv), h0.as<T>(), in_time(hv));
  });
}

void scan_backward(Input<3> g, Input<3> a, Input<3> h, Input<2> h0, Output<3> da, Output<3> db, Output<2> dh0,
                   bool reverse, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? x : flipped(x, 1); };  // against the direction of the forward
    const auto gv = g.as<T>(), av = a.as<T>(), hv = h.as<T>();
    const auto dav = da.as<T>(), dbv = db.as<T>();
    launch_rows<scan_warp_backward<T, 0>, scan_warp_backward<T, 1>, scan_warp_backward<T, -1>>(
        in_groups(gv, av, hv, dav, dbv), !reverse, hv, stream, in_time(gv), in_time(av), in_time(hv), h0.as<T>(),
        in_time(dav), in_time(dbv), dh0.as<T>());
  });
}
