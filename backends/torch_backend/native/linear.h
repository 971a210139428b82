// Products of any number of rows with the weights of linear layers, which lie as oneDNN lays them out, so
// that there is one copy of them with and without these kernels.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "tile.h"

namespace {

constexpr int64_t kFew = 32;    // rows that each thread normalises for itself, and by which a weight is
                                // multiplied as fast as it is read
constexpr int64_t kMany = 512;  // rows whose sums with a block stay in the second-level cache
constexpr int64_t kTall = 6;  // of many rows, those that meet a weight at once: their sums fill all registers
constexpr int32_t kAbove = 128;  // how far weights of 8 bits without a sign lie above their values
constexpr int64_t kFilled = 32;  // more inputs than a weight is filled up by
constexpr int64_t kMostWhole =
    1 << 16;  // inputs of rows of 8 bits: their sums, of up to 255 × 127 each, stay below 2³¹

// Whether weights are kept as whole numbers and multiplied as the rows' type.
template <typename W>
constexpr bool kIsWidened = std::is_same_v<W, int8_t>;

// Inputs of a block that stay in the first-level cache until many rows have met them; few rows take fewer at
// a time.
template <typename T>
constexpr int64_t kChunk = 96 * kPack<T>;
constexpr int64_t kFewChunk = 32;

// What a product reads beside its rows. Weights of 8 bits have scales, one for each output, and those that
// rows of 8 bits meet no sign.
template <typename T, typename W>
struct Weights {
  const W* numbers;
  int64_t inputs;  // that an output has room for, of which rows may have fewer
  const float* scales;
  const T* bias;  // or none

  Weights from(int64_t output) const {
    return {numbers + output * inputs, inputs, scales == nullptr ? nullptr : scales + output,
            bias == nullptr ? nullptr : bias + output};
  }
};

// Rows are read as they are, or as whole numbers of 8 bits, with a scale for each row, by weights without a
// sign.
template <typename T, typename W>
using Number = std::conditional_t<std::is_same_v<W, uint8_t>, int8_t, T>;

template <typename N>
struct Rows {
  const N* numbers;       // [row, input]
  const float* scales;    // [row], of whole numbers
  const int32_t* excess;  // [row]: what their products are too large by

  Rows from(int64_t row, int64_t inputs) const {
    return {numbers + row * inputs, scales == nullptr ? nullptr : scales + row,
            excess == nullptr ? nullptr : excess + row};
  }
};

// What is done to a product's rows before it and to its outputs after it, each as operators of its own would
// do it, rounding included.
template <typename T>
struct Around {
  const T* norm;  // [input]: the weight of the rows' root-mean-square norm, or none
  float epsilon;
  const T* residual;  // [row, output]: what is added to the outputs, or none
  bool is_gated;  // the first half of the products are gates of the second: there are half as many outputs
};

template <typename T>
void normalise(T* normed, const T* input, const Around<T>& around, int64_t rows, int64_t inputs) {
  for (int64_t r = 0; r < rows; ++r, input += inputs, normed += inputs) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t k = 0; k < inputs; k += kLanes) {
      const __m512 values = load(input + k, first_lanes(inputs - k));
      squares = _mm512_fmadd_ps(values, values, squares);
    }
    const __m512 factor =
        _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(squares) / inputs + around.epsilon));
    for (int64_t k = 0; k < inputs; k += kLanes) {
      const __mmask16 lanes = first_lanes(inputs - k);
      const __m512 values = rounded<T>(_mm512_mul_ps(load(input + k, lanes), factor));
      store(normed + k, _mm512_mul_ps(load(around.norm + k, lanes), values), lanes);
    }
  }
}

// Divide each row by its scale, a 127th of its largest number, and round. A number that is none makes the
// scale none.
template <typename T>
void quantize(int8_t* numbers, float* scales, int32_t* excess, const T* input, int64_t rows, int64_t inputs) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (int64_t r = 0; r < rows; ++r, input += inputs, numbers += inputs) {
    __m512i bits = _mm512_setzero_si512();
    for (int64_t k = 0; k < inputs; k += kLanes) {
      bits = _mm512_max_epi32(
          bits, _mm512_and_si512(_mm512_castps_si512(load(input + k, first_lanes(inputs - k))), magnitude));
    }
    const float largest = std::bit_cast<float>(_mm512_reduce_max_epi32(bits));
    scales[r] = largest / 127;
    const __m512 factor = _mm512_set1_ps(1 / std::max(scales[r], std::numeric_limits<float>::min()));
    __m512i sums = _mm512_setzero_si512();
    for (int64_t k = 0; k < inputs; k += kLanes) {
      const __mmask16 lanes = first_lanes(inputs - k);
      const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(input + k, lanes), factor));
      sums = _mm512_add_epi32(sums, whole);
      _mm512_mask_cvtsepi32_storeu_epi8(numbers + k, lanes, whole);
    }
    excess[r] = kAbove * _mm512_reduce_add_epi32(sums);
  }
}

// Rows that a product does not read as they are given.
template <typename T, typename N>
class Prepared {
 public:
  static bool is_needed(const Around<T>& around) { return kIsWhole || around.norm != nullptr; }

  void resize(const Around<T>& around, int64_t rows, int64_t inputs) {
    if (around.norm != nullptr) normed_.resize(rows * inputs);
    if (kIsWhole) whole_.resize(rows * inputs), scales_.resize(rows), excess_.resize(rows);
  }

  void prepare(const T* input, const Around<T>& around, int64_t begin, int64_t end, int64_t inputs) {
    const int64_t first = begin * inputs;
    input += first;
    if (around.norm != nullptr) {
      normalise(normed_.data() + first, input, around, end - begin, inputs);
      input = normed_.data() + first;
    }
    if (kIsWhole)
      quantize(whole_.data() + first, scales_.data() + begin, excess_.data() + begin, input, end - begin,
               inputs);
  }

  Rows<N> rows() const {
    if constexpr (kIsWhole)
      return {whole_.data(), scales_.data(), excess_.data()};
    else
      return {normed_.data(), nullptr, nullptr};
  }

 private:
  static constexpr bool kIsWhole = std::is_same_v<N, int8_t>;
  Buffer<T> normed_;
  Buffer<int8_t> whole_;
  Buffer<float> scales_;
  Buffer<int32_t> excess_;
};

// Add to the sums [row, 64] what a chunk of a block's weights makes of the rows, `most` at a time. The first
// ones ask for the weights that come next, of few rows all, and leave widened ones in `space`.
template <int64_t most, typename T, typename W>
void add_block(float* sums, const T* input, const W* weight, int64_t rows, int64_t inputs, int64_t num_inputs,
               T* space) {
  accumulate_rows<true, most>(sums, input, inputs, weight, num_inputs, rows, kPack<T>,
                              rows > most ? space : nullptr);
  for (int64_t r = most; r < rows; r += most) {
    float* some = sums + r * kBlock;
    if constexpr (!kIsWidened<W>) {
      accumulate_rows<most == kTileRows, most>(some, input + r * inputs, inputs, weight, num_inputs,
                                               rows - r);
    } else {
      accumulate_rows<false, most>(some, input + r * inputs, inputs, space, num_inputs, rows - r);
    }
  }
}

// Write the products [row, 64] of one block: `width` of its 64.
template <typename T, typename N, typename W>
void multiply_block(float* sums, const Rows<N>& rows, const Weights<T, W>& weights, int64_t num_rows,
                    int64_t inputs, int64_t width) {
  alignas(64) N space[kIsWidened<W> ? kChunk<N> * kBlock : 1];
  std::fill_n(sums, num_rows * kBlock, 0.0f);
  const int64_t size = num_rows <= kFew && !kIsWidened<W> ? kFewChunk : kChunk<N>;
  for (int64_t k = 0; k < inputs; k += size) {
    const W* chunk = weights.numbers + k * kBlock;
    const int64_t num_inputs = std::min(size, inputs - k);
    (num_rows <= kFew ? add_block<kTileRows, N, W> : add_block<kTall, N, W>)(sums, rows.numbers + k, chunk,
                                                                             num_rows, inputs, num_inputs,
                                                                             space);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    float* row = sums + r * kBlock;
    if constexpr (std::is_same_v<N, int8_t>) {
      for (int64_t n = 0; n < kBlock; n += kLanes) {
        const __m512i whole =
            _mm512_sub_epi32(_mm512_loadu_si512(row + n), _mm512_set1_epi32(rows.excess[r]));
        store(row + n, _mm512_mul_ps(_mm512_cvtepi32_ps(whole), _mm512_set1_ps(rows.scales[r])));
      }
    }
    for (int64_t n = 0; weights.scales != nullptr && n < width; ++n) row[n] *= weights.scales[n];
    for (int64_t n = 0; weights.bias != nullptr && n < width; ++n)
      row[n] += static_cast<float>(weights.bias[n]);
  }
}

inline __m512 silu(__m512 values) { return _mm512_div_ps(values, Vec(1.0f) + Vec(values).neg().exp()); }

// Write a block's outputs, made of its products and, where they are gated, of their gates.
template <typename T>
void write_block(T* output, const float* products, const float* gates, const T* residual, int64_t rows,
                 int64_t outputs, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < width; n += kLanes) {
      const __mmask16 lanes = first_lanes(width - n);
      __m512 values = load(products + r * kBlock + n);
      if (gates != nullptr)
        values =
            _mm512_mul_ps(rounded<T>(silu(rounded<T>(load(gates + r * kBlock + n)))), rounded<T>(values));
      if (residual != nullptr)
        values = _mm512_add_ps(load(residual + r * outputs + n, lanes), rounded<T>(values));
      store(output + r * outputs + n, values, lanes);
    }
  }
}

// Write the outputs [row, output] of up to `kMany` rows for the blocks from `begin` to `end`, a block being
// gates and what they gate, if they are.
template <typename T, typename N, typename W>
void multiply_rows(T* output, const Rows<N>& rows, const Weights<T, W>& weights, const Around<T>& around,
                   int64_t num_rows, int64_t inputs, int64_t outputs, int64_t begin, int64_t end) {
  thread_local Buffer<float> sums;
  sums.resize(2 * num_rows * kBlock);
  float *products = sums.data(), *gates = around.is_gated ? products + num_rows * kBlock : nullptr;
  const int64_t gated = around.is_gated ? outputs : 0;
  for (int64_t first = begin * kBlock; first < end * kBlock; first += kBlock) {
    const int64_t width = std::min(kBlock, outputs - first);
    if (around.is_gated) multiply_block(gates, rows, weights.from(first), num_rows, inputs, width);
    multiply_block(products, rows, weights.from(gated + first), num_rows, inputs, width);
    write_block(output + first, products, gates,
                around.residual == nullptr ? nullptr : around.residual + first, num_rows, outputs, width);
  }
}

template <typename T, typename W>
void multiply(Tensor& output, const Tensor& input, const Weights<T, W>& weights, const Around<T>& around,
              int64_t blocks) {
  using Rows = Rows<Number<T, W>>;
  using Prepared = Prepared<T, Number<T, W>>;
  const int64_t inputs = input.size(-1), outputs = output.size(-1), num_rows = input.numel() / inputs,
                parts = around.is_gated ? 2 : 1;
  const T* given = input.const_data_ptr<T>();
  const bool are_prepared = Prepared::is_needed(around);
  Prepared shared;  // many rows, once for all threads
  if (are_prepared && num_rows > kFew) {
    shared.resize(around, num_rows, inputs);
    at::parallel_for(0, num_rows, std::max<int64_t>(1, kGrain / inputs),
                     [&](int64_t begin, int64_t end) { shared.prepare(given, around, begin, end, inputs); });
  }
  at::parallel_for(0, blocks / parts, std::max<int64_t>(1, kGrain / (parts * kBlock * inputs)),
                   [&](int64_t begin, int64_t end) {
    thread_local Prepared own;
    Rows rows;
    if (!are_prepared) {
      if constexpr (std::is_same_v<Number<T, W>, T>) rows = {given, nullptr, nullptr};
    } else if (num_rows > kFew) {
      rows = shared.rows();
    } else {
      own.resize(around, num_rows, inputs);
      own.prepare(given, around, 0, num_rows, inputs);
      rows = own.rows();
    }
    for (int64_t first = 0; first < num_rows; first += kMany) {
      Around<T> here = around;
      if (around.residual != nullptr) here.residual += first * outputs;
      multiply_rows(output.data_ptr<T>() + first * outputs, rows.from(first, inputs), weights, here,
                    std::min(kMany, num_rows - first), inputs, outputs, begin, end);
    }
  });
}

template <typename T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

template <typename T>
void multiply_by(Tensor& output, const Tensor& rows, const Tensor& weight,
                 const std::optional<Tensor>& scales, const std::optional<Tensor>& bias,
                 const Around<T>& around, int64_t room) {
  const int64_t blocks = weight.numel() / (kBlock * room);
  if (weight.scalar_type() == at::kByte) {
    multiply(
        output, rows,
        Weights<T, uint8_t>{weight.const_data_ptr<uint8_t>(), room, data_of<float>(scales), data_of<T>(bias)},
        around, blocks);
  } else if (scales) {
    multiply(
        output, rows,
        Weights<T, int8_t>{weight.const_data_ptr<int8_t>(), room, data_of<float>(scales), data_of<T>(bias)},
        around, blocks);
  } else {
    multiply(output, rows, Weights<T, T>{weight.const_data_ptr<T>(), room, nullptr, data_of<T>(bias)}, around,
             blocks);
  }
}

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scales,
              const std::optional<Tensor>& bias, int64_t products, const std::optional<Tensor>& norm,
              double epsilon, const std::optional<Tensor>& residual, bool is_gated) {
  const Tensor rows = input.contiguous();
  const int64_t inputs = rows.size(-1);
  const bool are_whole = weight.scalar_type() == at::kByte;
  TORCH_CHECK(weight.is_contiguous() && (scales ? are_whole || weight.scalar_type() == at::kChar
                                                : weight.scalar_type() == rows.scalar_type()),
              "the weight must lie as the rows' type wants it");
  TORCH_CHECK(!are_whole || inputs <= kMostWhole, "rows of 8 bits have up to ", kMostWhole, " inputs, not ",
              inputs);
  const int64_t blocks = (products + kBlock - 1) / kBlock, room = weight.numel() / (blocks * kBlock);
  TORCH_CHECK(inputs % (are_whole ? kPack<int8_t> : 4 / rows.element_size()) == 0,
              "inputs lie side by side in groups, which ", inputs, " do not fill");
  TORCH_CHECK(weight.numel() == room * blocks * kBlock && inputs <= room && room < inputs + kFilled,
              "the weight's size does not fit ", inputs, " inputs");
  TORCH_CHECK(!is_gated || products % (2 * kBlock) == 0,
              "gates and what they gate must be whole blocks each, not ", products, " products");
  TORCH_CHECK(!norm || norm->numel() == inputs, "the norm does not fit ", inputs, " inputs");
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() = is_gated ? products / 2 : products;
  Tensor output = at::empty(sizes, rows.options());
  TORCH_CHECK(!residual || residual->numel() == output.numel(),
              "what is added has not as many numbers as the output");
  const std::optional<Tensor> added = residual ? std::optional(residual->contiguous()) : std::nullopt;
  const auto run = [&](auto type) {
    using T = decltype(type);
    const Around<T> around{data_of<T>(norm), static_cast<float>(epsilon), data_of<T>(added), is_gated};
    multiply_by(output, rows, weight, scales, bias, around, room);
  };
  rows.scalar_type() == at::kBFloat16 ? run(BFloat16()) : run(float());
  return output;
}

}  // namespace
