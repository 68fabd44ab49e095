// Gates: what lets a part of a number through; and in the logarithm, what a forget gate leaves of a state.
#pragma once

#include <cmath>

#include "common/device.h"

// log(sigmoid(x)). -infinity gives -infinity, a gate that lets nothing through, and no x gives anything above 0.
template <typename Sum>
__device__ __forceinline__ Sum log_sigmoid(Sum x) {
  return (x < 0 ? x : Sum(0)) - std::log1p(std::exp(x < 0 ? x : -x));
}

// What an LSTM makes of a gate and of a cell: sigmoid and tanh; or straight lines, cut off.
enum Activation { SOFT, HARD };

// A function and its slope. NaN stays NaN; at a kink the slope is that of the line.
template <typename Sum>
struct Bent {
  Sum value, slope;
};

// A line that ends at `low` and 1.
template <typename Sum>
__device__ __forceinline__ Bent<Sum> cut_off(Sum line, Sum low, Sum slope) {
  const Sum value = line < low ? low : line > 1 ? Sum(1) : line;
  return {value, value == line ? slope : Sum(0)};
}

template <typename Sum>
__device__ __forceinline__ Bent<Sum> sigmoid_of(Sum x, int activation) {
  if (activation == HARD) return cut_off(x / 8 + Sum(0.5), Sum(0), Sum(0.125));
  const Sum value = 1 / (1 + std::exp(-x));
  return {value, value * (1 - value)};
}

template <typename Sum>
__device__ __forceinline__ Bent<Sum> tanh_of(Sum x, int activation) {
  if (activation == HARD) return cut_off(x, Sum(-1), Sum(1));
  const Sum value = std::tanh(x);
  return {value, 1 - value * value};
}
