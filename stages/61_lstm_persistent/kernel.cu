// Stage 61: the whole sequence of an LSTM in one kernel
//
// Problem   For each step, of all batches: z[t] = products[t] + h[t - 1] R^T, of which i, f, g, o are made, the cell
//           c[t] = f c[t - 1] + i g and h[t] = o tanh(c[t]).  products, z [T, B, 4 H], R [4 H, H], h, c [T, B, H].
//           Backward: from dh[t] + dz[t + 1] R, which is what the loss gives to h[t] in all, dz[t], and so on.
// Before    Stage 60 launches two kernels a step: it waits for them to begin more than for what they do, and reads all of
//           R again.
// Idea      One kernel that stays for the whole sequence. What a block multiplies by is the same in each step, so it is read
//           once and kept in registers: R is spread over the registers of all multiprocessors. What a step needs of the
//           others is h[t - 1], through the L2 cache, and to know that it is there: each block tells by a word of its own
//           that it has written its part, and looks at the words of all others before it goes on.
//           Backward: dz[t + 1] is four times as much as h. So FOUR blocks share their columns of R, each has the rows of
//           one gate, reads that gate's dz alone, and they hand on their sums to each other: a meeting of four, which is
//           short, instead of a longer way for everybody.
//           Batches go by in chunks of ROWS: while one is multiplied, half of the warps bring the next one to shared
//           memory and the other half make h of the sums of the one before.
// Mapping   block: UNITS hidden units, 4 gates of each, all steps and batches.  warp: all outputs of the block, and of the
//           H numbers that they are made of every WARPS-th piece; float, double: a lane has EACH outputs of DEPTH numbers,
//           and sums go over the lanes by shuffles; half, bfloat16: fragments of tensor cores.  Sums over the warps go
//           through shared memory.  Progress: no block waits for one that has not begun, as the launch is cooperative,
//           which begins all blocks or none; and each tells before it waits, so the one that is the furthest behind waits
//           for nobody.
// Cost      R is read once, and in each step h by each block, 4 ceil(H / 4 UNITS) of them; in the backward dz by 4 UNITS-th
//           as many. There are two barriers of the grid's blocks and ceil(B / ROWS) + 1 others a step. How often a block
//           looks for the others depends on how they run, so there are no closed forms of the loads.
// Limits    R has to fit into registers: H <= 1024 (float64: 512), and there have to be H / UNITS multiprocessors. With a
//           large batch float is bound by its multiplications, and a third of a step is the way of h to the other blocks.
// Run       python -m stages run 61

#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>

#include "common/async_copy.h"
#include "common/device.h"
#include "common/gates.h"
#include "common/launch.h"
#include "common/mma.h"
#include "common/numeric.h"
#include "common/ordering.h"
#include "common/vector.h"
#include "common/view.h"

constexpr unsigned FULL = 0xffffffff;
constexpr int WARP = 32, FOUR = 4;  // lanes; gates, outputs of a thread, batches that it multiplies at once

constexpr int WARPS = 8, THREADS = WARPS * WARP;  // of a block

// How a block is cut: how many hidden units it has; of how many outputs a thread has how many numbers (float, double).
template <typename T_, int UNITS_, int EACH_, int DEPTH_>
struct Shape {
  using T = T_;
  using Sum = Accumulator<T>;
  static constexpr int UNITS = UNITS_, OUTPUTS = FOUR * UNITS, EACH = EACH_, DEPTH = DEPTH_;
  static constexpr int PIECES = WARP * EACH / OUTPUTS;  // lanes that have the same outputs
  static constexpr int MOST = WARPS * PIECES * DEPTH;   // the largest H
  static constexpr int ROWS = 64 / int(sizeof(Sum));    // batches whose h is in shared memory at a time
  static constexpr int LINE = OUTPUTS + 8;              // from row to row of sums, so that they are in other banks
};

// ---- meetings -------------------------------------------------------------------------------------------------------
// Goes on when the blocks first .. first + count - 1 have come here for the `number`-th time, 1, 2, ... What they have
// written before is there then.
__device__ __forceinline__ void meet(unsigned* arrived, int first, int count, unsigned number) {
  __syncthreads();  // all threads have written
  if (threadIdx.x == 0) store_release(&arrived[blockIdx.x], number);
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    while (load_acquire(&arrived[first + i]) < number) spin_hint();
  }
  __syncthreads();  // and all have seen
}

// ---- the product of a step ------------------------------------------------------------------------------------------
// x[batch][k], some of it in shared memory at a time.
template <typename T>
struct Factor {
  const T* data;
  int64_t of_batch, of_k;
  bool wide;  // rows are groups of 16 bytes
};

// The numbers that a block multiplies by, weight(output, k), in its threads' registers. A warp has all outputs and every
// WARPS-th piece of REACH neighbouring k; AT_ONCE: rows of x that it multiplies at once, PAD: numbers between rows.
template <typename Shape>
struct Weights {
  using Sum = typename Shape::Sum;
  static constexpr int EACH = Shape::EACH, REACH = FOUR * Shape::PIECES, AT_ONCE = FOUR, PAD = 0;

  Sum weights[EACH][Shape::DEPTH];

  // A thread's first output; which of the PIECES it is; where the numbers begin that its warp has as its i-th.
  __device__ static int output0() { return threadIdx.x % WARP / Shape::PIECES * EACH; }
  __device__ static int piece() { return threadIdx.x % Shape::PIECES; }
  __device__ static int first_of(int i) { return (i * WARPS + int(threadIdx.x) / WARP) * REACH; }

  template <typename Weight>
  __device__ __forceinline__ Weights(int length, const Weight& weight) {
    UNROLL
    for (int i = 0; i < Shape::DEPTH; ++i) {
      const int k = first_of(i / FOUR) + piece() * FOUR + i % FOUR;
      UNROLL
      for (int o = 0; o < EACH; ++o) weights[o][i] = k < length ? Sum(weight(output0() + o, k)) : Sum(0);
    }
  }

  // to[row][output] = what the warp's numbers give, of `rows` rows of x.
  __device__ __forceinline__ void multiply(const Sum* x, int pitch, int length, int rows, Sum* to) const {
    if (length == Shape::MOST) multiply<true>(x, pitch, length, rows, to);
    else multiply<false>(x, pitch, length, rows, to);
  }

 private:
  template <bool ALL>
  __device__ __forceinline__ void multiply(const Sum* x, int pitch, int length, int rows, Sum* to) const {
    constexpr int SUMS = FOUR * EACH, LEFT = SUMS / Shape::PIECES;  // of a thread, [row][output]; of a lane in the end
#pragma unroll 1
    for (int row = 0; row < rows; row += FOUR) {
      Sum sums[SUMS] = {};
      UNROLL
      for (int i = 0; i < Shape::DEPTH; i += FOUR) {
        const int k = first_of(i / FOUR);
        if (!ALL && k >= length) continue;
        UNROLL
        for (int r = 0; r < FOUR; ++r) {
          Sum numbers[FOUR];
          load_row(numbers, x + (row + r) * pitch + k + piece() * FOUR);
          UNROLL
          for (int o = 0; o < EACH; ++o) {
            UNROLL
            for (int e = 0; e < FOUR; ++e) sums[r * EACH + o] += weights[o][i + e] * numbers[e];
          }
        }
      }
      // Over the pieces: each time a lane keeps one half of its sums and gives the other one away.
      UNROLL
      for (int halved = 2; halved <= Shape::PIECES; halved *= 2) {
        const int count = SUMS / halved, offset = Shape::PIECES / halved;
        const bool upper = threadIdx.x & offset;
        UNROLL
        for (int i = 0; i < count; ++i) {
          const Sum sent = upper ? sums[i] : sums[i + count], stays = upper ? sums[i + count] : sums[i];
          sums[i] = stays + __shfl_xor_sync(FULL, sent, offset);
        }
      }
      const int at = piece() * LEFT;
      Sum* const place = to + (row + at / EACH) * Shape::LINE + output0() + at % EACH;
      UNROLL
      for (int i = 0; i < LEFT; ++i) place[i] = sums[i];
    }
  }
};

// The same for half and bfloat16, as fragments of tensor cores.
template <typename Shape>
struct TensorWeights {
  using T = typename Shape::T;
  static constexpr int REACH = 16, AT_ONCE = 16, PAD = 8;
  static constexpr int STEPS = Shape::MOST / (REACH * WARPS), TILES = Shape::OUTPUTS / 8;

  uint32_t weights[STEPS][TILES][2];

  __device__ static int first_of(int i) { return (i * WARPS + int(threadIdx.x) / WARP) * REACH; }

  template <typename Weight>
  __device__ __forceinline__ TensorWeights(int length, const Weight& weight) {
    const int lane = threadIdx.x % WARP;
    UNROLL
    for (int i = 0; i < STEPS * TILES * 2; ++i) {
      const int tile = i / 2 % TILES, k = first_of(i / 2 / TILES) + i % 2 * 8 + lane % 4 * 2;
      T pair[2];
      UNROLL
      for (int e = 0; e < 2; ++e) pair[e] = k + e < length ? weight(tile * 8 + lane / 4, k + e) : T(0);
      std::memcpy(&weights[i / 2 / TILES][tile][i % 2], pair, sizeof(pair));
    }
  }

  __device__ __forceinline__ void multiply(const T* x, int pitch, int length, int, float* to) const {
    const int lane = threadIdx.x % WARP;
    float sums[TILES][FOUR] = {};
    UNROLL
    for (int i = 0; i < STEPS; ++i) {
      if (first_of(i) >= length) continue;
      uint32_t numbers[4];
      load_matrices(numbers, x + lane % 16 * pitch + first_of(i) + lane / 16 * 8);
      UNROLL
      for (int tile = 0; tile < TILES; ++tile) mma<T>(sums[tile], numbers, weights[i][tile]);
    }
    UNROLL
    for (int tile = 0; tile < TILES; ++tile) {
      UNROLL
      for (int i = 0; i < FOUR; i += 2) {
        const int row = lane / 4 + i * 4;
        Vector<float, 2> pair;
        pair[0] = sums[tile][i], pair[1] = sums[tile][i + 1];
        store_vector(to + row * Shape::LINE + tile * 8 + lane % 4 * 2, pair);
      }
    }
  }
};

template <typename Shape>
struct Product {
  using T = typename Shape::T;
  using Sum = typename Shape::Sum;
  using Factors = std::conditional_t<sizeof(T) == 2, TensorWeights<Shape>, Weights<Shape>>;
  static constexpr int ROWS = Shape::ROWS, SUMS = WARPS * ROWS * Shape::LINE;

  Sum* parts;  // two of [WARPS][ROWS][LINE]
  T* tiles;    // two of [ROWS][pitch], of x
  int length, pitch;
  Factors factors;

  __host__ __device__ static int pitch_of(int length) {
    return int(ceil_div(length, Factors::REACH)) * Factors::REACH + Factors::PAD;
  }
  static size_t bytes(int length) {
    return size_t(2) * ROWS * pitch_of(length) * sizeof(T) + size_t(2) * SUMS * sizeof(Sum);
  }

  template <typename Weight>
  __device__ __forceinline__ Product(unsigned char* shared, int length, const Weight& weight)
      : parts(reinterpret_cast<Sum*>(shared)),
        tiles(reinterpret_cast<T*>(parts + 2 * SUMS)),
        length(length),
        pitch(pitch_of(length)),
        factors(length, weight) {}

  // Of a chunk of ROWS batches, by turns.
  __device__ __forceinline__ T* tile(int chunk) const { return tiles + chunk % 2 * ROWS * pitch; }
  __device__ __forceinline__ Sum* sums_of(int chunk, int warp) const {
    return parts + chunk % 2 * SUMS + warp * ROWS * Shape::LINE;
  }

  // Starts to bring rows of x, from `batch` on, to a tile; zeros stand where there are no more batches or numbers.
  // The warps from `first` on do it.
  __device__ __forceinline__ void fetch(const Factor<T>& x, int chunk, int64_t batches, int first) const {
    const int64_t batch = int64_t(chunk) * ROWS;
    const int there = int(min(batches - batch, int64_t(ROWS)));
    const int rows = int(ceil_div(there, Factors::AT_ONCE)) * Factors::AT_ONCE, filled = pitch - Factors::PAD;
    for (int row = int(threadIdx.x / WARP) - first; row < rows; row += WARPS - first) {
      if (row < 0) break;
      T* const to = tile(chunk) + row * pitch;
      const T* const from = x.data + (batch + row) * x.of_batch;
      if (x.wide) {
        constexpr int GROUP = 16 / int(sizeof(T));
        const bool inside = row < there;
        int k = threadIdx.x % WARP * GROUP;
#pragma unroll 8
        for (; k < length; k += WARP * GROUP) async_copy<16>(to + k, from + k, inside);
        for (; k < filled; k += WARP * GROUP) async_copy<16>(to + k, from, false);
      } else {
        for (int k = threadIdx.x % WARP; k < filled; k += WARP) {
          to[k] = row < there && k < length ? from[k * x.of_k] : T(0);
        }
      }
    }
    async_commit();
  }

  // All of x: finish(chunk) when the sums of a chunk's batches are there, while the next ones are multiplied. It is work
  // for the first half of the warps, so the other half fetches.
  template <typename Finish>
  __device__ __forceinline__ void walk(const Factor<T>& x, int64_t batches, const Finish& finish) const {
    const int chunks = int(ceil_div(batches, ROWS));
    fetch(x, 0, batches, 0);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      async_wait<0>();
      __syncthreads();  // the tile is there, and the sums of the chunk before; what is next in their places is not needed
      if (chunk + 1 < chunks) fetch(x, chunk + 1, batches, WARPS / 2);
      if (chunk > 0) finish(chunk - 1);
      factors.multiply(tile(chunk), pitch, length, int(min(batches - int64_t(chunk) * ROWS, int64_t(ROWS))),
                       sums_of(chunk, threadIdx.x / WARP));
    }
    __syncthreads();  // the sums of the last chunk are there
    finish(chunks - 1);
  }

  // Adds the sums of all warps, of FOUR outputs and a row of the chunk.
  __device__ __forceinline__ void add(Sum (&sums)[FOUR], int chunk, int row, int output) const {
    UNROLL
    for (int w = 0; w < WARPS; ++w) {
      Sum part[FOUR];
      load_row(part, sums_of(chunk, w) + row * Shape::LINE + output);
      UNROLL
      for (int i = 0; i < FOUR; ++i) sums[i] += part[i];
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// grid (blocks, all of them at once), block (THREADS)
template <typename Shape, typename T = typename Shape::T, typename Sum = typename Shape::Sum>
__global__ void __launch_bounds__(THREADS, 1)
    forward(View<const T, 3> products,  // [seq, batches, 4 H]
            View<const T, 2> R,         // [4 H, H]
            View<const T, 2> h0,        // [batches, H]
            View<const Sum, 2> c0,      // [batches, H]
            View<const Sum, 3> mask,    // [seq, batches, H]: how much of a new h there is, or empty
            View<T, 3> h,               // [seq, batches, H]
            View<Sum, 2> c_last,        // [batches, H]: meanwhile, the cells
            View<T, 3> z,               // [seq, batches, 4 H], or empty
            View<Sum, 3> cells,         // [seq, batches, H], or empty
            int activation, bool wide_start, bool wide, unsigned* arrived) {
  constexpr int UNITS = Shape::UNITS, ROWS = Shape::ROWS;
  DYNAMIC_SHARED(unsigned char, shared);
  const int64_t seq = h.size[0], batches = h.size[1];
  const int hidden = int(h.size[2]), unit0 = blockIdx.x * UNITS;
  const Product<Shape> product(shared, hidden, [&](int output, int k) {
    const int unit = unit0 + output / FOUR, gate = output % FOUR;
    return unit < hidden ? R(int64_t(gate) * hidden + unit, k) : T(0);
  });
  // What a thread does with the sums: of one unit and, in each chunk of ROWS batches, one batch.
  const int unit = unit0 + threadIdx.x % UNITS;
  const auto batch_of = [&](int chunk) { return int64_t(chunk) * ROWS + threadIdx.x / UNITS; };
  const auto is_mine = [&](int64_t batch) { return threadIdx.x < ROWS * UNITS && unit < hidden && batch < batches; };
  for (int chunk = 0; int64_t(chunk) * ROWS < batches; ++chunk) {
    const int64_t batch = batch_of(chunk);
    if (is_mine(batch)) c_last(batch, unit) = c0(batch, unit);
  }

  struct Given {  // what a new h is made of without the one before
    Sum products[FOUR], c, part, old;
  };
  const auto ask = [&](int64_t t, int chunk) {
    const int64_t batch = batch_of(chunk);
    Given given{{}, 0, 1, 0};
    if (!is_mine(batch)) return given;
    UNROLL
    for (int g = 0; g < FOUR; ++g) given.products[g] = Sum(products(t, batch, int64_t(g) * hidden + unit));
    given.c = c_last(batch, unit);
    if (mask.size[0]) {
      given.part = mask(t, batch, unit), given.old = Sum(t == 0 ? h0(batch, unit) : h(t - 1, batch, unit));
    }
    return given;
  };

  for (int64_t t = 0; t < seq; ++t) {
    Given given = ask(t, 0);
    if (t > 0) meet(arrived, 0, gridDim.x, unsigned(t));
    const Factor<T> before = t == 0 ? Factor<T>{h0.data, h0.stride[0], h0.stride[1], wide_start}
                                    : Factor<T>{&h(t - 1, 0, 0), h.stride[1], h.stride[2], wide};
    product.walk(before, batches, [&](int chunk) {
      const int64_t batch = batch_of(chunk);
      const Given now = given;
      given = ask(t, chunk + 1);
      if (!is_mine(batch)) return;
      Sum sums[FOUR];
      UNROLL
      for (int g = 0; g < FOUR; ++g) sums[g] = now.products[g];
      product.add(sums, chunk, threadIdx.x / UNITS, threadIdx.x % UNITS * FOUR);
      const Sum i = sigmoid_of(sums[0], activation).value, f = sigmoid_of(sums[1], activation).value;
      const Sum g = tanh_of(sums[2], activation).value, o = sigmoid_of(sums[3], activation).value;
      const Sum c = f * now.c + i * g, made = o * tanh_of(c, activation).value;
      h(t, batch, unit) = T(mask.size[0] ? now.old + now.part * (made - now.old) : made);
      c_last(batch, unit) = c;
      if (cells.size[0]) {
        cells(t, batch, unit) = c;
        UNROLL
        for (int k = 0; k < FOUR; ++k) z(t, batch, int64_t(k) * hidden + unit) = T(sums[k]);
      }
    });
  }
}

// The block of gate g, the g-th of its FOUR, multiplies dz[t + 1] of that gate by its rows of R and the FOUR's columns;
// then it has the columns of its own units.
// grid (blocks, all of them at once), block (THREADS)
template <typename Shape, typename T = typename Shape::T, typename Sum = typename Shape::Sum>
__global__ void __launch_bounds__(THREADS, 1)
    backward(View<const T, 3> dh,         // [seq, batches, H]
             View<const Sum, 2> dc_last,  // [batches, H]
             View<const T, 2> R,          // [4 H, H]
             View<const Sum, 2> c0,       // [batches, H]
             View<const Sum, 3> mask,     // [seq, batches, H], or empty
             View<const T, 3> z,          // [seq, batches, 4 H]
             View<const Sum, 3> cells,    // [seq, batches, H]
             View<T, 3> dz,               // [seq, batches, 4 H]
             View<Sum, 2> dh0,            // [batches, H]
             View<Sum, 2> dc0,            // [batches, H]: meanwhile, the gradients of the cells
             View<Sum, 3> handed,         // [blocks, batches, OUTPUTS]: sums for the others of the FOUR
             View<Sum, 2> kept,           // [batches, H]: what h[t + 1] gives to h[t] by itself, or empty
             int activation, bool wide, unsigned* arrived) {
  constexpr int UNITS = Shape::UNITS, ROWS = Shape::ROWS;
  DYNAMIC_SHARED(unsigned char, shared);
  const int64_t seq = dz.size[0], batches = dz.size[1];
  const int hidden = int(R.size[1]), first = blockIdx.x / FOUR * FOUR, own = blockIdx.x % FOUR;
  const Product<Shape> product(shared, hidden, [&](int output, int k) {
    const int unit = first * UNITS + output;
    return unit < hidden ? R(int64_t(own) * hidden + k, unit) : T(0);
  });
  // What a thread does with the sums of all: some batches and units of the block.
  struct Given {  // what the gradients of a step are made of besides that of h
    bool mine;
    int64_t batch, unit;
    Sum dh, part, z[FOUR], c, c_before;
  };
  const auto place = [&](int64_t i) {
    const int64_t unit = int64_t(blockIdx.x) * UNITS + i % UNITS;
    return Given{i < batches * UNITS && unit < hidden, i / UNITS, unit, 0, 1, {}, 0, 0};
  };
  const auto ask = [&](int64_t t, int64_t i) {
    Given given = place(i);
    const auto [mine, batch, unit] = std::tuple(given.mine, given.batch, given.unit);
    if (!mine || t < 0) return given;
    UNROLL
    for (int g = 0; g < FOUR; ++g) given.z[g] = Sum(z(t, batch, int64_t(g) * hidden + unit));
    given.dh = Sum(dh(t, batch, unit)), given.c = cells(t, batch, unit);
    given.c_before = t > 0 ? cells(t - 1, batch, unit) : c0(batch, unit);
    if (mask.size[0]) given.part = mask(t, batch, unit);
    return given;
  };
  const auto give = [&](int64_t t, const Given& given) {
    const int64_t batch = given.batch, unit = given.unit;
    if (!given.mine) return;
    Sum d = 0;
    if (t < seq - 1) {
      UNROLL
      for (int g = 0; g < FOUR; ++g) d += handed(first + g, batch, own * UNITS + unit % UNITS);
      if (mask.size[0]) d += kept(batch, unit);
    }
    if (t < 0) {
      dh0(batch, unit) = d;
      return;
    }
    d += given.dh;
    if (mask.size[0]) kept(batch, unit) = (1 - given.part) * d, d *= given.part;
    const Bent<Sum> i = sigmoid_of(given.z[0], activation), f = sigmoid_of(given.z[1], activation);
    const Bent<Sum> g = tanh_of(given.z[2], activation), o = sigmoid_of(given.z[3], activation);
    const Bent<Sum> seen = tanh_of(given.c, activation);
    const Sum dc = dc0(batch, unit) + d * o.value * seen.slope;
    dz(t, batch, unit) = T(dc * g.value * i.slope);
    dz(t, batch, unit + hidden) = T(dc * given.c_before * f.slope);
    dz(t, batch, unit + int64_t(2) * hidden) = T(dc * i.value * g.slope);
    dz(t, batch, unit + int64_t(3) * hidden) = T(d * seen.value * o.slope);
    dc0(batch, unit) = dc * f.value;
  };

  for (int64_t i = threadIdx.x; i < batches * UNITS; i += THREADS) {
    const Given here = place(i);
    if (here.mine) dc0(here.batch, here.unit) = dc_last(here.batch, here.unit);
  }
  for (int64_t t = seq - 1; t >= -1; --t) {
    const unsigned number = unsigned(seq - 1 - t);  // how many steps there are after t
    if (number > 0) {
      meet(arrived, 0, gridDim.x, number);
      const Factor<T> after{&dz(t + 1, 0, int64_t(own) * hidden), dz.stride[1], dz.stride[2], wide};
      product.walk(after, batches, [&](int chunk) {
        const int row = threadIdx.x / UNITS, output = threadIdx.x % UNITS * FOUR;
        const int64_t batch = int64_t(chunk) * ROWS + row;
        if (row >= ROWS || batch >= batches) return;
        Sum sums[FOUR] = {};
        product.add(sums, chunk, row, output);
        UNROLL
        for (int i = 0; i < FOUR; ++i) handed(blockIdx.x, batch, output + i) = sums[i];
      });
    }
    const Given one = ask(t, threadIdx.x), two = ask(t, threadIdx.x + THREADS);  // while the others come
    if (number > 0) meet(arrived + gridDim.x, first, FOUR, number);
    give(t, one), give(t, two);
    for (int64_t i = threadIdx.x + 2 * THREADS; i < batches * UNITS; i += THREADS) give(t, ask(t, i));
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// body.operator()<Shape>() with the shape for so many units of a block, 4 or 8.
template <typename Body>
void with_shape(DType dtype, int units, int64_t hidden, Body&& body) {
  dispatch_floating(dtype, [&]<typename T>() {
    using Few = Shape<T, 4, 4, 8>;
    if (units == Few::UNITS && hidden <= Few::MOST) return body.template operator()<Few>();
    if constexpr (sizeof(T) < 8) {
      using Many = Shape<T, 8, 8, 16>;
      if (units == Many::UNITS && hidden <= Many::MOST) return body.template operator()<Many>();
    }
    throw std::invalid_argument("a block cannot have " + std::to_string(units) + " units of " + std::to_string(hidden));
  });
}

template <typename T>
bool is_wide(const T* data, int64_t of_batch, int64_t of_k, int64_t hidden) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && of_k == 1 && of_batch * int64_t(sizeof(T)) % 16 == 0 &&
         hidden * int64_t(sizeof(T)) % 16 == 0;
}

void lstm_forward(Input<3> products, Input<2> weight_hh, Input<2> h0, Input<2> c0, Input<3> mask, Output<3> h,
                  Output<2> c_last, Output<3> z, Output<3> cells, int activation, InOut<1> arrived, int units,
                  Stream stream) {
  const int64_t hidden = h.size[2];
  if (h.size[1] == 0 || hidden == 0) return;
  with_shape(h.dtype, units, hidden, [&]<typename Shape>() {
    using T = typename Shape::T;
    using Sum = typename Shape::Sum;
    const auto start = h0.as<T>();
    const auto out = h.as<T>();
    launch_together<forward<Shape>>(
        {arrived.size[0] / 2}, dim3(THREADS), Product<Shape>::bytes(int(hidden)), stream, products.as<T>(),
        weight_hh.as<T>(), start, c0.as<Sum>(), mask.as<Sum>(), out, c_last.as<Sum>(), z.as<T>(), cells.as<Sum>(),
        activation, is_wide(start.data, start.stride[0], start.stride[1], hidden),
        is_wide(out.data, out.stride[1], out.stride[2], hidden), static_cast<unsigned*>(arrived.data));
  });
}

void lstm_backward(Input<3> dh, Input<2> dc_last, Input<2> weight_hh, Input<2> c0, Input<3> mask, Input<3> z,
                   Input<3> cells, Output<3> dz, Output<2> dh0, Output<2> dc0, int activation, Output<3> handed,
                   Output<2> kept, InOut<1> arrived, int units, Stream stream) {
  const int64_t hidden = weight_hh.size[1];
  if (dh.size[1] == 0 || hidden == 0) return;
  with_shape(dz.dtype, units, hidden, [&]<typename Shape>() {
    using T = typename Shape::T;
    using Sum = typename Shape::Sum;
    const auto out = dz.as<T>();
    launch_together<backward<Shape>>(
        {arrived.size[0] / 2}, dim3(THREADS), Product<Shape>::bytes(int(hidden)), stream, dh.as<T>(), dc_last.as<Sum>(),
        weight_hh.as<T>(), c0.as<Sum>(), mask.as<Sum>(), z.as<T>(), cells.as<Sum>(), out, dh0.as<Sum>(), dc0.as<Sum>(),
        handed.as<Sum>(), kept.as<Sum>(), activation, is_wide(out.data, out.stride[1], out.stride[2], hidden),
        static_cast<unsigned*>(arrived.data));
  });
}
