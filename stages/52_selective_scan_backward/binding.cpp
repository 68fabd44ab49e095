#include "common/binding.h"

void selective_scan(Input<3> u, Input<3> delta, Input<2> A, Input<4> B, Input<4> C, Input<1> D, Input<3> z,
                    Input<1> delta_bias, Input<3> initial_state, Output<3> y, Output<3> last_state, Output<4> states,
                    bool delta_softplus, int method, int states_of_a_lane, Stream stream);
void selective_scan_backward(Input<3> dy, Input<3> dlast, Input<3> u, Input<3> delta, Input<2> A, Input<4> B,
                             Input<4> C, Input<1> D, Input<3> z, Input<1> delta_bias, Input<4> states, Output<3> du,
                             Output<3> ddelta, Output<3> dz, Output<3> dinitial, Output<4> carried, Output<5> of_b,
                             Output<5> of_c, Output<4> of_d, Output<4> of_bias, Output<4> so_far, bool delta_softplus,
                             int method, int parts, Stream stream);
int backward_warps();
int backward_states();

STAGE_MODULE(m) {
  def_launcher(m, "selective_scan", &selective_scan, "the selective scan", "u", "delta", "A", "B", "C", "D", "z",
               "delta_bias", "initial_state", "y", "last_state", "states", "delta_softplus", "method",
               "states_of_a_lane");
  def_launcher(m, "selective_scan_backward", &selective_scan_backward, "its gradients", "dy", "dlast", "u", "delta",
               "A", "B", "C", "D", "z", "delta_bias", "states", "du", "ddelta", "dz", "dinitial", "carried", "of_b",
               "of_c", "of_d", "of_bias", "so_far", "delta_softplus", "method", "parts");
  m.attr("WARPS") = backward_warps();
  m.attr("STATES") = backward_states();
}
