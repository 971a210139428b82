// The attention of a prompt's last queries to its entries, reduced over the queries: the votes by which
// `cache/scoring.py` selects tokens. The window is short, so the scores of 64 queries with all entries fit a
// buffer [entry, 64], and the softmax needs no blocks.

#pragma once

#include <ATen/ops/zeros.h>

#include "prompt_attention.h"

namespace {

// The observing queries of one head, and the entries [first, end) that they vote on.
template <typename T>
struct ObservationWindow {
  const T* query;            // [query, width]
  const T* key;              // [entry, width]
  const int64_t* last_seen;  // [query]: the last entry in sight, -1 for none
  const float* strength;     // [query]: the factor of its votes
  float* votes;              // [entry]
  int64_t query_stride;      // elements from a query to the next one
  int64_t key_stride;        // elements from an entry to the next one
  int64_t num_queries;
  int64_t width;
  int64_t first;
  int64_t end;
  float scaling;
  float softcap;   // 0: none
  bool is_sum;     // an entry's votes are added; else the largest counts
  bool has_tiles;  // the products are AMX's
};

// Return the scores of 16 queries for an entry after the softcap, and `kMaskedScore` for those without sight.
template <typename T>
inline Floats masked_scores(const float* scores, int64_t entry, Ints last_seen,
                            const ObservationWindow<T>& window) {
  Floats row = load(scores);
  if (window.softcap > 0) {
    row = broadcast(window.softcap) * tanh(row * broadcast(window.scaling) / broadcast(window.softcap));
  }
  const Lanes visible = at_least(last_seen, broadcast(static_cast<int32_t>(entry)));
  return select(visible, row, broadcast(kMaskedScore));
}

// Replace the scores [entry, 16] of 16 queries by the weights of their softmax, and return the weights' sums.
template <typename T>
inline Floats exponentiate_scores(float* scores, int64_t num_entries, Ints last_seen,
                                  const ObservationWindow<T>& window) {
  const Floats factor = broadcast(window.softcap > 0 ? kLog2e : window.scaling * kLog2e);
  Floats largest = broadcast(kLowestScore);
  Floats total = Floats{};
  for (int64_t e = 0; e < num_entries; ++e) {
    const Floats row = masked_scores(scores + e * kBlock, window.first + e, last_seen, window);
    largest = max(largest, row);
    store(scores + e * kBlock, row);
  }
  largest = largest * factor;
  for (int64_t e = 0; e < num_entries; ++e) {
    const Floats exponent = fmsub(load(scores + e * kBlock), factor, largest);
    const Floats weights = power_of_two<float>(exponent);
    total = total + weights;
    store(scores + e * kBlock, weights);
  }
  return total;
}

// Add the votes of up to 64 queries from `begin` on. `scores` [entry, 64] and `queries` [width / pack, 64,
// pack] are buffers.
//
// Queries vote in ascending order, and 16 lanes of them are added at the end. A head's votes come from one
// thread, so they depend on neither the heads beside it nor the number of threads.
template <typename T>
void vote(Tiles& tiles, const ObservationWindow<T>& window, int64_t begin, float* scores, T* queries) {
  const int64_t count = std::min(kBlock, window.num_queries - begin);
  const int64_t num_vectors = (count + kLanes - 1) / kLanes;
  int32_t last_seen[kBlock];
  for (int64_t q = 0; q < kBlock; ++q) {
    last_seen[q] = q < count ? static_cast<int32_t>(window.last_seen[begin + q]) : -1;
  }
  const int64_t num_visible = *std::max_element(last_seen, last_seen + kBlock) + 1;
  const int64_t num_entries = std::min(window.end, num_visible) - window.first;
  if (num_entries <= 0) return;
  pack_queries(queries, window.query + begin * window.query_stride, window.query_stride, count, window.width);
  multiply_keys(tiles, window.has_tiles, scores, window.key + window.first * window.key_stride,
                window.key_stride, queries, window.width, num_entries);
  Floats vote_factors[kBlockVectors];  // a query's strength over its weights' sum; 0 for one without sight
  for (int64_t v = 0; v < num_vectors; ++v) {
    const Ints last = load_bits(last_seen + v * kLanes);
    const Floats totals = exponentiate_scores(scores + v * kLanes, num_entries, last, window);
    const Lanes has_sight = at_least(last, broadcast(static_cast<int32_t>(window.first)));
    const Floats strength = load(window.strength + begin + v * kLanes, first_lanes(count - v * kLanes));
    vote_factors[v] = keep(has_sight, strength / totals);
  }
  for (int64_t e = 0; e < num_entries; ++e) {
    Floats lane_votes = Floats{};
    for (int64_t v = 0; v < num_vectors; ++v) {
      const Floats attention = load(scores + e * kBlock + v * kLanes) * vote_factors[v];
      lane_votes = window.is_sum ? lane_votes + attention : max(lane_votes, attention);
    }
    float& votes = window.votes[window.first + e];
    votes = window.is_sum ? votes + total_of(lane_votes) : std::max(votes, largest_of(lane_votes));
  }
}

template <typename T>
void vote_by_head(Tensor& votes, const Tensor& query, const Tensor& key, const Tensor& last_seen,
                  const Tensor& strength, int64_t first, int64_t end, double scaling, double softcap,
                  bool is_sum) {
  const int64_t num_heads = query.size(0);
  const int64_t num_queries = query.size(1);
  const int64_t width = query.size(2);
  const int64_t num_entries = key.size(1);
  const int64_t group_size = num_heads / key.size(0);
  const int64_t num_candidates = std::max<int64_t>(std::min(end, num_entries) - first, 0);
  at::parallel_for(0, num_heads, 1, [&](int64_t begin_head, int64_t end_head) {
    Tensor scores = at::empty({num_candidates, kBlock}, at::kFloat);
    Tensor packed_queries = at::empty({width, kBlock}, query.options());
    Tiles tiles;
    for (int64_t head = begin_head; head < end_head; ++head) {
      const ObservationWindow<T> window{
          .query = query.const_data_ptr<T>() + head * query.stride(0),
          .key = key.const_data_ptr<T>() + head / group_size * key.stride(0),
          .last_seen = last_seen.const_data_ptr<int64_t>(),
          .strength = strength.const_data_ptr<float>(),
          .votes = votes.data_ptr<float>() + head * num_entries,
          .query_stride = query.stride(1),
          .key_stride = key.stride(1),
          .num_queries = num_queries,
          .width = width,
          .first = first,
          .end = std::min(end, num_entries),
          .scaling = static_cast<float>(scaling),
          .softcap = static_cast<float>(softcap),
          .is_sum = is_sum,
          .has_tiles = takes_tiles<T>(width),
      };
      for (int64_t begin = 0; begin < num_queries; begin += kBlock) {
        vote(tiles, window, begin, scores.data_ptr<float>(), packed_queries.data_ptr<T>());
      }
    }
  });
}

// The operator `window_votes`: see `observed_attention` in kernels.py.
Tensor window_votes(const Tensor& query, const Tensor& key, const Tensor& last_seen, const Tensor& strength,
                    int64_t first, int64_t end, double scaling, double softcap, bool is_sum) {
  check_row_dtype("query", query);
  check_dim("query", query, 3, "[head, query, width]");
  check_dim("key", key, 3, "[kv_head, entry, width]");
  const int64_t num_queries = query.size(1);
  const int64_t num_entries = key.size(1);
  check_groups(query.size(0), key.size(0));
  check_dtype("key", key, query.scalar_type());
  check_shape("key", key, {key.size(0), num_entries, query.size(2)});
  check_last_stride("query", query);
  check_last_stride("key", key);
  check_even_width("query", query);
  check("last_seen", last_seen, at::kLong, {num_queries});
  check("strength", strength, at::kFloat, {num_queries});
  TORCH_CHECK(first >= 0, "first must be at least 0, got ", first);
  const int64_t last = num_queries == 0 ? -1 : last_seen.max().item<int64_t>();
  TORCH_CHECK(last < num_entries, "last_seen must be below the number of entries, ", num_entries, ", got ",
              last);
  Tensor votes = at::zeros({query.size(0), num_entries}, query.options().dtype(at::kFloat));
  const auto run = [&](auto type) {
    using T = decltype(type);
    vote_by_head<T>(votes, query, key, last_seen, strength, first, end, scaling, softcap, is_sum);
  };
  query.scalar_type() == at::kBFloat16 ? run(BFloat16()) : run(float());
  return votes;
}

}  // namespace
