// Products of any number of rows with the weights of linear layers. The weights have oneDNN's layout, so one
// copy of them serves torch's operators and these kernels.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "checks.h"
#include "groups.h"
#include "tile.h"

namespace {

// Rows of a small batch. Memory is its limit: the product takes as long as reading the weight. Each thread
// prepares all of its rows for itself, which saves a parallel loop before the product.
constexpr int64_t kSmallBatch = 32;
constexpr int64_t kRowsPerPass = 512;        // rows whose sums with a block stay in the second-level cache
constexpr int32_t kZeroPoint = 128;          // of uint8 weights
constexpr int64_t kMaxPadding = 31;          // inputs that oneDNN may add to fill an output's last 64 bytes
constexpr int64_t kMaxInt8Inputs = 1 << 16;  // sums of products up to 255 x 127 stay below 2^31
constexpr float kMaxInt8 = 127;              // -128 is unused, for symmetry

// Inputs of a block's chunk, which stays in the first-level cache until all rows have been multiplied. Sums
// are stored between chunks without rounding, so the chunk's size does not change a result.
template <typename T>
constexpr int64_t kChunk = 96 * kPack<T>;
constexpr int64_t kSmallBatchChunk = 32;

// Whether int8 weights are widened to the rows' type.
template <typename W>
constexpr bool kIsWidened = std::is_same_v<W, int8_t>;

// Inputs of a block's chunk for AMX, which stays in the second-level cache.
template <typename R>
constexpr int64_t kTiledChunk = 4096 / sizeof(R);

template <typename W>
constexpr bool kIsGrouped = std::is_same_v<W, Group>;

// The type in which rows are multiplied: int8 for uint8 weights and groups of 4 bits, since the processor's
// int8 product takes one unsigned operand.
template <typename T, typename W>
using RowType = std::conditional_t<std::is_same_v<W, uint8_t> || kIsGrouped<W>, int8_t, T>;

// Weights that an element of a packed weight holds.
template <typename W>
constexpr int64_t kHeld = kIsGrouped<W> ? kGroup * kBlock : 1;

template <typename T>
inline const T* offset_if_any(const T* elements, int64_t offset) {
  return elements == nullptr ? nullptr : elements + offset;
}

template <typename T, typename W>
struct Weights {
  const W* elements;
  int64_t padded_inputs;  // per output: at least the rows' inputs
  const float* scales;    // [output], of int8 and uint8 weights; else null: groups hold their own
  const T* bias;          // [output] or null

  Weights from(int64_t output) const {
    return {elements + output * padded_inputs / kHeld<W>, padded_inputs, offset_if_any(scales, output),
            offset_if_any(bias, output)};
  }
};

template <typename R>
struct Rows {
  const R* elements;              // [row, input]
  const float* scales;            // [row, group], of int8 rows; else null
  const float* zero_point_terms;  // [row, group], of int8 rows; else null
  int64_t num_groups = 1;         // of a row's inputs

  Rows from(int64_t row, int64_t num_inputs) const {
    const int64_t group = row * num_groups;
    return {elements + row * num_inputs, offset_if_any(scales, group), offset_if_any(zero_point_terms, group),
            num_groups};
  }
};

inline GroupedRows grouped(const Rows<int8_t>& rows) {
  return {rows.elements, rows.scales, rows.zero_point_terms, rows.num_groups};
}

// The operators fused with a product: a norm as its prologue, a residual or a gate as its epilogue. Each
// rounds where an operator by itself would.
template <typename T>
struct FusedOps {
  const T* norm;  // [input]: the weight of a root-mean-square norm of the rows, or null
  float epsilon;
  const T* residual;    // [row, output]: added to the outputs, or null
  bool is_gated;        // the first half of the products are gates of the second half, which are the outputs
  bool rows_in_groups;  // rows for weights of uint8 have a scale for each group of inputs
};

template <typename T>
void normalise(T* normed, const T* input, const FusedOps<T>& fused, int64_t num_rows, int64_t num_inputs) {
  for (int64_t r = 0; r < num_rows; ++r, input += num_inputs, normed += num_inputs) {
    // One accumulator of 16 lanes per row, always in ascending order: the sum does not depend on the batch.
    Floats squares = Floats{};
    for (int64_t k = 0; k < num_inputs; k += kLanes) {
      const Floats values = load(input + k, first_lanes(num_inputs - k));
      squares = fmadd(values, values, squares);
    }
    const Floats factor = broadcast(1 / std::sqrt(total_of(squares) / num_inputs + fused.epsilon));
    for (int64_t k = 0; k < num_inputs; k += kLanes) {
      const Lanes lanes = first_lanes(num_inputs - k);
      const Floats values = rounded<T>(load(input + k, lanes) * factor);
      store(normed + k, load(fused.norm + k, lanes) * values, lanes);
    }
  }
}

// Quantise each row, or each group of one, to int8: divide it by its scale, which is its largest magnitude
// over 127, and round.
//
// A weight's level is its value plus the zero point, so a product may be too large by the zero point times
// the row's sum. That term is stored and subtracted after the product. It is exact in float32. For levels, it
// is that of one step of a zero point, and scaled.
template <bool has_levels, typename T>
void quantize(int8_t* quantized, float* scales, float* zero_point_terms, const T* input, int64_t num_rows,
              int64_t num_inputs) {
  const Ints magnitude = broadcast(0x7fffffff);
  for (int64_t r = 0; r < num_rows; ++r, input += num_inputs, quantized += num_inputs) {
    // Magnitudes are compared as integers: their bits have the same order, and a NaN is above all numbers. It
    // thus becomes the scale, and then the row's outputs.
    Ints largest_bits = Ints{};
    for (int64_t k = 0; k < num_inputs; k += kLanes) {
      const Ints bits = as_ints(load(input + k, first_lanes(num_inputs - k)));
      largest_bits = max(largest_bits, bits & magnitude);
    }
    const float largest = std::bit_cast<float>(largest_of(largest_bits));
    scales[r] = largest / kMaxInt8;
    // A row of zeros has the scale 0, by which nothing can be divided.
    const Floats factor = broadcast(1 / std::max(scales[r], std::numeric_limits<float>::min()));
    Ints sums = Ints{};
    for (int64_t k = 0; k < num_inputs; k += kLanes) {
      const Lanes lanes = first_lanes(num_inputs - k);
      const Ints integers = to_ints(load(input + k, lanes) * factor);
      sums = sums + integers;
      store(quantized + k, integers, lanes);
    }
    const float sum = total_of(sums);
    zero_point_terms[r] =
        has_levels ? scales[r] / kPerZeroPoint * sum : (kSubtractsZeroPoint ? 0 : kZeroPoint) * sum;
  }
}

// The rows of a product after its prologue: normalised, quantised, or both. Rows of int8 have one scale, or
// one for each group. With `has_levels` they have groups, and are multiplied by levels, whose zero points
// differ.
template <typename T, typename R, bool has_levels = false>
class Prologue {
 public:
  static bool is_needed(const FusedOps<T>& fused) { return kIsQuantized || fused.norm != nullptr; }

  void resize(const FusedOps<T>& fused, int64_t num_rows, int64_t num_inputs) {
    num_groups_ = has_levels || fused.rows_in_groups ? num_inputs / kGroup : 1;
    if (fused.norm != nullptr) normed_.resize(num_rows * num_inputs);
    if (kIsQuantized) {
      quantized_.resize(num_rows * num_inputs);
      scales_.resize(num_rows * num_groups_);
      zero_point_terms_.resize(num_rows * num_groups_);
    }
  }

  // Prepare the rows from `begin` to `end`. Threads may prepare different rows at the same time.
  void run(const T* input, const FusedOps<T>& fused, int64_t begin, int64_t end, int64_t num_inputs) {
    const int64_t first = begin * num_inputs;
    input += first;
    if (fused.norm != nullptr) {
      normalise(normed_.data() + first, input, fused, end - begin, num_inputs);
      input = normed_.data() + first;
    }
    if (kIsQuantized) {
      const int64_t first_group = begin * num_groups_;
      quantize<has_levels>(quantized_.data() + first, scales_.data() + first_group,
                           zero_point_terms_.data() + first_group, input, (end - begin) * num_groups_,
                           num_inputs / num_groups_);
    }
  }

  Rows<R> rows() const {
    if constexpr (kIsQuantized) {
      return {quantized_.data(), scales_.data(), zero_point_terms_.data(), num_groups_};
    } else {
      return {normed_.data(), nullptr, nullptr};
    }
  }

 private:
  static constexpr bool kIsQuantized = std::is_same_v<R, int8_t>;
  Buffer<T> normed_;
  Buffer<int8_t> quantized_;
  Buffer<float> scales_;
  Buffer<float> zero_point_terms_;
  int64_t num_groups_ = 1;
};

// Add the products of all rows with a chunk of a block's weights to `sums` [row, 64], a tile at a time.
//
// The first tile reads the weights from memory, prefetches those that follow, and leaves widened weights in
// `widened`. In a small batch all tiles prefetch, since memory is the limit. In a large one the later tiles
// find the chunk in the first-level cache, and prefetches would only take slots from the multiplications.
template <bool is_small_batch, typename R, typename W>
void accumulate_chunk(float* sums, const R* input, const W* weight, int64_t num_rows, int64_t row_stride,
                      int64_t chunk_inputs, R* widened) {
  constexpr int64_t tile_rows = is_small_batch ? kTileRows : kRowsAtOnce<R>;
  accumulate_rows<true, tile_rows>(sums, input, row_stride, weight, chunk_inputs, num_rows, kPack<R>,
                                   num_rows > tile_rows ? widened : nullptr);
  for (int64_t r = tile_rows; r < num_rows; r += tile_rows) {
    float* tile_sums = sums + r * kBlock;
    const R* tile_input = input + r * row_stride;
    if constexpr (kIsWidened<W>) {
      accumulate_rows<false, tile_rows>(tile_sums, tile_input, row_stride, widened, chunk_inputs,
                                        num_rows - r);
    } else {
      accumulate_rows<is_small_batch, tile_rows>(tile_sums, tile_input, row_stride, weight, chunk_inputs,
                                                 num_rows - r);
    }
  }
}

// Turn the int32 sums of an int8 row into float32, in place: subtract the zero point's term and apply the
// scale.
inline void dequantize(float* sums, int32_t zero_point_term, float scale) {
  for (int64_t n = 0; n < kBlock; n += kLanes) {
    const Ints integers = load_bits(sums + n) - broadcast(zero_point_term);
    store(sums + n, to_floats(integers) * broadcast(scale));
  }
}

// Add the products of all rows with a block by AMX, and return how many of the inputs were used.
template <typename R, typename W>
int64_t accumulate_by_tiles(float* sums, const R* input, const W* weight, int64_t num_rows,
                            int64_t num_inputs) {
  const int64_t end = num_inputs / kTileInputs<R> * kTileInputs<R>;
  Tiles tiles;
  for (int64_t k = 0; k < end; k += kTiledChunk<R>) {
    const int64_t chunk_inputs = std::min(kTiledChunk<R>, end - k);
    accumulate_tiles<true, false>(tiles, sums, input + k, num_inputs, weight + k * kBlock, chunk_inputs,
                                  num_rows);
  }
  return end;
}

// Write the products [row, 64] of one block, without the scales of its outputs.
template <typename T, typename R, typename W>
void multiply_columns(float* sums, const Rows<R>& rows, const Weights<T, W>& weights, int64_t num_rows,
                      int64_t num_inputs) {
  if constexpr (std::is_same_v<W, uint8_t>) {
    if (rows.num_groups > 1) return multiply_groups(sums, grouped(rows), weights.elements, num_rows);
  }
  alignas(64) R widened[kIsWidened<W> ? kChunk<R> * kBlock : 1];
  std::fill_n(sums, num_rows * kBlock, 0.0f);
  int64_t first = 0;
  // Tiles come from memory, so widened weights would have to be stored first: one row took 1.5 times as long.
  if constexpr (kHasTiles<R> && !kIsWidened<W>) {
    if (tiles_are_usable()) {
      first = accumulate_by_tiles(sums, rows.elements, weights.elements, num_rows, num_inputs);
    }
  }
  const bool is_small_batch = num_rows <= kSmallBatch;
  const int64_t chunk_size = is_small_batch && !kIsWidened<W> ? kSmallBatchChunk : kChunk<R>;
  const auto accumulate = is_small_batch ? accumulate_chunk<true, R, W> : accumulate_chunk<false, R, W>;
  for (int64_t k = first; k < num_inputs; k += chunk_size) {
    const int64_t chunk_inputs = std::min(chunk_size, num_inputs - k);
    accumulate(sums, rows.elements + k, weights.elements + k * kBlock, num_rows, num_inputs, chunk_inputs,
               widened);
  }
  for (int64_t r = 0; std::is_same_v<R, int8_t> && r < num_rows; ++r) {
    dequantize(sums + r * kBlock, static_cast<int32_t>(rows.zero_point_terms[r]), rows.scales[r]);
  }
}

// Write the products [row, 64] of one block, of which `width` columns are outputs.
template <typename T, typename R, typename W>
void multiply_block(float* sums, const Rows<R>& rows, const Weights<T, W>& weights, int64_t num_rows,
                    int64_t num_inputs, int64_t width) {
  if constexpr (kIsGrouped<W>) {
    multiply_groups(sums, grouped(rows), weights.elements, num_rows);
  } else {
    multiply_columns(sums, rows, weights, num_rows, num_inputs);
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    float* row = sums + r * kBlock;
    for (int64_t n = 0; weights.scales != nullptr && n < width; ++n) row[n] *= weights.scales[n];
    for (int64_t n = 0; weights.bias != nullptr && n < width; ++n) {
      row[n] += static_cast<float>(weights.bias[n]);
    }
  }
}

inline Floats silu(Floats values) { return values / (broadcast(1.0f) + exp(-values)); }

// Apply the epilogue to a block's products and write its outputs. `gates` and `residual` may be null.
template <typename T>
void write_block(T* output, const float* products, const float* gates, const T* residual, int64_t num_rows,
                 int64_t num_outputs, int64_t width) {
  for (int64_t r = 0; r < num_rows; ++r) {
    for (int64_t n = 0; n < width; n += kLanes) {
      const Lanes lanes = first_lanes(width - n);
      Floats values = load(products + r * kBlock + n);
      if (gates != nullptr) {
        const Floats gate = rounded<T>(load(gates + r * kBlock + n));
        values = rounded<T>(silu(gate)) * rounded<T>(values);
      }
      if (residual != nullptr) {
        values = load(residual + r * num_outputs + n, lanes) + rounded<T>(values);
      }
      store(output + r * num_outputs + n, values, lanes);
    }
  }
}

// Write the outputs [row, output] of up to `kRowsPerPass` rows, for the blocks of outputs from `begin` to
// `end`. A gated block multiplies two blocks of weights: its gates and its outputs.
template <typename T, typename R, typename W>
void multiply_rows(T* output, const Rows<R>& rows, const Weights<T, W>& weights, const FusedOps<T>& fused,
                   int64_t num_rows, int64_t num_inputs, int64_t num_outputs, int64_t begin, int64_t end) {
  thread_local Buffer<float> sums;
  sums.resize(2 * num_rows * kBlock);
  float* products = sums.data();
  float* gates = fused.is_gated ? products + num_rows * kBlock : nullptr;
  const int64_t num_gates = fused.is_gated ? num_outputs : 0;
  for (int64_t first = begin * kBlock; first < end * kBlock; first += kBlock) {
    const int64_t width = std::min(kBlock, num_outputs - first);
    if (fused.is_gated) multiply_block(gates, rows, weights.from(first), num_rows, num_inputs, width);
    multiply_block(products, rows, weights.from(num_gates + first), num_rows, num_inputs, width);
    write_block(output + first, products, gates, offset_if_any(fused.residual, first), num_rows, num_outputs,
                width);
  }
}

template <typename T, typename W>
void multiply(Tensor& output, const Tensor& input, const Weights<T, W>& weights, const FusedOps<T>& fused,
              int64_t num_blocks) {
  using R = RowType<T, W>;
  const int64_t num_inputs = input.size(-1);
  const int64_t num_outputs = output.size(-1);
  const int64_t num_rows = input.numel() / num_inputs;
  const int64_t weight_blocks = fused.is_gated ? 2 : 1;  // per block of outputs
  const T* source = input.const_data_ptr<T>();
  using RowPrologue = Prologue<T, R, kIsGrouped<W>>;
  const bool has_prologue = RowPrologue::is_needed(fused);
  const bool is_small_batch = num_rows <= kSmallBatch;
  RowPrologue shared;  // of a large batch
  if (has_prologue && !is_small_batch) {
    shared.resize(fused, num_rows, num_inputs);
    const int64_t rows_per_thread = std::max<int64_t>(1, kGrain / num_inputs);
    at::parallel_for(0, num_rows, rows_per_thread,
                     [&](int64_t begin, int64_t end) { shared.run(source, fused, begin, end, num_inputs); });
  }
  const int64_t blocks_per_thread = std::max<int64_t>(1, kGrain / (weight_blocks * kBlock * num_inputs));
  at::parallel_for(0, num_blocks / weight_blocks, blocks_per_thread, [&](int64_t begin, int64_t end) {
    thread_local RowPrologue own;
    Rows<R> rows;
    if (!has_prologue) {
      if constexpr (std::is_same_v<R, T>) rows = {source, nullptr, nullptr};
    } else if (is_small_batch) {
      own.resize(fused, num_rows, num_inputs);
      own.run(source, fused, 0, num_rows, num_inputs);
      rows = own.rows();
    } else {
      rows = shared.rows();
    }
    for (int64_t first = 0; first < num_rows; first += kRowsPerPass) {
      FusedOps<T> pass_fused = fused;
      pass_fused.residual = offset_if_any(fused.residual, first * num_outputs);
      multiply_rows(output.data_ptr<T>() + first * num_outputs, rows.from(first, num_inputs), weights,
                    pass_fused, std::min(kRowsPerPass, num_rows - first), num_inputs, num_outputs, begin,
                    end);
    }
  });
}

template <typename T>
void multiply_by(Tensor& output, const Tensor& input, const Tensor& weight,
                 const std::optional<Tensor>& scales, const std::optional<Tensor>& bias,
                 const FusedOps<T>& fused, int64_t padded_inputs) {
  const auto run = [&](auto type) {
    using W = decltype(type);
    const Weights<T, W> weights{static_cast<const W*>(weight.const_data_ptr()), padded_inputs,
                                data_or_null<float>(scales), data_or_null<T>(bias)};
    const int64_t num_elements = weight.nbytes() / sizeof(W);
    multiply(output, input, weights, fused, num_elements * kHeld<W> / (kBlock * padded_inputs));
  };
  switch (weight.scalar_type()) {
    case at::kByte: return scales ? run(uint8_t()) : run(Group());
    case at::kChar: return run(int8_t());
    default: return run(T());
  }
}

// Return the inputs per output of a weight in groups of 4 bits.
inline int64_t check_grouped_weight(const Tensor& input, const Tensor& weight, int64_t num_products) {
  const int64_t num_inputs = input.size(-1);
  check_contiguous("weight", weight);
  TORCH_CHECK(num_inputs > 0 && num_inputs % kGroup == 0, "input must have a positive multiple of ", kGroup,
              " inputs for a weight in groups, got ", num_inputs);
  TORCH_CHECK(num_products > 0, "num_products must be positive, got ", num_products);
  const int64_t num_blocks = (num_products + kBlock - 1) / kBlock;
  check_shape("weight", weight, {num_blocks, num_inputs / kGroup, int64_t{sizeof(Group)}});
  return num_inputs;
}

// Return the inputs per output of a packed weight, padding included.
inline int64_t check_weight(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scales,
                            int64_t num_products) {
  const at::ScalarType dtype = weight.scalar_type();
  const bool is_quantized = dtype == at::kByte || dtype == at::kChar;
  TORCH_CHECK(is_quantized || dtype == input.scalar_type(), "weight must have dtype Byte, Char or input's ",
              input.scalar_type(), ", got ", dtype);
  TORCH_CHECK(is_quantized == scales.has_value(), "scales must be ", is_quantized ? "given" : "None",
              " for a weight of dtype ", dtype, ", got ", scales ? "a tensor" : "None");
  check_contiguous("weight", weight);
  const int64_t num_inputs = input.size(-1);
  const int64_t pack = dtype == at::kByte ? kPack<int8_t> : 4 / input.element_size();
  TORCH_CHECK(num_inputs > 0 && num_inputs % pack == 0, "input must have a positive multiple of ", pack,
              " inputs for a weight of dtype ", dtype, ", got ", num_inputs);
  TORCH_CHECK(dtype != at::kByte || num_inputs <= kMaxInt8Inputs, "input must have at most ", kMaxInt8Inputs,
              " inputs for a weight of dtype ", dtype, ", got ", num_inputs);
  TORCH_CHECK(num_products > 0, "num_products must be positive, got ", num_products);
  const int64_t padded_outputs = (num_products + kBlock - 1) / kBlock * kBlock;
  const int64_t padded_inputs = weight.numel() / padded_outputs;
  TORCH_CHECK(weight.numel() == padded_inputs * padded_outputs && num_inputs <= padded_inputs &&
                  padded_inputs <= num_inputs + kMaxPadding,
              "weight must have ", padded_outputs, " outputs of ", num_inputs, " to ",
              num_inputs + kMaxPadding, " inputs for an input of shape ", input.sizes(), ", got shape ",
              weight.sizes());
  return padded_inputs;
}

// The operator `linear`: see `packed_linear` in kernels.py.
Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scales,
              const std::optional<Tensor>& bias, int64_t num_products, const std::optional<Tensor>& norm,
              double epsilon, const std::optional<Tensor>& residual, bool is_gated, bool rows_in_groups) {
  check_row_dtype("input", input);
  TORCH_CHECK(input.dim() > 0, "input must have dimensions [..., input], got a scalar");
  const at::ScalarType dtype = input.scalar_type();
  const bool is_grouped = weight.scalar_type() == at::kByte && !scales;
  const int64_t padded_inputs = is_grouped ? check_grouped_weight(input, weight, num_products)
                                           : check_weight(input, weight, scales, num_products);
  TORCH_CHECK(
      !rows_in_groups || (weight.scalar_type() == at::kByte && scales && input.size(-1) % kGroup == 0),
      "rows_in_groups needs scales, a weight of dtype Byte and a multiple of ", kGroup, " inputs, got dtype ",
      weight.scalar_type(), " and ", input.size(-1), " inputs");
  TORCH_CHECK(!is_gated || num_products % (2 * kBlock) == 0, "num_products must be a multiple of ",
              2 * kBlock, " when is_gated, got ", num_products);
  if (scales) {
    // They may be padded to whole blocks, as the weight is.
    check_dim("scales", *scales, 1, "[output]");
    TORCH_CHECK(scales->size(0) >= num_products, "scales must have shape [", num_products,
                "] or be longer, got ", scales->sizes());
    check_dtype("scales", *scales, at::kFloat);
    check_contiguous("scales", *scales);
  }
  if (bias) check("bias", *bias, dtype, {num_products});
  if (norm) check("norm", *norm, dtype, {input.size(-1)});
  const Tensor rows = input.contiguous();
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() = is_gated ? num_products / 2 : num_products;
  Tensor output = at::empty(sizes, rows.options());
  std::optional<Tensor> dense_residual;
  if (residual) {
    check_strided("residual", *residual, dtype, sizes);
    dense_residual = residual->contiguous();
  }
  const auto run = [&](auto type) {
    using T = decltype(type);
    const FusedOps<T> fused{data_or_null<T>(norm), static_cast<float>(epsilon),
                            data_or_null<T>(dense_residual), is_gated, rows_in_groups};
    multiply_by(output, rows, weight, scales, bias, fused, padded_inputs);
  };
  dtype == at::kBFloat16 ? run(BFloat16()) : run(float());
  return output;
}

}  // namespace
