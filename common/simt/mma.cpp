// ldmatrix and mma.sync on the CPU device: the lanes of a warp meet, then one of them does the work of all.
#include "common/mma.h"

#include "common/simt/runtime.h"

namespace simt {
namespace {

constexpr unsigned WARP = 0xffffffffu;

// Meets all lanes of the warp. Lanes that have returned, or that the block does not have, are no part of `met` then.
template <typename Argument>
void meet_warp(WarpOperation operation, Argument& argument, const char* without, const char* what, const char* file,
               int line) {
  meet(WARP, operation, &argument, what, file, line);
  if (argument.met != WARP) trap(without, file, line);
}

// ---- ldmatrix -----------------------------------------------------------------------------------------------------
struct Rows {
  uint32_t* fragment;
  const void* row;
  unsigned met = 0;
};

template <int COUNT, bool TRANSPOSED>
void load_all(void* const* arguments, unsigned mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) static_cast<Rows*>(arguments[lane])->met = mask;
  }
  if (mask != WARP) return;
  for (int i = 0; i < COUNT; ++i) {
    uint16_t matrix[8][8];
    for (int row = 0; row < 8; ++row) std::memcpy(matrix[row], static_cast<Rows*>(arguments[8 * i + row])->row, 16);
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = 2 * (lane % 4);
      const uint32_t low = TRANSPOSED ? matrix[t][g] : matrix[g][t];
      const uint32_t high = TRANSPOSED ? matrix[t + 1][g] : matrix[g][t + 1];
      static_cast<Rows*>(arguments[lane])->fragment[i] = low | high << 16;
    }
  }
}

// ---- mma.sync -----------------------------------------------------------------------------------------------------
struct Factors {
  float* d;
  const uint32_t *a, *b;
  unsigned met = 0;
};

// The two values that a register packs.
template <Factor FACTOR>
float first(uint32_t bits) {
  return FACTOR == Factor::half ? half_to_float(uint16_t(bits)) : std::bit_cast<float>(bits << 16);
}
template <Factor FACTOR>
float second(uint32_t bits) {
  return FACTOR == Factor::half ? half_to_float(uint16_t(bits >> 16)) : std::bit_cast<float>(bits & 0xffff0000u);
}

template <Factor FACTOR>
void multiply_all(void* const* arguments, unsigned mask) {
  constexpr int K = FACTOR == Factor::tf32 ? 8 : 16;
  Factors* lanes[32];
  for (int lane = 0; lane < 32; ++lane) {
    lanes[lane] = static_cast<Factors*>(arguments[lane]);
    if (lanes[lane]) lanes[lane]->met = mask;
  }
  if (mask != WARP) return;
  alignas(32) float a[16][K], b[K][8], d[16][8];
  for (int lane = 0; lane < 32; ++lane) {
    const Factors& own = *lanes[lane];
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      const int row = g + 8 * (i % 2), k = 4 * (i / 2) + t;
      if constexpr (FACTOR == Factor::tf32) a[row][k] = std::bit_cast<float>(own.a[i] & 0xffffe000u);
      else a[row][2 * k] = first<FACTOR>(own.a[i]), a[row][2 * k + 1] = second<FACTOR>(own.a[i]);
      d[g + 8 * (i / 2)][2 * t + i % 2] = own.d[i];
    }
    for (int i = 0; i < 2; ++i) {
      const int k = 4 * i + t;
      if constexpr (FACTOR == Factor::tf32) b[k][g] = std::bit_cast<float>(own.b[i] & 0xffffe000u);
      else b[2 * k][g] = first<FACTOR>(own.b[i]), b[2 * k + 1][g] = second<FACTOR>(own.b[i]);
    }
  }
  typedef float Row
      __attribute__((vector_size(32), may_alias));  // left alone, g++ picks the wrong loop for its vectors
  Row* const d_rows = reinterpret_cast<Row*>(d);
  const Row* const b_rows = reinterpret_cast<const Row*>(b);
  for (int row = 0; row < 16; ++row) {
    Row sum = d_rows[row];
    for (int k = 0; k < K; ++k) sum += a[row][k] * b_rows[k];
    d_rows[row] = sum;
  }
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4; ++i) lanes[lane]->d[i] = d[lane / 4 + 8 * (i / 2)][2 * (lane % 4) + i % 2];
  }
}

struct Doubles {
  double* d;
  const double *a, *b;
  unsigned met = 0;
};

void multiply_doubles(void* const* arguments, unsigned mask) {
  for (int lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) static_cast<Doubles*>(arguments[lane])->met = mask;
  }
  if (mask != WARP) return;
  for (int lane = 0; lane < 32; ++lane) {
    const Doubles& own = *static_cast<Doubles*>(arguments[lane]);
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 * 4, col = (lane % 4 * 2 + i % 2) * 4;  // the first of the lanes that hold it
      for (int k = 0; k < 8; ++k) {
        const double a = static_cast<Doubles*>(arguments[row + k % 4])->a[k / 4 * 2 + i / 2];
        own.d[i] = std::fma(a, static_cast<Doubles*>(arguments[col + k % 4])->b[k / 4], own.d[i]);
      }
    }
  }
}

}  // namespace

void load_matrices(uint32_t* fragment, int count, bool transposed, const void* row, const char* file, int line) {
  const WarpOperation operation = count == 4 ? (transposed ? load_all<4, true> : load_all<4, false>)
                                             : (transposed ? load_all<2, true> : load_all<2, false>);
  const bool takes_part = int(lane_id()) < 8 * count;
  xray_matrix_row(row, takes_part, __builtin_return_address(0));
  if (takes_part) probe(row);
  Rows argument{fragment, row};
  meet_warp(operation, argument, "load_matrices, which needs all 32 lanes of the warp", "load_matrices", file, line);
}

void mma(Factor factor, float* d, const uint32_t* a, const uint32_t* b, const char* file, int line) {
  const WarpOperation operation = factor == Factor::half       ? multiply_all<Factor::half>
                                  : factor == Factor::bfloat16 ? multiply_all<Factor::bfloat16>
                                                               : multiply_all<Factor::tf32>;
  Factors argument{d, a, b};
  meet_warp(operation, argument, "mma, which needs all 32 lanes of the warp", "mma", file, line);
}

void mma(double* d, const double* a, const double* b, const char* file, int line) {
  Doubles argument{d, a, b};
  meet_warp(multiply_doubles, argument, "mma, which needs all 32 lanes of the warp", "mma", file, line);
}

}  // namespace simt
