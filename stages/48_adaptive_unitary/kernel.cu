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

#include <type_traits>

#include "common/complex.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/mma.h"
#include "common/numeric.h"
#include "common/phase.h"
#include "common/vector.h"
#include "common/view.h"

constexpr int WARPS = 4;               // of a block
constexpr int ROWS = 16;               // states of a warp: a lane has two of them, eight apart
constexpr int STATES = WARPS * ROWS;   // of a block at a time
constexpr int EACH = 8;                // steps of a lane
constexpr int STEPS = 4 * EACH;        // of a tile: four lanes share a state, each has a part of the time
constexpr int INPUTS = 32;             // rows of u, and columns of x, at a time
constexpr int BLOCKS = 4;              // a multiprocessor
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

// z + x y, in four instructions.
template <typename T>
__device__ __forceinline__ Complex<T> multiply_add(Complex<T> x, Complex<T> y, Complex<T> z) {
  return {z.re + x.re * y.re - x.im * y.im, z.im + x.re * y.im + x.im * y.re};
}

// ---- products on the tensor cores -----------------------------------------------------------------------------------
// A float goes there as the sum of two that have 11 bits each, a double as it is.
template <typename T>
constexpr int PARTS = sizeof(T) == 4 ? 2 : 1;
template <typename T>
using Part = std::conditional_t<sizeof(T) == 4, uint32_t, double>;
template <typename T>
using Left = Part<T>[PARTS<T>][4];  // what a lane holds of the left matrix
template <typename T>
using Right = Vector<Part<T>, 2 * PARTS<T>>;  // and of the right one: part i of value n is element 2 i + n

// mma ignores 13 bits: they are rounded away from the first part. What is not finite makes the second one NaN.
template <typename T>
__device__ __forceinline__ void split(T value, Part<T> (&parts)[PARTS<T>]) {
  if constexpr (sizeof(T) == 8) {
    parts[0] = value;
  } else {
    parts[0] = (__float_as_uint(value) + 0x1000) & 0xffffe000;
    parts[1] = __float_as_uint(value - __uint_as_float(parts[0]));
  }
}
template <typename T>
__device__ __forceinline__ Right<T> split(T first, T second) {
  Part<T> parts[2][PARTS<T>];
  split(first, parts[0]), split(second, parts[1]);
  Right<T> right;
  UNROLL
  for (int i = 0; i < 2 * PARTS<T>; ++i) right[i] = parts[i % 2][i / 2];
  return right;
}

// d += a b, as mma. Of floats all but the product of the two small parts, which is nothing beside the rounding.
template <typename T>
__device__ __forceinline__ void multiply(T (&d)[4], const Left<T>& a, const Right<T>& b) {
  if constexpr (sizeof(T) == 8) {
    mma(d, a[0], b.value);
  } else {
    const uint32_t high[2] = {b[0], b[1]}, low[2] = {b[2], b[3]};
    mma<Tf32>(d, a[1], high);
    mma<Tf32>(d, a[0], low);
    mma<Tf32>(d, a[0], high);
  }
}

// ---- a tile of time -------------------------------------------------------------------------------------------------
// Who does what in a warp. Lane 4 row + part has the states row and row + 8, and of each the steps from EACH part on.
struct Lane {
  int row = threadIdx.x % 32 / 4, part = threadIdx.x % 4;
};

// INPUTS rows of STEPS steps of u. Read by pairs of rows along a row of the tile, and filled, too: four pairs and two
// neighbouring steps are all the banks, as the steps lie half of them apart. What lanes of other parts read lies
// another quarter apart.
template <typename T>
struct Tile {
  static constexpr int PITCH = INPUTS / 2 + 4, SKEW = 2;
  Right<T> u[STEPS / EACH][EACH * PITCH + SKEW];
};

// A thread fills one step of a tile with EACH of its rows, two at a time.
struct Filler {
  int part = threadIdx.x / 32, step = threadIdx.x % 32 / 8 * 2 + threadIdx.x % 2, pair = threadIdx.x % 8 / 2;
};

// What this thread will fill in, of the tile that begins at step t0 and row r0; 0 past an edge.
template <typename T>
__device__ __forceinline__ void fetch(T (&piece)[EACH], const View<const T, 3>& u, int64_t batch, int64_t t0,
                                      int64_t r0) {
  const Filler own;
  const int64_t t = t0 + EACH * own.part + own.step;
  const int rows = t < u.size[2] ? int(min(u.size[1] - r0, int64_t(INPUTS))) - 2 * own.pair : 0;
  const T* word = &u(batch, r0 + 2 * own.pair, t);
  UNROLL
  for (int i = 0; i < EACH; i += 2, word += 8 * u.stride[1]) {
    piece[i] = 4 * i < rows ? word[0] : T(0);
    piece[i + 1] = 4 * i + 1 < rows ? word[u.stride[1]] : T(0);
  }
}
template <typename T>
__device__ __forceinline__ void fill(Tile<T>& tile, const T (&piece)[EACH]) {
  const Filler own;
  UNROLL
  for (int i = 0; i < EACH; i += 2) {
    tile.u[own.part][own.step * Tile<T>::PITCH + 2 * i + own.pair] = split(piece[i], piece[i + 1]);
  }
}

// What a lane needs of x to turn its states, in turns rather than radians: of each 8 inputs two.
template <typename T>
using Weights = Left<T>[INPUTS / 8];

template <typename T>
__device__ __forceinline__ void load_weights(Weights<T>& weights, const View<const T, 3>& x, int64_t channel,
                                             int64_t state0, int64_t r0) {
  const Lane own;
  const T* word = &x(channel, state0 + own.row, r0 + 2 * own.part);
  const int rows = int(min(x.size[1] - state0, int64_t(ROWS))) - own.row;
  const int cols = int(min(x.size[2] - r0, int64_t(INPUTS))) - 2 * own.part;
  UNROLL
  for (int k = 0; k < INPUTS / 8; ++k, word += 8 * x.stride[2]) {
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const bool inside = i % 2 * 8 < rows && 8 * k + i / 2 < cols;
      const Turns<T> turns = turns_of(inside ? word[i % 2 * 8 * x.stride[1] + i / 2 * x.stride[2]] : T(0));
      Part<T> parts[PARTS<T>];
      split(turns.rounded, parts);
      weights[k][0][i] = parts[0];
      if constexpr (PARTS<T> == 2) weights[k][1][i] = to_tf32(__uint_as_float(parts[1]) + turns.rest);
    }
  }
}

// How far each step of a tile turns the states of a lane: turns[k / 2][2 i + k % 2] for step k of state i.
template <typename T>
using Angles = T[EACH / 2][4];

template <typename T>
__device__ __forceinline__ void add_product(Angles<T>& turns, const Weights<T>& x, const Tile<T>& tile) {
  const Lane own;
  UNROLL
  for (int k = 0; k < INPUTS / 8; ++k) {
    UNROLL
    for (int n = 0; n < EACH / 2; ++n) {
      // Column `row` of the product belongs to the lane of part row / 2.
      const int step = 2 * n + own.row % 2;
      multiply<T>(turns[n], x[k], tile.u[own.row / 2][step * Tile<T>::PITCH + 4 * k + own.part]);
    }
  }
}

// Of the four lanes that share a state: the sum of those before this one, and of all.
template <typename T>
struct Sum {
  T before, all;
};
template <typename T>
__device__ __forceinline__ Sum<T> sum_of_parts(T value) {
  const int part = Lane().part;
  const T neighbour = __shfl_xor_sync(0xffffffffu, value, 1), pair = value + neighbour;
  const T other = __shfl_xor_sync(0xffffffffu, pair, 2);
  return {(part % 2 ? neighbour : T(0)) + (part / 2 ? other : T(0)), pair + other};
}
template <typename T>
__device__ __forceinline__ Sum<Complex<T>> sum_of_parts(Complex<T> value) {
  const Sum<T> re = sum_of_parts(value.re), im = sum_of_parts(value.im);
  return {{re.before, im.before}, {re.all, im.all}};
}

// Of state i: unit vectors e to where it points at each step of this lane, and on to `phase` at the end of the tile.
// A step turns it by its own angle and by the bias.
template <typename T>
__device__ __forceinline__ void turn(Complex<T> (&e)[EACH], Phase<T>& phase, const Angles<T>& turns, int i,
                                     Phase<T> bias) {
  Phase<T> turned[EACH], sum = 0;
  UNROLL
  for (int k = 0; k < EACH; ++k) turned[k] = sum += phase_of_turns(turns[k / 2][2 * i + k % 2]) + bias;
  const Sum<Phase<T>> parts = sum_of_parts(sum);
  UNROLL
  for (int k = 0; k < EACH; ++k) {
    const T nan = turns[k / 2][2 * i + k % 2] * T(0);  // 0, or NaN where an angle is no number
    e[k] = unit<T>(phase + parts.before + turned[k], nan);
  }
  phase += parts.all;
}

// The sum over the states of a warp of values[k]: for step EACH part + row, in its lane.
template <typename T>
__device__ __forceinline__ T sum_of_states(T (&values)[EACH]) {
  UNROLL
  for (int half = EACH / 2, apart = 16; half > 0; half /= 2, apart /= 2) {
    const bool upper = threadIdx.x & apart;
    UNROLL
    for (int k = 0; k < half; ++k) {
      const T keep = upper ? values[k + half] : values[k], give = upper ? values[k] : values[k + half];
      values[k] = keep + __shfl_xor_sync(0xffffffffu, give, apart);
    }
  }
  return values[0];
}

// EACH values of this lane's part of a tile.
template <typename T>
__device__ __forceinline__ void load_part(T (&values)[EACH], const T* tile) {
  UNROLL
  for (int k = 0; k < EACH; k += WIDE<T>) {
    const auto group = load_vector<WIDE<T>>(tile + EACH * Lane().part + k);
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) values[k + i] = group[i];
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// grid (B d), block (32 WARPS)
template <typename T>
struct ForwardTiles {
  Tile<T> tile[2];  // while one is worked with, the next one is filled
  alignas(16) T v[2][STEPS];
  T sums[2][WARPS][STEPS];
};

template <typename T>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS)
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
                     View<Complex<T>, 4> sums,         // [tiles + 1, batch, channels, states]: before each, or empty
                     View<T, 4> phases) {              // likewise, their bits
  __shared__ ForwardTiles<T> shared;
  const int64_t channels = u.size[1], seq = u.size[2], states = x.size[1], tiles = ceil_div(seq, STEPS);
  const int64_t batch = blockIdx.x / channels, channel = blockIdx.x % channels;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Lane own;

  for (int64_t block0 = 0; block0 == 0 || block0 < states; block0 += STATES) {
    const int64_t state0 = block0 + warp * ROWS;
    Weights<T> weights;
    load_weights(weights, x, channel, state0, 0);
    Complex<T> sum[2] = {0, 0}, from_sum[2] = {0, 0}, from_start[2] = {0, 0};  // y takes C B s + C h[0]
    Phase<T> phase[2] = {0, 0}, bias[2];
    UNROLL
    for (int i = 0; i < 2; ++i) {
      const int64_t j = state0 + own.row + 8 * i;
      const Complex<T> c = polar(C, j);
      from_sum[i] = c * polar(B, j);
      if (j < states && state.size[0]) from_start[i] = c * state(batch, channel, j);
      const T angle = j < states ? x_bias(channel, j) : T(0);
      bias[i] = phase_of(angle), sum[i].re = angle * T(0);  // 0, or NaN where an angle is no number
    }

    // The steps of one warp's lanes: what goes into them, and what comes out when all warps have summed.
    const auto find_v = [&](int64_t t0) {
      const int64_t t = t0 + lane;
      return t < seq ? dt(batch, channel, t) * silu(u(batch, channel, t)) : T(0);
    };
    const auto finish = [&](int64_t t0) {
      const int64_t t = t0 + lane;
      if (t >= seq) return;
      T total = block0 ? w(batch, channel, t) : D(channel) * silu(u(batch, channel, t));
      for (int i = 0; i < WARPS; ++i) total += shared.sums[t0 / STEPS % 2][i][lane];
      w(batch, channel, t) = total;
      y(batch, channel, t) = total * silu(z(batch, channel, t));
    };
    // The states before a tile, for the backward.
    const auto keep = [&](int64_t tile) {
      const int64_t j = state0 + own.row + 8 * own.part;
      if (sums.size[0] == 0 || own.part >= 2 || j >= states) return;
      sums(tile, batch, channel, j) = own.part ? sum[1] : sum[0];
      reinterpret_cast<Phase<T>&>(phases(tile, batch, channel, j)) = own.part ? phase[1] : phase[0];
    };

    T piece[EACH];
    fetch(piece, u, batch, 0, 0);
    fill(shared.tile[0], piece);
    if (warp == 0) shared.v[0][lane] = find_v(0);
    int now = 0;  // which of the two tiles
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t t0 = tile * STEPS;
      keep(tile);
      Angles<T> turns = {};
      for (int64_t r0 = 0; r0 < channels; r0 += INPUTS) {
        __syncthreads();  // this tile is there, v too, and the sums of the one before; nobody needs its u any more
        const bool more = r0 + INPUTS < channels;
        fetch(piece, u, batch, more ? t0 : t0 + STEPS, more ? r0 + INPUTS : 0);
        const T v_next = warp == 0 && !more ? find_v(t0 + STEPS) : T(0);
        if (warp == WARPS - 1 && r0 == 0 && tile > 0) finish(t0 - STEPS);
        if (channels > INPUTS) load_weights(weights, x, channel, state0, r0);
        add_product(turns, weights, shared.tile[now]);
        now = 1 - now;
        if (more) {
          fill(shared.tile[now], piece);
          continue;
        }
        T v[EACH], read[EACH] = {};
        load_part(v, shared.v[tile % 2]);
        UNROLL
        for (int i = 0; i < 2; ++i) {
          Complex<T> e[EACH], taken = 0;
          turn(e, phase[i], turns, i, bias[i]);
          UNROLL
          for (int k = 0; k < EACH; ++k) taken = taken + conj(e[k]) * v[k];
          const Sum<Complex<T>> parts = sum_of_parts(taken);
          Complex<T> s = sum[i] + parts.before;
          UNROLL
          for (int k = 0; k < EACH; ++k) {
            s = s + conj(e[k]) * v[k];
            const Complex<T> of_h = multiply_add(from_sum[i], s, from_start[i]);
            read[k] += e[k].re * of_h.re, read[k] -= e[k].im * of_h.im;
          }
          sum[i] = sum[i] + parts.all;
        }
        shared.sums[tile % 2][warp][EACH * own.part + own.row] = sum_of_states(read);
        fill(shared.tile[now], piece);
        if (warp == 0) shared.v[1 - tile % 2][lane] = v_next;
      }
    }
    __syncthreads();  // the last sums are there
    if (warp == WARPS - 1 && tiles > 0) finish((tiles - 1) * STEPS);

    // Past the end nothing has been taken up, but the biases have turned the states on. Whole numbers go back exactly.
    UNROLL
    for (int i = 0; i < 2; ++i) phase[i] -= bias[i] * Phase<T>(tiles * STEPS - seq);
    keep(tiles);
    const int64_t j = state0 + own.row + 8 * own.part;
    if (own.part < 2 && j < states) {
      const Complex<T> start = state.size[0] ? state(batch, channel, j) : Complex<T>(0);
      const Complex<T> s = own.part ? sum[1] : sum[0];
      last(batch, channel, j) = unit<T>(own.part ? phase[1] : phase[0]) * multiply_add(polar(B, j), s, start);
    }
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
                      Input<3> z, Input<3> state, Output<3> y, Output<3> w, Output<3> last, Output<4> sums,
                      Output<4> phases, Stream stream) {
  dispatch_wide(u.dtype, [&]<typename T>() {
    using C2 = Complex<T>;
    launch<adaptive_unitary<T>>({u.size[0] * u.size[1]}, dim3(32 * WARPS), 0, stream, u.as<T>(), dt.as<T>(), x.as<T>(),
                                x_bias.as<T>(), B.as<C2>(), C.as<C2>(), D.as<T>(), z.as<T>(), state.as<C2>(), y.as<T>(),
                                w.as<T>(), last.as<C2>(), sums.as<C2>(), phases.as<T>());
  });
}
