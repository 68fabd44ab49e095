// Stage 53: discretizations of a full matrix
//
// Problem   h' = A h + B u with a full A [n, n], B [n, m] and a step dt, of many systems at once: A_bar and B_bar so that
//           h_t = A_bar h_(t-1) + B_bar u_t, and for foh a second factor, of u_(t-1). With Z = dt A
//             bilinear   A_bar = (I - Z/2)^-1 (I + Z/2)    B_bar = (I - Z/2)^-1 dt B
//             zoh        A_bar = e^Z                       B_bar = phi_1(Z) dt B
//             foh        A_bar = e^Z                       B_bar = phi_2(Z) dt B, before: (phi_1(Z) - phi_2(Z)) dt B
//           and from the gradients of these those of A, B and dt. n is at most 32.
// Before    Stage 50 has a diagonal A, where all of this is done number by number.
// Idea      bilinear: Gauss and Jordan's elimination, a lane for each row. The lanes vote for the pivot, no row is ever
//           moved: each remembers when its turn was. What is solved for is (I - Z/2)^-1 Z, which A_bar is I and that, so
//           that a short step keeps its digits.
//           zoh, foh: Z / 2^s is so small that a short Taylor series does, all of it products, no division by A: a
//           singular one is as good as any. e^X, V = phi_1 dt B and W = phi_2 dt B are the upper row of the exponential
//           of one block matrix, [[Z, dt B, 0], [0, 0, I], [0, 0, 0]] / 2^s, and squaring that s times takes s products
//           of n x n: E' = E E, V' = E V + V, W' = E W + h V + W, h' = 2 h. The first time E is I + D with a small D, which
//           has kept the digits that I would have cost it: E' = I + 2 D + D D.
//           The gradients are the upper row of its derivative at the transposed matrix, in the direction of what the
//           loss gives to e^Z, V and W; the same series and squarings, each differentiated by the product rule.
// Mapping   A group of 8, 16 or 32 lanes, as many as n asks for, has a matrix, in shared memory; columns are the lanes'
//           where there are products, rows where there are eliminations. Groups never meet: there is no barrier but
//           their warp's.
// Cost      float32, n = 16, m <= 16, forward, of M matrices
//             global load sectors   M (32 + 2 m + 1)   store sectors   M (32 + 2 m F), F = 2 for foh, else 1
// Limits    A piece of the time goes into shared memory, four numbers at a time; tensor cores would do the products faster,
//           with fewer digits. For n = 17 .. 32 half of the lanes' work may be on zeros.
// Run       python -m stages run 53

#include <cmath>
#include <stdexcept>
#include <string>

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/vector.h"
#include "common/view.h"

constexpr unsigned FULL = 0xffffffff;
constexpr int WARP = 32, FOUR = 4;  // lanes; rows that lie together
constexpr int SHARED = 64 * 1024;   // bytes that a block may have if one warp does with less
constexpr int MOST_WARPS = 4;       // of a block
template <typename T>
constexpr int DEGREE = sizeof(T) == 4 ? 8 : 14;  // of the series, good where the norm is at most a half

// ---- matrices in shared memory --------------------------------------------------------------------------------------
// Column after column; rows, and the number of columns, are filled up with zeros to fours. From column to column it is an
// odd number of fours, so that lanes that read four rows of a column each meet in no bank.
template <typename T>
struct Matrix {
  T* data;
  int rows, columns;

  __host__ __device__ static int pitch_of(int rows) { return (ceil_div(rows, FOUR) | 1) * FOUR; }
  __host__ __device__ static int size_of(int rows, int columns) {
    return rows == 0 ? 0 : pitch_of(rows) * int(ceil_div(columns, FOUR)) * FOUR;
  }
  __device__ T& operator()(int row, int column) const { return data[column * pitch_of(rows) + row]; }
  __device__ const T* four(int row, int column) const { return data + column * pitch_of(rows) + row; }
};

// The lanes that have a matrix.
struct Group {
  int lanes, lane;  // 8, 16 or 32 of them; which one this is

  // body(row, column) for each number of a matrix, row after row: neighbours are lanes beside each other.
  template <typename Body>
  __device__ __forceinline__ void each(int rows, int columns, Body&& body) const {
    if (columns == 0) return;
    const int more_rows = lanes / columns, more_columns = lanes % columns;
    int row = lane / columns, column = lane % columns;
    while (row < rows) {
      body(row, column);
      row += more_rows, column += more_columns;
      if (column >= columns) column -= columns, ++row;
    }
  }
  // body(i) for each column, or each place on a diagonal.
  template <typename Body>
  __device__ __forceinline__ void each(int count, Body&& body) const {
    for (int i = lane; i < count; i += lanes) body(i);
  }
  template <typename T>
  __device__ __forceinline__ T sum(T x) const {
    for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(FULL, x, offset);
    return x;
  }
};

// sum += x y, of FOUR rows from `row` on and a column.
template <typename T>
__device__ __forceinline__ void add_product(T (&sum)[FOUR], const Matrix<T>& x, const Matrix<T>& y, int row,
                                            int column) {
#pragma unroll 2
  for (int k = 0; k < x.columns; k += FOUR) {
    T factor[FOUR];
    load_row(factor, y.four(k, column));
    UNROLL
    for (int i = 0; i < FOUR; ++i) {
      T part[FOUR];
      load_row(part, x.four(row, k + i));
      UNROLL
      for (int r = 0; r < FOUR; ++r) sum[r] += part[r] * factor[i];
    }
  }
}
template <typename T>
__device__ __forceinline__ void add(T (&sum)[FOUR], const Matrix<T>& x, int row, int column, T factor) {
  T part[FOUR];
  load_row(part, x.four(row, column));
  UNROLL
  for (int r = 0; r < FOUR; ++r) sum[r] += factor * part[r];
}

template <typename T>
__device__ __forceinline__ void add_identity(T (&sum)[FOUR], int row, int column) {
  UNROLL
  for (int r = 0; r < FOUR; ++r) sum[r] += row + r == column ? 1 : 0;
}

// to = what body(sum, row, column) adds to 0, FOUR rows at a time, which the lanes share out; nothing if it is not `needed`.
template <typename T, typename Body>
__device__ __forceinline__ void make(const Group& group, const Matrix<T>& to, bool needed, Body&& body) {
  if (to.rows == 0) return;
  const int fours = int(ceil_div(to.rows, FOUR));
  const int more_rows = group.lanes % fours, more_columns = group.lanes / fours;
  int row = group.lane % fours, column = group.lane / fours;
  while (column < to.columns) {
    T sum[FOUR] = {};
    body(sum, row * FOUR, column);
    if (needed) store_row(&to(row * FOUR, column), sum);
    row += more_rows, column += more_columns;
    if (row >= fours) row -= fours, ++column;
  }
}

// ---- from and to global memory --------------------------------------------------------------------------------------
// A matrix of a tensor of such, times a factor; transposed, if asked for.
template <typename T>
__device__ __forceinline__ void load(const Group& group, const Matrix<T>& to, const View<const T, 3>& x, int64_t matrix,
                                     T factor, bool transposed = false) {
  const T* from = &x(matrix, 0, 0);
  const int rows = transposed ? to.columns : to.rows, columns = transposed ? to.rows : to.columns;
  group.each(rows, columns, [&](int row, int column) {
    (transposed ? to(column, row) : to(row, column)) = from[row * x.stride[1] + column * x.stride[2]] * factor;
  });
}
template <typename T>
__device__ __forceinline__ void store(const Group& group, const View<T, 3>& x, int64_t matrix, const Matrix<T>& from,
                                      T factor) {
  T* to = &x(matrix, 0, 0);
  group.each(from.rows, from.columns,
             [&](int row, int column) { to[row * x.stride[1] + column * x.stride[2]] = from(row, column) * factor; });
}

// What the lane's numbers of <x, y> are.
template <typename T>
__device__ __forceinline__ T dot(const Group& group, const Matrix<T>& x, const View<const T, 3>& y, int64_t matrix) {
  T sum = 0;
  const T* from = &y(matrix, 0, 0);
  group.each(x.rows, x.columns,
             [&](int row, int column) { sum += x(row, column) * from[row * y.stride[1] + column * y.stride[2]]; });
  return sum;
}

// ---- a block's share of shared memory -------------------------------------------------------------------------------
struct Plan {
  int lanes, warps, numbers;  // of a group; of a block; numbers that a group has in shared memory
};

// Deals out what a group has, all zeros at first.
template <typename T>
struct Store {
  T* next;

  __device__ Store(const Plan& plan, T* shared) : next(shared + threadIdx.x / unsigned(plan.lanes) * plan.numbers) {
    const T zeros[FOUR] = {};
    for (int i = threadIdx.x % unsigned(plan.lanes) * FOUR; i < plan.numbers; i += plan.lanes * FOUR) {
      store_row(next + i, zeros);
    }
    __syncwarp();
  }
  __device__ T* take(int numbers) {
    T* const found = next;
    next += numbers;
    return found;
  }
  __device__ Matrix<T> matrix(int rows, int columns) {
    return {take(Matrix<T>::size_of(rows, columns)), rows, columns};
  }
};

// ---- bilinear -------------------------------------------------------------------------------------------------------
// A system of equations, a x = b: a row after the other, [a | b] of at most WIDTH numbers and zeros. A lane has one of them
// in registers, from which a column goes with each step; so all that is left in the end is b.
template <int WIDTH>
constexpr int ROW_PITCH = WIDTH + FOUR;  // an odd number of fours, as WIDTH is a multiple of eight
template <int WIDTH>
constexpr int EQUATIONS = 2 * WIDTH;  // numbers besides the rows: two lines, each for every second pivot row

// x = a^-1 b by Gauss and Jordan: its first columns, as many as a has, and the others.
template <int WIDTH, typename T>
__device__ __forceinline__ void solve(const Group& group, const T* rows, T* lines, const Matrix<T>& first,
                                      const Matrix<T>& others) {
  const int n = first.rows, row = group.lane;
  int turn = row < n ? n : -1;  // when the lane's row was the pivot's: not yet, or it is none
  T own[WIDTH], pivot = 1;
  UNROLL
  for (int k = 0; k < WIDTH; k += FOUR) {
    T four[FOUR] = {};
    if (row < n) load_row(four, rows + row * ROW_PITCH<WIDTH> + k);
    UNROLL
    for (int i = 0; i < FOUR; ++i) own[k + i] = four[i];
  }
#pragma unroll 1
  for (int step = 0; step < n; ++step) {
    // Of the rows that have had no turn the one that begins with the largest number; NaN counts as infinite.
    T most = -1;
    if (turn == n) most = std::abs(own[0]) >= 0 ? std::abs(own[0]) : T(INFINITY);
    int at = row;
    for (int offset = group.lanes / 2; offset > 0; offset /= 2) {
      const T other = __shfl_xor_sync(FULL, most, offset);
      const int other_at = __shfl_xor_sync(FULL, at, offset);
      if (other > most || (other == most && other_at < at)) most = other, at = other_at;
    }
    T* const line = lines + step % 2 * WIDTH;
    if (row == at) {
      turn = step, pivot = own[0];
      UNROLL
      for (int k = 0; k < WIDTH; k += FOUR) {
        T four[FOUR];
        UNROLL
        for (int i = 0; i < FOUR; ++i) four[i] = own[k + i];
        store_row(line + k, four);
      }
    }
    __syncwarp();
    const T factor = row == at ? T(0) : own[0] / line[0];
    UNROLL
    for (int k = 0; k < WIDTH; k += FOUR) {
      T four[FOUR];
      load_row(four, line + k);
      UNROLL
      for (int i = k == 0 ? 1 : 0; i < FOUR; ++i) own[k + i - 1] = own[k + i] - factor * four[i];
    }
    own[WIDTH - 1] = 0;
  }
  if (row < n) {
    UNROLL
    for (int k = 0; k < WIDTH; ++k) {
      if (k < n) first(turn, k) = own[k] / pivot;
      else if (k - n < others.columns) others(turn, k - n) = own[k] / pivot;
    }
  }
  __syncwarp();
}

// The columns from `at` on of the rows of equations: those of a tensor's matrix, times a factor; transposed, if asked for.
template <int WIDTH, typename T>
__device__ __forceinline__ void load_rows(const Group& group, T* rows, int at, const View<const T, 3>& x,
                                          int64_t matrix, T factor, bool transposed = false) {
  const T* from = &x(matrix, 0, 0);
  group.each(int(x.size[1]), int(x.size[2]), [&](int row, int column) {
    T* const to = rows + (transposed ? column : row) * ROW_PITCH<WIDTH> + (transposed ? row : column);
    to[at] = from[row * x.stride[1] + column * x.stride[2]] * factor;
  });
}

// The system of a group of lanes; the last one once more where there are too few.
struct System {
  Group group;
  int64_t matrix;
  bool is_there;

  __device__ System(const Plan& plan, int64_t count)
      : group{plan.lanes, int(threadIdx.x % unsigned(plan.lanes))},
        matrix(int64_t(blockIdx.x) * (blockDim.x / unsigned(plan.lanes)) + threadIdx.x / unsigned(plan.lanes)),
        is_there(matrix < count) {
    if (!is_there) matrix = count - 1;
  }
};

// grid (systems / those of a block), block (warps of lanes for a system each)
template <typename T, int WIDTH>
__global__ void bilinear(View<const T, 3> A,      // [systems, n, n]
                         View<const T, 3> B,      // [systems, n, m]
                         View<const T, 1> delta,  // [systems]
                         View<T, 3> A_bar,        // [systems, n, n]
                         View<T, 3> B_bar,        // [systems, n, m]
                         Plan plan) {
  DYNAMIC_SHARED(T, shared);
  const System system(plan, A.size[0]);
  const Group& group = system.group;
  const int n = int(A.size[1]), m = int(B.size[2]);
  Store<T> store_of(plan, shared);
  T *const rows = store_of.take(n * ROW_PITCH<WIDTH>), *const lines = store_of.take(EQUATIONS<WIDTH>);
  const Matrix<T> of_a = store_of.matrix(n, n), of_b = store_of.matrix(n, m);
  const T dt = delta(system.matrix);
  load_rows<WIDTH>(group, rows, 0, A, system.matrix, -dt / 2);
  load_rows<WIDTH>(group, rows, n, A, system.matrix, dt), load_rows<WIDTH>(group, rows, 2 * n, B, system.matrix, dt);
  __syncwarp();
  group.each(n, [&](int i) { rows[i * ROW_PITCH<WIDTH> + i] += 1; });
  solve<WIDTH>(group, rows, lines, of_a, of_b);
  group.each(n, [&](int i) { of_a(i, i) += 1; });
  __syncwarp();
  if (!system.is_there) return;
  store(group, A_bar, system.matrix, of_a, T(1)), store(group, B_bar, system.matrix, of_b, T(1));
}

// grid and block as above. With M = I - dt/2 A, W = M^-T g_A_bar, V = M^-T g_B_bar and S = W (I + A_bar)^T + V B_bar^T:
// dA = dt/2 S, dB = dt V, ddelta = <S, A> / 2 + <V, B>.
template <typename T, int WIDTH>
__global__ void bilinear_backward(View<const T, 3> A, View<const T, 3> B, View<const T, 1> delta,
                                  View<const T, 3> A_bar, View<const T, 3> B_bar,      // what the forward gave
                                  View<const T, 3> g_A_bar, View<const T, 3> g_B_bar,  // and what a loss gives to it
                                  View<T, 3> dA, View<T, 3> dB, View<T, 1> ddelta, Plan plan) {
  DYNAMIC_SHARED(T, shared);
  const System system(plan, A.size[0]);
  const Group& group = system.group;
  const int n = int(A.size[1]), m = int(B.size[2]);
  Store<T> store_of(plan, shared);
  T *const rows = store_of.take(n * ROW_PITCH<WIDTH>), *const lines = store_of.take(EQUATIONS<WIDTH>);
  const Matrix<T> w = store_of.matrix(n, n), v = store_of.matrix(n, m), s = store_of.matrix(n, n);
  const Matrix<T> a_bar = store_of.matrix(n, n), b_bar = store_of.matrix(m, n);  // I + A_bar and B_bar, transposed
  const T dt = delta(system.matrix);
  load_rows<WIDTH>(group, rows, 0, A, system.matrix, -dt / 2, true);
  load_rows<WIDTH>(group, rows, n, g_A_bar, system.matrix, T(1));
  load_rows<WIDTH>(group, rows, 2 * n, g_B_bar, system.matrix, T(1));
  load(group, a_bar, A_bar, system.matrix, T(1), true), load(group, b_bar, B_bar, system.matrix, T(1), true);
  __syncwarp();
  group.each(n, [&](int i) { rows[i * ROW_PITCH<WIDTH> + i] += 1, a_bar(i, i) += 1; });
  solve<WIDTH>(group, rows, lines, w, v);
  make(group, s, true, [&](T(&sum)[FOUR], int row, int column) {
    add_product(sum, w, a_bar, row, column), add_product(sum, v, b_bar, row, column);
  });
  __syncwarp();
  const T of_dt = group.sum(dot(group, s, A, system.matrix) / 2 + dot(group, v, B, system.matrix));
  if (!system.is_there) return;
  store(group, dA, system.matrix, s, dt / 2), store(group, dB, system.matrix, v, dt);
  if (group.lane == 0) ddelta(system.matrix) = of_dt;
}

// ---- exponentials ---------------------------------------------------------------------------------------------------
// How often Z has to be halved until its norm, the largest sum of a column, is at most a half; not at all if it has none.
template <typename T>
__device__ __forceinline__ int halvings_of(const Group& group, const Matrix<T>& z) {
  T norm = 0;  // a column for each lane: there are no more of them
  if (group.lane < z.columns) {
    for (int row = 0; row < z.rows; ++row) norm += std::abs(z(row, group.lane));
  }
  for (int offset = group.lanes / 2; offset > 0; offset /= 2) {
    const T other = __shfl_xor_sync(FULL, norm, offset);
    norm = other > norm ? other : norm;
  }
  return std::isfinite(norm) && norm > T(0.5) ? std::ilogb(norm) + 2 : 0;
}
// The most of a warp's groups: all go on as long as one of them has to.
__device__ __forceinline__ int most_of_warp(int count) {
  for (int offset = WARP / 2; offset > 0; offset /= 2) count = max(count, __shfl_xor_sync(FULL, count, offset));
  return count;
}
template <typename T>
__device__ __forceinline__ void scale(const Group& group, const Matrix<T>& x, T factor) {
  group.each(x.rows, x.columns, [&](int row, int column) { x(row, column) *= factor; });
}

// Two places for a matrix of which the next is made from this one.
template <typename T>
struct Turns {
  Matrix<T> now, next;

  __device__ __forceinline__ void turn(bool needed = true) {
    T* const made = needed ? next.data : now.data;
    next.data = needed ? now.data : next.data, now.data = made;
  }
};

// grid and block as above
template <typename T>
__global__ void exponential(View<const T, 3> A, View<const T, 3> B, View<const T, 1> delta, View<T, 3> A_bar,
                            View<T, 3> B_prev,  // [systems, n, m] for foh, or empty
                            View<T, 3> B_bar, Plan plan) {
  DYNAMIC_SHARED(T, shared);
  const System system(plan, A.size[0]);
  const Group& group = system.group;
  const int n = int(A.size[1]), m = int(B.size[2]);
  const bool foh = B_prev.size[0] > 0;
  Store<T> store_of(plan, shared);
  const auto two = [&](int rows, int columns) {
    const Matrix<T> now = store_of.matrix(rows, columns);
    return Turns<T>{now, store_of.matrix(rows, columns)};
  };
  const Matrix<T> z = store_of.matrix(n, n), b = store_of.matrix(n, m);
  Turns<T> e = two(n, n), v = two(n, m), w = two(n, foh ? m : 0);
  const T dt = delta(system.matrix);
  load(group, z, A, system.matrix, dt);
  __syncwarp();
  const int halvings = halvings_of(group, z), most = most_of_warp(halvings);
  __syncwarp();                        // all have read it, to whom a shuffle would not say so
  T h = std::scalbn(T(1), -halvings);  // the length of a piece of the step, of which all is made first
  scale(group, z, h), load(group, b, B, system.matrix, dt * h);
  group.each(n, [&](int i) { e.now(i, i) = 1; });
  load(group, v.now, B, system.matrix, dt * h), load(group, w.now, B, system.matrix, dt * h);
  __syncwarp();

  // Series: Z/1 (I + Z/2 (..)), B + Z/2 (B + Z/3 (..)), B + Z/3 (B + Z/4 (..)).
  for (int k = DEGREE<T>; k > 0; --k) {
    const auto horner = [&](Turns<T>& x, int divisor, auto&& start) {
      make(group, x.next, true, [&](T(&sum)[FOUR], int row, int column) {
        add_product(sum, z, x.now, row, column);
        UNROLL
        for (int r = 0; r < FOUR; ++r) sum[r] /= divisor;
        start(sum, row, column);
      });
    };
    const auto from_b = [&](T(&sum)[FOUR], int row, int column) { add(sum, b, row, column, T(1)); };
    horner(e, k, [&](T(&sum)[FOUR], int row, int column) {
      if (k > 1) add_identity(sum, row, column);
    });
    horner(v, k + 1, from_b), horner(w, k + 2, from_b);
    __syncwarp();
    e.turn(), v.turn(), w.turn();
  }
  scale(group, w.now, h / 2);
  __syncwarp();

  for (int t = 0; t < most; ++t) {
    const bool needed = t < halvings;
    const T of_identity = t == 0 ? 2 : 1;
    make(group, e.next, needed, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, e.now, e.now, row, column);
      if (t == 0) add(sum, e.now, row, column, T(2)), add_identity(sum, row, column);
    });
    make(group, v.next, needed, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, e.now, v.now, row, column), add(sum, v.now, row, column, of_identity);
    });
    make(group, w.next, needed, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, e.now, w.now, row, column);
      add(sum, v.now, row, column, h), add(sum, w.now, row, column, of_identity);
    });
    __syncwarp();
    e.turn(needed), v.turn(needed), w.turn(needed), h *= 2;
  }
  if (halvings == 0) group.each(n, [&](int i) { e.now(i, i) += 1; });
  __syncwarp();
  if (!system.is_there) return;
  store(group, A_bar, system.matrix, e.now, T(1));
  if (!foh) return store(group, B_bar, system.matrix, v.now, T(1));
  store(group, B_bar, system.matrix, w.now, T(1));
  group.each(
      n, m, [&](int row, int column) { B_prev(system.matrix, row, column) = v.now(row, column) - w.now(row, column); });
}

// grid and block as above. X is the transpose of the block matrix, of whose exponential the first column is e^Z^T, u = V^T,
// y = W^T, and L = (l_1, l_2, l_3) the upper row of its derivative in the direction of the gradients (g_1, g_2, g_3) of
// e^Z, V and W: dZ = l_1, d(dt B) = l_2.
template <typename T>
__global__ void exponential_backward(View<const T, 3> A, View<const T, 3> B, View<const T, 1> delta,
                                     View<const T, 3> g_A_bar,
                                     View<const T, 3> g_B_prev,  // [systems, n, m] for foh, or empty
                                     View<const T, 3> g_B_bar, View<T, 3> dA, View<T, 3> dB, View<T, 1> ddelta,
                                     Plan plan) {
  DYNAMIC_SHARED(T, shared);
  const System system(plan, A.size[0]);
  const Group& group = system.group;
  const int n = int(A.size[1]), m = int(B.size[2]);
  const bool foh = g_B_prev.size[0] > 0;
  const int of_foh = foh ? m : 0;
  Store<T> store_of(plan, shared);
  const auto two = [&](int rows, int columns) {
    const Matrix<T> now = store_of.matrix(rows, columns);
    return Turns<T>{now, store_of.matrix(rows, columns)};
  };
  const Matrix<T> z = store_of.matrix(n, n), b = store_of.matrix(m, n);
  const Matrix<T> g_1 = store_of.matrix(n, n), g_2 = store_of.matrix(n, m), g_3 = store_of.matrix(n, of_foh);
  Turns<T> e = two(n, n), u = two(m, n), y = two(of_foh, n);
  Turns<T> l_1 = two(n, n), l_2 = two(n, m), l_3 = two(n, of_foh);
  const T dt = delta(system.matrix);
  load(group, z, A, system.matrix, dt, true);
  __syncwarp();
  const int halvings = halvings_of(group, z), most = most_of_warp(halvings);
  __syncwarp();  // all have read it, to whom a shuffle would not say so
  T h = std::scalbn(T(1), -halvings);
  scale(group, z, h), load(group, b, B, system.matrix, dt * h, true);
  load(group, g_1, g_A_bar, system.matrix, h), load(group, g_2, foh ? g_B_prev : g_B_bar, system.matrix, h);
  group.each(n, of_foh, [&](int row, int column) {
    g_3(row, column) = (g_B_bar(system.matrix, row, column) - g_B_prev(system.matrix, row, column)) * h;
  });
  group.each(n, [&](int i) { e.now(i, i) = 1; });
  __syncwarp();

  for (int k = DEGREE<T>; k > 0; --k) {  // P = I + X/k P of the power before, and by the product rule its derivative
    const T factor = 1 / T(k), h_before = h / (k + 1);
    const auto divide = [&](T(&sum)[FOUR]) {
      UNROLL
      for (int r = 0; r < FOUR; ++r) sum[r] *= factor;
    };
    make(group, e.next, true, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, z, e.now, row, column), divide(sum);
      if (k > 1) add_identity(sum, row, column);
    });
    make(group, u.next, true,
         [&](T(&sum)[FOUR], int row, int column) { add_product(sum, b, e.now, row, column), divide(sum); });
    make(group, y.next, true,
         [&](T(&sum)[FOUR], int row, int column) { add(sum, u.now, row, column, h), divide(sum); });
    make(group, l_1.next, true, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, g_1, e.now, row, column), add_product(sum, g_2, u.now, row, column);
      add_product(sum, g_3, y.now, row, column), add_product(sum, z, l_1.now, row, column), divide(sum);
    });
    make(group, l_2.next, true, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, z, l_2.now, row, column), add(sum, g_2, row, column, T(1));
      if (foh) add(sum, g_3, row, column, h_before);
      divide(sum);
    });
    make(group, l_3.next, true, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, z, l_3.now, row, column), add(sum, g_3, row, column, T(1)), divide(sum);
    });
    __syncwarp();
    e.turn(), u.turn(), y.turn(), l_1.turn(), l_2.turn(), l_3.turn();
  }

  for (int t = 0; t < most; ++t) {  // P' = P P, L' = P L + L P
    const bool needed = t < halvings;
    const T of_identity = t == 0 ? 2 : 1;
    make(group, l_1.next, needed, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, e.now, l_1.now, row, column), add_product(sum, l_1.now, e.now, row, column);
      add_product(sum, l_2.now, u.now, row, column), add_product(sum, l_3.now, y.now, row, column);
      if (t == 0) add(sum, l_1.now, row, column, T(2));
    });
    make(group, l_2.next, needed, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, e.now, l_2.now, row, column), add(sum, l_2.now, row, column, of_identity);
      if (foh) add(sum, l_3.now, row, column, h);
    });
    make(group, l_3.next, needed, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, e.now, l_3.now, row, column), add(sum, l_3.now, row, column, of_identity);
    });
    make(group, y.next, needed, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, y.now, e.now, row, column);
      add(sum, u.now, row, column, h), add(sum, y.now, row, column, of_identity);
    });
    make(group, u.next, needed, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, u.now, e.now, row, column), add(sum, u.now, row, column, of_identity);
    });
    make(group, e.next, needed, [&](T(&sum)[FOUR], int row, int column) {
      add_product(sum, e.now, e.now, row, column);
      if (t == 0) add(sum, e.now, row, column, T(2)), add_identity(sum, row, column);
    });
    __syncwarp();
    e.turn(needed), u.turn(needed), y.turn(needed);
    l_1.turn(needed), l_2.turn(needed), l_3.turn(needed), h *= 2;
  }
  const T of_dt = group.sum(dot(group, l_1.now, A, system.matrix) + dot(group, l_2.now, B, system.matrix));
  if (!system.is_there) return;
  store(group, dA, system.matrix, l_1.now, dt), store(group, dB, system.matrix, l_2.now, dt);
  if (group.lane == 0) ddelta(system.matrix) = of_dt;
}

// ---------------------------------------------------------------------------------------------------------------------
// body.operator()<WIDTH>() with a width that rows of equations fit in.
template <typename Body>
void dispatch_width(int n, int m, Body&& body) {
  if (n <= 8 && m <= 8) return body.template operator()<24>();
  if (n <= 16 && m <= 16) return body.template operator()<48>();
  body.template operator()<96>();
}

// A launch for systems that keep so many numbers in shared memory each.
template <auto Kernel, typename T, typename... Arguments>
void start(int64_t systems, int n, int numbers, Stream stream, Arguments... arguments) {
  Plan plan{n <= 8 ? 8 : n <= 16 ? 16 : WARP, 1, numbers};
  plan.numbers += (plan.lanes + WARP - numbers % WARP) % WARP;  // so that a warp's groups are in different banks
  const int of_warp = WARP / plan.lanes, bytes = of_warp * plan.numbers * int(sizeof(T));
  while (plan.warps < MOST_WARPS && 2 * plan.warps * bytes <= SHARED) plan.warps *= 2;
  launch<Kernel>({ceil_div(systems, of_warp * plan.warps)}, dim3(unsigned(WARP * plan.warps)),
                 size_t(plan.warps) * bytes, stream, arguments..., plan);
}

void discretize_matrix(const std::string& method, Input<3> A, Input<3> B, Input<1> delta, Output<3> A_bar,
                       Output<3> B_prev, Output<3> B_bar, Stream stream) {
  dispatch_wide(A.dtype, [&]<typename T>() {
    const int n = int(A.size[1]), m = int(B.size[2]), square = Matrix<T>::size_of(n, n),
              flat = Matrix<T>::size_of(n, m);
    if (method == "bilinear") {
      dispatch_width(n, m, [&]<int WIDTH>() {
        const int numbers = n * ROW_PITCH<WIDTH> + EQUATIONS<WIDTH> + square + flat;
        start<bilinear<T, WIDTH>, T>(A.size[0], n, numbers, stream, A.as<T>(), B.as<T>(), delta.as<T>(), A_bar.as<T>(),
                                     B_bar.as<T>());
      });
    } else {
      const int of_foh = method == "foh" ? 2 * flat : 0;
      start<exponential<T>, T>(A.size[0], n, 3 * square + 3 * flat + of_foh, stream, A.as<T>(), B.as<T>(),
                               delta.as<T>(), A_bar.as<T>(), B_prev.as<T>(), B_bar.as<T>());
    }
  });
}

void discretize_matrix_backward(const std::string& method, Input<3> A, Input<3> B, Input<1> delta, Input<3> A_bar,
                                Input<3> B_bar, Input<3> g_A_bar, Input<3> g_B_prev, Input<3> g_B_bar, Output<3> dA,
                                Output<3> dB, Output<1> ddelta, Stream stream) {
  dispatch_wide(A.dtype, [&]<typename T>() {
    const int n = int(A.size[1]), m = int(B.size[2]), square = Matrix<T>::size_of(n, n);
    const int flat = Matrix<T>::size_of(n, m), wide = Matrix<T>::size_of(m, n);
    if (method == "bilinear") {
      dispatch_width(n, m, [&]<int WIDTH>() {
        const int numbers = n * ROW_PITCH<WIDTH> + EQUATIONS<WIDTH> + 3 * square + flat + wide;
        start<bilinear_backward<T, WIDTH>, T>(A.size[0], n, numbers, stream, A.as<T>(), B.as<T>(), delta.as<T>(),
                                              A_bar.as<T>(), B_bar.as<T>(), g_A_bar.as<T>(), g_B_bar.as<T>(),
                                              dA.as<T>(), dB.as<T>(), ddelta.as<T>());
      });
    } else {
      const int of_foh = method == "foh" ? 3 * flat + 2 * wide : 0;
      start<exponential_backward<T>, T>(A.size[0], n, 6 * square + 3 * flat + 3 * wide + of_foh, stream, A.as<T>(),
                                        B.as<T>(), delta.as<T>(), g_A_bar.as<T>(), g_B_prev.as<T>(), g_B_bar.as<T>(),
                                        dA.as<T>(), dB.as<T>(), ddelta.as<T>());
    }
  });
}
