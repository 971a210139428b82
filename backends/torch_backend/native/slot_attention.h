// Attention of a decode step: each row's new token is written into its slot and attends over the entries that
// the row may see; of the others, whole blocks are not read.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "rotary.h"
#include "tile.h"

namespace {

constexpr float kHidden = -1e30f;  // a bias below it hides its entry

// One row and KV head: where its operands lie, and how they are spaced.
template <typename T>
struct Head {
  const T *query, *key, *value;  // [head of the group, width], [entry, width], [entry, width]
  const T* next_key;             // [entry, width]: of who is next
  const float* bias;             // [entry]
  const T* sinks;                // [head of the group], or none
  T* output;                     // [head of the group, width]
  int64_t query_stride, group, entries, width, value_width;
  float scaling, softcap;  // no softcap: 0
};

// A vector's worth of a head's numbers as they lie, zeros past the end: `kLanes * kPack<T>` of them, all
// there if heads are `whole` vectors.
template <bool whole>
inline __m512i load_packed(const float* source, int64_t count) {
  return _mm512_maskz_loadu_epi32(whole ? 0xffff : first_lanes(count), source);
}

template <bool whole>
inline __m512i load_packed(const BFloat16* source, int64_t count) {
  return _mm512_maskz_loadu_epi16(whole || count >= 32 ? 0xffffffffu : (1u << count) - 1, source);
}

inline __m512 multiply_add(__m512 sums, __m512i left, __m512i right, float) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right), sums);
}

inline __m512 multiply_add(__m512 sums, __m512i left, __m512i right, BFloat16) {
  return _mm512_dpbf16_ps(sums, (__m512bh)left, (__m512bh)right);
}

// Call `work` with the number of heads, as a constant, for all of the group, at most `kTileRows` at a time.
template <typename Work>
inline void for_heads(int64_t group, const Work& work) {
  for (int64_t g = 0; g < group; g += kTileRows) {
    switch (group - g) {
      case 1: work(std::integral_constant<int64_t, 1>(), g); break;
      case 2: work(std::integral_constant<int64_t, 2>(), g); break;
      case 3: work(std::integral_constant<int64_t, 3>(), g); break;
      default: work(std::integral_constant<int64_t, kTileRows>(), g);
    }
  }
}

// Return which of 16 entries may be seen, as bits.
inline __mmask16 seen(const float* bias, int64_t count) {
  const __mmask16 lanes = first_lanes(count);
  return _mm512_mask_cmp_ps_mask(lanes, _mm512_maskz_loadu_ps(lanes, bias), _mm512_set1_ps(kHidden),
                                 _CMP_GT_OQ);
}

// Return the sums of 16 vectors: each in a lane of its own, and in an order that the others have no part in.
inline __m512 sums_of(const float (&vectors)[kLanes][kLanes]) {
  __m512 pairs[8], fours[4];
  UNROLL for (int64_t i = 0; i < 8; ++i) {
    const __m512 a = _mm512_load_ps(vectors[2 * i]), b = _mm512_load_ps(vectors[2 * i + 1]);
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  UNROLL for (int64_t i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
    fours[i] =
        _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto joined = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return joined(joined(fours[0], fours[1]), joined(fours[2], fours[3]));
}

// Ask for what is read `kPrefetchDistance` bytes after 16 entries of a plane from `first` on: of the plane,
// or past its end of the one that follows.
template <typename T>
inline void ask_ahead(const T* plane, const T* following, int64_t first, int64_t entries, int64_t width) {
  const int64_t place = first * width + kPrefetchDistance / int64_t{sizeof(T)}, end = entries * width;
  const T* ahead = place < end ? plane + place : following + (place - end);
  for (int64_t n = 0; n < kLanes * width; n += 64 / int64_t{sizeof(T)})
    _mm_prefetch(reinterpret_cast<const char*>(ahead + n), _MM_HINT_T1);
}

// Write the scores [head, entry] of up to 16 entries, and raise `largest` [head] to the best of each head.
template <bool whole, typename T>
void score_block(const Head<T>& head, int64_t first, int64_t count, float* scores, float* largest) {
  ask_ahead(head.key, head.value, first, head.entries, head.width);
  for_heads(head.group, [&](auto heads, int64_t g) {
    constexpr int64_t tile = decltype(heads)::value;
    alignas(64) float parts[tile][kLanes][kLanes];
    for (int64_t e = 0; e < count; ++e) {
      __m512 sums[tile];
      UNROLL for (int64_t h = 0; h < tile; ++h)
        sums[h] = _mm512_setzero_ps();
      for (int64_t d = 0; d < head.width; d += kLanes * kPack<T>) {
        const __m512i key = load_packed<whole>(head.key + (first + e) * head.width + d, head.width - d);
        UNROLL for (int64_t h = 0; h < tile; ++h) {
          sums[h] = multiply_add(
              sums[h], load_packed<whole>(head.query + (g + h) * head.query_stride + d, head.width - d), key,
              T());
        }
      }
      UNROLL for (int64_t h = 0; h < tile; ++h)
        _mm512_store_ps(parts[h][e], sums[h]);
    }
    for (int64_t e = count; e < kLanes; ++e) UNROLL
      for (int64_t h = 0; h < tile; ++h) _mm512_store_ps(parts[h][e], _mm512_setzero_ps());
    const __mmask16 lanes = first_lanes(count);
    for (int64_t h = 0; h < tile; ++h) {
      Vec row = Vec(sums_of(parts[h])) * Vec(head.scaling);
      if (head.softcap > 0) row = Vec(head.softcap) * (row / Vec(head.softcap)).tanh();
      row = row + Vec(_mm512_maskz_loadu_ps(lanes, head.bias + first));
      store(scores + (g + h) * kLanes, row);
      largest[g + h] = std::max(largest[g + h], _mm512_mask_reduce_max_ps(lanes, row));
    }
  });
}

// Turn the scores [head, entry] of up to 16 entries into weights, and add their values to `sums` [head,
// width].
template <bool whole, typename T>
void mix_block(const Head<T>& head, int64_t first, int64_t count, float* scores, const float* largest,
               float* totals, float* sums) {
  ask_ahead(head.value, head.next_key, first, head.entries, head.value_width);
  const __mmask16 lanes = first_lanes(count);
  for (int64_t g = 0; g < head.group; ++g) {
    float* row = scores + g * kLanes;
    const __m512 weights = _mm512_maskz_mov_ps(lanes, (Vec(load(row)) - Vec(largest[g])).exp());
    totals[g] += _mm512_reduce_add_ps(weights);
    store(row, weights);
  }
  for_heads(head.group, [&](auto heads, int64_t g) {
    constexpr int64_t tile = decltype(heads)::value;
    for (int64_t d = 0; d < head.value_width; d += kLanes) {
      const __mmask16 lanes = whole ? 0xffff : first_lanes(head.value_width - d);
      __m512 mixed[tile];
      UNROLL for (int64_t h = 0; h < tile; ++h)
        mixed[h] = load(sums + (g + h) * head.value_width + d, lanes);
      for (int64_t e = 0; e < count; ++e) {
        const __m512 values = load(head.value + (first + e) * head.value_width + d, lanes);
        UNROLL for (int64_t h = 0; h < tile; ++h) {
          mixed[h] = _mm512_fmadd_ps(_mm512_set1_ps(scores[(g + h) * kLanes + e]), values, mixed[h]);
        }
      }
      UNROLL for (int64_t h = 0; h < tile; ++h)
        store(sums + (g + h) * head.value_width + d, mixed[h], lanes);
    }
  });
}

template <bool whole, typename T>
void attend(const Head<T>& head) {
  thread_local Buffer<float> space;
  const int64_t group = head.group, num_blocks = (head.entries + kLanes - 1) / kLanes;
  space.resize(group * (num_blocks * kLanes + head.value_width + 2));
  float *scores = space.data(), *sums = scores + group * num_blocks * kLanes;
  float *largest = sums + group * head.value_width, *totals = largest + group;
  const auto for_blocks = [&](const auto& work) {
    for (int64_t e = 0; e < head.entries; e += kLanes) {
      const int64_t count = std::min(kLanes, head.entries - e);
      if (seen(head.bias + e, count)) work(e, count, scores + e * group);
    }
  };
  for (int64_t g = 0; g < group; ++g)
    largest[g] =
        head.sinks == nullptr ? std::numeric_limits<float>::lowest() : static_cast<float>(head.sinks[g]);
  for_blocks(
      [&](int64_t e, int64_t count, float* block) { score_block<whole>(head, e, count, block, largest); });
  std::fill_n(sums, group * head.value_width, 0.0f);
  for (int64_t g = 0; g < group; ++g)
    totals[g] = head.sinks == nullptr ? 0.0f : std::exp(static_cast<float>(head.sinks[g]) - largest[g]);
  for_blocks([&](int64_t e, int64_t count, float* block) {
    mix_block<whole>(head, e, count, block, largest, totals, sums);
  });
  for (int64_t g = 0; g < group; ++g) {
    const __m512 factor =
        _mm512_set1_ps(totals[g] > 0 ? 1 / totals[g] : 0.0f);  // a row that sees nothing has no reader
    for (int64_t d = 0; d < head.value_width; d += kLanes) {
      const __mmask16 lanes = first_lanes(head.value_width - d);
      store(head.output + g * head.value_width + d,
            _mm512_mul_ps(load(sums + g * head.value_width + d, lanes), factor), lanes);
    }
  }
}

template <typename T>
void write_and_attend(Tensor& output, const Tensor& query, const Tensor& key, const Tensor& value,
                      Tensor& keys, Tensor& values, const Tensor& entries, const Tensor& bias, double scaling,
                      double softcap, const std::optional<Tensor>& sinks, const T* cosines, const T* sines) {
  const int64_t rows = query.size(0), kv_heads = key.size(1), group = query.size(1) / kv_heads,
                capacity = keys.size(2);
  const int64_t width = query.size(3), value_width = value.size(3), num_entries = bias.size(2);
  const int64_t* entry = entries.const_data_ptr<int64_t>();
  const int64_t numbers = num_entries * (width + value_width);
  const bool is_whole = width % (kLanes * kPack<T>) == 0 && value_width % kLanes == 0;
  // Head by head, so that threads share the long rows and the idle ones evenly.
  at::parallel_for(0, rows * kv_heads, std::max<int64_t>(1, kGrain / 4 / numbers),
                   [&](int64_t begin, int64_t end) {
    thread_local Buffer<T> rotated;
    rotated.resize(group * width);
    for (int64_t number = begin; number < end; ++number) {
      const int64_t row = number % rows, kv_head = number / rows, first = kv_head * group,
                    place = row * kv_heads + kv_head;
      const int64_t next = std::min(number + 1, end - 1), next_place = next % rows * kv_heads + next / rows;
      T* key_plane = keys.data_ptr<T>() + place * capacity * width;
      T* value_plane = values.data_ptr<T>() + place * capacity * value_width;
      const T* new_key = key.const_data_ptr<T>() + row * key.stride(0) + kv_head * key.stride(1);
      const T* queries = query.const_data_ptr<T>() + row * query.stride(0) + first * query.stride(1);
      if (cosines == nullptr) {
        std::copy_n(new_key, width, key_plane + entry[row] * width);
      } else {
        const auto turn = [&](T* to, const T* from) {
          rotate(to, from, cosines + row * width, sines + row * width, width);
        };
        turn(key_plane + entry[row] * width, new_key);
        for (int64_t g = 0; g < group; ++g) turn(&rotated[g * width], queries + g * query.stride(1));
        queries = rotated.data();
      }
      std::copy_n(value.const_data_ptr<T>() + row * value.stride(0) + kv_head * value.stride(1), value_width,
                  value_plane + entry[row] * value_width);
      const Head<T> head{queries,
                         key_plane,
                         value_plane,
                         keys.const_data_ptr<T>() + next_place * capacity * width,
                         bias.const_data_ptr<float>() + row * num_entries,
                         sinks ? sinks->const_data_ptr<T>() + first : nullptr,
                         output.data_ptr<T>() + (row * query.size(1) + first) * value_width,
                         cosines == nullptr ? query.stride(1) : width,
                         group,
                         num_entries,
                         width,
                         value_width,
                         static_cast<float>(scaling),
                         static_cast<float>(softcap)};
      (is_whole ? attend<true, T> : attend<false, T>)(head);
    }
  });
}

Tensor slot_attention(const Tensor& query, const Tensor& key, const Tensor& value, Tensor& keys,
                      Tensor& values, const Tensor& entries, const Tensor& bias, double scaling,
                      double softcap, const std::optional<Tensor>& sinks,
                      const std::optional<Tensor>& cosines, const std::optional<Tensor>& sines) {
  const int64_t rows = query.size(0), width = query.size(3);
  TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1,
              "a head's numbers must lie side by side");
  TORCH_CHECK(
      keys.is_contiguous() && values.is_contiguous() && entries.is_contiguous() && bias.is_contiguous(),
      "planes and plan must be whole");
  TORCH_CHECK(rows <= keys.size(0) && bias.size(2) < keys.size(2), "more is read than the slots hold");
  Tensor output = at::empty({rows, 1, query.size(1), value.size(3)}, query.options());
  const auto run = [&](auto type) {
    using T = decltype(type);
    const auto angles = [&](const std::optional<Tensor>& tensor) -> const T* {
      if (!tensor) return nullptr;
      TORCH_CHECK(tensor->is_contiguous() && tensor->numel() == rows * width && width % 2 == 0,
                  "each row has an angle for each of an even width");
      return tensor->const_data_ptr<T>();
    };
    write_and_attend<T>(output, query, key, value, keys, values, entries, bias, scaling, softcap, sinks,
                        angles(cosines), angles(sines));
  };
  query.scalar_type() == at::kBFloat16 ? run(BFloat16()) : run(float());
  return output;
}

}  // namespace
