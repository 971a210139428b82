// A decode step of Mamba-2's recurrent states, in place.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "checks.h"
#include "vectors.h"

namespace {

// The operator `advance_states`: see kernels.py. Each number of a state is read and written once.
Tensor advance_states(Tensor& states, const Tensor& is_live, const Tensor& decay, const Tensor& added,
                      const Tensor& writes, const Tensor& reads) {
  check_dim("states", states, 4, "[slot, head, channel, number]");
  check_dim("is_live", is_live, 1, "[row]");
  check_dim("writes", writes, 3, "[row, group, number]");
  const int64_t num_rows = is_live.size(0);
  const int64_t num_heads = states.size(1);
  const int64_t num_channels = states.size(2);
  const int64_t num_numbers = states.size(3);
  const int64_t num_groups = writes.size(1);
  TORCH_CHECK(states.size(0) >= num_rows, "states must have a slot for each of ", num_rows, " rows, got ",
              states.size(0));
  TORCH_CHECK(num_groups > 0 && num_heads % num_groups == 0, "writes must have groups of equally many of ",
              num_heads, " heads, got ", num_groups);
  check("states", states, at::kFloat, states.sizes());
  check("is_live", is_live, at::kBool, {num_rows});
  check("decay", decay, at::kFloat, {num_rows, num_heads});
  check("added", added, at::kFloat, {num_rows, num_heads, num_channels});
  check("writes", writes, at::kFloat, {num_rows, num_groups, num_numbers});
  check("reads", reads, at::kFloat, {num_rows, num_groups, num_numbers});
  Tensor output = at::empty({num_rows, num_heads, num_channels}, decay.options());
  const int64_t heads_per_group = num_heads / num_groups;
  const int64_t size = std::max<int64_t>(1, num_channels * num_numbers);
  const int64_t heads_per_thread = std::max<int64_t>(1, kGrain / 4 / size);
  const bool* live = is_live.const_data_ptr<bool>();
  const float* decays = decay.const_data_ptr<float>();
  const float* addends = added.const_data_ptr<float>();
  const float* all_writes = writes.const_data_ptr<float>();
  const float* all_reads = reads.const_data_ptr<float>();
  float* all_states = states.data_ptr<float>();
  float* outputs = output.data_ptr<float>();
  at::parallel_for(0, num_rows * num_heads, heads_per_thread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / num_heads;
      if (!live[row]) {
        std::fill_n(outputs + i * num_channels, num_channels, 0.0f);
        continue;
      }
      const int64_t group = row * num_groups + i % num_heads / heads_per_group;
      const float* group_writes = all_writes + group * num_numbers;
      const float* group_reads = all_reads + group * num_numbers;
      const Floats factor = broadcast(decays[i]);
      for (int64_t c = i * num_channels; c < (i + 1) * num_channels; ++c) {
        float* state = all_states + c * num_numbers;
        const Floats input = broadcast(addends[c]);
        Floats sum = Floats{};
        for (int64_t n = 0; n < num_numbers; n += kLanes) {
          const Lanes lanes = first_lanes(num_numbers - n);
          const Floats old = load(state + n, lanes);
          const Floats changed = fmadd(input, load(group_writes + n, lanes), old * factor);
          store(state + n, changed, lanes);
          sum = fmadd(changed, load(group_reads + n, lanes), sum);
        }
        outputs[c] = total_of(sum);
      }
    }
  });
  return output;
}

}  // namespace
