// What a request of a warp costs: sectors of global memory, passes through the banks of shared memory.
#pragma once

#include <algorithm>
#include <cstdint>

namespace simt {

// The two usual requests of a whole warp, told apart quickly: all lanes at one address, or side by side.
enum class Shape { other, same, adjacent };
inline Shape shape_of(const uint64_t* address, uint32_t mask, int size) {
  if (mask != ~0u) return Shape::other;
  uint64_t same = 0, adjacent = 0;
  for (uint64_t lane = 0; lane < 32; ++lane) {
    same |= address[lane] ^ address[0];
    adjacent |= address[lane] ^ (address[0] + lane * uint64_t(size));
  }
  return same == 0 ? Shape::same : adjacent == 0 ? Shape::adjacent : Shape::other;
}

// Distinct 32-byte sectors of a request. Lanes mostly come in order, then neighbours are compared; else they are
// sorted.
inline uint64_t count_sectors(const uint64_t* address, uint32_t mask, int size) {
  const Shape shape = shape_of(address, mask, size);
  if (shape == Shape::adjacent) return ((address[31] + uint64_t(size) - 1) >> 5) - (address[0] >> 5) + 1;
  if (shape == Shape::same) return ((address[0] + uint64_t(size) - 1) >> 5) - (address[0] >> 5) + 1;
  uint64_t sector[64];
  int n = 0;
  bool ordered = true;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const uint64_t a = address[__builtin_ctz(rest)];
    const uint64_t first = a >> 5, last = (a + uint64_t(size) - 1) >> 5;
    ordered &= n == 0 || sector[n - 1] <= first;
    sector[n++] = first;
    if (last != first) sector[n++] = last;
  }
  if (!ordered) std::sort(sector, sector + n);
  uint64_t count = 1;
  for (int i = 1; i < n; ++i) count += sector[i] != sector[i - 1];
  return count;
}

// Do the lanes ask in pairs, each lane for what its partner `apart` lanes away asks for?
inline bool in_pairs(const uint64_t* address, uint32_t mask, int apart) {
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest), partner = lane ^ apart;
    if (mask >> partner & 1 && address[lane] != address[partner]) return false;
  }
  return true;
}

struct Passes {
  uint64_t wavefronts, conflicts;
};

// Passes through the 32 banks of 4 bytes. Up to 4 bytes a lane the whole warp goes at once, 8 bytes by halves, 16 by
// quarters; a wide load whose lanes ask in pairs goes by groups twice as large. Within a group, lanes that ask for the
// same word share it, different words of one bank wait for each other: passes beyond one a group are conflicts. (The
// rule is that of an H100: tests/golden has what one counted for 447 patterns.)
inline Passes count_passes(const uint64_t* address, uint32_t mask, int size, bool load) {
  if (size <= 4 && shape_of(address, mask, size) != Shape::other) return {1, 0};
  int group = size <= 4 ? 32 : size == 8 ? 16 : 8;
  if (group < 32 && load && (in_pairs(address, mask, 1) || in_pairs(address, mask, 2))) group *= 2;
  const uint64_t words = size <= 4 ? 1 : uint64_t(size) / 4;
  Passes total{};
  for (int first = 0; first < 32; first += group) {
    const uint32_t part = group == 32 ? mask : mask >> first & ((1u << group) - 1);
    if (!part) continue;
    uint64_t seen[32][32];
    uint8_t depth[32] = {};
    uint8_t deepest = 0;
    uint64_t previous = ~uint64_t(0);
    for (uint32_t rest = part; rest; rest &= rest - 1) {
      const uint64_t base = address[first + __builtin_ctz(rest)] >> 2;
      if (base == previous) continue;
      previous = base;
      for (uint64_t word = base; word < base + words; ++word) {
        uint8_t& d = depth[word & 31];
        uint64_t* list = seen[word & 31];
        int i = 0;
        while (i < d && list[i] != word) ++i;
        if (i < d) continue;
        list[d++] = word;
        deepest = std::max(deepest, d);
      }
    }
    total.wavefronts += deepest;
    total.conflicts += uint64_t(deepest - 1);
  }
  return total;
}

// Asynchronous copies, of 4 or 8 bytes a lane: they go from the banks of the first-level cache to those of shared
// memory, and a bank, on either side, serves one lane in a pass. Zeros go along with what is copied, as a store would.
// (The rules for copies are those of an H100, as far as whole warps and rows go.)
inline Passes count_narrow_copy(const uint64_t* to, const uint64_t* from, uint32_t copied, uint32_t zeros, int size) {
  uint64_t most = count_passes(to, copied | zeros, size, false).wavefronts;
  const uint64_t fewest = size == 8 ? 2 : 1;
  uint8_t lanes_from[32] = {}, lanes_to[32] = {};
  for (uint32_t rest = copied; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    for (int word = 0; word < size / 4; ++word) {
      most = std::max<uint64_t>(most, ++lanes_from[(from[lane] / 4 + uint64_t(word)) % 32]);
      most = std::max<uint64_t>(most, ++lanes_to[(to[lane] / 4 + uint64_t(word)) % 32]);
    }
  }
  return {most, most - std::min(most, fewest)};
}

// Of 16 bytes a lane: they come past that cache in lines of 128 bytes. A quarter of the warp takes a pass for each line
// that it copies from, whole sectors and halves apart. Zeros take passes of their own, one for each quarter of the
// warp.
inline Passes count_wide_copy(const uint64_t* from, uint32_t copied, uint32_t zeros) {
  uint64_t passes = zeros ? 4 : 0, fewest = passes;
  for (int first = 0; first < 32; first += 8) {
    uint64_t kinds[8];
    int n = 0;
    for (int lane = first; lane < first + 8; ++lane) {
      if (!(copied >> lane & 1)) continue;
      bool whole = false;  // does a lane copy the other half of the sector?
      for (int other = first; other < first + 8; ++other) {
        whole |= (copied >> other & 1) && from[other] == (from[lane] ^ 16);
      }
      const uint64_t kind = from[lane] >> 7 << 1 | uint64_t(whole);
      if (std::find(kinds, kinds + n, kind) == kinds + n) kinds[n++] = kind;
    }
    passes += uint64_t(n), fewest += n > 0;
  }
  return {passes, passes - fewest};
}

// The lanes of `mask` copy; `from` is 0 where zeros stand for what is not there.
inline Passes count_copy_passes(const uint64_t* to, const uint64_t* from, uint32_t mask, int size) {
  uint32_t zeros = 0;
  for (uint32_t rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    if (!from[lane]) zeros |= 1u << lane;
  }
  return size == 16 ? count_wide_copy(from, mask & ~zeros, zeros)
                    : count_narrow_copy(to, from, mask & ~zeros, zeros, size);
}

// ldmatrix: the eight rows of a matrix, 16 bytes each, are a pass where they lie in different banks. Matrices do not
// share one, also where lanes ask in pairs.
inline Passes count_matrix_passes(const uint64_t* address, uint32_t mask) {
  return count_passes(address, mask, 16, false);
}

}  // namespace simt
