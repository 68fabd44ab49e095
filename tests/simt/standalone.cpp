// The CPU device without Python: what tests/test_aarch64.py runs on another processor. Prints one line a check and ends
// with 0 if all of them hold.
#include <cstdio>
#include <string>
#include <vector>

#include "common/launch.h"
#include "common/simt/xray.h"
#include "common/view.h"

void run(const std::string& name, Input<1> x, Output<1> y, int64_t number,
         Stream stream);  // operations.cu, faults.cu or matrices.cu

namespace {

int failures = 0;

void check(bool holds, const char* what) {
  std::printf("%s: %s\n", what, holds ? "ok" : "WRONG");
  failures += !holds;
}

struct Result {
  std::vector<float> y;
  std::string fault;
  simt::Recording recording;
};

Result launch_one(const char* name, int64_t n, int64_t number, bool recorded) {
  std::vector<float> x(size_t(n), 0.0f);
  for (int64_t i = 0; i < n; ++i) x[size_t(i)] = float(i);
  Result result{std::vector<float>(size_t(n), -1.0f), "", {}};
  Input<1> in;
  Output<1> out;
  in.data = x.data(), out.data = result.y.data();
  in.size[0] = out.size[0] = n;
  in.stride[0] = out.stride[0] = 1;
  if (recorded) {
    simt::xray_start(0, -1);
    simt::xray_open_call();
    in.data = simt::xray_tensor(in.data, 4, 1, in.size, in.stride, simt::Role::input);
    out.data = simt::xray_tensor(out.data, 4, 1, out.size, out.stride, simt::Role::output);
  }
  try {
    run(name, in, out, number, {});
  } catch (const simt::Fault& fault) {
    result.fault = fault.what();
  }
  if (recorded) {
    simt::xray_close_call();
    result.recording = simt::xray_stop();
  }
  return result;
}

}  // namespace

int main() {
  simt::config.timeout = 1.0;
  for (simt::Order order : {simt::Order::forward, simt::Order::reverse, simt::Order::random}) {
    simt::config.order = order;
    for (bool recorded : {false, true}) {
#if defined(FAULTS)
      const Result good = launch_one("neighbour", 64, 1, recorded);
      check(good.fault.empty() && good.y[0] == 63 && good.y[63] == 0 && good.recording.faults.empty(), "neighbour");
      const Result race = launch_one("no_barrier", 64, 1, recorded);
      if (recorded) check(!race.recording.faults.empty() && race.recording.faults[0].kind == "race", "no_barrier");
      const Result copied = launch_one("copied", 64, 1, recorded);
      check(copied.fault.empty() && copied.y[0] == 63 && copied.recording.faults.empty(), "copied");
      const Result early = launch_one("no_wait", 64, 1, recorded);
      check(early.y[0] != early.y[0], "no_wait");
      if (recorded) check(early.recording.faults.at(0).kind == "copy in flight", "no_wait, told");
      for (const char* name : {"divergent", "deadlock", "spin", "null_pointer", "endless", "trap", "no_end",
                               "missing_lane", "lane_gone"}) {
        const std::string fault = launch_one(name, 64, 1, recorded).fault;
        std::printf("  %s\n", fault.c_str());
        check(fault.find(name) != std::string::npos, name);
      }
#elif defined(MATRICES)
      const Result gathered = launch_one("gather_4", 256, 32, recorded);
      bool all = gathered.fault.empty() && gathered.recording.faults.empty();
      for (int i = 0; i < 256; ++i) all = all && gathered.y[size_t(i)] == float(i);
      check(all, "gather_4");
      for (const char* name : {"half", "shared_half"}) {
        const Result product = launch_one(name, 384, 32, recorded);
        check(product.fault.empty() && product.y[0] == 40641 && product.recording.faults.empty(), name);
      }
      const Result rounded = launch_one("rounded", 256, 32, recorded);
      check(rounded.y[31] == 31, "rounded");
#else
      const Result reversed = launch_one("reversed", 1024, 1024, recorded);
      check(reversed.fault.empty() && reversed.y[0] == 1023 && reversed.y[1023] == 0, "reversed");
      const Result sum = launch_one("block_sum", 96, 96, recorded);
      check(sum.fault.empty() && sum.y[0] == 96 * 95 / 2 && sum.y[95] == sum.y[0], "block_sum");
      const Result shake = launch_one("handshake", 64, 64, recorded);
      check(shake.fault.empty() && shake.y[5] == 0, "handshake");
      const Result transposed = launch_one("transpose_conflicts", 1024, 1024, recorded);
      check(transposed.fault.empty() && transposed.y[1] == 32, "transpose_conflicts");
      if (recorded) {
        uint64_t wavefronts = 0;
        for (const auto& site : transposed.recording.sites) {
          if (site.space == simt::Space::shared && site.op == simt::Op::load) wavefronts += site.wavefronts;
        }
        check(wavefronts == 1024 && transposed.recording.faults.empty(), "its wavefronts");
      }
#endif
    }
  }
  return failures != 0;
}
