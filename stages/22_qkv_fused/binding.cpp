#include "common/binding.h"

void qkv(Input<4> q, Input<4> k, Input<4> v, Output<4> o, double scale, Stream stream);

STAGE_MODULE(m) { def_launcher(m, "qkv", &qkv, "O = scale (Q K^T) V", "q", "k", "v", "o", "scale"); }
