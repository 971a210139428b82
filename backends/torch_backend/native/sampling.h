// The draw of one token per row, from its logits, filters and random number. The same tokens are drawn as by
// the torch operations in `sampler.py`.
//
// No scores are sorted. A filter is a threshold on them, which is found by bisection: each pass reads only
// the candidates that are left. Most tokens are no candidates. For top_k, the highest scores of segments of
// the vocabulary bound the threshold from below. For top_p they give a guess: where it is too high, as for
// flat distributions, the row is read again.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "checks.h"
#include "vectors.h"

namespace {

constexpr float kBannedScore = -std::numeric_limits<float>::infinity();
constexpr float kMargin = 0.001f;  // of a score; above the error of its logarithm
constexpr int64_t kSegment = 512;  // tokens whose mass or highest score is found at once

// The parameters of one row's draw.
struct DrawParams {
  float temperature;  // 0: the most likely token
  float top_p;        // 1: no filter
  float min_p;        // 0: no filter
  int64_t top_k;      // 0: no filter
  int64_t seed;
  int64_t choice;
  int64_t output_index;
};

// Return a number in [0, 1) of 53 random bits, by Philox4x32-10 (Salmon et al., 2011). Its key is the seed,
// and its counter the position of the draw: a draw needs no state and does not depend on other draws.
inline double uniform(const DrawParams& params) {
  uint32_t x[4] = {static_cast<uint32_t>(params.output_index), static_cast<uint32_t>(params.choice), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(params.seed), static_cast<uint32_t>(params.seed >> 32)};
  for (int64_t round = 0; round < 10; ++round) {
    const uint64_t low = uint64_t{0xD2511F53} * x[0];
    const uint64_t high = uint64_t{0xCD9E8D57} * x[2];
    x[0] = static_cast<uint32_t>(high >> 32) ^ x[1] ^ key[0];
    x[1] = static_cast<uint32_t>(high);
    x[2] = static_cast<uint32_t>(low >> 32) ^ x[3] ^ key[1];
    x[3] = static_cast<uint32_t>(low);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return static_cast<double>(uint64_t{x[0]} << 21 | x[1] >> 11) * 0x1p-53;
}

// Return the probability masses of 16 scores: their exponentials, not divided by their sum.
inline Doubles masses_of(Floats scores) { return exp_in_doubles(scores); }

// A sum in float64 of 16 accumulators, one per lane, which are added at the end. The order is that of the
// row's own tokens. Float64 makes the difference from torch's order immaterial.
class Sum {
 public:
  void add(const Doubles& values, Lanes lanes) { sums_ = ::add(sums_, values, lanes); }

  double total() const { return total_of(sums_); }

 private:
  Doubles sums_{};
};

// Call `work` for the scores in [first, last), 16 at a time, with the lanes that reach `threshold`. Vectors
// without such a lane are skipped.
template <typename Work>
inline void for_scores(const std::vector<float>& scores, int64_t first, int64_t last, float threshold,
                       const Work& work) {
  for (int64_t i = first; i < last; i += kLanes) {
    const Lanes in_range = first_lanes(last - i);
    const Floats values = load(scores.data() + i, in_range);
    const Lanes lanes = in_range & at_least(values, broadcast(threshold));
    if (any(lanes)) work(i, values, lanes);
  }
}

// The scores among which a threshold is searched, each with its amount: 1 for top_k, its mass for top_p.
class Candidates {
 public:
  // Take the scores of a row that reach `threshold` and `bound`. Return the sum of the amounts of all that
  // reach `threshold`.
  double take(const std::vector<float>& scores, float threshold, float bound, bool by_mass) {
    // `push` stores whole vectors, up to 16 elements past the last candidate.
    scores_.resize(scores.size() + kLanes);
    amounts_.resize(scores.size() + kLanes);
    clear();
    Sum sum;
    const Doubles ones = broadcast(1.0);
    threshold = std::max(threshold, std::numeric_limits<float>::lowest());  // banned tokens have no amount
    for_scores(scores, 0, scores.size(), threshold, [&](int64_t, Floats values, Lanes lanes) {
      const Doubles amounts = by_mass ? masses_of(values) : ones;
      sum.add(amounts, lanes);
      const Lanes taken = lanes & at_least(values, broadcast(bound));
      if (any(taken)) push(values, amounts, taken);
    });
    return sum.total();
  }

  // Return the sum of the amounts of the candidates.
  double amount() const { return amount_above(kBannedScore); }

  // Return the lowest candidate for which the amounts of all above it sum to less than `limit`, or the
  // highest if there is none. At least one candidate is required.
  //
  // The range of scores is halved until all candidates in it are equal. Those outside of it are dropped, and
  // the amounts of those dropped above it are kept as a sum.
  float lowest_within(double limit) {
    double dropped_above = 0;
    while (true) {
      const float low = smallest_of(low_);
      const float high = largest_of(high_);
      if (!(low < high)) return high;
      // Between neighbouring floats half may round up to `high`, which would drop nothing.
      const float half = low + (high - low) / 2;
      const float middle = half < high ? half : low;
      const double above_middle = amount_above(middle);
      const bool is_in_lower_half = dropped_above + above_middle < limit;
      if (is_in_lower_half) dropped_above += above_middle;
      keep_half(middle, is_in_lower_half);
    }
  }

 private:
  void clear() {
    size_ = 0;
    low_ = broadcast(-kBannedScore);
    high_ = broadcast(kBannedScore);
  }

  // Append the candidates in `lanes`. `keep_half` reads and pushes in the same arrays: a candidate never
  // moves to a higher index, so none is overwritten before it is read.
  void push(Floats scores, const Doubles& amounts, Lanes lanes) {
    low_ = select(lanes, min(low_, scores), low_);
    high_ = select(lanes, max(high_, scores), high_);
    compress(scores_.data() + size_, scores, lanes);
    compress(amounts_.data() + size_, amounts, lanes);
    size_ += std::popcount(bits(lanes));
  }

  static Lanes lanes_above(float middle, Floats scores, Lanes in_range) {
    return in_range & greater(scores, broadcast(middle));
  }

  double amount_above(float middle) const {
    Sum sum;
    for (int64_t i = 0; i < size_; i += kLanes) {
      sum.add(load(amounts_.data() + i),
              lanes_above(middle, load(scores_.data() + i), first_lanes(size_ - i)));
    }
    return sum.total();
  }

  // Keep the candidates up to `middle`, or those above it.
  void keep_half(float middle, bool is_lower) {
    const int64_t size = size_;
    clear();
    for (int64_t i = 0; i < size; i += kLanes) {
      const Lanes in_range = first_lanes(size - i);
      const Floats scores = load(scores_.data() + i);
      const Lanes above = lanes_above(middle, scores, in_range);
      push(scores, load(amounts_.data() + i), is_lower ? without(in_range, above) : above);
    }
  }

  std::vector<float> scores_;
  std::vector<double> amounts_;
  int64_t size_ = 0;
  Floats low_;  // per lane, the lowest and the highest candidate
  Floats high_;
};

// A row's scores, and the highest score of each segment.
struct Scores {
  std::vector<float> of_token;
  std::vector<float> of_segment;

  // Write each token's score: its logit minus the largest, divided by the temperature.
  template <typename T>
  void write(const T* logits, int64_t size, float temperature) {
    of_token.resize(size);
    of_segment.clear();
    for (int64_t first = 0; first < size; first += kSegment) {
      Floats largest = broadcast(kBannedScore);
      for (int64_t i = first; i < std::min(first + kSegment, size); i += kLanes) {
        const Lanes lanes = first_lanes(size - i);
        const Floats values = load(logits + i, lanes);
        largest = select(lanes, max(values, largest), largest);  // the second operand where the first is NaN
      }
      of_segment.push_back(largest_of(largest));
    }
    const float largest = *std::max_element(of_segment.begin(), of_segment.end());
    for (int64_t i = 0; i < size; i += kLanes) {
      const Lanes lanes = first_lanes(size - i);
      const Floats differences = load(logits + i, lanes) - broadcast(largest);
      store(of_token.data() + i, differences / broadcast(temperature), lanes);
    }
    for (float& score : of_segment) {
      score = (score - largest) / temperature;
      if (std::isnan(score)) score = kBannedScore;  // of infinite logits; `bound` needs an order
    }
  }

  // Return a score that at least `count` tokens reach.
  float bound(int64_t count) const {
    if (count > static_cast<int64_t>(of_segment.size())) return kBannedScore;
    thread_local std::vector<float> highest;
    highest = of_segment;
    std::nth_element(highest.begin(), highest.begin() + count - 1, highest.end(), std::greater<float>());
    return highest[count - 1];
  }
};

// Return the lowest score that may be drawn: after top_k, then top_p of the mass that is left, and min_p.
float score_threshold(const Scores& scores, const DrawParams& params) {
  thread_local Candidates candidates;
  float threshold = kBannedScore;
  if (params.top_k > 0 && params.top_k < static_cast<int64_t>(scores.of_token.size())) {
    candidates.take(scores.of_token, threshold, scores.bound(params.top_k), false);
    threshold = candidates.lowest_within(static_cast<double>(params.top_k));
  }
  if (params.top_p < 1) {
    // The guess holds if its tokens have the mass. Most distributions of trained models are so narrow.
    const float guess = scores.bound((scores.of_segment.size() + 1) / 2);
    const double total = candidates.take(scores.of_token, threshold, guess, true);
    const double mass = params.top_p * total;
    if (candidates.amount() < mass) {
      // All tokens together, each with a smaller mass than this, would not have what top_p leaves out.
      const float smallest = std::log((1 - params.top_p) * total / scores.of_token.size()) - kMargin;
      candidates.take(scores.of_token, std::max(threshold, smallest), kBannedScore, true);
    }
    threshold = std::max(threshold, candidates.lowest_within(mass));
  }
  return std::max(threshold, std::log(params.min_p));
}

// Return the first token, in the order of the vocabulary, at which the cumulative mass of the scores that
// reach `threshold` exceeds the fraction `u` of the total.
//
// One pass sums the masses of segments. Only the segment with the token is then read token by token. A large
// segment would make that second pass long, a small one would make the list of segments long.
int64_t token_at(const std::vector<float>& scores, float threshold, double u) {
  thread_local std::vector<double> segment_masses;
  segment_masses.clear();
  const int64_t size = scores.size();
  double total = 0;
  for (int64_t first = 0; first < size; first += kSegment) {
    Sum sum;
    const auto add = [&](int64_t, Floats values, Lanes lanes) { sum.add(masses_of(values), lanes); };
    for_scores(scores, first, std::min(first + kSegment, size), threshold, add);
    total += segment_masses.emplace_back(sum.total());
  }
  // The last segment is taken without a comparison: rounding may leave the sum of all below `u * total`.
  int64_t first = 0;
  double cumulative = 0;
  for (const double mass : segment_masses) {
    const bool ends_before = cumulative + mass <= u * total;  // false for NaN too
    if (first + kSegment >= size || !ends_before) break;
    cumulative += mass;
    first += kSegment;
  }
  int64_t token = 0;
  const auto advance = [&](int64_t i, Floats values, Lanes lanes) {
    double masses[kLanes];
    store(masses, masses_of(values));
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const bool is_candidate = bits(lanes) >> lane & 1;
      if (!is_candidate || masses[lane] == 0 || cumulative > u * total) continue;
      cumulative += masses[lane];
      token = i + lane;
    }
  };
  for_scores(scores, first, std::min(first + kSegment, size), threshold, advance);
  return token;
}

template <typename T>
int64_t draw_token(const T* logits, int64_t size, const DrawParams& params) {
  thread_local Scores scores;
  if (params.temperature > 0) {
    scores.write(logits, size, params.temperature);
    return token_at(scores.of_token, score_threshold(scores, params), uniform(params));
  }
  // The most likely token is the first whose score is 0.
  scores.write(logits, size, 1.0f);
  return token_at(scores.of_token, 0, 0);
}

// The operator `draw`: see `draw_tokens` in kernels.py.
Tensor draw(const Tensor& logits, const Tensor& is_live, const Tensor& temperature, const Tensor& top_p,
            const Tensor& min_p, const Tensor& top_k, const Tensor& seed, const Tensor& choice,
            const Tensor& output_index, int64_t step) {
  check_dim("logits", logits, 2, "[slot, token]");
  const int64_t num_slots = logits.size(0);
  const int64_t vocab_size = logits.size(1);
  // The parameters of all slots are one matrix, of which each tensor is a column.
  for (const auto& [name, values] :
       {std::pair("temperature", temperature), {"top_p", top_p}, {"min_p", min_p}}) {
    check_strided(name, values, at::kFloat, {num_slots});
  }
  for (const auto& [name, values] :
       {std::pair("top_k", top_k), {"seed", seed}, {"choice", choice}, {"output_index", output_index}}) {
    check_strided(name, values, at::kLong, {num_slots});
  }
  check_strided("is_live", is_live, at::kBool, {num_slots});
  const Tensor rows = (logits.scalar_type() == at::kBFloat16 ? logits : logits.to(at::kFloat)).contiguous();
  Tensor tokens = at::zeros({num_slots}, seed.options());
  const auto live = is_live.accessor<bool, 1>();
  std::vector<int64_t> live_slots;  // listed first, so that each thread gets as many
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    if (live[slot]) live_slots.push_back(slot);
  }
  const auto temperatures = temperature.accessor<float, 1>();
  const auto top_ps = top_p.accessor<float, 1>();
  const auto min_ps = min_p.accessor<float, 1>();
  const auto top_ks = top_k.accessor<int64_t, 1>();
  const auto seeds = seed.accessor<int64_t, 1>();
  const auto choices = choice.accessor<int64_t, 1>();
  const auto indices = output_index.accessor<int64_t, 1>();
  const auto run = [&](auto type) {
    using T = decltype(type);
    at::parallel_for(0, live_slots.size(), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t slot = live_slots[i];
        const DrawParams params{
            .temperature = temperatures[slot],
            .top_p = top_ps[slot],
            .min_p = min_ps[slot],
            .top_k = top_ks[slot],
            .seed = seeds[slot],
            .choice = choices[slot],
            .output_index = indices[slot] + step,
        };
        const T* row = rows.const_data_ptr<T>() + slot * vocab_size;
        tokens.data_ptr<int64_t>()[slot] = draw_token(row, vocab_size, params);
      }
    });
  };
  rows.scalar_type() == at::kBFloat16 ? run(BFloat16()) : run(float());
  return tokens;
}

}  // namespace
