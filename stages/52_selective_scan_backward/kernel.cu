// Stage 52: the selective scan, forward and backward
//
// Problem   The gradients of stage 51 for all that goes into it, through y and through the last state, for every method.
//           With g = dy silu(z) and lambda[t] the gradient of h[t]: lambda[t] = C[t] g[t] + A_bar[t + 1] lambda[t + 1];
//           dC = g h, d(A_bar) = lambda h[t - 1], d(gain) = lambda B u, and from these by the method's derivatives dA and
//           d(dt); dB and du from gain lambda. Sums over states: du, d(dt). Over channels: dB, dC. Over time: dA.
// Before    Stage 51 forgets all states but the last. Those of all steps would be n times as large as
//           u, and their gradients, too.
// Idea      Keep the states before every CHUNK of steps, and make the others anew. A walk back in time, which is stage 51
//           the other way round, finds the gradients of the states after every CHUNK. Then chunks have nothing to do with
//           each other, and all of them are worked on at once: long sequences of few channels fill the card, too.
//           In a chunk lanes are pieces of time, and steps are put together as in stage 44. So a lane has the same steps
//           of one channel after the other, and what is summed over channels stays in its registers: B and C are read
//           once, and their gradients are written once, in a fixed order. An exponential is taken once.
// Mapping   walk: as in stage 51.  gradients, block: a chunk of time, and every `parts`-th ROWS of the channels that have
//           the same B and C.  warp: OF_WARP states of a channel, two at a time.  half a warp: a chunk of a state.
//           lane: LENGTH steps. Sums over states: the lane's own, then those of 2 WARPS halves in shared memory, in order.
// Cost      Forward, float32 without z, T = 32 L, n = 2 P <= 16, d a multiple of CH = 128 / P, W = P CH / 32; a block
//             global load sectors  8 L (CH + n) + (W + 1) CH / 8 + 32 W     store sectors  4 L CH + 32 W
//             barriers             2 L + 2                                  copies         2 L (CH + n)
//           of which there are B d / CH. Backward: a state and step takes two exponentials, one on the walk back and one
//           in its chunk, and two shuffles, by which segments of a chunk learn of each other.
// Limits    Without gradients it is stage 51. Beside inputs, results and gradients there are two numbers of each state for
//           each chunk in memory, for foh three. With n = 16 that is 1 byte to 12 or more of u, delta, y and gradients.
//           Of complex128 a chunk is shorter. A chunk whose states grow past what a float holds, as a segment's map is
//           their product, is NaN where one step after the other would be infinite. In double the method is chosen at
//           each step, not when the kernel is compiled, of which there would be twice as many.
// Run       python -m stages run 52

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "common/async_copy.h"
#include "common/complex.h"
#include "common/device.h"
#include "common/discretize.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/phi.h"
#include "common/vector.h"
#include "common/view.h"

constexpr int FEW_THREADS = 128, MOST_THREADS = 256;  // of a block; more than FEW for many states alone
constexpr int CHANNELS = 8;                           // of a block, if it takes more threads
constexpr int FOUR = 4;                               // steps that lie together in shared memory
template <typename N>
constexpr int STEPS = 128 / int(sizeof(N));  // of a tile
template <typename N>
constexpr int CHUNK = sizeof(N) == 16 ? 32 : 128;  // steps, before each of which the states are kept
template <typename N, int S>
constexpr int BLOCKS = std::is_same_v<N, float> ? 2 : 1;  // at a time, if they are large: how many registers
template <int S>
constexpr int RECORD = (FOUR + 1) * S;  // S states of B or C, FOUR steps, and a gap: the next ones are in other banks

constexpr Method ANY = Method(9);  // one that is only known when the kernel runs: for types that are not for speed
template <Method M>
constexpr bool EXPONENT_ALONE = M == Method::mamba || M == Method::dirac;  // what a step needs of dt A is e^z
template <Method M>
constexpr bool DIVIDES = M == Method::zoh || M == Method::foh || M == ANY;  // or 1 / z, too
template <Method M>
constexpr bool LOOKS_BACK = M == Method::foh || M == ANY;  // or the input of the step before
// A method that takes the same of a state from step to step: gradients of states go back by it alone.
template <Method M>
constexpr Method DECAYS = LOOKS_BACK<M> || M == Method::bilinear || M == Method::backward_euler ? M : Method::mamba;
template <typename N>
constexpr int PARTS = int(sizeof(N) / sizeof(Real<N>));  // 2 of a complex number

// ---- arithmetic -----------------------------------------------------------------------------------------------------
template <typename T>
__device__ __forceinline__ T multiply_add(T x, T y, T z) {
  return x * y + z;
}
template <typename T>
__device__ __forceinline__ Complex<T> multiply_add(Complex<T> x, Complex<T> y, Complex<T> z) {
  return {z.re + x.re * y.re - x.im * y.im, z.im + x.re * y.im + x.im * y.re};
}

// What y takes of a state: c h, of complex numbers the real part.
template <typename T>
__device__ __forceinline__ T add_seen(T sum, T c, T h) {
  return sum + c * h;
}
template <typename T>
__device__ __forceinline__ T add_seen(T sum, Complex<T> c, Complex<T> h) {
  return sum + c.re * h.re - c.im * h.im;
}

// e^x for an x that was multiplied by PER_E. A float's is a power of 2, one instruction of a GPU, right to 2^-22.
template <typename T>
constexpr T PER_E = sizeof(T) == 4 ? T(1.44269504088896340736) : T(1);
__device__ __forceinline__ double power(double x) { return std::exp(x); }
__device__ __forceinline__ float power(float x) {
#if defined(__CUDACC__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return std::exp2(x);
#endif
}

// cos + i sin of the angle rate dt. What roundings take from the product and from its turns is kept, as each step turns a
// state further.
__device__ __forceinline__ Complex<double> direction(double rate, double dt) {
  return exponential(Complex<double>(0, rate * dt));
}
__device__ __forceinline__ Complex<float> direction(float rate, float dt) {
  const float angle = rate * dt, lost = std::fma(rate, dt, -angle);
  const Turns<float> turns = turns_of(angle);
  const float rest = turns.rest + lost * detail::PhaseOf<float>::PER_RADIAN;
  const float part = 2 * ((turns.rounded - rint(turns.rounded)) + rest);  // of half a turn
  float sine, cosine;
#if defined(__CUDACC__)
  sincospif(part, &sine, &cosine);
#else
  sine = std::sin(part * 3.14159265358979323846f), cosine = std::cos(part * 3.14159265358979323846f);
#endif
  return {cosine, sine};
}

// A so that e^(dt A) needs no multiplication but the one by dt, and e^(dt A) of that.
template <typename T>
__device__ __forceinline__ T scaled(T a) {
  return a * PER_E<T>;
}
template <typename T>
__device__ __forceinline__ Complex<T> scaled(Complex<T> a) {
  return {a.re * PER_E<T>, a.im};
}
template <typename T>
__device__ __forceinline__ T decay(T a_scaled, T dt) {
  return power(a_scaled * dt);
}
template <typename T>
__device__ __forceinline__ Complex<T> decay(Complex<T> a_scaled, T dt) {
  return direction(a_scaled.im, dt) * power(a_scaled.re * dt);
}

// log(1 + e), 0 < e <= 1. Of a small e by its series: beside 1 it would be rounded.
__device__ __forceinline__ double log_of_one_plus(double e) { return std::log1p(e); }
__device__ __forceinline__ float log_of_one_plus(float e) {
  float sum = 1.0f / 7;
  UNROLL
  for (int k = 6; k > 0; --k) sum = 1.0f / k - e * sum;
#if defined(__CUDACC__)
  const float whole = __logf(1 + e);
#else
  const float whole = std::log(1 + e);
#endif
  return e < 0.125f ? e * sum : whole;
}
template <typename T>
__device__ __forceinline__ T softplus(T x) {
  return (x > 0 ? x : T(0)) + log_of_one_plus(power((x > 0 ? -x : x) * PER_E<T>));
}
template <typename T>
__device__ __forceinline__ T silu(T x) {
  return x * reciprocal(T(1) + power(-x * PER_E<T>));
}

// body.operator()<L>() with the method L, which is M unless that is ANY.
template <typename Body>
NOINLINE __device__ auto with_any(Method method, const Body& body) {
  switch (method) {
    case Method::zoh: return body.template operator()<Method::zoh>();
    case Method::foh: return body.template operator()<Method::foh>();
    case Method::bilinear: return body.template operator()<Method::bilinear>();
    case Method::highorder: return body.template operator()<Method::highorder>();
    case Method::poly: return body.template operator()<Method::poly>();
    case Method::rk4: return body.template operator()<Method::rk4>();
    case Method::dirac: return body.template operator()<Method::dirac>();
    case Method::backward_euler: return body.template operator()<Method::backward_euler>();
    default: return body.template operator()<Method::mamba>();
  }
}
template <Method M, typename Body>
__device__ __forceinline__ auto by_method(Method method, const Body& body) {
  if constexpr (M == ANY) return with_any(method, body);
  else return body.template operator()<M>();
}

// A_bar. Of the two methods that divide it is 1 + A gain: near 1, where it counts for long what a step forgets, it is
// rounded once. Near 0, which backward_euler's is in large steps, it is not.
template <Method M, typename N>
__device__ __forceinline__ N left_of(N a, const Coefficients<N>& by) {
  if constexpr (M == Method::bilinear) return multiply_add(a, by.gain, N(1));
  if constexpr (M == Method::backward_euler) {
    return within(a * by.gain, Real<N>(0.5)) ? multiply_add(a, by.gain, N(1)) : by.a_bar;
  }
  return by.a_bar;
}

// ---- a state --------------------------------------------------------------------------------------------------------
template <typename N, Method M>
struct State {
  Method method = M;
  N h = 0, a = 0, over_a = 0, before = 0;  // a is `scaled` if its exponential is all; 1 / a; B u of the step before
                                           // back in time: what the step after takes of the input before it

  __device__ __forceinline__ void set(N start, N rate, Method by) {
    method = by, h = start, a = EXPONENT_ALONE<M> ? scaled(rate) : rate;
    if constexpr (DIVIDES<M>) over_a = detail::divided(N(1), rate);
  }

  __device__ __forceinline__ void step(Real<N> dt, Real<N> over_dt, Real<N> u, N b) {
    if constexpr (EXPONENT_ALONE<M>) {
      h = multiply_add(decay(a, dt), h, b * (M == Method::mamba ? dt * u : u));
    } else {
      const Exponent<N> z{a * dt, over_a * over_dt, decay(scaled(a), dt)};
      const auto by = by_method<M>(method, [&]<Method L>() { return coefficients<L>(a, dt, z); });
      if constexpr (LOOKS_BACK<M>) {
        const N taken = b * u;
        h = multiply_add(by.a_bar, h, multiply_add(by.gain, taken, by.previous * before));
        before = taken;
      } else {
        h = multiply_add(left_of<M>(a, by), h, by.gain * u * b);
      }
    }
  }

  // The same back in time, with the conjugate of A: h is the gradient of the state before the step. M is DECAYS of it.
  __device__ __forceinline__ void step_back(Real<N> dt, Real<N> over_dt, Real<N> dy, N c) {
    const N of_state = h + c * dy;
    if constexpr (EXPONENT_ALONE<M>) {
      h = decay(a, dt) * of_state;
    } else {
      const Exponent<N> z{a * dt, over_a * over_dt, decay(scaled(a), dt)};
      const auto by = by_method<M>(method, [&]<Method L>() { return coefficients<L>(a, dt, z); });
      h = left_of<M>(a, by) * of_state;
      if constexpr (LOOKS_BACK<M>) before = by.previous * of_state;
    }
  }
};

// ---- what is copied -------------------------------------------------------------------------------------------------
// A tensor whose last dimension is time, as copies see it: bytes. What numbers they are is looked at where they are used,
// so that the walk through time is compiled once for all types that are computed with in float.
template <int D>
struct Rows {
  unsigned char* data;
  int64_t size[D], stride[D];  // strides in bytes
  DType dtype;
  int bytes;   // of a number
  int pitch;   // of a tile's row in shared memory, in bytes: neighbouring rows begin in other banks
  int groups;  // of 16 bytes in a row: 2 to that power
  bool wide;   // rows are made of such groups

  Rows(const AnyView<D>& x, int steps) : data(static_cast<unsigned char*>(x.data)), dtype(x.dtype), groups(0) {
    bytes = size_of(dtype), pitch = steps * bytes + 16;
    while (16 << groups < steps * bytes) ++groups;
    wide = reinterpret_cast<uintptr_t>(data) % 16 == 0 && x.stride[D - 1] == 1 && x.size[D - 1] * bytes % 16 == 0;
    for (int i = 0; i < D; ++i) {
      size[i] = x.size[i], stride[i] = x.stride[i] * bytes;
      if (i < D - 1) wide &= size[i] <= 1 || stride[i] % 16 == 0;
    }
  }
};

// What a thread copies of a tensor whose rows are made of groups of 16 bytes: the same place in every `more`-th row.
struct Groups {
  const unsigned char* from;  // in its first row, at step 0
  unsigned char* to;
  int row0, at, more;

  template <int D>
  __device__ __forceinline__ Groups(const Rows<D>& x, const unsigned char* first, unsigned char* tile)
      : row0(threadIdx.x >> x.groups), at((threadIdx.x & ((1 << x.groups) - 1)) * 16), more(blockDim.x >> x.groups) {
    from = first + row0 * x.stride[D - 2] + at, to = tile + row0 * x.pitch + at;
  }

  // Starts the copies of a tile of `height` rows from step t on; zeros stand where there are no more steps or rows.
  template <int D>
  __device__ __forceinline__ void fetch(const Rows<D>& x, int height, int rows, int64_t t, int steps) const {
    const int there = at < steps * x.bytes ? rows : 0;
    const unsigned char* word = from + t * x.bytes;
    unsigned char* place = to;
#pragma unroll 1
    for (int row = row0; row < height; row += more, word += more * x.stride[D - 2], place += more * x.pitch) {
      async_copy<16>(place, word, row < there);
    }
  }
};

// A tensor of which that is not so: number by number, and a table of such in shared memory, where it is in nobody's way.
struct Numbers {
  const unsigned char* first;
  int64_t stride_r, stride_t;
  int tile, pitch, height, rows, bytes, late;  // late: is needed when a tile has been walked, not before

  template <int STEPS>
  __device__ __forceinline__ void fetch(unsigned char* shared, int64_t t, int steps) const {
    const bool down = stride_r < stride_t;  // rows lie closer than steps: neighbouring lanes take those
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < unsigned(height * STEPS); i += blockDim.x) {
      const int row = down ? i % unsigned(height) : i / STEPS, k = down ? i / unsigned(height) : i % STEPS;
      unsigned char* to = shared + tile + row * pitch + k * bytes;
      const unsigned char* word = first + row * stride_r + (t + k) * stride_t;
      const bool inside = row < rows && k < steps;
      if (bytes == 16) async_copy<16>(to, word, inside);
      else if (bytes == 8) async_copy<8>(to, word, inside);
      else if (bytes == 4) async_copy<4>(to, word, inside);
      else *reinterpret_cast<uint16_t*>(to) = inside ? *reinterpret_cast<const uint16_t*>(word) : uint16_t(0);
    }
  }
};

// body.operator()<T>() for the type T of a tensor's numbers, one of those that are computed with as N.
template <typename N, typename Body>
__device__ __forceinline__ void with_type(DType dtype, Body&& body) {
  if constexpr (std::is_same_v<N, float>) {
    if (dtype == DType::float16) return body.template operator()<half>();
    if (dtype == DType::bfloat16) return body.template operator()<bfloat16>();
  }
  body.template operator()<N>();
}

// COUNT neighbours in shared memory, by as few loads as there can be.
template <int COUNT, typename From, typename T>
__device__ __forceinline__ void load_row(T (&values)[COUNT], const From* from) {
  constexpr int WIDE = COUNT * int(sizeof(From)) < 16 ? COUNT : 16 / int(sizeof(From));
  UNROLL
  for (int k = 0; k < COUNT; k += WIDE) {
    const auto group = load_vector<WIDE>(from + k);
    UNROLL
    for (int i = 0; i < WIDE; ++i) values[k + i] = T(group[i]);
  }
}
template <int COUNT, typename T>
__device__ __forceinline__ void load_row(Complex<T> (&values)[COUNT], const Complex<T>* from) {
  T parts[2 * COUNT];
  load_row(parts, reinterpret_cast<const T*>(from));
  UNROLL
  for (int k = 0; k < COUNT; ++k) values[k] = Complex<T>(parts[2 * k], parts[2 * k + 1]);
}

template <int COUNT, typename To, typename T>
__device__ __forceinline__ void store_row(To* to, const T (&values)[COUNT]) {
  constexpr int WIDE = COUNT * int(sizeof(To)) < 16 ? COUNT : 16 / int(sizeof(To));
  UNROLL
  for (int k = 0; k < COUNT; k += WIDE) {
    Vector<To, WIDE> group;
    UNROLL
    for (int i = 0; i < WIDE; ++i) group[i] = To(values[k + i]);
    store_vector(to + k, group);
  }
}

// FOUR of a tensor's numbers that were copied.
template <typename N>
__device__ __forceinline__ void load_four(N (&numbers)[FOUR], const unsigned char* row, int k, DType dtype) {
  with_type<N>(dtype, [&]<typename From>() { load_row(numbers, reinterpret_cast<const From*>(row) + k); });
}

// ---------------------------------------------------------------------------------------------------------------------
// How the work is cut, and where a block's shared memory has what, in bytes.
struct Plan {
  int channels, lanes, padded;      // channels of a block, threads of a channel, states that these have
  int64_t share;                    // neighbouring channels that have the same groups of B and of C
  int u, delta, z, B, C;            // as they were copied: [channel or state][step]
  int lengths, inputs, b, c, sums;  // as the walk reads and writes them, FOUR steps together
  int bytes;
};

// grid (B d / channels), block (lanes channels and what fills a warp): thread part * channels + c has S states of c.
// BACK: from the last step to the first, with dy for u, C for B, and gradients for states; y, C and D are not there, and
// z is the gate of dy.
template <typename N, Method M, int S, bool BACK>
__global__ void __launch_bounds__(MOST_THREADS, BLOCKS<N, S>)
    walk(Rows<3> u,                       // [batch, channels, seq]
         Rows<3> delta,                   // [batch, channels, seq]
         View<const N, 2> A,              // [channels, states]
         Rows<4> B,                       // [batch, groups, states, seq], or with 1 for seq
         Rows<4> C,                       // likewise
         View<const Real<N>, 1> D,        // [channels], or empty
         Rows<3> z,                       // [batch, channels, seq], or empty
         View<const Real<N>, 1> bias,     // [channels], or empty
         View<const N, 3> initial_state,  // [batch, channels, states], or empty
         Rows<3> y,                       // [batch, channels, seq]
         View<N, 3> last_state,           // [batch, channels, states]
         View<N, 4> kept,                 // [chunks, batch, channels, states], or empty: before each CHUNK;
                                          // BACK: after each, and as many more for `before`
         bool with_softplus, Method method, Plan plan) {
  using T = Real<N>;
  constexpr int TILE = STEPS<N>;
  DYNAMIC_SHARED(unsigned char, shared);
  T* const lengths = reinterpret_cast<T*>(shared + plan.lengths);  // dt: [four][channel][step]
  T* const inputs = reinterpret_cast<T*>(shared + plan.inputs);    // u, likewise
  N* const tile_b = reinterpret_cast<N*>(shared + plan.b);         // [four][part][step][state]
  N* const tile_c = reinterpret_cast<N*>(shared + plan.c);
  T* const sums = reinterpret_cast<T*>(shared + plan.sums);  // what each thread adds to y: [four][thread][step]

  const unsigned channels = unsigned(u.size[1]), pieces = unsigned(ceil_div(plan.share, plan.channels));
  const unsigned shares = channels / unsigned(plan.share), piece = blockIdx.x % pieces, share = blockIdx.x / pieces;
  const int64_t seq = u.size[2], batch = share / shares, first = int64_t(piece) * plan.channels;
  const int64_t channel0 = share % shares * plan.share + first;
  const int rows = int(min(plan.share - first, int64_t(plan.channels)));
  const int states = int(A.size[1]), threads = blockDim.x;
  const int c = threadIdx.x % unsigned(plan.channels), part = threadIdx.x / unsigned(plan.channels), state0 = part * S;
  const int64_t channel = channel0 + c;
  const bool walks = part < plan.lanes, present = walks && c < rows;
  const int pitch_bc = plan.lanes * RECORD<S>, pitch_held = pitch_bc + 16 / int(sizeof(N));
  const int pitch_sums = (plan.lanes * plan.channels + 1) * FOUR;
  const bool holds_b = B.size[3] == 1, holds_c = C.size[3] == 1;  // for all time

  // Where the block's rows begin.
  const auto of_channels = [&](const Rows<3>& x) { return x.data + batch * x.stride[0] + channel0 * x.stride[1]; };
  const auto of_states = [&](const Rows<4>& x, int64_t of_channel) {
    const unsigned in_group = channels / unsigned(x.size[1]);
    return x.data + batch * x.stride[0] + unsigned(of_channel) / in_group * x.stride[1];
  };

  // What holds for all time is there from the beginning, a row for each channel, the same FOUR times.
  const auto hold = [&](const Rows<4>& x, N* tile, T factor) {
    if (!walks) return;
    const unsigned char* from = of_states(x, channel);
#pragma unroll 1
    for (int j = state0; j < state0 + S; ++j) {
      N number = 0;
      if (present && j < states) {
        with_type<N>(x.dtype,
                     [&]<typename From>() { number = N(*reinterpret_cast<const From*>(from + j * x.stride[2])); });
      }
      if (BACK) number = conj(number);
      for (int i = 0; i < FOUR; ++i) tile[c * pitch_held + part * RECORD<S> + i * S + j - state0] = number * factor;
    }
  };
  // A tile of time comes by groups or number by number: what it is walked with, and late, when it has been, the gates.
  __shared__ Numbers singly[5];
  const bool gated = z.size[0] > 0;
  int count = 0;
  const auto add = [&](const auto& x, const unsigned char* first, int tile, int height, int there, bool late) {
    if (x.wide || height == 0) return;
    constexpr int D = sizeof(x.size) / sizeof(int64_t);
    if (threadIdx.x == 0) {
      singly[count] = {first, x.stride[D - 2], x.stride[D - 1], tile, x.pitch, height, there, x.bytes, late};
    }
    ++count;
  };
  const int rows_b = holds_b ? 0 : plan.padded, rows_c = holds_c || BACK ? 0 : plan.padded,
            rows_z = gated ? plan.channels : 0;
  add(u, of_channels(u), plan.u, plan.channels, rows, false);
  add(delta, of_channels(delta), plan.delta, plan.channels, rows, false);
  add(B, of_states(B, channel0), plan.B, rows_b, states, false);
  add(C, of_states(C, channel0), plan.C, rows_c, states, false);
  add(z, of_channels(z), plan.z, rows_z, rows, !BACK);
  const Groups u_groups(u, of_channels(u), shared + plan.u),
      delta_groups(delta, of_channels(delta), shared + plan.delta);
  const Groups b_groups(B, of_states(B, channel0), shared + plan.B),
      c_groups(C, of_states(C, channel0), shared + plan.C);
  const Groups z_groups(z, of_channels(z), shared + plan.z);
  const auto fetch_inputs = [&](int64_t t) {
    const int steps = int(min(seq - t, int64_t(TILE)));
    if (u.wide) u_groups.fetch(u, plan.channels, rows, t, steps);
    if (delta.wide) delta_groups.fetch(delta, plan.channels, rows, t, steps);
    if (B.wide) b_groups.fetch(B, rows_b, states, t, steps);
    if (C.wide) c_groups.fetch(C, rows_c, states, t, steps);
    if (BACK && gated && z.wide) z_groups.fetch(z, rows_z, rows, t, steps);
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (!singly[i].late) singly[i].fetch<TILE>(shared, t, steps);
    }
  };
  const auto fetch_gates = [&](int64_t t, int steps) {
    if (BACK || !gated) return;
    if (z.wide) z_groups.fetch(z, rows_z, rows, t, steps);
    else singly[count - 1].fetch<TILE>(shared, t, steps);
  };

  // Out of what was copied, the numbers of the walk: time from along the rows to down the columns.
  const T bias_of_channel = present && bias.size[0] ? bias(channel) : T(0);
  const auto prepare_steps = [&](int steps) {
#pragma unroll 1
    for (int k = part; k < TILE / FOUR && walks; k += plan.lanes) {
      T dt[FOUR], input[FOUR];
      load_four(dt, shared + plan.delta + c * delta.pitch, k * FOUR, delta.dtype);
      load_four(input, shared + plan.u + c * u.pitch, k * FOUR, u.dtype);
      if (BACK && gated) {
        T gates[FOUR];
        load_four(gates, shared + plan.z + c * z.pitch, k * FOUR, z.dtype);
        UNROLL
        for (int i = 0; i < FOUR; ++i) input[i] *= silu(gates[i]);
      }
      UNROLL
      for (int i = 0; i < FOUR; ++i) dt[i] += bias_of_channel;
      if (with_softplus) {
        UNROLL
        for (int i = 0; i < FOUR; ++i) dt[i] = softplus(dt[i]);
      }
      if (steps < TILE) {  // past the end, where u is 0, a step of no length changes nothing
        UNROLL
        for (int i = 0; i < FOUR; ++i) dt[i] = k * FOUR + i < steps ? dt[i] : T(0);
      }
      store_row(lengths + (k * plan.channels + c) * FOUR, dt);
      store_row(inputs + (k * plan.channels + c) * FOUR, input);
    }
  };
  // Neighbouring threads take neighbouring states, each FOUR steps.
  const unsigned padded = plan.padded;
  const int first_state = threadIdx.x % padded, first_four = threadIdx.x / padded;
  const int more_states = threads % padded, more_fours = threads / padded;
  const auto prepare_states = [&](const Rows<4>& x, const unsigned char* from, N* tile, T factor) {
    int j = first_state, k = first_four;
#pragma unroll 1
    while (k < TILE / FOUR) {
      N numbers[FOUR];
      load_four(numbers, from + j * x.pitch, k * FOUR, x.dtype);
      N* to = tile + k * pitch_bc + j / S * RECORD<S> + j % S;
      UNROLL
      for (int i = 0; i < FOUR; ++i) to[i * S] = (BACK ? conj(numbers[i]) : numbers[i]) * factor;
      j += more_states, k += more_fours;
      if (j >= plan.padded) j -= plan.padded, ++k;
    }
  };
  // y, in rows again: FOUR steps of a channel at a time.
  const auto finish = [&](int64_t t0, int steps) {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * (TILE / FOUR); i += threads) {
      const int row = i / (TILE / FOUR), k = i % (TILE / FOUR) * FOUR;
      if (k >= steps) continue;
      T results[FOUR] = {};
#pragma unroll 2
      for (int n = 0; n < plan.lanes; ++n) {
        T parts[FOUR];
        load_row(parts, sums + k / FOUR * pitch_sums + (n * plan.channels + row) * FOUR);
        UNROLL
        for (int m = 0; m < FOUR; ++m) results[m] += parts[m];
      }
      if (z.size[0]) {
        T gates[FOUR];
        load_four(gates, shared + plan.z + row * z.pitch, k, z.dtype);
        UNROLL
        for (int m = 0; m < FOUR; ++m) results[m] *= silu(gates[m]);
      }
      unsigned char* to = of_channels(y) + row * y.stride[1] + (t0 + k) * y.stride[2];
      with_type<T>(y.dtype, [&]<typename To>() {
        if (y.wide && k + FOUR <= steps) {
          store_row(reinterpret_cast<To*>(to), results);
        } else {
          UNROLL
          for (int m = 0; m < FOUR; ++m) {
            if (k + m < steps) *reinterpret_cast<To*>(to + m * y.stride[2]) = To(results[m]);
          }
        }
      });
    }
  };

  State<N, M> state[S];
  UNROLL
  for (int j = 0; j < S; ++j) {
    if (!present || state0 + j >= states) continue;
    const N rate = A(channel, state0 + j);
    state[j].set(initial_state.size[0] ? initial_state(batch, channel, state0 + j) : N(0), BACK ? conj(rate) : rate,
                 method);
  }
  const auto keep = [&](N* to, bool before = false) {  // to: the channel's states in memory
    UNROLL
    for (int j = 0; j < S; ++j) {
      if (present && state0 + j < states) to[state0 + j] = before ? state[j].before : state[j].h;
    }
  };
  const T d = part == 0 && present && D.size[0] ? D(channel) : T(0);
  constexpr int OF_B = BACK ? PARTS<N> : 1;
  if (holds_b) hold(B, tile_b, OF_B);
  if (holds_c && !BACK) hold(C, tile_c, PARTS<N>);

  const int64_t tiles = ceil_div(seq, TILE), chunks = ceil_div(seq, CHUNK<N>);
  for (int64_t n = -1; n < tiles; ++n) {  // at first there is nothing but a tile to come
    const int64_t t0 = (BACK ? tiles - 1 - n : n) * TILE, coming = BACK ? t0 - TILE : t0 + TILE;
    const int steps = n < 0 ? 0 : int(min(seq - t0, int64_t(TILE)));
    if (steps > 0) {
      prepare_steps(steps);
      if (!holds_b) prepare_states(B, shared + plan.B, tile_b, OF_B);
      if (!holds_c && !BACK) prepare_states(C, shared + plan.C, tile_c, PARTS<N>);
    }
    __syncthreads();  // all is prepared; nobody needs what was copied any more, nor the sums and gates of the tile before
    if (coming >= 0 && coming < seq) fetch_inputs(coming);
    if (steps > 0) fetch_gates(t0, steps);
    async_commit();
    if (kept.size[0] && steps > 0) {
      if (!BACK && t0 % CHUNK<N> == 0) keep(&kept(t0 / CHUNK<N>, batch, channel, 0));
      if (BACK && ((t0 + TILE) % CHUNK<N> == 0 || n == 0)) {
        keep(&kept(t0 / CHUNK<N>, batch, channel, 0));
        if (LOOKS_BACK<M> && method == Method::foh) keep(&kept(chunks + t0 / CHUNK<N>, batch, channel, 0), true);
      }
    }

    const N* const first_b = tile_b + (holds_b ? c * pitch_held : 0) + part * RECORD<S>;
    const N* const first_c = tile_c + (holds_c ? c * pitch_held : 0) + part * RECORD<S>;
    const int fours = walks ? int(ceil_div(steps, FOUR)) : 0;
#pragma unroll 1
    for (int i = 0; i < fours; ++i) {
      const int k = BACK ? fours - 1 - i : i;
      T dt[FOUR], input[FOUR], sum[FOUR];
      load_row(dt, lengths + (k * plan.channels + c) * FOUR), load_row(input, inputs + (k * plan.channels + c) * FOUR);
      const N *b = first_b + (holds_b ? 0 : k * pitch_bc), *of_c = first_c + (holds_c ? 0 : k * pitch_bc);
      UNROLL
      for (int m = 0; m < FOUR; ++m) {
        const int step = BACK ? FOUR - 1 - m : m;
        const T over_dt = DIVIDES<M> ? reciprocal(dt[step]) : T(0);
        N b_row[S], c_row[S];
        load_row(b_row, b + step * S);
        if constexpr (BACK) {
          UNROLL
          for (int j = 0; j < S; ++j) state[j].step_back(dt[step], over_dt, input[step], b_row[j]);
        } else {
          load_row(c_row, of_c + step * S);
          sum[step] = d * input[step];
          UNROLL
          for (int j = 0; j < S; ++j) {
            state[j].step(dt[step], over_dt, input[step], b_row[j]);
            sum[step] = add_seen(sum[step], c_row[j], state[j].h);
          }
        }
      }
      if constexpr (!BACK) store_row(sums + k * pitch_sums + threadIdx.x * FOUR, sum);
    }
    async_wait<0>();
    __syncthreads();  // the sums are there, the next tile and the gates; nobody needs what was prepared any more
    if (!BACK) finish(t0, steps);
  }
  keep(&last_state(batch, channel, 0));
}

// ---- gradients ------------------------------------------------------------------------------------------------------
// Half of a warp has a chunk of one state between its lanes, each LENGTH steps of it one after the other.
constexpr int SEGMENTS = 16;
template <typename N>
constexpr int LENGTH = CHUNK<N> / SEGMENTS;
template <typename N>
constexpr int ROUNDS = sizeof(N) == 4 ? 2 : 1;  // a warp has so many states one after the other, in each of its halves
template <typename N>
constexpr int OF_WARP = 2 * ROUNDS<N>;  // states
constexpr int WARPS = 4;                // of a block
constexpr int ROWS = 8;                 // channels whose numbers are in shared memory at a time
constexpr int TURN = 2;                 // channels of a warp from one barrier to the next
constexpr int GRADIENT_BLOCKS = 3;      // of a multiprocessor: how many registers

// How the work is cut, and where a block's shared memory has what, in bytes.
struct GradientPlan {
  int64_t share;                   // neighbouring channels that have the same groups of B and of C
  int parts, pieces;               // blocks that share these, and how many times ROWS channels they are
  int of_states, at_once, passes;  // warps that share a channel; channels that the warps have; times to do all states
  int lengths, inputs, outer, gates;  // dt, u, gradients of y: [row][step]
  int b, c;                           // [state][step], or, held for all time, [row][state][FOUR times the same]
  int ends, sums, totals;             // [kind][row][state]; what warps add to gradients of u, dt and z; over all passes
  int bytes;
};

template <typename T>
__device__ __forceinline__ T real(T x) {
  return x;
}
template <typename T>
__device__ __forceinline__ T real(Complex<T> x) {
  return x.re;
}

// What the lane `apart` before this one has in its half of the warp, after it if BACK.
template <bool BACK, typename T>
__device__ __forceinline__ T from_before(T x, int apart) {
  return BACK ? __shfl_down_sync(0xffffffffu, x, apart, SEGMENTS) : __shfl_up_sync(0xffffffffu, x, apart, SEGMENTS);
}
template <bool BACK, typename T>
__device__ __forceinline__ Complex<T> from_before(Complex<T> x, int apart) {
  return {from_before<BACK>(x.re, apart), from_before<BACK>(x.im, apart)};
}

// The sum over WIDTH neighbouring lanes, in each of them.
template <int WIDTH, typename T>
__device__ __forceinline__ T over_lanes(T x) {
  UNROLL
  for (int apart = WIDTH / 2; apart > 0; apart /= 2) x += __shfl_xor_sync(0xffffffffu, x, apart);
  return x;
}
template <int WIDTH, typename T>
__device__ __forceinline__ Complex<T> over_lanes(Complex<T> x) {
  return {over_lanes<WIDTH>(x.re), over_lanes<WIDTH>(x.im)};
}

// What a lane's segment begins with, given what it makes of any x, factor x + term, and what the first one begins with.
// The maps of the segments before are put together in log2(SEGMENTS) steps. BACK: the last one is the first. The first
// makes the same of any x, which is all that a lane has to know that has no others before it.
template <bool BACK, typename N>
__device__ __forceinline__ N begin_of_segment(N factor, N term, N first, int segment) {
  const bool is_first = segment == (BACK ? SEGMENTS - 1 : 0);
  term = is_first ? multiply_add(factor, first, term) : term, factor = is_first ? N(0) : factor;
  UNROLL
  for (int apart = 1; apart < SEGMENTS; apart *= 2) {
    term = multiply_add(factor, from_before<BACK>(term, apart), term);
    if (2 * apart < SEGMENTS) factor = factor * from_before<BACK>(factor, apart);
  }
  const N before = from_before<BACK>(term, 1);
  return is_first ? first : before;
}

// Where step k is in a row of shared memory: FOUR lie together, and of the first FOUR of eight lanes' segments, which they
// read at once, each half changes places with its second FOUR, as they would meet in the banks.
// So a lane's second half is where its first is, but for one bit of the place.
__device__ __forceinline__ int at_step(int k) {
  const int four = k / FOUR;
  return (four ^ (four / 8 % 2)) * FOUR + k % FOUR;
}

// A lane's numbers of a row, `at` being where its first one is; `apart` is FOUR, or 0 for a row of FOUR that hold for all.
template <int COUNT, typename T>
__device__ __forceinline__ void load_segment(T (&values)[COUNT], const T* row, int at, int apart = FOUR) {
  constexpr int WIDE = COUNT < FOUR ? COUNT : FOUR;
  UNROLL
  for (int k = 0; k < COUNT; k += WIDE) {
    T some[WIDE];
    load_row(some, row + (k ? at ^ apart : at));
    UNROLL
    for (int i = 0; i < WIDE; ++i) values[k + i] = some[i];
  }
}
template <int COUNT, typename T>
__device__ __forceinline__ void store_segment(T* row, const T (&values)[COUNT], int at) {
  constexpr int WIDE = COUNT < FOUR ? COUNT : FOUR;
  UNROLL
  for (int k = 0; k < COUNT; k += WIDE) {
    T some[WIDE];
    UNROLL
    for (int i = 0; i < WIDE; ++i) some[i] = values[k + i];
    store_row(row + (k ? at ^ FOUR : at), some);
  }
}

// FOUR steps of a row in memory, `left` of which are there; 0 for the others.
template <typename N, int D>
__device__ __forceinline__ void load_steps(N (&numbers)[FOUR], const Rows<D>& x, const unsigned char* from,
                                           int64_t left) {
  with_type<N>(x.dtype, [&]<typename From>() {
    if (x.wide && left >= FOUR) {
      load_row(numbers, reinterpret_cast<const From*>(from));
      return;
    }
    UNROLL
    for (int i = 0; i < FOUR; ++i) {
      numbers[i] = N(0);
      if (i < left) numbers[i] = N(*reinterpret_cast<const From*>(from + i * x.stride[D - 1]));
    }
  });
}
template <typename T, int D>
__device__ __forceinline__ void store_steps(const Rows<D>& x, unsigned char* to, const T (&numbers)[FOUR],
                                            int64_t left) {
  with_type<T>(x.dtype, [&]<typename To>() {
    if (x.wide && left >= FOUR) {
      store_row(reinterpret_cast<To*>(to), numbers);
      return;
    }
    UNROLL
    for (int i = 0; i < FOUR; ++i) {
      if (i < left) *reinterpret_cast<To*>(to + i * x.stride[D - 1]) = To(numbers[i]);
    }
  });
}

// grid (chunks B d / share parts), block (32 WARPS): a chunk of time, and every `parts`-th piece of the channels that
// have the same B and C.
template <typename N, Method M>
__global__ void __launch_bounds__(32 * WARPS, sizeof(N) == 4 ? GRADIENT_BLOCKS : 1)
    gradients(Rows<3> u,                    // [batch, channels, seq]
              Rows<3> delta,                // [batch, channels, seq]
              View<const N, 2> A,           // [channels, states]
              Rows<4> B,                    // [batch, groups, states, seq], or with 1 for seq
              Rows<4> C,                    // likewise
              View<const Real<N>, 1> D,     // [channels], or empty
              Rows<3> z,                    // [batch, channels, seq], or empty
              View<const Real<N>, 1> bias,  // [channels], or empty
              View<const N, 4> states,      // [chunks, batch, channels, states]: before each chunk
              Rows<3> dy,                   // [batch, channels, seq]
              Rows<3> du,                   // [batch, channels, seq]
              Rows<3> ddelta,               // [batch, channels, seq]
              Rows<3> dz,                   // [batch, channels, seq], or empty
              View<N, 4> carried,           // [chunks, batch, channels, states]: gradients of the states after a chunk,
                                            // and in their place that chunk's part of A's gradient
              View<N, 5> dB,                // [slots, batch, groups, states, whole segments], or
                                            // [chunks, batch, channels, states, 1] of what holds for all time
              View<N, 5> dC,                // likewise
              View<Real<N>, 3> dD,          // [chunks, batch, channels], or empty
              View<Real<N>, 3> dbias,       // likewise
              bool with_softplus, Method method, GradientPlan plan) {
  using T = Real<N>;
  constexpr int K = LENGTH<N>, R = ROUNDS<N>, STEPS = CHUNK<N>;
  constexpr int ROW = STEPS + FOUR;  // what belongs to the step before the first stands at [STEPS]
  DYNAMIC_SHARED(unsigned char, shared);
  T* const lengths = reinterpret_cast<T*>(shared + plan.lengths);
  T* const inputs = reinterpret_cast<T*>(shared + plan.inputs);
  T* const outer = reinterpret_cast<T*>(shared + plan.outer);  // the gradient of y before its gate
  T* const gates = reinterpret_cast<T*>(shared + plan.gates);  // and dy silu'(z)
  N* const tile_b = reinterpret_cast<N*>(shared + plan.b);
  N* const tile_c = reinterpret_cast<N*>(shared + plan.c);
  N* const ends = reinterpret_cast<N*>(shared + plan.ends);      // what a channel's state has for the whole chunk
  T* const sums = reinterpret_cast<T*>(shared + plan.sums);      // [channel][u, dt, z][half of a warp][step]
  T* const totals = reinterpret_cast<T*>(shared + plan.totals);  // [u, dt, z][row][step], if there are several passes
  enum End { RATE, START, PULL, LATER };                         // PULL: in the end A's gradient

  const unsigned channels = unsigned(u.size[1]), batches = unsigned(u.size[0]);
  const unsigned shares = channels / unsigned(plan.share);
  const int part = int(blockIdx.x % unsigned(plan.parts));
  const unsigned share = blockIdx.x / unsigned(plan.parts) % shares;
  const unsigned rest = blockIdx.x / unsigned(plan.parts) / shares, batch = rest % batches;
  const int64_t chunk = rest / batches, seq = u.size[2], t0 = chunk * STEPS;
  const int count = int(A.size[1]), of_pass = plan.of_states * OF_WARP<N>;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, segment = lane % SEGMENTS,
            k0 = segment * K, own = at_step(k0);
  const int warp_c = warp / plan.of_states, warp_s = warp % plan.of_states;
  const int of_lane = warp_s * OF_WARP<N> + lane / SEGMENTS;  // its first state of a pass; the next is 2 further
  const int halves = 2 * plan.of_states;
  const bool holds_b = B.size[3] == 1, holds_c = C.size[3] == 1, gated = z.size[0] > 0;
  const int kinds = gated ? 3 : 2;

  // Where a lane's sums over channels go, for tensors that change in time; null where there are no such steps.
  const auto place = [&](const Rows<4>& x, const View<N, 5>& dx) -> N* {
    if (x.size[3] == 1 || t0 + k0 >= dx.size[4]) return nullptr;
    const unsigned of_group = channels / unsigned(x.size[1]) / unsigned(plan.share);
    const int64_t slot = (int64_t(share % of_group) * plan.parts + part) * plan.at_once + warp_c;
    return &dx(slot, batch, share / of_group, 0, t0 + k0);
  };
  N* const to_b = place(B, dB);
  N* const to_c = place(C, dC);
  N of_b[R][K] = {}, of_c[R][K] = {};  // the sums over channels, of each of a lane's states and steps
  const auto move_sums = [&](N(&values)[R][K], N* to, int64_t stride, int pass, bool out) {
    UNROLL
    for (int r = 0; r < R; ++r) {
      const int state = pass * of_pass + of_lane + 2 * r;
      if (to == nullptr || state >= count) continue;
      if (out) store_row(to + state * stride, values[r]);
      else load_row(values[r], to + state * stride);
    }
  };

#pragma unroll 1
  for (int piece = part; piece < plan.pieces; piece += plan.parts) {
    const int64_t first = int64_t(piece) * ROWS, channel0 = share * plan.share + first;
    const int rows = int(min(plan.share - first, int64_t(ROWS)));

    const auto at = [&](const Rows<3>& x, int row, int64_t t) {
      return x.data + batch * x.stride[0] + (channel0 + row) * x.stride[1] + t * x.stride[2];
    };
    const auto group_of = [&](const Rows<4>& x, int64_t of_channel) {
      const unsigned in_group = channels / unsigned(x.size[1]);
      return x.data + batch * x.stride[0] + unsigned(of_channel) / in_group * x.stride[1];
    };
    // What all states of a channel share.
    const auto prepare_rows = [&] {
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * (STEPS / FOUR); i += 32 * WARPS) {
        const int row = i / (STEPS / FOUR), k = i % (STEPS / FOUR) * FOUR, to = row * ROW + at_step(k);
        const int64_t t = t0 + k, left = seq - t;
        T dt[FOUR], input[FOUR], grad[FOUR];
        load_steps(dt, delta, at(delta, row, t), left), load_steps(input, u, at(u, row, t), left);
        load_steps(grad, dy, at(dy, row, t), left);
        const T more = bias.size[0] ? bias(channel0 + row) : T(0);
        UNROLL
        for (int m = 0; m < FOUR; ++m) {
          dt[m] += more;
          if (with_softplus) dt[m] = softplus(dt[m]);
          if (m >= left) dt[m] = 0;  // a step that changes nothing
        }
        store_row(lengths + to, dt), store_row(inputs + to, input);
        if (gated) {
          T gate[FOUR], slope[FOUR];
          load_steps(gate, z, at(z, row, t), left);
          UNROLL
          for (int m = 0; m < FOUR; ++m) {
            const T open = reciprocal(T(1) + power(-gate[m] * PER_E<T>));
            slope[m] = grad[m] * open * (T(1) + gate[m] * (T(1) - open)), grad[m] *= gate[m] * open;
          }
          store_row(gates + to, slope);
        }
        store_row(outer + to, grad);
      }
      if constexpr (LOOKS_BACK<M>) {
        if (int row = threadIdx.x; row < rows) {
          T before = 0;
          if (t0 > 0) {
            with_type<T>(u.dtype,
                         [&]<typename From>() { before = T(*reinterpret_cast<const From*>(at(u, row, t0 - 1))); });
          }
          inputs[row * ROW + STEPS] = before;
        }
      }
    };
    // B or C of a pass, which all channels share.
    const auto prepare_states = [&](const Rows<4>& x, N* tile, T factor, int state0) {
      const unsigned char* from = group_of(x, channel0);
#pragma unroll 1
      for (int i = threadIdx.x; i < of_pass * (STEPS / FOUR); i += 32 * WARPS) {
        const int j = i / (STEPS / FOUR), k = i % (STEPS / FOUR) * FOUR;
        N numbers[FOUR];
        load_steps(numbers, x, from + (state0 + j) * x.stride[2] + (t0 + k) * x.stride[3],
                   state0 + j < count ? seq - t0 - k : 0);
        UNROLL
        for (int m = 0; m < FOUR; ++m) numbers[m] = numbers[m] * factor;
        store_row(tile + j * ROW + at_step(k), numbers);
      }
      if constexpr (LOOKS_BACK<M>) {
        for (int j = threadIdx.x; j < of_pass; j += 32 * WARPS) {
          N before = 0;
          if (state0 + j < count && t0 > 0) {
            with_type<N>(x.dtype, [&]<typename From>() {
              before = N(*reinterpret_cast<const From*>(from + (state0 + j) * x.stride[2] + (t0 - 1) * x.stride[3]));
            });
          }
          tile[j * ROW + STEPS] = before;
        }
      }
    };
    // What each channel's states have for themselves.
    const auto prepare_ends = [&](int state0) {
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * of_pass; i += 32 * WARPS) {
        const int64_t channel = channel0 + i / of_pass;
        const int j = state0 + i % of_pass;
        const bool there = j < count;
        N* const to = ends + i;
        const auto put = [&](End end, N number) { to[end * ROWS * of_pass] = number; };
        const auto hold = [&](const Rows<4>& x, N* tile, T factor) {
          N number = 0;
          if (there) {
            with_type<N>(x.dtype, [&]<typename From>() {
              number = N(*reinterpret_cast<const From*>(group_of(x, channel) + j * x.stride[2]));
            });
          }
          for (int m = 0; m < FOUR; ++m) tile[i * FOUR + m] = number * factor;
        };
        put(RATE, there ? A(channel, j) : N(0)), put(START, there ? states(chunk, batch, channel, j) : N(0));
        put(PULL, there ? carried(chunk, batch, channel, j) : N(0));
        if constexpr (LOOKS_BACK<M>) {
          put(LATER, there && method == Method::foh ? carried(carried.size[0] / 2 + chunk, batch, channel, j) : N(0));
        }
        if (holds_b) hold(B, tile_b, 1);
        if (holds_c) hold(C, tile_c, PARTS<N>);
      }
    };

#pragma unroll 1
    for (int pass = 0; pass < plan.passes; ++pass) {
      const int state0 = pass * of_pass;
      if (pass == 0) prepare_rows();
      prepare_ends(state0);
      if (plan.passes > 1 || piece == part) {
        if (!holds_b) prepare_states(B, tile_b, 1, state0);
        if (!holds_c) prepare_states(C, tile_c, PARTS<N>, state0);
      }
      if (plan.passes > 1) {
        UNROLL
        for (int i = 0; i < R * K; ++i) of_b[i / K][i % K] = of_c[i / K][i % K] = 0;
        if (piece != part) {
          move_sums(of_b, to_b, dB.stride[3], pass, false), move_sums(of_c, to_c, dC.stride[3], pass, false);
        }
      }
      __syncthreads();  // all is prepared

#pragma unroll 1
      for (int turn = 0; turn < rows; turn += TURN * plan.at_once) {
#pragma unroll 1
        for (int i = 0; i < TURN; ++i) {
          const int slot = i * plan.at_once + warp_c, row = turn + slot;
          if (row >= rows) break;
          const int64_t channel = channel0 + row;
          T dt[K], input[K], grad[K], by_input[K] = {}, by_dt[K] = {}, seen[K] = {};
          load_segment(dt, lengths + row * ROW, own), load_segment(input, inputs + row * ROW, own);
          load_segment(grad, outer + row * ROW, own);
          UNROLL
          for (int r = 0; r < R; ++r) {
            const int j = of_lane + 2 * r;
            const N* const end = ends + row * of_pass + j;
            const auto of_end = [&](End which) { return end[which * ROWS * of_pass]; };
            const N rate = of_end(RATE), over_rate = DIVIDES<M> ? detail::divided(N(1), rate) : N(0);
            N b[K], c[K];
            const int held = (row * of_pass + j) * FOUR, moving = j * ROW;
            load_segment(b, tile_b + (holds_b ? held : moving), holds_b ? 0 : own, holds_b ? 0 : FOUR);
            load_segment(c, tile_c + (holds_c ? held : moving), holds_c ? 0 : own, holds_c ? 0 : FOUR);

            // A_bar of each step, and what it adds; then all of a segment is one such step.
            N a[K], h[K], factor = 1, term = 0, taken_before = 0;
            if constexpr (LOOKS_BACK<M>) {
              const N first_b = holds_b ? b[0] : tile_b[j * ROW + STEPS];
              taken_before = from_before<false>(b[K - 1] * input[K - 1], 1);
              if (segment == 0) taken_before = first_b * inputs[row * ROW + STEPS];
            }
            UNROLL
            for (int k = 0; k < K; ++k) {
              if constexpr (EXPONENT_ALONE<M>) {
                a[k] = decay(scaled(rate), dt[k]), h[k] = b[k] * (M == Method::mamba ? dt[k] * input[k] : input[k]);
              } else {
                const T over_dt = DIVIDES<M> ? reciprocal(dt[k]) : T(0);
                const Exponent<N> z{rate * dt[k], over_rate * over_dt, decay(scaled(rate), dt[k])};
                const auto by = by_method<M>(method, [&]<Method L>() { return coefficients<L>(rate, dt[k], z); });
                a[k] = left_of<M>(rate, by), h[k] = by.gain * input[k] * b[k];
                if constexpr (LOOKS_BACK<M>) {
                  h[k] = multiply_add(by.previous, k ? b[k ? k - 1 : 0] * input[k ? k - 1 : 0] : taken_before, h[k]);
                }
              }
              term = k ? multiply_add(a[k], term, h[k]) : h[k], factor = k ? factor * a[k] : a[k];
            }
            const N start = begin_of_segment<false>(factor, term, of_end(START), segment);

            // The states, and what is seen of them.
            UNROLL
            for (int k = 0; k < K; ++k) {
              h[k] = multiply_add(a[k], k ? h[k ? k - 1 : 0] : start, h[k]);
              of_c[r][k] = of_c[r][k] + conj(h[k]) * (grad[k] * T(PARTS<N>));
            }
            if (gated) {
              UNROLL
              for (int k = 0; k < K; ++k) seen[k] = add_seen(seen[k], c[k], h[k]);
            }

            // Back: what a segment makes of the gradient of the state after it; then its gradients.
            term = 0;
            UNROLL
            for (int k = K - 1; k >= 0; --k) term = conj(a[k]) * multiply_add(conj(c[k]), N(grad[k]), term);
            N pull = begin_of_segment<true>(conj(factor), term, of_end(PULL), segment), of_a = 0, passed = 0;
            UNROLL
            for (int k = K - 1; k >= 0; --k) {
              const N h_before = k ? h[k ? k - 1 : 0] : start;
              const N lambda = multiply_add(conj(c[k]), N(grad[k]), pull);  // the gradient of this step's state
              pull = conj(a[k]) * lambda;
              if constexpr (M == Method::mamba) {
                const N by_z = pull * conj(h_before);
                of_a = of_a + by_z * dt[k];
                by_dt[k] = add_seen(by_dt[k], conj(rate), by_z);
                by_input[k] = add_seen(by_input[k], conj(b[k]), lambda);
                of_b[r][k] = of_b[r][k] + lambda * (dt[k] * input[k]);
              } else {
                const T over_dt = DIVIDES<M> ? reciprocal(dt[k]) : T(0);
                const Exponent<N> z{rate * dt[k], over_rate * over_dt, M == ANY ? decay(scaled(rate), dt[k]) : a[k]};
                const auto by = by_method<M>(method, [&]<Method L>() { return differentiated<L>(rate, dt[k], z); });
                const N by_decay = lambda * conj(h_before), by_gain = lambda * conj(b[k] * input[k]);
                N by_a = by_decay * conj(by.by_a.a_bar) + by_gain * conj(by.by_a.gain);
                N by_step = by_decay * conj(by.by_dt.a_bar) + by_gain * conj(by.by_dt.gain);
                if constexpr (LOOKS_BACK<M>) {
                  const N by_previous = lambda * conj(k ? b[k ? k - 1 : 0] * input[k ? k - 1 : 0] : taken_before);
                  by_a = by_a + by_previous * conj(by.by_a.previous);
                  by_step = by_step + by_previous * conj(by.by_dt.previous);
                  passed = conj(by.value.previous) * lambda;  // to the input of the step before
                  if (k > 0) {
                    const int before = k > 0 ? k - 1 : 0;
                    by_input[before] = add_seen(by_input[before], conj(b[before]), passed);
                    of_b[r][before] = of_b[r][before] + passed * input[before];
                  }
                }
                const N of_taken = conj(by.value.gain) * lambda;
                of_a = of_a + by_a, by_dt[k] += real(by_step);
                by_input[k] = add_seen(by_input[k], conj(b[k]), of_taken);
                of_b[r][k] = of_b[r][k] + of_taken * input[k];
              }
            }
            if constexpr (LOOKS_BACK<M>) {  // the first step's, to the segment before; the last one's come from behind
              passed = from_before<true>(passed, 1);
              if (segment == SEGMENTS - 1) passed = of_end(LATER);
              by_input[K - 1] = add_seen(by_input[K - 1], conj(b[K - 1]), passed);
              of_b[r][K - 1] = of_b[r][K - 1] + passed * input[K - 1];
            }
            of_a = over_lanes<SEGMENTS>(of_a);
            if (segment == 0) ends[(OF_A * ROWS + row) * of_pass + j] = of_a;
          }
          const auto over_time = [&](N(&values)[R][K], const View<N, 5>& dx) {
            UNROLL
            for (int r = 0; r < R; ++r) {
              N sum = 0;
              UNROLL
              for (int k = 0; k < K; ++k) sum = sum + values[r][k], values[r][k] = 0;
              sum = over_lanes<SEGMENTS>(sum);
              const int j = state0 + of_lane + 2 * r;
              if (j < count && segment == 0) dx(chunk, batch, channel, j, 0) = sum;
            }
          };
          if (holds_b) over_time(of_b, dB);
          if (holds_c) over_time(of_c, dC);
          if constexpr (M == Method::mamba) {  // whose gain is dt
            UNROLL
            for (int k = 0; k < K; ++k) by_dt[k] += by_input[k] * input[k], by_input[k] *= dt[k];
          }
          T* const to = sums + (slot * kinds * halves + 2 * warp_s + lane / SEGMENTS) * STEPS;
          store_segment(to, by_input, own), store_segment(to + halves * STEPS, by_dt, own);
          if (gated) store_segment(to + 2 * halves * STEPS, seen, own);
        }
        __syncthreads();  // the sums of all warps are there

        // A warp each for a channel's gradients of u, of dt and of z, a lane for FOUR steps.
#pragma unroll 1
        for (int task = warp; task < TURN * plan.at_once * kinds; task += WARPS) {
          const int slot = task / kinds, kind = task % kinds, row = turn + slot, k = lane * FOUR;
          if (row >= rows) break;
          const int in_row = row * ROW + at_step(k);
          const int64_t channel = channel0 + row, t = t0 + k, left = k < STEPS ? seq - t : 0;
          T grad[FOUR] = {}, input[FOUR] = {}, dt[FOUR] = {}, total[FOUR] = {}, of_channel = 0;
          if (k < STEPS) {
            load_row(dt, lengths + in_row), load_row(input, inputs + in_row), load_row(grad, outer + in_row);
            const T* from = sums + (slot * kinds + kind) * halves * STEPS + at_step(k);
#pragma unroll 4
            for (int n = 0; n < halves; ++n, from += STEPS) {
              T some[FOUR];
              load_row(some, from);
              UNROLL
              for (int m = 0; m < FOUR; ++m) total[m] += some[m];
            }
            if (plan.passes > 1) {  // the states of all passes: the same lane adds them up
              T* const saved = totals + kind * ROWS * ROW + in_row;
              T before[FOUR] = {};
              if (pass > 0) load_row(before, saved);
              UNROLL
              for (int m = 0; m < FOUR; ++m) total[m] += before[m];
              store_row(saved, total);
            }
          }
          if (pass < plan.passes - 1) continue;
          const T d = D.size[0] ? D(channel) : T(0);
          if (kind == 0) {
            UNROLL
            for (int m = 0; m < FOUR; ++m) {
              total[m] += d * grad[m], of_channel += grad[m] * input[m];
            }
            store_steps(du, at(du, row, t), total, left);
          } else if (kind == 1) {
            UNROLL
            for (int m = 0; m < FOUR; ++m) {
              if (with_softplus) total[m] *= -std::expm1(-dt[m]);  // its derivative
              if (m < left) of_channel += total[m];
            }
            store_steps(ddelta, at(ddelta, row, t), total, left);
          } else if (k < STEPS) {
            T slope[FOUR];
            load_row(slope, gates + in_row);
            UNROLL
            for (int m = 0; m < FOUR; ++m) total[m] = (total[m] + d * input[m]) * slope[m];
            store_steps(dz, at(dz, row, t), total, left);
          }
          if (kind == 2 || (kind == 0 ? dD.size[0] : dbias.size[0]) == 0) continue;
          of_channel = over_lanes<32>(of_channel);
          if (lane > 0) continue;
          if (kind == 0) dD(chunk, batch, channel) = of_channel;
          else dbias(chunk, batch, channel) = of_channel;
        }
        __syncthreads();  // nobody needs the sums any more, nor after the last turn what was prepared
      }
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * of_pass; i += 32 * WARPS) {
        const int j = state0 + i % of_pass;
        if (j < count) carried(chunk, batch, channel0 + i / of_pass, j) = ends[OF_A * ROWS * of_pass + i];
      }
      if (plan.passes > 1 || piece + plan.parts >= plan.pieces) {
        move_sums(of_b, to_b, dB.stride[3], pass, true), move_sums(of_c, to_c, dC.stride[3], pass, true);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Neighbouring channels that have the same B and the same C, if these change in time.
int64_t share_of(const AnyView<3>& u, const AnyView<4>& B, const AnyView<4>& C) {
  const auto of = [&](const AnyView<4>& x) { return x.size[3] == 1 ? u.size[1] : u.size[1] / x.size[1]; };
  return std::gcd(of(B), of(C));
}

template <typename N, int S, bool BACK>
Plan make_plan(const AnyView<3>& u, int states, const AnyView<4>& B, const AnyView<4>& C, bool gated) {
  using T = Real<N>;
  Plan plan{};
  const bool holds_b = B.size[3] == 1, holds_c = C.size[3] == 1;
  plan.share = share_of(u, B, C);
  plan.lanes = std::max(1, int(ceil_div(states, S)));
  plan.padded = plan.lanes * S;
  const int most = std::max(FEW_THREADS / plan.lanes, std::min(CHANNELS, MOST_THREADS / plan.lanes));
  plan.channels = int(std::min(int64_t(most), plan.share));
  const auto take = [&plan](int bytes) {
    const int at = plan.bytes;
    plan.bytes += int(ceil_div(bytes, 16)) * 16;
    return at;
  };
  const auto copied = [&](const auto& x, int rows) { return take(rows * Rows(x, STEPS<N>).pitch); };
  plan.u = copied(u, plan.channels), plan.delta = copied(u, plan.channels);
  plan.z = gated ? copied(u, plan.channels) : 0;
  plan.B = holds_b ? 0 : copied(B, plan.padded), plan.C = holds_c || BACK ? 0 : copied(C, plan.padded);
  plan.lengths = take(STEPS<N> * plan.channels * int(sizeof(T)));
  plan.inputs = take(STEPS<N> * plan.channels * int(sizeof(T)));
  const int record = plan.lanes * RECORD<S> * int(sizeof(N));
  const int held = plan.channels * (record + 16), moving = STEPS<N> / FOUR * record;
  plan.b = take(holds_b ? held : moving);
  if (BACK) return plan;
  plan.c = take(holds_c ? held : moving);
  plan.sums = take(STEPS<N> * (plan.channels * plan.lanes + 1) * int(sizeof(T)));
  return plan;
}

// With FLOAT_ONLY one method of each kind: an exponential, one beside a division, none.
template <typename N, typename Body>
void with_method(int method, Body&& body) {
  if constexpr (sizeof(Real<N>) == 8) {
    if (method >= 0 && method < int(ANY)) return body.template operator()<ANY>();
  }
  if constexpr (sizeof(Real<N>) == 4) {
    switch (Method(method)) {
      case Method::mamba: return body.template operator()<Method::mamba>();
      case Method::foh: return body.template operator()<Method::foh>();
      case Method::bilinear: return body.template operator()<Method::bilinear>();
#if !defined(FLOAT_ONLY)
      case Method::zoh: return body.template operator()<Method::zoh>();
      case Method::highorder: return body.template operator()<Method::highorder>();
      case Method::poly: return body.template operator()<Method::poly>();
      case Method::rk4: return body.template operator()<Method::rk4>();
      case Method::dirac: return body.template operator()<Method::dirac>();
      case Method::backward_euler: return body.template operator()<Method::backward_euler>();
#endif
      default: break;
    }
  }
  throw std::invalid_argument("method " + std::to_string(method) + " is none that this module has");
}

// What is computed with: the type of A, of which there are as many as of the states.
template <typename Body>
void with_numbers(DType dtype, Body&& body) {
  if (dtype == DType::float32) return body.template operator()<float>();
#if !defined(FLOAT_ONLY)
  if (dtype == DType::float64) return body.template operator()<double>();
  if (dtype == DType::complex64) return body.template operator()<Complex<float>>();
  if (dtype == DType::complex128) return body.template operator()<Complex<double>>();
#endif
  throw std::invalid_argument(std::string("this kernel does not compute with ") + name_of(dtype));
}

template <typename N>
GradientPlan plan_gradients(const AnyView<3>& u, int states, const AnyView<4>& B, const AnyView<4>& C, bool gated,
                            int parts) {
  using T = Real<N>;
  constexpr int ROW = CHUNK<N> + FOUR;
  GradientPlan plan{};
  plan.share = share_of(u, B, C);
  plan.parts = parts, plan.pieces = int(ceil_div(plan.share, ROWS));
  plan.of_states = 1;
  while (plan.of_states < WARPS && plan.of_states * OF_WARP<N> < states) plan.of_states *= 2;
  plan.at_once = WARPS / plan.of_states;
  const int of_pass = plan.of_states * OF_WARP<N>, kinds = gated ? 3 : 2;
  plan.passes = std::max(1, int(ceil_div(states, of_pass)));
  const auto take = [&plan](int numbers, size_t size) {
    const int at = plan.bytes;
    plan.bytes += int(ceil_div(numbers * int(size), 16)) * 16;
    return at;
  };
  plan.lengths = take(ROWS * ROW, sizeof(T)), plan.inputs = take(ROWS * ROW, sizeof(T));
  plan.outer = take(ROWS * ROW, sizeof(T)), plan.gates = gated ? take(ROWS * ROW, sizeof(T)) : 0;
  plan.b = take(of_pass * (B.size[3] == 1 ? ROWS * FOUR : ROW), sizeof(N));
  plan.c = take(of_pass * (C.size[3] == 1 ? ROWS * FOUR : ROW), sizeof(N));
  plan.ends = take(5 * ROWS * of_pass, sizeof(N));
  plan.sums = take(TURN * plan.at_once * kinds * 2 * plan.of_states * CHUNK<N>, sizeof(T));
  plan.totals = plan.passes > 1 ? take(kinds * ROWS * ROW, sizeof(T)) : 0;
  return plan;
}

// The two walks.
template <typename N, Method M, int S, bool BACK>
void start_walk(const AnyView<3>& u, const Input<3>& delta, const Input<2>& A, const Input<4>& B, const Input<4>& C,
                const Input<1>& D, const Input<3>& z, const Input<1>& delta_bias, const Input<3>& initial_state,
                const AnyView<3>& y, const Output<3>& last_state, const Output<4>& kept, bool delta_softplus,
                Method method, Stream stream) {
  using T = Real<N>;
  const Plan plan = make_plan<N, S, BACK>(u, int(A.size[1]), B, C, z.size[0] > 0);
  const auto rows = [](const auto& x) { return Rows(x, STEPS<N>); };
  launch<walk<N, M, S, BACK>>({u.size[0] * (u.size[1] / plan.share) * ceil_div(plan.share, plan.channels)},
                              dim3(unsigned(ceil_div(plan.channels * plan.lanes, 32)) * 32), size_t(plan.bytes), stream,
                              rows(u), rows(delta), A.as<N>(), rows(B), rows(C), D.as<T>(), rows(z), delta_bias.as<T>(),
                              initial_state.as<N>(), rows(y), last_state.as<N>(), kept.as<N>(), delta_softplus, method,
                              plan);
}
// body.operator()<S>() with how many states a lane of a walk has.
template <typename N, Method M, typename Body>
void with_states(int states_of_a_lane, Body&& body) {
  if constexpr (!std::is_same_v<N, float>) {
    body.template operator()<2>();
  } else {
    if (states_of_a_lane == 4) body.template operator()<4>();
    else body.template operator()<2>();
  }
}

void selective_scan(Input<3> u, Input<3> delta, Input<2> A, Input<4> B, Input<4> C, Input<1> D, Input<3> z,
                    Input<1> delta_bias, Input<3> initial_state, Output<3> y, Output<3> last_state, Output<4> states,
                    bool delta_softplus, int method, int states_of_a_lane, Stream stream) {
  if (u.size[0] == 0 || u.size[1] == 0) return;
  with_numbers(A.dtype, [&]<typename N>() {
    with_method<N>(method, [&]<Method M>() {
      with_states<N, M>(states_of_a_lane, [&]<int S>() {
        start_walk<N, M, S, false>(u, delta, A, B, C, D, z, delta_bias, initial_state, y, last_state, states,
                                   delta_softplus, Method(method), stream);
      });
    });
  });
}

void selective_scan_backward(Input<3> dy, Input<3> dlast, Input<3> u, Input<3> delta, Input<2> A, Input<4> B,
                             Input<4> C, Input<1> D, Input<3> z, Input<1> delta_bias, Input<4> states, Output<3> du,
                             Output<3> ddelta, Output<3> dz, Output<3> dinitial, Output<4> carried, Output<5> dB,
                             Output<5> dC, Output<3> dD, Output<3> dbias, bool delta_softplus, int method, int parts,
                             int states_of_a_lane, Stream stream) {
  with_numbers(A.dtype, [&]<typename N>() {
    using T = Real<N>;
    with_method<N>(method, [&]<Method M>() {
      constexpr Method BY = DECAYS<M>;
      with_states<N, BY>(states_of_a_lane, [&]<int S>() {
        start_walk<N, BY, S, true>(dy, delta, A, C, C, D, z, delta_bias, dlast, dy, dinitial, carried, delta_softplus,
                                   Method(method), stream);
      });
      const GradientPlan plan = plan_gradients<N>(u, int(A.size[1]), B, C, z.size[0] > 0, parts);
      const auto rows = [](const auto& x) { return Rows(x, FOUR); };
      const int64_t chunks = ceil_div(u.size[2], CHUNK<N>), shares = u.size[1] / plan.share;
      launch<gradients<N, M>>({chunks * u.size[0] * shares * plan.parts}, dim3(32 * WARPS), size_t(plan.bytes), stream,
                              rows(u), rows(delta), A.as<N>(), rows(B), rows(C), D.as<T>(), rows(z), delta_bias.as<T>(),
                              states.as<N>(), rows(dy), rows(du), rows(ddelta), rows(dz), carried.as<N>(), dB.as<N>(),
                              dC.as<N>(), dD.as<T>(), dbias.as<T>(), delta_softplus, Method(method), plan);
    });
  });
}
