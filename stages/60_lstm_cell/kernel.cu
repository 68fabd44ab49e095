// Stage 60: the LSTM, step by step
//
// Problem   For each step, of all batches: z[t] = products[t] + h[t - 1] R^T, of which i, f, g, o are made, the cell
//           c[t] = f c[t - 1] + i g and h[t] = o tanh(c[t]).  products, z [T, B, 4 H], R [4 H, H], h, c [T, B, H]. Backward:
//           from dh[t] + dz[t + 1] R, which is what the loss gives to h[t] in all, the gradients dz[t], and so on.
// Before    In the stages so far all steps of a sequence were made of the same few numbers of each channel, or could be
//           computed at once. Here each needs all of h before it, and a matrix.
// Idea      What does not wait is one large product for all steps, W x + b: `products`, a library's. What does is two
//           kernels a step: the product with R, as in stage 12, and all that happens to one unit in one pass over memory,
//           from the four gates to the new h. The gradients go back the same way; those of the weights are large products
//           again, made when all dz are there.
// Mapping   product: block: TILE batches x TILE outputs.  thread: one output.  pointwise: thread: one unit of one batch.
// Cost      forward, float32, of each step, B a multiple of TILE, H one of DEPTH:
//             global load sectors   B H (4 / TILE + 1 / 8) H / 2 for the product, 9 B H / 8 after it
//             global store sectors  B H / 2, and B H / 4
//           so R is read B / TILE times in each step, T times in all, and there are 2 T launches.
// Limits    A step of a small batch does little and waits for two launches. Stage 61 launches once and keeps R.
// Run       python -m stages run 60

#include <cmath>

#include "common/device.h"
#include "common/gates.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

constexpr int TILE = 16, DEPTH = 32;  // of a block of the product: batches and outputs; numbers of each at a time
constexpr int THREADS = TILE * TILE;

// x[t], without its first dimension.
template <typename T>
__host__ View<T, 2> step(const View<T, 3>& x, int64_t t) {
  return {x.size[0] ? &x(t, 0, 0) : x.data, {x.size[1], x.size[2]}, {x.stride[1], x.stride[2]}};
}

template <typename T>
__host__ View<const T, 2> transposed(const View<const T, 2>& x) {
  return {x.data, {x.size[1], x.size[0]}, {x.stride[1], x.stride[0]}};
}

// ---------------------------------------------------------------------------------------------------------------------
// c = a b, a [rows, length], b [length, columns]
// grid (ceil(rows / TILE), ceil(columns / TILE)), block (TILE, TILE)
template <typename T, typename Sum = Accumulator<T>>
__global__ void product(View<const T, 2> a, View<const T, 2> b, View<Sum, 2> c) {
  __shared__ Sum a_tile[TILE][DEPTH + 1], b_tile[TILE][DEPTH + 1];  // [row][k], [column][k]
  const int64_t length = a.size[1], row0 = int64_t(blockIdx.x) * TILE, column0 = int64_t(blockIdx.y) * TILE;
  const int64_t row = row0 + threadIdx.y, column = column0 + threadIdx.x;
  const bool down = b.stride[0] <= b.stride[1];  // what lies side by side in b is numbers of one column
  const int thread = threadIdx.y * TILE + threadIdx.x;

  Sum sum = 0;
  for (int64_t k0 = 0; k0 < length; k0 += DEPTH) {
    for (int i = thread; i < TILE * DEPTH; i += THREADS) {
      const int at = i / DEPTH, k = i % DEPTH;
      a_tile[at][k] = row0 + at < c.size[0] && k0 + k < length ? Sum(a(row0 + at, k0 + k)) : Sum(0);
      const int b_at = down ? at : i % TILE, b_k = down ? k : i / TILE;
      b_tile[b_at][b_k] = column0 + b_at < c.size[1] && k0 + b_k < length ? Sum(b(k0 + b_k, column0 + b_at)) : Sum(0);
    }
    __syncthreads();  // the tiles are there
    for (int k = 0; k < DEPTH; ++k) sum += a_tile[threadIdx.y][k] * b_tile[threadIdx.x][k];
    __syncthreads();  // and nobody needs them any more
  }
  if (row < c.size[0] && column < c.size[1]) c(row, column) = sum;
}

// grid (ceil(batches H / THREADS)), block (THREADS)
template <typename T, typename Sum = Accumulator<T>>
__global__ void cell(View<const T, 2> products,     // [batches, 4 H]
                     View<const Sum, 2> of_before,  // [batches, 4 H]: h R^T
                     View<const T, 2> h_before, View<const Sum, 2> c_before, View<const Sum, 2> mask,  // or empty
                     View<T, 2> h, View<Sum, 2> c_last, View<T, 2> z, View<Sum, 2> cells, bool hard) {
  const int64_t hidden = h.size[1], index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= h.size[0] * hidden) return;
  const int64_t batch = index / hidden, unit = index % hidden;
  Sum gates[4];
  UNROLL
  for (int g = 0; g < 4; ++g) {
    gates[g] = Sum(products(batch, g * hidden + unit)) + of_before(batch, g * hidden + unit);
    if (z.size[0]) z(batch, g * hidden + unit) = T(gates[g]);
  }
  const Sum i = gate(gates[0], hard), f = gate(gates[1], hard), g = squashed(gates[2], hard), o = gate(gates[3], hard);
  const Sum c = f * c_before(batch, unit) + i * g, made = o * squashed(c, hard);
  if (mask.size[0]) {
    const Sum old = Sum(h_before(batch, unit));
    h(batch, unit) = T(old + mask(batch, unit) * (made - old));
  } else {
    h(batch, unit) = T(made);
  }
  c_last(batch, unit) = c;
  if (cells.size[0]) cells(batch, unit) = c;
}

// From d, what the loss gives to h in all: dz, and what it gives to the cell before, in dc, and to the h before by itself.
// grid (ceil(batches H / THREADS)), block (THREADS)
template <typename T, typename Sum = Accumulator<T>>
__global__ void cell_backward(View<const T, 2> dh, View<const Sum, 2> of_later,  // [batches, H]: dz R of the step after
                              View<const Sum, 2> mask,                           // or empty
                              View<const T, 2> z, View<const Sum, 2> cells, View<const Sum, 2> c_before, View<T, 2> dz,
                              View<const Sum, 2> dc_after, View<Sum, 2> dc, View<Sum, 2> kept, bool last, bool hard) {
  const int64_t hidden = dh.size[1], index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= dh.size[0] * hidden) return;
  const int64_t batch = index / hidden, unit = index % hidden;
  Sum d = Sum(dh(batch, unit));
  if (!last) d += of_later(batch, unit) + (mask.size[0] ? kept(batch, unit) : Sum(0));
  if (mask.size[0]) {
    const Sum part = mask(batch, unit);
    kept(batch, unit) = (1 - part) * d, d *= part;
  }
  const auto of = [&](int g) { return Sum(z(batch, g * hidden + unit)); };
  const Sum i = gate(of(0), hard), f = gate(of(1), hard), g = squashed(of(2), hard), o = gate(of(3), hard);
  const Sum seen = squashed(cells(batch, unit), hard);
  const Sum of_cell = dc_after(batch, unit) + d * o * squashed_slope(seen, hard);
  dz(batch, unit) = T(of_cell * g * gate_slope(i, hard));
  dz(batch, hidden + unit) = T(of_cell * c_before(batch, unit) * gate_slope(f, hard));
  dz(batch, 2 * hidden + unit) = T(of_cell * i * squashed_slope(g, hard));
  dz(batch, 3 * hidden + unit) = T(d * seen * gate_slope(o, hard));
  dc(batch, unit) = of_cell * f;
}

// What the loss gives to h0; without a step 0, and the cells' gradients as they are.
// grid (ceil(batches H / THREADS)), block (THREADS)
template <typename T, typename Sum = Accumulator<T>>
__global__ void begin(View<const Sum, 2> of_later, View<const Sum, 2> kept, View<const Sum, 2> dc_last, View<T, 2> dh0,
                      View<Sum, 2> dc0, bool steps) {
  const int64_t hidden = dh0.size[1], index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= dh0.size[0] * hidden) return;
  const int64_t batch = index / hidden, unit = index % hidden;
  Sum d = 0;
  if (steps) d = of_later(batch, unit) + (kept.size[0] ? kept(batch, unit) : Sum(0));
  else dc0(batch, unit) = dc_last(batch, unit);
  dh0(batch, unit) = T(d);
}

template <typename Sum>
__global__ void copy(View<const Sum, 2> from, View<Sum, 2> to) {
  const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x, columns = to.size[1];
  if (index < to.size[0] * columns) to(index / columns, index % columns) = from(index / columns, index % columns);
}

// ---------------------------------------------------------------------------------------------------------------------
template <typename T>
void multiply(const View<const T, 2>& a, const View<const T, 2>& b, const View<Accumulator<T>, 2>& c, Stream stream) {
  launch<product<T>>({ceil_div(c.size[0], TILE), ceil_div(c.size[1], TILE)}, dim3(TILE, TILE), 0, stream, a, b, c);
}

void lstm_forward(Input<3> products, Input<2> R, Input<2> h0, Input<2> c0, Input<3> mask, Output<3> h, Output<2> c_last,
                  Output<3> z, Output<3> cells, int activation, Output<2> of_before, Stream stream) {
  dispatch_floating(h.dtype, [&]<typename T>() {
    using Sum = Accumulator<T>;
    const auto all = h.as<T>();
    const auto c = c_last.as<Sum>(), sums = of_before.as<Sum>();
    const Grid grid{ceil_div(h.size[1] * h.size[2], THREADS)};
    if (h.size[0] == 0) launch<copy<Sum>>(grid, dim3(THREADS), 0, stream, c0.as<Sum>(), c);
    for (int64_t t = 0; t < h.size[0]; ++t) {
      const auto h_before = t == 0 ? h0.as<T>() : read_only(step(all, t - 1));
      const auto c_before = t == 0 ? c0.as<Sum>() : read_only(c);
      multiply(h_before, transposed(R.as<T>()), sums, stream);
      launch<cell<T>>(grid, dim3(THREADS), 0, stream, step(products.as<T>(), t), read_only(sums), h_before, c_before,
                      step(mask.as<Sum>(), t), step(all, t), c, step(z.as<T>(), t), step(cells.as<Sum>(), t),
                      activation == 1);
    }
  });
}

void lstm_backward(Input<3> dh, Input<2> dc_last, Input<2> R, Input<2> c0, Input<3> mask, Input<3> z, Input<3> cells,
                   Output<3> dz, Output<2> dh0, Output<2> dc0, int activation, Output<2> of_later, Output<2> kept,
                   Stream stream) {
  dispatch_floating(dz.dtype, [&]<typename T>() {
    using Sum = Accumulator<T>;
    const auto dc = dc0.as<Sum>(), sums = of_later.as<Sum>(), keeps = kept.as<Sum>();
    const int64_t seq = dz.size[0];
    const Grid grid{ceil_div(dh0.size[0] * dh0.size[1], THREADS)};
    for (int64_t t = seq - 1; t >= 0; --t) {
      const bool last = t == seq - 1;
      const auto dc_after = last ? dc_last.as<Sum>() : read_only(dc);
      const auto c_before = t > 0 ? step(cells.as<Sum>(), t - 1) : c0.as<Sum>();
      launch<cell_backward<T>>(grid, dim3(THREADS), 0, stream, step(dh.as<T>(), t), read_only(sums),
                               step(mask.as<Sum>(), t), step(z.as<T>(), t), step(cells.as<Sum>(), t), c_before,
                               step(dz.as<T>(), t), dc_after, dc, keeps, last, activation == 1);
      multiply(read_only(step(dz.as<T>(), t)), R.as<T>(), sums, stream);
    }
    launch<begin<T>>(grid, dim3(THREADS), 0, stream, read_only(sums), read_only(keeps), dc_last.as<Sum>(), dh0.as<T>(),
                     dc, seq > 0);
  });
}
