// Gates: what lets a part of a number through; and in the logarithm, what a forget gate leaves of a state.
#pragma once

#include <cmath>

#include "common/device.h"

// log(sigmoid(x)). -infinity gives -infinity, a gate that lets nothing through, and no x gives anything above 0.
template <typename Sum>
__device__ __forceinline__ Sum log_sigmoid(Sum x) {
  return (x < 0 ? x : Sum(0)) - std::log1p(std::exp(x < 0 ? x : -x));
}

template <typename Sum>
__device__ __forceinline__ Sum clamped(Sum x, Sum least) {
  return x < least ? least : x > 1 ? Sum(1) : x;
}
// A gate of an LSTM, from 0 to 1, and what its cells see, from -1 to 1: a sigmoid and tanh, or the hard ones, of pieces.
template <typename Sum>
__device__ __forceinline__ Sum gate(Sum x, bool hard) {
  return hard ? clamped(x / 8 + Sum(0.5), Sum(0)) : 1 / (1 + std::exp(-x));
}
template <typename Sum>
__device__ __forceinline__ Sum squashed(Sum x, bool hard) {
  return hard ? clamped(x, Sum(-1)) : std::tanh(x);
}
// Their derivatives, from the results; of the hard ones 0 where they are at an end.
template <typename Sum>
__device__ __forceinline__ Sum gate_slope(Sum y, bool hard) {
  return hard ? (y > 0 && y < 1 ? Sum(0.125) : Sum(0)) : y * (1 - y);
}
template <typename Sum>
__device__ __forceinline__ Sum squashed_slope(Sum y, bool hard) {
  return hard ? (y > -1 && y < 1 ? Sum(1) : Sum(0)) : 1 - y * y;
}
