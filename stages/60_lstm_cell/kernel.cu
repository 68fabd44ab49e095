// Stage 60: an LSTM, two kernels for each step
//
// Problem   z_t = P_t + h_(t-1) R^T, c_t = s(f) c_(t-1) + s(i) t(g), h_t = s(o) t(c_t), z = (i, f, g, o), over T steps;
//           P = W x + b of all steps is there, [T, B, 4 H]. With zoneout h_t = h_(t-1) + m_t (s(o) t(c_t) - h_(t-1)).
// Idea      A step is a product with all of R and some thirty operations a unit. The product is a tiled one; all else
//           is one kernel, so that of the gates only z ever goes through memory. R h has to be whole before any unit
//           goes on, and h before the next product: what keeps steps apart here is that a kernel ends. The launcher
//           goes through all steps without Python. Backward the mirror: dz_t from dh_t and dc_t, then dh_(t-1) gets
//           dz_t R. The gradient of R, dz^T h of all steps, is one large product, made outside.
// Mapping   product: a block owns ROWS batches and COLS columns of z; thread (x, y) column x of EACH rows y + SIDE i.
//           cell: a thread owns a unit of a batch, its four gates included.
// Cost      float32, B and H multiples of 32; a step, b = B / 32 and n = H / 32
//             launches              2
//             global load sectors   product 1024 b n^2 + 512 b n, cell 640 b n; of R b 512 n^2: b times all of it
//             global store sectors  product 512 b n, cell 256 b n
//             shared wavefronts     5120 b n^2 loads, 256 b n^2 stores, no bank conflicts
//             barriers              8 b n^2
// Limits    R is read T times, and does not stay on the chip between steps: a kernel keeps nothing. With few batches a
//           step is so short that its launches take longer than its work. Stage 61: the whole sequence in one kernel.
// Run       python -m stages run 60

#include <cmath>

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

enum Activation { SOFT, HARD };  // sigmoid and tanh; straight lines, cut off

constexpr int ROWS = 32;           // batches of a block
constexpr int COLS = 32;           // its columns: a warp side by side
constexpr int DEPTH = 32;          // of the tiles along the sum: a row of one is a request
constexpr int SIDE = 8;            // warps of a block
constexpr int EACH = ROWS / SIDE;  // rows of a thread: for a word of R, EACH multiplications
constexpr int THREADS = 256;       // of a block of cells
static_assert(COLS == 32 && DEPTH == 32, "lanes run along either");

// ---------------------------------------------------------------------------------------------------------------------
// A function and its slope. NaN stays NaN; at a kink the slope is that of the line.
template <typename Sum>
struct Bent {
  Sum value, slope;
};

// A line that ends at `low` and 1.
template <typename Sum>
__device__ __forceinline__ Bent<Sum> cut_off(Sum line, Sum low, Sum slope) {
  const Sum value = line < low ? low : line > 1 ? Sum(1) : line;
  return {value, value == line ? slope : Sum(0)};
}

template <typename Sum>
__device__ __forceinline__ Bent<Sum> sigmoid_of(Sum x, int activation) {
  if (activation == HARD) return cut_off(x / 8 + Sum(0.5), Sum(0), Sum(0.125));
  const Sum value = 1 / (1 + std::exp(-x));
  return {value, value * (1 - value)};
}

template <typename Sum>
__device__ __forceinline__ Bent<Sum> tanh_of(Sum x, int activation) {
  if (activation == HARD) return cut_off(x, Sum(-1), Sum(1));
  const Sum value = std::tanh(x);
  return {value, 1 - value * value};
}

// The four gates of a unit.
template <typename Sum>
struct Gates {
  Bent<Sum> i, f, g, o;
};

template <typename T, typename Sum = Accumulator<T>>
__device__ __forceinline__ Gates<Sum> gates_of(View<const T, 2> z, int64_t batch, int64_t unit, int activation) {
  const int64_t units = z.size[1] / 4;
  return {sigmoid_of(Sum(z(batch, unit)), activation), sigmoid_of(Sum(z(batch, units + unit)), activation),
          tanh_of(Sum(z(batch, 2 * units + unit)), activation),
          sigmoid_of(Sum(z(batch, 3 * units + unit)), activation)};
}

// ---------------------------------------------------------------------------------------------------------------------
// out = base + a R^T, or a R if not TURNED. `base` may be `out`: each word is read and written by one thread.
// grid (ceil(rows / ROWS) * ceil(cols / COLS)), block (COLS, SIDE)
template <bool TURNED, typename T, typename Out>
__global__ void lstm_product(View<const T, 2> a,       // [rows, inner]: h before the step, or dz of it
                             View<const T, 2> r,       // [cols, inner] if TURNED, else [inner, cols]
                             View<const Out, 2> base,  // [rows, cols]
                             View<Out, 2> out) {       // [rows, cols]
  using Sum = Accumulator<T>;
  __shared__ Sum a_tile[ROWS][DEPTH];
  __shared__ Sum r_tile[DEPTH][COLS + 1];  // padded: a column is written by lanes along the sum

  const int64_t rows = out.size[0], cols = out.size[1], inner = a.size[1], across = ceil_div(cols, COLS);
  const int64_t row0 = blockIdx.x / across * ROWS, col0 = blockIdx.x % across * COLS;
  const int x = threadIdx.x, y = threadIdx.y;

  Sum sum[EACH] = {};
  for (int64_t k0 = 0; k0 < inner; k0 += DEPTH) {
    // Past an edge stands a zero. Lanes run along what lies side by side in memory: of R^T that is the sum.
    for (int i = y; i < ROWS; i += SIDE) {
      a_tile[i][x] = row0 + i < rows && k0 + x < inner ? Sum(a(row0 + i, k0 + x)) : Sum(0);
    }
    for (int i = y; i < 32; i += SIDE) {
      const int k = TURNED ? x : i, col = TURNED ? i : x;
      const bool inside = k0 + k < inner && col0 + col < cols;
      r_tile[k][col] = inside ? Sum(TURNED ? r(col0 + col, k0 + k) : r(k0 + k, col0 + col)) : Sum(0);
    }
    __syncthreads();  // both tiles are whole before anyone reads them

    for (int k = 0; k < DEPTH; ++k) {
      const Sum word = r_tile[k][x];
      UNROLL
      for (int i = 0; i < EACH; ++i) sum[i] += a_tile[y + SIDE * i][k] * word;  // of a one word for the warp
    }
    __syncthreads();  // everyone has read before the next tiles overwrite
  }

  const int64_t col = col0 + x;
  UNROLL
  for (int i = 0; i < EACH; ++i) {
    const int64_t row = row0 + y + SIDE * i;
    if (row < rows && col < cols) out(row, col) = Out(Sum(base(row, col)) + sum[i]);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// c and h of a step from its z. `c_before` may be `c`.
// grid (ceil(B H / THREADS)), block (THREADS)
template <typename T>
__global__ void lstm_cell(View<const T, 2> z,                      // [B, 4 H]
                          View<const T, 2> h_before,               // [B, H], for zoneout
                          View<const Accumulator<T>, 2> c_before,  // [B, H]
                          View<const Accumulator<T>, 2> mask,      // [B, H] or empty: how much of h is new
                          View<T, 2> h,                            // [B, H]
                          View<Accumulator<T>, 2> c,               // [B, H]
                          View<Accumulator<T>, 2> kept,            // [B, H] or empty: c again, for the backward
                          int activation) {
  using Sum = Accumulator<T>;
  const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= h.size[0] * h.size[1]) return;
  const int64_t batch = index / h.size[1], unit = index % h.size[1];

  const Gates<Sum> gates = gates_of(z, batch, unit, activation);
  const Sum state = gates.f.value * c_before(batch, unit) + gates.i.value * gates.g.value;
  Sum output = gates.o.value * tanh_of(state, activation).value;
  if (mask.size[0]) {
    const Sum before = Sum(h_before(batch, unit));
    output = before + mask(batch, unit) * (output - before);
  }
  h(batch, unit) = T(output);
  c(batch, unit) = state;
  if (kept.size[0]) kept(batch, unit) = state;
}

// dz of a step, dc before it, and of dh before it what does not come through z. `dc` may be `dc_before`.
// grid (ceil(B H / THREADS)), block (THREADS)
template <typename T>
__global__ void lstm_cell_backward(View<const T, 2> dh,                     // [B, H]: of the step's own h
                                   View<const Accumulator<T>, 2> dc,        // [B, H]
                                   View<const T, 2> z,                      // [B, 4 H]
                                   View<const Accumulator<T>, 2> c_before,  // [B, H]
                                   View<const Accumulator<T>, 2> c,         // [B, H]
                                   View<const Accumulator<T>, 2> mask,      // [B, H] or empty
                                   View<T, 2> dz,                           // [B, 4 H]
                                   View<Accumulator<T>, 2> dh_carried,      // [B, H]: in from the steps after, and out
                                   View<Accumulator<T>, 2> dc_before,       // [B, H]
                                   bool last, int activation) {
  using Sum = Accumulator<T>;
  const int64_t units = dh.size[1], index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= dh.size[0] * units) return;
  const int64_t batch = index / units, unit = index % units;

  const Gates<Sum> gates = gates_of(z, batch, unit, activation);
  const Bent<Sum> seen = tanh_of(c(batch, unit), activation);
  const Sum of_h = Sum(dh(batch, unit)) + (last ? Sum(0) : dh_carried(batch, unit));
  const Sum part = mask.size[0] ? mask(batch, unit) : Sum(1), of_new = part * of_h;
  const Sum of_c = dc(batch, unit) + of_new * gates.o.value * seen.slope;

  dz(batch, unit) = T(of_c * gates.g.value * gates.i.slope);
  dz(batch, units + unit) = T(of_c * c_before(batch, unit) * gates.f.slope);
  dz(batch, 2 * units + unit) = T(of_c * gates.i.value * gates.g.slope);
  dz(batch, 3 * units + unit) = T(of_new * seen.value * gates.o.slope);
  dh_carried(batch, unit) = of_h - of_new;
  dc_before(batch, unit) = of_c * gates.f.value;
}

// ---------------------------------------------------------------------------------------------------------------------
// One step of a tensor; of one that has no steps an empty matrix.
template <typename T>
View<T, 2> step_of(View<T, 3> x, int64_t t) {
  return {
      x.data + (x.size[0] ? t * x.stride[0] : 0), {x.size[0] ? x.size[1] : 0, x.size[2]}, {x.stride[1], x.stride[2]}};
}

template <bool TURNED, typename T, typename Out>
void start_product(View<const T, 2> a, View<const T, 2> r, View<const Out, 2> base, View<Out, 2> out, Stream stream) {
  const int64_t blocks = ceil_div(out.size[0], ROWS) * ceil_div(out.size[1], COLS);
  launch<lstm_product<TURNED, T, Out>>({blocks}, dim3(COLS, SIDE), 0, stream, a, r, base, out);
}

template <typename T>
void start_step(View<const T, 2> products, View<const T, 2> weight_hh, View<const T, 2> h_before,
                View<const Accumulator<T>, 2> c_before, View<const Accumulator<T>, 2> mask, View<T, 2> h,
                View<Accumulator<T>, 2> c, View<T, 2> z, View<Accumulator<T>, 2> kept, int activation, Stream stream) {
  start_product<true>(h_before, weight_hh, products, z, stream);
  launch<lstm_cell<T>>({ceil_div(h.size[0] * h.size[1], THREADS)}, dim3(THREADS), 0, stream, read_only(z), h_before,
                       c_before, mask, h, c, kept, activation);
}

// z has all steps, or one, which is then that in hand.
void lstm_forward(Input<3> products, Input<2> weight_hh, Input<2> h0, Input<2> c0, Input<3> mask, Output<3> h,
                  Output<2> c_last, Output<3> z, Output<3> cells, int activation, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    using Sum = Accumulator<T>;
    const View<Sum, 2> c = c_last.as<Sum>();
    for (int64_t t = 0; t < h.size[0]; ++t) {
      start_step<T>(step_of(products.as<T>(), t), weight_hh.as<T>(),
                    t ? read_only(step_of(h.as<T>(), t - 1)) : h0.as<T>(), t ? read_only(c) : c0.as<Sum>(),
                    step_of(mask.as<Sum>(), t), step_of(h.as<T>(), t), c, step_of(z.as<T>(), z.size[0] == 1 ? 0 : t),
                    step_of(cells.as<Sum>(), t), activation, stream);
    }
  });
}

void lstm_step(Input<2> products, Input<2> weight_hh, Input<2> h_before, Input<2> c_before, Input<2> mask, Output<2> h,
               Output<2> c, Output<2> z, int activation, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    using Sum = Accumulator<T>;
    start_step<T>(products.as<T>(), weight_hh.as<T>(), h_before.as<T>(), c_before.as<Sum>(), mask.as<Sum>(), h.as<T>(),
                  c.as<Sum>(), z.as<T>(), View<Sum, 2>(), activation, stream);
  });
}

void lstm_backward(Input<3> dh, Input<2> dc_last, Input<2> weight_hh, Input<2> c0, Input<3> mask, Input<3> z,
                   Input<3> cells, Output<3> dz, Output<2> dh0, Output<2> dc0, int activation, Stream stream) {
  dispatch_floating(dz.dtype, [&]<typename T>() {
    using Sum = Accumulator<T>;
    const View<Sum, 2> dh_carried = dh0.as<Sum>(), dc = dc0.as<Sum>();
    for (int64_t t = dh.size[0] - 1; t >= 0; --t) {
      const bool last = t == dh.size[0] - 1;
      const View<T, 2> dz_step = step_of(dz.as<T>(), t);
      launch<lstm_cell_backward<T>>({ceil_div(dc.size[0] * dc.size[1], THREADS)}, dim3(THREADS), 0, stream,
                                    step_of(dh.as<T>(), t), last ? dc_last.as<Sum>() : read_only(dc),
                                    step_of(z.as<T>(), t), t ? step_of(cells.as<Sum>(), t - 1) : c0.as<Sum>(),
                                    step_of(cells.as<Sum>(), t), step_of(mask.as<Sum>(), t), dz_step, dh_carried, dc,
                                    last, activation);
      start_product<false>(read_only(dz_step), weight_hh.as<T>(), read_only(dh_carried), dh_carried, stream);
    }
  });
}
