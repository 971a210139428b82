// The attention that a prompt's last queries pay to its entries, reduced over the queries: what
// `cache/scoring.py` chooses by. The scores of a head's queries, 64 side by side, stand in memory once, an
// entry a row.

#pragma once

#include <ATen/ops/zeros.h>

#include "prompt_attention.h"

namespace {

// The observing queries of one head, and the entries that they vote on.
template <typename T>
struct Window {
  const T *query, *key;      // [query, width], [entry, width]
  const int64_t* last_seen;  // [query]: each sees the entries up to this one; -1: none
  const float* strength;     // [query]: what its vote counts
  float* votes;              // [entry]
  int64_t query_stride, key_stride, queries, width, first, end;
  float scaling, softcap;
  bool is_sum;  // else the largest vote counts
};

// Return the score of 16 queries for an entry, after the softcap, or `kUnseen` for those that do not see it.
template <typename T>
inline __m512 score_of(const float* score, int64_t entry, __m512i last_seen, const Window<T>& window) {
  __m512 row = load(score);
  if (window.softcap > 0)
    row = Vec(window.softcap) * (Vec(row) * Vec(window.scaling) / Vec(window.softcap)).tanh();
  const __mmask16 seen = _mm512_cmple_epi32_mask(_mm512_set1_epi32(static_cast<int32_t>(entry)), last_seen);
  return _mm512_mask_mov_ps(_mm512_set1_ps(kUnseen), seen, row);
}

// Let up to 64 queries vote. `scores` is [entry, 64] from the window's first entry on, `queries` [width /
// pack, 64, pack].
template <typename T>
void vote(const Window<T>& window, int64_t from, float* scores, T* queries) {
  const int64_t count = std::min(kBlock, window.queries - from), vectors = (count + kLanes - 1) / kLanes;
  int32_t last_seen[kBlock];
  for (int64_t q = 0; q < kBlock; ++q)
    last_seen[q] = q < count ? static_cast<int32_t>(window.last_seen[from + q]) : -1;
  const int64_t entries =
      std::min<int64_t>(window.end, *std::max_element(last_seen, last_seen + kBlock) + 1) - window.first;
  if (entries <= 0) return;
  pack_queries(queries, window.query + from * window.query_stride, window.query_stride, count, window.width);
  for (int64_t e = 0; e < entries; e += kTileRows) {
    const T* key = window.key + (window.first + e) * window.key_stride;
    accumulate_rows<false, kTileRows, true>(scores + e * kBlock, key, window.key_stride, queries,
                                            window.width, entries - e);
  }
  const __m512 factor = _mm512_set1_ps(window.softcap > 0 ? kLog2e : window.scaling * kLog2e);
  __m512 shares[kBlockVectors];
  for (int64_t v = 0; v < vectors; ++v) {
    const __m512i last = _mm512_loadu_si512(last_seen + v * kLanes);
    __m512 largest = _mm512_set1_ps(kSmallest), total = _mm512_setzero_ps();
    for (int64_t e = 0; e < entries; ++e) {
      float* place = scores + e * kBlock + v * kLanes;
      const __m512 score = score_of(place, window.first + e, last, window);
      largest = _mm512_max_ps(largest, score);
      store(place, score);
    }
    largest = _mm512_mul_ps(largest, factor);
    for (int64_t e = 0; e < entries; ++e) {
      float* place = scores + e * kBlock + v * kLanes;
      const __m512 weight = power_of_two<float>(_mm512_fmsub_ps(load(place), factor, largest));
      total = _mm512_add_ps(total, weight);
      store(place, weight);
    }
    const __mmask16 seeing =
        _mm512_cmpge_epi32_mask(last, _mm512_set1_epi32(static_cast<int32_t>(window.first)));
    shares[v] = _mm512_maskz_div_ps(
        seeing, load(window.strength + from + v * kLanes, first_lanes(count - v * kLanes)), total);
  }
  for (int64_t e = 0; e < entries; ++e) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t v = 0; v < vectors; ++v) {
      const __m512 weighed = _mm512_mul_ps(load(scores + e * kBlock + v * kLanes), shares[v]);
      sum = window.is_sum ? _mm512_add_ps(sum, weighed) : _mm512_max_ps(sum, weighed);
    }
    float& votes = window.votes[window.first + e];
    votes = window.is_sum ? votes + _mm512_reduce_add_ps(sum) : std::max(votes, _mm512_reduce_max_ps(sum));
  }
}

template <typename T>
void let_vote(Tensor& votes, const Tensor& query, const Tensor& key, const Tensor& last_seen,
              const Tensor& strength, int64_t first, int64_t end, double scaling, double softcap,
              bool is_sum) {
  const int64_t heads = query.size(0), queries = query.size(1), width = query.size(2), entries = key.size(1),
                group = heads / key.size(0);
  at::parallel_for(0, heads, 1, [&](int64_t begin, int64_t stop) {
    Tensor scores = at::empty({std::max<int64_t>(std::min(end, entries) - first, 0), kBlock}, at::kFloat),
           packed = at::empty({width, kBlock}, query.options());
    for (int64_t head = begin; head < stop; ++head) {
      const Window<T> window{query.const_data_ptr<T>() + head * query.stride(0),
                             key.const_data_ptr<T>() + head / group * key.stride(0),
                             last_seen.const_data_ptr<int64_t>(),
                             strength.const_data_ptr<float>(),
                             votes.data_ptr<float>() + head * entries,
                             query.stride(1),
                             key.stride(1),
                             queries,
                             width,
                             first,
                             std::min(end, entries),
                             static_cast<float>(scaling),
                             static_cast<float>(softcap),
                             is_sum};
      for (int64_t from = 0; from < queries; from += kBlock)
        vote(window, from, scores.data_ptr<float>(), packed.data_ptr<T>());
    }
  });
}

Tensor window_votes(const Tensor& query, const Tensor& key, const Tensor& last_seen, const Tensor& strength,
                    int64_t first, int64_t end, double scaling, double softcap, bool is_sum) {
  TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1, "a head's numbers must lie side by side");
  TORCH_CHECK(query.size(2) % 2 == 0, "an even width is needed, not ", query.size(2));
  TORCH_CHECK(last_seen.is_contiguous() && strength.is_contiguous(), "queries must lie side by side");
  TORCH_CHECK(last_seen.max().item<int64_t>() < key.size(1), "a query must see entries that there are");
  Tensor votes = at::zeros({query.size(0), key.size(1)}, query.options().dtype(at::kFloat));
  if (query.scalar_type() == at::kBFloat16) {
    let_vote<BFloat16>(votes, query, key, last_seen, strength, first, end, scaling, softcap, is_sum);
  } else {
    let_vote<float>(votes, query, key, last_seen, strength, first, end, scaling, softcap, is_sum);
  }
  return votes;
}

}  // namespace
