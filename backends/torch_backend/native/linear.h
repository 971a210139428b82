// Products of any number of rows with the weights of linear layers, which lie as oneDNN lays them out, so that there is one copy of them with
// and without these kernels.

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

constexpr int64_t kFew = 32;    // rows that each thread normalises for itself, and by which a weight is multiplied as fast as it is read
constexpr int64_t kMany = 512;  // rows whose sums with a block stay in the second-level cache
constexpr int64_t kTall = 6;    // of many rows, those that meet a weight at once: their sums fill all registers

// Inputs of a block that stay in the first-level cache until many rows have met them; few rows take fewer at a time.
template <typename T>
constexpr int64_t kChunk = 96 * kPack<T>;
constexpr int64_t kFewChunk = 32;

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

// Add to the sums [row, 64] what a chunk of a block's weights makes of the rows, `most` at a time. The first ones ask for the weights that come
// next, of few rows all, and leave int8 ones in `space` as the rows' type.
template <int64_t most, typename T, typename W>
void add_block(float* sums, const T* input, const W* weight, int64_t rows, int64_t inputs, int64_t num_inputs, T* space) {
  add_rows<true, most>(sums, input, inputs, weight, num_inputs, rows, kPack<T>, rows > most ? space : nullptr);
  for (int64_t r = most; r < rows; r += most) {
    float* some = sums + r * kBlock;
    if constexpr (std::is_same_v<T, W>) {
      add_rows<most == kRows, most>(some, input + r * inputs, inputs, weight, num_inputs, rows - r);
    } else {
      add_rows<false, most>(some, input + r * inputs, inputs, space, num_inputs, rows - r);
    }
  }
}

// Write the products [row, 64] of one block: `width` of its 64.
template <typename T, typename W>
void multiply_block(float* sums, const T* input, const Weights<T, W>& weights, int64_t rows, int64_t inputs, int64_t width) {
  alignas(64) T space[kChunk<T> * kBlock];
  std::fill_n(sums, rows * kBlock, 0.0f);
  const int64_t size = rows <= kFew && std::is_same_v<T, W> ? kFewChunk : kChunk<T>;
  for (int64_t k = 0; k < inputs; k += size) {
    const W* chunk = weights.numbers + k * kBlock;
    const int64_t num_inputs = std::min(size, inputs - k);
    (rows <= kFew ? add_block<kRows, T, W> : add_block<kTall, T, W>)(sums, input + k, chunk, rows, inputs, num_inputs, space);
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

// Write the outputs [row, output] of up to `kMany` rows for the blocks from `begin` to `end`, a block being gates and what they gate, if they are.
template <typename T, typename W>
void multiply_rows(T* output, const T* input, const Weights<T, W>& weights, const Around<T>& around, int64_t rows, int64_t inputs, int64_t outputs,
                   int64_t begin, int64_t end) {
  thread_local Space<float> sums;
  sums.resize(2 * rows * kBlock);
  float *products = sums.data(), *gates = around.is_gated ? products + rows * kBlock : nullptr;
  const int64_t gated = around.is_gated ? outputs : 0;
  for (int64_t first = begin * kBlock; first < end * kBlock; first += kBlock) {
    const int64_t width = std::min(kBlock, outputs - first);
    if (around.is_gated) multiply_block(gates, input, weights.from(first, inputs), rows, inputs, width);
    multiply_block(products, input, weights.from(gated + first, inputs), rows, inputs, width);
    write_block(output + first, products, gates, around.residual == nullptr ? nullptr : around.residual + first, rows, outputs, width);
  }
}

template <typename T, typename W>
void multiply(Tensor& output, const Tensor& input, const Weights<T, W>& weights, Around<T> around, int64_t blocks) {
  const int64_t inputs = input.size(-1), outputs = output.size(-1), rows = input.numel() / inputs, parts = around.is_gated ? 2 : 1;
  const T* from = input.const_data_ptr<T>();
  Tensor shared;  // many rows, normalised once for all threads
  if (around.norm != nullptr && rows > kFew) {
    shared = at::empty(input.sizes(), input.options());
    T* normed = shared.data_ptr<T>();
    at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / inputs), [&](int64_t begin, int64_t end) {
      normalise(normed + begin * inputs, from + begin * inputs, around, end - begin, inputs);
    });
    from = normed;
    around.norm = nullptr;
  }
  at::parallel_for(0, blocks / parts, std::max<int64_t>(1, kGrain / (parts * kBlock * inputs)), [&](int64_t begin, int64_t end) {
    thread_local Space<T> normed;
    const T* own = from;
    if (around.norm != nullptr) {
      normed.resize(rows * inputs);
      normalise(normed.data(), from, around, rows, inputs);
      own = normed.data();
    }
    for (int64_t first = 0; first < rows; first += kMany) {
      Around<T> here = around;
      if (around.residual != nullptr) here.residual += first * outputs;
      multiply_rows(output.data_ptr<T>() + first * outputs, own + first * inputs, weights, here, std::min(kMany, rows - first), inputs, outputs, begin, end);
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
