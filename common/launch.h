// launch<kernel<...>>(grid, block, dynamic_shared, stream, arguments...): one call for both devices.
// launch_together<kernel<...>>(...): the same for blocks that wait for one another: all of them begin, or none.
//
// Whatever goes wrong becomes a C++ exception that names the kernel and the launch: a grid or block past the limits
// before anything starts, CUDA's own errors after. An empty grid launches nothing. The tensors' device is made current
// around the launch, which goes to the caller's stream.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>

#include "common/device.h"
#if !defined(__CUDACC__)
#include "common/simt/launch.h"
#endif

// Where a launch goes. On the CPU device both stay as they are.
struct Stream {
  int device = -1;
  void* handle = nullptr;
};

// A grid's size in 64 bits, so that one past the limits is refused instead of wrapped.
struct Grid {
  int64_t x = 1, y = 1, z = 1;
};

namespace detail {

// "matmul_shared<float>", from the compiler's own spelling of this function.
template <auto Kernel>
std::string kernel_name() {
  std::string_view text = __PRETTY_FUNCTION__;
  const size_t begin = text.find("Kernel = ") + 9;
  size_t end = text.find("; std::", begin);
  if (end == std::string_view::npos) end = text.rfind(']');
  text = text.substr(begin, end - begin);
  if (!text.empty() && text.front() == '&') text.remove_prefix(1);
  if (!text.empty() && text.front() == '(') text = text.substr(1, text.size() - 2);  // "(name<T>)"
  const size_t arguments = text.find('(');
  return std::string(text.substr(0, arguments));
}

inline void check_grid(const std::string& kernel, Grid grid, dim3 block) {
  if (grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535 && grid.x >= 0 && grid.y >= 0 && grid.z >= 0) return;
  throw std::invalid_argument("kernel " + kernel + " cannot be launched with grid (" + std::to_string(grid.x) + ", " +
                              std::to_string(grid.y) + ", " + std::to_string(grid.z) + "), block (" +
                              std::to_string(block.x) + ", " + std::to_string(block.y) + ", " +
                              std::to_string(block.z) + "): a grid has at most (2147483647, 65535, 65535) blocks");
}

}  // namespace detail

#if defined(__CUDACC__)

namespace detail {

inline void check_cuda(cudaError_t error, const std::string& what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(what + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
  }
}

// Makes a device current, and the one before it again at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&before_), "reading the current CUDA device");
    if (device != before_)
      check_cuda(cudaSetDevice(device), "making CUDA device " + std::to_string(device) + " current");
    changed_ = device != before_;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace detail

namespace detail {

template <auto Kernel, typename... Arguments>
void launch(bool together, Grid grid, dim3 block, size_t dynamic_shared, Stream stream, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const auto name = [] { return detail::kernel_name<Kernel>(); };
  detail::check_grid(name(), grid, block);
  const detail::DeviceGuard guard(stream.device);
  if (dynamic_shared > 32 * 1024) {  // 48 KiB are there unasked, for static arrays and these together
    detail::check_cuda(
        cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(dynamic_shared)),
        "kernel " + name() + " with " + std::to_string(dynamic_shared) + " bytes of dynamic shared memory");
  }
  const dim3 blocks(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z));
  const auto handle = static_cast<cudaStream_t>(stream.handle);
  if (together) {
    cudaLaunchAttribute cooperative{};
    cooperative.id = cudaLaunchAttributeCooperative, cooperative.val.cooperative = 1;
    cudaLaunchConfig_t how{};
    how.gridDim = blocks, how.blockDim = block, how.dynamicSmemBytes = dynamic_shared, how.stream = handle;
    how.attrs = &cooperative, how.numAttrs = 1;
    cudaLaunchKernelEx(&how, Kernel, arguments...);
  } else {
    Kernel<<<blocks, block, dynamic_shared, handle>>>(arguments...);
  }
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    detail::check_cuda(error, "kernel " + name() + ", grid (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) +
                                  ", " + std::to_string(grid.z) + "), block (" + std::to_string(block.x) + ", " +
                                  std::to_string(block.y) + ", " + std::to_string(block.z) + "), " +
                                  std::to_string(dynamic_shared) + " bytes of dynamic shared memory");
  }
}

}  // namespace detail

template <auto Kernel, typename... Arguments>
void launch(Grid grid, dim3 block, size_t dynamic_shared, Stream stream, Arguments... arguments) {
  detail::launch<Kernel>(false, grid, block, dynamic_shared, stream, arguments...);
}

template <auto Kernel, typename... Arguments>
void launch_together(Grid grid, dim3 block, size_t dynamic_shared, Stream stream, Arguments... arguments) {
  detail::launch<Kernel>(true, grid, block, dynamic_shared, stream, arguments...);
}

#else

namespace detail {

template <auto Kernel, typename... Arguments>
struct Call {
  static inline const bool registered = simt::register_kernel(reinterpret_cast<const void*>(Kernel));
  std::tuple<Arguments...> arguments;
  SIMT_UNSEEN static void run(void* self) {
    [&]<size_t... I>(std::index_sequence<I...>) SIMT_UNSEEN {
      auto* kernel = Kernel;
      asm("" : "+r"(kernel));  // what it points to is hidden, so that the kernel is not inlined into unseen code
      kernel(std::get<I>(static_cast<Call*>(self)->arguments)...);
    }(std::index_sequence_for<Arguments...>());
  }
};

}  // namespace detail

template <auto Kernel, typename... Arguments>
void launch(Grid grid, dim3 block, size_t dynamic_shared, Stream, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  static const std::string name = detail::kernel_name<Kernel>();
  detail::check_grid(name, grid, block);
  using Call = detail::Call<Kernel, Arguments...>;
  static_cast<void>(Call::registered);
  Call call{{arguments...}};
  simt::launch({name.c_str(), dim3(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z)), block, dynamic_shared,
                &Call::run, &call, reinterpret_cast<const void*>(Kernel),
                uint64_t(grid.x) * uint64_t(grid.y) * uint64_t(grid.z)});
}

template <auto Kernel, typename... Arguments>
void launch_together(Grid grid, dim3 block, size_t dynamic_shared, Stream stream, Arguments... arguments) {
  if (grid.x * grid.y * grid.z > simt::RESIDENT_BLOCKS) {
    throw std::invalid_argument("kernel " + detail::kernel_name<Kernel>() + " has " +
                                std::to_string(grid.x * grid.y * grid.z) +
                                " blocks that wait for one another: the CPU device keeps at most " +
                                std::to_string(simt::RESIDENT_BLOCKS) + " at once");
  }
  launch<Kernel>(grid, block, dynamic_shared, stream, arguments...);
}

#endif
