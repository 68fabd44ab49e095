#include "common/binding.h"

void run(const std::string& name, Input<2> x, Output<2> y, Stream stream);

STAGE_MODULE(m) { def_launcher(m, "run", &run, "a kernel by name", "name", "x", "y"); }
