#include "common/binding.h"

void discretize_matrix(const std::string& method, Input<3> A, Input<3> B, Input<1> delta, Output<3> A_bar,
                       Output<3> B_prev, Output<3> B_bar, Stream stream);
void discretize_matrix_backward(const std::string& method, Input<3> A, Input<3> B, Input<1> delta, Input<3> A_bar,
                                Input<3> B_bar, Input<3> g_A_bar, Input<3> g_B_prev, Input<3> g_B_bar, Output<3> dA,
                                Output<3> dB, Output<1> ddelta, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "discretize_matrix", &discretize_matrix, "A_bar and B_bar of systems", "method", "A", "B", "delta",
               "A_bar", "B_prev", "B_bar");
  def_launcher(m, "discretize_matrix_backward", &discretize_matrix_backward, "the gradients of discretize_matrix",
               "method", "A", "B", "delta", "A_bar", "B_bar", "g_A_bar", "g_B_prev", "g_B_bar", "dA", "dB", "ddelta");
}
