// Tiles of a matrix: which block takes which, and which may be copied 16 bytes at a time.
#pragma once

#include <cstdint>

#include "common/device.h"
#include "common/view.h"

struct Tile {
  int64_t row, col;  // counted in tiles
};

// The tile of C = A B that a block of a linear grid takes. Blocks that run at the same time find each other's operands
// in the second-level cache: they go down GROUP rows of tiles before they go on to the next column of tiles.
template <int GROUP>
__device__ __forceinline__ Tile tile_of_block(int64_t block, int64_t down, int64_t across) {
  const int64_t band = block / (GROUP * across) * GROUP, inside = block % (GROUP * across);
  const int64_t high = down - band < GROUP ? down - band : GROUP;  // the last band may be lower
  return {band + inside % high, inside / high};
}

// Is a matrix made of 16-byte groups along a dimension: its elements side by side, every group whole and aligned?
template <typename T>
bool in_wide_groups(const View<T, 2>& matrix, int dim) {
  constexpr int64_t WIDE = 16 / int64_t(sizeof(T));
  return matrix.stride[dim] == 1 && matrix.size[dim] % WIDE == 0 && matrix.stride[1 - dim] % WIDE == 0 &&
         reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0;
}

// The same of a tensor of three dimensions.
template <typename T>
bool in_wide_groups(const View<T, 3>& x, int dim) {
  constexpr int64_t WIDE = 16 / int64_t(sizeof(T));
  for (int d = 0; d < 3; ++d) {
    if (d == dim ? x.stride[d] != 1 || x.size[d] % WIDE != 0 : x.size[d] > 1 && x.stride[d] % WIDE != 0) return false;
  }
  return reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
}
