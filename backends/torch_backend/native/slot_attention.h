// Attention of a decode step. Each row's new token is written to its slot and attends over the entries that
// its bias does not mask. Blocks of 16 masked entries are not read. Rows of the same slot are neighbouring
// tokens of its sequence, and see each other's.
//
// A slot's planes have the rows' type, or they are int8 with a scale for each entry, as cache/quantization.py
// rounds. Int8 keys are multiplied as they are. For that, the query is rounded to 16 bits: no element changes
// by more than 2^-16 of the largest one. Scales are applied to scores and weights instead of elements.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "checks.h"
#include "rotary.h"
#include "tile.h"
#include "token_store.h"

namespace {

constexpr float kMaskedBias = -1e30f;  // an entry is masked if its bias is below

template <typename P>
constexpr bool kIsInt8 = std::is_same_v<P, int8_t>;

// The type of queries that are multiplied with keys of type P.
template <typename P>
using Query = std::conditional_t<kIsInt8<P>, int16_t, P>;

// The query heads of one row that share a KV head, and the entries that they attend over. Rows have the
// type T, keys and values the type P.
template <typename T, typename P>
struct HeadGroup {
  const Query<P>* query;         // [head, width]
  const P* key;                  // [entry, width]
  const P* value;                // [entry, value width]
  const P* next_key;             // [entry, width], of the group that the thread computes next
  const float* query_scales;     // [head], null without int8 planes, as the next two
  const BFloat16* key_scales;    // [entry]
  const BFloat16* value_scales;  // [entry]
  const float* bias;             // [entry]
  const T* sinks;                // [head] or null
  T* output;                     // [head, value width]
  int64_t query_stride;          // elements from a head to the next one
  int64_t num_heads;
  int64_t num_entries;
  int64_t width;
  int64_t value_width;
  float scaling;
  float softcap;  // 0: none
};

inline Floats multiply_add(Floats sums, Ints left, Ints right, float) {
  return fmadd(as_floats(left), as_floats(right), sums);
}

inline Floats multiply_add(Floats sums, Ints left, Ints right, BFloat16) {
  return add_pairs(sums, as_pairs(left), as_pairs(right), BFloat16());
}

// Sums of integers are int32 in the registers of float32 sums. They are exact up to a width of 8,192.
inline Floats multiply_add(Floats sums, Ints left, Ints right, int16_t) {
  return as_floats(add_pairs(as_ints(sums), left, right));
}

template <typename Q>
inline Floats finished(Floats sums) {
  if constexpr (std::is_same_v<Q, int16_t>) return to_floats(as_ints(sums));
  return sums;
}

// Call `work` for tiles of up to `kTileRows` heads, with the number of heads as a constant: their
// accumulators then stay in registers.
template <typename Work>
inline void for_heads(int64_t num_heads, const Work& work) {
  for (int64_t g = 0; g < num_heads; g += kTileRows) {
    switch (num_heads - g) {
      case 1: work(std::integral_constant<int64_t, 1>(), g); break;
      case 2: work(std::integral_constant<int64_t, 2>(), g); break;
      case 3: work(std::integral_constant<int64_t, 3>(), g); break;
      default: work(std::integral_constant<int64_t, kTileRows>(), g);
    }
  }
}

// Return the mask of the entries, out of 16, that may be seen.
inline Lanes visible_entries(const float* bias, int64_t count) {
  const Lanes lanes = first_lanes(count);
  const Floats values = load(bias, lanes);
  return lanes & greater(values, broadcast(kMaskedBias));
}

// Prefetch the 16 entries that are `kPrefetchDistance` after entry `first` of a plane. Past the plane's end
// they are the first entries of `next_plane`, the one that is read next.
template <typename T>
inline void prefetch_entries(const T* plane, const T* next_plane, int64_t first, int64_t num_entries,
                             int64_t width) {
  const int64_t position = first * width + kPrefetchDistance / int64_t{sizeof(T)};
  const int64_t end = num_entries * width;
  const T* ahead = position < end ? plane + position : next_plane + (position - end);
  for (int64_t n = 0; n < kLanes * width; n += kCacheLine / int64_t{sizeof(T)}) {
    _mm_prefetch(reinterpret_cast<const char*>(ahead + n), _MM_HINT_T1);
  }
}

// Write the scores [head, 16] of up to 16 entries, and raise `largest` [head] to the largest of each head.
template <bool is_aligned, typename T, typename P>
void score_block(const HeadGroup<T, P>& group, int64_t first, int64_t count, float* scores, float* largest) {
  prefetch_entries(group.key, group.value, first, group.num_entries, group.width);
  for_heads(group.num_heads, [&](auto heads, int64_t g) {
    constexpr int64_t tile_heads = decltype(heads)::value;
    // Each dot product stays a vector of partial sums until 16 entries have one. A single transposition then
    // adds all of them, instead of one horizontal sum per entry.
    alignas(64) float partial_sums[tile_heads][kLanes][kLanes];
    for (int64_t e = 0; e < count; ++e) {
      const P* entry_key = group.key + (first + e) * group.width;
      Floats sums[tile_heads];
      UNROLL for (int64_t h = 0; h < tile_heads; ++h) { sums[h] = Floats{}; }
      for (int64_t d = 0; d < group.width; d += kLanes * kPack<Query<P>>) {
        const Ints key = load_packed<is_aligned>(entry_key + d, group.width - d);
        UNROLL for (int64_t h = 0; h < tile_heads; ++h) {
          const Query<P>* head_query = group.query + (g + h) * group.query_stride;
          const Ints query = load_packed<is_aligned>(head_query + d, group.width - d);
          sums[h] = multiply_add(sums[h], query, key, Query<P>());
        }
      }
      UNROLL for (int64_t h = 0; h < tile_heads; ++h) {
        store(partial_sums[h][e], finished<Query<P>>(sums[h]));
      }
    }
    for (int64_t e = count; e < kLanes; ++e) {
      UNROLL for (int64_t h = 0; h < tile_heads; ++h) { store(partial_sums[h][e], Floats{}); }
    }
    const Lanes lanes = first_lanes(count);
    for (int64_t h = 0; h < tile_heads; ++h) {
      Floats row = horizontal_sums(partial_sums[h]) * broadcast(group.scaling);
      if constexpr (kIsInt8<P>) {
        row = row * (load(group.key_scales + first, lanes) * broadcast(group.query_scales[g + h]));
      }
      if (group.softcap > 0) row = broadcast(group.softcap) * tanh(row / broadcast(group.softcap));
      row = row + load(group.bias + first, lanes);
      store(scores + (g + h) * kLanes, row);
      largest[g + h] = std::max(largest[g + h], largest_of(lanes, row));
    }
  });
}

// Turn the scores [head, 16] of up to 16 entries into the softmax's weights, add these to `totals` [head],
// and add the weighted values to `sums` [head, value width].
template <bool is_aligned, typename T, typename P>
void accumulate_values(const HeadGroup<T, P>& group, int64_t first, int64_t count, float* scores,
                       const float* largest, float* totals, float* sums) {
  prefetch_entries(group.value, group.next_key, first, group.num_entries, group.value_width);
  const Lanes lanes = first_lanes(count);
  for (int64_t g = 0; g < group.num_heads; ++g) {
    float* row = scores + g * kLanes;
    const Floats weights = keep(lanes, exp(load(row) - broadcast(largest[g])));
    totals[g] += total_of(weights);
    store(row, kIsInt8<P> ? weights * load(group.value_scales + first, lanes) : weights);
  }
  for_heads(group.num_heads, [&](auto heads, int64_t g) {
    constexpr int64_t tile_heads = decltype(heads)::value;
    for (int64_t d = 0; d < group.value_width; d += kLanes) {
      const Lanes lanes = is_aligned ? all_lanes() : first_lanes(group.value_width - d);
      Floats accumulators[tile_heads];
      UNROLL for (int64_t h = 0; h < tile_heads; ++h) {
        accumulators[h] = load(sums + (g + h) * group.value_width + d, lanes);
      }
      for (int64_t e = 0; e < count; ++e) {
        const Floats values = load(group.value + (first + e) * group.value_width + d, lanes);
        UNROLL for (int64_t h = 0; h < tile_heads; ++h) {
          const Floats weight = broadcast(scores[(g + h) * kLanes + e]);
          accumulators[h] = fmadd(weight, values, accumulators[h]);
        }
      }
      UNROLL for (int64_t h = 0; h < tile_heads; ++h) {
        store(sums + (g + h) * group.value_width + d, accumulators[h], lanes);
      }
    }
  });
}

// Attend in two passes: all scores first, then the values. The softmax subtracts the largest score of all, so
// nothing is rescaled. Entries are added in ascending order by one thread: the order depends on neither the
// other rows nor the number of threads. A masked block adds nothing, so skipping it changes nothing. The best
// of the `stored` tokens take part, if the slot has a store.
template <bool is_aligned, typename T, typename P, typename Stored>
void attend(const HeadGroup<T, P>& group, Stored& stored) {
  thread_local Buffer<float> buffer;
  const int64_t num_heads = group.num_heads;
  const int64_t num_blocks = (group.num_entries + kLanes - 1) / kLanes;
  buffer.resize(num_heads * (num_blocks * kLanes + group.value_width + 2));
  float* scores = buffer.data();
  float* sums = scores + num_heads * num_blocks * kLanes;
  float* largest = sums + num_heads * group.value_width;
  float* totals = largest + num_heads;
  const auto for_visible_blocks = [&](const auto& work) {
    for (int64_t e = 0; e < group.num_entries; e += kLanes) {
      const int64_t count = std::min(kLanes, group.num_entries - e);
      if (any(visible_entries(group.bias + e, count))) work(e, count, scores + e * num_heads);
    }
  };
  // A sink is a score without a value: it is part of the softmax's largest score and of its total.
  for (int64_t g = 0; g < num_heads; ++g) {
    largest[g] =
        group.sinks == nullptr ? std::numeric_limits<float>::lowest() : static_cast<float>(group.sinks[g]);
  }
  for_visible_blocks([&](int64_t e, int64_t count, float* block_scores) {
    score_block<is_aligned>(group, e, count, block_scores, largest);
  });
  stored.score(group, largest);
  std::fill_n(sums, num_heads * group.value_width, 0.0f);
  for (int64_t g = 0; g < num_heads; ++g) {
    totals[g] = group.sinks == nullptr ? 0.0f : std::exp(static_cast<float>(group.sinks[g]) - largest[g]);
  }
  for_visible_blocks([&](int64_t e, int64_t count, float* block_scores) {
    accumulate_values<is_aligned>(group, e, count, block_scores, largest, totals, sums);
  });
  stored.add_values(largest, totals, sums);
  for (int64_t g = 0; g < num_heads; ++g) {
    // An idle row sees nothing, and its output is not read: 0, not NaN.
    const Floats factor = broadcast(totals[g] > 0 ? 1 / totals[g] : 0.0f);
    for (int64_t d = 0; d < group.value_width; d += kLanes) {
      const Lanes lanes = first_lanes(group.value_width - d);
      const Floats values = load(sums + g * group.value_width + d, lanes);
      store(group.output + g * group.value_width + d, values * factor, lanes);
    }
  }
}

// Round a row to integers; return the scale by which they are to be multiplied.
template <typename Scale, typename Integer, typename T>
Scale quantize_row(Integer* integers, const T* row, int64_t width) {
  // A NaN is the largest magnitude of its row, and then its scale: see `quantize` in linear.h.
  const Ints magnitude = broadcast(0x7fffffff);
  Ints largest = Ints{};
  for (int64_t d = 0; d < width; d += kLanes) {
    const Ints bits = as_ints(load(row + d, first_lanes(width - d)));
    largest = max(largest, bits & magnitude);
  }
  const Scale scale = std::bit_cast<float>(largest_of(largest)) / std::numeric_limits<Integer>::max();
  const Floats divisor = broadcast(scale);
  const Lanes is_positive = scale > 0 ? all_lanes() : no_lanes();
  for (int64_t d = 0; d < width; d += kLanes) {
    const Lanes lanes = first_lanes(width - d);
    const Floats quotients = keep(is_positive, load(row + d, lanes) / divisor);
    store(integers + d, to_ints(quotients), lanes);
  }
  return scale;
}

// The keys or the values of all slots.
template <typename P>
struct Planes {
  P* rows;           // [slot, kv_head, entry, width]
  BFloat16* scales;  // [slot, kv_head, entry] or null
  int64_t capacity;
  int64_t width;

  P* plane(int64_t index) const { return rows + index * capacity * width; }
  BFloat16* plane_scales(int64_t index) const {
    return scales == nullptr ? nullptr : scales + index * capacity;
  }

  template <typename T>
  void write(int64_t index, int64_t entry, const T* row) const {
    P* target = plane(index) + entry * width;
    if constexpr (kIsInt8<P>) {
      plane_scales(index)[entry] = quantize_row<BFloat16>(target, row, width);
    } else {
      std::copy_n(row, width, target);
    }
  }
};

// Return whether two of the rows have the same slot. Null: row i has slot i.
inline bool has_duplicates(const int64_t* slots, int64_t num_rows) {
  if (slots == nullptr) return false;
  std::vector<int64_t> sorted(slots, slots + num_rows);
  std::sort(sorted.begin(), sorted.end());
  return std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
}

template <typename T, typename P, typename S>
void write_and_attend(Tensor& output, const Tensor& query, const Tensor& key, const Tensor& value,
                      const Planes<P>& keys, const Planes<P>& values, const Tensor& entries,
                      const Tensor& bias, double scaling, double softcap, const std::optional<Tensor>& sinks,
                      const T* cosines, const T* sines, const S& store, const int64_t* slots = nullptr) {
  const int64_t num_rows = query.size(0);
  const int64_t num_heads = query.size(1);
  const int64_t num_kv_heads = key.size(1);
  const int64_t group_size = num_heads / num_kv_heads;
  const int64_t width = keys.width;
  const int64_t value_width = values.width;
  const int64_t num_entries = bias.size(2);
  const int64_t* entry = entries.const_data_ptr<int64_t>();
  const bool is_aligned = width % (kLanes * kPack<Query<P>>) == 0 && value_width % kLanes == 0;
  const int64_t elements = std::max<int64_t>(1, num_entries * (width + value_width));
  const int64_t groups_per_thread = std::max<int64_t>(1, kGrain / 4 / elements);
  // The rows of one KV head come before those of the next. Long and idle rows thus go to all threads alike.
  const auto plane_of = [&](int64_t i) {
    const int64_t row = i % num_rows;
    return (slots == nullptr ? row : slots[row]) * num_kv_heads + i / num_rows;
  };
  const auto write = [&](int64_t i, const auto& stored) {
    thread_local Buffer<T> rotated;
    const int64_t row = i % num_rows;
    const int64_t kv_head = i / num_rows;
    const int64_t plane = plane_of(i);
    const T* new_key = key.const_data_ptr<T>() + row * key.stride(0) + kv_head * key.stride(1);
    const T* new_value = value.const_data_ptr<T>() + row * value.stride(0) + kv_head * value.stride(1);
    if (cosines != nullptr) {
      rotated.resize(width);
      rotate(rotated.data(), new_key, cosines + row * width, sines + row * width, width);
      new_key = rotated.data();
    }
    if constexpr (std::is_same_v<T, P>) {
      stored.demote(keys.plane(plane) + entry[row] * width, values.plane(plane) + entry[row] * value_width);
    }
    keys.write(plane, entry[row], new_key);
    values.write(plane, entry[row], new_value);
  };
  // Rows of one slot see each other's tokens, so that all are written before any attends.
  const bool shares_slots = has_duplicates(slots, num_rows);
  if (shares_slots) {
    for (int64_t i = 0; i < num_rows * num_kv_heads; ++i) write(i, typename NoStore::Tokens());
  }
  at::parallel_for(0, num_rows * num_kv_heads, groups_per_thread, [&](int64_t begin, int64_t end) {
    thread_local Buffer<T> rotated;  // the query heads
    thread_local Buffer<Query<P>> rounded;
    thread_local Buffer<float> query_scales;
    rotated.resize(group_size * width);
    rounded.resize(group_size * width);
    query_scales.resize(group_size);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i % num_rows;
      const int64_t kv_head = i / num_rows;
      const int64_t first_head = kv_head * group_size;
      const int64_t plane = plane_of(i);
      const int64_t next_plane = plane_of(std::min(i + 1, end - 1));
      const T* queries = query.const_data_ptr<T>() + row * query.stride(0) + first_head * query.stride(1);
      int64_t query_stride = query.stride(1);
      if (cosines != nullptr) {
        for (int64_t g = 0; g < group_size; ++g) {
          rotate(&rotated[g * width], queries + g * query_stride, cosines + row * width, sines + row * width,
                 width);
        }
        queries = rotated.data();
        query_stride = width;
      }
      auto stored = store.tokens(row, plane, width, value_width);
      if (!shares_slots) write(i, stored);
      HeadGroup<T, P> group{
          .key = keys.plane(plane),
          .value = values.plane(plane),
          .next_key = keys.plane(next_plane),
          .key_scales = keys.plane_scales(plane),
          .value_scales = values.plane_scales(plane),
          .bias = bias.const_data_ptr<float>() + row * num_entries,
          .sinks = sinks ? sinks->const_data_ptr<T>() + first_head : nullptr,
          .output = output.data_ptr<T>() + (row * num_heads + first_head) * value_width,
          .num_heads = group_size,
          .num_entries = num_entries,
          .width = width,
          .value_width = value_width,
          .scaling = static_cast<float>(scaling),
          .softcap = static_cast<float>(softcap),
      };
      if constexpr (kIsInt8<P>) {
        for (int64_t g = 0; g < group_size; ++g) {
          query_scales[g] = quantize_row<float>(&rounded[g * width], queries + g * query_stride, width);
        }
        group.query = rounded.data();
        group.query_scales = query_scales.data();
        group.query_stride = width;
      } else {
        group.query = queries;
        group.query_stride = query_stride;
      }
      is_aligned ? attend<true>(group, stored) : attend<false>(group, stored);
    }
  });
}

inline void check_slot_arguments(const Tensor& query, const Tensor& key, const Tensor& value,
                                 const Tensor& keys, const Tensor& values,
                                 const std::optional<Tensor>& key_scales,
                                 const std::optional<Tensor>& value_scales, const Tensor& entries,
                                 const Tensor& bias, const std::optional<Tensor>& slots = std::nullopt) {
  const at::ScalarType dtype = query.scalar_type();
  check_row_dtype("query", query);
  check_dim("query", query, 4, "[row, head, 1, width]");
  check_dim("key", key, 4, "[row, kv_head, 1, width]");
  check_dim("value", value, 4, "[row, kv_head, 1, value width]");
  check_dim("keys", keys, 4, "[slot, kv_head, entry, width]");
  check_dim("bias", bias, 3, "[row, 1, entry]");
  const int64_t num_rows = query.size(0);
  const int64_t num_kv_heads = key.size(1);
  const int64_t num_slots = keys.size(0);
  const int64_t capacity = keys.size(2);
  const int64_t width = query.size(3);
  check_groups(query.size(1), num_kv_heads);
  check_shape("query", query, {num_rows, query.size(1), 1, width});
  check_shape("key", key, {num_rows, num_kv_heads, 1, width});
  check_shape("value", value, {num_rows, num_kv_heads, 1, value.size(3)});
  for (const auto& [name, heads] : {std::pair("query", query), {"key", key}, {"value", value}}) {
    check_dtype(name, heads, dtype);
    check_last_stride(name, heads);
  }
  TORCH_CHECK(key_scales.has_value() == value_scales.has_value(),
              "key_scales and value_scales must both be given or both be None, got ",
              key_scales ? "key_scales" : "value_scales", " alone");
  const at::ScalarType plane_dtype = key_scales ? at::kChar : dtype;
  check("keys", keys, plane_dtype, {num_slots, num_kv_heads, capacity, width});
  check("values", values, plane_dtype, {num_slots, num_kv_heads, capacity, value.size(3)});
  if (key_scales) {
    check("key_scales", *key_scales, at::kBFloat16, {num_slots, num_kv_heads, capacity, 1});
    check("value_scales", *value_scales, at::kBFloat16, {num_slots, num_kv_heads, capacity, 1});
  }
  check("entries", entries, at::kLong, {num_rows, 1});
  check("bias", bias, at::kFloat, {num_rows, 1, bias.size(2)});
  if (slots) {
    check("slots", *slots, at::kLong, {num_rows});
    const int64_t* slot = slots->const_data_ptr<int64_t>();
    for (int64_t row = 0; row < num_rows; ++row) {
      TORCH_CHECK(0 <= slot[row] && slot[row] < num_slots, "slots must be in [0, ", num_slots, "), got ",
                  slot[row], " in row ", row);
    }
  } else {
    TORCH_CHECK(num_rows <= num_slots, "query must have at most one row per slot, ", num_slots, ", got ",
                num_rows);
  }
  // The last entry is the one that idle rows write to, which no row may see.
  TORCH_CHECK(bias.size(2) < capacity, "bias must cover fewer entries than a slot's ", capacity, ", got ",
              bias.size(2));
  const int64_t* entry = entries.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < num_rows; ++row) {
    TORCH_CHECK(0 <= entry[row] && entry[row] < capacity, "entries must be in [0, ", capacity, "), got ",
                entry[row], " in row ", row);
  }
}

inline void check_heads_arguments(const Tensor& query, const std::optional<Tensor>& sinks,
                                  const std::optional<Tensor>& cosines, const std::optional<Tensor>& sines) {
  const at::ScalarType dtype = query.scalar_type();
  const int64_t num_rows = query.size(0);
  const int64_t width = query.size(3);
  if (sinks) check("sinks", *sinks, dtype, {query.size(1)});
  TORCH_CHECK(cosines.has_value() == sines.has_value(),
              "cosines and sines must both be given or both be None, ", "got ", cosines ? "cosines" : "sines",
              " alone");
  if (cosines) {
    check_even_width("query", query);
    check("cosines", *cosines, dtype, {num_rows, 1, width});
    check("sines", *sines, dtype, {num_rows, 1, width});
  }
}

// The operator `slot_attention`: see kernels.py. With `cosines` and `sines` [row, 1, width], query and key
// are rotated first.
Tensor slot_attention(const Tensor& query, const Tensor& key, const Tensor& value, Tensor& keys,
                      Tensor& values, const std::optional<Tensor>& key_scales,
                      const std::optional<Tensor>& value_scales, const Tensor& entries, const Tensor& bias,
                      double scaling, double softcap, const std::optional<Tensor>& sinks,
                      const std::optional<Tensor>& slots, const std::optional<Tensor>& cosines,
                      const std::optional<Tensor>& sines) {
  check_slot_arguments(query, key, value, keys, values, key_scales, value_scales, entries, bias, slots);
  const at::ScalarType dtype = query.scalar_type();
  const int64_t num_rows = query.size(0);
  const int64_t num_heads = query.size(1);
  check_heads_arguments(query, sinks, cosines, sines);
  Tensor output = at::empty({num_rows, 1, num_heads, value.size(3)}, query.options());
  const auto run = [&](auto row_type, auto plane_type) {
    using T = decltype(row_type);
    using P = decltype(plane_type);
    const auto planes = [&](Tensor& rows, const std::optional<Tensor>& scales) {
      return Planes<P>{rows.data_ptr<P>(), scales ? scales->data_ptr<BFloat16>() : nullptr, rows.size(2),
                       rows.size(3)};
    };
    write_and_attend<T, P>(output, query, key, value, planes(keys, key_scales),
                           planes(values, value_scales), entries, bias, scaling, softcap, sinks,
                           data_or_null<T>(cosines), data_or_null<T>(sines), NoStore(),
                           data_or_null<int64_t>(slots));
  };
  const auto run_rows = [&](auto row_type) {
    key_scales ? run(row_type, int8_t()) : run(row_type, row_type);
  };
  dtype == at::kBFloat16 ? run_rows(BFloat16()) : run_rows(float());
  return output;
}

// The operator `sparse_attention`: see kernels.py. The rest is as in `slot_attention`.
Tensor sparse_attention(const Tensor& query, const Tensor& key, const Tensor& value, Tensor& keys,
                        Tensor& values, Tensor& key_codes, Tensor& value_codes, Tensor& key_steps,
                        Tensor& value_steps, const Tensor& centres, const Tensor& entries,
                        const Tensor& bias, const Tensor& num_stored, int64_t num_attended, double scaling,
                        double softcap, const std::optional<Tensor>& sinks,
                        const std::optional<Tensor>& cosines, const std::optional<Tensor>& sines) {
  check_slot_arguments(query, key, value, keys, values, std::nullopt, std::nullopt, entries, bias);
  check_heads_arguments(query, sinks, cosines, sines);
  const int64_t num_rows = query.size(0);
  const int64_t num_slots = keys.size(0);
  const int64_t num_kv_heads = keys.size(1);
  const int64_t width = keys.size(3);
  const int64_t value_width = values.size(3);
  TORCH_CHECK(width % kStoredTogether == 0 && value_width % kStoredTogether == 0,
              "keys and values must have a multiple of ", kStoredTogether, " numbers, got ", width, " and ",
              value_width);
  check_dim("key_codes", key_codes, 6, "[slot, kv_head, block, width / 8, 16, 4]");
  const int64_t num_entries = key_codes.size(2) * kStoredBlock;
  check("key_codes", key_codes, at::kByte,
        {num_slots, num_kv_heads, key_codes.size(2), width / kStoredTogether, kStoredBlock, 4});
  check("value_codes", value_codes, at::kByte, {num_slots, num_kv_heads, num_entries, value_width / 2});
  check("key_steps", key_steps, at::kBFloat16,
        {num_slots, num_kv_heads, key_codes.size(2), width / part_size(width), kStoredBlock});
  check("value_steps", value_steps, at::kBFloat16,
        {num_slots, num_kv_heads, num_entries, value_width / part_size(value_width)});
  check("centres", centres, at::kFloat, {num_slots, num_kv_heads, width});
  check("num_stored", num_stored, at::kLong, {num_rows});
  TORCH_CHECK(num_attended > 0, "num_attended must be at least 1, got ", num_attended);
  const int64_t* stored = num_stored.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < num_rows; ++row) {
    TORCH_CHECK(0 <= stored[row] && stored[row] <= num_entries, "num_stored must be in [0, ", num_entries,
                "], got ", stored[row], " in row ", row);
  }
  const Store store{{key_codes.data_ptr<uint8_t>(), value_codes.data_ptr<uint8_t>(),
                     key_steps.data_ptr<BFloat16>(), value_steps.data_ptr<BFloat16>(),
                     centres.const_data_ptr<float>(), stored, num_entries, num_attended}};
  Tensor output = at::empty({num_rows, 1, query.size(1), value_width}, query.options());
  const auto run = [&](auto type) {
    using T = decltype(type);
    const auto planes = [](Tensor& rows) {
      return Planes<T>{rows.data_ptr<T>(), nullptr, rows.size(2), rows.size(3)};
    };
    write_and_attend<T, T>(output, query, key, value, planes(keys), planes(values), entries, bias, scaling,
                           softcap, sinks, data_or_null<T>(cosines), data_or_null<T>(sines), store);
  };
  query.scalar_type() == at::kBFloat16 ? run(BFloat16()) : run(float());
  return output;
}

}  // namespace
