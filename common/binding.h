// From Python to a launcher: torch tensors become Input<N>, Output<N>, InOut<N>, exceptions become Python's.
//
// No torch headers: a tensor is read through its Python attributes, so an extension builds in seconds, needs no torch
// to build and serves every version of it. One object file of a stage's binding.cpp serves its three modules.
//
//   STAGE_MODULE(m) { def_launcher(m, "matmul", &matmul, "C = A B", "a", "b", "c"); }
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "common/launch.h"
#include "common/simt/xray.h"
#include "common/view.h"

namespace py = pybind11;

// Linked into the modules of the CPU device only; null in a CUDA module.
__attribute__((weak, visibility("hidden"))) void simt_bind(py::module_& m);  // common/simt/python.cpp
namespace simt {
__attribute__((weak)) bool xray_open_call();
__attribute__((weak)) void* xray_tensor(void*, int, int, const int64_t*, const int64_t*, Role);
__attribute__((weak)) void xray_close_call();
}  // namespace simt

namespace binding {

inline bool on_cpu_device() { return &simt_bind != nullptr; }

// Names and objects of torch, looked up once.
struct Torch {
  PyObject *tensor, *float64, *float32, *float16, *bfloat16, *complex128, *complex64, *int64, *int32;
  PyObject *dtype = intern("dtype"), *shape = intern("shape"), *stride = intern("stride"),
           *data_ptr = intern("data_ptr"), *get_device = intern("get_device");

  static PyObject* intern(const char* name) { return PyUnicode_InternFromString(name); }
  static const Torch& get() {
    static const Torch* torch = [] {
      const auto module = py::module_::import("torch");
      const auto take = [&](const char* name) { return module.attr(name).cast<py::object>().release().ptr(); };
      return new Torch{take("Tensor"),     take("float64"),   take("float32"), take("float16"), take("bfloat16"),
                       take("complex128"), take("complex64"), take("int64"),   take("int32")};
    }();
    return *torch;
  }
};

inline py::object call(PyObject* self, PyObject* name) {
  PyObject* result = PyObject_CallMethodNoArgs(self, name);
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

inline py::object attribute(PyObject* self, PyObject* name) {
  PyObject* result = PyObject_GetAttr(self, name);
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

template <int N>
void read_tensor(PyObject* source, AnyView<N>& view) {
  const Torch& torch = Torch::get();
  if (PyObject_IsInstance(source, torch.tensor) != 1) {
    throw py::type_error("expected a torch.Tensor, got " + std::string(Py_TYPE(source)->tp_name));
  }
  const py::object dtype = attribute(source, torch.dtype);
  if (dtype.ptr() == torch.float32) view.dtype = DType::float32;
  else if (dtype.ptr() == torch.bfloat16) view.dtype = DType::bfloat16;
  else if (dtype.ptr() == torch.float16) view.dtype = DType::float16;
  else if (dtype.ptr() == torch.float64) view.dtype = DType::float64;
  else if (dtype.ptr() == torch.complex64) view.dtype = DType::complex64;
  else if (dtype.ptr() == torch.complex128) view.dtype = DType::complex128;
  else if (dtype.ptr() == torch.int32) view.dtype = DType::int32;
  else if (dtype.ptr() == torch.int64) view.dtype = DType::int64;
  else {
    throw py::type_error(
        "expected a tensor of float64, float32, float16, bfloat16, complex128, complex64, int64 or int32, got " +
        py::str(dtype).cast<std::string>());
  }
  view.device = int(PyLong_AsLong(call(source, torch.get_device).ptr()));
  if ((view.device < 0) != on_cpu_device()) {
    throw py::value_error(on_cpu_device() ? "this module takes CPU tensors, got one on a GPU"
                                          : "this module takes CUDA tensors, got one on the CPU");
  }
  const py::object shape = attribute(source, torch.shape), stride = call(source, torch.stride);
  if (PyTuple_GET_SIZE(shape.ptr()) != N) {
    throw py::value_error("expected a tensor of " + std::to_string(N) + " dimensions, got " +
                          std::to_string(PyTuple_GET_SIZE(shape.ptr())));
  }
  for (int d = 0; d < N; ++d) {
    view.size[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape.ptr(), d));
    view.stride[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(stride.ptr(), d));
  }
  view.data = PyLong_AsVoidPtr(call(source, torch.data_ptr).ptr());
  if (PyErr_Occurred()) throw py::error_already_set();
}

template <int N>
void refuse_overlap(const AnyView<N>& view) {
  for (int d = 0; d < N; ++d) {
    if (view.stride[d] == 0 && view.size[d] > 1) {
      throw py::value_error("an output may not be expanded: its dimension " + std::to_string(d) + " has stride 0");
    }
  }
}

// While a recording is on, a tensor's view is made to point at the x-ray's copy of it.
template <typename A>
void move_in(A&) {}
template <int N>
void move_in_as(AnyView<N>& view, simt::Role role) {
  view.data = simt::xray_tensor(view.data, size_of(view.dtype), N, view.size, view.stride, role);
}
template <int N>
void move_in(Input<N>& view) {
  move_in_as(view, simt::Role::input);
}
template <int N>
void move_in(Output<N>& view) {
  move_in_as(view, simt::Role::output);
}
template <int N>
void move_in(InOut<N>& view) {
  move_in_as(view, simt::Role::inout);
}

struct Recorded {
  bool on = on_cpu_device() && simt::xray_open_call();
  Recorded() = default;
  Recorded(const Recorded&) = delete;
  ~Recorded() {
    if (on) simt::xray_close_call();
  }
};

}  // namespace binding

// Defines a Python function for a launcher; `names` are those of its arguments before the stream.
template <typename... Arguments, typename... Names>
void def_launcher(py::module_& m, const char* name, void (*launcher)(Arguments...), const char* doc, Names... names) {
  static_assert(sizeof...(Arguments) == sizeof...(Names) + 1, "one name for each argument but the stream");
  m.def(
      name,
      [launcher](Arguments... arguments) {
        const py::gil_scoped_release others_may_run;
        const binding::Recorded recorded;
        if (recorded.on) (binding::move_in(arguments), ...);
        launcher(arguments...);
      },
      doc, py::arg(names)..., py::arg("stream") = py::none());
}

#define STAGE_MODULE(m)                           \
  static void define_stage(py::module_& m);       \
  static void define_module(py::module_& m) {     \
    if (binding::on_cpu_device()) simt_bind(m);   \
    define_stage(m);                              \
  }                                               \
  PYBIND11_MODULE(_simt, m) { define_module(m); } \
  PYBIND11_MODULE(_xray, m) { define_module(m); } \
  PYBIND11_MODULE(_cuda, m) { define_module(m); } \
  static void define_stage(py::module_& m)

namespace pybind11::detail {

template <typename V, int N>
struct tensor_caster {
  PYBIND11_TYPE_CASTER(V, const_name("torch.Tensor"));
  bool load(handle source, bool) {
    binding::read_tensor<N>(source.ptr(), value);
    if constexpr (!std::is_same_v<V, Input<N>>) binding::refuse_overlap<N>(value);
    return true;
  }
};
template <int N>
struct type_caster<Input<N>> : tensor_caster<Input<N>, N> {};
template <int N>
struct type_caster<Output<N>> : tensor_caster<Output<N>, N> {};
template <int N>
struct type_caster<InOut<N>> : tensor_caster<InOut<N>, N> {};

template <>
struct type_caster<Stream> {
  PYBIND11_TYPE_CASTER(Stream, const_name("tuple[int, int] | None"));
  bool load(handle source, bool) {
    if (source.is_none()) return true;
    if (!PyTuple_Check(source.ptr()) || PyTuple_GET_SIZE(source.ptr()) != 2) return false;
    value.device = int(PyLong_AsLong(PyTuple_GET_ITEM(source.ptr(), 0)));
    value.handle = PyLong_AsVoidPtr(PyTuple_GET_ITEM(source.ptr(), 1));
    return !PyErr_Occurred();
  }
};

}  // namespace pybind11::detail
