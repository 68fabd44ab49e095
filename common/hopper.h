// Hopper's own machine: copies of whole boxes, barriers that count their bytes, and products straight from shared memory.
//
// Who works on what. A *copy engine* (TMA) moves boxes of a matrix between global and shared memory; one thread asks it
// to. The *tensor cores* multiply tiles as they lie in shared memory; four warps, a *warpgroup*, ask them to. Both go on
// while the threads that asked compute, or ask for more; what orders them are
//
//   MBarrier          in shared memory: a phase of it is over when so many threads have arrived and so many bytes have
//                     come. Phases are 0, 1, 2, ...; who waits names the parity of the phase that is to be over.
//   groups            of products, and of copies to global memory: closed by a commit, waited for by who asked.
//
//   // a producer, one thread                                   // consumers, a warpgroup
//   wait(free[i], parity ^ 1);                                  wait(full[i], parity);
//   arrive_expecting(full[i], sizeof tile[i]);                  wgmma_fence();
//   load_box(tile[i].a, a, k, row, full[i]);                    wgmma<T, true, false>(sum, tile[i].a, tile[i].b);
//   load_box(tile[i].b, b, col, k, full[i]);                    wgmma_commit();
//                                                               wgmma_wait<0>(sum);
//                                                               if (first of the group) arrive(free[i]);
//
// (A wait for parity 1 of a barrier in its first phase returns at once: the phase before it counts as over.)
//
// How a box lies. BOX = 64 elements of 16 bits are 128 bytes, all the banks. A box is some rows of them, at a multiple
// of 1024 bytes, with the 16-byte chunks of each row swapped about: chunk i of row r is at place i ^ r % 8 (swizzled),
// so that 8 rows below each other are in different banks. Copies and products know it; whoever else touches a box
// calls `swizzled`. A matrix whose elements lie side by side along k ("by k") is boxes of 64 k by any rows; another one
// is boxes of 64 rows by DEPTH = 64 k, one after the other.
//
// The CPU device does all of it as late as it may be done: a copy when all threads wait, a product at its wait, a copy
// to global memory at its wait, or never. The x-ray follows who knows what by barriers and waits: it tells a product
// that reads a box before it has come, or that runs while somebody fills its tiles anew, a copy of what was written
// without a fence_async, registers that are not there to be taken; and a wait for what never comes is the deadlock it is.
// Not seen: an element of a box that lies in the gap of a view; bytes of a box closer than 16; and, as a cluster is run as
// one block of at most 1024 threads, its blocks' other turns. A fence before products is asked for after every wait.
// All of this is of compute capability 9.0, compiled for sm_90a. Source: the PTX ISA, 9.7.9 (copies), 9.7.13 (mbarrier),
// 9.7.15 (wgmma).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "common/device.h"
#include "common/launch.h"
#include "common/numeric.h"
#include "common/view.h"

constexpr int BOX = 64;    // elements of 16 bits in a row of a box
constexpr int DEPTH = 64;  // along k of a tile
constexpr int WARPGROUP = 128;

// The place of a 16-byte chunk in a row of a box.
__host__ __device__ constexpr int swizzled(int row, int chunk) { return chunk ^ row % 8; }

struct alignas(8) MBarrier {
  uint64_t state;
};

#if defined(__CUDACC__)
#include <cuda.h>

// A matrix in global memory, and the size of the boxes in which it is copied. Made on the host; the kernel takes it as
// `const __grid_constant__ TensorMap`.
using TensorMap = CUtensorMap;

#else
namespace simt {
struct TensorMap {
  char* data;
  int64_t width, height, pitch;  // of the matrix: elements along its rows in memory, rows, bytes from row to row
  int box_height, itemsize;
};
}  // namespace simt
using TensorMap = simt::TensorMap;
#endif

// The map of a matrix whose elements lie side by side along dimension `along`, in boxes of BOX elements along it by
// `height` <= 256. Past the matrix's edges boxes are filled with zeros, and not copied to it.
//
// Raises std::invalid_argument: a size of 2^31 or more, rows that are not 16 bytes aligned.
template <typename T>
TensorMap tensor_map(const View<T, 2>& x, int along, int height) {
  static_assert(sizeof(T) == 2, "boxes are of elements of 16 bits here");
  const int64_t width = x.size[along], rows = x.size[1 - along];
  // The pitch of a single row is of no meaning, and may be anything.
  const int64_t pitch = int64_t(sizeof(T)) * (rows > 1 ? x.stride[1 - along] : ceil_div(width, 8) * 8);
  const auto address = reinterpret_cast<uintptr_t>(x.data);
  if (width < 1 || rows < 1 || width >> 31 || rows >> 31) {
    throw std::invalid_argument("the copy engine takes matrices of 1 to 2^31 - 1 rows and columns, got " +
                                std::to_string(x.size[0]) + " x " + std::to_string(x.size[1]));
  }
  if ((width > 1 && x.stride[along] != 1) || pitch % 16 != 0 || pitch < 0 || pitch >> 40 || address % 16 != 0) {
    throw std::invalid_argument("the copy engine takes rows that begin at multiples of 16 bytes, got strides " +
                                std::to_string(x.stride[0]) + ", " + std::to_string(x.stride[1]));
  }
#if defined(__CUDACC__)
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    detail::check_cuda(
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found),
        "finding the driver's cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode) throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled: it is older than CUDA 12");
  const cuuint64_t sizes[2] = {cuuint64_t(width), cuuint64_t(rows)}, pitches[1] = {cuuint64_t(pitch)};
  const cuuint32_t box[2] = {BOX, cuuint32_t(height)}, every[2] = {1, 1};
  TensorMap map;
  const CUresult result = encode(
      &map,
      std::is_same_v<std::remove_const_t<T>, half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      2, const_cast<std::remove_const_t<T>*>(x.data), sizes, pitches, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled refuses a matrix of " + std::to_string(x.size[0]) + " x " +
                             std::to_string(x.size[1]) + ": CUDA error " + std::to_string(int(result)));
  }
  return map;
#else
  return {const_cast<char*>(reinterpret_cast<const char*>(x.data)), width, rows, pitch, height, int(sizeof(T))};
#endif
}

#if defined(__CUDACC__)

// How many blocks of a kernel that takes a whole multiprocessor run at once.
inline int64_t multiprocessors(Stream stream) {
  int count = 0;
  detail::check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, stream.device),
                     "asking for the number of multiprocessors");
  return count;
}

namespace detail {
__device__ __forceinline__ uint32_t shared_address(const void* place) {
  return uint32_t(__cvta_generic_to_shared(place));
}
}  // namespace detail

// ---- barriers -------------------------------------------------------------------------------------------------------
// By one thread, before all else; then fence_async, and a __syncthreads, or a cluster_sync where others may arrive here.
__device__ __forceinline__ void init(MBarrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;" ::"r"(
                   detail::shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

// What this thread has written to shared memory is there for the copy engine and the tensor cores, too: for what this
// thread asks of them from now on, and for others after a barrier.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void arrive(MBarrier& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(detail::shared_address(&barrier)) : "memory");
}

// Arrives, and has the phase wait for so many bytes of copies.
__device__ __forceinline__ void arrive_expecting(MBarrier& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(detail::shared_address(&barrier)),
               "r"(bytes)
               : "memory");
}

// Waits until the phase of this parity, 0 or 1, is over. What was done before its arrivals, and what its copies have
// brought, is there for this thread.
__device__ __forceinline__ void wait(MBarrier& barrier, uint32_t parity) {
  uint32_t over = 0;
  while (!over) {
    asm volatile(
        "{ .reg .pred over; mbarrier.try_wait.parity.shared::cta.b64 over, [%1], %2; selp.u32 %0, 1, 0, over; }"
        : "=r"(over)
        : "r"(detail::shared_address(&barrier)), "r"(parity)
        : "memory");
  }
}

// A barrier of `threads` threads, whole warps, of the block: one of 1 to 15.
template <int THREADS>
__device__ __forceinline__ void sync_group(int number) {
  static_assert(THREADS % 32 == 0, "whole warps meet");
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
}

// ---- clusters -------------------------------------------------------------------------------------------------------
// Blocks beside each other that run at the same time and reach each other's shared memory: the boxes that one of them
// loads may go to all, and a thread may arrive at another block's barrier, as long as that block has not ended.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return int(rank);
}

// A barrier of all threads of the cluster that have not returned.
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// Arrives at the barrier at this place of the block of that rank. Products and copies that this thread has waited for are
// over for whoever waits there. (Of what threads have stored that is not said: it would take a fence of the whole GPU.)
__device__ __forceinline__ void arrive_at(int rank, MBarrier& barrier) {
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; "
      "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(detail::shared_address(&barrier)),
      "r"(rank)
      : "memory");
}

// launch<kernel>(...) in clusters of so many blocks, along x.
template <auto Kernel, typename... Arguments>
void launch_clusters(int cluster, Grid grid, dim3 block, size_t dynamic_shared, Stream stream, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  const std::string name = detail::kernel_name<Kernel>();
  detail::check_grid(name, grid, block);
  const detail::DeviceGuard guard(stream.device);
  const std::string what = "kernel " + name + ", grid (" + std::to_string(grid.x) + ", " + std::to_string(grid.y) +
                           ", " + std::to_string(grid.z) + "), clusters of " + std::to_string(cluster) + ", " +
                           std::to_string(dynamic_shared) + " bytes of dynamic shared memory";
  detail::check_cuda(cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(dynamic_shared)),
                     what);
  cudaLaunchAttribute clusters{};
  clusters.id = cudaLaunchAttributeClusterDimension;
  clusters.val.clusterDim.x = unsigned(cluster), clusters.val.clusterDim.y = clusters.val.clusterDim.z = 1;
  cudaLaunchConfig_t how{};
  how.gridDim = dim3(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z)), how.blockDim = block;
  how.dynamicSmemBytes = dynamic_shared, how.stream = static_cast<cudaStream_t>(stream.handle);
  how.attrs = &clusters, how.numAttrs = 1;
  detail::check_cuda(cudaLaunchKernelEx(&how, Kernel, arguments...), what);
}

// ---- copies ---------------------------------------------------------------------------------------------------------
// Starts to copy the box whose first element is element `along` of row `across` of a matrix, as it lies in memory. The
// bytes of the whole box count for the barrier, also those past the edges.
__device__ __forceinline__ void load_box(void* to, const TensorMap& map, int64_t along, int64_t across,
                                         MBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(detail::shared_address(to)),
      "l"(&map), "r"(int(along)), "r"(int(across)), "r"(detail::shared_address(&barrier))
      : "memory");
}

// The same to this place of several blocks of the cluster, bit i of `blocks` for the one of rank i; each has its own
// barrier for it, at this place. It is read once for all of them.
__device__ __forceinline__ void load_box_to(unsigned blocks, void* to, const TensorMap& map, int64_t along,
                                            int64_t across, MBarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(detail::shared_address(to)),
      "l"(&map), "r"(int(along)), "r"(int(across)), "r"(detail::shared_address(&barrier)), "h"(uint16_t(blocks))
      : "memory");
}

// Starts to copy a box to global memory; it belongs to the group that this thread's next store_commit closes.
__device__ __forceinline__ void store_box(const TensorMap& map, int64_t along, int64_t across, const void* from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
               "r"(int(along)), "r"(int(across)), "r"(detail::shared_address(from))
               : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the LEFT newest groups of this thread have been read from shared memory, which may be written
// again then. By the end of the kernel all of them have to be.
template <int LEFT>
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// ---- products -------------------------------------------------------------------------------------------------------
// By a whole warpgroup, as all below. Before products whose sums threads may have touched since the last wait.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// The products since the last one are a group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the LEFT newest groups are under way: nothing reads the tiles of the others any more.
template <int LEFT>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// The same, and the sums are there.
template <int LEFT, int N>
__device__ __forceinline__ void wgmma_wait(float (&sum)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sum[i])::"memory");
  wgmma_wait<LEFT>();
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}

namespace detail {
// What wgmma wants to know of an operand: where it begins, the bytes from 8 rows of 128 bytes to the next 8, and, of one
// that is not by k, from a box to the next one; all in units of 16 bytes. The topmost bits say how chunks are swapped.
__device__ __forceinline__ uint64_t operand(const void* place) {
  constexpr uint64_t NEXT_ROWS = 8 * 128 / 16, NEXT_BOX = DEPTH * 128 / 16, SWIZZLE_128 = 1;
  return (shared_address(place) & 0x3ffff) >> 4 | NEXT_BOX << 16 | NEXT_ROWS << 32 | SWIZZLE_128 << 62;
}
}  // namespace detail

#define REGISTERS_32_0                                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define REGISTERS_32_1                                                                                             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, " \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REGISTERS_32_2                                                                                             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REGISTERS_32_3                                                                                             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
  "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define SUMS_32(i)                                                                                         \
  SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12), SUMS_4(i + 16), SUMS_4(i + 20), SUMS_4(i + 24), \
      SUMS_4(i + 28)

// Of D[64][2 N] += A[64][16] B[16][2 N], from shared memory; T is half or bfloat16, products are exact, sums floats in no
// specified order. A thread has of D what mma.sync would give it: with g = lane / 4 and t = lane % 4, warp w of the
// warpgroup, sum[4 j + 2 h + e] = D[16 w + 8 h + g][8 j + 2 t + e].
//
// `a` and `b` are the places of the first elements. Of a box by k the next 16 k are 16 elements further on, of another
// one 16 rows of the box.
template <typename T, bool A_BY_K, bool B_BY_K, int N>
__device__ __forceinline__ void wgmma(float (&sum)[N], const T* a, const T* b) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16>, "wgmma multiplies half or bfloat16 here");
  static_assert(N == 64 || N == 128, "D has 128 or 256 columns");
  const uint64_t a_place = detail::operand(a), b_place = detail::operand(b);
#define WGMMA(columns, type, registers, next, ...)                                                                \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" registers "}, " next ";" \
               : __VA_ARGS__                                                                                      \
               : "l"(a_place), "l"(b_place), "n"(int(!A_BY_K)), "n"(int(!B_BY_K)))
#define WGMMA_128(type) \
  WGMMA("128", type, REGISTERS_32_0 ", " REGISTERS_32_1, "%64, %65, 1, 1, 1, %66, %67", SUMS_32(0), SUMS_32(32))
#define WGMMA_256(type)                                                                          \
  WGMMA("256", type, REGISTERS_32_0 ", " REGISTERS_32_1 ", " REGISTERS_32_2 ", " REGISTERS_32_3, \
        "%128, %129, 1, 1, 1, %130, %131", SUMS_32(0), SUMS_32(32), SUMS_32(64), SUMS_32(96))
  if constexpr (N == 64 && std::is_same_v<T, half>) WGMMA_128("f16");
  else if constexpr (N == 64) WGMMA_128("bf16");
  else if constexpr (std::is_same_v<T, half>) WGMMA_256("f16");
  else WGMMA_256("bf16");
}
#undef WGMMA_256
#undef WGMMA_128
#undef WGMMA
#undef SUMS_32
#undef SUMS_4
#undef REGISTERS_32_3
#undef REGISTERS_32_2
#undef REGISTERS_32_1
#undef REGISTERS_32_0

// Stores four matrices of 8 rows of 16 bytes, by a warp: the reverse of load_matrices. Lane l gives the place of row
// l % 8 of matrix l / 8; fragment[i] of lane l are the values 2 (l % 4) and 2 (l % 4) + 1 of row l / 4 of matrix i.
__device__ __forceinline__ void store_matrices(void* row, const uint32_t (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(detail::shared_address(row)),
               "r"(fragment[0]), "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// Two sums as T, in a register: the first one in its low half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16>, "two of 16 bits fit a register");
  using Pair = std::conditional_t<std::is_same_v<T, half>, __half2, __nv_bfloat162>;
  Pair pair;
  if constexpr (std::is_same_v<T, half>) pair = __floats2half2_rn(low, high);
  else pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// ---- registers ------------------------------------------------------------------------------------------------------
// All threads of a block begin with as many registers, 65536 / THREADS, and can pass them on: a warpgroup that needs few
// gives some back, down to COUNT a thread; one that needs many waits until there are as many. A kernel that does so has
// __launch_bounds__(THREADS, 1), and each warpgroup's part of it is a branch of one if.
template <int COUNT>
__device__ __forceinline__ void give_registers() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "a thread has 24 to 256 registers, by eights");
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "a thread has 24 to 256 registers, by eights");
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

#else  // the same on the CPU device, by common/simt/hopper.cpp

namespace simt {
constexpr int64_t MULTIPROCESSORS = 4;  // few: a small problem shows what a block does that has many tiles
struct Product {
  const void *a, *b;
  int columns;  // of D
  bool is_half, a_by_k, b_by_k;
};
void init(void* barrier, int arrivals, const char* file, int line);
void fence_async();
void arrive(void* barrier, int bytes, bool expecting, const char* file, int line);
void wait(void* barrier, uint32_t parity, const char* file, int line);
void sync_group(int number, int threads, const char* file, int line);
void load_box(void* to, const TensorMap& map, int64_t along, int64_t across, void* barrier, unsigned blocks,
              const char* file, int line);
int cluster_rank();
void cluster_sync(const char* file, int line);
void arrive_at(void* barrier, int rank, const char* file, int line);
void launch_clusters(const Launch& launch, int cluster);
void store_box(const TensorMap& map, int64_t along, int64_t across, const void* from, const char* file, int line);
void store_commit();
void store_wait(int left);
void wgmma_fence();
void wgmma(const Product& product, float* sum, const char* file, int line);
void wgmma_commit();
void wgmma_wait(int left, const char* file, int line);
void store_matrices(void* row, const uint32_t* fragment, const char* file, int line);
void change_registers(int count, bool take, const char* file, int line);
}  // namespace simt

inline int64_t multiprocessors(Stream) { return simt::MULTIPROCESSORS; }

__forceinline__ void init(MBarrier& barrier, int arrivals, SIMT_CALLER) { simt::init(&barrier, arrivals, file, line); }
__forceinline__ void fence_async() { simt::fence_async(); }
__forceinline__ void arrive(MBarrier& barrier, SIMT_CALLER) { simt::arrive(&barrier, 0, false, file, line); }
__forceinline__ void arrive_expecting(MBarrier& barrier, int bytes, SIMT_CALLER) {
  simt::arrive(&barrier, bytes, true, file, line);
}
__forceinline__ void wait(MBarrier& barrier, uint32_t parity, SIMT_CALLER) { simt::wait(&barrier, parity, file, line); }
template <int THREADS>
__forceinline__ void sync_group(int number, SIMT_CALLER) {
  static_assert(THREADS % 32 == 0, "whole warps meet");
  simt::sync_group(number, THREADS, file, line);
}

__forceinline__ void load_box(void* to, const TensorMap& map, int64_t along, int64_t across, MBarrier& barrier,
                              SIMT_CALLER) {
  simt::load_box(to, map, along, across, &barrier, 0, file, line);
}
__forceinline__ void load_box_to(unsigned blocks, void* to, const TensorMap& map, int64_t along, int64_t across,
                                 MBarrier& barrier, SIMT_CALLER) {
  simt::load_box(to, map, along, across, &barrier, blocks, file, line);
}

__forceinline__ int cluster_rank() { return simt::cluster_rank(); }
__forceinline__ void cluster_sync(SIMT_CALLER) { simt::cluster_sync(file, line); }
__forceinline__ void arrive_at(int rank, MBarrier& barrier, SIMT_CALLER) {
  simt::arrive_at(&barrier, rank, file, line);
}

template <auto Kernel, typename... Arguments>
void launch_clusters(int cluster, Grid grid, dim3 block, size_t dynamic_shared, Stream, Arguments... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return;
  static const std::string name = detail::kernel_name<Kernel>();
  detail::check_grid(name, grid, block);
  using Call = detail::Call<Kernel, Arguments...>;
  static_cast<void>(Call::registered);
  Call call{{arguments...}};
  simt::launch_clusters(
      {name.c_str(), dim3(unsigned(grid.x), unsigned(grid.y), unsigned(grid.z)), block, dynamic_shared, &Call::run,
       &call, reinterpret_cast<const void*>(Kernel), uint64_t(grid.x) * uint64_t(grid.y) * uint64_t(grid.z)},
      cluster);
}
__forceinline__ void store_box(const TensorMap& map, int64_t along, int64_t across, const void* from, SIMT_CALLER) {
  simt::store_box(map, along, across, from, file, line);
}
__forceinline__ void store_commit() { simt::store_commit(); }
template <int LEFT>
__forceinline__ void store_wait() {
  simt::store_wait(LEFT);
}

__forceinline__ void wgmma_fence() { simt::wgmma_fence(); }
__forceinline__ void wgmma_commit() { simt::wgmma_commit(); }
template <int LEFT>
__forceinline__ void wgmma_wait(SIMT_CALLER) {
  simt::wgmma_wait(LEFT, file, line);
}
template <int LEFT, int N>
__forceinline__ void wgmma_wait(float (&)[N], SIMT_CALLER) {
  simt::wgmma_wait(LEFT, file, line);
}
template <typename T, bool A_BY_K, bool B_BY_K, int N>
__forceinline__ void wgmma(float (&sum)[N], const T* a, const T* b, SIMT_CALLER) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bfloat16>, "wgmma multiplies half or bfloat16 here");
  static_assert(N == 64 || N == 128, "D has 128 or 256 columns");
  simt::wgmma({a, b, 2 * N, std::is_same_v<T, half>, A_BY_K, B_BY_K}, sum, file, line);
}

__forceinline__ void store_matrices(void* row, const uint32_t (&fragment)[4], SIMT_CALLER) {
  simt::store_matrices(row, fragment, file, line);
}

template <typename T>
__forceinline__ uint32_t pack(float low, float high) {
  return uint32_t(T(low).bits) | uint32_t(T(high).bits) << 16;
}

template <int COUNT>
__forceinline__ void give_registers(SIMT_CALLER) {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "a thread has 24 to 256 registers, by eights");
  simt::change_registers(COUNT, false, file, line);
}
template <int COUNT>
__forceinline__ void take_registers(SIMT_CALLER) {
  static_assert(COUNT % 8 == 0 && COUNT >= 24 && COUNT <= 256, "a thread has 24 to 256 registers, by eights");
  simt::change_registers(COUNT, true, file, line);
}

#endif
