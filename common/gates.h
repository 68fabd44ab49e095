// Gates in the logarithm: what a forget gate leaves of a state, as a sum of exponents that are 0 or less.
#pragma once

#include <cmath>

#include "common/device.h"

// log(sigmoid(x)). -infinity gives -infinity, a gate that lets nothing through, and no x gives anything above 0.
template <typename Sum>
__device__ __forceinline__ Sum log_sigmoid(Sum x) {
  return (x < 0 ? x : Sum(0)) - std::log1p(std::exp(x < 0 ? x : -x));
}
