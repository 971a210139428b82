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

// The bfloat16 instructions, or the same by float32 where the processor lacks them: numbers rounded to nearest
// even, and sums of the products of pairs that share a lane.
#ifdef __AVX512BF16__

inline __m256i narrow(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

inline __m512i narrow(__m512 high, __m512 low) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

inline __m512 add_pairs(__m512 sums, __m512i left, __m512i right) {
  return _mm512_dpbf16_ps(sums, (__m512bh)left, (__m512bh)right);
}

#else

inline __m256i narrow(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest =
      _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), is_odd);
  // Rounding could turn a NaN into an infinity.
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i rounded_bits = _mm512_mask_mov_epi32(nearest, is_nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits, 16));
}

inline __m512i narrow(__m512 high, __m512 low) {
  return _mm512_inserti64x4(_mm512_castsi256_si512(narrow(low)), narrow(high), 1);
}

inline __m512 add_pairs(__m512 sums, __m512i left, __m512i right) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  const __m512 odd = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(left, upper)),
                                     _mm512_castsi512_ps(_mm512_and_si512(right, upper)), sums);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(left, 16)),
                         _mm512_castsi512_ps(_mm512_slli_epi32(right, 16)), odd);
}

#endif

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
