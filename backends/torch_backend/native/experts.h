// Mixtures of experts: each row's two products with every expert that a router chose for it.
//
// Only chosen experts are read, each once for all of its rows. A row sums its experts in ascending order, so
// its result does not depend on the batch.

#pragma once

#include <string_view>

#include "linear.h"

namespace {

enum class Activation { kSilu, kGelu, kSquaredRelu, kClampedSwish };

// What lies between an expert's two products. With gates, the first product has the gates, padded to whole
// blocks, and then what they multiply.
struct Inner {
  Activation activation;
  float slope;  // of a clamped swish
  float limit;  // of a clamped swish
  int64_t size;
  bool is_gated;

  int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
};

inline Floats gelu(Floats values) {
  const Floats cubic = values * values * values * broadcast(0.044715f);
  return values * broadcast(0.5f) * (broadcast(1.0f) + tanh((values + cubic) * broadcast(0.7978845608f)));
}

// Return the inner values of 16 gates, which without gates are the values themselves. A NaN stays a NaN: the
// second operand of a minimum or maximum is the result.
template <typename T>
inline Floats activated(const Inner& inner, Floats gates, Floats values) {
  switch (inner.activation) {
    case Activation::kClampedSwish: {
      const Floats limit = broadcast(inner.limit);
      const Floats gate = min(limit, gates);
      const Floats slope = gate * broadcast(inner.slope);
      const Floats swish = gate / (broadcast(1.0f) + exp(-slope));
      const Floats value = max(broadcast(-inner.limit), min(limit, values));
      return fmadd(value, swish, swish);
    }
    case Activation::kSquaredRelu: {
      const Floats positive = max(Floats{}, gates);
      gates = positive * positive;
      break;
    }
    case Activation::kGelu: gates = gelu(gates); break;
    case Activation::kSilu: gates = silu(gates); break;
  }
  return inner.is_gated ? rounded<T>(gates) * values : gates;
}

// Rows for which reading an expert takes about as long as multiplying it. A guess that only balances threads.
constexpr int64_t kMemoryBoundRows = 8;

// Pairs of a row and an expert that was chosen for it, sorted by expert and then by row.
struct Pairs {
  struct Group {  // the pairs of an expert
    int64_t expert;
    int64_t begin;
    int64_t end;

    int64_t size() const { return end - begin; }
  };
  std::vector<Group> groups;  // of experts that were chosen, ascending
  std::vector<int64_t> rows;  // [pair]
  std::vector<float> strengths;

  // `chosen` and `strengths` are [row, choice]. Choices that name no expert make no pair.
  Pairs(const int64_t* chosen, const float* chosen_strengths, int64_t num_choices, int64_t choices_per_row,
        int64_t num_experts) {
    std::vector<int64_t> ends(num_experts, 0);
    const auto is_expert = [&](int64_t expert) { return expert >= 0 && expert < num_experts; };
    for (int64_t c = 0; c < num_choices; ++c) {
      if (is_expert(chosen[c])) ++ends[chosen[c]];
    }
    int64_t end = 0;
    for (int64_t expert = 0; expert < num_experts; ++expert) {
      const int64_t begin = end;
      end += ends[expert];
      ends[expert] = begin;
      if (end > begin) groups.push_back({expert, begin, end});
    }
    rows.resize(end);
    strengths.resize(end);
    for (int64_t c = 0; c < num_choices; ++c) {
      if (!is_expert(chosen[c])) continue;
      const int64_t pair = ends[chosen[c]]++;
      rows[pair] = c / choices_per_row;
      strengths[pair] = chosen_strengths[c];
    }
  }

  int64_t size() const { return rows.size(); }
};

// Call `run(group, first block, last block)` for all blocks of the groups' experts. The threads' shares cost
// about the same: an expert is read once, and multiplied by each of its rows.
template <typename Run>
void share_blocks(const Pairs& pairs, int64_t num_blocks, int64_t block_elements, const Run& run) {
  const auto cost_of = [](const Pairs::Group& group) { return std::max(group.size(), kMemoryBoundRows); };
  int64_t cost = 0;
  for (const Pairs::Group& group : pairs.groups) cost += cost_of(group) * num_blocks;
  const int64_t num_elements = static_cast<int64_t>(pairs.groups.size()) * num_blocks * block_elements;
  const int64_t num_parts = std::clamp<int64_t>(num_elements / kGrain, 1, at::get_num_threads());
  at::parallel_for(0, num_parts, 1, [&](int64_t first_part, int64_t last_part) {
    int64_t before = 0;  // the cost of the groups before
    for (const Pairs::Group& group : pairs.groups) {
      const int64_t each = cost_of(group);
      // A part has the blocks whose costs begin in it.
      const auto first_from = [&](int64_t part) {
        return std::clamp<int64_t>((cost * part / num_parts - before + each - 1) / each, 0, num_blocks);
      };
      const int64_t begin = first_from(first_part);
      const int64_t end = first_from(last_part);
      if (begin < end) run(group, begin, end);
      before += each * num_blocks;
    }
  });
}

// The sizes of an expert's weight. Outputs are whole blocks.
struct ExpertSizes {
  int64_t outputs;
  int64_t inputs;
};

// Return the sizes of `weight`: [expert, output, input], or of 4 bits [expert, block, group, sizeof(Group)].
inline ExpertSizes sizes_of(const Tensor& weight) {
  if (weight.dim() == 4) return {weight.size(1) * kBlock, weight.size(2) * kGroup};
  return {weight.size(1), weight.size(2)};
}

// The weights of one of the two products, of all experts.
template <typename T, typename W>
struct ExpertWeights {
  Weights<T, W> first;  // of the first expert
  int64_t num_outputs;  // of an expert, whole blocks

  ExpertWeights(const Tensor& weight, const std::optional<Tensor>& scales, const std::optional<Tensor>& bias)
      : first{static_cast<const W*>(weight.const_data_ptr()), sizes_of(weight).inputs,
              data_or_null<float>(scales), data_or_null<T>(bias)},
        num_outputs(sizes_of(weight).outputs) {}

  // A block of an expert's outputs.
  Weights<T, W> of(int64_t expert, int64_t block) const {
    return first.from(expert * num_outputs + block * kBlock);
  }
};

// Call `run(first pair, number of pairs)` for a group's pairs, as many at a time as fit the cache.
template <typename Run>
void in_passes(const Pairs::Group& group, const Run& run) {
  for (int64_t pair = group.begin; pair < group.end; pair += kRowsPerPass) {
    run(pair, std::min(kRowsPerPass, group.end - pair));
  }
}

// Write the inner values [pair, inner] of all pairs. `rows` are the pairs' inputs.
template <typename T, typename R, typename W>
void multiply_into_inner(T* output, const Pairs& pairs, const Rows<R>& rows,
                         const ExpertWeights<T, W>& weights, const Inner& inner, int64_t num_inputs) {
  const int64_t products = inner.is_gated ? 2 : 1;  // per inner value
  share_blocks(pairs, inner.num_blocks(), products * kBlock * num_inputs,
               [&](const Pairs::Group& group, int64_t begin, int64_t end) {
    thread_local Buffer<float> sums;
    in_passes(group, [&](int64_t pair, int64_t num_pairs) {
      sums.resize(2 * num_pairs * kBlock);
      float* gates = sums.data();
      float* values = inner.is_gated ? gates + num_pairs * kBlock : gates;
      const Rows<R> pass = rows.from(pair, num_inputs);
      for (int64_t block = begin; block < end; ++block) {
        multiply_block(gates, pass, weights.of(group.expert, block), num_pairs, num_inputs, kBlock);
        if (inner.is_gated) {
          multiply_block(values, pass, weights.of(group.expert, inner.num_blocks() + block), num_pairs,
                         num_inputs, kBlock);
        }
        T* target = output + pair * inner.size + block * kBlock;
        const int64_t width = std::min(kBlock, inner.size - block * kBlock);
        for (int64_t p = 0; p < num_pairs; ++p, target += inner.size) {
          for (int64_t n = 0; n < width; n += kLanes) {
            const Floats gate = rounded<T>(load(gates + p * kBlock + n));
            const Floats value = rounded<T>(load(values + p * kBlock + n));
            store(target + n, activated<T>(inner, gate, value), first_lanes(width - n));
          }
        }
      }
    });
  });
}

// Write the outputs [row, output]: the sums of the pairs' second products, times their strengths.
template <typename T, typename R, typename W>
void multiply_into_output(Tensor& output, const Pairs& pairs, const Rows<R>& rows,
                          const ExpertWeights<T, W>& weights, int64_t num_inputs) {
  const int64_t num_outputs = output.size(-1);
  const int64_t num_rows = output.size(0);
  const int64_t block_elements = static_cast<int64_t>(pairs.groups.size()) * kBlock * num_inputs;
  const int64_t grain = kGrain / std::max<int64_t>(block_elements, 1) + 1;
  at::parallel_for(0, weights.num_outputs / kBlock, grain, [&](int64_t begin, int64_t end) {
    thread_local Buffer<float> products, totals;
    const int64_t num_columns = (end - begin) * kBlock;
    totals.resize(num_rows * num_columns);
    std::fill(totals.begin(), totals.end(), 0.0f);
    for (const Pairs::Group& group : pairs.groups) {
      in_passes(group, [&](int64_t pair, int64_t num_pairs) {
        products.resize(num_pairs * kBlock);
        for (int64_t block = begin; block < end; ++block) {
          multiply_block(products.data(), rows.from(pair, num_inputs), weights.of(group.expert, block),
                         num_pairs, num_inputs, kBlock);
          for (int64_t p = 0; p < num_pairs; ++p) {
            float* total = totals.data() + pairs.rows[pair + p] * num_columns + (block - begin) * kBlock;
            const Floats strength = broadcast(pairs.strengths[pair + p]);
            for (int64_t n = 0; n < kBlock; n += kLanes) {
              const Floats product = rounded<T>(load(products.data() + p * kBlock + n));
              store(total + n, fmadd(product, strength, load(total + n)));
            }
          }
        }
      });
    }
    const int64_t width = std::min(num_columns, num_outputs - begin * kBlock);
    T* target = output.data_ptr<T>() + begin * kBlock;
    for (int64_t r = 0; r < num_rows; ++r) {
      for (int64_t n = 0; n < width; n += kLanes) {
        store(target + r * num_outputs + n, load(totals.data() + r * num_columns + n),
              first_lanes(width - n));
      }
    }
  });
}

template <typename T, typename W>
void apply_experts(Tensor& output, const Tensor& input, const Pairs& pairs, const Inner& inner,
                   const ExpertWeights<T, W>& first, const ExpertWeights<T, W>& second) {
  using R = RowType<T, W>;
  const int64_t num_inputs = input.size(-1);
  const FusedOps<T> nothing{};
  Buffer<T> gathered, inner_values;
  gathered.resize(pairs.size() * num_inputs);
  inner_values.resize(pairs.size() * inner.size);
  // Quantises rows to int8 where the weights need it.
  using RowPrologue = Prologue<T, R, kIsGrouped<W>>;
  const auto prepared = [&](RowPrologue& prologue, const T* elements, int64_t row_inputs) -> Rows<R> {
    if constexpr (std::is_same_v<R, T>) {
      return {elements, nullptr, nullptr};
    } else {
      prologue.resize(nothing, pairs.size(), row_inputs);
      at::parallel_for(0, pairs.size(), kGrain / row_inputs + 1, [&](int64_t begin, int64_t end) {
        prologue.run(elements, nothing, begin, end, row_inputs);
      });
      return prologue.rows();
    }
  };
  RowPrologue of_inputs, of_inner;
  const T* source = input.const_data_ptr<T>();
  at::parallel_for(0, pairs.size(), kGrain / num_inputs + 1, [&](int64_t begin, int64_t end) {
    for (int64_t pair = begin; pair < end; ++pair) {
      std::copy_n(source + pairs.rows[pair] * num_inputs, num_inputs, gathered.data() + pair * num_inputs);
    }
  });
  multiply_into_inner(inner_values.data(), pairs, prepared(of_inputs, gathered.data(), num_inputs), first,
                      inner, num_inputs);
  multiply_into_output(output, pairs, prepared(of_inner, inner_values.data(), inner.size), second,
                       inner.size);
}

inline Activation activation_of(std::string_view name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu_tanh") return Activation::kGelu;
  if (name == "squared_relu") return Activation::kSquaredRelu;
  TORCH_CHECK(name == "clamped_swish",
              "activation must be silu, gelu_tanh, squared_relu or clamped_swish, got ", name);
  return Activation::kClampedSwish;
}

// Check the weights, scales and biases of one of the two products. `shape` is [expert, output, input].
inline void check_experts(const char* name, const Tensor& input, const Tensor& weight,
                          const std::optional<Tensor>& scales, const std::optional<Tensor>& bias,
                          at::IntArrayRef shape) {
  if (weight.dim() == 4) {
    check_dtype(name, weight, at::kByte);
    TORCH_CHECK(!scales, "scales must be None for weights in groups, got a tensor");
    check_shape(name, weight, {shape[0], shape[1] / kBlock, shape[2] / kGroup, int64_t{sizeof(Group)}});
    check_grouped_weight(input, weight.select(0, 0), shape[1]);
  } else {
    check_shape(name, weight, shape);
    check_weight(input, weight.select(0, 0), scales, shape[1]);
  }
  check_contiguous(name, weight);
  if (scales) check("scales", *scales, at::kFloat, shape.slice(0, 2));
  if (bias) check("bias", *bias, input.scalar_type(), shape.slice(0, 2));
}

// The operator `experts`: see `packed_experts` in kernels.py.
Tensor experts(const Tensor& input, const Tensor& chosen, const Tensor& strengths, const Tensor& first,
               const std::optional<Tensor>& first_scales, const std::optional<Tensor>& first_bias,
               const Tensor& second, const std::optional<Tensor>& second_scales,
               const std::optional<Tensor>& second_bias, std::string_view activation, double slope,
               double limit) {
  check_row_dtype("input", input);
  check_dim("input", input, 2, "[row, input]");
  check_dim("chosen", chosen, 2, "[row, choice]");
  if (first.dim() != 4) check_dim("first", first, 3, "[expert, inner, input]");
  check_dim("second", second, first.dim(), "as first has");
  check_shape("chosen", chosen, {input.size(0), chosen.size(1)});
  check_dtype("chosen", chosen, at::kLong);
  check_shape("strengths", strengths, chosen.sizes());
  const int64_t num_experts = first.size(0);
  const auto in_blocks = [](int64_t size) { return (size + kBlock - 1) / kBlock * kBlock; };
  const int64_t num_inner = sizes_of(second).inputs;
  const bool is_gated = sizes_of(first).outputs != in_blocks(num_inner);
  const Inner inner{activation_of(activation), static_cast<float>(slope), static_cast<float>(limit),
                    num_inner, is_gated};
  TORCH_CHECK(is_gated || inner.activation != Activation::kClampedSwish,
              "first must have gates for the activation clamped_swish");
  const at::ScalarType dtype = input.scalar_type();
  TORCH_CHECK(second.scalar_type() == first.scalar_type(), "second must have first's dtype ",
              first.scalar_type(), ", got ", second.scalar_type());
  check_experts("first", input, first, first_scales, first_bias,
                {num_experts, (is_gated ? 2 : 1) * in_blocks(inner.size), input.size(1)});
  check_experts("second", at::empty({0, inner.size}, input.options()), second, second_scales, second_bias,
                {num_experts, in_blocks(input.size(1)), inner.size});
  const Tensor rows = input.contiguous();
  const Tensor choices = chosen.contiguous();
  const Tensor floats = strengths.to(at::kFloat).contiguous();
  const Pairs pairs(choices.const_data_ptr<int64_t>(), floats.const_data_ptr<float>(), choices.numel(),
                    choices.size(1), num_experts);
  Tensor output = at::empty(rows.sizes(), rows.options());
  const auto run = [&](auto row_type, auto weight_type) {
    using T = decltype(row_type);
    using W = decltype(weight_type);
    apply_experts(output, rows, pairs, inner, ExpertWeights<T, W>(first, first_scales, first_bias),
                  ExpertWeights<T, W>(second, second_scales, second_bias));
  };
  const auto run_rows = [&](auto row_type) {
    switch (first.scalar_type()) {
      case at::kByte: return first.dim() == 4 ? run(row_type, Group()) : run(row_type, uint8_t());
      case at::kChar: return run(row_type, int8_t());
      default: return run(row_type, row_type);
    }
  };
  dtype == at::kBFloat16 ? run_rows(BFloat16()) : run_rows(float());
  return output;
}

}  // namespace
