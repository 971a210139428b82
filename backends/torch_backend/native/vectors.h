// Vectors of 16 float32 lanes, loaded from and stored to float32 or bfloat16 memory.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cpu/vec/vec.h>
#include <immintrin.h>

#include <cstdint>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

// Full unrolling keeps an array of accumulators in registers: every index becomes a constant.
#define UNROLL _Pragma("GCC unroll 16")

namespace {

using at::BFloat16;
using at::Tensor;
using Vec = at::vec::Vectorized<float>;

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

// A bfloat16 is the upper half of a float32, so loading one is a shift.
inline __m512 widen(__m256i numbers) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
}

inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

inline __m512 load(const float* source) { return _mm512_loadu_ps(source); }

inline __m512 load(const BFloat16* source) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}

inline void store(float* target, __m512 values) { _mm512_storeu_ps(target, values); }

inline void store(BFloat16* target, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), narrow(values));
}

// Return the values as they would be after a store and a load. Fused operators round where separate ones do.
template <typename T>
inline __m512 rounded(__m512 values) {
  if constexpr (std::is_same_v<T, float>) return values;
  return widen(narrow(values));
}

// Return the mask of the first `count` lanes: all of them from 16 on.
inline __mmask16 first_lanes(int64_t count) {
  return count < kLanes ? static_cast<__mmask16>((1u << count) - 1) : 0xffff;
}

inline __m512 load(const float* source, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, source); }

inline __m512 load(const BFloat16* source, __mmask16 lanes) {
  return widen(_mm256_maskz_loadu_epi16(lanes, source));
}

inline __m512 load(const int8_t* source, __mmask16 lanes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, source)));
}

inline void store(float* target, __m512 values, __mmask16 lanes) {
  _mm512_mask_storeu_ps(target, lanes, values);
}

inline void store(BFloat16* target, __m512 values, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(target, lanes, narrow(values));
}

}  // namespace
