// Products with the weights of linear layers, which lie as oneDNN lays them out, so that decode and prefill share one copy: a few rows by
// weights of their own type, any number by int8 ones.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
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

// Write the outputs of one block: `width` of its 64.
template <typename T, typename W>
void multiply_block(T* output, const T* input, const Weights<T, W>& weights, int64_t rows, int64_t inputs, int64_t outputs, int64_t width) {
  thread_local std::vector<float> sums;
  alignas(64) T space[kChunk<W> * kBlock];
  sums.assign(rows * kBlock, 0.0f);
  for (int64_t k = 0; k < inputs; k += kChunk<W>) {
    const W* chunk = weights.numbers + k * kBlock;
    const int64_t num_inputs = std::min(kChunk<W>, inputs - k);
    add_rows<true>(&sums[0], input + k, inputs, chunk, num_inputs, rows, kPack<T>, rows > kRows ? space : nullptr);
    for (int64_t r = kRows; r < rows; r += kRows) {
      float* row = &sums[r * kBlock];
      if constexpr (std::is_same_v<T, W>) {
        add_rows<true>(row, input + r * inputs + k, inputs, chunk, num_inputs, rows - r);
      } else {
        add_rows(row, input + r * inputs + k, inputs, space, num_inputs, rows - r);
      }
    }
  }
  T rounded[kBlock];
  for (int64_t r = 0; r < rows; ++r) {
    float* row = &sums[r * kBlock];
    for (int64_t n = 0; weights.scales != nullptr && n < width; ++n) row[n] *= weights.scales[n];
    for (int64_t n = 0; weights.bias != nullptr && n < width; ++n) row[n] += static_cast<float>(weights.bias[n]);
    UNROLL for (int64_t v = 0; v < kVectors; ++v) store(rounded + v * kLanes, load(row + v * kLanes));
    std::copy_n(rounded, width, output + r * outputs);
  }
}

template <typename T, typename W>
void multiply(Tensor& output, const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scales,
              const std::optional<Tensor>& bias, int64_t inputs, int64_t outputs) {
  const int64_t rows = input.numel() / inputs, size = kBlock * inputs;
  T* to = output.data_ptr<T>();
  const T* from = input.const_data_ptr<T>();
  const Weights<T, W> weights{weight.const_data_ptr<W>(), scales ? scales->const_data_ptr<float>() : nullptr,
                              bias ? bias->const_data_ptr<T>() : nullptr};
  at::parallel_for(0, weight.numel() / size, std::max<int64_t>(1, kGrain / size), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * kBlock; first < end * kBlock; first += kBlock) {
      multiply_block(to + first, from, weights.from(first, inputs), rows, inputs, outputs, std::min(kBlock, outputs - first));
    }
  });
}

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scales, const std::optional<Tensor>& bias,
              int64_t outputs) {
  const Tensor rows = input.contiguous();
  const int64_t inputs = rows.size(-1);
  TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == (scales ? at::kChar : rows.scalar_type()), "the weight must lie as the rows' type wants it");
  TORCH_CHECK(weight.numel() == (outputs + kBlock - 1) / kBlock * kBlock * inputs, "the weight's size does not fit ", inputs, " inputs");
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() = outputs;
  Tensor output = at::empty(sizes, rows.options());
  if (rows.scalar_type() == at::kBFloat16) {
    (scales ? multiply<BFloat16, int8_t> : multiply<BFloat16, BFloat16>)(output, rows, weight, scales, bias, inputs, outputs);
  } else {
    (scales ? multiply<float, int8_t> : multiply<float, float>)(output, rows, weight, scales, bias, inputs, outputs);
  }
  return output;
}

}  // namespace
