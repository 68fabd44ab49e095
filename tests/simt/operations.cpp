#include "common/binding.h"

void run(const std::string& name, Input<1> x, Output<1> y, int64_t threads, Stream stream);

STAGE_MODULE(m) { def_launcher(m, "run", &run, "a kernel by name", "name", "x", "y", "threads"); }
