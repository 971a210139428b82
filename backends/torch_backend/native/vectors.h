// Vectors of 16 lanes of 32 bits, and what all kernels do with them. They are loaded from and stored to
// memory of other types too.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <type_traits>
#include <vector>

// Full unrolling keeps an array of accumulators in registers: every index becomes a constant.
#define UNROLL _Pragma("GCC unroll 16")

namespace {

using at::BFloat16;
using at::Tensor;

}  // namespace

#ifdef __AVX512VNNI__
#include "avx512.h"
#else
#include "avx2.h"
#endif

namespace {

constexpr int64_t kLanes = 16;       // float32 lanes of a vector
constexpr int64_t kGrain = 1 << 17;  // elements of a weight or a cache for which another thread pays

// An allocator for a thread's own buffers. They start at a cache line, so no vector straddles two lines.
template <typename T>
struct AlignedAllocator : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = AlignedAllocator<U>;
  };
  template <typename U>
  void construct(U*) {}  // `resize` does not clear: every element is written before it is read
  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)));
  }
  void deallocate(T* elements, size_t) { ::operator delete(elements, std::align_val_t(64)); }
};

template <typename T>
using Buffer = std::vector<T, AlignedAllocator<T>>;

// Elements that share a 32-bit lane: the bfloat16 and int8 instructions multiply and add 2 or 4 at a time.
template <typename T>
constexpr int64_t kPack = sizeof(float) / sizeof(T);

// Return the values as they would be after a store and a load. Fused operators round where separate ones do.
template <typename T>
inline Floats rounded(Floats values) {
  if constexpr (std::is_same_v<T, float>) return values;
  return widen(narrow(values));
}

}  // namespace
