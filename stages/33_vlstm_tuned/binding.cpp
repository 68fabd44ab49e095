#include "common/binding.h"

void vlstm(Input<4> q, Input<4> k, Input<4> v, Input<3> i, Input<3> f, Output<4> h, Output<4> rows, Output<4> lines,
           Output<4> tiles, double scale, double eps, int gate, Stream stream);
void vlstm_backward(Input<4> dh, Input<4> q, Input<4> k, Input<4> v, Input<3> i, Input<3> f, Input<4> h, Input<4> rows,
                    Output<4> dq, Output<4> dk, Output<4> dv, Output<3> di, Output<3> df, Output<4> lines,
                    Output<4> tiles, Output<5> parts, double scale, double eps, int gate, bool normalizer_gradient,
                    Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "vlstm", &vlstm, "H of the vLSTM, and l and m of its rows", "q", "k", "v", "i", "f", "h", "rows",
               "lines", "tiles", "scale", "eps", "gate");
  def_launcher(m, "vlstm_backward", &vlstm_backward, "the gradients of the vLSTM", "dh", "q", "k", "v", "i", "f", "h",
               "rows", "dq", "dk", "dv", "di", "df", "lines", "tiles", "parts", "scale", "eps", "gate",
               "normalizer_gradient");
}
