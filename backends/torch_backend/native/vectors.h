// Vectors of 16 float32 numbers, loaded from and stored as float32 or bfloat16.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <immintrin.h>

#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#define UNROLL _Pragma("GCC unroll 16")

namespace {

using at::BFloat16;
using at::Tensor;
using Vec = at::vec::Vectorized<float>;

constexpr int64_t kLanes = 16;       // floats of a vector
constexpr int64_t kGrain = 1 << 17;  // weights, or cached numbers, that are worth a thread of their own

// Memory for a thread's own numbers, in which a vector lies in one line of the cache.
template <typename T>
struct AlignedAllocator : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = AlignedAllocator<U>;
  };
  template <typename U>
  void construct(U*) {}  // numbers are written before they are read
  T* allocate(size_t count) {
    return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)));
  }
  void deallocate(T* numbers, size_t) { ::operator delete(numbers, std::align_val_t(64)); }
};

template <typename T>
using Space = std::vector<T, AlignedAllocator<T>>;

template <typename T>
constexpr int64_t kPack = sizeof(float) / sizeof(T);  // inputs that lie side by side

inline __m512 load(const float* source) { return _mm512_loadu_ps(source); }

inline __m512 load(const BFloat16* source) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store(float* target, __m512 values) { _mm512_storeu_ps(target, values); }

inline void store(BFloat16* target, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), (__m256i)_mm512_cvtneps_pbh(values));
}

// What numbers become when they are stored and loaded again.
template <typename T>
inline __m512 rounded(__m512 values) {
  if constexpr (std::is_same_v<T, float>) return values;
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(values)), 16));
}

inline __mmask16 first_lanes(int64_t count) {
  return count < kLanes ? static_cast<__mmask16>((1u << count) - 1) : 0xffff;
}

inline __m512 load(const float* source, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, source); }

inline __m512 load(const BFloat16* source, __mmask16 lanes) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, source)), 16));
}

inline void store(float* target, __m512 values, __mmask16 lanes) {
  _mm512_mask_storeu_ps(target, lanes, values);
}

inline void store(BFloat16* target, __m512 values, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(target, lanes, (__m256i)_mm512_cvtneps_pbh(values));
}

}  // namespace
