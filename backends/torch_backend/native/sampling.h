// Draws of a step: a row's filters and its random number give one token. Nothing is sorted: a filter is a
// threshold, which is looked for between the lowest and the highest score that it can be. What is drawn is
// what `sampler.py` draws with torch's operations.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();  // the score of what is banned
constexpr int64_t kStretch =
    512;  // tokens that are summed at once, before it is known which stretch holds the drawn one

// What one row's token depends on beside its logits.
struct Draw {
  float temperature, top_p, min_p;  // no temperature: the likeliest token
  int64_t top_k, seed, choice, output_index;
};

// Return a number in [0, 1) of 53 random bits, by Philox4x32-10.
inline double uniform(const Draw& draw) {
  uint32_t x[4] = {static_cast<uint32_t>(draw.output_index), static_cast<uint32_t>(draw.choice), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(draw.seed), static_cast<uint32_t>(draw.seed >> 32)};
  for (int64_t round = 0; round < 10; ++round) {
    const uint64_t low = uint64_t{0xD2511F53} * x[0], high = uint64_t{0xCD9E8D57} * x[2];
    x[0] = static_cast<uint32_t>(high >> 32) ^ x[1] ^ key[0];
    x[1] = static_cast<uint32_t>(high);
    x[2] = static_cast<uint32_t>(low >> 32) ^ x[3] ^ key[1];
    x[3] = static_cast<uint32_t>(low);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return static_cast<double>(uint64_t{x[0]} << 21 | x[1] >> 11) * 0x1p-53;
}

// The halves of 16 numbers in float64.
struct Doubles {
  __m512d low, high;

  void store(double* target) const {
    _mm512_storeu_pd(target, low);
    _mm512_storeu_pd(target + kLanes / 2, high);
  }
};

// Return the probabilities of 16 scores but for a common factor.
inline Doubles masses_of(__m512 scores) {
  const auto mass = [](__m256 half) {
    return __m512d(at::vec::Vectorized<double>(_mm512_cvtps_pd(half)).exp());
  };
  return {mass(_mm512_castps512_ps256(scores)), mass(_mm512_extractf32x8_ps(scores, 1))};
}

// Sums of float64 numbers, a lane each, in an order that is the row's own.
class Sum {
 public:
  void add(const Doubles& numbers, __mmask16 lanes) {
    low_ = _mm512_mask_add_pd(low_, static_cast<__mmask8>(lanes), low_, numbers.low);
    high_ = _mm512_mask_add_pd(high_, static_cast<__mmask8>(lanes >> 8), high_, numbers.high);
  }

  double total() const { return _mm512_reduce_add_pd(_mm512_add_pd(low_, high_)); }

 private:
  __m512d low_ = _mm512_setzero_pd(), high_ = _mm512_setzero_pd();
};

// Call `work` with the scores from `first` to `last`, 16 at a time, and those lanes that are not below
// `threshold`, if there are any.
template <typename Work>
inline void for_scores(const std::vector<float>& scores, int64_t first, int64_t last, float threshold,
                       const Work& work) {
  for (int64_t i = first; i < last; i += kLanes) {
    const __mmask16 there = first_lanes(last - i);
    const __m512 some = load(scores.data() + i, there);
    const __mmask16 lanes = _mm512_mask_cmp_ps_mask(there, some, _mm512_set1_ps(threshold), _CMP_GE_OQ);
    if (lanes) work(i, some, lanes);
  }
}

// The scores that a threshold may be, side by side with what each amounts to.
class Candidates {
 public:
  // Take a row's scores that are not below `threshold`: 1 each or, for `masses`, their masses. Return what
  // they amount to.
  double take(const std::vector<float>& scores, float threshold, bool masses) {
    scores_.resize(scores.size() + kLanes);
    amounts_.resize(scores.size() + kLanes);
    clear();
    Sum sum;
    const Doubles ones{_mm512_set1_pd(1), _mm512_set1_pd(1)};
    threshold =
        std::max(threshold, std::numeric_limits<float>::lowest());  // what is banned amounts to nothing
    for_scores(scores, 0, scores.size(), threshold, [&](int64_t, __m512 some, __mmask16 lanes) {
      const Doubles amounts = masses ? masses_of(some) : ones;
      sum.add(amounts, lanes);
      push(some, amounts, lanes);
    });
    return sum.total();
  }

  // Return the lowest score such that those above it amount to less than `limit`, and the highest if there is
  // none. The part of the candidates that it is in is halved, by score, until all of them are equal. There is
  // at least one.
  float lowest_within(double limit) {
    double above = 0;
    while (true) {
      const float low = _mm512_reduce_min_ps(low_), high = _mm512_reduce_max_ps(high_);
      if (!(low < high)) return high;
      const float half = low + (high - low) / 2, middle = half < high ? half : low;
      const double more = amount_above(middle);
      const bool is_low = above + more < limit;
      if (is_low) above += more;
      keep(middle, is_low);
    }
  }

 private:
  void clear() {
    size_ = 0;
    low_ = _mm512_set1_ps(-kNever);
    high_ = _mm512_set1_ps(kNever);
  }

  // Scores may be pushed over themselves: none gets further back than it was.
  void push(__m512 scores, const Doubles& amounts, __mmask16 lanes) {
    low_ = _mm512_mask_min_ps(low_, lanes, low_, scores);
    high_ = _mm512_mask_max_ps(high_, lanes, high_, scores);
    store(scores_.data() + size_, _mm512_maskz_compress_ps(lanes, scores));
    const __mmask8 low = static_cast<__mmask8>(lanes), high = static_cast<__mmask8>(lanes >> 8);
    _mm512_storeu_pd(amounts_.data() + size_, _mm512_maskz_compress_pd(low, amounts.low));
    _mm512_storeu_pd(amounts_.data() + size_ + __builtin_popcount(low),
                     _mm512_maskz_compress_pd(high, amounts.high));
    size_ += __builtin_popcount(lanes);
  }

  Doubles amounts(int64_t i) const {
    return {_mm512_loadu_pd(amounts_.data() + i), _mm512_loadu_pd(amounts_.data() + i + kLanes / 2)};
  }

  double amount_above(float middle) const {
    Sum sum;
    for (int64_t i = 0; i < size_; i += kLanes) {
      const __m512 some = load(scores_.data() + i);
      sum.add(amounts(i),
              _mm512_mask_cmp_ps_mask(first_lanes(size_ - i), some, _mm512_set1_ps(middle), _CMP_GT_OQ));
    }
    return sum.total();
  }

  void keep(float middle, bool is_low) {
    const int64_t size = size_;
    clear();
    for (int64_t i = 0; i < size; i += kLanes) {
      const __mmask16 there = first_lanes(size - i);
      const __m512 some = load(scores_.data() + i);
      const __mmask16 above = _mm512_mask_cmp_ps_mask(there, some, _mm512_set1_ps(middle), _CMP_GT_OQ);
      push(some, amounts(i), is_low ? there & ~above : above);
    }
  }

  std::vector<float> scores_;
  std::vector<double> amounts_;
  int64_t size_ = 0;
  __m512 low_, high_;
};

// Write how far each logit is below the largest, over the temperature.
template <typename T>
void score(std::vector<float>& scores, const T* logits, float temperature) {
  const int64_t size = scores.size();
  __m512 largest = _mm512_set1_ps(kNever);
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 lanes = first_lanes(size - i);
    largest = _mm512_mask_max_ps(largest, lanes, largest, load(logits + i, lanes));
  }
  largest = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  for (int64_t i = 0; i < size; i += kLanes) {
    const __mmask16 lanes = first_lanes(size - i);
    const __m512 below = _mm512_sub_ps(load(logits + i, lanes), largest);
    store(scores.data() + i, _mm512_div_ps(below, _mm512_set1_ps(temperature)), lanes);
  }
}

// Return the lowest score that may be drawn: by `top_k`, by `top_p` of what that leaves, and by `min_p`.
float threshold_of(const std::vector<float>& scores, const Draw& draw) {
  thread_local Candidates candidates;
  float threshold = kNever;
  if (draw.top_k > 0 && draw.top_k < static_cast<int64_t>(scores.size())) {
    candidates.take(scores, threshold, false);
    threshold = candidates.lowest_within(static_cast<double>(draw.top_k));
  }
  if (draw.top_p < 1) {
    const double total = candidates.take(scores, threshold, true);
    threshold = std::max(threshold, candidates.lowest_within(draw.top_p * total));
  }
  return std::max(threshold, std::log(draw.min_p));
}

// Return the first token, in order of the vocabulary, with which those not below `threshold` have more than
// `u` of their mass.
int64_t token_at(const std::vector<float>& scores, float threshold, double u) {
  thread_local std::vector<double> masses;
  masses.clear();
  const int64_t size = scores.size();
  double total = 0, passed = 0;
  for (int64_t first = 0; first < size; first += kStretch) {
    Sum sum;
    for_scores(scores, first, std::min(first + kStretch, size), threshold,
               [&](int64_t, __m512 some, __mmask16 lanes) { sum.add(masses_of(some), lanes); });
    total += masses.emplace_back(sum.total());
  }
  int64_t first = 0, token = 0;
  for (auto mass = masses.begin(); first + kStretch < size && passed + *mass <= u * total;
       ++mass, first += kStretch)
    passed += *mass;
  for_scores(scores, first, std::min(first + kStretch, size), threshold,
             [&](int64_t i, __m512 some, __mmask16 lanes) {
    double own[kLanes];
    masses_of(some).store(own);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      if (!(lanes >> lane & 1) || own[lane] == 0 || passed > u * total) continue;
      passed += own[lane];
      token = i + lane;
    }
  });
  return token;
}

template <typename T>
int64_t draw_token(const T* logits, int64_t size, const Draw& draw) {
  thread_local std::vector<float> scores;
  const bool is_random = draw.temperature > 0;
  scores.resize(size);
  score(scores, logits, is_random ? draw.temperature : 1.0f);
  return is_random ? token_at(scores, threshold_of(scores, draw), uniform(draw)) : token_at(scores, 0, 0);
}

// Return the token [slot] that is drawn from each row of logits [slot, token] as its slot's parameters have
// it: 0 where it is not live.
Tensor draw(const Tensor& logits, const Tensor& is_live, const Tensor& temperature, const Tensor& top_p,
            const Tensor& min_p, const Tensor& top_k, const Tensor& seed, const Tensor& choice,
            const Tensor& output_index, int64_t number) {
  const Tensor rows = (logits.scalar_type() == at::kBFloat16 ? logits : logits.to(at::kFloat)).contiguous();
  Tensor tokens = at::zeros({rows.size(0)}, seed.options());
  const auto live = is_live.accessor<bool, 1>();
  std::vector<int64_t> slots;  // so that threads share the live ones evenly
  for (int64_t slot = 0; slot < rows.size(0); ++slot) {
    if (live[slot]) slots.push_back(slot);
  }
  const auto temperatures = temperature.accessor<float, 1>(), top_ps = top_p.accessor<float, 1>(),
             min_ps = min_p.accessor<float, 1>();
  const auto top_ks = top_k.accessor<int64_t, 1>(), seeds = seed.accessor<int64_t, 1>(),
             choices = choice.accessor<int64_t, 1>();
  const auto indices = output_index.accessor<int64_t, 1>();
  at::parallel_for(0, slots.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t slot = slots[n], size = rows.size(1);
      const Draw own{temperatures[slot], top_ps[slot],  min_ps[slot],          top_ks[slot],
                     seeds[slot],        choices[slot], indices[slot] + number};
      tokens.data_ptr<int64_t>()[slot] =
          rows.scalar_type() == at::kBFloat16
              ? draw_token(rows.const_data_ptr<BFloat16>() + slot * size, size, own)
              : draw_token(rows.const_data_ptr<float>() + slot * size, size, own);
    }
  });
  return tokens;
}

}  // namespace
