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
//           The angles are a product of matrices, which the tensor cores make: floats as sums of two that have 11 bits.
// Mapping   block: one channel of one batch, all T steps.  warp: 16 states, the rows of a product.  Four lanes share
//           two states; each walks a quarter of a tile's STEPS steps, once to find what the others have to add to theirs,
//           a second time with it. While a tile is walked, u of the next one comes. No two blocks add to one number.
//           Backward: the same walk from the end gives dx; a second one, all tiles at a time, a warp each, gives du,
//           the sum over all channels. Both make dtheta anew, which is cheaper than memory for it.
// Cost      float32, row-major, d = P INPUTS, n = W STATES, T = L STEPS; each of b d blocks; X = 1 (P = 1) or 1 + L P
//             global load sectors   W (88 + 1024 X + 128 L P + 16 L) + L   store sectors   W (16 + 8 L)
//             shared loads          W (32 + 416 L P + 36 L) wavefronts     barriers        W (L P + 1)
//             shared stores         W (65 + 128 X + 64 L P + 5 L)          copies          W (32 + 128 L P)
//           Backward: 24 bytes are kept of each state for each tile.
// Limits    Sequences one after another: few batches and channels leave much of the card idle, however long they are.
//           More than STATES states take a walk for each STATES of them. More than INPUTS channels send dx, and the
//           sums of du, through memory tile by tile.
// Run       python -m stages run 48

#include <type_traits>

#include "common/async_copy.h"
#include "common/complex.h"
#include "common/device.h"
#include "common/launch.h"
#include "common/mma.h"
#include "common/numeric.h"
#include "common/phase.h"
#include "common/vector.h"
#include "common/view.h"

constexpr int WARPS = 4;              // of a block
constexpr int ROWS = 16;              // states of a warp: a lane has two of them, eight apart
constexpr int STATES = WARPS * ROWS;  // of a block at a time
constexpr int EACH = 8;               // steps of a lane
constexpr int STEPS = 4 * EACH;       // of a tile: four lanes share a state, each has a part of the time
constexpr int INPUTS = 32;            // rows of u, and columns of x, at a time
template <typename T>
constexpr int BLOCKS = 16 / int(sizeof(T));  // a multiprocessor: doubles need twice the registers
template <typename T>
constexpr int WIDE = 16 / int(sizeof(T));  // elements that 16 bytes hold
template <typename T>
constexpr T TURN = T(6.28318530717958647692);  // in radians
template <typename T>
constexpr T PER_TURN = detail::PhaseOf<T>::HALF;

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
using Right = Part<T>[PARTS<T>][2];  // and of the right one

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
// Of an angle in radians, in the parts of a turn that a phase counts.
template <typename T>
__device__ __forceinline__ void split_turns(T angle, Part<T> (&parts)[PARTS<T>]) {
  const Turns<T> turns = turns_of(angle);
  split(turns.rounded * PER_TURN<T>, parts);
  if constexpr (sizeof(T) == 4) parts[1] = to_tf32(__uint_as_float(parts[1]) + turns.rest * PER_TURN<T>);
}

// d += a b, of COUNT matrices each, as mma. Of floats all but the product of the two small parts, which is nothing beside
// the rounding. Tensor cores do not round, they cut off what they cannot hold, and the more often the longer their sum
// is: so the small parts, of which that is least, come first, and angles are summed up elsewhere.
template <typename T, int COUNT>
__device__ __forceinline__ void multiply(T (&d)[4], const Left<T> (&a)[COUNT], const Right<T> (&b)[COUNT]) {
  if constexpr (sizeof(T) == 4) {
    UNROLL
    for (int k = 0; k < COUNT; ++k) mma<Tf32>(d, a[k][1], b[k][0]), mma<Tf32>(d, a[k][0], b[k][1]);
  }
  UNROLL
  for (int k = 0; k < COUNT; ++k) {
    if constexpr (sizeof(T) == 4) mma<Tf32>(d, a[k][0], b[k][0]);
    else mma(d, a[k][0], b[k][0]);
  }
}

// COUNT neighbours in shared memory, by as few loads as there can be.
template <int COUNT, typename T>
__device__ __forceinline__ void load_row(T (&values)[COUNT], const T* from) {
  UNROLL
  for (int k = 0; k < COUNT; k += WIDE<T>) {
    const auto group = load_vector<WIDE<T>>(from + k);
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) values[k + i] = group[i];
  }
}
template <int COUNT, typename T>
__device__ __forceinline__ void store_row(T* to, const T (&values)[COUNT]) {
  UNROLL
  for (int k = 0; k < COUNT; k += WIDE<T>) {
    Vector<T, WIDE<T>> group;
    UNROLL
    for (int i = 0; i < WIDE<T>; ++i) group[i] = values[k + i];
    store_vector(to + k, group);
  }
}

// ---- a tile of time -------------------------------------------------------------------------------------------------
// Who does what in a warp: lane 4 row + quarter has the states row and row + 8, and of each a quarter of the steps.
struct Lane {
  int row = threadIdx.x % 32 / 4, quarter = threadIdx.x % 4;
};

// Rows of INPUTS numbers, of float32 in two planes, and a gap after each quarter of them. 16 bytes of eight lanes at a
// time are all the banks: two rows of one quarter, four places of each, as neighbouring rows lie half of the banks apart;
// and one row of each quarter, two places, as quarters lie a quarter of the banks apart.
constexpr int PITCH = INPUTS + 16, SKEW = 8;
template <typename T, int ROWS_OF_QUARTER>
struct Tile {
  alignas(16) Part<T> part[PARTS<T>][4][ROWS_OF_QUARTER * PITCH + SKEW];

  __device__ __forceinline__ void load(Part<T> (&values)[PARTS<T>][4], int row, int col) const {
    UNROLL
    for (int i = 0; i < PARTS<T>; ++i)
      load_row(values[i], &part[i][row / ROWS_OF_QUARTER][row % ROWS_OF_QUARTER * PITCH + col]);
  }
  // Two neighbours of a row and of the next one.
  __device__ __forceinline__ void load_left(Left<T>& left, int row, int col) const {
    UNROLL
    for (int i = 0; i < PARTS<T>; ++i) {
      UNROLL
      for (int k = 0; k < 2; ++k) {
        const Part<T>* from = &part[i][row / ROWS_OF_QUARTER][(row % ROWS_OF_QUARTER + k) * PITCH + col];
        const auto pair = load_vector<2>(from);
        left[i][2 * k] = pair[0], left[i][2 * k + 1] = pair[1];
      }
    }
  }
  __device__ __forceinline__ void store(const Part<T> (&values)[PARTS<T>][4], int row, int col) {
    UNROLL
    for (int i = 0; i < PARTS<T>; ++i)
      store_row(&part[i][row / ROWS_OF_QUARTER][row % ROWS_OF_QUARTER * PITCH + col], values[i]);
  }
};
template <typename T>
using Steps = Tile<T, EACH>;  // INPUTS rows of u, a row of the tile for each step

// A thread fills one step of a tile with EACH of its inputs, four at a time.
struct Filler {
  int step = threadIdx.x / 8 * 2 + threadIdx.x % 2, col = threadIdx.x % 8 / 2 * 4;
};

// What each thread will fill in. Copies bring it while the warps work, so that no register has to wait for it.
template <typename T>
using Coming = T[2][4][32 * WARPS];

// Of the tile that begins at step t0 and row r0; 0 past an edge.
template <typename T>
__device__ __forceinline__ void fetch(Coming<T>& coming, const View<const T, 3>& u, int64_t batch, int64_t t0,
                                      int64_t r0) {
  const Filler own;
  const int64_t t = t0 + own.step;
  const int rows = t0 >= 0 && t < u.size[2] ? int(min(u.size[1] - r0, int64_t(INPUTS))) - own.col : 0;
  const T* word = &u(batch, r0 + own.col, t);
  UNROLL
  for (int m = 0; m < 2; ++m, word += 12 * u.stride[1]) {
    UNROLL
    for (int i = 0; i < 4; ++i, word += u.stride[1])
      async_copy<sizeof(T)>(&coming[m][i][threadIdx.x], word, 16 * m + i < rows);
  }
  async_commit();
}
template <typename T>
__device__ __forceinline__ void fill(Steps<T>& tile, const Coming<T>& coming) {
  const Filler own;
  async_wait<0>();
  UNROLL
  for (int m = 0; m < 2; ++m) {
    Part<T> values[PARTS<T>][4];
    UNROLL
    for (int i = 0; i < 4; ++i) {
      Part<T> parts[PARTS<T>];
      split(coming[m][i][threadIdx.x], parts);
      for (int n = 0; n < PARTS<T>; ++n) values[n][i] = parts[n];
    }
    tile.store(values, own.step, own.col + 16 * m);
  }
}

// What the lanes of a warp need of x to turn their states, in turns rather than radians. Each reads what it wrote.
template <typename T>
struct Weights {
  alignas(16) Part<T> of_lane[INPUTS / 8][PARTS<T>][32][4];
};

template <typename T>
__device__ __forceinline__ void load_weights(Weights<T>& weights, const View<const T, 3>& x, int64_t channel,
                                             int64_t state0, int64_t r0) {
  const Lane own;
  const T* word = &x(channel, state0 + own.row, r0 + 4 * own.quarter);
  const int rows = int(min(x.size[1] - state0, int64_t(ROWS))) - own.row;
  const int cols = int(min(x.size[2] - r0, int64_t(INPUTS))) - 4 * own.quarter;
#pragma unroll 1
  for (int k = 0; k < INPUTS / 8; ++k) {
    Left<T> left;
    UNROLL
    for (int i = 0; i < 4; ++i) {
      const int row = i % 2 * 8, col = k / 2 * 16 + k % 2 * 2 + i / 2;
      Part<T> parts[PARTS<T>];
      split_turns(row < rows && col < cols ? word[row * x.stride[1] + col * x.stride[2]] : T(0), parts);
      for (int n = 0; n < PARTS<T>; ++n) left[n][i] = parts[n];
    }
    for (int n = 0; n < PARTS<T>; ++n) store_row(weights.of_lane[k][n][threadIdx.x % 32], left[n]);
  }
}

// A lane's four neighbours of a row, two for each of two products.
template <typename T>
__device__ __forceinline__ void deal_out(Right<T> (&right)[2], const Part<T> (&four)[PARTS<T>][4]) {
  UNROLL
  for (int half = 0; half < 2; ++half) {
    UNROLL
    for (int i = 0; i < PARTS<T>; ++i) right[half][i][0] = four[i][2 * half], right[half][i][1] = four[i][2 * half + 1];
  }
}

template <typename T>
__device__ __forceinline__ void add_rounded(T (&sum)[4], const Left<T> (&left)[2], const Right<T> (&right)[2]) {
  T product[4] = {};
  multiply<T>(product, left, right);
  UNROLL
  for (int i = 0; i < 4; ++i) sum[i] += product[i];
}

// How far each step of a tile turns the states of a lane: turns[k / 2][2 i + k % 2] for step k of state i.
template <typename T>
using Angles = T[EACH / 2][4];

template <typename T>
__device__ __forceinline__ void add_product(Angles<T>& turns, const Weights<T>& x, const Steps<T>& tile) {
  const Lane own;
  UNROLL
  for (int m = 0; m < INPUTS / 16; ++m) {
    Left<T> left[2];
    UNROLL
    for (int half = 0; half < 2; ++half) {
      UNROLL
      for (int i = 0; i < PARTS<T>; ++i) load_row(left[half][i], x.of_lane[2 * m + half][i][threadIdx.x % 32]);
    }
    UNROLL
    for (int n = 0; n < EACH / 2; ++n) {
      // Column `row` of the product belongs to the lanes of quarter row / 2.
      Part<T> four[PARTS<T>][4];
      tile.load(four, EACH * (own.row / 2) + 2 * n + own.row % 2, 16 * m + 4 * own.quarter);
      Right<T> right[2];
      deal_out<T>(right, four);
      add_rounded<T>(turns[n], left, right);
    }
  }
}

// Of the four lanes that share a state: the sum of those before this one, of those after it, and of all.
template <typename T>
struct Sum {
  T before, after, all;
};
template <typename T>
__device__ __forceinline__ Sum<T> sum_of_quarters(T value) {
  const int quarter = Lane().quarter;
  const T neighbour = __shfl_xor_sync(0xffffffffu, value, 1), pair = value + neighbour;
  const T other = __shfl_xor_sync(0xffffffffu, pair, 2);
  return {(quarter % 2 ? neighbour : T(0)) + (quarter / 2 ? other : T(0)),
          (quarter % 2 ? T(0) : neighbour) + (quarter / 2 ? T(0) : other), pair + other};
}
template <typename T>
__device__ __forceinline__ Sum<Complex<T>> sum_of_quarters(Complex<T> value) {
  const Sum<T> re = sum_of_quarters(value.re), im = sum_of_quarters(value.im);
  return {{re.before, im.before}, {re.after, im.after}, {re.all, im.all}};
}

// Of state i: unit vectors e to where it points at each step of this lane, and on to `phase` at the end of the tile.
// A step turns it by its own angle and by the bias.
template <typename T>
__device__ __forceinline__ void turn(Complex<T> (&e)[EACH], Phase<T>& phase, const Angles<T>& turns, int i,
                                     Phase<T> bias) {
  Phase<T> turned[EACH], sum = 0;
  UNROLL
  for (int k = 0; k < EACH; ++k) turned[k] = sum += phase_of_parts(turns[k / 2][2 * i + k % 2]) + bias;
  const Sum<Phase<T>> others = sum_of_quarters(sum);
  UNROLL
  for (int k = 0; k < EACH; ++k) {
    const T nan = turns[k / 2][2 * i + k % 2] * T(0);  // 0, or NaN where an angle is no number
    e[k] = unit<T>(phase + others.before + turned[k], nan);
  }
  phase += others.all;
}

// The sum over the states of a warp of values[k]; a lane gets that of its step `row`.
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

// ---------------------------------------------------------------------------------------------------------------------
// grid (B d), block (32 WARPS)
template <typename T>
struct ForwardTiles {
  Steps<T> tile[2];  // while one is worked with, the next one is filled
  Coming<T> coming;
  Weights<T> weights[WARPS];
  alignas(16) T v[2][STEPS];
  T sums[2][WARPS][STEPS];
};

template <typename T>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS<T>)
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
                     View<Phase<T>, 4> phases) {       // likewise
  DYNAMIC_SHARED(ForwardTiles<T>, tiles_of_block);
  ForwardTiles<T>& shared = *tiles_of_block;
  const int64_t channels = u.size[1], seq = u.size[2], states = x.size[1], tiles = ceil_div(seq, STEPS);
  const int64_t batch = blockIdx.x / channels, channel = blockIdx.x % channels;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool finishes = warp == 0, prepares = warp == WARPS - 1;  // steps of time, a lane one of a tile's
  const Lane own;

  for (int64_t block0 = 0; block0 == 0 || block0 < states; block0 += STATES) {
    const int64_t state0 = block0 + warp * ROWS;
    load_weights(shared.weights[warp], x, channel, state0, 0);
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

    // What goes into a step, and what comes out when all warps have summed.
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
      const int64_t j = state0 + own.row + 8 * own.quarter;
      if (sums.size[0] == 0 || own.quarter >= 2 || j >= states) return;
      const int64_t at = (tile * gridDim.x + blockIdx.x) * states + j;
      sums.data[at] = own.quarter ? sum[1] : sum[0];
      phases.data[at] = own.quarter ? phase[1] : phase[0];
    };

    fetch(shared.coming, u, batch, 0, 0);
    fill(shared.tile[0], shared.coming);
    if (prepares) shared.v[0][lane] = find_v(0);
    int now = 0;  // which of the two tiles
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t t0 = tile * STEPS;
      keep(tile);
      Angles<T> turns = {};
      for (int64_t r0 = 0; r0 < channels; r0 += INPUTS) {
        __syncthreads();  // this tile is there, v too, and the sums of the one before; nobody needs its u any more
        const bool more = r0 + INPUTS < channels;
        fetch(shared.coming, u, batch, more ? t0 : t0 + STEPS, more ? r0 + INPUTS : 0);
        const T v_next = prepares && !more ? find_v(t0 + STEPS) : T(0);
        if (finishes && r0 == 0 && tile > 0) finish(t0 - STEPS);
        if (channels > INPUTS) load_weights(shared.weights[warp], x, channel, state0, r0);
        add_product(turns, shared.weights[warp], shared.tile[now]);
        now = 1 - now;
        if (more) {
          fill(shared.tile[now], shared.coming);
          continue;
        }
        T v[EACH], read[EACH] = {};
        load_row(v, &shared.v[tile % 2][EACH * own.quarter]);
        UNROLL
        for (int i = 0; i < 2; ++i) {
          Complex<T> e[EACH], taken = 0;
          turn(e, phase[i], turns, i, bias[i]);
          UNROLL
          for (int k = 0; k < EACH; ++k) taken = taken + conj(e[k]) * v[k];
          const Sum<Complex<T>> others = sum_of_quarters(taken);
          Complex<T> s = sum[i] + others.before;
          UNROLL
          for (int k = 0; k < EACH; ++k) {
            s = s + conj(e[k]) * v[k];
            const Complex<T> of_h = multiply_add(from_sum[i], s, from_start[i]);
            read[k] += e[k].re * of_h.re, read[k] -= e[k].im * of_h.im;
          }
          sum[i] = sum[i] + others.all;
        }
        shared.sums[tile % 2][warp][EACH * own.quarter + own.row] = sum_of_states(read);
        fill(shared.tile[now], shared.coming);
        if (prepares) shared.v[1 - tile % 2][lane] = v_next;
      }
    }
    __syncthreads();  // the last sums are there
    if (finishes && tiles > 0) finish((tiles - 1) * STEPS);

    // Past the end nothing has been taken up, but the biases have turned the states on. Whole numbers go back exactly.
    UNROLL
    for (int i = 0; i < 2; ++i) phase[i] -= bias[i] * Phase<T>(tiles * STEPS - seq);
    keep(tiles);
    const int64_t j = state0 + own.row + 8 * own.quarter;
    if (own.quarter < 2 && j < states) {
      const Complex<T> start = state.size[0] ? state(batch, channel, j) : Complex<T>(0);
      const Complex<T> s = own.quarter ? sum[1] : sum[0];
      last(batch, channel, j) = unit<T>(own.quarter ? phase[1] : phase[0]) * multiply_add(polar(B, j), s, start);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The way back. Beside s = h[0] + B p, with p the sum of v conj(E) up to a step, there is m, what a state's gradient is
// in the turning frame: m = m[T] + conj(C) q, with q the sum of dy silu(z) conj(E) from a step on.

// What a lane knows of one of its states as it walks: at first after its last step, in the end before its first one.
template <typename T>
struct Walker {
  Complex<T> p;          // before the step
  Complex<T> pull;       // conj(B) m
  T lean;                // Im(m conj(h[0]))
  Complex<T> bc, start;  // B C and C h[0], by which q adds to pull and lean

  __device__ __forceinline__ void add(Complex<T> dq) {
    pull = multiply_add(conj(bc), dq, pull);
    lean += dq.im * start.re, lean -= dq.re * start.im;
  }

  // Back over one step. What it gives: dtheta = Im(m conj(s)), s that before the step.
  __device__ __forceinline__ T step(Complex<T> e, T v, Complex<T> dq) {
    p = p - conj(e) * v;
    add(dq);
    T angle = lean;
    angle += pull.im * p.re, angle -= pull.re * p.im;
    return angle;
  }
};

// Where a block adds up, batch after batch, what others will add to theirs: the first time there is nothing to add to.
template <typename T>
__device__ __forceinline__ void add(T& place, T value, bool fresh) {
  place = fresh ? value : place + value;
}

// dx += u dtheta^T of a tile, each lane its share: two inputs of each 16 for two states of each 8. Each tile's is added on
// its own, and rounded.
template <typename T>
using OfX = T[2][2][32 * WARPS][4];

template <typename T>
__device__ __forceinline__ void add_outer_product(OfX<T>& sums, const Angles<T>& angles, const Steps<T>& tile) {
  const Lane own;
  T product[2][2][4] = {};
  UNROLL
  for (int k = 0; k < EACH / 2; ++k) {
    Right<T> right[2][1];
    UNROLL
    for (int n = 0; n < 2; ++n) {
      UNROLL
      for (int i = 0; i < 2; ++i) {
        Part<T> parts[PARTS<T>];
        split(angles[k][2 * n + i], parts);
        for (int l = 0; l < PARTS<T>; ++l) right[n][0][l][i] = parts[l];
      }
    }
    UNROLL
    for (int m = 0; m < 2; ++m) {
      Left<T> left[1];
      tile.load_left(left[0], EACH * own.quarter + 2 * k, 16 * m + 2 * own.row);
      UNROLL
      for (int n = 0; n < 2; ++n) multiply<T>(product[m][n], left, right[n]);
    }
  }
  UNROLL
  for (int m = 0; m < 2; ++m) {
    UNROLL
    for (int n = 0; n < 2; ++n) {
      T sum[4];
      load_row(sum, sums[m][n][threadIdx.x]);
      UNROLL
      for (int i = 0; i < 4; ++i) sum[i] += product[m][n][i];
      store_row(sums[m][n][threadIdx.x], sum);
    }
  }
}

template <typename T>
struct BackwardTiles {
  Steps<T> tile[2];
  Coming<T> coming;
  Weights<T> weights[WARPS];
  alignas(16) OfX<T> of_x;
  alignas(16) T v[2][STEPS], g[2][STEPS];
  T sums[2][WARPS][STEPS];
};

// MANY: there are more than INPUTS channels, so that u and dx pass by piece by piece.
// grid (places d), block (32 WARPS): each place takes every `places`-th batch.
template <typename T, bool MANY>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS<T>)
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
                              View<const Complex<T>, 3> state,  // [batch, channels, states], or empty
                              View<const T, 3> w,               // [batch, channels, seq]
                              View<const Complex<T>, 4> sums,   // [tiles + 1, batch, channels, states]: p before each
                              View<const Phase<T>, 4> phases,   // likewise
                              View<T, 3> du,                    // [batch, channels, seq], without the part by theta
                              View<T, 3> ddt,                   // [batch, channels, seq]
                              View<T, 3> dz,                    // [batch, channels, seq]
                              View<Complex<T>, 3> dstate,       // [batch, channels, states]
                              View<Complex<T>, 4> pulls,        // [tiles, batch, channels, states]: after each
                              View<T, 4> leans,                 // likewise
                              View<T, 4> dx,                    // [place, channels, states, channels]
                              View<T, 3> dbias,                 // [place, channels, states]
                              View<Complex<T>, 3> dB,           // [place, channels, states], of the polar B
                              View<Complex<T>, 3> dC,           // [place, channels, states], of the polar C
                              View<T, 2> dD) {                  // [place, channels]
  DYNAMIC_SHARED(BackwardTiles<T>, tiles_of_block);
  BackwardTiles<T>& shared = *tiles_of_block;
  const int64_t batches = u.size[0], channels = u.size[1], seq = u.size[2], states = x.size[1];
  const int64_t places = dx.size[0], tiles = ceil_div(seq, STEPS);
  const int64_t place = blockIdx.x / channels, channel = blockIdx.x % channels;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool finishes = warp == 0, prepares = warp == WARPS - 1;
  const Lane own;

  for (int64_t batch = place; batch < batches; batch += places) {
    const bool fresh = batch == place;
    T gates = 0;  // of the steps that a lane finishes: its share of dD
    for (int64_t block0 = 0; block0 == 0 || block0 < states; block0 += STATES) {
      const int64_t state0 = block0 + warp * ROWS;
      const int rows = int(min(states - state0, int64_t(ROWS))) - own.row;
      load_weights(shared.weights[warp], x, channel, state0, 0);
      Walker<T> walker[2] = {{0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}};
      Complex<T> q[2] = {0, 0}, both[2] = {0, 0};  // both: the sum of p conj(dq)
      Phase<T> bias[2] = {0, 0};
      T of_bias[2] = {0, 0};
      UNROLL
      for (int i = 0; i < 2; ++i) {
        const int64_t j = state0 + own.row + 8 * i;
        if (j >= states) continue;
        const Complex<T> b = polar(B, j), c = polar(C, j);
        const Complex<T> start = state.size[0] ? state(batch, channel, j) : Complex<T>(0);
        const Phase<T> phase = phases(tiles, batch, channel, j);
        const Complex<T> m = conj(unit<T>(phase)) * dlast(batch, channel, j);
        bias[i] = phase_of(x_bias(channel, j));
        walker[i].bc = b * c, walker[i].start = c * start;
        walker[i].pull = conj(b) * m, walker[i].lean = (conj(start) * m).im;
      }

      const auto find = [&](int64_t t0, T& v, T& g) {
        const int64_t t = t0 + lane;
        v = g = 0;
        if (!prepares || t < 0 || t >= seq) return;
        v = dt(batch, channel, t) * silu(u(batch, channel, t));
        g = dy(batch, channel, t) * silu(z(batch, channel, t));
      };
      const auto finish = [&](int64_t tile) {
        const int64_t t = tile * STEPS + lane;
        if (!finishes || t >= seq) return;
        T dv = block0 ? ddt(batch, channel, t) : T(0);
        for (int i = 0; i < WARPS; ++i) dv += shared.sums[tile % 2][i][lane];
        if (block0 + STATES < states) {
          ddt(batch, channel, t) = dv;  // until all states have been here
          return;
        }
        const T input = u(batch, channel, t), gate = silu(input), out = z(batch, channel, t);
        const T grad = dy(batch, channel, t), grad_w = grad * silu(out);
        ddt(batch, channel, t) = dv * gate;
        du(batch, channel, t) = (dv * dt(batch, channel, t) + grad_w * D(channel)) * silu_derivative(input);
        dz(batch, channel, t) = grad * w(batch, channel, t) * silu_derivative(out);
        gates += grad_w * gate;
      };
      const auto clear_dx = [&] {
        for (auto& half : shared.of_x)
          store_row<4, T>(half[0][threadIdx.x], {}), store_row<4, T>(half[1][threadIdx.x], {});
      };
      const auto add_dx = [&](int64_t r0, bool first) {
        UNROLL
        for (int n = 0; n < 4; ++n) {
          const int64_t j = state0 + n / 2 * 8 + 2 * own.quarter + n % 2;
          T* word = &dx(place, channel, j, r0 + 2 * own.row);
          const int cols = j < states ? int(min(channels - r0, int64_t(INPUTS))) - 2 * own.row : 0;
          UNROLL
          for (int i = 0; i < 4; ++i) {
            const int col = i / 2 * 16 + i % 2;
            if (col < cols) add(word[col], shared.of_x[i / 2][n / 2][threadIdx.x][i % 2 * 2 + n % 2], first);
          }
        }
      };
      clear_dx();

      T v_next, g_next;
      fetch(shared.coming, u, batch, (tiles - 1) * STEPS, 0);
      fill(shared.tile[0], shared.coming);
      find((tiles - 1) * STEPS, v_next, g_next);
      if (prepares) shared.v[(tiles - 1) % 2][lane] = v_next, shared.g[(tiles - 1) % 2][lane] = g_next;
      int now = 0;  // which of the two tiles
      for (int64_t tile = tiles - 1; tile >= 0; --tile) {
        const int64_t t0 = tile * STEPS;
        const int64_t at = ((tile * batches + batch) * channels + channel) * states + state0 + own.row;
        if (8 * own.quarter < rows) {  // two of the four lanes, each one of their states
          pulls.data[at + 8 * own.quarter] = own.quarter ? walker[1].pull : walker[0].pull;
          leans.data[at + 8 * own.quarter] = own.quarter ? walker[1].lean : walker[0].lean;
        }
        Phase<T> phase[2] = {0, 0};
        UNROLL
        for (int i = 0; i < 2; ++i) {
          if (8 * i < rows) phase[i] = phases.data[at + 8 * i];
          walker[i].p = 8 * i < rows ? sums.data[at + 8 * i] : Complex<T>(0);
        }
        Angles<T> angles = {};
        for (int64_t r0 = 0; MANY ? r0 < channels : r0 == 0; r0 += INPUTS) {
          __syncthreads();  // this tile is there, and the sums of the one before; nobody needs its u any more
          const bool more = MANY && r0 + INPUTS < channels;
          fetch(shared.coming, u, batch, more || MANY ? t0 : t0 - STEPS, more ? r0 + INPUTS : 0);
          if (!more) find(t0 - STEPS, v_next, g_next);
          if (r0 == 0) finish(tile + 1);
          if (MANY) load_weights(shared.weights[warp], x, channel, state0, r0);
          add_product(angles, shared.weights[warp], shared.tile[now]);
          if (!more) {
            T v[EACH], g[EACH], dv[EACH] = {};
            load_row(v, &shared.v[tile % 2][EACH * own.quarter]);
            load_row(g, &shared.g[tile % 2][EACH * own.quarter]);
            UNROLL
            for (int i = 0; i < 2; ++i) {
              Complex<T> e[EACH], taken = 0, given = 0;
              turn(e, phase[i], angles, i, bias[i]);
              UNROLL
              for (int k = 0; k < EACH; ++k) taken = taken + conj(e[k]) * v[k], given = given + conj(e[k]) * g[k];
              const Sum<Complex<T>> of_p = sum_of_quarters(taken), of_q = sum_of_quarters(given);
              Walker<T> at = walker[i];
              at.p = at.p + of_p.before + taken;
              at.add(of_q.after);
              UNROLL
              for (int k = EACH - 1; k >= 0; --k) {
                const Complex<T> dq = conj(e[k]) * g[k];
                both[i] = multiply_add(conj(dq), at.p, both[i]);
                const T angle = at.step(e[k], v[k], dq);
                dv[k] += e[k].re * at.pull.re, dv[k] -= e[k].im * at.pull.im;
                angles[k / 2][2 * i + k % 2] = angle;
                if (t0 + EACH * own.quarter + k < seq) of_bias[i] += angle;
              }
              walker[i].add(of_q.all);
              q[i] = q[i] + of_q.all;
            }
            shared.sums[tile % 2][warp][EACH * own.quarter + own.row] = sum_of_states(dv);
            if (!MANY) add_outer_product(shared.of_x, angles, shared.tile[now]);
            if (prepares) shared.v[1 - tile % 2][lane] = v_next, shared.g[1 - tile % 2][lane] = g_next;
          }
          now = 1 - now;
          fill(shared.tile[now], shared.coming);
        }
        for (int64_t r0 = 0; MANY && r0 < channels; r0 += INPUTS) {
          __syncthreads();  // this tile is there; nobody needs the one before any more
          const bool more = MANY && r0 + INPUTS < channels;
          fetch(shared.coming, u, batch, more ? t0 : t0 - STEPS, more ? r0 + INPUTS : 0);
          add_outer_product(shared.of_x, angles, shared.tile[now]);
          add_dx(r0, fresh && tile == tiles - 1);
          clear_dx();
          now = 1 - now;
          fill(shared.tile[now], shared.coming);
        }
      }
      __syncthreads();  // the sums of the first tile are there
      finish(0);

      if (!MANY) add_dx(0, fresh);
      UNROLL
      for (int i = 0; i < 2; ++i) {
        both[i] = sum_of_quarters(both[i]).all, of_bias[i] = sum_of_quarters(of_bias[i]).all;
        const int64_t j = state0 + own.row + 8 * i;
        if (own.quarter != i || j >= states) continue;
        const Complex<T> b = polar(B, j), c = polar(C, j);
        const Complex<T> start = state.size[0] ? state(batch, channel, j) : Complex<T>(0);
        const Phase<T> phase = phases(tiles, batch, channel, j);
        const Complex<T> m = conj(unit<T>(phase)) * dlast(batch, channel, j), p = sums(tiles, batch, channel, j);
        dstate(batch, channel, j) = multiply_add(conj(c), q[i], m);
        add(dbias(place, channel, j), of_bias[i], fresh);
        add(dB(place, channel, j), multiply_add(conj(p), m, conj(c * both[i])), fresh);
        add(dC(place, channel, j), multiply_add(q[i], conj(start), conj(b * both[i])), fresh);
      }
    }
    for (int apart = 16; apart > 0; apart /= 2) gates += __shfl_xor_sync(0xffffffffu, gates, apart);
    if (threadIdx.x == 0) add(dD(place, channel), gates, fresh);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// du += x^T dtheta, the sum over all channels and states. So here all tiles of time are walked at the same time, a warp
// has one of them, and walks it for one channel, and ROWS of its states, after the other.
template <typename T>
struct InputTiles {
  static constexpr int PITCH = STEPS + 4, SKEW = 24;  // lanes write eight steps of a state, and read four steps of four
  alignas(16) Part<T> u[WARPS][INPUTS / 16][EACH / 2][PARTS<T>][32][4];  // each lane reads what it wrote
  Tile<T, ROWS / 4> x[2];                                                // while one is worked with, the next is filled
  alignas(16) T angles[WARPS][4][ROWS / 4 * PITCH + SKEW];
  alignas(16) T v[WARPS][STEPS], g[WARPS][STEPS];
};

// grid (ceil(B tiles / WARPS) parts), block (32 WARPS): each of `parts` blocks sums up its part of the channels.
template <typename T, bool MANY>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS<T>)
    input_gradient(View<const T, 3> dy,              // [batch, channels, seq]
                   View<const T, 3> u,               // [batch, channels, seq]
                   View<const T, 3> dt,              // [batch, channels, seq]
                   View<const T, 3> x,               // [channels, states, channels]
                   View<const T, 2> x_bias,          // [channels, states]
                   View<const Complex<T>, 1> bc,     // [states], both polar
                   View<const T, 3> z,               // [batch, channels, seq]
                   View<const Complex<T>, 3> start,  // [batch, channels, states], C h[0], or empty
                   View<const Complex<T>, 4> sums,   // [tiles + 1, batch, channels, states]
                   View<const Phase<T>, 4> phases,   // likewise
                   View<const Complex<T>, 4> pulls,  // [tiles, batch, channels, states]
                   View<const T, 4> leans,           // likewise
                   View<T, 4> du) {                  // [part, batch, channels, seq]
  DYNAMIC_SHARED(InputTiles<T>, tiles_of_block);
  InputTiles<T>& shared = *tiles_of_block;
  const int64_t batches = u.size[0], channels = u.size[1], seq = u.size[2], states = x.size[1], parts = du.size[0];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t tiles = ceil_div(seq, STEPS), place = blockIdx.x % parts;
  const int64_t given = blockIdx.x / parts * WARPS + warp, walk = min(given, batches * tiles - 1);
  const int64_t batch = walk / tiles, tile = walk % tiles, t0 = tile * STEPS;
  const int64_t channel0 = channels * place / parts, channel1 = channels * (place + 1) / parts;
  const Lane own;

  const auto load_u = [&](int64_t r0) {
    UNROLL
    for (int m = 0; m < INPUTS / 16; ++m) {
#pragma unroll 1
      for (int n = 0; n < EACH / 2; ++n) {
        const int64_t t = t0 + EACH * (own.row / 2) + 2 * n + own.row % 2;
        UNROLL
        for (int i = 0; i < 4; ++i) {
          const int64_t r = r0 + 16 * m + 4 * own.quarter + i;
          Part<T> values[PARTS<T>];
          split(t < seq && r < channels ? u(batch, r, t) : T(0), values);
          for (int k = 0; k < PARTS<T>; ++k) shared.u[warp][m][n][k][lane][i] = values[k];
        }
      }
    }
  };
  // A thread fills four neighbours of a tile of x.
  const int filled = threadIdx.x / 8, col = threadIdx.x % 8 * 4;
  const auto fetch_x = [&](T(&piece)[4], int64_t channel, int64_t state0, int64_t r0) {
    const bool inside = channel < channel1 && state0 + filled < states;
    const int cols = inside ? int(min(channels - r0, int64_t(INPUTS))) - col : 0;
    const T* word = &x(channel, state0 + filled, r0 + col);
    UNROLL
    for (int i = 0; i < 4; ++i, word += x.stride[2]) piece[i] = i < cols ? *word : T(0);
  };
  const auto fill_x = [&](Tile<T, ROWS / 4>& to, const T(&piece)[4]) {
    Part<T> values[PARTS<T>][4];
    UNROLL
    for (int i = 0; i < 4; ++i) {
      Part<T> one[PARTS<T>];
      split_turns(piece[i], one);
      for (int n = 0; n < PARTS<T>; ++n) values[n][i] = one[n];
    }
    to.store(values, filled, col);
  };

  T of_u[2][4][4] = {};  // [m][n][i] of input 16 m + 2 row + i / 2, step 4 (i % 2) + n of the lane
  const auto add_du = [&](int64_t r0, bool first) {
    T* word = &du(place, batch, r0 + 2 * own.row, t0 + EACH * own.quarter);
    const int rows = given == walk ? int(min(channels - r0, int64_t(INPUTS))) - 2 * own.row : 0;
    const int cols = int(min(seq - t0, int64_t(STEPS))) - EACH * own.quarter;
    UNROLL
    for (int i = 0; i < 4; ++i, word += i == 2 ? 15 * seq : seq) {
      const int row = i / 2 * 16 + i % 2;
      UNROLL
      for (int col = 0; col < EACH; ++col) {
        T& sum = of_u[i / 2][col % 4][i % 2 * 2 + col / 4];
        if (row < rows && col < cols) add(word[col], sum * (TURN<T> / PER_TURN<T>), first);
        sum = 0;
      }
    }
  };
  const auto add_product_of_angles = [&](const Tile<T, ROWS / 4>& tile_of_x) {
    T product[2][4][4] = {};
    UNROLL
    for (int k = 0; k < 2; ++k) {
      Right<T> right[4][1];
      UNROLL
      for (int i = 0; i < 2; ++i) {
        T angles[4];
        load_row(angles, &shared.angles[warp][own.quarter][(2 * k + i) * InputTiles<T>::PITCH + 4 * own.row]);
        UNROLL
        for (int n = 0; n < 4; ++n) {
          Part<T> values[PARTS<T>];
          split(angles[n], values);
          for (int l = 0; l < PARTS<T>; ++l) right[n][0][l][i] = values[l];
        }
      }
      UNROLL
      for (int m = 0; m < 2; ++m) {
        Left<T> left[1];
        tile_of_x.load_left(left[0], 4 * own.quarter + 2 * k, 16 * m + 2 * own.row);
        UNROLL
        for (int n = 0; n < 4; ++n) multiply<T>(product[m][n], left, right[n]);
      }
    }
    UNROLL
    for (int m = 0; m < 2; ++m) {
      UNROLL
      for (int n = 0; n < 4; ++n) {
        UNROLL
        for (int i = 0; i < 4; ++i) of_u[m][n][i] += product[m][n][i];
      }
    }
  };

  T piece[4];
  fetch_x(piece, channel0, 0, 0);
  fill_x(shared.x[0], piece);
  if (!MANY) load_u(0);
  int now = 0;
  for (int64_t channel = channel0; channel < channel1; ++channel) {
    const int64_t t = t0 + lane;
    // The barrier below stands before whoever reads these, and __syncwarp after whoever read those before.
    shared.v[warp][lane] = t < seq ? dt(batch, channel, t) * silu(u(batch, channel, t)) : T(0);
    shared.g[warp][lane] = t < seq ? dy(batch, channel, t) * silu(z(batch, channel, t)) : T(0);
    for (int64_t state0 = 0; state0 < states; state0 += ROWS) {
      const bool same = state0 + ROWS < states;  // the states after these are of the same channel
      const int64_t channel_next = same ? channel : channel + 1, state_next = same ? state0 + ROWS : 0;
      Walker<T> walker[2] = {{0, 0, 0, 0, 0}, {0, 0, 0, 0, 0}};
      Phase<T> phase[2] = {0, 0}, bias[2] = {0, 0};
      const int64_t row = channel * states + state0 + own.row;
      const int64_t place_of_start = batch * channels * states + row,
                    at = tile * batches * channels * states + place_of_start;
      const int rows = int(min(states - state0, int64_t(ROWS))) - own.row;
      UNROLL
      for (int i = 0; i < 2; ++i) {
        if (8 * i >= rows) continue;
        phase[i] = phases.data[at + 8 * i];
        bias[i] = phase_of(x_bias(channel, state0 + own.row + 8 * i));
        walker[i].p = sums.data[at + 8 * i];
        walker[i].pull = pulls.data[at + 8 * i], walker[i].lean = leans.data[at + 8 * i];
        walker[i].bc = bc(state0 + own.row + 8 * i);
        if (start.size[0]) walker[i].start = start.data[place_of_start + 8 * i];
      }
      Angles<T> angles = {};
      for (int64_t r0 = 0; MANY ? r0 < channels : r0 == 0; r0 += INPUTS) {
        __syncthreads();  // this tile of x is there; nobody needs the one before any more
        const bool more = MANY && r0 + INPUTS < channels, stay = more || MANY;
        fetch_x(piece, stay ? channel : channel_next, stay ? state0 : state_next, more ? r0 + INPUTS : 0);
        if (MANY) load_u(r0);
        UNROLL
        for (int m = 0; m < INPUTS / 16; ++m) {
          Part<T> four[2][PARTS<T>][4];
          UNROLL
          for (int i = 0; i < 2; ++i) shared.x[now].load(four[i], own.row + 8 * i, 16 * m + 4 * own.quarter);
          Left<T> left[2];
          UNROLL
          for (int half = 0; half < 2; ++half) {
            UNROLL
            for (int i = 0; i < PARTS<T>; ++i) {
              left[half][i][0] = four[0][i][2 * half], left[half][i][2] = four[0][i][2 * half + 1];
              left[half][i][1] = four[1][i][2 * half], left[half][i][3] = four[1][i][2 * half + 1];
            }
          }
          UNROLL
          for (int n = 0; n < EACH / 2; ++n) {
            Part<T> values[PARTS<T>][4];
            UNROLL
            for (int i = 0; i < PARTS<T>; ++i) load_row(values[i], shared.u[warp][m][n][i][lane]);
            Right<T> right[2];
            deal_out<T>(right, values);
            add_rounded<T>(angles[n], left, right);
          }
        }
        if (!more) {
          T v[EACH], g[EACH];
          load_row(v, &shared.v[warp][EACH * own.quarter]);
          load_row(g, &shared.g[warp][EACH * own.quarter]);
          UNROLL
          for (int i = 0; i < 2; ++i) {
            Complex<T> e[EACH], taken = 0, given = 0;
            turn(e, phase[i], angles, i, bias[i]);
            UNROLL
            for (int k = 0; k < EACH; ++k) taken = taken + conj(e[k]) * v[k], given = given + conj(e[k]) * g[k];
            Walker<T>& at = walker[i];
            at.p = at.p + sum_of_quarters(taken).before + taken;
            at.add(sum_of_quarters(given).after);
            T found[EACH];
            UNROLL
            for (int k = EACH - 1; k >= 0; --k) found[k] = at.step(e[k], v[k], conj(e[k]) * g[k]);
            const int state = own.row + 8 * i;
            store_row(&shared.angles[warp][state / 4][state % 4 * InputTiles<T>::PITCH + EACH * own.quarter], found);
          }
          __syncwarp();  // these angles are there; v and g have been read
          if (!MANY) add_product_of_angles(shared.x[now]);
        }
        now = 1 - now;
        fill_x(shared.x[now], piece);
      }
      for (int64_t r0 = 0; MANY && r0 < channels; r0 += INPUTS) {
        __syncthreads();  // this tile of x is there; nobody needs the one before any more
        const bool more = MANY && r0 + INPUTS < channels;
        fetch_x(piece, more ? channel : channel_next, more ? state0 : state_next, more ? r0 + INPUTS : 0);
        add_product_of_angles(shared.x[now]);
        add_du(r0, channel == channel0 && state0 == 0);
        now = 1 - now;
        fill_x(shared.x[now], piece);
      }
    }
  }
  if (!MANY) add_du(0, true);
}

// ---------------------------------------------------------------------------------------------------------------------
void adaptive_unitary(Input<3> u, Input<3> dt, Input<3> x, Input<2> x_bias, Input<1> B, Input<1> C, Input<1> D,
                      Input<3> z, Input<3> state, Output<3> y, Output<3> w, Output<3> last, Output<4> sums,
                      Output<4> phases, Stream stream) {
  dispatch_wide(u.dtype, [&]<typename T>() {
    using C2 = Complex<T>;
    launch<adaptive_unitary<T>>({u.size[0] * u.size[1]}, dim3(32 * WARPS), sizeof(ForwardTiles<T>), stream, u.as<T>(),
                                dt.as<T>(), x.as<T>(), x_bias.as<T>(), B.as<C2>(), C.as<C2>(), D.as<T>(), z.as<T>(),
                                state.as<C2>(), y.as<T>(), w.as<T>(), last.as<C2>(), sums.as<C2>(),
                                phases.as<Phase<T>>());
  });
}

void adaptive_unitary_backward(Input<3> dy, Input<3> dlast, Input<3> u, Input<3> dt, Input<3> x, Input<2> x_bias,
                               Input<1> B, Input<1> C, Input<1> D, Input<3> z, Input<3> state, Input<3> w,
                               Input<4> sums, Input<4> phases, Input<1> bc, Input<3> start, Output<3> du, Output<3> ddt,
                               Output<3> dz, Output<3> dstate, Output<4> pulls, Output<4> leans, Output<4> dx,
                               Output<3> dbias, Output<3> dB, Output<3> dC, Output<2> dD, Output<4> du_of_theta,
                               Stream stream) {
  const int64_t batches = u.size[0], channels = u.size[1], tiles = ceil_div(u.size[2], STEPS);
  dispatch_wide(u.dtype, [&]<typename T>() {
    using C2 = Complex<T>;
    const auto run = [&]<bool MANY>() {
      launch<adaptive_unitary_backward<T, MANY>>(
          {dx.size[0] * channels}, dim3(32 * WARPS), sizeof(BackwardTiles<T>), stream, dy.as<T>(), dlast.as<C2>(),
          u.as<T>(), dt.as<T>(), x.as<T>(), x_bias.as<T>(), B.as<C2>(), C.as<C2>(), D.as<T>(), z.as<T>(),
          state.as<C2>(), w.as<T>(), sums.as<C2>(), phases.as<Phase<T>>(), du.as<T>(), ddt.as<T>(), dz.as<T>(),
          dstate.as<C2>(), pulls.as<C2>(), leans.as<T>(), dx.as<T>(), dbias.as<T>(), dB.as<C2>(), dC.as<C2>(),
          dD.as<T>());
      launch<input_gradient<T, MANY>>({ceil_div(batches * tiles, WARPS) * du_of_theta.size[0]}, dim3(32 * WARPS),
                                      sizeof(InputTiles<T>), stream, dy.as<T>(), u.as<T>(), dt.as<T>(), x.as<T>(),
                                      x_bias.as<T>(), bc.as<C2>(), z.as<T>(), start.as<C2>(), sums.as<C2>(),
                                      phases.as<Phase<T>>(), read_only(pulls.as<C2>()), read_only(leans.as<T>()),
                                      du_of_theta.as<T>());
    };
    if (channels > INPUTS) run.template operator()<true>();
    else run.template operator()<false>();
  });
}
