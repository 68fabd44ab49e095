#include "common/binding.h"

void bilinear(Input<3> A, Input<3> B, Input<1> delta, Output<3> A_bar, Output<3> B_bar, Output<3> inverse,
              Stream stream);
void bilinear_backward(Input<3> dA_bar, Input<3> dB_bar, Input<3> A, Input<3> B, Input<1> delta, Input<3> inverse,
                       Output<3> dA, Output<3> dB, Output<1> ddelta, Stream stream);
void exponential(Input<3> A, Input<3> B, Input<1> delta, Output<3> A_bar, Output<3> B_prev, Output<3> B_bar, bool ramp,
                 Stream stream);
void exponential_backward(Input<3> dA_bar, Input<3> dB_prev, Input<3> dB_bar, Input<3> A, Input<3> B, Input<1> delta,
                          Output<3> dA, Output<3> dB, Output<1> ddelta, bool ramp, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "bilinear", &bilinear, "A_bar = 2 M^-1 - 1, B_bar = dt M^-1 B, M = 1 - dt A / 2", "A", "B", "delta",
               "A_bar", "B_bar", "inverse");
  def_launcher(m, "bilinear_backward", &bilinear_backward, "the gradients of bilinear", "dA_bar", "dB_bar", "A", "B",
               "delta", "inverse", "dA", "dB", "ddelta");
  def_launcher(m, "exponential", &exponential, "A_bar = e^z, B_bar = dt phi_1 B; with a ramp foh", "A", "B", "delta",
               "A_bar", "B_prev", "B_bar", "ramp");
  def_launcher(m, "exponential_backward", &exponential_backward, "the gradients of exponential", "dA_bar", "dB_prev",
               "dB_bar", "A", "B", "delta", "dA", "dB", "ddelta", "ramp");
}
