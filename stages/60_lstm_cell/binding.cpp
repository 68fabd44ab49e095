#include "common/binding.h"

void lstm_forward(Input<3> products, Input<2> weight_hh, Input<2> h0, Input<2> c0, Input<3> mask, Output<3> h,
                  Output<2> c_last, Output<3> z, Output<3> cells, int activation, Stream stream);
void lstm_step(Input<2> products, Input<2> weight_hh, Input<2> h_before, Input<2> c_before, Input<2> mask, Output<2> h,
               Output<2> c, Output<2> z, int activation, Stream stream);
void lstm_backward(Input<3> dh, Input<2> dc_last, Input<2> weight_hh, Input<2> c0, Input<3> mask, Input<3> z,
                   Input<3> cells, Output<3> dz, Output<2> dh0, Output<2> dc0, int activation, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "lstm_forward", &lstm_forward, "h, the last c, and z and c of all steps, from W x + b", "products",
               "weight_hh", "h0", "c0", "mask", "h", "c_last", "z", "cells", "activation");
  def_launcher(m, "lstm_step", &lstm_step, "one step of lstm_forward", "products", "weight_hh", "h_before", "c_before",
               "mask", "h", "c", "z", "activation");
  def_launcher(m, "lstm_backward", &lstm_backward, "the gradients of lstm_forward", "dh", "dc_last", "weight_hh", "c0",
               "mask", "z", "cells", "dz", "dh0", "dc0", "activation");
}
