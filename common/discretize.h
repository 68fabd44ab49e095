// Discretizations of h' = A h + B u by steps dt: h_t = A_bar h_(t-1) + gain B u_t, with `foh` + previous B u_(t-1).
//
//   const Coefficients<T> c = coefficients<Method::zoh>(a, dt, exponent(a, dt));         // for an A and a step
//   const Derivatives<T> d = differentiated<Method::zoh>(a, dt, exponent(a, dt));        // and the derivatives
//   h = c.a_bar * h + c.gain * (b * u);
//
// A is real or complex, dt real. All is worked out for one method at compile time, and what a caller does not use costs
// nothing. A scan has the same A at all of its steps, and the same step for all states of a channel. It gets along
// without a division for each of both, as 1 / z is the product of 1 / A and 1 / dt, which it has from before its loops:
//
//   coefficients<METHOD>(a, dt, StepExponent<T>{a * dt, a_inverse * dt_inverse, exponential(a * dt)})
//
// What they compute, with z = dt A and the phi functions of common/phi.h:
//
//   method           A_bar                    gain                              note
//   mamba            e^z                      dt                                one exponential, nothing else
//   zoh              e^z                      dt phi_1                          exact for an input that is held
//   foh              e^z                      dt phi_2,                         exact for one that is linear between
//                                             previous: dt (phi_1 - phi_2)      samples
//   bilinear         (1 + z/2) / (1 - z/2)    dt / (1 - z/2)                    Tustin, the trapezoidal rule
//   highorder        e^z                      dt (1 + z/2)                      the series of phi_1, cut off: good for
//   poly             e^z                      dt (1 + z/2 + z^2/6)              |z| < 1; further out the gain is too
//   rk4              e^z                      dt (1 + z/2 + z^2/6 + z^3/24)     large, or of the wrong sign
//   dirac            e^z                      1                                 the input is an impulse
//   backward_euler   1 / (1 - z)              dt / (1 - z)                      the implicit Euler method
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/complex.h"
#include "common/device.h"
#include "common/phi.h"

// A function that is called and not copied to where it is called: less to compile, where speed does not matter.
#if defined(__CUDACC__)
#define NOINLINE __noinline__
#else
#define NOINLINE __attribute__((noinline))
#endif

enum class Method { mamba, zoh, foh, bilinear, highorder, poly, rk4, dirac, backward_euler };

// dispatch_method("zoh", [&]<Method METHOD>() { ... }) calls the body for the method of that name.
template <typename Body>
void dispatch_method(const std::string& name, Body&& body) {
  if (name == "mamba") return body.template operator()<Method::mamba>();
  if (name == "zoh") return body.template operator()<Method::zoh>();
  if (name == "foh") return body.template operator()<Method::foh>();
  if (name == "bilinear") return body.template operator()<Method::bilinear>();
  if (name == "highorder") return body.template operator()<Method::highorder>();
  if (name == "poly") return body.template operator()<Method::poly>();
  if (name == "rk4") return body.template operator()<Method::rk4>();
  if (name == "dirac") return body.template operator()<Method::dirac>();
  if (name == "backward_euler") return body.template operator()<Method::backward_euler>();
  throw std::invalid_argument("there is no method " + name);
}

template <typename T>
struct Coefficients {
  T a_bar, gain, previous;  // factors of the state, of this step's B u, and of the one before: of foh alone, else 0
};

template <typename T>
struct Derivatives {
  Coefficients<T> value, by_a, by_dt;
};

// z = dt A, 1 / z and e^z. What a method has no use for is never computed. Where |z| is small 1 / z does not count, and
// may be anything.
template <typename T>
struct Exponent {
  T z, inverse, e;
};

template <typename T>
__device__ __forceinline__ Exponent<T> exponent(T a, Real<T> dt) {
  const T z = a * dt;
  return {z, detail::divided(T(1), z), exponential(z)};
}

// The same for the many steps of a scan in float, to 3e-6 of a value: short series near 0, formulas further out. Both are
// computed and one is taken, so that no lane with a large z waits for one with a small z.
struct QuickExponent {
  float z, inverse, e;
};
template <typename T>
using StepExponent = std::conditional_t<std::is_same_v<T, float>, QuickExponent, Exponent<T>>;

// ---------------------------------------------------------------------------------------------------------------------
namespace detail {

template <typename T>
__device__ __forceinline__ T phi_1_of(const Exponent<T>& x) {
  return within(x.z, Real<T>(RADIUS<1>)) ? series<1>(x.z) : (x.e - T(Real<T>(1))) * x.inverse;
}
__device__ __forceinline__ float phi_1_of(const QuickExponent& x) {
  const float near = short_series<1, 4>(x.z), far = (x.e - 1) * x.inverse;
  return within(x.z, 0.25f) ? near : far;
}

// How an input counts that is linear in a step: by phi_1 - phi_2 its older end, by phi_2 its newer end; derivatives.
template <typename T>
struct Ends {
  T older, newer, d_older, d_newer;
};

template <typename T>
__device__ __forceinline__ Ends<T> ends_of(const Exponent<T>& x) {
  using R = Real<T>;
  constexpr int FAR = 3;  // in halves
  const T z = x.z, half = R(0.5), one = R(1), two = R(2);
  if (within(z, R(FAR / 2.))) {  // all from phi_3, as 0 is subtracted from nothing there
    const T three = series<3, FAR>(z), newer = z * three + half, d_newer = (z - two) * three + half;
    return {z * ((z - one) * three + half) + half, newer, newer + (z - one) * d_newer, d_newer};
  }
  const T older = ((z - one) * x.e + one) * x.inverse * x.inverse, newer = ((x.e - one) * x.inverse - one) * x.inverse;
  return {older, newer, (x.e - older * R(2)) * x.inverse, (older - newer) * x.inverse};
}

__device__ __forceinline__ Ends<float> ends_of(const QuickExponent& x) {
  const bool near = within(x.z, 1.0f);
  const float three = short_series<3, 6>(x.z), two = x.z * three + 0.5f, one = x.z * two + 1, d_two = two - 2 * three;
  const float held = (x.e - 1) * x.inverse, older = (x.e - held) * x.inverse, newer = (held - 1) * x.inverse;
  return {near ? one - two : older, near ? two : newer, near ? one - two - d_two : (x.e - 2 * older) * x.inverse,
          near ? d_two : (older - newer) * x.inverse};
}

// The series of phi_1 up to z^DEGREE, its derivative, and that of dt times it by dt: the series of e^z.
template <int DEGREE, typename T>
struct Truncated {
  T sum, derivative, by_dt;

  __device__ __forceinline__ explicit Truncated(T z) : sum(0), derivative(0), by_dt(0) {
    UNROLL
    for (int k = DEGREE; k >= 0; --k) {
      derivative = derivative * z + sum;
      sum = sum * z + T(Real<T>(k == 0 ? 1 : k == 1 ? 1 / 2. : k == 2 ? 1 / 6. : 1 / 24.));  // 1 / (k + 1)!
    }
    by_dt = sum + z * derivative;
  }
};

}  // namespace detail

// The coefficients and their derivatives by A and by dt, which for complex numbers are those of functions of A: what a
// gradient is multiplied by is their conjugate.
template <Method METHOD, typename T, typename X>
__device__ __forceinline__ Derivatives<T> differentiated(T a, Real<T> dt, const X& x) {
  using R = Real<T>;
  const T z = x.z, none(R(0)), one(R(1)), step(dt);
  if constexpr (METHOD == Method::bilinear || METHOD == Method::backward_euler) {
    // 1 / (1 - w), with w = z / 2 or z. The derivative of A_bar by z is the square of it for both.
    constexpr bool MIDDLE = METHOD == Method::bilinear;
    const R part = MIDDLE ? R(0.5) : R(1);
    const T q = reciprocal(one - z * part), square = q * q;
    return {{MIDDLE ? (one + z * part) * q : q, q * dt, none},
            {square * dt, square * (dt * dt * part), none},
            {a * square, square, none}};
  } else {
    const T e = x.e, e_by_a = e * dt, e_by_dt = a * e;
    if constexpr (METHOD == Method::mamba) {
      return {{e, step, none}, {e_by_a, none, none}, {e_by_dt, one, none}};
    } else if constexpr (METHOD == Method::dirac) {
      return {{e, one, none}, {e_by_a, none, none}, {e_by_dt, none, none}};
    } else if constexpr (METHOD == Method::zoh) {
      const T phi_1 = detail::phi_1_of(x);
      const T derivative = detail::ends_of(x).older;
      return {{e, phi_1 * dt, none}, {e_by_a, derivative * (dt * dt), none}, {e_by_dt, e, none}};
    } else if constexpr (METHOD == Method::foh) {
      const detail::Ends<T> end = detail::ends_of(x);
      return {{e, end.newer * dt, end.older * dt},
              {e_by_a, end.d_newer * (dt * dt), end.d_older * (dt * dt)},
              {e_by_dt, end.older, e - end.older}};
    } else {
      constexpr int DEGREE = METHOD == Method::highorder ? 1 : METHOD == Method::poly ? 2 : 3;
      const detail::Truncated<DEGREE, T> truncated(z);
      return {{e, truncated.sum * dt, none},
              {e_by_a, truncated.derivative * (dt * dt), none},
              {e_by_dt, truncated.by_dt, none}};
    }
  }
}

template <Method METHOD, typename T, typename X>
__device__ __forceinline__ Coefficients<T> coefficients(T a, Real<T> dt, const X& x) {
  return differentiated<METHOD>(a, dt, x).value;
}
