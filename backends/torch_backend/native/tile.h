// The tile of a matrix product that the kernels share: a few rows by a block of 64 columns. A column's inputs
// are packed: 1 of float32, 2 of bfloat16 or 4 of int8 share a 32-bit lane.
//
// Batch invariance: a row adds its inputs' products in ascending order to one accumulator per column. The
// number of rows in the tile has no part in that order, so a row's result does not depend on the batch.

#pragma once

#include <cstring>

#include "vectors.h"

namespace {

constexpr int64_t kBlock = 64;                      // columns of a block; `BLOCK` in kernels.py
constexpr int64_t kBlockVectors = kBlock / kLanes;  // accumulators of a row
constexpr int64_t kTileRows = 4;                    // 16 accumulators, with room for weights in 32 registers
// Bytes between a load and its prefetch. The processor's own prefetcher stops at the end of a 4 KiB page.
constexpr int64_t kPrefetchDistance = 4096;
constexpr int64_t kCacheLine = 64;  // bytes

constexpr int64_t round_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

inline __m512 multiply_add(__m512 sums, const float* input, __m512i weights) {
  return _mm512_fmadd_ps(_mm512_set1_ps(*input), _mm512_castsi512_ps(weights), sums);
}

inline __m512 multiply_add(__m512 sums, const BFloat16* input, __m512i weights) {
  int32_t pair;
  std::memcpy(&pair, input, sizeof pair);
  return add_pairs(sums, _mm512_set1_epi32(pair), weights);
}

// The sums of int8 rows are int32. They travel in the registers and the memory of float32 sums, so that one
// tile serves all types.
inline __m512 multiply_add(__m512 sums, const int8_t* input, __m512i weights) {
  int32_t four;
  std::memcpy(&four, input, sizeof four);
  return _mm512_castsi512_ps(
      _mm512_dpbusd_epi32(_mm512_castps_si512(sums), weights, _mm512_set1_epi32(four)));
}

inline __m512 load(const int8_t* source) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
}

inline __m512i load_widened(const int8_t* source, float) { return _mm512_castps_si512(load(source)); }

inline __m512i load_widened(const int8_t* source, BFloat16) {
  return narrow(load(source + kLanes), load(source));
}

// Load a block's weights for `kPack<T>` inputs.
template <typename T, typename W>
inline void load_weights(__m512i (&weights)[kBlockVectors], const W* source, T*) {
  static_assert(sizeof(T) == sizeof(W));
  UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) {
    weights[v] = _mm512_loadu_si512(source + v * kLanes * kPack<T>);
  }
}

// Widen int8 weights to the rows' type, which holds them exactly. If `widened` is not null, they are also
// stored there: the rows that follow then skip the conversion.
template <typename T>
inline void load_weights(__m512i (&weights)[kBlockVectors], const int8_t* source, T* widened) {
  UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) {
    weights[v] = load_widened(source + v * kLanes * kPack<T>, T());
    if (widened != nullptr) _mm512_storeu_si512(widened + v * kLanes * kPack<T>, weights[v]);
  }
}

// Add the products of `rows` rows with a block's weights, over `num_inputs` inputs, to `sums` [row, 64].
//
// - `prefetches`: the weights come from memory, so those that follow are prefetched.
// - `from_zero`: `sums` is written without being read.
// - `row_stride`: elements from a row to the next one.
// - `input_step`: elements from a row's `kPack<T>` inputs to the next ones.
// - `widened`: where to leave widened int8 weights, or null.
template <int64_t rows, bool prefetches, bool from_zero, typename T, typename W>
inline void accumulate_tile(float* sums, const T* input, int64_t row_stride, const W* weight,
                            int64_t num_inputs, int64_t input_step, T* widened) {
  // All accumulators stay in registers over the whole loop: each weight is loaded once for all rows, and each
  // input is broadcast once for all 64 columns.
  __m512 accumulators[rows][kBlockVectors];
  UNROLL for (int64_t r = 0; r < rows; ++r) {
    UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) {
      accumulators[r][v] = from_zero ? _mm512_setzero_ps() : load(sums + r * kBlock + v * kLanes);
    }
  }
  for (int64_t k = 0; k < num_inputs; k += kPack<T>, input += input_step) {
    __m512i weights[kBlockVectors];
    if constexpr (prefetches) {
      const char* ahead = reinterpret_cast<const char*>(weight + k * kBlock) + kPrefetchDistance;
      UNROLL for (int64_t n = 0; n < kBlock * kPack<T> * int64_t{sizeof(W)}; n += kCacheLine) {
        _mm_prefetch(ahead + n, _MM_HINT_T1);
      }
    }
    load_weights(weights, weight + k * kBlock, widened == nullptr ? nullptr : widened + k * kBlock);
    UNROLL for (int64_t r = 0; r < rows; ++r) {
      UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) {
        accumulators[r][v] = multiply_add(accumulators[r][v], input + r * row_stride, weights[v]);
      }
    }
  }
  UNROLL for (int64_t r = 0; r < rows; ++r) {
    UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) {
      store(sums + r * kBlock + v * kLanes, accumulators[r][v]);
    }
  }
}

// Do the same for the first `max_rows` of `num_rows` rows, or for all if there are fewer. The recursion turns
// the number of rows into a constant.
template <bool prefetches = false, int64_t max_rows = kTileRows, bool from_zero = false, typename T,
          typename W>
void accumulate_rows(float* sums, const T* input, int64_t row_stride, const W* weight, int64_t num_inputs,
                     int64_t num_rows, int64_t input_step = kPack<T>, T* widened = nullptr) {
  if constexpr (max_rows > 1) {
    if (num_rows < max_rows) {
      return accumulate_rows<prefetches, max_rows - 1, from_zero>(sums, input, row_stride, weight, num_inputs,
                                                                  num_rows, input_step, widened);
    }
  }
  accumulate_tile<max_rows, prefetches, from_zero>(sums, input, row_stride, weight, num_inputs, input_step,
                                                   widened);
}

}  // namespace
