#include "common/binding.h"

void discretize(const std::string& method, Input<4> A, Input<4> delta, Output<4> A_bar, Output<4> gain_prev,
                Output<4> gain, Stream stream);
void discretize_backward(const std::string& method, Input<4> A, Input<4> delta, Input<4> g_A_bar, Input<4> g_gain_prev,
                         Input<4> g_gain, Output<4> dA, Output<4> ddelta, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "discretize", &discretize, "A_bar and gains of A and steps", "method", "A", "delta", "A_bar",
               "gain_prev", "gain");
  def_launcher(m, "discretize_backward", &discretize_backward, "the gradients of discretize", "method", "A", "delta",
               "g_A_bar", "g_gain_prev", "g_gain", "dA", "ddelta");
}
