// The tokens of a slot that are older than its ring, in 4 bits a value: see cache/token_store.py.
//
// A decode step scores all of them by their own keys, chooses the best, and adds these to its softmax. Scores
// are products of rotated rows, as rotations change no products. A key is stored less a centre, so the score of
// the centre is added. The query is rounded to 8 bits, an error that is much smaller than that of keys in 4 bits.
// Sums of codes are exact integers, and tokens are chosen by score and then by age: a row's choice does not
// depend on the batch.

#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "tile.h"

namespace {

constexpr int64_t kStoredBlock = 16;    // keys of a block; `BLOCK` in cache/token_store.py
constexpr int64_t kStoredTogether = 8;  // numbers that share 4 bytes of a block; `STORED_TOGETHER` there
constexpr int64_t kLargestPart = 64;    // numbers that share a step; `part_size` in cache/layout.py
constexpr int64_t kSmallestPart = 32;
constexpr float kMiddle = 7.5f;         // the code that would stand for zero
constexpr int64_t kCodes = 16;
constexpr float kWeakest = 64.0f;  // below the best strength, in which a bound is looked for
constexpr int64_t kMaxBisections = 20;

// Rotate a row by Hadamard matrices, each as large as the largest power of two that divides the width.
inline void hadamard(float* row, int64_t width) {
  const int64_t size = width & -width;
  for (int64_t half = 1; half < size; half *= 2) {
    for (int64_t first = 0; first < width; first += 2 * half) {
      for (int64_t i = first; i < first + half; ++i) {
        const float sum = row[i] + row[i + half];
        row[i + half] = row[i] - row[i + half];
        row[i] = sum;
      }
    }
  }
  const float scale = 1 / std::sqrt(static_cast<float>(size));
  for (int64_t i = 0; i < width; ++i) row[i] *= scale;
}

template <typename T>
void load_rotated(float* target, const T* row, int64_t width) {
  for (int64_t i = 0; i < width; ++i) target[i] = static_cast<float>(row[i]);
  hadamard(target, width);
}

// How many neighbouring numbers of a rotated row share a step.
inline int64_t part_size(int64_t width) {
  const int64_t size = std::min(width & -width, kLargestPart);
  return size >= kSmallestPart ? size : width;
}

// Round a part of a rotated row to codes, one a byte. Return the step.
inline BFloat16 quantize_codes(uint8_t* codes, const float* row, int64_t size) {
  float largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    // A NaN must stay: it is not smaller than anything.
    if (!(std::abs(row[i]) <= largest)) largest = std::abs(row[i]);
  }
  const BFloat16 step = largest / (kCodes / 2);
  const float divisor = step;
  for (int64_t i = 0; i < size; ++i) {
    const float level = divisor > 0 ? std::floor(row[i] / divisor) + kCodes / 2 : kCodes / 2;
    codes[i] = static_cast<uint8_t>(std::min(std::max(level, 0.0f), kCodes - 1.0f));
  }
  return step;
}

// exp(x) of x ≤ 0, with a relative error below 1e-3: enough for weights by which nothing but a choice is made.
inline Floats rough_exp(Floats x) {
  const Floats power = max(x * broadcast(1.44269504f), broadcast(-126.0f));
  const Floats whole = nearest(power);
  const Floats part = power - whole;
  Floats sum = fmadd(part, broadcast(0.05550411f), broadcast(0.24022651f));
  sum = fmadd(part, sum, broadcast(0.69314718f));
  return scale_by_powers(fmadd(part, sum, broadcast(1.0f)), whole);
}

// The stores of all slots.
struct StorePlanes {
  uint8_t* key_codes;     // [slot, kv_head, block, width / 8, 16, 4]
  uint8_t* value_codes;   // [slot, kv_head, entry, value width / 2]
  BFloat16* key_steps;    // [slot, kv_head, block, part, 16]
  BFloat16* value_steps;  // [slot, kv_head, entry, part]
  const float* centres;   // [slot, kv_head, width]: keys are stored less these, rotated
  const int64_t* num_stored;  // [row]
  int64_t num_entries;
  int64_t num_attended;
};

// What a step without a store does with it: nothing.
struct NoStore {
  struct Tokens {
    template <typename T>
    void demote(const T*, const T*) const {}
    template <typename Group>
    void score(const Group&, float*) const {}
    void add_values(const float*, float*, float*) const {}
  };
  Tokens tokens(int64_t, int64_t, int64_t, int64_t) const { return {}; }
};

// The store of one row and KV head, in one step. Each thread has one at a time.
class StoredTokens {
 public:
  StoredTokens(const StorePlanes& planes, int64_t row, int64_t plane, int64_t width, int64_t value_width)
      : key_codes_(planes.key_codes + plane * planes.num_entries * width / 2),
        value_codes_(planes.value_codes + plane * planes.num_entries * value_width / 2),
        width_(width),
        value_width_(value_width),
        part_(part_size(width)),
        value_part_(part_size(value_width)),
        num_parts_(width / part_),
        num_value_parts_(value_width / value_part_),
        key_steps_(planes.key_steps + plane * planes.num_entries * num_parts_),
        value_steps_(planes.value_steps + plane * planes.num_entries * num_value_parts_),
        centre_(planes.centres + plane * width),
        num_stored_(planes.num_stored[row]),
        num_chosen_(std::min(planes.num_attended, num_stored_)) {}

  // Store the token that the step overwrites in the ring, if the ring is full.
  template <typename T>
  void demote(const T* key, const T* value) const {
    if (num_stored_ == 0) return;
    const int64_t entry = num_stored_ - 1;
    Scratch& scratch = own_scratch();
    const int64_t longest = std::max(width_, value_width_);
    scratch.rotated.resize(longest);
    scratch.codes.resize(longest);
    uint8_t* codes = scratch.codes.data();
    load_rotated(scratch.rotated.data(), key, width_);
    for (int64_t i = 0; i < width_; ++i) scratch.rotated[i] -= centre_[i];
    const int64_t first = entry / kStoredBlock * kStoredBlock;
    const int64_t place = entry % kStoredBlock;
    for (int64_t p = 0; p < num_parts_; ++p) {
      key_steps_[first * num_parts_ + p * kStoredBlock + place] =
          quantize_codes(codes + p * part_, scratch.rotated.data() + p * part_, part_);
    }
    uint8_t* block = key_codes_ + first * width_ / 2;
    for (int64_t d = 0; d < width_; d += kStoredTogether) {
      uint8_t* four = block + d / kStoredTogether * 4 * kStoredBlock + place * 4;
      for (int64_t i = 0; i < 4; ++i) four[i] = codes[d + i] | codes[d + 4 + i] << 4;
    }
    load_rotated(scratch.rotated.data(), value, value_width_);
    const int64_t half = value_part_ / 2;
    for (int64_t p = 0; p < num_value_parts_; ++p, codes += value_part_) {
      const float* part = scratch.rotated.data() + p * value_part_;
      value_steps_[entry * num_value_parts_ + p] = quantize_codes(codes, part, value_part_);
      uint8_t* target = value_codes_ + (entry * num_value_parts_ + p) * half;
      for (int64_t i = 0; i < half; ++i) target[i] = codes[i] | codes[half + i] << 4;
    }
  }

  // Choose the tokens to attend to, and raise `largest` [head] to their largest scores.
  template <typename Group>
  void score(const Group& group, float* largest) {
    num_heads_ = group.num_heads;
    if (num_stored_ == 0) return;
    Scratch& scratch = own_scratch();
    padded_ = (num_stored_ + kLanes - 1) / kLanes * kLanes;
    scratch.scores.resize(num_heads_ * padded_);
    scratch.chosen.resize(num_heads_ * num_chosen_);
    score_all(group, scratch);
    choose(scratch);
    for (int64_t h = 0; h < num_heads_; ++h) {
      float* chosen = scratch.chosen.data() + h * num_chosen_;
      for (int64_t i = 0; i < num_chosen_; ++i) {
        chosen[i] = scratch.scores[h * padded_ + scratch.candidates[i].entry];
        largest[h] = std::max(largest[h], chosen[i]);
      }
    }
  }

  // Add the chosen tokens' weights to `totals` [head], and their weighted values to `sums` [head, value width].
  void add_values(const float* largest, float* totals, float* sums) {
    if (num_stored_ == 0) return;
    Scratch& scratch = own_scratch();
    scratch.rotated.resize(num_heads_ * value_width_);
    scratch.middles.resize(num_heads_);
    scratch.scaled.resize(num_heads_ * num_chosen_);
    const int64_t padded = (num_chosen_ + kLanes - 1) / kLanes * kLanes;
    scratch.steps.resize(padded);
    for (int64_t h = 0; h < num_heads_; ++h) {
      float* weights = scratch.chosen.data() + h * num_chosen_;
      Floats total = Floats{};
      for (int64_t i = 0; i < num_chosen_; i += kLanes) {
        const Lanes lanes = first_lanes(num_chosen_ - i);
        const Floats own = keep(lanes, exp(load(weights + i, lanes) - broadcast(largest[h])));
        total = total + own;
        store(weights + i, own, lanes);
      }
      totals[h] += total_of(total);
    }
    for (int64_t p = 0; p < num_value_parts_; ++p) {
      scale_weights(scratch, p);
      for (int64_t h = 0; h < num_heads_; h += kTileRows) {
        switch (num_heads_ - h) {
          case 1: mix<1>(scratch, h, p); break;
          case 2: mix<2>(scratch, h, p); break;
          case 3: mix<3>(scratch, h, p); break;
          default: mix<kTileRows>(scratch, h, p);
        }
      }
    }
    for (int64_t h = 0; h < num_heads_; ++h) {
      float* rotated = scratch.rotated.data() + h * value_width_;
      hadamard(rotated, value_width_);
      for (int64_t d = 0; d < value_width_; ++d) sums[h * value_width_ + d] += rotated[d];
    }
  }

 private:
  struct Candidate {
    float strength;
    int32_t entry;
    bool operator<(const Candidate& other) const {  // better: stronger, then older
      return strength != other.strength ? strength > other.strength : entry < other.entry;
    }
  };

  struct Scratch {
    Buffer<float> rotated;
    Buffer<float> scores;  // [head, entry]
    Buffer<float> strengths;
    Buffer<float> chosen;  // [head, candidate]: scores, then weights
    Buffer<float> scaled;   // [head, candidate]: weights times the steps of a part of the values
    Buffer<float> steps;    // [candidate]: of a part of the values
    Buffer<float> middles;  // [head]
    Buffer<int32_t> query_sums;  // [head of a tile, part]
    Buffer<int8_t> queries;  // [head, width]
    Buffer<uint8_t> codes;
    std::vector<Candidate> candidates;
  };

  static Scratch& own_scratch() {
    thread_local Scratch scratch;
    return scratch;
  }

  template <typename Group>
  void score_all(const Group& group, Scratch& scratch) {
    scratch.rotated.resize(width_);
    scratch.queries.resize(num_heads_ * width_);
    scratch.query_sums.resize(kTileRows * num_parts_);
    float factors[kTileRows];
    float offsets[kTileRows];  // scores of the centre
    int32_t* sums = scratch.query_sums.data();
    for (int64_t h = 0; h < num_heads_; h += kTileRows) {
      const int64_t count = std::min(kTileRows, num_heads_ - h);
      for (int64_t i = 0; i < count; ++i) {
        load_rotated(scratch.rotated.data(), group.query + (h + i) * group.query_stride, width_);
        int8_t* integers = &scratch.queries[(h + i) * width_];
        factors[i] = round_query(integers, scratch.rotated.data(), sums + i * num_parts_);
        factors[i] *= group.scaling;
        offsets[i] = 0;
        for (int64_t d = 0; d < width_; ++d) offsets[i] += scratch.rotated[d] * centre_[d];
        offsets[i] *= group.scaling;
      }
      switch (count) {
        case 1: score_heads<1>(scratch, h, factors, offsets, sums, group.softcap); break;
        case 2: score_heads<2>(scratch, h, factors, offsets, sums, group.softcap); break;
        case 3: score_heads<3>(scratch, h, factors, offsets, sums, group.softcap); break;
        default: score_heads<kTileRows>(scratch, h, factors, offsets, sums, group.softcap);
      }
    }
  }

  // Round a query to 8 bits. Return its scale, and the sums of its integers in `sums` [part].
  float round_query(int8_t* integers, const float* query, int32_t* sums) const {
    float largest = 0;
    for (int64_t i = 0; i < width_; ++i) largest = std::max(largest, std::abs(query[i]));
    const float factor = largest > 0 ? 127 / largest : 0;
    std::fill_n(sums, num_parts_, 0);
    for (int64_t i = 0; i < width_; ++i) {
      integers[i] = static_cast<int8_t>(std::nearbyint(query[i] * factor));
      sums[i / part_] += integers[i];
    }
    return largest / 127;
  }

  // Write the scores of all entries for `heads` heads from head `first` on.
  template <int64_t heads>
  void score_heads(Scratch& scratch, int64_t first, const float* factors, const float* offsets,
                   const int32_t* query_sums, float softcap) const {
    const Ints low_half = broadcast(0x0f0f0f0f);
    const int8_t* queries = &scratch.queries[first * width_];
    const auto four = [&](int64_t head, int64_t d) {
      int32_t numbers;
      std::memcpy(&numbers, queries + head * width_ + d, sizeof numbers);
      return broadcast(numbers);
    };
    for (int64_t e = 0; e < num_stored_; e += kStoredBlock) {
      const uint8_t* codes = key_codes_ + e * width_ / 2;
      Floats products[heads];
      UNROLL for (int64_t h = 0; h < heads; ++h) { products[h] = Floats{}; }
      for (int64_t p = 0; p < num_parts_; ++p) {
        Ints low_sums[heads];
        Ints high_sums[heads];
        UNROLL for (int64_t h = 0; h < heads; ++h) { low_sums[h] = high_sums[h] = Ints{}; }
        for (int64_t d = p * part_; d < (p + 1) * part_; d += kStoredTogether, codes += kCacheLine) {
          _mm_prefetch(reinterpret_cast<const char*>(codes) + kPrefetchDistance, _MM_HINT_T1);
          const Ints packed = load_bits(codes);
          const Ints low = packed & low_half;
          const Ints high = shift_right<4>(packed) & low_half;
          UNROLL for (int64_t h = 0; h < heads; ++h) {
            low_sums[h] = add_fours(low_sums[h], low, four(h, d));
            high_sums[h] = add_fours(high_sums[h], high, four(h, d + 4));
          }
        }
        const Floats steps = load(key_steps_ + e * num_parts_ + p * kStoredBlock);
        UNROLL for (int64_t h = 0; h < heads; ++h) {
          const Floats middle = broadcast(kMiddle * query_sums[h * num_parts_ + p]);
          products[h] = products[h] + (to_floats(low_sums[h] + high_sums[h]) - middle) * steps;
        }
      }
      const Lanes lanes = first_lanes(num_stored_ - e);
      UNROLL for (int64_t h = 0; h < heads; ++h) {
        Floats row = fmadd(products[h], broadcast(factors[h]), broadcast(offsets[h]));
        if (softcap > 0) row = broadcast(softcap) * tanh(row / broadcast(softcap));
        const Floats lowest = broadcast(std::numeric_limits<float>::lowest());
        store(&scratch.scores[(first + h) * padded_ + e], select(lanes, row, lowest));
      }
    }
  }

  // Leave the entries with the largest shares of any head's attention in the first candidates. The shares are
  // those among the stored tokens.
  void choose(Scratch& scratch) const {
    std::vector<Candidate>& candidates = scratch.candidates;
    if (num_chosen_ == num_stored_) {
      candidates.resize(num_stored_);
      for (int64_t e = 0; e < num_stored_; ++e) candidates[e] = {0, static_cast<int32_t>(e)};
      return;
    }
    scratch.strengths.resize(padded_);
    for (int64_t h = 0; h < num_heads_; ++h) raise_strengths(scratch, h);
    const float bound = lower_bound(scratch.strengths.data());
    candidates.clear();
    for (int64_t e = 0; e < num_stored_; e += kLanes) {
      const Floats strengths = load(&scratch.strengths[e]);
      uint32_t better = bits(first_lanes(num_stored_ - e) & at_least(strengths, broadcast(bound)));
      for (; better != 0; better &= better - 1) {
        const int64_t entry = e + __builtin_ctz(better);
        candidates.push_back({scratch.strengths[entry], static_cast<int32_t>(entry)});
      }
    }
    std::nth_element(candidates.begin(), candidates.begin() + num_chosen_ - 1, candidates.end());
  }

  // Raise each entry's strength to the logarithm of its share of a head's attention.
  void raise_strengths(Scratch& scratch, int64_t head) const {
    const float* scores = &scratch.scores[head * padded_];
    Floats largest = load(scores);
    for (int64_t e = kLanes; e < padded_; e += kLanes) largest = max(largest, load(scores + e));
    const float most = largest_of(largest);
    Floats totals = Floats{};
    for (int64_t e = 0; e < padded_; e += kLanes) {
      totals = totals + rough_exp(load(scores + e) - broadcast(most));
    }
    const Floats offset = broadcast(most + std::log(total_of(totals)));
    const Floats lowest = broadcast(-std::numeric_limits<float>::infinity());
    float* strengths = scratch.strengths.data();
    for (int64_t e = 0; e < padded_; e += kLanes) {
      Floats share = load(scores + e) - offset;
      // A NaN has no place in an order.
      share = select(are_numbers(share), share, lowest);
      store(strengths + e, head == 0 ? share : max(load(strengths + e), share));
    }
  }

  // Return a strength that at least `num_chosen_` entries have, and few more unless many are equal.
  float lower_bound(const float* strengths) const {
    Floats most = load(strengths);
    for (int64_t e = kLanes; e < padded_; e += kLanes) most = max(most, load(strengths + e));
    // Shares are at most 1, and one below e^-64 is next to nothing: then the oldest tokens will do.
    float above = std::nextafter(largest_of(most), 1.0f);
    float bound = above - kWeakest;
    if (!(above > -kWeakest) || num_stronger(strengths, bound) < num_chosen_) {
      return -std::numeric_limits<float>::infinity();
    }
    for (int64_t i = 0; i < kMaxBisections; ++i) {
      const float middle = bound + (above - bound) / 2;
      const int64_t count = num_stronger(strengths, middle);
      (count < num_chosen_ ? above : bound) = middle;
      if (count >= num_chosen_ && count <= num_chosen_ + kLanes) break;
    }
    return bound;
  }

  // Return how many entries are at least as strong as `bound`.
  int64_t num_stronger(const float* strengths, float bound) const {
    int64_t count = 0;
    for (int64_t e = 0; e < padded_; e += kLanes) {
      const Lanes stronger = at_least(load(strengths + e), broadcast(bound));
      count += std::popcount(bits(stronger));
    }
    return count;
  }

  // Multiply all weights by the chosen tokens' steps of a part.
  void scale_weights(Scratch& scratch, int64_t part) const {
    for (int64_t i = 0; i < num_chosen_; ++i) {
      const int64_t entry = scratch.candidates[i].entry;
      scratch.steps[i] = static_cast<float>(value_steps_[entry * num_value_parts_ + part]);
    }
    for (int64_t h = 0; h < num_heads_; ++h) {
      const float* weights = scratch.chosen.data() + h * num_chosen_;
      float* scaled = scratch.scaled.data() + h * num_chosen_;
      Floats total = Floats{};
      for (int64_t i = 0; i < num_chosen_; i += kLanes) {
        const Lanes lanes = first_lanes(num_chosen_ - i);
        const Floats products = keep(lanes, load(weights + i, lanes) * load(&scratch.steps[i]));
        total = total + products;
        store(scaled + i, products, lanes);
      }
      scratch.middles[h] = kMiddle * total_of(total);
    }
  }

  // Write the weighted sums of a part of the chosen tokens' rotated values, for `heads` heads from `first` on.
  template <int64_t heads>
  void mix(Scratch& scratch, int64_t first, int64_t part) const {
    const int64_t half = value_part_ / 2;
    const float* weights = scratch.scaled.data() + first * num_chosen_;
    for (int64_t d = 0; d < half; d += kLanes) {
      const Lanes lanes = first_lanes(half - d);
      Floats low_sums[heads];
      Floats high_sums[heads];
      UNROLL for (int64_t h = 0; h < heads; ++h) { low_sums[h] = high_sums[h] = Floats{}; }
      for (int64_t i = 0; i < num_chosen_; ++i) {
        const int64_t index = scratch.candidates[i].entry * num_value_parts_ + part;
        const uint8_t* codes = value_codes_ + index * half + d;
        const Ints packed = load_bytes(codes, lanes);
        const Floats low = to_floats(packed & broadcast(15));
        const Floats high = to_floats(shift_right<4>(packed));
        UNROLL for (int64_t h = 0; h < heads; ++h) {
          const Floats weight = broadcast(weights[h * num_chosen_ + i]);
          low_sums[h] = fmadd(weight, low, low_sums[h]);
          high_sums[h] = fmadd(weight, high, high_sums[h]);
        }
      }
      UNROLL for (int64_t h = 0; h < heads; ++h) {
        float* target = scratch.rotated.data() + (first + h) * value_width_ + part * value_part_ + d;
        const Floats middle = broadcast(scratch.middles[first + h]);
        store(target, low_sums[h] - middle, lanes);
        store(target + half, high_sums[h] - middle, lanes);
      }
    }
  }

  uint8_t* key_codes_;
  uint8_t* value_codes_;
  int64_t width_;
  int64_t value_width_;
  int64_t part_;
  int64_t value_part_;
  int64_t num_parts_;
  int64_t num_value_parts_;
  BFloat16* key_steps_;
  BFloat16* value_steps_;
  const float* centre_;
  int64_t num_stored_;
  int64_t num_chosen_;
  int64_t num_heads_ = 0;
  int64_t padded_ = 0;
};

struct Store {
  StorePlanes planes;
  StoredTokens tokens(int64_t row, int64_t plane, int64_t width, int64_t value_width) const {
    return {planes, row, plane, width, value_width};
  }
};

}  // namespace
