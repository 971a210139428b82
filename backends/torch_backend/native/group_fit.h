// Quantises weights of linear layers to 4 bits in groups. Each group gets the scale and the zero point of the
// least squared error among a few.
//
// The operations and their order are those of `_fitted` in grouped_linear.py, which runs where the kernels
// are not built yet: both give the same bits for finite weights.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "checks.h"
#include "groups.h"

namespace {

constexpr float kMostLevel = 15;
constexpr double kSpans[] = {1.0, 0.92, 0.84};  // of a group's range, that the levels cover at first
constexpr int64_t kGroupsPerThread = 16;        // at least, of a block

// A group of 16 outputs: a vector for each of its inputs.
struct GroupValues {
  Floats inputs[kGroup];
};

// Return the sum of `value(input)` over a group's inputs. Torch adds halves, too, when it sums over the first
// of a tensor's dimensions.
template <typename Value>
inline Floats sum_of(const Value& value) {
  Floats sums[2] = {value(0), value(kGroup / 2)};
  for (int64_t k = 1; k < kGroup / 2; ++k) {
    UNROLL for (int64_t half = 0; half < 2; ++half)
      sums[half] = sums[half] + value(half * kGroup / 2 + k);
  }
  return sums[0] + sums[1];
}

template <typename Value>
inline Floats mean_of(const Value& value) {
  return sum_of(value) * broadcast(1.0f / kGroup);
}

// Return the nearest integers from 0 to `most`, which a NaN becomes, too. They are clamped first: a lane's
// int32 may be too small.
inline Floats whole(Floats values, float most) {
  return to_floats(to_ints(max(min(values, broadcast(most)), Floats{})));
}

// A scale and a zero point of each of 16 outputs as they are stored, and the error of the weights with them.
struct Fit {
  Floats scales;
  Floats zero_points;  // in steps
  Floats error;

  Fit(const GroupValues& group, Floats unrounded_scales, Floats levels_of_zero) : Fit(unrounded_scales) {
    zero_points = whole(levels_of_zero / scales * broadcast(float{kPerZeroPoint}), 255);
    error = sum_of([&](int64_t k) {
      const Floats value = (level(group.inputs[k]) - zero_levels()) * scales;
      const Floats difference = value - group.inputs[k];
      return difference * difference;
    });
  }

  Floats level(Floats weight) const {
    return whole(weight * (broadcast(1.0f) / scales) + zero_levels(), kMostLevel);
  }

  void take_if_better(const Fit& other) {
    const Lanes is_better = greater(error, other.error);
    scales = select(is_better, other.scales, scales);
    zero_points = select(is_better, other.zero_points, zero_points);
    error = select(is_better, other.error, error);
  }

 private:
  explicit Fit(Floats unrounded)
      : scales(rounded<BFloat16>(max(unrounded, broadcast(std::numeric_limits<float>::min())))) {}

  Floats zero_levels() const { return zero_points * broadcast(1.0f / kPerZeroPoint); }
};

// Return the better one of the fits of a group.
inline Fit best_fit(const GroupValues& group) {
  Floats low{}, high{};  // zero is in the range, and a zero point is a level
  for (const Floats& weights : group.inputs) {
    low = min(low, weights);
    high = max(high, weights);
  }
  const Floats centre = (low + high) * broadcast(0.5f);
  const Floats mean = mean_of([&](int64_t k) { return group.inputs[k]; });
  std::optional<Fit> best;
  for (const double span : kSpans) {
    const Floats scales = (high - low) * broadcast(static_cast<float>(span / kMostLevel));
    const Fit fit(group, scales, scales * broadcast(kMostLevel / 2) - centre);
    if (best) {
      best->take_if_better(fit);
    } else {
      best = fit;
    }
    // The scale and the zero point of the least squared error for these levels.
    GroupValues levels;
    for (int64_t k = 0; k < kGroup; ++k) levels.inputs[k] = fit.level(group.inputs[k]);
    const Floats mean_level = mean_of([&](int64_t k) { return levels.inputs[k]; });
    const Floats square = mean_of([&](int64_t k) { return levels.inputs[k] * levels.inputs[k]; });
    const Floats product = mean_of([&](int64_t k) { return levels.inputs[k] * group.inputs[k]; });
    const Floats spread = square - mean_level * mean_level;
    const Floats slope = (product - mean_level * mean) / spread;
    const Floats refitted = select(greater(spread, Floats{}), slope, fit.scales);
    best->take_if_better(Fit(group, refitted, refitted * mean_level - mean));
  }
  // A weight that is no number makes the group's outputs ones.
  best->scales =
      select(are_numbers(mean - mean), best->scales, broadcast(std::numeric_limits<float>::quiet_NaN()));
  return *best;
}

// Quantise 16 outputs of a group, from `output` of its block.
inline void quantize_group(Group* target, const GroupValues& group, int64_t output) {
  const Fit fit = best_fit(group);
  UNROLL for (int64_t k = 0; k < kGroup; k += 8) {
    const auto byte = [&](int64_t i) {
      const Ints low = to_ints(fit.level(group.inputs[k + i]));
      return low | shift_left<4>(to_ints(fit.level(group.inputs[k + 4 + i])));
    };
    const Ints four = byte(0) | shift_left<8>(byte(1)) | shift_left<16>(byte(2)) | shift_left<24>(byte(3));
    store_bits(target->levels + k / 2 * kBlock + output * 4, four);
  }
  alignas(64) float zero_points[kLanes];
  store(zero_points, fit.zero_points);
  std::copy_n(zero_points, kLanes, target->zero_points + output);
  store(target->scales + output, fit.scales);
}

template <typename T>
void quantize_groups(Group* groups, const T* weight, int64_t num_outputs, int64_t num_inputs) {
  const int64_t num_groups = num_inputs / kGroup;
  const int64_t num_blocks = (num_outputs + kBlock - 1) / kBlock;
  at::parallel_for(0, num_blocks * num_groups, kGroupsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      for (int64_t first = 0; first < kBlock; first += kLanes) {
        const int64_t output = g / num_groups * kBlock + first;
        alignas(64) float values[kGroup][kLanes] = {};  // zeros where the last block has no outputs
        for (int64_t n = 0; n < std::min(kLanes, num_outputs - output); ++n) {
          const T* source = weight + (output + n) * num_inputs + g % num_groups * kGroup;
          for (int64_t k = 0; k < kGroup; ++k) values[k][n] = static_cast<float>(source[k]);
        }
        GroupValues group;
        for (int64_t k = 0; k < kGroup; ++k) group.inputs[k] = load(values[k]);
        quantize_group(groups + g, group, first);
      }
    }
  });
}

// The operator `quantize_in_groups`: see the function in grouped_linear.py.
Tensor quantize_in_groups(const Tensor& weight) {
  check_row_dtype("weight", weight);
  check_dim("weight", weight, 2, "[output, input]");
  const int64_t num_outputs = weight.size(0);
  const int64_t num_inputs = weight.size(1);
  TORCH_CHECK(num_inputs % kGroup == 0, "weight must have a multiple of ", kGroup, " inputs, got ",
              num_inputs);
  const Tensor dense = weight.contiguous();
  const int64_t num_blocks = (num_outputs + kBlock - 1) / kBlock;
  Tensor packed =
      at::empty({num_blocks, num_inputs / kGroup, int64_t{sizeof(Group)}}, dense.options().dtype(at::kByte));
  auto* groups = reinterpret_cast<Group*>(packed.data_ptr<uint8_t>());
  if (dense.scalar_type() == at::kBFloat16) {
    quantize_groups(groups, dense.const_data_ptr<BFloat16>(), num_outputs, num_inputs);
  } else {
    quantize_groups(groups, dense.const_data_ptr<float>(), num_outputs, num_inputs);
  }
  return packed;
}

}  // namespace
