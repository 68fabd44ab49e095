// Stage 50: the discretizations of a state space model
//
// Problem   h' = A h + B u, of which samples u_t are known: h_t = A_bar h_(t-1) + gain B u_t. A_bar and gain for each A
//           and each step dt, by one of nine methods, and for `foh` a second gain, of B u_(t-1). A, real or complex,
//           and delta, the steps, are broadcast against each other to E elements. Backward, for the gradients g of
//           these factors F:  dA = sum conj(dF/dA) g,  ddelta = Re sum conj(dF/ddt) g,  over what was broadcast.
// Before    The scans of stages 40 to 48 were given the factor a of a state. A model has A, and makes its own steps.
// Idea      All methods come from z = dt A, and the exact ones from phi functions of it, (e^z - 1) / z and the like,
//           which are 0 / 0 where steps are short, and they are. common/phi.h has series there, common/discretize.h
//           each method and its derivatives, phi functions again. What is left to do here is to visit the elements.
// Mapping   block: THREADS neighbours of the E elements.  thread: one of them.  Where it is in A and in delta follows
//           from strides, 0 where a tensor is the same for all.
// Cost      A [D, N], delta [B, T, D, 1], float32, N a multiple of 32; F = 2 outputs, 3 for foh; W = B T D N / 32 warps
//             global load sectors   forward 5 W: 4 of A, one of delta. Backward 4 F W more, the gradients'
//             global store sectors  forward 4 F W, backward 8 W: dA and ddelta of each element, which torch adds up
// Limits    A_bar and the gains are N times as large as what they come from, and all that a model does with them is one
//           step of a scan. Stage 51 computes them where they are needed, and they never are in memory.
// Run       python -m stages run 50

#include "common/complex.h"
#include "common/device.h"
#include "common/discretize.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

constexpr int THREADS = 128;

// ---------------------------------------------------------------------------------------------------------------------
// An element's place in the four dimensions that A and delta are expanded to.
struct Place {
  int64_t i[4];

  __device__ Place(const int64_t (&size)[4], int64_t index) {
    uint64_t rest = index;  // unsigned and, as a rule, short: the compiler's division is quick then
    UNROLL
    for (int d = 3; d > 0; --d) i[d] = rest % uint64_t(size[d]), rest /= uint64_t(size[d]);
    i[0] = rest;
  }
  template <typename T>
  __device__ T operator()(const View<const T, 4>& x) const {
    return x(i[0], i[1], i[2], i[3]);
  }
};

// grid (ceil(E / THREADS)), block (THREADS)
template <Method METHOD, typename T>
__global__ void discretize_kernel(View<const T, 4> A,            // [E], as four dimensions
                                  View<const Real<T>, 4> delta,  // [E], likewise
                                  View<T, 1> A_bar,              // [E]
                                  View<T, 1> gain_prev,          // [E] for foh, or empty
                                  View<T, 1> gain) {             // [E]
  using Sum = Accumulator<T>;
  const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= A_bar.size[0]) return;  // the last block has threads to spare
  const Place place(A.size, index);
  const Sum a(place(A));
  const Real<Sum> dt(place(delta));
  const Coefficients<Sum> factor = coefficients<METHOD>(a, dt, exponent(a, dt));
  A_bar(index) = T(factor.a_bar);  // 16-bit numbers are rounded here, and nowhere else
  gain(index) = T(factor.gain);
  if constexpr (METHOD == Method::foh) gain_prev(index) = T(factor.previous);
}

// grid (ceil(E / THREADS)), block (THREADS)
template <Method METHOD, typename T>
__global__ void discretize_backward_kernel(View<const T, 4> A,                      // [E], as four dimensions
                                           View<const Real<T>, 4> delta,            // [E], likewise
                                           View<const T, 4> g_A_bar,                // [E], what a loss gives to it
                                           View<const T, 4> g_gain_prev,            // [E] for foh, or empty
                                           View<const T, 4> g_gain,                 // [E]
                                           View<Accumulator<T>, 1> dA,              // [E], before anything is summed
                                           View<Real<Accumulator<T>>, 1> ddelta) {  // [E]
  using Sum = Accumulator<T>;
  const int64_t index = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (index >= dA.size[0]) return;
  const Place place(A.size, index);
  const Sum a(place(A)), of_a_bar(place(g_A_bar)), of_gain(place(g_gain));
  const Real<Sum> dt(place(delta));
  const Derivatives<Sum> factor = differentiated<METHOD>(a, dt, exponent(a, dt));
  Sum by_a = conj(factor.by_a.a_bar) * of_a_bar + conj(factor.by_a.gain) * of_gain;
  Sum by_dt = conj(factor.by_dt.a_bar) * of_a_bar + conj(factor.by_dt.gain) * of_gain;
  if constexpr (METHOD == Method::foh) {
    const Sum of_previous(place(g_gain_prev));
    by_a = by_a + conj(factor.by_a.previous) * of_previous;
    by_dt = by_dt + conj(factor.by_dt.previous) * of_previous;
  }
  dA(index) = by_a;
  ddelta(index) = real_part(by_dt);
}

// ---------------------------------------------------------------------------------------------------------------------
void discretize(const std::string& method, Input<4> A, Input<4> delta, Output<1> A_bar, Output<1> gain_prev,
                Output<1> gain, Stream stream) {
  dispatch_number(A_bar.dtype, [&]<typename T>() {
    dispatch_method(method, [&]<Method METHOD>() {
      launch<discretize_kernel<METHOD, T>>({ceil_div(A_bar.size[0], THREADS)}, dim3(THREADS), 0, stream, A.as<T>(),
                                           delta.as<Real<T>>(), A_bar.as<T>(), gain_prev.as<T>(), gain.as<T>());
    });
  });
}

void discretize_backward(const std::string& method, Input<4> A, Input<4> delta, Input<4> g_A_bar, Input<4> g_gain_prev,
                         Input<4> g_gain, Output<1> dA, Output<1> ddelta, Stream stream) {
  dispatch_number(A.dtype, [&]<typename T>() {
    dispatch_method(method, [&]<Method METHOD>() {
      using Sum = Accumulator<T>;
      launch<discretize_backward_kernel<METHOD, T>>(
          {ceil_div(dA.size[0], THREADS)}, dim3(THREADS), 0, stream, A.as<T>(), delta.as<Real<T>>(), g_A_bar.as<T>(),
          g_gain_prev.as<T>(), g_gain.as<T>(), dA.as<Sum>(), ddelta.as<Real<Sum>>());
    });
  });
}
