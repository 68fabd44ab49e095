#include "common/binding.h"

void qkv(Input<4> q, Input<4> k, Input<4> v, Output<5> parts, Output<4> o, double scale, Stream stream);
void qkv_as_it_failed(Input<4> q, Input<4> k, Input<4> v, Output<4> o, double scale, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "qkv", &qkv, "O = scale (Q K^T) V, parts added up by a second launch", "q", "k", "v", "parts", "o",
               "scale");
  def_launcher(m, "qkv_as_it_failed", &qkv_as_it_failed, "O = scale (Q K^T) V, if blocks took turns", "q", "k", "v",
               "o", "scale");
}
