// Stage 52: the gradients of the selective scan
//
// Problem   Stage 51, and from the gradients dy [B, d, T] of y and dlast [B, d, n] of the last state those of u, delta,
//           A, B, C, D, z, the bias and the initial state. With g[t] what the loss gives to h[t] in all, of the real
//             g[t] = C[t] dy[t] + A_bar[t + 1] g[t + 1],  dC[t] = sum over channels dy[t] h[t],  q[t] = gain[t] g[t]
//             dB[t] = sum over channels u[t] q[t],  du[t] = sum over states B[t] q[t],  dA and ddt by the derivatives
//             of A_bar, which g[t] h[t - 1] counts for, and of gain, which g[t] B[t] u[t] does.
// Before    Stage 51 keeps the states before every CHUNK of steps, and a lane has a piece of a channel for all of time.
// Idea      What a state was is computed once more, from the last that was kept, and never written. It has to go through
//           time twice then, there for h and back for g, while dB and dC are sums over channels, du and ddt over states.
//           So here lanes are pieces of time: a lane has OWN steps of some states, first as if nothing came into its
//           piece; what does come, from both sides, is a scan of stage 42 over the pieces' (product of A_bar, end), by
//           shuffles; then its steps again, now with all that is known. dB and dC of its steps stay in its registers
//           while the block goes on from channel to channel. What g comes into a chunk of steps is known from a kernel
//           before, carry, which goes through the chunks from the last to the first and does no more than that.
// Mapping   gradients: block: a chunk of time, 8 states (float) a warp, one channel of its share after the other.  warp: 8
//           states (float), lane: OWN steps of 4.  carry: the same, block: up to CARRY channels, all chunks.
// Cost      forward: stage 51's. Backward: the sectors are backward_sectors in stage.py. A state and step takes one
//           exponential (float, mamba) in each kernel; in device memory, of a state, what is kept for a chunk, and dB and
//           dC once for each block of channels.
// Limits    More than 16 states (float) take several launches, each of which prepares the steps anew.
// Run       python -m stages run 52

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>

#include "common/async_copy.h"
#include "common/complex.h"
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

// ---- the backward ---------------------------------------------------------------------------------------------------
constexpr unsigned FULL = 0xffffffff;
constexpr int OWN = 8;               // steps of a lane
constexpr int PIECES = CHUNK / OWN;  // lanes that have a chunk of steps: half a warp, the other half has other states
constexpr int SIDES = 32 / PIECES;
constexpr int WARPS = 2, THREADS = 32 * WARPS;  // of a block
constexpr int EACH = CHUNK / THREADS;           // steps that a thread prepares
constexpr int ENOUGH = 1056;                    // blocks, 8 for each multiprocessor of an H100: 16 warps
constexpr int CARRY = 8;                        // channels of a block of carry
template <typename N>
constexpr int OF_LANE = 16 / int(sizeof(N));  // states
template <typename N>
constexpr int OF_WARP = OF_LANE<N> * SIDES;
template <typename N>
constexpr int STATES = OF_WARP<N> * WARPS;  // of a launch
template <typename N, int BLOCKS_OF_FLOAT>
constexpr int AT_ONCE = std::is_same_v<N, float> ? BLOCKS_OF_FLOAT : 1;  // how many blocks, so how many registers

// A row of a chunk's steps in shared memory. A lane's OWN are two groups of FOUR, and lanes beside each other read groups
// beside each other: the first ones of all lanes, then the second ones, whose places are swapped by fours, so that threads
// that take one step each, of both, meet no bank twice. Behind them is a place for the step before the chunk.
constexpr int ROW = CHUNK + FOUR, STEP_BEFORE = CHUNK;
__device__ __forceinline__ int place_of(int piece, int group) {
  return group * (CHUNK / 2) + (piece ^ group * 4) * FOUR;
}
__device__ __forceinline__ int place_of(int step) { return place_of(step / OWN, step % OWN / FOUR) + step % FOUR; }
constexpr int MORE = THREADS / OWN * FOUR;  // places from a thread's step to its next one

template <typename N>
__device__ __forceinline__ void load_own(N (&values)[OWN], const N* row, int piece) {
  UNROLL
  for (int k = 0; k < OWN; k += FOUR) {
    N group[FOUR];
    load_row(group, row + place_of(piece, k / FOUR));
    UNROLL
    for (int i = 0; i < FOUR; ++i) values[k + i] = group[i];
  }
}
template <typename T>
__device__ __forceinline__ void store_own(T* row, int piece, const T (&values)[OWN]) {
  UNROLL
  for (int k = 0; k < OWN; k += FOUR) {
    T group[FOUR];
    UNROLL
    for (int i = 0; i < FOUR; ++i) group[i] = values[k + i];
    store_row(row + place_of(piece, k / FOUR), group);
  }
}

// ---- shuffles, of complex numbers by parts --------------------------------------------------------------------------
template <typename N>
__device__ __forceinline__ N from_lane(N x, int lane) {
  return by_parts(x, [=](auto part) { return __shfl_sync(FULL, part, lane); });
}
template <typename N>
__device__ __forceinline__ N from_other(N x, int flip) {
  return by_parts(x, [=](auto part) { return __shfl_xor_sync(FULL, part, flip); });
}

// Of the piece `offset` before or after, among those of the half warp.
template <typename N>
__device__ __forceinline__ N from_earlier(N x, int offset) {
  return by_parts(x, [=](auto part) { return __shfl_up_sync(FULL, part, offset, PIECES); });
}
template <typename N>
__device__ __forceinline__ N from_later(N x, int offset) {
  return by_parts(x, [=](auto part) { return __shfl_down_sync(FULL, part, offset, PIECES); });
}

// The sums over a half warp's lanes of COUNT numbers of each: a lane gets that of number piece / (PIECES / COUNT).
template <int COUNT, typename N>
__device__ __forceinline__ N sum_over_pieces(N (&values)[COUNT], int piece) {
  int offset = PIECES / 2;
  UNROLL
  for (int count = COUNT / 2; count > 0; count /= 2, offset /= 2) {
    const bool upper = piece & offset;
    UNROLL
    for (int i = 0; i < count; ++i) {
      const N sent = upper ? values[i] : values[i + count], stays = upper ? values[i + count] : values[i];
      values[i] = stays + from_other(sent, offset);
    }
  }
  UNROLL
  for (; offset > 0; offset /= 2) values[0] = values[0] + from_other(values[0], offset);
  return values[0];
}

// A lane's sums of its steps, which begin anew.
template <typename N>
__device__ __forceinline__ N total_of(N (&sums)[OWN]) {
  N total = 0;
  UNROLL
  for (int k = 0; k < OWN; ++k) total = total + sums[k], sums[k] = N(0);
  return total;
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------
template <typename T>
__device__ __forceinline__ T product(T x, T y) {  // what the real part of x y is
  return x * y;
}
template <typename T>
__device__ __forceinline__ T product(Complex<T> x, Complex<T> y) {
  return x.re * y.re - x.im * y.im;
}

// sum + x y, of a real x.
template <typename T>
__device__ __forceinline__ T add_scaled(T sum, T x, T y) {
  return sum + x * y;
}
template <typename T>
__device__ __forceinline__ Complex<T> add_scaled(Complex<T> sum, T x, Complex<T> y) {
  return {sum.re + x * y.re, sum.im + x * y.im};
}

template <Method M>
constexpr bool POWER = M != Method::bilinear && M != Method::backward_euler && M != ANY;  // A_bar is e^z

// A state's rate, as steps need it.
template <typename N, Method M>
struct Rate {
  using T = Real<N>;
  Method method;
  N a, over_a;

  __device__ __forceinline__ Rate(N a, Method method) : method(method), a(a), over_a(0) {
    if constexpr (DIVIDES<M>) over_a = detail::divided(N(1), a);
  }
  __device__ __forceinline__ StepExponent<N> exponent(T dt, T over_dt, N e) const {
    return {a * dt, over_a * over_dt, e};
  }

  __device__ __forceinline__ Coefficients<N> at(T dt, T over_dt) const {
    const StepExponent<N> z = exponent(dt, over_dt, decay(scaled(a), dt));
    Coefficients<N> by = by_method<M>(method, [&]<Method L>() { return coefficients<L>(a, dt, z); });
    by.a_bar = left_of<M>(a, by);
    return by;
  }
  __device__ __forceinline__ Derivatives<N> derivatives(T dt, T over_dt, N a_bar) const {
    const StepExponent<N> z = exponent(dt, over_dt, POWER<M> ? a_bar : decay(scaled(a), dt));
    return by_method<M>(method, [&]<Method L>() { return differentiated<L>(a, dt, z); });
  }
};

// ---- tensors along time ---------------------------------------------------------------------------------------------
// A number as it lies in memory: what it is worth is asked when it is needed, so that nobody waits for it before.
template <typename T>
using Bits = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;

template <typename T>
__device__ __forceinline__ T worth(Bits<T> bits, DType dtype) {
  if constexpr (sizeof(T) == 4) {
    if (dtype == DType::float16) {
      half number;
      std::memcpy(&number, &bits, sizeof(number));
      return T(number);
    }
    bits <<= dtype == DType::bfloat16 ? 16 : 0;  // the upper half of a float
  }
  T number;
  std::memcpy(&number, &bits, sizeof(number));
  return number;
}

// How the work is cut.
struct Cut {
  int64_t share;     // neighbouring channels that have the same groups of B and of C
  int parts;         // blocks of gradients that share those
  int together;      // channels of a block of carry, at most CARRY
  int state0;        // the first state of this launch
  bool first, last;  // of the launches
  int sums;          // over states of each step: 2, with gates 3
};

// What a block's threads know of a chunk of steps of a channel, EACH of so many steps; what all states need of them goes
// to rows in shared memory.
enum Row { LENGTH, GIVEN, TAKEN, INPUT, SLOPE, ROWS };  // dt; dy silu(z); u, or dt u for mamba; u; d dt / d delta

template <typename N, Method M, bool INPUTS>
struct Steps {
  using T = Real<N>;
  const Rows<3>&dy, &u, &delta, &z;  // u only if there are INPUTS
  const View<const T, 1>& bias;
  bool with_softplus;
  T* rows;                                       // [Row][ROW]
  const unsigned char *of_dy, *of_u, *of_delta;  // of the next channel, at the thread's first step
  bool there[EACH];                              // which of its steps are before the end
  Bits<T> next_dy[EACH], next_u[EACH], next_delta[EACH], next_z[EACH];
  T next_bias;

  __device__ __forceinline__ Steps(const Rows<3>& dy, const Rows<3>& u, const Rows<3>& delta, const Rows<3>& z,
                                   const View<const T, 1>& bias, bool with_softplus, T* rows)
      : dy(dy), u(u), delta(delta), z(z), bias(bias), with_softplus(with_softplus), rows(rows) {}

  __device__ __forceinline__ static int step(int i) { return threadIdx.x + i * THREADS; }

  // The next one is this channel, of the chunk that begins at t0.
  __device__ __forceinline__ void begin(int64_t batch, int64_t channel, int64_t t0) {
    const auto at = [&](const Rows<3>& x) {
      return x.data + batch * x.stride[0] + channel * x.stride[1] + (t0 + step(0)) * x.stride[2];
    };
    of_dy = at(dy), of_delta = at(delta);
    if (INPUTS) of_u = at(u);
    UNROLL
    for (int i = 0; i < EACH; ++i) there[i] = t0 + step(i) < delta.size[2];
  }

  template <typename From>
  __device__ __forceinline__ void ask_for(Bits<T> (&next)[EACH], const Rows<3>& x, const unsigned char*& from) {
    UNROLL
    for (int i = 0; i < EACH; ++i) {
      next[i] = there[i] ? *reinterpret_cast<const From*>(from + i * THREADS * x.stride[2]) : From(0);
    }
    from += x.stride[1];
  }
  template <typename From>
  __device__ __forceinline__ void ask_for_all(int64_t batch, int64_t channel, int64_t t0) {
    ask_for<From>(next_dy, dy, of_dy), ask_for<From>(next_delta, delta, of_delta);
    if (INPUTS) ask_for<From>(next_u, u, of_u);
    if (z.size[0]) {
      const unsigned char* of_z = z.data + batch * z.stride[0] + channel * z.stride[1] + (t0 + step(0)) * z.stride[2];
      ask_for<From>(next_z, z, of_z);
    }
  }
  // Asks for the next channel's numbers; the one after it is the next then.
  __device__ __forceinline__ void ask(int64_t batch, int64_t channel, int64_t t0) {
    if (sizeof(T) == 4 && delta.bytes == 2) ask_for_all<uint16_t>(batch, channel, t0);
    else ask_for_all<Bits<T>>(batch, channel, t0);
    next_bias = bias.size[0] ? bias(channel) : T(0);
  }

  // What was asked for, in rows.
  __device__ __forceinline__ void prepare() {
    const DType dtype = delta.dtype;
    UNROLL
    for (int i = 0; i < EACH; ++i) {
      const T x = worth<T>(next_delta[i], dtype) + next_bias;
      T dt = x, slope = 1, given = worth<T>(next_dy[i], dtype);
      if (with_softplus) {
        const T e = power((x > 0 ? -x : x) * PER_E<T>);
        dt = (x > 0 ? x : T(0)) + log_of_one_plus(e), slope = (x > 0 ? T(1) : e) * reciprocal(T(1) + e);
      }
      if (!there[i]) dt = 0;  // past the end: a step of no length changes nothing
      if (z.size[0]) given *= silu(worth<T>(next_z[i], dtype));
      T* to = rows + place_of(threadIdx.x) + i * MORE;
      to[LENGTH * ROW] = dt, to[GIVEN * ROW] = given;
      if constexpr (INPUTS) {
        const T input = worth<T>(next_u[i], dtype);
        to[TAKEN * ROW] = M == Method::mamba ? dt * input : input;
        to[INPUT * ROW] = input, to[SLOPE * ROW] = slope;
      }
    }
  }
};

// A block's rows of B or C for a chunk of steps, times a factor.
template <typename N, bool CONJUGATED, bool WITH_STEP_BEFORE>
__device__ __forceinline__ void fill(N* tile, const Rows<4>& x, const unsigned char* from, int states, int64_t t0,
                                     int64_t seq, Real<N> factor) {
  const int64_t along = x.size[3] == 1 ? 0 : x.stride[3];
  with_type<N>(x.dtype, [&]<typename From>() {
    const auto column = [&](int64_t t, int place) {
      const unsigned char* at = from + t * along;
      const int there = t >= 0 && t < seq ? states : 0;
      UNROLL
      for (int row = 0; row < STATES<N>; ++row, at += x.stride[2]) {
        N number = 0;
        if (row < there) number = N(*reinterpret_cast<const From*>(at));
        tile[row * ROW + place] = (CONJUGATED ? conj(number) : number) * factor;
      }
    };
    for (int step = threadIdx.x; step < CHUNK; step += THREADS) column(t0 + step, place_of(step));
    if (WITH_STEP_BEFORE && threadIdx.x == 0) column(t0 - 1, STEP_BEFORE);
  });
}

// What carries g through a lane's steps of a state, if nothing comes from later ones: A_bar of each, their product, and
// what goes on to the step before the first.
template <typename N, Method M>
struct Piece {
  using T = Real<N>;
  N a_bar[OWN], all = 1, out = 0;

  // From the last step to the first: g = c dy + what comes of the step after.
  __device__ __forceinline__ void go_back(const N (&c)[OWN], const T (&given)[OWN]) {
    UNROLL
    for (int k = OWN - 1; k >= 0; --k) out = conj(a_bar[k]) * add_scaled(out, given[k], c[k]);
  }
  __device__ __forceinline__ void multiply(const Rate<N, M>& rate, T time) {
    if constexpr (POWER<M>) {
      all = decay(scaled(rate.a), time);
    } else {
      UNROLL
      for (int k = 0; k < OWN; ++k) all = all * a_bar[k];
    }
  }
};

// grid (batch channels / CARRY), block (32 for each OF_WARP states): what g goes into each chunk with
template <typename N, Method M>
__global__ void __launch_bounds__(THREADS, AT_ONCE<N, 8>)
    carry(Rows<3> dy,                   // [batch, channels, seq]
          View<const N, 3> dlast,       // [batch, channels, states]
          Rows<3> delta,                // [batch, channels, seq]
          View<const N, 2> A,           // [channels, states]
          Rows<4> C,                    // [batch, groups, states, seq], or with 1 for seq
          Rows<3> z,                    // [batch, channels, seq], or empty
          View<const Real<N>, 1> bias,  // [channels], or empty
          View<N, 4> carried,           // [chunks, batch, channels, states]; twice as many chunks for foh
          View<N, 3> dinitial,          // [batch, channels, states]
          bool with_softplus, Method method, Cut cut) {
  using T = Real<N>;
  constexpr int S = OF_LANE<N>;
  DYNAMIC_SHARED(N, shared);
  const int piece = threadIdx.x % PIECES, half = threadIdx.x / PIECES;  // of the block
  N* const tile = shared;                                               // C: [state][ROW]
  N* const flows = tile + STATES<N> * ROW;                              // what goes back: [CARRY][half][state]
  N* const rates = flows + CARRY * STATES<N>;                           // A, likewise
  T* const rows = reinterpret_cast<T*>(rates + CARRY * STATES<N>);

  const int64_t seq = delta.size[2], channels = delta.size[1], chunks = ceil_div(seq, CHUNK);
  const int64_t pieces = ceil_div(cut.share, cut.together), shares = channels / cut.share;
  const int64_t share = blockIdx.x / pieces, batch = share / shares;
  const int64_t channel0 = share % shares * cut.share + blockIdx.x % pieces * cut.together;
  const int count = int(min(int64_t(cut.together), (share % shares + 1) * cut.share - channel0));
  const int states = int(A.size[1]), own = cut.state0 + half * S, there = max(0, min(S, states - own));
  const bool holds_c = C.size[3] == 1;

  N *const flow = flows + half * S, *const rate_of = rates + half * S;  // of the lane's states; the next channel's are
  const int stride = STATES<N>;                                         // `stride` further on
  const auto each_state = [&](auto&& body) {  // each thread some; a place is also there for what is no state
    for (int i = threadIdx.x; i < count * STATES<N>; i += THREADS) {
      body(i, channel0 + i / STATES<N>, cut.state0 + i % STATES<N>, cut.state0 + i % STATES<N> < states);
    }
  };
  each_state([&](int i, int64_t channel, int state, bool is_there) {
    flows[i] = is_there ? dlast(batch, channel, state) : N(0), rates[i] = is_there ? A(channel, state) : N(0);
    if (LOOKS_BACK<M> && method == Method::foh && chunks > 0 && is_there) {
      carried(2 * chunks - 1, batch, channel, state) = N(0);  // nothing looks back on the last step
    }
  });
  Steps<N, M, false> steps(dy, delta, delta, z, bias, with_softplus, rows);
  if (chunks > 0) steps.begin(batch, channel0, (chunks - 1) * CHUNK), steps.ask(batch, channel0, (chunks - 1) * CHUNK);
  for (int64_t chunk = chunks - 1; chunk >= 0; --chunk) {
    const int64_t t0 = chunk * CHUNK;
    for (int c = 0; c < count; ++c) {
      const int64_t channel = channel0 + c;
      if (c == 0 || holds_c) {
        const unsigned char* from = C.data + batch * C.stride[0] + channel / (channels / C.size[1]) * C.stride[1];
        fill<N, true, false>(tile, C, from + cut.state0 * C.stride[2], states - cut.state0, t0, seq, PARTS<N>);
      }
      steps.prepare();
      __syncthreads();
      if (c + 1 < count) steps.ask(batch, channel + 1, t0);
      else if (chunk > 0) steps.begin(batch, channel0, t0 - CHUNK), steps.ask(batch, channel0, t0 - CHUNK);

      T dt[OWN], given[OWN], over_dt[OWN], time = 0;
      load_own(dt, rows + LENGTH * ROW, piece), load_own(given, rows + GIVEN * ROW, piece);
      UNROLL
      for (int k = 0; k < OWN; ++k) time += dt[k], over_dt[k] = DIVIDES<M> ? reciprocal(dt[k]) : T(0);
      N* const carried_here = &carried(chunk, batch, channel0 + c, own);
      N a[S], flow_of[S];
      load_row(a, rate_of + c * stride), load_row(flow_of, flow + c * stride);
      UNROLL
      for (int j = 0; j < S; ++j) {
        const Rate<N, M> rate(a[j], method);
        Piece<N, M> of;
        N numbers[OWN], previous = 0;
        load_own(numbers, tile + (half * S + j) * ROW, piece);
        UNROLL
        for (int k = OWN - 1; k >= 0; --k) {
          const Coefficients<N> by = rate.at(dt[k], over_dt[k]);
          of.a_bar[k] = by.a_bar, previous = by.previous;
        }
        of.multiply(rate, time), of.go_back(numbers, given);
        const N coming = flow_of[j];
        if (piece == PIECES - 1) of.out = multiply_add(conj(of.all), coming, of.out);
        UNROLL
        for (int offset = 1; offset < PIECES; offset *= 2) {  // of the pieces from this one on
          const N out = from_later(of.out, offset), all = from_later(of.all, offset);
          if (piece + offset < PIECES) of.out = multiply_add(conj(of.all), out, of.out), of.all = of.all * all;
        }
        if constexpr (LOOKS_BACK<M>) {  // what the first step's g gives to the input before
          N g = from_later(of.out, 1);
          UNROLL
          for (int k = OWN - 1; k >= 0; --k) {
            g = add_scaled(g, given[k], numbers[k]);
            if (k > 0) g = conj(of.a_bar[k]) * g;
          }
          if (piece == 0 && j < there && chunk > 0 && method == Method::foh) {
            carried(chunks + chunk - 1, batch, channel0 + c, own + j) = conj(previous) * g;
          }
        }
        if (piece == PIECES - 1 && j < there) carried_here[j] = coming;
        flow_of[j] = of.out;
      }
      __syncwarp();
      if (piece == 0) store_row(flow + c * stride, flow_of);
      __syncthreads();
    }
  }
  each_state([&](int i, int64_t channel, int state, bool is_there) {
    if (is_there) dinitial(batch, channel, state) = flows[i];
  });
}

// grid (chunks batch shares parts), block (32 for each OF_WARP states): all gradients but that of the initial state
template <typename N, Method M>
__global__ void __launch_bounds__(THREADS, AT_ONCE<N, EXPONENT_ALONE<M> ? 6 : 4>)
    gradients(Rows<3> dy,                   // [batch, channels, seq]
              Rows<3> u,                    // [batch, channels, seq]
              Rows<3> delta,                // [batch, channels, seq]
              View<const N, 2> A,           // [channels, states]
              Rows<4> B,                    // [batch, groups, states, seq], or with 1 for seq
              Rows<4> C,                    // likewise
              View<const Real<N>, 1> D,     // [channels], or empty
              Rows<3> z,                    // [batch, channels, seq], or empty
              View<const Real<N>, 1> bias,  // [channels], or empty
              const N* kept,                // [chunks, batch, channels, states]: before each CHUNK of steps
              N* carried,  // likewise: what g comes into a chunk; A's gradient of the chunk takes its place
              void* du, void* ddelta, void* dz,  // as u, delta and z, contiguous
              View<N, 5> of_b,   // [places, batch, groups, states, chunks CHUNK], or [chunks, batch, d, n, 1]
              View<N, 5> of_c,   // likewise
              Real<N>* of_d,     // [chunks, batch, channels, WARPS], or none
              Real<N>* of_bias,  // likewise
              Real<N>* so_far,   // [2 or 3, batch, channels, seq]: sums over the states of earlier launches
              bool with_softplus, Method method, Cut cut) {
  using T = Real<N>;
  constexpr int S = OF_LANE<N>,
                LED = PIECES / S;  // lanes to a state, when what is one number of a state is handed round
  DYNAMIC_SHARED(N, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, piece = lane % PIECES;
  const int half = threadIdx.x / PIECES;                           // of the block
  N* const tile_b = shared;                                        // [state][ROW]
  N* const tile_c = tile_b + STATES<N> * ROW;                      // conjugated, and doubled where numbers are complex
  N* const sums_c = tile_c + STATES<N> * ROW;                      // of C's gradient
  T* const rows = reinterpret_cast<T*>(sums_c + STATES<N> * ROW);  // [Row][ROW]
  T* const sums = rows + ROWS * ROW;  // over the states of half a warp: [half][2 or 3][ROW]

  const int64_t seq = u.size[2], channels = u.size[1], shares = channels / cut.share, chunks = ceil_div(seq, CHUNK);
  const int64_t part = blockIdx.x % unsigned(cut.parts), cell = blockIdx.x / unsigned(cut.parts);
  const int64_t share = cell % shares, batch = cell / shares % u.size[0], chunk = cell / shares / u.size[0];
  const int64_t count = ceil_div(cut.share, cut.parts), t0 = chunk * CHUNK;
  const int64_t channel0 = share * cut.share + part * count, end = min(channel0 + count, (share + 1) * cut.share);
  const int states = int(A.size[1]), own = cut.state0 + half * S, led = own + piece / LED;
  const bool leads = piece % LED == 0 && led < states, gated = z.size[0] > 0;
  const bool holds_b = B.size[3] == 1, holds_c = C.size[3] == 1;

  const auto fill_b = [&](int64_t channel) {
    const unsigned char* from = B.data + batch * B.stride[0] + channel / (channels / B.size[1]) * B.stride[1];
    fill<N, false, LOOKS_BACK<M>>(tile_b, B, from + cut.state0 * B.stride[2], states - cut.state0, t0, seq, 1);
  };
  const auto fill_c = [&](int64_t channel) {
    const unsigned char* from = C.data + batch * C.stride[0] + channel / (channels / C.size[1]) * C.stride[1];
    fill<N, true, false>(tile_c, C, from + cut.state0 * C.stride[2], states - cut.state0, t0, seq, PARTS<N>);
  };
  if (!holds_b) fill_b(share * cut.share);
  if (!holds_c) fill_c(share * cut.share);
  Steps<N, M, true> steps(dy, u, delta, z, bias, with_softplus, rows);
  const int64_t row0 = (chunk * u.size[0] + batch) * channels;  // of the channels in what a chunk has for each
  int64_t of_led = (row0 + channel0) * states + led;            // likewise, of the state that a lane leads
  N next_a = 0, next_kept = 0, next_flow = 0, next_previous = 0;
  const auto ask = [&](int64_t channel) {
    steps.ask(batch, channel, t0);
    if (!leads) return;
    next_a = A(channel, led), next_kept = kept[of_led], next_flow = carried[of_led];
    if (LOOKS_BACK<M> && method == Method::foh)
      next_previous = carried[chunks * u.size[0] * channels * states + of_led];
  };
  steps.begin(batch, channel0, t0), ask(channel0);

  // Sums over the channels. Those for C lie in shared memory, each lane's own: registers are short.
  N sum_b[S][OWN];
  UNROLL
  for (int j = 0; j < S; ++j) {
    UNROLL
    for (int k = 0; k < OWN; ++k) sum_b[j][k] = N(0);
    store_own(sums_c + (half * S + j) * ROW, piece, sum_b[j]);
  }
#pragma unroll 1
  for (int64_t channel = channel0; channel < end; ++channel) {
    if (holds_b) fill_b(channel);
    if (holds_c) fill_c(channel);
    steps.prepare();
    if (LOOKS_BACK<M> && threadIdx.x == 0) {
      T input = 0;
      if (t0 > 0) {
        const unsigned char* at = u.data + batch * u.stride[0] + channel * u.stride[1] + (t0 - 1) * u.stride[2];
        with_type<T>(u.dtype, [&]<typename From>() { input = T(*reinterpret_cast<const From*>(at)); });
      }
      rows[TAKEN * ROW + STEP_BEFORE] = input;
    }
    __syncthreads();

    T dt[OWN], taken[OWN], given[OWN], over_dt[OWN], time = 0, by_input[OWN] = {}, by_length[OWN] = {};
    load_own(dt, rows + LENGTH * ROW, piece), load_own(taken, rows + TAKEN * ROW, piece);
    load_own(given, rows + GIVEN * ROW, piece);
    UNROLL
    for (int k = 0; k < OWN; ++k) time += dt[k], over_dt[k] = DIVIDES<M> ? reciprocal(dt[k]) : T(0);
    T* const of_half = sums + half * 2 * ROW;  // and what is seen of the states, for z
    T* const seen_by_half = sums + (THREADS / PIECES * 2 + half) * ROW;
    N of_a[S];
    UNROLL
    for (int j = 0; j < S; ++j) {
      const int leader = (lane & PIECES) + j * LED;
      const Rate<N, M> rate(from_lane(next_a, leader), method);
      const N start = from_lane(next_kept, leader), coming = from_lane(next_flow, leader);
      N b[OWN], c[OWN], h[OWN], end = 0, before = 0;
      Piece<N, M> of;
      load_own(b, tile_b + (half * S + j) * ROW, piece), load_own(c, tile_c + (half * S + j) * ROW, piece);
      if constexpr (LOOKS_BACK<M>) {
        before = from_earlier(b[OWN - 1] * taken[OWN - 1], 1);
        if (piece == 0) before = tile_b[(half * S + j) * ROW + STEP_BEFORE] * rows[TAKEN * ROW + STEP_BEFORE];
      }

      // The piece by itself.
      N input_before = before;
      UNROLL
      for (int k = 0; k < OWN; ++k) {
        const N input = b[k] * taken[k];
        if constexpr (EXPONENT_ALONE<M>) {
          of.a_bar[k] = decay(scaled(rate.a), dt[k]), h[k] = input;
        } else {
          const Coefficients<N> by = rate.at(dt[k], over_dt[k]);
          of.a_bar[k] = by.a_bar, h[k] = by.gain * input;
          if constexpr (LOOKS_BACK<M>) h[k] = h[k] + by.previous * input_before, input_before = input;
        }
        end = multiply_add(of.a_bar[k], end, h[k]);
      }
      of.multiply(rate, time), of.go_back(c, given);

      // What comes in: from the pieces before, and from those after.
      N all = of.all;
      if (piece == 0) end = multiply_add(all, start, end);
      if (piece == PIECES - 1) of.out = multiply_add(conj(all), coming, of.out);
      UNROLL
      for (int offset = 1; offset < PIECES; offset *= 2) {
        const N earlier_end = from_earlier(end, offset), earlier_all = from_earlier(all, offset);
        const N later_out = from_later(of.out, offset), later_all = from_later(of.all, offset);
        if (piece >= offset) end = multiply_add(all, earlier_end, end), all = all * earlier_all;
        if (piece + offset < PIECES) {
          of.out = multiply_add(conj(of.all), later_out, of.out), of.all = of.all * later_all;
        }
      }
      N state = from_earlier(end, 1), flow = from_later(of.out, 1);
      if (piece == 0) state = start;
      if (piece == PIECES - 1) flow = coming;

      // The piece as it is.
      const N first = state;
      UNROLL
      for (int k = 0; k < OWN; ++k) state = h[k] = multiply_add(of.a_bar[k], state, h[k]);
      N sum_c[OWN];
      load_own(sum_c, sums_c + (half * S + j) * ROW, piece);
      UNROLL
      for (int k = 0; k < OWN; ++k) sum_c[k] = add_scaled(sum_c[k], given[k], conj(h[k]));
      store_own(sums_c + (half * S + j) * ROW, piece, sum_c);
      N sum_a = 0, from_next = 0;
      UNROLL
      for (int k = OWN - 1; k >= 0; --k) {
        const N g = add_scaled(flow, given[k], c[k]), state_before = k > 0 ? h[k - 1] : first;
        flow = conj(of.a_bar[k]) * g;
        if constexpr (EXPONENT_ALONE<M>) {
          const N counts = flow * conj(state_before);
          sum_a = add_scaled(sum_a, dt[k], counts);
          by_length[k] += product(conj(rate.a), counts);
          by_input[k] += product(conj(b[k]), g);
          sum_b[j][k] = add_scaled(sum_b[j][k], taken[k], g);
        } else {
          const Derivatives<N> by = rate.derivatives(dt[k], over_dt[k], of.a_bar[k]);
          const N input = b[k] * taken[k];
          const N of_a_bar = g * conj(state_before), of_gain = g * conj(input);
          sum_a = multiply_add(conj(by.by_a.a_bar), of_a_bar, multiply_add(conj(by.by_a.gain), of_gain, sum_a));
          by_length[k] += product(conj(by.by_dt.a_bar), of_a_bar) + product(conj(by.by_dt.gain), of_gain);
          N reaches = conj(by.value.gain) * g;
          if constexpr (LOOKS_BACK<M>) {
            const N of_previous = g * conj(k > 0 ? b[k - 1] * taken[k - 1] : before);
            sum_a = multiply_add(conj(by.by_a.previous), of_previous, sum_a);
            by_length[k] += product(conj(by.by_dt.previous), of_previous);
            reaches = reaches + from_next, from_next = conj(by.value.previous) * g;
          }
          by_input[k] += product(conj(b[k]), reaches);
          sum_b[j][k] = add_scaled(sum_b[j][k], taken[k], reaches);
        }
      }
      if constexpr (LOOKS_BACK<M>) {  // what the step after the piece takes of its last input
        N later = from_later(from_next, 1);
        const N of_chunk = from_lane(next_previous, leader);
        if (piece == PIECES - 1) later = of_chunk;
        by_input[OWN - 1] += product(conj(b[OWN - 1]), later);
        sum_b[j][OWN - 1] = add_scaled(sum_b[j][OWN - 1], taken[OWN - 1], later);
      }
      of_a[j] = sum_a;
      if (gated) {
        T seen[OWN] = {};
        if (j > 0) load_own(seen, seen_by_half, piece);
        UNROLL
        for (int k = 0; k < OWN; ++k) seen[k] += product(conj(c[k]), h[k]);
        store_own(seen_by_half, piece, seen);
      }
    }
    store_own(of_half, piece, by_input), store_own(of_half + ROW, piece, by_length);
    const N chunk_a = sum_over_pieces(of_a, piece);
    if (leads) carried[of_led] = chunk_a;
    of_led += states;
    // Of what holds for all time the gradient is a sum over it.
    const auto hold = [&](const View<N, 5>& of, N(&total)[S], T factor) {
      const N of_chunk = sum_over_pieces(total, piece) * factor;
      if (leads) of(chunk, batch, channel, led, 0) = of_chunk;
    };
    if (holds_b) {
      N total[S];
      UNROLL
      for (int j = 0; j < S; ++j) total[j] = total_of(sum_b[j]);
      hold(of_b, total, 1);
    }
    if (holds_c) {
      N total[S];
      UNROLL
      for (int j = 0; j < S; ++j) {
        N sum_c[OWN];
        load_own(sum_c, sums_c + (half * S + j) * ROW, piece);
        total[j] = total_of(sum_c);
        store_own(sums_c + (half * S + j) * ROW, piece, sum_c);
      }
      hold(of_c, total, PARTS<N>);
    }
    if (channel + 1 < end) ask(channel + 1);
    __syncthreads();

    // du, ddelta and dz of the steps that a thread has prepared.
    const T d = D.size[0] ? D(channel) : T(0);
    const int64_t to = (batch * channels + channel) * seq + t0 + steps.step(0), all = u.size[0] * channels * seq;
    T of_u[EACH], of_delta[EACH], seen[EACH], sum_d = 0, sum_bias = 0;
    UNROLL
    for (int i = 0; i < EACH; ++i) {
      const int at = place_of(threadIdx.x) + i * MORE;
      T of_input = 0, of_length = 0;
      seen[i] = 0;
      UNROLL
      for (int row = 0; row < THREADS / PIECES; ++row) {
        of_input += sums[row * 2 * ROW + at], of_length += sums[row * 2 * ROW + ROW + at];
        if (gated) seen[i] += sums[(THREADS / PIECES * 2 + row) * ROW + at];
      }
      if (!cut.first && steps.there[i]) {
        of_input += so_far[to + i * THREADS], of_length += so_far[all + to + i * THREADS];
        if (gated) seen[i] += so_far[2 * all + to + i * THREADS];
      }
      if (!cut.last && steps.there[i]) {
        so_far[to + i * THREADS] = of_input, so_far[all + to + i * THREADS] = of_length;
        if (gated) so_far[2 * all + to + i * THREADS] = seen[i];
      }
      const T dt_t = rows[LENGTH * ROW + at], u_t = rows[INPUT * ROW + at], dy_t = rows[GIVEN * ROW + at];
      if (M == Method::mamba) of_length += u_t * of_input, of_input *= dt_t;
      of_u[i] = d * dy_t + of_input, of_delta[i] = of_length * rows[SLOPE * ROW + at], seen[i] += d * u_t;
      sum_d += dy_t * u_t;
      if (steps.there[i]) sum_bias += of_delta[i];
    }
    if (!cut.last) continue;
    with_type<T>(u.dtype, [&]<typename To>() {
      To *const to_u = static_cast<To*>(du) + to, *const to_delta = static_cast<To*>(ddelta) + to;
      UNROLL
      for (int i = 0; i < EACH; ++i) {
        if (!steps.there[i]) continue;
        to_u[i * THREADS] = To(of_u[i]), to_delta[i * THREADS] = To(of_delta[i]);
        if (gated) {
          const auto again = [&](const Rows<3>& x) {
            return T(*reinterpret_cast<const To*>(x.data + batch * x.stride[0] + channel * x.stride[1] +
                                                  (t0 + steps.step(i)) * x.stride[2]));
          };
          const T gate = again(z), open = reciprocal(T(1) + power(-gate * PER_E<T>));
          static_cast<To*>(dz)[to + i * THREADS] = To(again(dy) * seen[i] * open * (1 + gate * (1 - open)));
        }
      }
    });
    const bool upper = lane & PIECES;  // half of the lanes sum the one, half the other
    T sum[1] = {(upper ? sum_bias : sum_d) + from_other(upper ? sum_d : sum_bias, PIECES)};
    const T of_chunk = sum_over_pieces(sum, piece);
    T* const of = upper ? of_bias : of_d;
    if (piece == 0 && of != nullptr) of[(row0 + channel) * WARPS + warp] = of_chunk;
  }

  // What varies in time: the sums over the block's channels.
  const auto write = [&](const View<N, 5>& of, int j, const N(&sum)[OWN], T factor) {
    if (own + j >= states) return;
    const int64_t in_group = channels / of.size[2] / cut.share, place = share % in_group * cut.parts + part;
    N numbers[OWN];
    UNROLL
    for (int k = 0; k < OWN; ++k) numbers[k] = sum[k] * factor;
    store_row(&of(place, batch, share / in_group, own + j, t0 + piece * OWN), numbers);
  };
  UNROLL
  for (int j = 0; j < S; ++j) {
    N sum_c[OWN];
    load_own(sum_c, sums_c + (half * S + j) * ROW, piece);
    if (!holds_b) write(of_b, j, sum_b[j], 1);
    if (!holds_c) write(of_c, j, sum_c, PARTS<N>);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What it takes to know how large of_d, of_bias and so_far are.
int backward_warps() { return WARPS; }           // of a block
int backward_states() { return STATES<float>; }  // of a launch; half as many of twice the bytes

void selective_scan_backward(Input<3> dy, Input<3> dlast, Input<3> u, Input<3> delta, Input<2> A, Input<4> B,
                             Input<4> C, Input<1> D, Input<3> z, Input<1> delta_bias, Input<4> states, Output<3> du,
                             Output<3> ddelta, Output<3> dz, Output<3> dinitial, Output<4> carried, Output<5> of_b,
                             Output<5> of_c, Output<4> of_d, Output<4> of_bias, Output<4> so_far, bool delta_softplus,
                             int method, int parts, Stream stream) {
  const int64_t batches = u.size[0], channels = u.size[1], chunks = states.size[0];
  if (batches == 0 || channels == 0) return;
  with_numbers(A.dtype, [&]<typename N>() {
    using T = Real<N>;
    with_method<N>(method, [&]<Method M>() {
      const auto in_group = [&](const Input<4>& x) { return x.size[3] == 1 ? channels : channels / x.size[1]; };
      const auto rows = [](const auto& x) { return Rows(x, STEPS<N>); };
      Cut cut{std::gcd(in_group(B), in_group(C)),
              parts,
              batches * channels < CARRY * ENOUGH ? CARRY / 2 : CARRY,
              0,
              true,
              false,
              z.size[0] > 0 ? 3 : 2};
      const int64_t shares = channels / cut.share;
      const size_t tile = STATES<N> * ROW * sizeof(N), of_steps = ROWS * ROW * sizeof(T);
      const size_t flows = 2 * CARRY * STATES<N> * sizeof(N), sums = THREADS / PIECES * cut.sums * ROW * sizeof(T);
      for (; !cut.last; cut.state0 += STATES<N>, cut.first = false) {
        cut.last = A.size[1] - cut.state0 <= STATES<N>;
        launch<carry<N, M>>({batches * shares * ceil_div(cut.share, cut.together)}, dim3(THREADS),
                            tile + flows + of_steps, stream, rows(dy), dlast.as<N>(), rows(delta), A.as<N>(), rows(C),
                            rows(z), delta_bias.as<T>(), carried.as<N>(), dinitial.as<N>(), delta_softplus,
                            Method(method), cut);
        launch<gradients<N, M>>({chunks * batches * shares * parts}, dim3(THREADS), 3 * tile + of_steps + sums, stream,
                                rows(dy), rows(u), rows(delta), A.as<N>(), rows(B), rows(C), D.as<T>(), rows(z),
                                delta_bias.as<T>(), states.as<N>().data, carried.as<N>().data, du.data, ddelta.data,
                                dz.data, of_b.as<N>(), of_c.as<N>(), of_d.as<T>().data, of_bias.as<T>().data,
                                so_far.as<T>().data, delta_softplus, Method(method), cut);
      }
    });
  });
}
