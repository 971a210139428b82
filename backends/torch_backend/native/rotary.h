// Rotary embedding of a prompt's chunk, and the function that a decode step's attention applies to its heads.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "checks.h"
#include "vectors.h"

namespace {

// Rotate a head: its first half [x] and second half [y] become x cos - y sin and y cos + x sin. Each product
// is rounded, as it is when torch's operators compute it.
template <typename T>
void rotate(T* output, const T* input, const T* cosines, const T* sines, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t d = 0; d < half; d += kLanes) {
    const Lanes lanes = first_lanes(half - d);
    const auto product = [&](int64_t position, const T* factors, int64_t angle) {
      return rounded<T>(load(input + position + d, lanes) * load(factors + angle + d, lanes));
    };
    store(output + d, product(0, cosines, 0) - product(half, sines, 0), lanes);
    store(output + half + d, product(half, cosines, half) + product(0, sines, half), lanes);
  }
}

// The operator `rotate`: heads [row, head, token, width] by angles [row, token, width]. The output's memory
// is [row, token, head, width], the layout in which a projection writes heads.
Tensor rotate_heads(const Tensor& heads, const Tensor& cosines, const Tensor& sines) {
  check_row_dtype("heads", heads);
  check_dim("heads", heads, 4, "[row, head, token, width]");
  check_last_stride("heads", heads);
  check_even_width("heads", heads);
  const int64_t num_rows = heads.size(0);
  const int64_t num_heads = heads.size(1);
  const int64_t num_tokens = heads.size(2);
  const int64_t width = heads.size(3);
  check("cosines", cosines, heads.scalar_type(), {num_rows, num_tokens, width});
  check("sines", sines, heads.scalar_type(), {num_rows, num_tokens, width});
  Tensor output = at::empty({num_rows, num_tokens, num_heads, width}, heads.options());
  const auto run = [&](auto type) {
    using T = decltype(type);
    const int64_t tokens_per_thread = std::max<int64_t>(1, kGrain / 4 / (num_heads * width));
    at::parallel_for(0, num_rows * num_tokens, tokens_per_thread, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / num_tokens;
        const int64_t token = i % num_tokens;
        const T* token_cosines = cosines.const_data_ptr<T>() + i * width;
        const T* token_sines = sines.const_data_ptr<T>() + i * width;
        const T* source = heads.const_data_ptr<T>() + row * heads.stride(0) + token * heads.stride(2);
        T* target = output.data_ptr<T>() + i * num_heads * width;
        for (int64_t h = 0; h < num_heads; ++h) {
          rotate(target + h * width, source + h * heads.stride(1), token_cosines, token_sines, width);
        }
      }
    });
  };
  heads.scalar_type() == at::kBFloat16 ? run(BFloat16()) : run(float());
  return output.transpose(1, 2);
}

}  // namespace
