#include "common/binding.h"

void matmul(Input<2> a, Input<2> b, Output<2> c, Stream stream);

STAGE_MODULE(m) { def_launcher(m, "matmul", &matmul, "C[M, N] = A[M, K] B[K, N]", "a", "b", "c"); }
