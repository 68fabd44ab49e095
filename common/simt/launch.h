// What common/launch.h asks of the CPU device. Every kernel includes it, so it includes little: a kernel compiles sooner.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/simt/simt.h"

namespace simt {

// So many blocks of a launch may wait for one another: a block that waits keeps its place, and the next one begins,
// until so many have begun and not ended. (A GPU keeps as many as its multiprocessors hold.)
constexpr int RESIDENT_BLOCKS = 64;

struct Launch {
  const char* kernel;
  dim3 grid, block;
  size_t dynamic_shared;
  void (*run)(void*);  // runs the kernel for the current thread
  void* arguments;
  const void* entry;  // the kernel's address, to find its shared variables
  uint64_t blocks;
};
void launch(const Launch& launch);
bool register_kernel(const void* entry);  // as the module loads: which functions are kernels

}  // namespace simt
