// The first-order scan's operator: a step of time is the map h -> a h + b, and maps one after the other are one map.
#pragma once

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
