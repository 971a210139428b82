// The product that the kernels are made of: a few rows by a block of 64 columns, whose inputs lie one after
// the other, bfloat16 ones in pairs. A row is summed in an order that is its own.

#pragma once

#include <cstring>

#include "vectors.h"

namespace {

constexpr int64_t kVectors = 4;   // vectors of sums for a row and a block
constexpr int64_t kBlock = 64;    // outputs of a weight's block
constexpr int64_t kRows = 4;      // rows whose sums fit the registers
constexpr int64_t kAhead = 4096;  // bytes: what streams from the memory is asked for so far ahead; the
                                  // processor's own asking ends with a page

inline __m512 multiply_add(__m512 sums, const float* input, __m512i weights) {
  return _mm512_fmadd_ps(_mm512_set1_ps(*input), _mm512_castsi512_ps(weights), sums);
}

// Whole numbers: the sums are of 32 bits, in registers and memory that are otherwise those of floats.
inline __m512 multiply_add(__m512 sums, const int8_t* input, __m512i weights) {
  int32_t four;
  std::memcpy(&four, input, sizeof four);
  return _mm512_castsi512_ps(
      _mm512_dpbusd_epi32(_mm512_castps_si512(sums), weights, _mm512_set1_epi32(four)));
}

inline __m512 multiply_add(__m512 sums, const BFloat16* input, __m512i weights) {
  int32_t pair;
  std::memcpy(&pair, input, sizeof pair);
  return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights);
}

// Load what a block has for one input, or as many as lie side by side.
template <typename T, typename W>
inline void load_weights(__m512i (&weights)[kVectors], const W* source, T*) {
  static_assert(sizeof(T) == sizeof(W));
  UNROLL for (int64_t v = 0; v < kVectors; ++v)
    weights[v] = _mm512_loadu_si512(source + v * kLanes * kPack<T>);
}

inline __m512 load(const int8_t* source) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
}

inline __m512i load_as(const int8_t* source, float) { return _mm512_castps_si512(load(source)); }

inline __m512i load_as(const int8_t* source, BFloat16) {
  return (__m512i)_mm512_cvtne2ps_pbh(load(source + kLanes), load(source));
}

// Whole numbers, which the inputs' type holds exactly. They are left in `space`, where there is one, for the
// rows that come after.
template <typename T>
inline void load_weights(__m512i (&weights)[kVectors], const int8_t* source, T* space) {
  UNROLL for (int64_t v = 0; v < kVectors; ++v) {
    weights[v] = load_as(source + v * kLanes * kPack<T>, T());
    if (space != nullptr) _mm512_storeu_si512(space + v * kLanes * kPack<T>, weights[v]);
  }
}

// Add to the sums [row, 64] of `rows` rows what a block's weights from one input on, `num_inputs` of them,
// make of the rows' inputs; where it `begins`, the sums held nothing yet. Rows are `stride` apart, and the
// next inputs of a row, as many as a weight packs, are `step` further. Weights that `stream` are asked for
// ahead.
template <int64_t rows, bool stream, bool begins, typename T, typename W>
inline void add_chunk(float* sums, const T* input, int64_t stride, const W* weight, int64_t num_inputs,
                      int64_t step, T* space) {
  __m512 held[rows][kVectors];
  UNROLL for (int64_t r = 0; r < rows; ++r) {
    UNROLL for (int64_t v = 0; v < kVectors; ++v)
      held[r][v] = begins ? _mm512_setzero_ps() : load(sums + r * kBlock + v * kLanes);
  }
  for (int64_t k = 0; k < num_inputs; k += kPack<T>, input += step) {
    __m512i weights[kVectors];
    if constexpr (stream) {
      const char* ahead = reinterpret_cast<const char*>(weight + k * kBlock) + kAhead;
      UNROLL for (int64_t n = 0; n < kBlock * kPack<T> * int64_t{sizeof(W)}; n += 64)
        _mm_prefetch(ahead + n, _MM_HINT_T1);
    }
    load_weights(weights, weight + k * kBlock, space == nullptr ? nullptr : space + k * kBlock);
    UNROLL for (int64_t r = 0; r < rows; ++r) {
      UNROLL for (int64_t v = 0; v < kVectors; ++v)
        held[r][v] = multiply_add(held[r][v], input + r * stride, weights[v]);
    }
  }
  UNROLL for (int64_t r = 0; r < rows; ++r) UNROLL
    for (int64_t v = 0; v < kVectors; ++v) store(sums + r * kBlock + v * kLanes, held[r][v]);
}

// The same for the next rows, `most` of the `num_rows` that are left.
template <bool stream = false, int64_t most = kRows, bool begins = false, typename T, typename W>
void add_rows(float* sums, const T* input, int64_t stride, const W* weight, int64_t num_inputs,
              int64_t num_rows, int64_t step = kPack<T>, T* space = nullptr) {
  if constexpr (most > 1) {
    if (num_rows < most)
      return add_rows<stream, most - 1, begins>(sums, input, stride, weight, num_inputs, num_rows, step,
                                                space);
  }
  add_chunk<most, stream, begins>(sums, input, stride, weight, num_inputs, step, space);
}

}  // namespace
