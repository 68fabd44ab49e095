#include "common/binding.h"

void naive(Input<2> a, Input<2> b, Output<2> c, Stream stream);
void tiled(Input<2> a, Input<2> b, Output<2> c, Stream stream);
void waiting(int64_t blocks, int64_t barriers, Stream stream);
void plain(const std::string& loops, Input<2> a, Input<2> b, Output<2> c, int64_t cores, Stream stream);

STAGE_MODULE(m) {
  def_launcher(m, "naive", &naive, "C = A B, a thread for each output", "a", "b", "c");
  def_launcher(m, "tiled", &tiled, "C = A B through shared memory", "a", "b", "c");
  def_launcher(m, "waiting", &waiting, "threads that meet at barriers", "blocks", "barriers");
  def_launcher(m, "plain", &plain, "C = A B by loops", "loops", "a", "b", "c", "cores");
}
