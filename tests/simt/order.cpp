#include "common/binding.h"

void run(const std::string& name, Input<1> x, Output<1> y, InOut<1> words, int64_t blocks, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "run", &run, "a kernel by name; `words` are zeros", "name", "x", "y", "words", "blocks");
}
