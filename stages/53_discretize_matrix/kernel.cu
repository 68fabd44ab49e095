// Stage 53: discretization with a full matrix, solves and exponentials of many small matrices
//
// Problem   h' = A h + B u with a step dt, for each of a batch: A [n, n], n <= 32, B [n, m], z = dt A.
//             bilinear  A_bar = 2 M^-1 - 1, B_bar = dt M^-1 B, where M = 1 - z / 2
//             zoh, foh  A_bar = e^z; B_bar = dt phi_1 B, or B_prev = dt (phi_1 - phi_2) B and B_bar = dt phi_2 B
//           and the gradients of A, B and dt; phi_1 = 1 + z / 2! + z^2 / 3! + .., phi_2 = 1 / 2! + z / 3! + ..
// Before    Stage 50, whose A is diagonal. A library gives a small matrix a block of its own, or walks through memory
//           once for each product; a matrix of 16 x 16 fits into the registers of a few lanes.
// Idea      N lanes have a matrix, padded to N x N = 8, 16 or 32. They wait for nobody but each other, and between its
//           first word and its last nothing of it goes to memory. M is inverted by elimination, a lane a row. e^z is
//           products and nothing else: a series while |z| <= 0.7, and from there on from z to 2 z,
//             e^(2 z) = e^z e^z,  phi_1(2 z) = (e^z phi_1 + phi_1) / 2,  phi_2(2 z) = (e^z phi_2 + phi_2 + phi_1) / 4
//           Nothing is divided by A, which may be singular. The backward is the derivative of the same products.
// Mapping   block: a warp, 32 / N matrices. lane: in a product N / 4 rows x 4 columns; in memory a column.
// Cost      float32, m <= N, |z| from 1.4 to 2.4; n and m of 8, batch of 4: W = batch N / 32 warps. What is in memory
//           moves once: n (n + m) / 8 sectors a matrix are loaded, as many are stored, m twice with foh.
//             wavefronts of a warp  n (N + 16) / 8 loads a product, N a matrix that lanes add piece by piece, and
//                                   N stores a result; zoh: 10 products, 9 added, 11 stored, foh: 14, 14 and 15
//                                   bilinear: n (3 n + 8) / 4 loads, 4 n (3 n + 4) / N + n stores of pivot rows
//           and some for rows on their way from and to memory: all of it is `cost` in stage.py.
// Limits    A product of 16 x 16 reads a word of shared memory for two multiplications: both are busy. With m = 1 the
//           last one, by B, has N columns nevertheless.
// Run       python -m stages run 53

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/vector.h"
#include "common/view.h"

constexpr unsigned ALL = 0xffffffffu;

template <typename T>
constexpr int WIDE = 16 / int(sizeof(T));  // what a lane reads of shared memory at once

// The lanes of a matrix are a team. In a product lane (y, x) has the rows y, y + 4, .. and, WIDE at a time, four
// columns. Bits of x and y take turns, so that of two lanes that read at once one asks for what its neighbour asks for.
template <int N>
struct Team {
  int lane = threadIdx.x % N, number = threadIdx.x / N;
  int y = (lane & 1) | (lane >> 1 & 2), x = (lane >> 1 & 1) | lane >> 3 << 1;
  int64_t matrix = int64_t(blockIdx.x) * (32 / N) + number;

  template <typename T>
  __device__ int column(int c) const {
    return WIDE<T> * (x + N / 4 * (c / WIDE<T>)) + c % WIDE<T>;
  }
};

// A matrix in shared memory. Rows, and what follows a square of 8, lie so that what 16 lanes read is in other banks.
template <typename T, int N>
struct alignas(16) Square {
  T at[N][N + (N / WIDE<T> % 4 == 2 ? 0 : 2 * WIDE<T>)];
  T apart[(N == 8 ? 3 : 4) * WIDE<T>];
};

// What a lane has of a matrix, and sums up.
template <typename T, int N>
struct Piece {
  T at[N / 4][4] = {};

  // + a b, where a has `inner` columns; the same in every product, whatever it is for.
  __device__ __forceinline__ void multiply(const Team<N>& own, const Square<T, N>& a, const Square<T, N>& b,
                                           int inner) {
#pragma unroll 1
    for (int k = 0; k < inner; k += WIDE<T>) {
      Vector<T, WIDE<T>> rows[N / 4], cols[4 / WIDE<T>];
      UNROLL
      for (int i = 0; i < N / 4; ++i) rows[i] = load_vector<WIDE<T>>(&a.at[own.y + 4 * i][k]);
      UNROLL
      for (int j = 0; j < WIDE<T>; ++j) {
        UNROLL
        for (int c = 0; c < 4; c += WIDE<T>) {
          cols[c / WIDE<T>] = load_vector<WIDE<T>>(&b.at[k + j][own.template column<T>(c)]);
        }
        UNROLL
        for (int i = 0; i < N / 4; ++i) {
          UNROLL
          for (int c = 0; c < 4; ++c) at[i][c] += rows[i][j] * cols[c / WIDE<T>][c % WIDE<T>];
        }
      }
    }
  }

  // + factor a
  __device__ __forceinline__ void add(const Team<N>& own, T factor, const Square<T, N>& a) {
    UNROLL
    for (int i = 0; i < N / 4; ++i) {
      UNROLL
      for (int c = 0; c < 4; c += WIDE<T>) {
        const auto part = load_vector<WIDE<T>>(&a.at[own.y + 4 * i][own.template column<T>(c)]);
        UNROLL
        for (int j = 0; j < WIDE<T>; ++j) at[i][c + j] += factor * part[j];
      }
    }
  }

  __device__ __forceinline__ void scale(T factor) {
    UNROLL
    for (int i = 0; i < N / 4; ++i) {
      UNROLL
      for (int c = 0; c < 4; ++c) at[i][c] *= factor;
    }
  }

  // + factor 1
  __device__ __forceinline__ void add_identity(const Team<N>& own, T factor) {
    UNROLL
    for (int i = 0; i < N / 4; ++i) {
      UNROLL
      for (int c = 0; c < 4; ++c) at[i][c] += own.y + 4 * i == own.template column<T>(c) ? factor : 0;
    }
  }

  // factor times this into shared memory, in matrices where it is `wanted`.
  __device__ __forceinline__ void put(const Team<N>& own, Square<T, N>& to, T factor = 1, bool wanted = true) {
    __syncwarp();  // everyone has read what is overwritten
    UNROLL
    for (int i = 0; wanted && i < N / 4; ++i) {
      UNROLL
      for (int c = 0; c < 4; c += WIDE<T>) {
        Vector<T, WIDE<T>> part;
        UNROLL
        for (int j = 0; j < WIDE<T>; ++j) part[j] = factor * at[i][c + j];
        store_vector(&to.at[own.y + 4 * i][own.template column<T>(c)], part);
      }
    }
    __syncwarp();  // all is there before anyone reads
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Between memory and shared memory a lane has a column: neighbours lie side by side in both.

// A column of a matrix of the batch; zeros past its edges, and past the end of the batch.
template <typename T, int N>
struct Column {
  T at[N];

  __device__ __forceinline__ Column(const Team<N>& own, const View<const T, 3>& x, int64_t col0) {
    const int64_t col = col0 + own.lane;
    const bool inside = own.matrix < x.size[0] && col < x.size[2];
    const T* from = inside ? &x(own.matrix, 0, col) : x.data;
    UNROLL
    for (int r = 0; r < N; ++r, from += x.stride[1]) at[r] = inside && r < x.size[1] ? *from : 0;
  }

  __device__ __forceinline__ void subtract(const Column& other) {
    UNROLL
    for (int r = 0; r < N; ++r) at[r] -= other.at[r];
  }

  // factor times this into shared memory, as a column or, TURNED, as a row.
  template <bool TURNED>
  __device__ __forceinline__ void put(const Team<N>& own, Square<T, N>& to, T factor) {
    __syncwarp();  // everyone has read what is overwritten
    UNROLL
    for (int r = 0; r < N; ++r) (TURNED ? to.at[own.lane][r] : to.at[r][own.lane]) = factor * at[r];
    __syncwarp();  // all is there before anyone reads
  }
};

// factor a, less the identity where it is `reduced`, into memory, from column col0 on.
template <typename T, int N>
__device__ __forceinline__ void store(const Team<N>& own, const View<T, 3>& to, int64_t col0, const Square<T, N>& a,
                                      T factor, bool reduced = false) {
  const int64_t col = col0 + own.lane;
  if (own.matrix >= to.size[0] || col >= to.size[2]) return;
  T* place = &to(own.matrix, 0, col);
#pragma unroll 8
  for (int r = 0; r < to.size[1]; ++r, place += to.stride[1]) {
    *place = T(factor * a.at[r][own.lane] - T(reduced && r == own.lane));
  }
}

// What a lane's column gives to <a, x>.
template <typename T, int N>
__device__ __forceinline__ T product(const Team<N>& own, const View<const T, 3>& x, int64_t col0,
                                     const Square<T, N>& a) {
  const int64_t col = col0 + own.lane;
  if (own.matrix >= x.size[0] || col >= x.size[2]) return 0;
  const T* place = &x(own.matrix, 0, col);
  T sum = 0;
#pragma unroll 8
  for (int r = 0; r < x.size[1]; ++r, place += x.stride[1]) sum += a.at[r][own.lane] * T(*place);
  return sum;
}

// The sum over a team's lanes, for its first one.
template <typename T, int N>
__device__ __forceinline__ T sum_of_team(T value) {
  for (int flip = N / 2; flip; flip /= 2) value += __shfl_xor_sync(ALL, value, flip);
  return value;
}

// A team's step. Where z has an entry without a value the step has none, and neither has any result; `norm`, the largest
// sum of a column of |z|, is then 0.
template <typename T, int N>
__device__ __forceinline__ T step_of(const Team<N>& own, const View<const T, 1>& delta, const Column<T, N>& a,
                                     T& norm) {
  const T dt = own.matrix < delta.size[0] ? delta(own.matrix) : 0;
  norm = 0;
  UNROLL
  for (int r = 0; r < N; ++r) norm += std::abs(a.at[r]);
  norm *= std::abs(dt);
  for (int flip = N / 2; flip; flip /= 2) {
    const T other = __shfl_xor_sync(ALL, norm, flip);
    norm = max(norm, other) + 0 * (norm + other);  // NaN stays, and infinity becomes it
  }
  if (std::isfinite(norm)) return dt;
  norm = 0;
  return NAN;
}

// ---------------------------------------------------------------------------------------------------------------------
// How large an entry is, as a number whose lowest five bits are free. NaN is larger than infinity.
__device__ __forceinline__ unsigned magnitude(float x) { return __float_as_uint(std::abs(x)) & ~31u; }
__device__ __forceinline__ unsigned magnitude(double x) { return unsigned(__double2hiint(std::abs(x))) & ~31u; }

// M^-1, by Gauss and Jordan: of [M | 1] a lane has a row. In each step the row whose first entry is the largest of
// those that have not had their turn is taken out of all others, and all move on by a column. What is left of M is a
// pivot a row, and beside them is M^-1. Its error is that of an LU factorization, |M| |M^-1| roundings.
//
// A lane leaves the identity out of both its rows: in column r there is 1 more than it has. What a step takes from
// entries near 1 is often small, and would lose its last digits there, in each step once more.
// grid (ceil(batch N / 32)), block (32)
template <typename T, int N>
__global__ void __launch_bounds__(32) invert(View<const T, 3> A,      // [batch, n, n]
                                             View<const T, 3> B,      // [batch, n, m]
                                             View<const T, 1> delta,  // [batch]
                                             View<T, 3> A_bar,        // [batch, n, n]
                                             View<T, 3> B_bar,        // [batch, n, m]
                                             View<T, 3> inverse) {    // [batch, n, n], or empty
  constexpr int W = WIDE<T>;
  alignas(16) __shared__ Square<T, N> squares[32 / N], inputs[32 / N];
  alignas(16) __shared__ T pivot_rows[32 / N][2 * N + WIDE<T>];  // two that are read at once lie in other banks
  const Team<N> own;
  const int n = int(A.size[1]), r = own.lane;
  Square<T, N>&square = squares[own.number], &input = inputs[own.number];
  T* const line = pivot_rows[own.number];

  Column<T, N> column(own, A, 0);
  T norm;
  const T dt = step_of(own, delta, column, norm);
  column.template put<false>(own, square, dt / 2);
  T m[N], x[N];  // less the identity
  UNROLL
  for (int j = 0; j < N; j += W) {
    const auto part = load_vector<W>(&square.at[r][j]);
    UNROLL
    for (int i = 0; i < W; ++i) m[j + i] = -part[i], x[j + i] = 0;
  }

  T pivot = 1;
  int from = r;       // whose row will be this lane's
  bool waits = true;  // for the row's turn, which rows past n do not get: they have zeros where pivots would be
  for (int k = 0; k < n; ++k) {
    const T first = m[0] + T(r == k);
    unsigned best = waits ? magnitude(first) | (31u ^ unsigned(r)) : 0;  // of equal ones the first
    for (int flip = N / 2; flip; flip /= 2) best = max(best, __shfl_xor_sync(ALL, best, flip));
    const int chosen = int(31u ^ (best & 31u));
    if (r == k) from = chosen;
    const T of_chosen = __shfl_sync(ALL, first, chosen, N);
    if (r == chosen) {
      waits = false, pivot = first;
      UNROLL
      for (int j = 0; j < N; j += W) {
        Vector<T, W> of_m, of_x;
        UNROLL
        for (int i = 0; i < W; ++i) of_m[i] = m[j + i], of_x[i] = x[j + i];
        if (j < n - k) store_vector(&line[j], of_m);
        if (j < n) store_vector(&line[N + j], of_x);
      }
      if (r > k) line[r - k] += 1;  // others get it with the identity
      line[N + r] += 1;
    }
    __syncwarp();  // the row is there before anyone reads
    const T factor = r == chosen ? 0 : first / of_chosen;
    UNROLL
    for (int j = 0; j < N; j += W) {
      if (j < n - k) {  // of M this many columns are left
        const auto part = load_vector<W>(&line[j]);
        UNROLL
        for (int i = 0; i < W; ++i) {
          if (i + j) m[max(i + j - 1, 0)] = m[i + j] - factor * part[i];
        }
      }
      if (j < n) {
        const auto part = load_vector<W>(&line[N + j]);
        UNROLL
        for (int i = 0; i < W; ++i) x[i + j] -= factor * part[i];
      }
    }
    __syncwarp();  // everyone has read before the next row overwrites
  }

  // Rows in order: in step k the pivot was in column k.
  const T reciprocal = 1 / pivot;
  UNROLL
  for (int j = 0; j < N; j += W) {
    Vector<T, W> part;
    UNROLL
    for (int i = 0; i < W; ++i) part[i] = __shfl_sync(ALL, (x[j + i] + T(r == j + i)) * reciprocal, from, N);
    store_vector(&square.at[r][j], part);
  }
  __syncwarp();  // all rows are there
  store(own, A_bar, 0, square, T(2), true);
  store(own, inverse, 0, square, T(1));
  for (int64_t col0 = 0; col0 < B.size[2]; col0 += N) {
    Column<T, N>(own, B, col0).template put<false>(own, input, dt);
    Piece<T, N> sum;
    sum.multiply(own, square, input, n);
    sum.put(own, input);
    store(own, B_bar, col0, input, T(1));
  }
}

// With V = M^-T dB_bar and S = (M^-T dA_bar + dt / 2 V B^T) M^-T:  dA = dt S,  dB = dt V,  ddt = <S, A> + <V, B>.
// grid (ceil(batch N / 32)), block (32)
template <typename T, int N>
__global__ void __launch_bounds__(32) invert_backward(View<const T, 3> dA_bar,   // [batch, n, n]
                                                      View<const T, 3> dB_bar,   // [batch, n, m]
                                                      View<const T, 3> A,        // [batch, n, n]
                                                      View<const T, 3> B,        // [batch, n, m]
                                                      View<const T, 1> delta,    // [batch]
                                                      View<const T, 3> inverse,  // [batch, n, n]
                                                      View<T, 3> dA,             // [batch, n, n]
                                                      View<T, 3> dB,             // [batch, n, m]
                                                      View<T, 1> ddelta) {       // [batch]
  alignas(16) __shared__ Square<T, N> inverses[32 / N], lefts[32 / N], rights[32 / N];
  const Team<N> own;
  const int n = int(A.size[1]);
  const T dt = own.matrix < delta.size[0] ? delta(own.matrix) : 0;
  Square<T, N>&turned = inverses[own.number], &left = lefts[own.number], &right = rights[own.number];

  Column<T, N>(own, inverse, 0).template put<true>(own, turned, 1);
  Column<T, N>(own, dA_bar, 0).template put<false>(own, left, 1);
  Piece<T, N> sum;
  sum.multiply(own, turned, left, n);
  T of_step = 0;
  for (int64_t col0 = 0; col0 < B.size[2]; col0 += N) {
    Column<T, N>(own, dB_bar, col0).template put<false>(own, left, 1);
    Piece<T, N> v;
    v.multiply(own, turned, left, n);
    v.put(own, left);
    store(own, dB, col0, left, dt);
    of_step += product(own, B, col0, left);
    Column<T, N>(own, B, col0).template put<true>(own, right, dt / 2);
    sum.multiply(own, left, right, int(min(B.size[2] - col0, int64_t(N))));
  }
  sum.put(own, left);
  Piece<T, N> s;
  s.multiply(own, left, turned, n);
  s.put(own, left);
  store(own, dA, 0, left, dt);
  of_step = sum_of_team<T, N>(of_step + product(own, A, 0, left));
  if (own.lane == 0 && own.matrix < ddelta.size[0]) ddelta(own.matrix) = T(of_step);
}

// ---------------------------------------------------------------------------------------------------------------------
// Up to which 1-norm of z the series of phi_1, cut after z^(3 blocks), has a derivative without an error that shows.
template <typename T>
constexpr int BLOCKS = sizeof(T) == 8 ? 5 : 3;
template <typename T>
__host__ __device__ constexpr T largest_norm(int blocks) {
  constexpr double IN_FLOAT[] = {0.0067, 0.2, 0.7}, IN_DOUBLE[] = {8e-6, 0.007, 0.075, 0.27, 0.6};
  return T(sizeof(T) == 8 ? IN_DOUBLE[blocks - 1] : IN_FLOAT[blocks - 1]);
}

// How a team finds its exponential: for z 2^-doublings by a series of so many blocks, and then from z to 2 z. Teams of
// a warp go through the most that one of them needs, and each has the result that it would have alone.
template <typename T, int N>
struct Course {
  T dt, scale = 1;  // scale: 2^-doublings
  int blocks = 1, doublings = 0, most_blocks, most_doublings;

  __device__ __forceinline__ Course(const Team<N>& own, const View<const T, 1>& delta, const Column<T, N>& a) {
    T norm;
    dt = step_of(own, delta, a, norm);
    const T fraction = std::frexp(norm, &doublings);
    doublings = max(doublings + (fraction > largest_norm<T>(BLOCKS<T>)), 0);
    scale = std::ldexp(T(1), -doublings);
    for (int b = BLOCKS<T> - 1; b; --b) blocks += norm * scale > largest_norm<T>(b);
    most_blocks = blocks, most_doublings = doublings;
    for (int flip = 16; flip; flip /= 2) {
      most_blocks = max(most_blocks, __shfl_xor_sync(ALL, most_blocks, flip));
      most_doublings = max(most_doublings, __shfl_xor_sync(ALL, most_doublings, flip));
    }
  }
};

// The coefficients of phi_first, 1 / (j + first)!, from the highest on; 0 beyond a team's own degree.
template <typename T>
struct Coefficients {
  int j, degree, first;
  T factorial = 1;

  __device__ Coefficients(int most_blocks, int blocks, int first)
      : j(3 * most_blocks + 1), degree(3 * blocks), first(first) {
    for (int i = 2; i <= degree + first; ++i) factorial *= T(i);  // exact, and so are the quotients below
  }
  __device__ T next() {
    --j;
    if (j < degree) factorial /= T(j + 1 + first);
    return j > degree ? 0 : 1 / factorial;
  }
};

// to = 1 + z phi: from phi_2 to phi_1, from phi_1 to e^z. Also where `to` is z.
template <typename T, int N>
__device__ __forceinline__ void raise(const Team<N>& own, Square<T, N>& to, const Square<T, N>& z,
                                      const Square<T, N>& phi, int n) {
  Piece<T, N> sum;
  sum.multiply(own, z, phi, n);
  sum.add_identity(own, 1);
  sum.put(own, to);
}

// phi_1 and, with a ramp, phi_2 of 2 z, from e^z and those of z.
template <typename T, int N>
__device__ __forceinline__ void double_phi(const Team<N>& own, const Square<T, N>& e, Square<T, N>& phi_1,
                                           Square<T, N>& phi_2, int n, bool ramp, bool wanted) {
  if (ramp) {
    Piece<T, N> sum;
    sum.multiply(own, e, phi_2, n);
    sum.add(own, 1, phi_2);
    sum.add(own, 1, phi_1);
    sum.put(own, phi_2, T(0.25), wanted);
  }
  Piece<T, N> sum;
  sum.multiply(own, e, phi_1, n);
  sum.add(own, 1, phi_1);
  sum.put(own, phi_1, T(0.5), wanted);
}

// grid (ceil(batch N / 32)), block (32)
template <typename T, int N>
__global__ void __launch_bounds__(32) exponentiate(View<const T, 3> A,      // [batch, n, n]
                                                   View<const T, 3> B,      // [batch, n, m]
                                                   View<const T, 1> delta,  // [batch]
                                                   View<T, 3> A_bar,        // [batch, n, n]
                                                   View<T, 3> B_prev,  // [batch, n, m], but for foh the same as B_bar
                                                   View<T, 3> B_bar,   // [batch, n, m]
                                                   bool ramp) {        // foh
  using Part = Piece<T, N>;
  using Tile = Square<T, N>;
  DYNAMIC_SHARED(Tile, squares);
  const auto place = [&](int i) -> Tile& { return squares[i * (32 / N) + threadIdx.x / N]; };
  const Team<N> own;
  const int n = int(A.size[1]);
  Column<T, N> column(own, A, 0);
  const Course<T, N> course(own, delta, column);

  // phi_2, or without a ramp phi_1, by its series, three powers at a time.
  Tile &z = place(0), &squared = place(1), &cubed = place(2), &series = place(3);
  column.template put<false>(own, z, course.dt * course.scale);
  Part power;
  power.multiply(own, z, z, n);
  power.put(own, squared);
  power = {};
  power.multiply(own, z, squared, n);
  power.put(own, cubed);
  Coefficients<T> coefficients(course.most_blocks, course.blocks, ramp ? 2 : 1);
  Part sum;
  sum.add(own, coefficients.next(), cubed);
  for (int block = course.most_blocks - 1; block >= 0; --block) {
    sum.add(own, coefficients.next(), squared);
    sum.add(own, coefficients.next(), z);
    sum.add_identity(own, coefficients.next());
    sum.put(own, series);
    sum = {};
    if (block) sum.multiply(own, series, cubed, n);
  }

  // phi_1 = 1 + z phi_2 and e^z = 1 + z phi_1
  Tile &e = z, &phi_2 = series, &phi_1 = ramp ? cubed : series, &input = squared;
  if (ramp) raise(own, phi_1, z, phi_2, n);
  raise(own, e, z, phi_1, n);

  for (int turn = 0; turn < course.most_doublings; ++turn) {
    const bool wanted = turn < course.doublings;
    Part of_e;
    double_phi(own, e, phi_1, phi_2, n, ramp, wanted);
    of_e.multiply(own, e, e, n);
    of_e.put(own, e, 1, wanted);
  }

  store(own, A_bar, 0, e, T(1));
  for (int64_t col0 = 0; col0 < B.size[2]; col0 += N) {
    Column<T, N>(own, B, col0).template put<false>(own, input, course.dt);
    Part one, two;
    one.multiply(own, phi_1, input, n);
    if (ramp) {
      two.multiply(own, phi_2, input, n);
      two.put(own, input);
      store(own, B_bar, col0, input, T(1));
      one.add(own, -1, input);
    }
    one.put(own, e);
    store(own, B_prev, col0, e, T(1));
  }
}

// The transpose of z takes the place of z. Let G, G_1 and G_2 be the gradients of e^z, phi_1 and phi_2. What they give
// to z in a part t of the step, at first t = 2^-doublings, is t a; besides, b = phi_1 G_1 + t phi_2 G_2 and
// c = t phi_1 G_2. While t doubles, before e, phi_1 and phi_2 follow,
//
//     a <- (e a + a e + t (b phi_1 + c phi_2)) / 2        b <- (e b + b + c) / 2        c <- e c + c
//
// At the start L_k(H), what H gives to z through the series of phi_k, comes from that of the highest one alone, as
// phi_(k - 1) = 1 + z phi_k:  L_0(H) = H phi_1 + L_1(z H) and L_1(H) = H phi_2 + L_2(z H).  With H_1 = z G + t G_1
//
//     zoh  a = G phi_1 + L_1(H_1)        foh  a = G phi_1 + H_1 phi_2 + L_2(z H_1 + t^2 G_2)
//
// grid (ceil(batch N / 32)), block (32)
template <typename T, int N>
__global__ void __launch_bounds__(32)
    exponentiate_backward(View<const T, 3> dA_bar,   // [batch, n, n]
                          View<const T, 3> dB_prev,  // [batch, n, m], but for foh the same as dB_bar
                          View<const T, 3> dB_bar,   // [batch, n, m]
                          View<const T, 3> A,        // [batch, n, n]
                          View<const T, 3> B,        // [batch, n, m]
                          View<const T, 1> delta,    // [batch]
                          View<T, 3> dA,             // [batch, n, n]
                          View<T, 3> dB,             // [batch, n, m]
                          View<T, 1> ddelta,         // [batch]
                          bool ramp) {               // foh
  using Part = Piece<T, N>;
  using Tile = Square<T, N>;
  DYNAMIC_SHARED(Tile, squares);
  const auto place = [&](int i) -> Tile& { return squares[i * (32 / N) + threadIdx.x / N]; };
  Tile &z = place(0), &squared = place(1), &cubed = place(2), &series = place(3);
  Tile &h = place(4), &dsquared = place(5), &dcubed = place(6), &dseries = place(7);
  Tile &b = place(8), &c = place(9), &h_1 = ramp ? place(10) : h;
  Tile &e = z, &phi_2 = series, &phi_1 = ramp ? cubed : series, &a = dseries;
  const Team<N> own;
  const int n = int(A.size[1]);
  Column<T, N> column(own, A, 0);
  const Course<T, N> course(own, delta, column);
  T t = course.scale;
  column.template put<true>(own, z, course.dt * course.scale);

  // Gradients of dt phi_1 B and dt phi_2 B: as foh has B_prev = dt (phi_1 - phi_2) B, the latter is a difference.
  const auto of_phi_1 = [&](int64_t col0) { return Column<T, N>(own, dB_prev, col0); };
  const auto of_phi_2 = [&](int64_t col0) {
    Column<T, N> grad(own, dB_bar, col0);
    grad.subtract(of_phi_1(col0));
    return grad;
  };
  const auto gather = [&](Tile& to, T factor, const auto& of_phi) {
    Part sum;
    for (int64_t col0 = 0; col0 < B.size[2]; col0 += N) {
      of_phi(col0).template put<false>(own, dsquared, course.dt);
      Column<T, N>(own, B, col0).template put<true>(own, dcubed, 1);
      sum.multiply(own, dsquared, dcubed, int(min(B.size[2] - col0, int64_t(N))));
    }
    sum.put(own, to, factor);
  };
  gather(b, 1, of_phi_1);            // G_1, until it is b
  if (ramp) gather(c, t, of_phi_2);  // t G_2, until it is c

  // to = factor a + x y, and to = factor a + x y + u v
  const auto combine = [&](Tile& to, T factor, const Tile& a, const Tile& x, const Tile& y) {
    Part sum;
    sum.add(own, factor, a);
    sum.multiply(own, x, y, n);
    sum.put(own, to);
  };
  Column<T, N>(own, dA_bar, 0).template put<false>(own, dsquared, 1);
  combine(h_1, t, b, z, dsquared);
  if (ramp) combine(h, t, c, z, h_1);

  // The series of the forward, and its derivative in the direction of h.
  const auto multiply = [&](Tile& to, const Tile& x, const Tile& y) {
    Part sum;
    sum.multiply(own, x, y, n);
    sum.put(own, to);
  };
  const auto derive = [&](Tile& to, const Tile& x, const Tile& dx, const Tile& y, const Tile& dy) {
    Part sum;
    sum.multiply(own, x, dy, n);
    sum.multiply(own, dx, y, n);
    sum.put(own, to);
  };
  multiply(squared, z, z);
  multiply(cubed, z, squared);
  derive(dsquared, z, h, z, h);
  derive(dcubed, z, h, squared, dsquared);
  Coefficients<T> coefficients(course.most_blocks, course.blocks, ramp ? 2 : 1);
  const T highest = coefficients.next();
  for (int block = course.most_blocks - 1; block >= 0; --block) {
    const bool first = block == course.most_blocks - 1;
    const T of_square = coefficients.next(), of_z = coefficients.next(), of_identity = coefficients.next();
    Part derivative, sum;
    if (first) {
      derivative.add(own, highest, dcubed);
    } else {
      derivative.multiply(own, series, dcubed, n);
      derivative.multiply(own, dseries, cubed, n);
    }
    derivative.add(own, of_square, dsquared);
    derivative.add(own, of_z, h);
    derivative.put(own, dseries);
    if (first) sum.add(own, highest, cubed);
    else sum.multiply(own, series, cubed, n);
    sum.add(own, of_square, squared);
    sum.add(own, of_z, z);
    sum.add_identity(own, of_identity);
    sum.put(own, series);
  }

  if (ramp) {
    raise(own, phi_1, z, phi_2, n);
    combine(a, 1, a, h_1, phi_2);
    derive(b, phi_1, phi_2, c, b);  // phi_1 b + phi_2 c
    multiply(c, phi_1, c);
  } else {
    multiply(b, phi_1, b);
  }
  Tile& gradient = dsquared;  // once more
  Column<T, N>(own, dA_bar, 0).template put<false>(own, gradient, 1);
  combine(a, 1, a, gradient, phi_1);
  raise(own, e, z, phi_1, n);

  for (int turn = 0; turn < course.most_doublings; ++turn, t *= 2) {
    const bool wanted = turn < course.doublings;
    Part of_a, of_b, of_e;
    of_a.multiply(own, b, phi_1, n);
    if (ramp) of_a.multiply(own, c, phi_2, n);
    of_a.scale(t);
    of_a.multiply(own, e, a, n);
    of_a.multiply(own, a, e, n);
    of_a.put(own, a, T(0.5), wanted);
    of_b.add(own, 1, b);
    if (ramp) of_b.add(own, 1, c);
    of_b.multiply(own, e, b, n);
    of_b.put(own, b, T(0.5), wanted);
    if (ramp) {
      Part of_c;
      of_c.add(own, 1, c);
      of_c.multiply(own, e, c, n);
      of_c.put(own, c, 1, wanted);
    }
    double_phi(own, e, phi_1, phi_2, n, ramp, wanted);
    of_e.multiply(own, e, e, n);
    of_e.put(own, e, 1, wanted);
  }

  // With V = phi_1 dB_bar or, for foh, of both:  dA = dt a,  dB = dt V,  ddt = <a, A> + <V, B>
  store(own, dA, 0, a, course.dt);
  T of_step = product(own, A, 0, a);
  for (int64_t col0 = 0; col0 < B.size[2]; col0 += N) {
    Part v;
    of_phi_1(col0).template put<false>(own, gradient, 1);
    v.multiply(own, phi_1, gradient, n);
    if (ramp) {
      of_phi_2(col0).template put<false>(own, gradient, 1);
      v.multiply(own, phi_2, gradient, n);
    }
    v.put(own, gradient);
    store(own, dB, col0, gradient, course.dt);
    of_step += product(own, B, col0, gradient);
  }
  of_step = sum_of_team<T, N>(of_step);
  if (own.lane == 0 && own.matrix < ddelta.size[0]) ddelta(own.matrix) = T(of_step);
}

// ---------------------------------------------------------------------------------------------------------------------
// body<T, N>() with the type and the least N that n fits into.
template <typename Body>
void dispatch(const Input<3>& A, Body&& body) {
  const int64_t n = A.size[1];
  if (n > 32) throw std::invalid_argument("A has " + std::to_string(n) + " rows; allowed: at most 32");
  const auto with_size = [&]<typename T>() {
    if (n > 16) body.template operator()<T, 32>();
    else if (n > 8) body.template operator()<T, 16>();
    else body.template operator()<T, 8>();
  };
  if (A.dtype == DType::float32) return with_size.template operator()<float>();
#if !defined(FLOAT_ONLY)
  if (A.dtype == DType::float64) return with_size.template operator()<double>();
#endif
  throw std::invalid_argument(std::string("this kernel does not take ") + name_of(A.dtype));
}

// A warp has 32 / N matrices.
template <int N>
Grid warps(const Input<1>& delta) {
  return {ceil_div(delta.size[0], 32 / N)};
}

void bilinear(Input<3> A, Input<3> B, Input<1> delta, Output<3> A_bar, Output<3> B_bar, Output<3> inverse,
              Stream stream) {
  dispatch(A, [&]<typename T, int N>() {
    launch<invert<T, N>>(warps<N>(delta), dim3(32), 0, stream, A.as<T>(), B.as<T>(), delta.as<T>(), A_bar.as<T>(),
                         B_bar.as<T>(), inverse.as<T>());
  });
}

void bilinear_backward(Input<3> dA_bar, Input<3> dB_bar, Input<3> A, Input<3> B, Input<1> delta, Input<3> inverse,
                       Output<3> dA, Output<3> dB, Output<1> ddelta, Stream stream) {
  dispatch(A, [&]<typename T, int N>() {
    launch<invert_backward<T, N>>(warps<N>(delta), dim3(32), 0, stream, dA_bar.as<T>(), dB_bar.as<T>(), A.as<T>(),
                                  B.as<T>(), delta.as<T>(), inverse.as<T>(), dA.as<T>(), dB.as<T>(), ddelta.as<T>());
  });
}

void exponential(Input<3> A, Input<3> B, Input<1> delta, Output<3> A_bar, Output<3> B_prev, Output<3> B_bar, bool ramp,
                 Stream stream) {
  const Output<3>& of_phi_1 = ramp ? B_prev : B_bar;
  dispatch(A, [&]<typename T, int N>() {
    launch<exponentiate<T, N>>(warps<N>(delta), dim3(32), 4 * 32 / N * sizeof(Square<T, N>), stream, A.as<T>(),
                               B.as<T>(), delta.as<T>(), A_bar.as<T>(), of_phi_1.as<T>(), B_bar.as<T>(), ramp);
  });
}

void exponential_backward(Input<3> dA_bar, Input<3> dB_prev, Input<3> dB_bar, Input<3> A, Input<3> B, Input<1> delta,
                          Output<3> dA, Output<3> dB, Output<1> ddelta, bool ramp, Stream stream) {
  const Input<3>& of_phi_1 = ramp ? dB_prev : dB_bar;
  dispatch(A, [&]<typename T, int N>() {
    const size_t squares = (ramp ? 11 : 9) * 32 / N;
    launch<exponentiate_backward<T, N>>(warps<N>(delta), dim3(32), squares * sizeof(Square<T, N>), stream,
                                        dA_bar.as<T>(), of_phi_1.as<T>(), dB_bar.as<T>(), A.as<T>(), B.as<T>(),
                                        delta.as<T>(), dA.as<T>(), dB.as<T>(), ddelta.as<T>(), ramp);
  });
}
