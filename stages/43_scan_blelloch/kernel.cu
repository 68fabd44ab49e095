// Stage 43: the first-order scan, up a tree of parts and down again (Blelloch)
//
// Problem   h[t] = a[t] h[t - 1] + b[t] for each batch and channel, from h0 or 0: a, b, h [B, T, D], h0 [B, D]; any
//           strides, any direction. Backward: lambda[t] = g[t] + a[t + 1] lambda[t + 1];  db = lambda,
//           da[t] = lambda[t] h[t - 1],  dh0 = a[0] lambda[0].
// Before    Stage 42 has six combines for a step of time, because what its threads cover overlaps.
// Idea      Parts that do not overlap are a tree. Up: pairs of steps become a map, pairs of pairs, and so on. Down: the
//           chunk starts in the state before it; of every part, the older half starts where the part does, the newer
//           half where the older one's map leads. At the leaves each step gets the state before it.
// Mapping   block: one batch and channel, C = CHUNK steps at a time.  thread: a step, and a pair while there are any.
// Cost      [B, D, T] row-major float32 (time_dim=2), T a multiple of C = 128; R = B D rows, N = R T elements
//             combines              (C - 2) + (C - 1) a chunk: 253, in 13 rounds; stage 42 has 769, in 7
//             global sectors        as in stage 42
//             shared wavefronts     a chunk 56 loads, 39 stores; a row 1 store, backward 1 load; no bank conflicts
//             barriers              2 log2(C) + 1 a chunk
// Limits    What a warp does not do saves little: a request of 4 lanes takes a wavefront as one of 32 does, and each
//           level has a barrier. Stage 44 scans within a warp, where it takes neither barriers nor shared memory.
// Run       python -m stages run 43

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/scan.h"
#include "common/view.h"

constexpr int CHUNK = 128;  // steps of time that a block scans at a time, a thread each: a power of two

// ---------------------------------------------------------------------------------------------------------------------
// Where step i of a chunk lies: after every row of words that one wavefront serves, a word is left out. So the places
// that a warp asks for, which are a power of two apart, are in different banks.
constexpr int PAD = 1;
template <typename Sum>
__device__ constexpr int place(int i) {
  return i + PAD * (i / (128 / int(sizeof(Sum))));
}

// The state after each thread's step, from the state before the chunk, which thread 0 reads.
template <typename Sum>
__device__ __forceinline__ Sum scan_chunk(const Map<Sum>& own, const Sum& state) {
  __shared__ Sum a_chunk[place<Sum>(CHUNK)], b_chunk[place<Sum>(CHUNK)];
  const int thread = threadIdx.x;

  a_chunk[place<Sum>(thread)] = own.a, b_chunk[place<Sum>(thread)] = own.b;
  // Up: the last place of a pair of parts gets the map of both. Nobody asks for that of the whole chunk.
  for (int distance = 1; distance < CHUNK / 2; distance *= 2) {
    __syncthreads();  // the maps of the parts are there
    if (thread < CHUNK / 2 / distance) {
      const int i = place<Sum>((2 * thread + 1) * distance - 1), j = place<Sum>((2 * thread + 2) * distance - 1);
      const Map<Sum> older{a_chunk[i], b_chunk[i]};
      const Map<Sum> newer{a_chunk[j], b_chunk[j]};
      const Map<Sum> both = combine(older, newer);
      a_chunk[j] = both.a, b_chunk[j] = both.b;
    }
  }
  // Down: where a part's b was, the state before it; the newer of a pair gets it through the older's map.
  for (int distance = CHUNK / 2; distance > 0; distance /= 2) {
    __syncthreads();  // the maps of the older parts and the states of the pairs are there
    if (thread < CHUNK / 2 / distance) {
      const int i = place<Sum>((2 * thread + 1) * distance - 1), j = place<Sum>((2 * thread + 2) * distance - 1);
      const Map<Sum> older{a_chunk[i], b_chunk[i]};
      const Sum before = distance == CHUNK / 2 ? state : b_chunk[j];
      b_chunk[i] = before, b_chunk[j] = older(before);
    }
  }
  __syncthreads();  // all states are there
  return own(b_chunk[place<Sum>(thread)]);
}

// ---------------------------------------------------------------------------------------------------------------------
// grid (B D), block (CHUNK)
template <typename T>
__global__ void __launch_bounds__(CHUNK) scan_rows(View<const T, 3> a,   // [batch, seq, channels]
                                                   View<const T, 3> b,   // [batch, seq, channels]
                                                   View<const T, 2> h0,  // [batch, channels], or empty
                                                   View<T, 3> h) {       // [batch, seq, channels]
  using Sum = Accumulator<T>;
  __shared__ Sum state;  // before the chunk

  const int64_t seq = h.size[1], channels = h.size[2];
  const int64_t batch = blockIdx.x / channels, channel = blockIdx.x % channels;

  if (threadIdx.x == 0) state = h0.size[0] ? Sum(h0(batch, channel)) : 0;
  for (int64_t t0 = 0; t0 < seq; t0 += CHUNK) {
    const int64_t t = t0 + threadIdx.x;
    Map<Sum> step;  // past the end: one that changes nothing
    if (t < seq) step = {Sum(a(batch, t, channel)), Sum(b(batch, t, channel))};
    const Sum after = scan_chunk(step, state);
    if (t < seq) h(batch, t, channel) = T(after);
    if (threadIdx.x == CHUNK - 1) state = after;
    __syncthreads();  // the state is there, and nobody reads the scan's arrays any more
  }
}

// All views run from the last step to the first, as the scan does: h[t + 1] is the state before step t.
// grid (B D), block (CHUNK)
template <typename T>
__global__ void __launch_bounds__(CHUNK) scan_rows_backward(View<const T, 3> g,   // [batch, seq, channels]
                                                            View<const T, 3> a,   // [batch, seq, channels]
                                                            View<const T, 3> h,   // [batch, seq, channels]
                                                            View<const T, 2> h0,  // [batch, channels], or empty
                                                            View<T, 3> da,        // [batch, seq, channels]
                                                            View<T, 3> db,        // [batch, seq, channels]
                                                            View<T, 2> dh0) {     // [batch, channels], or empty
  using Sum = Accumulator<T>;
  __shared__ Sum state;  // lambda before the chunk

  const int64_t seq = h.size[1], channels = h.size[2];
  const int64_t batch = blockIdx.x / channels, channel = blockIdx.x % channels;

  const Sum start = h0.size[0] ? Sum(h0(batch, channel)) : 0;
  if (threadIdx.x == 0) state = 0;
  for (int64_t t0 = 0; t0 < seq; t0 += CHUNK) {
    const int64_t t = t0 + threadIdx.x;
    Map<Sum> step;
    if (t < seq) step.b = Sum(g(batch, t, channel));
    if (t > 0 && t < seq) step.a = Sum(a(batch, t - 1, channel));  // lambda comes to a step through the a of the next
    const Sum lambda = scan_chunk(step, state);
    if (t < seq) {
      const Sum before = t + 1 < seq ? Sum(h(batch, t + 1, channel)) : start;
      da(batch, t, channel) = T(lambda * before);
      db(batch, t, channel) = T(lambda);
    }
    if (threadIdx.x == CHUNK - 1) state = lambda;
    __syncthreads();  // the state is there, and nobody reads the scan's arrays any more
  }
  if (threadIdx.x == 0 && dh0.size[0]) {
    dh0(batch, channel) = T(seq > 0 ? Sum(a(batch, seq - 1, channel)) * state : 0);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
void scan(Input<3> a, Input<3> b, Input<2> h0, Output<3> h, bool reverse, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? flipped(x, 1) : x; };
    launch<scan_rows<T>>({h.size[0] * h.size[2]}, dim3(CHUNK), 0, stream, in_time(a.as<T>()), in_time(b.as<T>()),
                         h0.as<T>(), in_time(h.as<T>()));
  });
}

void scan_backward(Input<3> g, Input<3> a, Input<3> h, Input<2> h0, Output<3> da, Output<3> db, Output<2> dh0,
                   bool reverse, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? x : flipped(x, 1); };  // against the direction of the forward
    launch<scan_rows_backward<T>>({h.size[0] * h.size[2]}, dim3(CHUNK), 0, stream, in_time(g.as<T>()),
                                  in_time(a.as<T>()), in_time(h.as<T>()), h0.as<T>(), in_time(da.as<T>()),
                                  in_time(db.as<T>()), dh0.as<T>());
  });
}
