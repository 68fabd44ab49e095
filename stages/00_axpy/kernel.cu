// Stage 00: axpy, the first kernel
//
// Problem   out[i] = alpha x[i] + y[i] for i < n; any strides.
// Before    Nothing. A CPU would loop over i.
// Idea      There is no loop: each thread computes one element, and a launch makes as many threads as there are
// elements.
//           Threads come in blocks of a fixed size, so the last block is larger than what is left to do, and every
//           thread asks first whether its element exists.
// Mapping   block: THREADS neighbours.  thread x: out[blockIdx.x THREADS + x].  warp: 32 neighbours.
// Cost      contiguous tensors, w bytes an element
//             global requests   2 ceil(n / 32) loads, ceil(n / 32) stores
//             global sectors    2 ceil(n w / 32) loads, ceil(n w / 32) stores: each byte moves once, nothing is wasted
// Limits    Three words move for one multiply-add: the kernel waits for memory, and no arithmetic would be felt.
// Run       python -m stages run 00

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

constexpr int THREADS = 256;  // eight warps: enough to fill a multiprocessor with eight blocks, small enough for any n

// ---------------------------------------------------------------------------------------------------------------------
// grid (ceil(n / THREADS)), block (THREADS)
template <typename T>
__global__ void axpy_kernel(Accumulator<T> alpha, View<const T, 1> x,  // [n]
                            View<const T, 1> y,                        // [n]
                            View<T, 1> out) {                          // [n]
  const int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;       // 64-bit: n may pass 2^31
  // 16-bit numbers are widened for the arithmetic and rounded once, at the end.
  if (i < out.size[0]) out(i) = T(alpha * Accumulator<T>(x(i)) + Accumulator<T>(y(i)));
}

// ---------------------------------------------------------------------------------------------------------------------
void axpy(double alpha, Input<1> x, Input<1> y, Output<1> out, Stream stream) {
  dispatch_floating(out.dtype, [&]<typename T>() {
    launch<axpy_kernel<T>>({ceil_div(out.size[0], THREADS)}, dim3(THREADS), 0, stream, Accumulator<T>(alpha), x.as<T>(),
                           y.as<T>(), out.as<T>());
  });
}
