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
constexpr int64_t kTileRows = 4;                    // of a small batch
// Bytes between a load and its prefetch. The processor's own prefetcher stops at the end of a 4 KiB page.
constexpr int64_t kPrefetchDistance = 4096;
constexpr int64_t kCacheLine = 64;  // bytes

constexpr int64_t round_up(int64_t number, int64_t step) { return (number + step - 1) / step * step; }

// Return four int8 numbers in each lane.
inline Ints broadcast_four(const int8_t* input) {
  int32_t four;
  std::memcpy(&four, input, sizeof four);
  return broadcast(four);
}

inline Floats multiply_add(Floats sums, const float* input, Ints weights, const void*) {
  return fmadd(broadcast(*input), as_floats(weights), sums);
}

inline Floats multiply_add(Floats sums, const BFloat16* input, const PairOperand& weights, const void*) {
  int32_t pair;
  std::memcpy(&pair, input, sizeof pair);
  return add_pairs(sums, as_pairs(broadcast(pair)), weights, BFloat16());
}

// The sums of int8 rows are int32. They travel in the registers and the memory of float32 sums, so that one
// tile serves all types.
inline Floats multiply_add(Floats sums, const int8_t* input, Ints weights, const void*) {
  return as_floats(add_weights(as_ints(sums), weights, broadcast_four(input)));
}

// What a product takes of a vector of weights, which are multiplied with rows of type T.
template <typename T>
using Operand = std::conditional_t<std::is_same_v<T, BFloat16>, PairOperand, Ints>;

template <typename T>
inline Operand<T> as_operand(Ints bits) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return as_pairs(bits);
  } else {
    return bits;
  }
}

// Load a vector of a block's weights.
template <typename T, typename W>
inline Operand<T> load_weights(const W* source, T*) {
  static_assert(sizeof(T) == sizeof(W));
  return as_operand<T>(load_bits(source));
}

// Widen int8 weights to the rows' type, which holds them exactly. If `widened` is not null, they are also
// stored there: the rows that follow then skip the conversion.
inline Operand<float> load_weights(const int8_t* source, float* widened) {
  const Floats weights = load(source);
  if (widened != nullptr) store(widened, weights);
  return as_ints(weights);
}

inline Operand<BFloat16> load_weights(const int8_t* source, BFloat16* widened) {
  if (widened == nullptr) return load_as_pairs(source);
  const Ints bits = load_as_bfloat16(source);
  store_bits(widened, bits);
  return as_pairs(bits);
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
  // Accumulators stay in registers over the loop: each weight is loaded once for all rows, and each input is
  // broadcast once for all columns.
  constexpr int64_t count = kVectorsAtOnce<rows>;
  UNROLL for (int64_t first = 0; first < kBlockVectors; first += count) {
    const int64_t column = first * kLanes;
    const T* inputs = input;
    Floats accumulators[rows][count];
    UNROLL for (int64_t r = 0; r < rows; ++r) {
      UNROLL for (int64_t v = 0; v < count; ++v) {
        accumulators[r][v] = from_zero ? Floats{} : load(sums + r * kBlock + column + v * kLanes);
      }
    }
    for (int64_t k = 0; k < num_inputs; k += kPack<T>, inputs += input_step) {
      if (prefetches && first == 0) {
        const char* ahead = reinterpret_cast<const char*>(weight + k * kBlock) + kPrefetchDistance;
        UNROLL for (int64_t n = 0; n < kBlock * kPack<T> * int64_t{sizeof(W)}; n += kCacheLine) {
          _mm_prefetch(ahead + n, _MM_HINT_T1);
        }
      }
      Operand<T> weights[count];
      UNROLL for (int64_t v = 0; v < count; ++v) {
        const int64_t place = k * kBlock + (column + v * kLanes) * kPack<T>;
        weights[v] = load_weights(weight + place, widened == nullptr ? nullptr : widened + place);
      }
      UNROLL for (int64_t r = 0; r < rows; ++r) {
        UNROLL for (int64_t v = 0; v < count; ++v) {
          accumulators[r][v] = multiply_add(accumulators[r][v], inputs + r * row_stride, weights[v], weight);
        }
      }
    }
    UNROLL for (int64_t r = 0; r < rows; ++r) {
      UNROLL for (int64_t v = 0; v < count; ++v) {
        store(sums + r * kBlock + column + v * kLanes, accumulators[r][v]);
      }
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
