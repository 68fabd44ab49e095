// Correct kernels of one warp that use ldmatrix and mma.sync. They also compile with nvcc.
#include "common/device.h"
#include "common/launch.h"
#include "common/mma.h"
#include "common/numeric.h"
#include "common/view.h"

using In = View<const float, 1>;
using Out = View<float, 1>;

template <typename T>
__device__ uint32_t bits_of(T value) {
  return reinterpret_cast<const uint16_t&>(value);
}
// What a register holds of one value (Tf32) or of two neighbours along k, `step` apart.
template <typename T>
__device__ uint32_t packed(const float* from, int step) {
  if constexpr (std::is_same_v<T, Tf32>) return reinterpret_cast<const uint32_t&>(from[0]);
  else return bits_of(T(from[0])) | bits_of(T(from[step])) << 16;
}

// x: A [16][K] and B [K][8], y: D [16][8], twice: A B + 1. The fragments are filled from the layout in mma.h.
template <typename T, int K>
__global__ void product(In x, Out y) {
  constexpr int EACH = std::is_same_v<T, Tf32> ? 1 : 2;  // values a register
  const float *a_matrix = &x(0), *b_matrix = &x(16 * K);
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  uint32_t a[4], b[2];
  for (int i = 0; i < 4; ++i) a[i] = packed<T>(a_matrix + (g + 8 * (i % 2)) * K + EACH * (t + 4 * (i / 2)), 1);
  for (int i = 0; i < 2; ++i) b[i] = packed<T>(b_matrix + EACH * (t + 4 * i) * 8 + g, 8);
  float d[4] = {1, 1, 1, 1};
  mma<T>(d, a, b);
  for (int i = 0; i < 4; ++i) y((g + 8 * (i / 2)) * 8 + 2 * t + i % 2) = d[i];
}

__global__ void product_of_doubles(In x, Out y) {
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  double a[4], b[2], d[4] = {1, 1, 1, 1};
  for (int i = 0; i < 4; ++i) a[i] = x((g + 8 * (i % 2)) * 8 + t + 4 * (i / 2));
  for (int i = 0; i < 2; ++i) b[i] = x(16 * 8 + (t + 4 * i) * 8 + g);
  mma(d, a, b);
  for (int i = 0; i < 4; ++i) y((g + 8 * (i / 2)) * 8 + 2 * t + i % 2) = float(d[i]);
}

// The same from shared memory by ldmatrix: A by rows, B by rows and transposed on the way.
template <typename T>
__global__ void product_from_shared(In x, Out y) {
  __shared__ __align__(16) T a_tile[16][16], b_tile[16][8];
  const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
  for (int i = lane; i < 256; i += 32) a_tile[i / 16][i % 16] = T(x(i));
  for (int i = lane; i < 128; i += 32) b_tile[i / 8][i % 8] = T(x(256 + i));
  __syncwarp();
  uint32_t a[4], b[2];
  load_matrices(a, &a_tile[lane % 16][lane / 16 * 8]);
  load_matrices_transposed(b, &b_tile[lane % 16][0]);
  float d[4] = {1, 1, 1, 1};
  mma<T>(d, a, b);
  for (int i = 0; i < 4; ++i) y((g + 8 * (i / 2)) * 8 + 2 * t + i % 2) = d[i];
}

// x: for each lane the number of its row of 16 bytes; the values of two bytes are their own numbers. y: both values of
// each register, [register][lane][2].
template <int COUNT, bool TRANSPOSED>
__global__ void gather(In x, Out y) {
  __shared__ __align__(128) uint16_t rows[256][8];
  const int lane = threadIdx.x;
  for (int i = lane; i < 2048; i += 32) rows[i / 8][i % 8] = uint16_t(i);
  __syncwarp();
  const void* row = int(x(lane)) < 0 ? nullptr : &rows[int(x(lane))];
  uint32_t fragment[COUNT];
  if constexpr (TRANSPOSED) load_matrices_transposed(fragment, row);
  else load_matrices(fragment, row);
  for (int i = 0; i < COUNT; ++i) {
    y((i * 32 + lane) * 2) = float(fragment[i] & 0xffff);
    y((i * 32 + lane) * 2 + 1) = float(fragment[i] >> 16);
  }
}

__global__ void rounded(In x, Out y) {
  const uint32_t bits = to_tf32(x(threadIdx.x));
  reinterpret_cast<uint32_t&>(y(threadIdx.x)) = bits;
}

void run(const std::string& name, Input<1> x_any, Output<1> y_any, int64_t threads, Stream stream) {
  const In x = x_any.as<float>();
  const Out y = y_any.as<float>();
  const auto go = [&]<auto Kernel>() { launch<Kernel>({1}, dim3(unsigned(threads)), 0, stream, x, y); };
#define KERNEL(key, ...) \
  if (name == key) return go.operator()<__VA_ARGS__>()
  KERNEL("half", product<half, 16>);
  KERNEL("bfloat16", product<bfloat16, 16>);
  KERNEL("tf32", product<Tf32, 8>);
  KERNEL("double", product_of_doubles);
  KERNEL("shared_half", product_from_shared<half>);
  KERNEL("shared_bfloat16", product_from_shared<bfloat16>);
  KERNEL("gather_4", gather<4, false>);
  KERNEL("gather_2", gather<2, false>);
  KERNEL("gather_4_transposed", gather<4, true>);
  KERNEL("gather_2_transposed", gather<2, true>);
  KERNEL("rounded", rounded);
  throw std::invalid_argument("no kernel " + name);
}
