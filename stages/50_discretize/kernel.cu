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
// Mapping   block: THREADS * WIDTH neighbours of the E elements.  thread: WIDTH of them, what 16 bytes hold of the type
//           that it computes in. Where the first is in A and in delta it finds by divisions, three for all of them; the
//           others lie behind it, at a stride, 0 where a tensor is the same for all. Results go out 16 bytes at a time.
// Cost      A [D, N], delta [B, T, D, 1], float32, N a multiple of 32 and D of 4; F = 2 outputs, 3 for foh; a warp has
//           128 elements, W = B T D N / 128
//             global load sectors   forward 17 W: 16 of A, one of delta. Backward 16 F W more, the gradients'
//             global store sectors  forward 16 F W, backward 32 W: dA and ddelta of each element, which torch adds up
// Limits    A_bar and the gains are N times as large as what they come from, and all that a model does with them is one
//           step of a scan. Stage 51 computes them where they are needed, and they never are in memory.
// Run       python -m stages run 50

#include "common/complex.h"
#include "common/device.h"
#include "common/discretize.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/vector.h"
#include "common/view.h"

constexpr int THREADS = 128;
template <typename T>
constexpr int WIDTH = 16 / int(sizeof(Accumulator<T>));  // elements of a thread, of numbers of type T

// ---------------------------------------------------------------------------------------------------------------------
// Where an element is in the four dimensions that A and delta are broadcast to.
struct Place {
  int64_t i[4];

  __device__ Place(const int64_t (&size)[4], int64_t index) {
    uint64_t rest = index;  // unsigned and, as a rule, short: the compiler's division is quick then
    UNROLL
    for (int d = 3; d > 0; --d) i[d] = rest % uint64_t(size[d]), rest /= uint64_t(size[d]);
    i[0] = rest;
  }
  template <typename T>
  __device__ const T* in(const View<const T, 4>& x) const {
    return &x(i[0], i[1], i[2], i[3]);
  }
};

// The elements from an index on, at most COUNT: those of a thread.
template <int COUNT>
struct Elements {
  int64_t index, all;
  Place first;
  bool in_one_row;  // of the last dimension; then there are COUNT of them

  __device__ Elements(const int64_t (&size)[4], int64_t index)
      : index(index),
        all(size[0] * size[1] * size[2] * size[3]),  // E
        first(size, index),
        in_one_row(first.i[3] + COUNT <= size[3]) {}

  // What a tensor has for them.
  template <typename T>
  __device__ Vector<T, COUNT> of(const View<const T, 4>& x) const {
    const T* from = first.in(x);
    const bool aligned = uint64_t(from) % sizeof(Vector<T, COUNT>) == 0;
    if (in_one_row && x.stride[3] == 1 && aligned) return load_vector<COUNT>(from);
    Vector<T, COUNT> found;
    found[0] = *from;
    UNROLL
    for (int k = 1; k < COUNT; ++k) {
      if (in_one_row) found[k] = x.stride[3] == 0 ? found[0] : from[k * x.stride[3]];
      else found[k] = index + k < all ? *Place(x.size, index + k).in(x) : found[0];
    }
    return found;
  }

  // Results are new tensors, of which only the last piece may be cut off.
  template <typename T>
  __device__ void store(T* to, const Vector<T, COUNT>& values) const {
    if (index + COUNT <= all) return store_vector(to + index, values);
    UNROLL
    for (int n = 0; n < COUNT; ++n) {
      if (index + n < all) to[index + n] = values[n];
    }
  }
};

// grid (ceil(E / (THREADS * WIDTH))), block (THREADS)
template <Method METHOD, typename T>
__global__ void discretize_kernel(View<const T, 4> A,            // [E], as four dimensions, some with a stride of 0
                                  View<const Real<T>, 4> delta,  // [E], likewise
                                  T* A_bar,                      // [E]
                                  T* gain_prev,                  // [E] for foh, else not used
                                  T* gain) {                     // [E]
  using Sum = Accumulator<T>;
  constexpr int COUNT = WIDTH<T>;
  const Elements<COUNT> elements(A.size, (int64_t(blockIdx.x) * THREADS + threadIdx.x) * COUNT);
  if (elements.index >= elements.all) return;  // the last block has threads to spare
  const Vector<T, COUNT> a = elements.of(A);
  const Vector<Real<T>, COUNT> dt = elements.of(delta);
  Vector<T, COUNT> a_bars, previous, gains;
  UNROLL
  for (int k = 0; k < COUNT; ++k) {
    const Sum a_k(a[k]);
    const Real<Sum> dt_k(dt[k]);
    const Coefficients<Sum> factor = coefficients<METHOD>(a_k, dt_k, exponent(a_k, dt_k));
    a_bars[k] = T(factor.a_bar);  // 16-bit numbers are rounded here, and nowhere else
    gains[k] = T(factor.gain);
    if constexpr (METHOD == Method::foh) previous[k] = T(factor.previous);
  }
  elements.store(A_bar, a_bars);
  elements.store(gain, gains);
  if constexpr (METHOD == Method::foh) elements.store(gain_prev, previous);
}

// grid (ceil(E / (THREADS * WIDTH))), block (THREADS)
template <Method METHOD, typename T>
__global__ void discretize_backward_kernel(View<const T, 4> A,              // [E], as four dimensions
                                           View<const Real<T>, 4> delta,    // [E], likewise
                                           View<const T, 4> g_A_bar,        // [E], what a loss gives to it
                                           View<const T, 4> g_gain_prev,    // [E] for foh, or empty
                                           View<const T, 4> g_gain,         // [E]
                                           Accumulator<T>* dA,              // [E], before anything is summed
                                           Real<Accumulator<T>>* ddelta) {  // [E]
  using Sum = Accumulator<T>;
  constexpr int COUNT = WIDTH<T>;
  const Elements<COUNT> elements(A.size, (int64_t(blockIdx.x) * THREADS + threadIdx.x) * COUNT);
  if (elements.index >= elements.all) return;
  const Vector<T, COUNT> a = elements.of(A), of_a_bar = elements.of(g_A_bar), of_gain = elements.of(g_gain);
  const Vector<Real<T>, COUNT> dt = elements.of(delta);
  Vector<T, COUNT> of_previous;
  if constexpr (METHOD == Method::foh) of_previous = elements.of(g_gain_prev);
  Vector<Sum, COUNT> by_a;
  Vector<Real<Sum>, COUNT> by_dt;
  UNROLL
  for (int k = 0; k < COUNT; ++k) {
    const Sum a_k(a[k]), g_a_bar(of_a_bar[k]), g(of_gain[k]);
    const Real<Sum> dt_k(dt[k]);
    const Derivatives<Sum> factor = differentiated<METHOD>(a_k, dt_k, exponent(a_k, dt_k));
    Sum sum_a = conj(factor.by_a.a_bar) * g_a_bar + conj(factor.by_a.gain) * g;
    Sum sum_dt = conj(factor.by_dt.a_bar) * g_a_bar + conj(factor.by_dt.gain) * g;
    if constexpr (METHOD == Method::foh) {
      const Sum g_previous(of_previous[k]);
      sum_a = sum_a + conj(factor.by_a.previous) * g_previous;
      sum_dt = sum_dt + conj(factor.by_dt.previous) * g_previous;
    }
    by_a[k] = sum_a, by_dt[k] = real_part(sum_dt);
  }
  elements.store(dA, by_a);
  elements.store(ddelta, by_dt);
}

// ---------------------------------------------------------------------------------------------------------------------
// A tensor that is broadcast to a size: nothing to walk along where it has one for all.
template <typename T>
View<const T, 4> broadcast(View<const T, 4> x, const int64_t (&size)[4]) {
  for (int d = 0; d < 4; ++d) {
    if (x.size[d] != size[d]) x.size[d] = size[d], x.stride[d] = 0;
  }
  return x;
}

template <typename T>
Grid grid_of(const int64_t (&size)[4]) {
  return {ceil_div(size[0] * size[1] * size[2] * size[3], THREADS * WIDTH<T>)};
}

void discretize(const std::string& method, Input<4> A, Input<4> delta, Output<4> A_bar, Output<4> gain_prev,
                Output<4> gain, Stream stream) {
  dispatch_number(A_bar.dtype, [&]<typename T>() {
    dispatch_method(method, [&]<Method METHOD>() {
      launch<discretize_kernel<METHOD, T>>(grid_of<T>(A_bar.size), dim3(THREADS), 0, stream,
                                           broadcast(A.as<T>(), A_bar.size), broadcast(delta.as<Real<T>>(), A_bar.size),
                                           A_bar.as<T>().data, gain_prev.as<T>().data, gain.as<T>().data);
    });
  });
}

void discretize_backward(const std::string& method, Input<4> A, Input<4> delta, Input<4> g_A_bar, Input<4> g_gain_prev,
                         Input<4> g_gain, Output<4> dA, Output<4> ddelta, Stream stream) {
  dispatch_number(A.dtype, [&]<typename T>() {
    dispatch_method(method, [&]<Method METHOD>() {
      using Sum = Accumulator<T>;
      launch<discretize_backward_kernel<METHOD, T>>(
          grid_of<T>(dA.size), dim3(THREADS), 0, stream, broadcast(A.as<T>(), dA.size),
          broadcast(delta.as<Real<T>>(), dA.size), g_A_bar.as<T>(), g_gain_prev.as<T>(), g_gain.as<T>(),
          dA.as<Sum>().data, ddelta.as<Real<Sum>>().data);
    });
  });
}
