#include "common/binding.h"

void vlstm(Input<4> q, Input<4> k, Input<4> v, Input<3> i, Input<3> f, Output<4> h, double scale, double eps, int gate,
           Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "vlstm", &vlstm, "H = u V / max(|sum u|, 1), u = scale (Q K^T) times gates", "q", "k", "v", "i", "f",
               "h", "scale", "eps", "gate");
}
