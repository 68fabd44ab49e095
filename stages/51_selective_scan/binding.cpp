#include "common/binding.h"

void selective_scan(Input<3> u, Input<3> delta, Input<2> A, Input<4> B, Input<4> C, Input<1> D, Input<3> z,
                    Input<1> delta_bias, Input<3> initial_state, Output<3> y, Output<3> last_state, Output<4> states,
                    bool delta_softplus, int method, int states_of_a_lane, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "selective_scan", &selective_scan, "the selective scan", "u", "delta", "A", "B", "C", "D", "z",
               "delta_bias", "initial_state", "y", "last_state", "states", "delta_softplus", "method",
               "states_of_a_lane");
}
