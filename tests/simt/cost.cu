// What the CPU device costs: two products of 16 x 16 blocks, as kernels and as plain loops by the same compiler, and
// kernels that do nothing but start and wait. stages/toolkit/device_cost.py measures them.
#include <thread>
#include <vector>

#include "common/device.h"
#include "common/launch.h"
#include "common/view.h"

constexpr int TILE = 16;
constexpr int THREADS = 256;

// ---- kernels --------------------------------------------------------------------------------------------------------
// Sizes are multiples of TILE here; matrices are row-major, as the plain loops have them.
// grid (columns / TILE, rows / TILE), block (TILE, TILE)
__global__ void naive_kernel(const float* a, const float* b, float* c, int n) {
  const int row = blockIdx.y * TILE + threadIdx.y, col = blockIdx.x * TILE + threadIdx.x;
  float sum = 0;
  for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + col];
  c[row * n + col] = sum;
}

__global__ void tiled_kernel(const float* a, const float* b, float* c, int n) {
  __shared__ float a_tile[TILE][TILE], b_tile[TILE][TILE];
  const int x = threadIdx.x, y = threadIdx.y, row = blockIdx.y * TILE + y, col = blockIdx.x * TILE + x;
  float sum = 0;
  for (int k0 = 0; k0 < n; k0 += TILE) {
    a_tile[y][x] = a[row * n + k0 + x];
    b_tile[y][x] = b[(k0 + y) * n + col];
    __syncthreads();
    for (int k = 0; k < TILE; ++k) sum += a_tile[y][k] * b_tile[k][x];
    __syncthreads();
  }
  c[row * n + col] = sum;
}

__global__ void waiting_kernel(int barriers) {
  for (int i = 0; i < barriers; ++i) __syncthreads();
}

// ---- plain loops ----------------------------------------------------------------------------------------------------
void naive_rows(const float* a, const float* b, float* c, int n, int first, int last) {
  for (int row = first; row < last; ++row) {
    for (int col = 0; col < n; ++col) {
      float sum = 0;
      for (int k = 0; k < n; ++k) sum += a[row * n + k] * b[k * n + col];
      c[row * n + col] = sum;
    }
  }
}

void tiled_rows(const float* a, const float* b, float* c, int n, int first, int last) {
  float a_tile[TILE][TILE], b_tile[TILE][TILE];
  for (int row0 = first; row0 < last; row0 += TILE) {
    for (int col0 = 0; col0 < n; col0 += TILE) {
      float sum[TILE][TILE] = {};
      for (int k0 = 0; k0 < n; k0 += TILE) {
        for (int y = 0; y < TILE; ++y) {
          for (int x = 0; x < TILE; ++x) {
            a_tile[y][x] = a[(row0 + y) * n + k0 + x];
            b_tile[y][x] = b[(k0 + y) * n + col0 + x];
          }
        }
        for (int y = 0; y < TILE; ++y) {
          for (int k = 0; k < TILE; ++k) {
            for (int x = 0; x < TILE; ++x) sum[y][x] += a_tile[y][k] * b_tile[k][x];
          }
        }
      }
      for (int y = 0; y < TILE; ++y) {
        for (int x = 0; x < TILE; ++x) c[(row0 + y) * n + col0 + x] = sum[y][x];
      }
    }
  }
}

// ---- launchers ------------------------------------------------------------------------------------------------------
struct Product {
  const float *a, *b;
  float* c;
  int n;
  Product(const Input<2>& a, const Input<2>& b, const Output<2>& c)
      : a(a.as<float>().data), b(b.as<float>().data), c(c.as<float>().data), n(int(c.size[0])) {}
};

void naive(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const Product p(a, b, c);
  launch<naive_kernel>({p.n / TILE, p.n / TILE}, dim3(TILE, TILE), 0, stream, p.a, p.b, p.c, p.n);
}

void tiled(Input<2> a, Input<2> b, Output<2> c, Stream stream) {
  const Product p(a, b, c);
  launch<tiled_kernel>({p.n / TILE, p.n / TILE}, dim3(TILE, TILE), 0, stream, p.a, p.b, p.c, p.n);
}

void waiting(int64_t blocks, int64_t barriers, Stream stream) {
  launch<waiting_kernel>({blocks}, dim3(THREADS), 0, stream, int(barriers));
}

// The loops on some cores, a stretch of rows for each.
void plain(const std::string& loops, Input<2> a, Input<2> b, Output<2> c, int64_t cores, Stream) {
  const Product p(a, b, c);
  const auto rows = loops == "naive" ? naive_rows : tiled_rows;
  const auto begin = [&](int64_t core) { return int(p.n / TILE * core / cores * TILE); };
  std::vector<std::thread> others;
  for (int64_t core = 1; core < cores; ++core) {
    others.emplace_back(rows, p.a, p.b, p.c, p.n, begin(core), begin(core + 1));
  }
  rows(p.a, p.b, p.c, p.n, 0, begin(1));
  for (std::thread& other : others) other.join();
}
