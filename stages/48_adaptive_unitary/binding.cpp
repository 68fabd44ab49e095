#include "common/binding.h"

void adaptive_unitary(Input<3> u, Input<3> dt, Input<3> x, Input<2> x_bias, Input<1> B, Input<1> C, Input<1> D,
                      Input<3> z, Input<3> state, Output<3> y, Output<3> w, Output<3> last, Output<4> sums,
                      Output<4> phases, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "adaptive_unitary", &adaptive_unitary, "the adaptive unitary operator", "u", "dt", "x", "x_bias", "B",
               "C", "D", "z", "state", "y", "w", "last", "sums", "phases");
}
