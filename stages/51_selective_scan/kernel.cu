// Stage 51: discretize and scan in one kernel, forward
//
// Problem   h[t] = A_bar h[t - 1] + gain B[t] u[t] of each batch, channel and state, A_bar and gain made of A and the step
//           dt = delta, or softplus(delta + bias), by one of nine methods; y = (sum over states C[t] h[t] + D u) silu(z).
//           u, delta, z, y [B, d, T], A [d, n], B, C [B, groups, n, T] or [B, d, n, 1], h [B, d, n], D, bias [d].
// Before    Stage 45 reads a and b and writes h. Here each would be n times as large as u, which is all that there is.
// Idea      What is n times as large never leaves the registers. A lane walks through time with S states of one channel,
//           and makes A_bar and gain of each as it goes: an exponential, a multiplication and two more that add up h and
//           y. With n = 16 that is 32 bytes of arithmetic for each byte of memory: exponentials are what it costs, 16 a
//           clock and multiprocessor. All else is done for a tile of time at once, by all threads: softplus, which all
//           states of a channel share, and turning rows of time into rows of channels and of states.
// Mapping   block: CH channels of one batch, all T steps.  thread: S states of channel threadIdx % CH. So the lanes of a
//           warp have the same states of different channels, and one number of B and of C is loaded for all of them.
//           While a tile of TILE steps is walked, the next one comes by asynchronous copies.
// Cost      float32 without z, T = 32 L, n = 2 P <= 16, d a multiple of CH = 128 / P, W = P CH / 32 warps; a block
//             global load sectors  8 L (CH + n) + (W + 1) CH / 8 + 32 W   store sectors  4 L CH + 32 W
//             shared loads         L (2 CH + 2 n + CH P + 128 W)          stores         L (2 CH + 2 n + 32 W) wavefronts
//             copies               L (2 CH + 2 n)                         barriers       2 L + 2
//           of which there are B d / CH. Each number is read once, but B and C once a block. With twice the states a lane
//           (S = 4, which many channels get) the walk takes seven instructions for a state and step, one of them an
//           exponential; all else, with n = 16, as many.
// Limits    Channels one beside the other: few of them leave much of the card idle, however long they are. A channel has
//           at most 256 states. Of a group of fewer channels than CH the other lanes have nothing to do.
// Run       python -m stages run 51

#include <algorithm>
#include <numeric>
#include <type_traits>

#include "common/async_copy.h"
#include "common/discretize.h"
#include "common/launch.h"
#include "common/selective_scan.h"
#include "common/view.h"

constexpr int FEW_THREADS = 128, MOST_THREADS = 256;  // of a block; more than FEW for many states alone
constexpr int CHANNELS = 8;                           // of a block, if it takes more threads
template <typename N>
constexpr int STEPS = 128 / int(sizeof(N));  // of a tile
template <typename N, int S>
constexpr int BLOCKS = std::is_same_v<N, float> ? 2 : 1;  // at a time, if they are large: how many registers
template <int S>
constexpr int RECORD = (FOUR + 1) * S;  // S states of B or C, FOUR steps, and a gap: the next ones are in other banks

// ---- a state --------------------------------------------------------------------------------------------------------
template <typename N, Method M>
struct State {
  Method method = M;
  N h = 0, a = 0, over_a = 0, before = 0;  // a is `scaled` if its exponential is all; 1 / a; B u of the step before

  __device__ __forceinline__ void set(N start, N rate, Method by) {
    method = by, h = start, a = EXPONENT_ALONE<M> ? scaled(rate) : rate;
    if constexpr (DIVIDES<M>) over_a = detail::divided(N(1), rate);
  }

  __device__ __forceinline__ void step(Real<N> dt, Real<N> over_dt, Real<N> u, N b) {
    if constexpr (EXPONENT_ALONE<M>) {
      h = multiply_add(decay(a, dt), h, b * (M == Method::mamba ? dt * u : u));
    } else {
      const StepExponent<N> z{a * dt, over_a * over_dt, decay(scaled(a), dt)};
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
};

// ---------------------------------------------------------------------------------------------------------------------
// How the work is cut, and where a block's shared memory has what, in bytes.
struct Plan {
  int channels, lanes, padded;      // channels of a block, threads of a channel, states that these have
  int64_t share;                    // neighbouring channels that have the same groups of B and of C
  int u, delta, z, B, C;            // as they were copied: [channel or state][step]
  int lengths, inputs, b, c, sums;  // as the walk reads and writes them, FOUR steps together
  int bytes;
};

// grid (B d / channels), block (lanes channels and what fills a warp): thread part * channels + c has S states of c
template <typename N, Method M, int S>
__global__ void __launch_bounds__(MOST_THREADS, BLOCKS<N, S>)
    selective_scan(Rows<3> u,                       // [batch, channels, seq]
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
                   View<N, 4> kept,                 // [chunks, batch, channels, states], or empty: before each CHUNK
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
  const int rows_b = holds_b ? 0 : plan.padded, rows_c = holds_c ? 0 : plan.padded, rows_z = gated ? plan.channels : 0;
  add(u, of_channels(u), plan.u, plan.channels, rows, false);
  add(delta, of_channels(delta), plan.delta, plan.channels, rows, false);
  add(B, of_states(B, channel0), plan.B, rows_b, states, false);
  add(C, of_states(C, channel0), plan.C, rows_c, states, false);
  add(z, of_channels(z), plan.z, rows_z, rows, true);
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
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      if (!singly[i].late) singly[i].fetch<TILE>(shared, t, steps);
    }
  };
  const auto fetch_gates = [&](int64_t t, int steps) {
    if (!gated) return;
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
      for (int i = 0; i < FOUR; ++i) to[i * S] = numbers[i] * factor;
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
    state[j].set(initial_state.size[0] ? initial_state(batch, channel, state0 + j) : N(0), A(channel, state0 + j),
                 method);
  }
  const auto keep = [&](N* to) {  // to: the channel's states in memory
    UNROLL
    for (int j = 0; j < S; ++j) {
      if (present && state0 + j < states) to[state0 + j] = state[j].h;
    }
  };
  const T d = part == 0 && present && D.size[0] ? D(channel) : T(0);
  if (holds_b) hold(B, tile_b, 1);
  if (holds_c) hold(C, tile_c, PARTS<N>);

  for (int64_t t0 = -TILE; t0 < seq; t0 += TILE) {  // at first there is nothing but a tile to come
    const int steps = t0 < 0 ? 0 : int(min(seq - t0, int64_t(TILE)));
    if (steps > 0) {
      prepare_steps(steps);
      if (!holds_b) prepare_states(B, shared + plan.B, tile_b, 1);
      if (!holds_c) prepare_states(C, shared + plan.C, tile_c, PARTS<N>);
    }
    __syncthreads();  // all is prepared; nobody needs what was copied any more, nor the sums and gates of the tile before
    if (t0 + TILE < seq) fetch_inputs(t0 + TILE);
    if (steps > 0) fetch_gates(t0, steps);
    async_commit();
    if (kept.size[0] && steps > 0 && t0 % CHUNK == 0) keep(&kept(t0 / CHUNK, batch, channel, 0));

    const N* b = tile_b + (holds_b ? c * pitch_held : 0) + part * RECORD<S>;
    const N* of_c = tile_c + (holds_c ? c * pitch_held : 0) + part * RECORD<S>;
    const T *dt_of = lengths + c * FOUR, *u_of = inputs + c * FOUR;
    T* sum_of = sums + threadIdx.x * FOUR;
#pragma unroll 1
    for (int k = 0; k < steps && walks; k += FOUR) {
      T dt[FOUR], input[FOUR], sum[FOUR];
      load_row(dt, dt_of), load_row(input, u_of);
      UNROLL
      for (int i = 0; i < FOUR; ++i) {
        N b_row[S], c_row[S];
        load_row(b_row, b + i * S), load_row(c_row, of_c + i * S);
        const T over_dt = DIVIDES<M> ? reciprocal(dt[i]) : T(0);
        sum[i] = d * input[i];
        UNROLL
        for (int j = 0; j < S; ++j) {
          state[j].step(dt[i], over_dt, input[i], b_row[j]);
          sum[i] = add_seen(sum[i], c_row[j], state[j].h);
        }
      }
      store_row(sum_of, sum);
      dt_of += plan.channels * FOUR, u_of += plan.channels * FOUR, sum_of += pitch_sums;
      b += holds_b ? 0 : pitch_bc, of_c += holds_c ? 0 : pitch_bc;
    }
    async_wait<0>();
    __syncthreads();  // the sums are there, the next tile and the gates; nobody needs what was prepared any more
    finish(t0, steps);
  }
  keep(&last_state(batch, channel, 0));
}

// ---------------------------------------------------------------------------------------------------------------------
template <typename N, int S>
Plan make_plan(const Input<3>& u, int states, const Input<4>& B, const Input<4>& C, bool gated) {
  using T = Real<N>;
  Plan plan{};
  const int64_t channels = u.size[1];
  const bool holds_b = B.size[3] == 1, holds_c = C.size[3] == 1;
  plan.share = std::gcd(holds_b ? channels : channels / B.size[1], holds_c ? channels : channels / C.size[1]);
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
  plan.B = holds_b ? 0 : copied(B, plan.padded), plan.C = holds_c ? 0 : copied(C, plan.padded);
  plan.lengths = take(STEPS<N> * plan.channels * int(sizeof(T)));
  plan.inputs = take(STEPS<N> * plan.channels * int(sizeof(T)));
  const int record = plan.lanes * RECORD<S> * int(sizeof(N));
  const int held = plan.channels * (record + 16), moving = STEPS<N> / FOUR * record;
  plan.b = take(holds_b ? held : moving), plan.c = take(holds_c ? held : moving);
  plan.sums = take(STEPS<N> * (plan.channels * plan.lanes + 1) * int(sizeof(T)));
  return plan;
}

void selective_scan(Input<3> u, Input<3> delta, Input<2> A, Input<4> B, Input<4> C, Input<1> D, Input<3> z,
                    Input<1> delta_bias, Input<3> initial_state, Output<3> y, Output<3> last_state, Output<4> states,
                    bool delta_softplus, int method, int states_of_a_lane, Stream stream) {
  if (u.size[0] == 0 || u.size[1] == 0) return;
  with_numbers(A.dtype, [&]<typename N>() {
    using T = Real<N>;
    with_method<N>(method, [&]<Method M>() {
      const auto run = [&]<int S>() {
        const Plan plan = make_plan<N, S>(u, int(A.size[1]), B, C, z.size[0] > 0);
        const auto rows = [](const auto& x) { return Rows(x, STEPS<N>); };
        launch<selective_scan<N, M, S>>({u.size[0] * (u.size[1] / plan.share) * ceil_div(plan.share, plan.channels)},
                                        dim3(unsigned(ceil_div(plan.channels * plan.lanes, 32)) * 32),
                                        size_t(plan.bytes), stream, rows(u), rows(delta), A.as<N>(), rows(B), rows(C),
                                        D.as<T>(), rows(z), delta_bias.as<T>(), initial_state.as<N>(), rows(y),
                                        last_state.as<N>(), states.as<N>(), delta_softplus, Method(method), plan);
      };
      if constexpr (!std::is_same_v<N, float>) {
        run.template operator()<2>();
      } else {
        if (states_of_a_lane == 4) run.template operator()<4>();
        else run.template operator()<2>();
      }
    });
  });
}
