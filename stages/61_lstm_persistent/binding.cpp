#include "common/binding.h"

void lstm_forward(Input<3> products, Input<2> weight_hh, Input<2> h0, Input<2> c0, Input<3> mask, Output<3> h,
                  Output<2> c_last, Output<3> z, Output<3> cells, int activation, InOut<1> arrived, int units,
                  Stream stream);
void lstm_backward(Input<3> dh, Input<2> dc_last, Input<2> weight_hh, Input<2> c0, Input<3> mask, Input<3> z,
                   Input<3> cells, Output<3> dz, Output<2> dh0, Output<2> dc0, int activation, Output<3> handed,
                   Output<2> kept, InOut<1> arrived, int units, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "lstm_forward", &lstm_forward, "the LSTM, from the products of its inputs", "products", "weight_hh",
               "h0", "c0", "mask", "h", "c_last", "z", "cells", "activation", "arrived", "units");
  def_launcher(m, "lstm_backward", &lstm_backward, "its gradients", "dh", "dc_last", "weight_hh", "c0", "mask", "z",
               "cells", "dz", "dh0", "dc0", "activation", "handed", "kept", "arrived", "units");
}
