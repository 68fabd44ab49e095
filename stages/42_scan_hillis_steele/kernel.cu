// Stage 42: the first-order scan, every step joins the ones before it (Hillis and Steele)
//
// Problem   h[t] = a[t] h[t - 1] + b[t] for each batch and channel, from h0 or 0: a, b, h [B, T, D], h0 [B, D]; any
//           strides, any direction. Backward: lambda[t] = g[t] + a[t + 1] lambda[t + 1];  db = lambda,
//           da[t] = lambda[t] h[t - 1],  dh0 = a[0] lambda[0].
// Before    Stages 40 and 41 give a channel one thread: T multiply-adds, each of which waits for the one before.
// Idea      A step is the map h -> a h + b, and two of them are one map: (a2 a1, a2 b1 + b2), the older first. So every
//           thread holds a step and joins it with what the thread 1 before it holds, then 2 before, 4, 8, ...: what it
//           holds covers twice as much each time, after log2(C) rounds all that came before.
// Mapping   block: one batch and channel, C = CHUNK steps at a time.  thread: one step of each chunk.
// Cost      [B, D, T] row-major float32 (time_dim=2), T a multiple of C = 128; R = B D rows, N = R T elements
//             combines              C log2(C) - (C - 1) a chunk: 769, in 7 rounds; a walk has 128, in 128
//             global load sectors   forward 2 N / 8 + R, backward 3 N / 8 + 2 N / 32 + 3 R: a, h are read one step off
//             global store sectors  forward N / 8, backward 2 N / 8 + R
//             shared wavefronts     a chunk 51 loads, 57 stores; a row 1 store, backward 1 load; no bank conflicts
//             barriers              log2(C) + 1 a chunk
// Limits    Six combines for a step of time: stage 43 does with two. With time_dim=1 the lanes of a warp are D words
//           apart, each in a sector of its own.
// Run       python -m stages run 42

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/scan.h"
#include "common/view.h"

constexpr int CHUNK = 128;  // steps of time that a block scans at a time, a thread each: a power of two

// ---------------------------------------------------------------------------------------------------------------------
// The state after each thread's step, from the state before the chunk, which thread 0 reads: volatile, or a compiler lets
// all others read it too, before it is there, and drop it.
template <typename Sum>
__device__ __forceinline__ Sum scan_chunk(Map<Sum> own, const volatile Sum& state) {
  __shared__ Sum a_chunk[2][CHUNK], b_chunk[2][CHUNK];  // two of each: one is read while the other is written
  const int thread = threadIdx.x;

  if (thread == 0) own.b = own(state);
  int now = 0;
  for (int distance = 1; distance < CHUNK; distance *= 2) {
    a_chunk[now][thread] = own.a, b_chunk[now][thread] = own.b;
    __syncthreads();  // all maps are there; and all have read those of the other buffer, which is written next
    if (thread >= distance) {
      const Map<Sum> older{a_chunk[now][thread - distance], b_chunk[now][thread - distance]};
      own = combine(older, own);
    }
    now = 1 - now;
  }
  return own.b;
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
