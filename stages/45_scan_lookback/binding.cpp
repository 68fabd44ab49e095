#include "common/binding.h"

void scan(Input<3> a, Input<3> b, Input<2> h0, Output<3> h, InOut<1> words, bool rows, int64_t tiles, bool reverse,
          Stream stream);
void scan_backward(Input<3> g, Input<3> a, Input<3> h, Input<2> h0, Output<3> da, Output<3> db, Output<2> dh0,
                   InOut<1> words, bool rows, int64_t tiles, bool reverse, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "scan", &scan, "h[t] = a[t] h[t - 1] + b[t]", "a", "b", "h0", "h", "words", "rows", "tiles",
               "reverse");
  def_launcher(m, "scan_backward", &scan_backward, "the gradients of scan", "g", "a", "h", "h0", "da", "db", "dh0",
               "words", "rows", "tiles", "reverse");
}
