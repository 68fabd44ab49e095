#include "common/binding.h"

void adaptive_unitary(Input<3> u, Input<3> dt, Input<3> x, Input<2> x_bias, Input<1> B, Input<1> C, Input<1> D,
                      Input<3> z, Input<3> state, Output<3> y, Output<3> w, Output<3> last, Output<4> sums,
                      Output<4> phases, Stream stream);
void adaptive_unitary_backward(Input<3> dy, Input<3> dlast, Input<3> u, Input<3> dt, Input<3> x, Input<2> x_bias,
                               Input<1> B, Input<1> C, Input<1> D, Input<3> z, Input<3> state, Input<3> w,
                               Input<4> sums, Input<4> phases, Input<1> bc, Input<3> start, Output<3> du, Output<3> ddt,
                               Output<3> dz, Output<3> dstate, Output<4> pulls, Output<4> leans, Output<4> dx,
                               Output<3> dbias, Output<3> dB, Output<3> dC, Output<2> dD, Output<4> du_of_theta,
                               Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "adaptive_unitary", &adaptive_unitary, "the adaptive unitary operator", "u", "dt", "x", "x_bias", "B",
               "C", "D", "z", "state", "y", "w", "last", "sums", "phases");
  def_launcher(m, "adaptive_unitary_backward", &adaptive_unitary_backward, "its gradients", "dy", "dlast", "u", "dt",
               "x", "x_bias", "B", "C", "D", "z", "state", "w", "sums", "phases", "bc", "start", "du", "ddt", "dz",
               "dstate", "pulls", "leans", "dx", "dbias", "dB", "dC", "dD", "du_of_theta");
}
