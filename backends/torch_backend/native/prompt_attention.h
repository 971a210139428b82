// Attention of a prompt's chunk over entries in the order of their sequence, a tile of queries and a block of
// entries at a time (https://arxiv.org/abs/2205.14135). Entries are the rows of both products and the queries
// of a tile the columns, so that a softmax goes along the entries without ever adding up a vector.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "tile.h"

namespace {

constexpr int64_t kEntries = 128;    // entries of a block, whose scores stay in the second-level cache
constexpr float kUnseen = -1e30f;    // the score of an entry that a query does not see
constexpr float kSmallest = -1e20f;  // below every score, far above those
constexpr float kFar = 32.0f;  // powers of two that a score may be above what it is measured against; sums
                               // still hold values of 2^70
constexpr float kLog2e = 1.44269504f;

// Return 2 to the power of the exponent, 0 far below: a polynomial on [-1/2, 1/2], whose relative error is
// below 3e-7, or 8e-5 where what is made of it is rounded to bfloat16, which rounds at least 25 times as
// coarsely.
template <typename T>
inline __m512 power_of_two(__m512 exponent) {
  const __m512 whole = _mm512_roundscale_ps(exponent, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(exponent, whole);
  constexpr bool is_short = std::is_same_v<T, BFloat16>;
  constexpr float short_terms[] = {5.51716668e-02f, 2.42611121e-01f, 6.93260990e-01f, 9.99928069e-01f};
  constexpr float terms[] = {1.33813025e-03f, 9.66636852e-03f, 5.55038101e-02f,
                             2.40223490e-01f, 6.93147181e-01f, 1.0f};
  __m512 power = _mm512_set1_ps(is_short ? short_terms[0] : terms[0]);
  UNROLL for (int n = 1; n < (is_short ? 4 : 6); ++n)
    power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(is_short ? short_terms[n] : terms[n]));
  return _mm512_scalef_ps(power, whole);
}

// A prompt's queries of one head, and the entries that they attend over.
template <typename T>
struct Prompt {
  const T *query, *key;      // [token, width], [entry, width]
  const T* values;           // [entry / pack, value width, pack]
  const int64_t* last_seen;  // [token]: each sees the entries up to this one; -1: none
  T* output;                 // [token, value width]
  int64_t query_stride, key_stride, value_stride, output_stride, tokens, entries, width, value_width,
      window;  // a query sees `window` entries at most
  float scaling, softcap, sink;
};

// What a thread needs for a tile of 64 queries, which lie side by side in four vectors.
template <typename T>
struct Tile {
  Tensor space;
  T *queries, *weights;  // [width / pack, 64, pack], [128 / pack, 64, pack]
  float *scores, *sums;  // [128, 64], [value width, 64]
  float *references,
      *totals;  // [64]: the exponents that scores are measured against; the sums of weights so measured
  int32_t last_seen[kBlock];

  explicit Tile(int64_t width, int64_t value_width)
      : space(at::empty({kBlock * (width + kEntries + kEntries + value_width + 2)}, at::kFloat)) {
    scores = space.data_ptr<float>();
    sums = scores + kBlock * kEntries;
    references = sums + kBlock * value_width;
    totals = references + kBlock;
    queries = reinterpret_cast<T*>(totals + kBlock);
    weights = reinterpret_cast<T*>(totals + kBlock + kBlock * width);
  }
};

// Lay the values [entry, width] of a head out as [entry / 2, width, 2], as their products want them; zeros
// past the end.
void pair_values(BFloat16* pairs, const BFloat16* values, int64_t stride, int64_t entries, int64_t width) {
  for (int64_t e = 0; e < entries; e += 2, pairs += 2 * width) {
    const BFloat16 *first = values + e * stride, *second = first + stride;
    for (int64_t d = 0; d < width; d += kLanes) {
      const __mmask16 lanes = first_lanes(width - d), others = e + 1 < entries ? lanes : 0;
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, first + d));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(others, second + d));
      _mm512_mask_storeu_epi32(pairs + 2 * d, lanes, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

// Lay up to 64 queries out side by side, [width / pack, 64, pack]; zeros for those that are missing.
template <typename T>
void pack_queries(T* target, const T* query, int64_t stride, int64_t count, int64_t width) {
  for (int64_t q = 0; q < kBlock; ++q) {
    for (int64_t d = 0; d < width; ++d)
      target[(d / kPack<T> * kBlock + q) * kPack<T> + d % kPack<T>] =
          q < count ? query[q * stride + d] : T(0);
  }
}

template <typename T>
void begin_tile(Tile<T>& tile, const Prompt<T>& prompt, int64_t first, int64_t count) {
  for (int64_t q = 0; q < kBlock; ++q) {
    tile.last_seen[q] = q < count ? static_cast<int32_t>(prompt.last_seen[first + q]) : -1;
    tile.references[q] = prompt.sink;
    tile.totals[q] = prompt.sink > kSmallest ? 1.0f : 0.0f;
  }
  pack_queries(tile.queries, prompt.query + first * prompt.query_stride, prompt.query_stride, count,
               prompt.width);
  std::fill_n(tile.sums, kBlock * prompt.value_width, 0.0f);
}

// Give the scores of a block their softcap, and make those unseen that a query may not see.
template <typename T>
void mask_scores(Tile<T>& tile, const Prompt<T>& prompt, int64_t block, int64_t count) {
  const Vec scaling(prompt.scaling), softcap(prompt.softcap);
  for (int64_t v = 0; v < kBlockVectors; ++v) {
    const __m512i last = _mm512_loadu_si512(tile.last_seen + v * kLanes);
    for (int64_t e = 0; e < count; ++e) {
      float* place = tile.scores + e * kBlock + v * kLanes;
      __m512 row = load(place);
      if (prompt.softcap > 0) row = softcap * (Vec(row) * scaling / softcap).tanh();
      const __m512i entry = _mm512_set1_epi32(static_cast<int32_t>(block + e));
      const __mmask16 seen =
          _mm512_cmple_epi32_mask(entry, last) &
          _mm512_cmpgt_epi32_mask(
              entry, _mm512_sub_epi32(last, _mm512_set1_epi32(static_cast<int32_t>(prompt.window))));
      store(place, _mm512_mask_mov_ps(_mm512_set1_ps(kUnseen), seen, row));
    }
  }
}

// Store the weights of an entry, or of two next to each other, and return the total with them, as they are
// stored.
inline __m512 store_weights(float* place, const __m512 (&weights)[1], __m512 total) {
  store(place, weights[0]);
  return _mm512_add_ps(total, weights[0]);
}

inline __m512 store_weights(BFloat16* place, const __m512 (&weights)[2], __m512 total) {
  const __m512i places =
      _mm512_set_epi32(0x1f000f, 0x1e000e, 0x1d000d, 0x1c000c, 0x1b000b, 0x1a000a, 0x190009, 0x180008,  //
                       0x170007, 0x160006, 0x150005, 0x140004, 0x130003, 0x120002, 0x110001, 0x100000);
  const __m512i pairs =
      _mm512_permutexvar_epi16(places, (__m512i)_mm512_cvtne2ps_pbh(weights[1], weights[0]));
  _mm512_storeu_si512(place, pairs);
  return _mm512_dpbf16_ps(total, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(0x3f803f80));  // ones
}

struct Weighed {
  __m512 largest, total;  // score; of the weights
};

// Turn scores of 16 queries into weights, 2 to the power of how far each is above the reference.
template <typename T>
inline Weighed weigh_against(__m512 reference, T* target, const float* scores, int64_t count, __m512 factor) {
  __m512 largest = _mm512_set1_ps(kUnseen), total = _mm512_setzero_ps();
  for (int64_t e = 0; e < count; e += kPack<T>) {
    __m512 weights[kPack<T>];
    UNROLL for (int64_t i = 0; i < kPack<T>; ++i) {
      const __m512 score = load(scores + (e + i) * kBlock);
      largest = _mm512_max_ps(largest, score);
      weights[i] = power_of_two<T>(_mm512_fmsub_ps(score, factor, reference));
    }
    total = store_weights(target + e * kBlock, weights, total);
  }
  return {largest, total};
}

// Turn a block's scores into weights. What they are measured against is raised, and what was summed before
// follows, only when a score is more than `kFar` above it: few blocks are read twice, as the first that a
// query sees is. `count` is a multiple of the pack.
template <typename T>
void weigh(Tile<T>& tile, int64_t count, int64_t value_width, float scaling) {
  const __m512 factor = _mm512_set1_ps(scaling);
  for (int64_t v = 0; v < kBlockVectors; ++v) {
    const float* scores = tile.scores + v * kLanes;
    T* target = tile.weights + v * kLanes * kPack<T>;
    const __m512 reference = load(tile.references + v * kLanes), before = load(tile.totals + v * kLanes);
    const auto [largest, total] = weigh_against(reference, target, scores, count, factor);
    const __mmask16 is_far =
        _mm512_cmp_ps_mask(_mm512_fmsub_ps(largest, factor, reference), _mm512_set1_ps(kFar), _CMP_GT_OQ);
    if (!is_far) {
      store(tile.totals + v * kLanes, _mm512_add_ps(before, total));
      continue;
    }
    const __m512 raised = _mm512_mask_mul_ps(reference, is_far, largest, factor),
                 shrink = power_of_two<float>(_mm512_sub_ps(reference, raised));
    store(tile.references + v * kLanes, raised);
    store(tile.totals + v * kLanes,
          _mm512_fmadd_ps(before, shrink, weigh_against(raised, target, scores, count, factor).total));
    for (int64_t d = 0; d < value_width; ++d) {
      float* sums = tile.sums + d * kBlock + v * kLanes;
      store(sums, _mm512_mul_ps(load(sums), shrink));
    }
  }
}

template <typename T>
void end_tile(Tile<T>& tile, const Prompt<T>& prompt, int64_t first, int64_t count) {
  for (int64_t q = 0; q < count; ++q)
    tile.totals[q] = tile.totals[q] > 0 ? 1 / tile.totals[q] : 0.0f;  // what sees nothing has no reader
  for (int64_t q = 0; q < count; ++q) {
    T* output = prompt.output + (first + q) * prompt.output_stride;
    for (int64_t d = 0; d < prompt.value_width; ++d)
      output[d] = static_cast<T>(tile.sums[d * kBlock + q] * tile.totals[q]);
  }
}

template <typename T>
void attend_tile(Tile<T>& tile, const Prompt<T>& prompt, int64_t first) {
  const int64_t count = std::min(kBlock, prompt.tokens - first);
  begin_tile(tile, prompt, first, count);
  int64_t lowest = prompt.entries, highest = -1;
  for (int64_t q = 0; q < kBlock; ++q) {
    highest = std::max<int64_t>(highest, tile.last_seen[q]);
    if (tile.last_seen[q] >= 0) lowest = std::min<int64_t>(lowest, tile.last_seen[q]);
  }
  const bool has_idle = *std::min_element(tile.last_seen, tile.last_seen + kBlock) < 0;
  const float scaling = prompt.softcap > 0 ? kLog2e : prompt.scaling * kLog2e;
  const int64_t from = std::max<int64_t>(0, lowest - prompt.window + 1) / kEntries * kEntries;
  for (int64_t block = from; block <= highest; block += kEntries) {
    const int64_t held = std::min(kEntries, prompt.entries - block),
                  whole = (held + kPack<T> - 1) / kPack<T> * kPack<T>;
    for (int64_t e = 0; e < held; e += kTileRows) {
      const T* key = prompt.key + (block + e) * prompt.key_stride;
      accumulate_rows<false, kTileRows, true>(tile.scores + e * kBlock, key, prompt.key_stride, tile.queries,
                                              prompt.width, held - e);
    }
    const bool sees_all = !has_idle && block + held - 1 <= lowest && block > highest - prompt.window;
    if (!sees_all || prompt.softcap > 0) mask_scores(tile, prompt, block, held);
    std::fill_n(tile.scores + held * kBlock, (whole - held) * kBlock, kUnseen);
    weigh(tile, whole, prompt.value_width, scaling);
    const T* values = prompt.values + block / kPack<T> * prompt.value_stride;
    for (int64_t d = 0; d < prompt.value_width; d += kTileRows) {
      accumulate_rows(tile.sums + d * kBlock, values + d * kPack<T>, kPack<T>, tile.weights, whole,
                      prompt.value_width - d, prompt.value_stride);
    }
  }
  end_tile(tile, prompt, first, count);
}

template <typename T>
void attend_prompts(Tensor& output, const Tensor& query, const Tensor& key, const Tensor& value,
                    const Tensor& last_seen, int64_t window, double scaling, double softcap,
                    const std::optional<Tensor>& sinks) {
  const int64_t rows = query.size(0), heads = query.size(1), tokens = query.size(2), width = query.size(3);
  const int64_t kv_heads = key.size(1), entries = key.size(2), value_width = value.size(3);
  const int64_t tiles = (tokens + kBlock - 1) / kBlock;
  std::vector<int64_t> held(
      rows);  // entries up to the last that a row sees: whatever lies behind them is not met
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t* last = last_seen.const_data_ptr<int64_t>() + row * tokens;
    held[row] = *std::max_element(last, last + tokens) + 1;
    TORCH_CHECK(held[row] <= entries, "a plan must stay within the keys");
  }
  Tensor values = value;
  if constexpr (kPack<T> == 2) {
    values = at::empty({rows, kv_heads, (entries + 1) / 2, 2 * value_width}, value.options());
    at::parallel_for(0, rows * kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t number = begin; number < end; ++number) {
        const int64_t row = number / kv_heads, kv_head = number % kv_heads;
        pair_values(values.data_ptr<T>() + row * values.stride(0) + kv_head * values.stride(1),
                    value.const_data_ptr<T>() + row * value.stride(0) + kv_head * value.stride(1),
                    value.stride(2), held[row], value_width);
      }
    });
  }
  at::parallel_for(0, rows * heads * tiles, 1, [&](int64_t begin, int64_t end) {
    Tile<T> tile(width, value_width);
    for (int64_t number = begin; number < end; ++number) {
      const int64_t row = number / tiles / heads, head = number / tiles % heads,
                    kv_head = head / (heads / kv_heads);
      const Prompt<T> prompt{
          query.const_data_ptr<T>() + row * query.stride(0) + head * query.stride(1),
          key.const_data_ptr<T>() + row * key.stride(0) + kv_head * key.stride(1),
          values.const_data_ptr<T>() + row * values.stride(0) + kv_head * values.stride(1),
          last_seen.const_data_ptr<int64_t>() + row * tokens,
          output.data_ptr<T>() + (row * tokens * heads + head) * value_width,
          query.stride(2),
          key.stride(2),
          values.stride(2),
          heads * value_width,
          tokens,
          held[row],
          width,
          value_width,
          window,
          static_cast<float>(scaling),
          static_cast<float>(softcap),
          sinks ? std::max(static_cast<float>(sinks->const_data_ptr<T>()[head]) * kLog2e, kSmallest)
                : kSmallest};
      attend_tile(tile, prompt, number % tiles * kBlock);
    }
  });
}

Tensor prompt_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& last_seen,
                        int64_t window, double scaling, double softcap, const std::optional<Tensor>& sinks) {
  TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1,
              "a head's numbers must lie side by side");
  TORCH_CHECK(query.size(3) % 2 == 0, "an even width is needed, not ", query.size(3));
  TORCH_CHECK(last_seen.is_contiguous(), "a plan must be whole");
  Tensor output = at::empty({query.size(0), query.size(2), query.size(1), value.size(3)}, query.options());
  if (query.scalar_type() == at::kBFloat16) {
    attend_prompts<BFloat16>(output, query, key, value, last_seen, window, scaling, softcap, sinks);
  } else {
    attend_prompts<float>(output, query, key, value, last_seen, window, scaling, softcap, sinks);
  }
  return output;
}

}  // namespace
