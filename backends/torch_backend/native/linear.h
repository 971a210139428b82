// Products with the weights of linear layers, which lie as oneDNN lays them out, so that decode and prefill share one copy: a few rows by
// weights of their own type, any number by int8 ones.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

#include "rows.h"

namespace {

template <typename W>
constexpr int64_t kChunk = 32;  // inputs of a block, which stay in the first-level cache until all rows have met them
template <>
constexpr int64_t kChunk<int8_t> = 128;  // more of them, for prefill's many rows

// What a product reads beside its rows. Int8 weights have scales, one for each output.
template <typename T, typename W>
struct Weights {
  const W* numbers;
  const float* scales;
  const T* bias;  // or none

  Weights from(int64_t output, int64_t inputs) const {
    return {numbers + output * inputs, scales == nullptr ? nullptr : scales + output, bias == nullptr ? nullptr : bias + output};
  }
};

// What is done to a product's rows before it and to its outputs after it, each as operators of its own would do it, rounding included.
template <typename T>
struct Around {
  const T* norm;  // [input]: the weight of the rows' root-mean-square norm, or none
  float epsilon;
  const T* residual;  // [row, output]: what is added to the outputs, or none
  bool is_gated;      // the first half of the products are gates of the second: there are half as many outputs
};

template <typename T>
void normalise(T* normed, const T* input, const Around<T>& around, int64_t rows, int64_t inputs) {
  for (int64_t r = 0; r < rows; ++r, input += inputs, normed += inputs) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t k = 0; k < inputs; k += kLanes) {
      const __m512 values = load(input + k, first_lanes(inputs - k));
      squares = _mm512_fmadd_ps(values, values, squares);
    }
    const __m512 factor = _mm512_set1_ps(1 / std::sqrt(_mm512_reduce_add_ps(squares) / inputs + around.epsilon));
    for (int64_t k = 0; k < inputs; k += kLanes) {
      const __mmask16 lanes = first_lanes(inputs - k);
      const __m512 values = rounded<T>(_mm512_mul_ps(load(input + k, lanes), factor));
      store(normed + k, _mm512_mul_ps(load(around.norm + k, lanes), values), lanes);
    }
  }
}

// Write the products [row, 64] of one block: `width` of its 64.
template <typename T, typename W>
void multiply_block(float* sums, const T* input, const Weights<T, W>& weights, int64_t rows, int64_t inputs, int64_t width) {
  alignas(64) T space[kChunk<W> * kBlock];
  std::fill_n(sums, rows * kBlock, 0.0f);
  for (int64_t k = 0; k < inputs; k += kChunk<W>) {
    const W* chunk = weights.numbers + k * kBlock;
    const int64_t num_inputs = std::min(kChunk<W>, inputs - k);
    add_rows<true>(sums, input + k, inputs, chunk, num_inputs, rows, kPack<T>, rows > kRows ? space : nullptr);
    for (int64_t r = kRows; r < rows; r += kRows) {
      float* row = sums + r * kBlock;
      if constexpr (std::is_same_v<T, W>) {
        add_rows<true>(row, input + r * inputs + k, inputs, chunk, num_inputs, rows - r);
      } else {
        add_rows(row, input + r * inputs + k, inputs, space, num_inputs, rows - r);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    float* row = sums + r * kBlock;
    for (int64_t n = 0; weights.scales != nullptr && n < width; ++n) row[n] *= weights.scales[n];
    for (int64_t n = 0; weights.bias != nullptr && n < width; ++n) row[n] += static_cast<float>(weights.bias[n]);
  }
}

inline __m512 silu(__m512 values) { return _mm512_div_ps(values, Vec(1.0f) + Vec(values).neg().exp()); }

// Write a block's outputs, made of its products and, where they are gated, of their gates.
template <typename T>
void write_block(T* output, const float* products, const float* gates, const T* residual, int64_t rows, int64_t outputs, int64_t width) {
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t n = 0; n < width; n += kLanes) {
      const __mmask16 lanes = first_lanes(width - n);
      __m512 values = load(products + r * kBlock + n);
      if (gates != nullptr) values = _mm512_mul_ps(rounded<T>(silu(rounded<T>(load(gates + r * kBlock + n)))), rounded<T>(values));
      if (residual != nullptr) values = _mm512_add_ps(load(residual + r * outputs + n, lanes), rounded<T>(values));
      store(output + r * outputs + n, values, lanes);
    }
  }
}

template <typename T, typename W>
void multiply(Tensor& output, const Tensor& input, const Weights<T, W>& weights, const Around<T>& around, int64_t blocks) {
  const int64_t inputs = input.size(-1), outputs = output.size(-1), rows = input.numel() / inputs;
  const int64_t parts = around.is_gated ? 2 : 1, gated = around.is_gated ? outputs : 0;
  at::parallel_for(0, blocks / parts, std::max<int64_t>(1, kGrain / (parts * kBlock * inputs)), [&](int64_t begin, int64_t end) {
    thread_local Space<T> normed;
    thread_local Space<float> sums;
    const T* from = input.const_data_ptr<T>();
    if (around.norm != nullptr) {
      normed.resize(rows * inputs);
      normalise(normed.data(), from, around, rows, inputs);
      from = normed.data();
    }
    sums.resize(parts * rows * kBlock);
    float *products = sums.data(), *gates = around.is_gated ? products + rows * kBlock : nullptr;
    for (int64_t first = begin * kBlock; first < end * kBlock; first += kBlock) {
      const int64_t width = std::min(kBlock, outputs - first);
      if (around.is_gated) multiply_block(gates, from, weights.from(first, inputs), rows, inputs, width);
      multiply_block(products, from, weights.from(gated + first, inputs), rows, inputs, width);
      write_block(output.data_ptr<T>() + first, products, gates, around.residual == nullptr ? nullptr : around.residual + first, rows, outputs, width);
    }
  });
}

template <typename T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

template <typename T>
void multiply_by(Tensor& output, const Tensor& rows, const Tensor& weight, const std::optional<Tensor>& scales, const std::optional<Tensor>& bias,
                 const Around<T>& around) {
  const int64_t blocks = weight.numel() / (kBlock * rows.size(-1));
  if (scales) {
    multiply(output, rows, Weights<T, int8_t>{weight.const_data_ptr<int8_t>(), data_of<float>(scales), data_of<T>(bias)}, around, blocks);
  } else {
    multiply(output, rows, Weights<T, T>{weight.const_data_ptr<T>(), nullptr, data_of<T>(bias)}, around, blocks);
  }
}

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scales, const std::optional<Tensor>& bias, int64_t products,
              const std::optional<Tensor>& norm, double epsilon, const std::optional<Tensor>& residual, bool is_gated) {
  const Tensor rows = input.contiguous();
  const int64_t inputs = rows.size(-1);
  TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == (scales ? at::kChar : rows.scalar_type()), "the weight must lie as the rows' type wants it");
  TORCH_CHECK(weight.numel() == (products + kBlock - 1) / kBlock * kBlock * inputs, "the weight's size does not fit ", inputs, " inputs");
  TORCH_CHECK(!is_gated || products % (2 * kBlock) == 0, "gates and what they gate must be whole blocks each, not ", products, " products");
  TORCH_CHECK(!norm || norm->numel() == inputs, "the norm does not fit ", inputs, " inputs");
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() = is_gated ? products / 2 : products;
  Tensor output = at::empty(sizes, rows.options());
  TORCH_CHECK(!residual || residual->numel() == output.numel(), "what is added has not as many numbers as the output");
  const std::optional<Tensor> added = residual ? std::optional(residual->contiguous()) : std::nullopt;
  const auto run = [&](auto type) {
    using T = decltype(type);
    const Around<T> around{data_of<T>(norm), static_cast<float>(epsilon), data_of<T>(added), is_gated};
    multiply_by(output, rows, weight, scales, bias, around);
  };
  rows.scalar_type() == at::kBFloat16 ? run(BFloat16()) : run(float());
  return output;
}

}  // namespace
