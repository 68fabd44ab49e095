// Stage 40: the first-order scan, one thread for each channel
//
// Problem   h[t] = a[t] h[t - 1] + b[t] for each batch and channel, from h0 or 0: a, b, h [B, T, D], h0 [B, D]; any
//           strides, so time may come last, and any direction. Backward, from the end to the beginning:
//           lambda[t] = g[t] + a[t + 1] lambda[t + 1];  db = lambda,  da[t] = lambda[t] h[t - 1],  dh0 = a[0] lambda[0].
// Before    In stages 00 to 33 every output could be computed without the others. Here each needs the one before it.
// Idea      The formula as it stands: channels do not know each other, so each gets a thread, which walks through time
//           with h in a register. The backward is the same walk the other way, and carries a[t] lambda[t].
// Mapping   thread: one channel of one batch, all T steps.  warp: 32 channels side by side.
// Cost      [B, T, D] row-major float32, D a multiple of 32; N = B T D elements, C = B D channels
//             global load sectors   forward (2 N + C) / 8, backward 3 N / 8
//             global store sectors  forward N / 8, backward (2 N + C) / 8: each word moves once, the least there is
//           with time_dim=2, [B, D, T], 32 neighbours are T words apart: 8 times as many but for the C / 8 of h0, dh0
// Limits    A thread has two loads under way and waits for them at each step, and there are no more threads than
//           channels: memory is idle most of the time. Stage 41 asks for later steps ahead of time.
// Run       python -m stages run 40

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

constexpr int THREADS = 64;  // few, so that a few thousand channels are spread over all multiprocessors

// ---------------------------------------------------------------------------------------------------------------------
// grid (ceil(B D / THREADS)), block (THREADS)
template <typename T>
__global__ void scan_sequential(View<const T, 3> a,   // [batch, seq, channels]
                                View<const T, 3> b,   // [batch, seq, channels]
                                View<const T, 2> h0,  // [batch, channels], or empty
                                View<T, 3> h) {       // [batch, seq, channels]
  const int64_t seq = h.size[1], channels = h.size[2];
  const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= h.size[0] * channels) return;  // the last block has threads to spare
  const int64_t batch = index / channels, channel = index % channels;

  Accumulator<T> state = h0.size[0] ? Accumulator<T>(h0(batch, channel)) : 0;
  for (int64_t t = 0; t < seq; ++t) {
    state = Accumulator<T>(a(batch, t, channel)) * state + Accumulator<T>(b(batch, t, channel));
    h(batch, t, channel) = T(state);  // rounded where it is stored, and nowhere else
  }
}

// grid (ceil(B D / THREADS)), block (THREADS)
template <typename T>
__global__ void scan_sequential_backward(View<const T, 3> g,   // [batch, seq, channels], what the loss gives to h
                                         View<const T, 3> a,   // [batch, seq, channels]
                                         View<const T, 3> h,   // [batch, seq, channels]
                                         View<const T, 2> h0,  // [batch, channels], or empty
                                         View<T, 3> da,        // [batch, seq, channels]
                                         View<T, 3> db,        // [batch, seq, channels]
                                         View<T, 2> dh0) {     // [batch, channels], or empty
  const int64_t seq = h.size[1], channels = h.size[2];
  const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= h.size[0] * channels) return;
  const int64_t batch = index / channels, channel = index % channels;

  const Accumulator<T> start = h0.size[0] ? Accumulator<T>(h0(batch, channel)) : 0;
  Accumulator<T> carry = 0;  // a[t + 1] lambda[t + 1], what the later steps give to h[t]
  for (int64_t t = seq - 1; t >= 0; --t) {
    const Accumulator<T> lambda = Accumulator<T>(g(batch, t, channel)) + carry;
    const Accumulator<T> before = t > 0 ? Accumulator<T>(h(batch, t - 1, channel)) : start;
    da(batch, t, channel) = T(lambda * before);
    db(batch, t, channel) = T(lambda);
    carry = Accumulator<T>(a(batch, t, channel)) * lambda;
  }
  if (dh0.size[0]) dh0(batch, channel) = T(carry);
}

// ---------------------------------------------------------------------------------------------------------------------
void scan(Input<3> a, Input<3> b, Input<2> h0, Output<3> h, bool reverse, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? flipped(x, 1) : x; };
    launch<scan_sequential<T>>({ceil_div(h.size[0] * h.size[2], THREADS)}, dim3(THREADS), 0, stream, in_time(a.as<T>()),
                               in_time(b.as<T>()), h0.as<T>(), in_time(h.as<T>()));
  });
}

void scan_backward(Input<3> g, Input<3> a, Input<3> h, Input<2> h0, Output<3> da, Output<3> db, Output<2> dh0,
                   bool reverse, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    const auto in_time = [&](auto x) { return reverse ? flipped(x, 1) : x; };
    launch<scan_sequential_backward<T>>({ceil_div(h.size[0] * h.size[2], THREADS)}, dim3(THREADS), 0, stream,
                                        in_time(g.as<T>()), in_time(a.as<T>()), in_time(h.as<T>()), h0.as<T>(),
                                        in_time(da.as<T>()), in_time(db.as<T>()), dh0.as<T>());
  });
}
