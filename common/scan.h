// The first-order scan's operator: a step of time is the map h -> a h + b, and maps one after the other are one map.
#pragma once

#include <cmath>

#include "common/device.h"

template <typename Sum>
struct Map {
  Sum a = 1, b = 0;  // unless told otherwise, the map that changes nothing

  __device__ Sum operator()(Sum h) const { return a * h + b; }
};

// First the older map, then the newer one. The order matters: the operator is associative, but does not commute.
template <typename Sum>
__device__ __forceinline__ Map<Sum> combine(const Map<Sum>& older, const Map<Sum>& newer) {
  return {newer.a * older.a, newer(older.b)};
}

// The map of a piece of many steps: state -> (a + low) state + b. A product of numbers just below 1 is rounded down nearly
// every time; what that took from a is kept in low, or it would add up from piece to piece.
template <typename Sum>
struct LongMap {
  Sum a = 1, low = 0, b = 0;  // of no step

  // From 0 a piece leads to b, also if a has overflowed, and low with it: infinity times 0 would be NaN.
  __device__ __forceinline__ Sum operator()(Sum state) const {
    const Sum main = a * state, rest = low * state;
    return (state == 0 ? 0 : main) + ((state == 0 || std::isinf(main) ? 0 : rest) + b);
  }

  // As two numbers alone.
  __device__ __forceinline__ LongMap rounded() const { return {a + low, 0, b}; }

  // One more step, h -> a_step h + b_step: the map leads to `to`, which is a_step b + b_step.
  __device__ __forceinline__ void take(Sum a_step, Sum to) {
    const Sum product = a_step * a;
    low = std::fma(a_step, a, -product) + a_step * low;
    a = product, b = to;
  }
};

template <typename Sum>
__device__ __forceinline__ LongMap<Sum> combine(const LongMap<Sum>& older, const LongMap<Sum>& newer) {
  const Sum product = newer.a * older.a;
  const Sum low = std::fma(newer.a, older.a, -product) + (newer.a * older.low + newer.low * older.a);
  return {product, low, newer(older.b)};
}
