// Stage 48: the adaptive unitary operator, a scan whose states turn
//
// Problem   theta[t, i, j] = sum_r x[i, j, r] u[r, t] + bias[i, j];  h[t] = exp(i theta[t]) h[t - 1] + v[t] B[j] with
//           v = dt silu(u), of each batch, channel i < d and state j < n;  y = silu(z) (Re sum_j C[j] h[t] + D silu(u)).
//           u, dt, z, y [B, d, T], x [d, n, d], bias [d, n], B, C [n] and h [B, d, n] complex, D [d].
// Before    Stage 47 reads a and b. Here both would be n times as large as u and y, and are made of them.
// Idea      Turn along with the states: with E[t] = exp(i (theta[1] + .. + theta[t])) and s = conj(E) h, the recurrence
//           is a plain sum, s[t] = s[t - 1] + B v[t] conj(E[t]). Nothing is multiplied on and on, so nothing drifts, if
//           the phase does not: it is a whole number of 2^-32 turns, whose sums are exact. So the backward walks the
//           same way back: it subtracts what was added, with s as it was at the end of every slab of time to start
//           from. With m = conj(E) lambda, which is a sum, too: dtheta = Im(m[t] conj(s[t - 1])).
// Mapping   block: one channel of one batch, all T steps.  thread: one state, its phase and s in registers.
//           tile: STEPS steps. For these all theta at once, a product out of shared memory, then the walk, then the sum
//           over the states. Backward: slab by slab of time from the end; a slab's dtheta stay in the L2 cache until
//           two products have made du and dx of them. No two blocks add to one number: each has a place of its own.
// Cost      float32, row-major, d = P INPUTS, n = W LANES, T = L STEPS; each of b d blocks, X = 1 if P = 1, else L P:
//             global load sectors   W (56 + 256 X + 64 L P + 8 L)      store sectors      W (24 + 4 L)
//             shared loads          W L (576 P + 64) wavefronts        shared stores      W (64 X + 16 L P + 34 L)
//             barriers              W L (2 P + 2)
//           backward: b d n T dtheta are stored once and loaded twice, in slabs that a cache holds
// Limits    Sequences one after another: few batches and channels leave much of the card idle, however long they are.
//           More than LANES states take a walk for each LANES of them.
// Run       python -m stages run 48

#include "common/complex.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/phase.h"
#include "common/vector.h"
#include "common/view.h"

constexpr int LANES = 64;                // states of a block, one a thread
constexpr int BLOCKS = 4;                // a multiprocessor: no more threads than states, so registers abound
constexpr int STEPS = 16;                // of a tile
constexpr int INPUTS = 32;               // rows of u, and columns of x, in shared memory at a time
constexpr int PAD = 1;                   // so that neighbouring inputs of a state lie in different banks
constexpr int QUARTERS = LANES / STEPS;  // threads that add up the states of one step
template <typename T>
constexpr int WIDE = 16 / int(sizeof(T));  // elements that 16 bytes hold

// ---------------------------------------------------------------------------------------------------------------------
template <typename T>
__device__ __forceinline__ T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

template <typename T>
__device__ __forceinline__ T silu(T x) {
  return x * sigmoid(x);
}

template <typename T>
__device__ __forceinline__ T silu_derivative(T x) {
  const T s = sigmoid(x);
  return s * (T(1) + x * (T(1) - s));
}

// B[j] and C[j] as the states know them: softplus of the real part, turned by the imaginary part. 0 past the last one.
template <typename T>
__device__ __forceinline__ Complex<T> polar(const View<const Complex<T>, 1>& x, int64_t j) {
  if (j >= x.size[0]) return {0, 0};
  const Complex<T> value = x(j);
  const T radius = (value.re > 0 ? value.re : 0) + std::log1p(std::exp(value.re > 0 ? -value.re : value.re));
  return unit<T>(phase_of(value.im)) * radius;
}

// What a block keeps in shared memory.
template <typename T>
struct Tiles {
  alignas(16) T u[INPUTS][STEPS];
  T x[INPUTS][LANES + PAD];
  T sums[STEPS][LANES + QUARTERS];  // the QUARTERS threads of 8 steps read from 32 banks
  T v[STEPS], g[STEPS];             // of the block's own channel: dt silu(u), and in the backward dy silu(z)
};

// angles[s] = theta[t0 + s] of this thread's state, all steps of a tile at once. One text for both directions,
// so that the backward finds the very same phases.
template <typename T>
__device__ __forceinline__ void find_angles(T (&angles)[STEPS], Tiles<T>& tiles, const View<const T, 3>& u,
                                            const View<const T, 3>& x, T bias, int64_t batch, int64_t channel,
                                            int64_t state0, int64_t t0, bool first) {
  const int64_t inputs = u.size[1], seq = u.size[2], states = x.size[1];
  const int lane = threadIdx.x;
  UNROLL
  for (int s = 0; s < STEPS; ++s) angles[s] = bias;
  for (int64_t r0 = 0; r0 < inputs; r0 += INPUTS) {
    __syncthreads();  // everyone is done with the tiles that these replace
    for (int e = lane; e < INPUTS * STEPS; e += LANES) {
      const int r = e / STEPS, s = e % STEPS;
      tiles.u[r][s] = r0 + r < inputs && t0 + s < seq ? u(batch, r0 + r, t0 + s) : T(0);
    }
    if (first || inputs > INPUTS) {  // else they are the same in every tile
      for (int e = lane; e < INPUTS * LANES; e += LANES) {
        const int r = e % INPUTS, j = e / INPUTS;
        tiles.x[r][j] = r0 + r < inputs && state0 + j < states ? x(channel, state0 + j, r0 + r) : T(0);
      }
    }
    __syncthreads();  // the tiles are there
#pragma unroll 4
    for (int r = 0; r < INPUTS; ++r) {
      const T weight = tiles.x[r][lane];
      UNROLL
      for (int s = 0; s < STEPS; s += WIDE<T>) {
        const auto group = load_vector<WIDE<T>>(&tiles.u[r][s]);
        UNROLL
        for (int i = 0; i < WIDE<T>; ++i) angles[s + i] += weight * group[i];
      }
    }
  }
}

// The sum over all states of what they put into tiles.sums, for step lane / QUARTERS; all its threads get it.
template <typename T>
__device__ __forceinline__ T sum_of_states(const Tiles<T>& tiles) {
  const int step = threadIdx.x / QUARTERS, quarter = threadIdx.x % QUARTERS;
  __syncthreads();  // all states have put theirs in
  T sum = 0;
#pragma unroll 8
  for (int i = quarter; i < LANES; i += QUARTERS) sum += tiles.sums[step][i];
  for (int apart = 1; apart < QUARTERS; apart *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
  return sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// grid (B d), block (LANES)
template <typename T>
__global__ void __launch_bounds__(LANES, BLOCKS)
    adaptive_unitary(View<const T, 3> u,               // [batch, channels, seq]
                     View<const T, 3> dt,              // [batch, channels, seq]
                     View<const T, 3> x,               // [channels, states, channels]
                     View<const T, 2> x_bias,          // [channels, states]
                     View<const Complex<T>, 1> B,      // [states]
                     View<const Complex<T>, 1> C,      // [states]
                     View<const T, 1> D,               // [channels]
                     View<const T, 3> z,               // [batch, channels, seq]
                     View<const Complex<T>, 3> state,  // [batch, channels, states], or empty
                     View<T, 3> y,                     // [batch, channels, seq]
                     View<T, 3> w,                     // [batch, channels, seq], y before silu(z), for the backward
                     View<Complex<T>, 3> last,         // [batch, channels, states]
                     View<Complex<T>, 4> ends,         // [slabs, batch, channels, states]: s at the ends, or empty
                     View<T, 3> phases,                // [batch, channels, states]: bits of the last phase
                     int64_t slab) {
  __shared__ Tiles<T> tiles;
  const int64_t channels = u.size[1], seq = u.size[2], states = x.size[1];
  const int64_t batch = blockIdx.x / channels, channel = blockIdx.x % channels;
  const int lane = threadIdx.x, step = lane / QUARTERS;

  for (int64_t state0 = 0; state0 == 0 || state0 < states; state0 += LANES) {
    const int64_t j = state0 + lane;
    const bool own = j < states;
    const Complex<T> b = polar(B, j), c = polar(C, j);
    const T bias = own ? x_bias(channel, j) : T(0);
    Complex<T> sum = own && state.size[0] ? state(batch, channel, j) : Complex<T>(0);
    Phase<T> phase = 0;
    for (int64_t t0 = 0; t0 < seq; t0 += STEPS) {
      // Four threads know of a step: its u, and in the end its result.
      const int64_t t = t0 + step;
      const bool inside = t < seq, writer = inside && lane % QUARTERS == 0;
      const T gate = inside ? silu(u(batch, channel, t)) : T(0);
      T angles[STEPS];
      find_angles(angles, tiles, u, x, bias, batch, channel, state0, t0, t0 == 0);
      if (lane % QUARTERS == 0) tiles.v[step] = inside ? dt(batch, channel, t) * gate : T(0);
      __syncthreads();  // v is there; nobody reads the sums of the tile before any more
      UNROLL
      for (int s = 0; s < STEPS; ++s) {
        if (t0 + s < seq) phase += phase_of(angles[s]);
        const Complex<T> e = unit<T>(phase);
        sum = sum + b * conj(e) * (tiles.v[s] + (angles[s] - angles[s]));  // NaN, where a phase cannot be one
        tiles.sums[s][lane] = (c * (e * sum)).re;
      }
      if (own && ends.size[0] && ((t0 + STEPS) % slab == 0 || t0 + STEPS >= seq))
        ends(t0 / slab, batch, channel, j) = sum;
      T total = sum_of_states(tiles);
      if (writer) {
        total += state0 ? w(batch, channel, t) : D(channel) * gate;
        w(batch, channel, t) = total;
        y(batch, channel, t) = total * silu(z(batch, channel, t));
      }
    }
    if (own) {
      last(batch, channel, j) = unit<T>(phase) * sum;
      reinterpret_cast<Phase<T>&>(phases(batch, channel, j)) = phase;
    }
  }
}

// Where a block adds up, slab after slab, what others will add to theirs: the first time there is nothing to add to.
template <typename T>
__device__ __forceinline__ void add(T& place, T value, bool fresh) {
  place = fresh ? value : place + value;
}

// One slab of time, from t_end - 1 down to t_begin, of the batches from batch0 on; `fresh`: the first one of a place.
// grid (group d), block (LANES)
template <typename T>
__global__ void __launch_bounds__(LANES, BLOCKS)
    adaptive_unitary_backward(View<const T, 3> dy,              // [batch, channels, seq]
                              View<const Complex<T>, 3> dlast,  // [batch, channels, states]
                              View<const T, 3> u,               // [batch, channels, seq]
                              View<const T, 3> dt,              // [batch, channels, seq]
                              View<const T, 3> x,               // [channels, states, channels]
                              View<const T, 2> x_bias,          // [channels, states]
                              View<const Complex<T>, 1> B,      // [states]
                              View<const Complex<T>, 1> C,      // [states]
                              View<const T, 1> D,               // [channels]
                              View<const T, 3> z,               // [batch, channels, seq]
                              View<const T, 3> w,               // [batch, channels, seq]
                              View<const Complex<T>, 4> ends,   // [slabs, batch, channels, states]
                              View<const T, 3> phases,          // [batch, channels, states], at the end of this slab
                              View<T, 3> earlier,               // [batch, channels, states], at its beginning
                              View<T, 3> du,                    // [batch, channels, seq], without the part by theta
                              View<T, 3> ddt,                   // [batch, channels, seq]
                              View<T, 3> dz,                    // [batch, channels, seq]
                              View<Complex<T>, 3> dstate,       // [batch, channels, states], m until all is done
                              View<T, 3> dtheta,                // [group, slab, channels states]
                              View<T, 3> dbias,                 // [group, channels, states]
                              View<Complex<T>, 3> dB,           // [group, channels, states], of the polar B
                              View<Complex<T>, 3> dC,           // [group, channels, states], of the polar C
                              View<T, 2> dD,                    // [group, channels]
                              int64_t batch0, int64_t t_begin, int64_t t_end, bool fresh) {
  __shared__ Tiles<T> tiles;
  const int64_t channels = u.size[1], seq = u.size[2], states = x.size[1];
  const int64_t place = blockIdx.x / channels, batch = batch0 + place, channel = blockIdx.x % channels;
  const int lane = threadIdx.x, step = lane / QUARTERS;
  const bool writes = lane % QUARTERS == 0;

  T gates = 0;  // of the steps that this thread writes: its part of dD
  for (int64_t state0 = 0; state0 == 0 || state0 < states; state0 += LANES) {
    const int64_t j = state0 + lane, last_tile = (t_end - t_begin - 1) / STEPS * STEPS + t_begin;
    const bool own = j < states;
    const Complex<T> b = polar(B, j), c = polar(C, j);
    const T bias = own ? x_bias(channel, j) : T(0);
    Phase<T> phase = 0;
    Complex<T> sum = 0, m = 0, db = 0, dc = 0;
    T of_bias = 0;
    if (own) {
      phase = reinterpret_cast<const Phase<T>&>(phases(batch, channel, j));
      sum = ends(t_begin / dtheta.size[1], batch, channel, j);
      m = t_end == seq ? conj(unit<T>(phase)) * dlast(batch, channel, j) : dstate(batch, channel, j);
    }
    for (int64_t t0 = last_tile; t0 >= t_begin; t0 -= STEPS) {
      const int64_t t = t0 + step;
      const bool inside = t < t_end;
      const T input = inside ? u(batch, channel, t) : T(0), rate = inside ? dt(batch, channel, t) : T(0);
      const T gate = silu(input), grad = inside ? dy(batch, channel, t) : T(0);
      const T out = inside ? z(batch, channel, t) : T(0), grad_w = grad * silu(out);
      T angles[STEPS];
      find_angles(angles, tiles, u, x, bias, batch, channel, state0, t0, t0 == last_tile);
      if (writes) tiles.v[step] = rate * gate, tiles.g[step] = grad_w;
      __syncthreads();  // v and g are there; nobody reads the sums of the tile before any more
      UNROLL
      for (int s = STEPS - 1; s >= 0; --s) {
        const Complex<T> e = unit<T>(phase);
        m = m + conj(c * e) * tiles.g[s];
        const Complex<T> lambda = e * m;
        db = db + lambda * tiles.v[s];
        dc = dc + conj(e * sum) * tiles.g[s];
        sum = sum - b * conj(e) * tiles.v[s];  // the s of the step before
        const T angle = m.im * sum.re - m.re * sum.im;
        tiles.sums[s][lane] = (conj(lambda) * b).re;
        if (t0 + s < t_end) {
          of_bias += angle;
          phase -= phase_of(angles[s]);
          if (own) dtheta(place, t0 + s - t_begin, channel * states + j) = angle;
        }
      }
      T dv = sum_of_states(tiles);
      if (inside && writes) {
        if (state0) dv += ddt(batch, channel, t);
        if (state0 + LANES < states) {
          ddt(batch, channel, t) = dv;  // until all states have been here
        } else {
          ddt(batch, channel, t) = dv * gate;
          du(batch, channel, t) = (dv * rate + grad_w * D(channel)) * silu_derivative(input);
          dz(batch, channel, t) = grad * w(batch, channel, t) * silu_derivative(out);
          gates += grad_w * gate;
        }
      }
    }
    if (own) {
      reinterpret_cast<Phase<T>&>(earlier(batch, channel, j)) = phase;
      dstate(batch, channel, j) = m;
      add(dbias(place, channel, j), of_bias, fresh);
      add(dB(place, channel, j), db, fresh);
      add(dC(place, channel, j), dc, fresh);
    }
  }
  __syncthreads();  // the sums have been read
  if (writes) tiles.sums[step][0] = gates;
  __syncthreads();  // and are now those of dD
  if (lane == 0) {
    T total = 0;
    for (int s = 0; s < STEPS; ++s) total += tiles.sums[s][0];
    add(dD(place, channel), total, fresh);
  }
}

// du += x^T dtheta: a warp takes every WARPS-th of the channels and states, a lane one input, for STEPS steps at once.
// grid (group ceil(steps / STEPS) ceil(d / INPUTS)), block (INPUTS, WARPS)
template <typename T>
constexpr int WARPS = 32 / int(sizeof(T));  // as many as shared memory has room for
template <typename T>
__global__ void __launch_bounds__(INPUTS* WARPS<T>)
    input_gradient(View<const T, 3> dtheta,  // [group, slab, channels states]
                   View<const T, 3> x,       // [channels, states, inputs]
                   View<T, 3> du,            // [batch, inputs, seq]
                   int64_t batch0, int64_t t_begin, int64_t t_end) {
  constexpr int TILE = 16 * WARPS<T>;  // of the channels and states
  alignas(16) __shared__ T tile[TILE][STEPS];
  __shared__ T sums[WARPS<T>][STEPS][INPUTS + 1];
  const int64_t states = x.size[1], inputs = x.size[2], all = x.size[0] * states;
  const int64_t across = ceil_div(inputs, INPUTS), down = ceil_div(t_end - t_begin, STEPS);
  const int64_t place = blockIdx.x / (across * down), t0 = blockIdx.x / across % down * STEPS;
  const int64_t r = blockIdx.x % across * INPUTS + threadIdx.x;
  const int lane = threadIdx.x, warp = threadIdx.y, thread = warp * INPUTS + lane;

  T sum[STEPS] = {};
  int64_t channel = 0, state = warp;  // of the next row of x
  for (int64_t k0 = 0; k0 < all; k0 += TILE) {
    __syncthreads();  // everyone is done with the tile before
    for (int e = thread; e < TILE * STEPS; e += INPUTS * WARPS<T>) {
      const int k = e % TILE, s = e / TILE;
      tile[k][s] = k0 + k < all && t_begin + t0 + s < t_end ? dtheta(place, t0 + s, k0 + k) : T(0);
    }
    __syncthreads();  // the tile is there
    for (int k = warp; k < TILE; k += WARPS<T>, state += WARPS<T>) {
      while (state >= states) state -= states, ++channel;  // rather than a division of 64 bits
      const T weight = k0 + k < all && r < inputs ? x(channel, state, r) : T(0);
      UNROLL
      for (int s = 0; s < STEPS; s += WIDE<T>) {
        const auto group = load_vector<WIDE<T>>(&tile[k][s]);
        UNROLL
        for (int i = 0; i < WIDE<T>; ++i) sum[s + i] += weight * group[i];
      }
    }
  }
  UNROLL
  for (int s = 0; s < STEPS; ++s) sums[warp][s][lane] = sum[s];
  __syncthreads();  // all warps' sums are there
  for (int e = thread; e < INPUTS * STEPS; e += INPUTS * WARPS<T>) {
    const int s = e % STEPS, input = e / STEPS;
    const int64_t row = r - lane + input, t = t_begin + t0 + s;
    if (row >= inputs || t >= t_end) continue;
    T total = 0;
    for (int i = 0; i < WARPS<T>; ++i) total += sums[i][s][input];
    du(batch0 + place, row, t) += total;
  }
}

// dx of one place += dtheta u^T: a thread takes one channel and state, for INPUTS inputs at once.
// grid (group ceil(channels states / THREADS) ceil(inputs / INPUTS)), block (THREADS)
constexpr int THREADS = 128;
constexpr int ROWS = 32;  // steps of u in shared memory at a time
template <typename T>
__global__ void __launch_bounds__(THREADS) weight_gradient(View<const T, 3> dtheta,  // [group, slab, channels states]
                                                           View<const T, 3> u,       // [batch, inputs, seq]
                                                           View<T, 3> dx,            // [group, inputs, channels states]
                                                           int64_t batch0, int64_t t_begin, int64_t t_end, bool fresh) {
  alignas(16) __shared__ T tile[ROWS][INPUTS];
  const int64_t all = dx.size[2], inputs = dx.size[1];
  const int64_t across = ceil_div(inputs, INPUTS), down = ceil_div(all, THREADS);
  const int64_t place = blockIdx.x / (across * down), k = blockIdx.x / across % down * THREADS + threadIdx.x;
  const int64_t r0 = blockIdx.x % across * INPUTS;

  T sum[INPUTS] = {};
  for (int64_t t0 = t_begin; t0 < t_end; t0 += ROWS) {
    __syncthreads();  // everyone is done with the tile before
    for (int e = threadIdx.x; e < ROWS * INPUTS; e += THREADS) {
      const int s = e % ROWS, r = e / ROWS;
      tile[s][r] = t0 + s < t_end && r0 + r < inputs ? u(batch0 + place, r0 + r, t0 + s) : T(0);
    }
    __syncthreads();  // the tile is there
    for (int s = 0; s < ROWS && t0 + s < t_end; ++s) {
      const T angle = k < all ? dtheta(place, t0 + s - t_begin, k) : T(0);
      UNROLL
      for (int r = 0; r < INPUTS; r += WIDE<T>) {
        const auto group = load_vector<WIDE<T>>(&tile[s][r]);
        UNROLL
        for (int i = 0; i < WIDE<T>; ++i) sum[r + i] += angle * group[i];
      }
    }
  }
  UNROLL
  for (int r = 0; r < INPUTS; ++r) {
    if (k < all && r0 + r < inputs) add(dx(place, r0 + r, k), sum[r], fresh);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// dispatch_floating, for the two types whose complex numbers there are.
template <typename Body>
void dispatch_wide(DType dtype, Body&& body) {
  if (dtype == DType::float32) return body.template operator()<float>();
#if !defined(FLOAT_ONLY)
  if (dtype == DType::float64) return body.template operator()<double>();
#endif
  throw std::invalid_argument(std::string("this kernel does not take ") + name_of(dtype));
}

void adaptive_unitary(Input<3> u, Input<3> dt, Input<3> x, Input<2> x_bias, Input<1> B, Input<1> C, Input<1> D,
                      Input<3> z, Input<3> state, Output<3> y, Output<3> w, Output<3> last, Output<4> ends,
                      Output<3> phases, int64_t slab, Stream stream) {
  dispatch_wide(u.dtype, [&]<typename T>() {
    using C2 = Complex<T>;
    launch<adaptive_unitary<T>>({u.size[0] * u.size[1]}, dim3(LANES), 0, stream, u.as<T>(), dt.as<T>(), x.as<T>(),
                                x_bias.as<T>(), B.as<C2>(), C.as<C2>(), D.as<T>(), z.as<T>(), state.as<C2>(), y.as<T>(),
                                w.as<T>(), last.as<C2>(), ends.as<C2>(), phases.as<T>(), slab);
  });
}

void adaptive_unitary_backward(Input<3> dy, Input<3> dlast, Input<3> u, Input<3> dt, Input<3> x, Input<2> x_bias,
                               Input<1> B, Input<1> C, Input<1> D, Input<3> z, Input<3> w, Input<4> ends,
                               Input<3> phases, Output<3> du, Output<3> ddt, Output<3> dz, Output<3> dstate,
                               Output<3> earlier, Output<3> dtheta, Output<3> dbias, Output<3> dB, Output<3> dC,
                               Output<2> dD, Output<3> dx, Stream stream) {
  const int64_t batches = u.size[0], channels = u.size[1], seq = u.size[2];
  const int64_t group = dtheta.size[0], slab = dtheta.size[1], all = dtheta.size[2];
  dispatch_wide(u.dtype, [&]<typename T>() {
    using C2 = Complex<T>;
    const auto between = read_only(earlier.as<T>()), angles = read_only(dtheta.as<T>());
    for (int64_t batch0 = 0; batch0 < batches; batch0 += group) {
      const int64_t places = batches - batch0 < group ? batches - batch0 : group;
      for (int64_t t_begin = (seq - 1) / slab * slab; t_begin >= 0; t_begin -= slab) {
        const int64_t t_end = t_begin + slab < seq ? t_begin + slab : seq;
        const bool last = t_end == seq, fresh = batch0 == 0 && last;
        launch<adaptive_unitary_backward<T>>(
            {places * channels}, dim3(LANES), 0, stream, dy.as<T>(), dlast.as<C2>(), u.as<T>(), dt.as<T>(), x.as<T>(),
            x_bias.as<T>(), B.as<C2>(), C.as<C2>(), D.as<T>(), z.as<T>(), w.as<T>(), ends.as<C2>(),
            last ? phases.as<T>() : between, earlier.as<T>(), du.as<T>(), ddt.as<T>(), dz.as<T>(), dstate.as<C2>(),
            dtheta.as<T>(), dbias.as<T>(), dB.as<C2>(), dC.as<C2>(), dD.as<T>(), batch0, t_begin, t_end, fresh);
        launch<input_gradient<T>>({places * ceil_div(t_end - t_begin, STEPS) * ceil_div(channels, INPUTS)},
                                  dim3(INPUTS, WARPS<T>), 0, stream, angles, x.as<T>(), du.as<T>(), batch0, t_begin,
                                  t_end);
        launch<weight_gradient<T>>({places * ceil_div(all, THREADS) * ceil_div(channels, INPUTS)}, dim3(THREADS), 0,
                                   stream, angles, u.as<T>(), dx.as<T>(), batch0, t_begin, t_end, fresh);
      }
    }
  });
}
