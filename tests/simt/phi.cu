// The functions of common/phi.h and the methods of common/discretize.h, for each number of a tensor.
#include "common/device.h"
#include "common/discretize.h"
#include "common/launch.h"
#include "common/phi.h"
#include "common/view.h"

constexpr int THREADS = 128;

template <typename T>
__global__ void all_functions(View<const T, 1> z, View<T, 2> out) {
  const int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= z.size[0]) return;
  const T e = exponential(z(i));
  out(0, i) = e;
  out(1, i) = reciprocal(z(i));
  out(2, i) = phi<1>(z(i), e);
  out(3, i) = phi<2>(z(i), e);
  out(4, i) = phi<3>(z(i));
}

template <Method METHOD, template <typename> typename X, typename T>
__global__ void all_coefficients(View<const T, 1> a, View<const Real<T>, 1> dt, View<T, 2> out) {
  const int64_t i = int64_t(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= a.size[0]) return;
  const Exponent<T> own = exponent(a(i), dt(i));
  const Coefficients<T> c = coefficients<METHOD>(a(i), dt(i), X<T>{own.z, own.inverse, own.e});
  // As a scan has it, without a division of its own.
  const X<T> x{a(i) * dt(i), detail::divided(T(1), a(i)) * (1 / dt(i)), exponential(a(i) * dt(i))};
  const Derivatives<T> d = differentiated<METHOD>(a(i), dt(i), x);
  const Coefficients<T> all[4] = {c, d.value, d.by_a, d.by_dt};
  for (int n = 0; n < 4; ++n)
    out(3 * n, i) = all[n].a_bar, out(3 * n + 1, i) = all[n].gain, out(3 * n + 2, i) = all[n].previous;
}

template <typename Body>
void dispatch(DType dtype, Body&& body) {
  if (dtype == DType::float32) body.template operator()<float>();
  else if (dtype == DType::float64) body.template operator()<double>();
  else if (dtype == DType::complex64) body.template operator()<Complex<float>>();
  else body.template operator()<Complex<double>>();
}

void functions(Input<1> z, Output<2> out, Stream stream) {
  dispatch(z.dtype, [&]<typename T>() {
    launch<all_functions<T>>({ceil_div(z.size[0], THREADS)}, dim3(THREADS), 0, stream, z.as<T>(), out.as<T>());
  });
}

void coefficients_of(const std::string& method, bool of_steps, Input<1> a, Input<1> dt, Output<2> out, Stream stream) {
  dispatch(a.dtype, [&]<typename T>() {
    dispatch_method(method, [&]<Method METHOD>() {
      const auto run = [&]<template <typename> typename X>() {
        launch<all_coefficients<METHOD, X, T>>({ceil_div(a.size[0], THREADS)}, dim3(THREADS), 0, stream, a.as<T>(),
                                               dt.as<Real<T>>(), out.as<T>());
      };
      if (of_steps) run.template operator()<StepExponent>();
      else run.template operator()<Exponent>();
    });
  });
}
