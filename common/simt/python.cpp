// The CPU device, from Python: its settings, its facts, the x-ray's recording.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "common/simt/xray.h"

namespace py = pybind11;

__attribute__((visibility("hidden"))) void simt_bind(py::module_& m);

namespace {

py::tuple tuple_of(uint3 i) { return py::make_tuple(i.x, i.y, i.z); }
py::tuple tuple_of(dim3 i) { return py::make_tuple(i.x, i.y, i.z); }

const char* name_of(simt::Op op) {
  if (op == simt::Op::copy_store) return "copy";  // into shared memory, asynchronous
  if (op == simt::Op::bulk_load) return "bulk_load";
  if (op == simt::Op::bulk_store) return "bulk_store";
  if (op == simt::Op::product) return "product";
  return only_reads(op) ? "load" : only_writes(op) ? "store" : "atomic";
}
const char* name_of(simt::Space space) { return space == simt::Space::global ? "global" : "shared"; }
const char* name_of(simt::Role role) {
  return role == simt::Role::input ? "input" : role == simt::Role::output ? "output" : "inout";
}

py::dict to_dict(const simt::Recording& recording) {
  using namespace py::literals;
  py::list launches, tensors, sites, faults, trace;
  for (const auto& l : recording.launches) {
    launches.append(py::dict("kernel"_a = l.kernel, "grid"_a = tuple_of(l.grid), "block"_a = tuple_of(l.block),
                             "threads"_a = l.threads, "blocks"_a = l.blocks, "barriers"_a = l.barriers,
                             "warp_syncs"_a = l.warp_syncs, "dynamic_shared"_a = l.dynamic_shared,
                             "static_shared"_a = l.static_shared));
  }
  for (size_t i = 0; i < recording.tensors.size(); ++i) {
    tensors.append(
        py::dict("index"_a = i, "role"_a = name_of(recording.tensors[i].role), "bytes"_a = recording.tensors[i].bytes));
  }
  for (const auto& s : recording.sites) {
    sites.append(py::dict("launch"_a = s.launch, "pc"_a = s.pc, "op"_a = name_of(s.op), "space"_a = name_of(s.space),
                          "tensor"_a = s.tensor, "shared"_a = s.shared, "size"_a = s.size, "requests"_a = s.requests,
                          "sectors"_a = s.sectors, "wavefronts"_a = s.wavefronts, "conflicts"_a = s.conflicts,
                          "lanes"_a = s.lanes, "bytes"_a = s.bytes));
  }
  for (const auto& f : recording.faults) {
    faults.append(py::dict("kind"_a = f.kind, "launch"_a = f.launch, "pc"_a = f.pc, "other_pc"_a = f.other_pc,
                           "block"_a = tuple_of(f.block), "thread"_a = tuple_of(f.thread),
                           "other_block"_a = tuple_of(f.other_block), "other_thread"_a = tuple_of(f.other_thread),
                           "space"_a = name_of(f.space), "tensor"_a = f.tensor, "shared"_a = f.shared,
                           "offset"_a = f.offset, "count"_a = f.count));
  }
  for (const auto& row : recording.trace) {
    py::list offsets;
    for (int64_t offset : row.offset) offsets.append(offset);
    trace.append(py::make_tuple(row.launch, row.block, row.warp, row.pc, name_of(row.op), name_of(row.space),
                                row.tensor, row.shared, row.size, offsets));
  }
  return py::dict("launches"_a = launches, "tensors"_a = tensors, "sites"_a = sites, "faults"_a = faults,
                  "trace"_a = trace);
}

void configure(const std::string& schedule, uint64_t seed, int workers, double timeout) {
  simt::Config config;
  if (schedule == "forward") config.order = simt::Order::forward;
  else if (schedule == "reverse") config.order = simt::Order::reverse;
  else if (schedule == "random") config.order = simt::Order::random;
  else throw py::value_error("schedule is 'forward', 'reverse' or 'random', got '" + schedule + "'");
  if (workers < 0) throw py::value_error("workers is 0 (one a core) or more, got " + std::to_string(workers));
  if (!(timeout > 0)) throw py::value_error("timeout is a number of seconds above 0");
  config.seed = seed, config.workers = workers, config.timeout = timeout;
  simt::config = config;
}

bool python_interrupted() {
  const py::gil_scoped_acquire lock;
  return PyErr_CheckSignals() != 0;
}

}  // namespace

void simt_bind(py::module_& m) {
  using namespace py::literals;
  simt::interrupted = python_interrupted;
  py::register_local_exception<simt::Fault>(m, "KernelFault", PyExc_RuntimeError);
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const simt::Interrupted&) {
      if (!PyErr_Occurred()) PyErr_SetNone(PyExc_KeyboardInterrupt);
    }
  });
  m.def("configure", configure, "Sets how the CPU device runs launches from now on.", "schedule"_a = "forward",
        "seed"_a = 0, "workers"_a = 0, "timeout"_a = 10.0);
  m.def(
      "info",
      [] {
#if defined(__clang__)
        const char* compiler = "clang++ " __clang_version__;
#else
        const char* compiler = "g++ " __VERSION__;
#endif
        return py::dict("workers"_a = simt::worker_limit(), "warp_size"_a = 32,
                        "max_threads_per_block"_a = simt::MAX_THREADS, "max_shared_bytes"_a = simt::MAX_SHARED,
                        "stack_bytes"_a = simt::STACK_SIZE, "resident_blocks"_a = simt::RESIDENT_BLOCKS,
                        "compiler"_a = compiler);
      },
      "Facts of the CPU device.");
  m.def("xray_start", simt::xray_start, "Starts a recording; the first `trace` requests are kept one by one.",
        "trace"_a = 0, "trace_block"_a = -1);
  m.def("xray_stop", [] { return to_dict(simt::xray_stop()); }, "Ends the recording and returns it.");
}
