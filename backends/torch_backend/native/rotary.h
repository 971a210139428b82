// Rotary embedding: a decode step's, which its attention asks for, and a chunk's.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "vectors.h"

namespace {

// Turn the two halves of a head's numbers against each other, by its token's angles: rotary embedding,
// rounded as operators of its own would.
template <typename T>
void rotate(T* output, const T* input, const T* cosines, const T* sines, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t d = 0; d < half; d += kLanes) {
    const __mmask16 lanes = first_lanes(half - d);
    const auto product = [&](int64_t place, const T* factors, int64_t angle) {
      return rounded<T>(_mm512_mul_ps(load(input + place + d, lanes), load(factors + angle + d, lanes)));
    };
    store(output + d, _mm512_sub_ps(product(0, cosines, 0), product(half, sines, 0)), lanes);
    store(output + half + d, _mm512_add_ps(product(half, cosines, half), product(0, sines, half)), lanes);
  }
}

// Rotate heads [row, head, token, width], which come back as [row, token, head, width] transposed, by angles
// [row, token, width].
Tensor rotate_heads(const Tensor& heads, const Tensor& cosines, const Tensor& sines) {
  const int64_t rows = heads.size(0), num_heads = heads.size(1), tokens = heads.size(2),
                width = heads.size(3);
  TORCH_CHECK(heads.stride(3) == 1 && width % 2 == 0,
              "a head's numbers, which are even, must lie side by side");
  for (const Tensor& angles : {cosines, sines}) {
    TORCH_CHECK(angles.is_contiguous() && angles.numel() == rows * tokens * width,
                "each token has an angle for each of a head's numbers");
    TORCH_CHECK(angles.scalar_type() == heads.scalar_type(), "angles must have the heads' type");
  }
  Tensor output = at::empty({rows, tokens, num_heads, width}, heads.options());
  const auto run = [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, rows * tokens, std::max<int64_t>(1, kGrain / 4 / (num_heads * width)),
                     [&](int64_t begin, int64_t end) {
      for (int64_t place = begin; place < end; ++place) {
        const T *cosine = cosines.const_data_ptr<T>() + place * width,
                *sine = sines.const_data_ptr<T>() + place * width;
        const T* from =
            heads.const_data_ptr<T>() + place / tokens * heads.stride(0) + place % tokens * heads.stride(2);
        T* to = output.data_ptr<T>() + place * num_heads * width;
        for (int64_t h = 0; h < num_heads; ++h)
          rotate(to + h * width, from + h * heads.stride(1), cosine, sine, width);
      }
    });
  };
  heads.scalar_type() == at::kBFloat16 ? run(BFloat16()) : run(float());
  return output.transpose(1, 2);
}

}  // namespace
