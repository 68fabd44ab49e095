#include "common/binding.h"

void functions(Input<1> z, Output<2> out, Stream stream);
void coefficients_of(const std::string& method, bool of_steps, Input<1> a, Input<1> dt, Output<2> out, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "functions", &functions, "e^z, 1 / z, phi_1, phi_2 and phi_3", "z", "out");
  def_launcher(m, "coefficients_of", &coefficients_of, "a method's coefficients and derivatives", "method", "of_steps",
               "a", "dt", "out");
}
