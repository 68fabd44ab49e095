#include "common/binding.h"

void axpy(double alpha, Input<1> x, Input<1> y, Output<1> out, Stream stream);

STAGE_MODULE(m) { def_launcher(m, "axpy", &axpy, "out[n] = alpha x[n] + y[n]", "alpha", "x", "y", "out"); }
