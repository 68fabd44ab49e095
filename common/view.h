// Views: a pointer with sizes and strides, all 64-bit, so that no index wraps however large or sparse a tensor is.
//
//   View<T, N>   what a kernel gets: typed, passed by value, indexed as view(i, j)
//   Input<N>     what a launcher gets for a tensor that it reads,   .as<T>() gives View<const T, N>
//   Output<N>    ... that it writes and nobody has written yet,     .as<T>() gives View<T, N>
//   InOut<N>     ... that it reads and writes,                      .as<T>() gives View<T, N>
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "common/device.h"
#include "common/numeric.h"

template <typename T, int N>
struct View {
  T* data;
  int64_t size[N];
  int64_t stride[N];  // in elements, any value, 0 included

  template <typename... Index>
  __host__ __device__ T& operator()(Index... index) const {
    static_assert(sizeof...(Index) == N, "a view takes as many indices as it has dimensions");
    int64_t offset = 0;
    int dim = 0;
    ((offset += int64_t(index) * stride[dim++]), ...);
    return data[offset];
  }
};

// One matrix of many: the last two dimensions, at given places of the first two.
template <typename T>
__host__ __device__ View<T, 2> matrix(const View<T, 4>& x, int64_t i, int64_t j) {
  return {&x(i, j, 0, 0), {x.size[2], x.size[3]}, {x.stride[2], x.stride[3]}};
}

// What one launch has written, for the next one to read.
template <typename T, int N>
View<const T, N> read_only(const View<T, N>& x) {
  View<const T, N> result{x.data, {}, {}};
  for (int d = 0; d < N; ++d) result.size[d] = x.size[d], result.stride[d] = x.stride[d];
  return result;
}

// The same values with a dimension counted from its end: the stride turns negative.
template <typename T, int N>
View<T, N> flipped(View<T, N> x, int dim) {
  if (x.size[dim] > 0) x.data += (x.size[dim] - 1) * x.stride[dim];
  x.stride[dim] = -x.stride[dim];
  return x;
}

template <int N>
struct AnyView {
  void* data = nullptr;
  DType dtype = DType::float32;
  int device = -1;  // the CUDA device, -1 for the CPU
  int64_t size[N] = {};
  int64_t stride[N] = {};

 protected:
  template <typename T>
  View<T, N> view() const {
    if (dtype != dtype_of<T>) {
      throw std::invalid_argument(std::string("tensors of one call must share a dtype: got ") + name_of(dtype) +
                                  " beside " + name_of(dtype_of<T>));
    }
    View<T, N> result{static_cast<T*>(data), {}, {}};
    for (int d = 0; d < N; ++d) result.size[d] = size[d], result.stride[d] = stride[d];
    return result;
  }
};

template <int N>
struct Input : AnyView<N> {
  template <typename T>
  View<const T, N> as() const {
    const View<T, N> v = this->template view<T>();
    View<const T, N> result{v.data, {}, {}};
    for (int d = 0; d < N; ++d) result.size[d] = v.size[d], result.stride[d] = v.stride[d];
    return result;
  }
};

template <int N>
struct Output : AnyView<N> {
  template <typename T>
  View<T, N> as() const {
    return this->template view<T>();
  }
};

template <int N>
struct InOut : Output<N> {};
