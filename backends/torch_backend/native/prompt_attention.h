// Attention of a prompt's chunk over its sequence's entries (FlashAttention,
// https://arxiv.org/abs/2205.14135). A tile of 64 queries meets blocks of 128 entries, with a running
// softmax.
//
// Scores are transposed: entries are the rows and queries the columns. A vector then holds 16 queries, and
// the softmax goes from row to row without a horizontal sum.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "amx.h"
#include "checks.h"
#include "tile.h"

namespace {

constexpr int64_t kBlockEntries = 128;      // their scores with a tile stay in the second-level cache
constexpr float kMaskedScore = -1e30f;      // of an entry that a query does not see
constexpr float kLowestScore = -1e20f;      // below the score of any entry in sight, far above a masked one
constexpr float kRescaleThreshold = 32.0f;  // in powers of two; see `softmax_block`
constexpr float kLog2e = 1.44269504f;

// Return 2^exponent, and 0 far below. The integral part goes to the exponent field; the rest, in [-1/2, 1/2],
// to a polynomial. Its relative error is below 3e-7, or 8e-5 for weights that are then rounded to bfloat16,
// whose rounding is at least 25 times as coarse.
template <typename T>
inline Floats power_of_two(Floats exponent) {
  const Floats integral = nearest(exponent);
  const Floats fraction = exponent - integral;
  constexpr bool is_short = std::is_same_v<T, BFloat16>;
  constexpr float short_terms[] = {5.51716668e-02f, 2.42611121e-01f, 6.93260990e-01f, 9.99928069e-01f};
  constexpr float terms[] = {1.33813025e-03f, 9.66636852e-03f, 5.55038101e-02f,
                             2.40223490e-01f, 6.93147181e-01f, 1.0f};
  Floats power = broadcast(is_short ? short_terms[0] : terms[0]);
  UNROLL for (int n = 1; n < (is_short ? 4 : 6); ++n) {
    power = fmadd(power, fraction, broadcast(is_short ? short_terms[n] : terms[n]));
  }
  return scale_by_powers(power, integral);
}

// The queries of one row and head, and the entries that they attend over.
template <typename T>
struct PromptHead {
  const T* query;            // [token, width]
  const T* key;              // [entry, width]
  const T* values;           // [entry / pack, value width, pack], or for AMX [value width, entry]
  const int64_t* last_seen;  // [token]: the last entry in sight, -1 for none
  T* output;                 // [token, value width]
  int64_t query_stride;      // elements from a token to the next one
  int64_t key_stride;        // elements from an entry to the next one
  int64_t value_stride;      // elements between indices of the values' first dimension
  int64_t output_stride;     // elements from a token to the next one
  int64_t num_tokens;
  int64_t num_entries;
  int64_t width;
  int64_t value_width;
  int64_t window;  // the most entries that a query sees
  float scaling;
  float softcap;  // 0: none
  float sink;     // times log2(e); `kLowestScore`: none
  bool has_tiles;  // the products are AMX's
};

// Write the scores [entry, 64] of `count` entries with packed queries.
template <typename T>
void multiply_keys(Tiles& tiles, bool has_tiles, float* scores, const T* key, int64_t key_stride,
                   const T* queries, int64_t width, int64_t count) {
  if constexpr (kHasTiles<T>) {
    if (has_tiles) {
      accumulate_tiles<false, true>(tiles, scores, key, key_stride, queries, width, count);
      return;
    }
  }
  for (int64_t e = 0; e < count; e += kTileRows) {
    accumulate_rows<false, kTileRows, true>(scores + e * kBlock, key + e * key_stride, key_stride, queries,
                                            width, count - e);
  }
}

// A thread's buffers for a tile of 64 queries, which are the columns of four vectors.
template <typename T>
struct QueryTile {
  Tensor storage;
  T* queries;         // [width / pack, 64, pack]
  T* weights;         // [128 / pack, 64, pack]: the softmax's weights of a block
  float* scores;      // [128, 64]
  float* sums;        // [value width, 64]: the weighted values so far
  float* references;  // [64]: the exponents relative to which weights are computed
  float* totals;      // [64]: the sums of the weights so far
  int32_t last_seen[kBlock];
  Tiles tiles;

  explicit QueryTile(int64_t width, int64_t value_width)
      : storage(at::empty({kBlock * (width + kBlockEntries + kBlockEntries + value_width + 2)}, at::kFloat)) {
    scores = storage.data_ptr<float>();
    sums = scores + kBlock * kBlockEntries;
    references = sums + kBlock * value_width;
    totals = references + kBlock;
    queries = reinterpret_cast<T*>(totals + kBlock);
    weights = reinterpret_cast<T*>(totals + kBlock + kBlock * width);
  }
};

// Load 16 values of an entry and of the next one as pairs. Those behind the last entry are zeros.
inline Ints load_pairs(const BFloat16* values, int64_t stride, int64_t num_entries, Lanes lanes) {
  const Lanes low_lanes = num_entries > 0 ? lanes : no_lanes();
  const Lanes high_lanes = num_entries > 1 ? lanes : no_lanes();
  const Ints low = load_halves(values, low_lanes);
  const Ints high = load_halves(values + stride, high_lanes);
  return low | shift_left<16>(high);
}

// Pack a head's values [entry, width] as [entry / 2, width, 2], the layout of a tile's inputs.
void pair_values(BFloat16* pairs, const BFloat16* values, int64_t stride, int64_t num_entries,
                 int64_t width) {
  for (int64_t e = 0; e < num_entries; e += 2, pairs += 2 * width) {
    for (int64_t d = 0; d < width; d += kLanes) {
      const Lanes lanes = first_lanes(width - d);
      store_bits(pairs + 2 * d, load_pairs(values + e * stride + d, stride, num_entries - e, lanes), lanes);
    }
  }
}

// Pack a head's values [entry, width] as [width, entry], the layout of AMX's rows. Zeros fill up the last
// `kTileInputs` entries, since even a weight of 0 would turn NaN into a sum.
void transpose_values(BFloat16* target, int64_t target_stride, const BFloat16* values, int64_t stride,
                      int64_t num_entries, int64_t width) {
  const int64_t padded_entries = round_up(num_entries, kTileInputs<BFloat16>);
  for (int64_t e = 0; e < padded_entries; e += 2) {
    for (int64_t d = 0; d < width; d += kLanes) {
      const Lanes lanes = first_lanes(width - d);
      const Ints pairs = load_pairs(values + e * stride + d, stride, num_entries - e, lanes);
      store_apart(target + d * target_stride + e, target_stride, pairs, lanes);
    }
  }
}

// Pack up to 64 queries as [width / pack, 64, pack], the layout of a block of weights. The rest is zeros.
template <typename T>
void pack_queries(T* target, const T* query, int64_t stride, int64_t count, int64_t width) {
  for (int64_t q = 0; q < kBlock; ++q) {
    for (int64_t d = 0; d < width; ++d) {
      T& packed = target[(d / kPack<T> * kBlock + q) * kPack<T> + d % kPack<T>];
      packed = q < count ? query[q * stride + d] : T(0);
    }
  }
}

template <typename T>
void init_tile(QueryTile<T>& tile, const PromptHead<T>& head, int64_t first, int64_t count) {
  // A sink is a score without a value, so the softmax starts with it instead of with nothing.
  for (int64_t q = 0; q < kBlock; ++q) {
    tile.last_seen[q] = q < count ? static_cast<int32_t>(head.last_seen[first + q]) : -1;
    tile.references[q] = head.sink;
    tile.totals[q] = head.sink > kLowestScore ? 1.0f : 0.0f;
  }
  pack_queries(tile.queries, head.query + first * head.query_stride, head.query_stride, count, head.width);
  std::fill_n(tile.sums, kBlock * head.value_width, 0.0f);
}

// Apply the softcap to a block's scores, and mask the entries that a query does not see.
template <typename T>
void mask_scores(QueryTile<T>& tile, const PromptHead<T>& head, int64_t block, int64_t count) {
  const Floats scaling = broadcast(head.scaling);
  const Floats softcap = broadcast(head.softcap);
  const Ints window = broadcast(static_cast<int32_t>(head.window));
  for (int64_t v = 0; v < kBlockVectors; ++v) {
    const Ints last = load_bits(tile.last_seen + v * kLanes);
    const Ints before_window = last - window;
    for (int64_t e = 0; e < count; ++e) {
      float* scores = tile.scores + e * kBlock + v * kLanes;
      Floats row = load(scores);
      if (head.softcap > 0) row = softcap * tanh(row * scaling / softcap);
      const Ints entry = broadcast(static_cast<int32_t>(block + e));
      const Lanes visible = at_least(last, entry) & greater(entry, before_window);
      store(scores, select(visible, row, broadcast(kMaskedScore)));
    }
  }
}

// Store the weights of 16 queries for an entry, or for a pair of entries, and return `total` plus them. What
// is added are the stored weights, rounded: the softmax's numerator and denominator then round alike.
inline Floats store_weights(float* target, const Floats (&weights)[1], Floats total) {
  store(target, weights[0]);
  return total + weights[0];
}

inline Floats store_weights(BFloat16* target, const Floats (&weights)[2], Floats total) {
  const Ints pairs = paired(weights[0], weights[1]);
  store_bits(target, pairs);
  const Ints ones = broadcast(0x3f803f80);  // pairs of 1.0
  return add_pairs(total, as_pairs(pairs), as_pairs(ones), BFloat16());
}

// Of a block, for 16 queries.
struct BlockSoftmax {
  Floats largest_score;
  Floats total_weight;
};

// Turn the scores of 16 queries into weights: 2^(score * factor - reference).
template <typename T>
inline BlockSoftmax exponentiate(Floats reference, T* weights, const float* scores, int64_t count,
                                 Floats factor) {
  Floats largest = broadcast(kMaskedScore);
  Floats total = Floats{};
  for (int64_t e = 0; e < count; e += kPack<T>) {
    Floats packed[kPack<T>];
    UNROLL for (int64_t i = 0; i < kPack<T>; ++i) {
      const Floats score = load(scores + (e + i) * kBlock);
      largest = max(largest, score);
      packed[i] = power_of_two<T>(fmsub(score, factor, reference));
    }
    total = store_weights(weights + e * kBlock, packed, total);
  }
  return {largest, total};
}

// Turn a block's scores into weights, and add these to the totals. `count` is a multiple of the pack.
//
// A running softmax usually subtracts the largest score so far, and rescales its sums each time that rises.
// Here the reference rises only when a score exceeds it by more than `kRescaleThreshold`: float32 holds
// weights of 2^32 times values of 2^70 without overflow, and its relative precision is the same. Few blocks
// are computed twice: mostly the first in sight, whose reference is `kLowestScore`.
//
// Batch invariance: a reference depends on its query's scores alone. The queries beside one that is rescaled
// are multiplied by 2^0, exactly 1.
template <typename T>
void softmax_block(QueryTile<T>& tile, int64_t count, int64_t value_width, float scaling) {
  const Floats factor = broadcast(scaling);
  const Floats threshold = broadcast(kRescaleThreshold);
  for (int64_t v = 0; v < kBlockVectors; ++v) {
    const float* scores = tile.scores + v * kLanes;
    T* weights = tile.weights + v * kLanes * kPack<T>;
    float* references = tile.references + v * kLanes;
    float* totals = tile.totals + v * kLanes;
    const Floats reference = load(references);
    const Floats total_before = load(totals);
    const auto [largest, total] = exponentiate(reference, weights, scores, count, factor);
    const Floats excess = fmsub(largest, factor, reference);
    const Lanes needs_rescaling = greater(excess, threshold);
    if (!any(needs_rescaling)) {
      store(totals, total_before + total);
      continue;
    }
    const Floats raised = select(needs_rescaling, largest * factor, reference);
    const Floats rescale = power_of_two<float>(reference - raised);
    const Floats rescaled_total = exponentiate(raised, weights, scores, count, factor).total_weight;
    store(references, raised);
    store(totals, fmadd(total_before, rescale, rescaled_total));
    for (int64_t d = 0; d < value_width; ++d) {
      float* sums = tile.sums + d * kBlock + v * kLanes;
      store(sums, load(sums) * rescale);
    }
  }
}

template <typename T>
void write_tile(QueryTile<T>& tile, const PromptHead<T>& head, int64_t first, int64_t count) {
  for (int64_t q = 0; q < count; ++q) {
    // A padding token sees nothing, and its output is not read: 0, not NaN.
    tile.totals[q] = tile.totals[q] > 0 ? 1 / tile.totals[q] : 0.0f;
  }
  for (int64_t q = 0; q < count; ++q) {
    T* output = head.output + (first + q) * head.output_stride;
    for (int64_t d = 0; d < head.value_width; ++d) {
      output[d] = static_cast<T>(tile.sums[d * kBlock + q] * tile.totals[q]);
    }
  }
}

// Add a block's weighted values.
template <typename T>
void multiply_values(QueryTile<T>& tile, const PromptHead<T>& head, int64_t block, int64_t count) {
  if constexpr (kHasTiles<T>) {
    if (head.has_tiles) {
      accumulate_tiles<false, false>(tile.tiles, tile.sums, head.values + block, head.value_stride,
                                     tile.weights, count, head.value_width);
      return;
    }
  }
  const T* values = head.values + block / kPack<T> * head.value_stride;
  for (int64_t d = 0; d < head.value_width; d += kTileRows) {
    accumulate_rows(tile.sums + d * kBlock, values + d * kPack<T>, kPack<T>, tile.weights, count,
                    head.value_width - d, head.value_stride);
  }
}

// Attend with up to 64 queries from `first` on.
//
// Blocks start at multiples of 128 entries, wherever the queries' windows start. A query thus meets its
// entries in the same blocks and in ascending order in any batch. A masked entry's weight is exactly 0.
template <typename T>
void attend_tile(QueryTile<T>& tile, const PromptHead<T>& head, int64_t first) {
  const int64_t count = std::min(kBlock, head.num_tokens - first);
  init_tile(tile, head, first, count);
  int64_t lowest = head.num_entries;  // of the queries' last entries in sight
  int64_t highest = -1;
  for (int64_t q = 0; q < kBlock; ++q) {
    highest = std::max<int64_t>(highest, tile.last_seen[q]);
    if (tile.last_seen[q] >= 0) lowest = std::min<int64_t>(lowest, tile.last_seen[q]);
  }
  const bool has_blind_query = *std::min_element(tile.last_seen, tile.last_seen + kBlock) < 0;
  const bool has_softcap = head.softcap > 0;
  const float scaling = has_softcap ? kLog2e : head.scaling * kLog2e;  // the softcap follows the scaling
  const int64_t begin = std::max<int64_t>(0, lowest - head.window + 1) / kBlockEntries * kBlockEntries;
  const int64_t step = head.has_tiles ? kTileInputs<T> : kPack<T>;  // entries of a product's step
  for (int64_t block = begin; block <= highest; block += kBlockEntries) {
    const int64_t block_entries = std::min(kBlockEntries, head.num_entries - block);
    const int64_t padded_entries = round_up(block_entries, step);
    multiply_keys(tile.tiles, head.has_tiles, tile.scores, head.key + block * head.key_stride,
                  head.key_stride, tile.queries, head.width, block_entries);
    const bool all_visible =
        !has_blind_query && block + block_entries - 1 <= lowest && block > highest - head.window;
    if (!all_visible || has_softcap) mask_scores(tile, head, block, block_entries);
    std::fill_n(tile.scores + block_entries * kBlock, (padded_entries - block_entries) * kBlock,
                kMaskedScore);
    softmax_block(tile, padded_entries, head.value_width, scaling);
    multiply_values(tile, head, block, padded_entries);
  }
  write_tile(tile, head, first, count);
}

// Return values [row, head, entry, width] in the layout of `PromptHead::values`.
template <typename T>
Tensor packed_values(const Tensor& value, const std::vector<int64_t>& row_entries, bool has_tiles) {
  if constexpr (kPack<T> == 1) {
    return value;
  } else {
    const int64_t num_heads = value.size(1);
    const int64_t width = value.size(3);
    // The rows of a tile are apart by this: an odd number of cache lines, since rows apart by a power of two
    // would share a set of the cache.
    const int64_t padded_entries =
        (round_up(value.size(2), kTileInputs<T>) / kTileInputs<T> | 1) * kTileInputs<T>;
    const Tensor packed =
        has_tiles
            ? at::empty({value.size(0), num_heads, width, padded_entries}, value.options())
            : at::empty({value.size(0), num_heads, (value.size(2) + 1) / 2, 2 * width}, value.options());
    at::parallel_for(0, value.size(0) * num_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row = i / num_heads;
        const int64_t head = i % num_heads;
        T* target = packed.data_ptr<T>() + row * packed.stride(0) + head * packed.stride(1);
        const T* source = value.const_data_ptr<T>() + row * value.stride(0) + head * value.stride(1);
        if (has_tiles) {
          transpose_values(target, packed.stride(2), source, value.stride(2), row_entries[row], width);
        } else {
          pair_values(target, source, value.stride(2), row_entries[row], width);
        }
      }
    });
    return packed;
  }
}

template <typename T>
void attend_prompts(Tensor& output, const Tensor& query, const Tensor& key, const Tensor& value,
                    const Tensor& last_seen, int64_t window, double scaling, double softcap,
                    const std::optional<Tensor>& sinks) {
  const int64_t num_rows = query.size(0);
  const int64_t num_heads = query.size(1);
  const int64_t num_tokens = query.size(2);
  const int64_t width = query.size(3);
  const int64_t num_kv_heads = key.size(1);
  const int64_t num_entries = key.size(2);
  const int64_t value_width = value.size(3);
  const int64_t num_tiles = (num_tokens + kBlock - 1) / kBlock;
  // Entries behind the last in sight may hold anything, NaN too, and are never read.
  std::vector<int64_t> row_entries(num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t* last = last_seen.const_data_ptr<int64_t>() + row * num_tokens;
    row_entries[row] = num_tokens == 0 ? 0 : *std::max_element(last, last + num_tokens) + 1;
    TORCH_CHECK(row_entries[row] <= num_entries, "last_seen must be below the number of entries, ",
                num_entries, ", got ", row_entries[row] - 1, " in row ", row);
  }
  const bool has_tiles = takes_tiles<T>(width);
  const Tensor values = packed_values<T>(value, row_entries, has_tiles);
  at::parallel_for(0, num_rows * num_heads * num_tiles, 1, [&](int64_t begin, int64_t end) {
    QueryTile<T> tile(width, value_width);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / num_tiles / num_heads;
      const int64_t head = i / num_tiles % num_heads;
      const int64_t kv_head = head / (num_heads / num_kv_heads);
      const float sink = sinks ? static_cast<float>(sinks->const_data_ptr<T>()[head]) * kLog2e : kLowestScore;
      const PromptHead<T> prompt_head{
          .query = query.const_data_ptr<T>() + row * query.stride(0) + head * query.stride(1),
          .key = key.const_data_ptr<T>() + row * key.stride(0) + kv_head * key.stride(1),
          .values = values.const_data_ptr<T>() + row * values.stride(0) + kv_head * values.stride(1),
          .last_seen = last_seen.const_data_ptr<int64_t>() + row * num_tokens,
          .output = output.data_ptr<T>() + (row * num_tokens * num_heads + head) * value_width,
          .query_stride = query.stride(2),
          .key_stride = key.stride(2),
          .value_stride = values.stride(2),
          .output_stride = num_heads * value_width,
          .num_tokens = num_tokens,
          .num_entries = row_entries[row],
          .width = width,
          .value_width = value_width,
          .window = window,
          .scaling = static_cast<float>(scaling),
          .softcap = static_cast<float>(softcap),
          .sink = std::max(sink, kLowestScore),
          .has_tiles = has_tiles,
      };
      attend_tile(tile, prompt_head, i % num_tiles * kBlock);
    }
  });
}

// The operator `prompt_attention`: see kernels.py.
Tensor prompt_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& last_seen,
                        int64_t window, double scaling, double softcap, const std::optional<Tensor>& sinks) {
  check_row_dtype("query", query);
  check_dim("query", query, 4, "[row, head, token, width]");
  check_dim("key", key, 4, "[row, kv_head, entry, width]");
  check_dim("value", value, 4, "[row, kv_head, entry, value width]");
  const at::ScalarType dtype = query.scalar_type();
  const int64_t num_rows = query.size(0);
  const int64_t num_heads = query.size(1);
  const int64_t num_tokens = query.size(2);
  check_groups(num_heads, key.size(1));
  check_shape("key", key, {num_rows, key.size(1), key.size(2), query.size(3)});
  check_shape("value", value, {num_rows, key.size(1), key.size(2), value.size(3)});
  for (const auto& [name, heads] : {std::pair("query", query), {"key", key}, {"value", value}}) {
    check_dtype(name, heads, dtype);
    check_last_stride(name, heads);
  }
  check_even_width("query", query);
  check("last_seen", last_seen, at::kLong, {num_rows, num_tokens});
  if (sinks) check("sinks", *sinks, dtype, {num_heads});
  Tensor output = at::empty({num_rows, num_tokens, num_heads, value.size(3)}, query.options());
  const auto run = [&](auto type) {
    using T = decltype(type);
    attend_prompts<T>(output, query, key, value, last_seen, window, scaling, softcap, sinks);
  };
  dtype == at::kBFloat16 ? run(BFloat16()) : run(float());
  return output;
}

}  // namespace
