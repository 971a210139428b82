// The two products of a decode step, each of which reads its large operand once, at the memory's rate, and the attention of a prompt, near the
// rate of the processor's products. For x86 with AVX-512 and its bfloat16.
//
// `linear` multiplies a few rows by a weight that lies as oneDNN lays it out, so that decode and prefill share one copy: blocks of 64
// outputs, a block input by input, bfloat16 inputs in pairs; and any number of rows by an int8 weight that lies so. `slot_attention` writes
// each row's new token into its slot and attends over the entries that the row may see; of the others, whole blocks are not read.
// `prompt_attention` attends over entries in the order of their sequence, a tile of queries and a block of entries at a time
// (https://arxiv.org/abs/2205.14135). Every row is summed in float32 in an order that is its own, so that no result depends on the rows
// beside it.

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max.h>
#include <immintrin.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <type_traits>
#include <vector>

namespace {

using at::BFloat16;
using at::Tensor;
using Vec = at::vec::Vectorized<float>;

constexpr int64_t kLanes = 16;       // floats of a vector
constexpr int64_t kVectors = 4;      // vectors of sums for a row and a block
constexpr int64_t kBlock = 64;       // outputs of a weight's block
constexpr int64_t kRows = 4;         // rows whose sums fit the registers
constexpr int64_t kAhead = 4096;     // bytes of int8 weights that are asked for before they are needed
constexpr int64_t kGrain = 1 << 17;  // weights, or cached numbers, that are worth a thread of their own
constexpr float kHidden = -1e30f;    // a bias below it hides its entry

#define UNROLL _Pragma("GCC unroll 16")

inline __m512 load(const float* source) { return _mm512_loadu_ps(source); }

inline __m512 load(const BFloat16* source) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline void store(float* target, __m512 values) { _mm512_storeu_ps(target, values); }

inline void store(BFloat16* target, __m512 values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), (__m256i)_mm512_cvtneps_pbh(values));
}

template <typename T>
constexpr int64_t kPack = sizeof(float) / sizeof(T);  // inputs that lie side by side

template <typename W>
constexpr int64_t kChunk = 32;  // inputs of a block, which stay in the first-level cache until all rows have met them
template <>
constexpr int64_t kChunk<int8_t> = 128;  // more of them, for prefill's many rows

inline __m512 multiply_add(__m512 sums, const float* input, __m512i weights) {
  return _mm512_fmadd_ps(_mm512_set1_ps(*input), _mm512_castsi512_ps(weights), sums);
}

inline __m512 multiply_add(__m512 sums, const BFloat16* input, __m512i weights) {
  int32_t pair;
  std::memcpy(&pair, input, sizeof pair);
  return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)weights);
}

// Load what a block has for one input, or a pair.
template <typename T>
inline void load_weights(__m512i (&weights)[kVectors], const T* source, T*) {
  UNROLL for (int64_t v = 0; v < kVectors; ++v) weights[v] = _mm512_loadu_si512(source + v * kLanes * kPack<T>);
}

inline __m512 load(const int8_t* source) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
}

inline __m512i load_as(const int8_t* source, float) { return _mm512_castps_si512(load(source)); }

inline __m512i load_as(const int8_t* source, BFloat16) { return (__m512i)_mm512_cvtne2ps_pbh(load(source + kLanes), load(source)); }

// Whole numbers, which the inputs' type holds exactly. They are left in `space`, where there is one, for the rows that come after.
template <typename T>
inline void load_weights(__m512i (&weights)[kVectors], const int8_t* source, T* space) {
  UNROLL for (int64_t n = 0; n < kBlock * kPack<T>; n += 64) _mm_prefetch(source + kAhead + n, _MM_HINT_T0);
  UNROLL for (int64_t v = 0; v < kVectors; ++v) {
    weights[v] = load_as(source + v * kLanes * kPack<T>, T());
    if (space != nullptr) _mm512_storeu_si512(space + v * kLanes * kPack<T>, weights[v]);
  }
}

// Add to the sums [row, 64] of `rows` rows what a block's weights from one input on, `num_inputs` of them, make of the rows' inputs. Rows are
// `stride` apart, and the next inputs of a row, as many as a weight packs, are `step` further.
template <int64_t rows, typename T, typename W>
inline void add_chunk(float* sums, const T* input, int64_t stride, const W* weight, int64_t num_inputs, int64_t step, T* space) {
  __m512 held[rows][kVectors];
  UNROLL for (int64_t r = 0; r < rows; ++r) UNROLL for (int64_t v = 0; v < kVectors; ++v) held[r][v] = load(sums + r * kBlock + v * kLanes);
  for (int64_t k = 0; k < num_inputs; k += kPack<T>, input += step) {
    __m512i weights[kVectors];
    load_weights(weights, weight + k * kBlock, space == nullptr ? nullptr : space + k * kBlock);
    UNROLL for (int64_t r = 0; r < rows; ++r) {
      UNROLL for (int64_t v = 0; v < kVectors; ++v) held[r][v] = multiply_add(held[r][v], input + r * stride, weights[v]);
    }
  }
  UNROLL for (int64_t r = 0; r < rows; ++r) UNROLL for (int64_t v = 0; v < kVectors; ++v) store(sums + r * kBlock + v * kLanes, held[r][v]);
}

template <typename T, typename W>
void add_rows(float* sums, const T* input, int64_t stride, const W* weight, int64_t num_inputs, int64_t num_rows,
              int64_t step = kPack<T>, T* space = nullptr) {
  switch (num_rows) {
    case 1: return add_chunk<1>(sums, input, stride, weight, num_inputs, step, space);
    case 2: return add_chunk<2>(sums, input, stride, weight, num_inputs, step, space);
    case 3: return add_chunk<3>(sums, input, stride, weight, num_inputs, step, space);
    default: return add_chunk<kRows>(sums, input, stride, weight, num_inputs, step, space);
  }
}

// What a product reads beside its rows. Int8 weights have scales, one for each output.
template <typename T, typename W>
struct Weights {
  const W* numbers;
  const float* scales;
  const T* bias;  // or none

  Weights from(int64_t output, int64_t inputs) const {
    return {numbers + output * inputs, scales == nullptr ? nullptr : scales + output, bias == nullptr ? nullptr : bias + output};
  }
};

// Write the outputs of one block: `width` of its 64.
template <typename T, typename W>
void multiply_block(T* output, const T* input, const Weights<T, W>& weights, int64_t rows, int64_t inputs, int64_t outputs, int64_t width) {
  thread_local std::vector<float> sums;
  alignas(64) T space[kChunk<W> * kBlock];
  sums.assign(rows * kBlock, 0.0f);
  for (int64_t k = 0; k < inputs; k += kChunk<W>) {
    const W* chunk = weights.numbers + k * kBlock;
    const int64_t num_inputs = std::min(kChunk<W>, inputs - k);
    add_rows(&sums[0], input + k, inputs, chunk, num_inputs, rows, kPack<T>, rows > kRows ? space : nullptr);
    for (int64_t r = kRows; r < rows; r += kRows) {
      float* row = &sums[r * kBlock];
      if constexpr (std::is_same_v<T, W>) {
        add_rows(row, input + r * inputs + k, inputs, chunk, num_inputs, rows - r);
      } else {
        add_rows(row, input + r * inputs + k, inputs, space, num_inputs, rows - r);
      }
    }
  }
  T rounded[kBlock];
  for (int64_t r = 0; r < rows; ++r) {
    float* row = &sums[r * kBlock];
    for (int64_t n = 0; weights.scales != nullptr && n < width; ++n) row[n] *= weights.scales[n];
    for (int64_t n = 0; weights.bias != nullptr && n < width; ++n) row[n] += static_cast<float>(weights.bias[n]);
    UNROLL for (int64_t v = 0; v < kVectors; ++v) store(rounded + v * kLanes, load(row + v * kLanes));
    std::copy_n(rounded, width, output + r * outputs);
  }
}

template <typename T, typename W>
void multiply(Tensor& output, const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scales,
              const std::optional<Tensor>& bias, int64_t inputs, int64_t outputs) {
  const int64_t rows = input.numel() / inputs, size = kBlock * inputs;
  T* to = output.data_ptr<T>();
  const T* from = input.const_data_ptr<T>();
  const Weights<T, W> weights{weight.const_data_ptr<W>(), scales ? scales->const_data_ptr<float>() : nullptr,
                              bias ? bias->const_data_ptr<T>() : nullptr};
  at::parallel_for(0, weight.numel() / size, std::max<int64_t>(1, kGrain / size), [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * kBlock; first < end * kBlock; first += kBlock) {
      multiply_block(to + first, from, weights.from(first, inputs), rows, inputs, outputs, std::min(kBlock, outputs - first));
    }
  });
}

Tensor linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& scales, const std::optional<Tensor>& bias,
              int64_t outputs) {
  const Tensor rows = input.contiguous();
  const int64_t inputs = rows.size(-1);
  TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == (scales ? at::kChar : rows.scalar_type()), "the weight must lie as the rows' type wants it");
  TORCH_CHECK(weight.numel() == (outputs + kBlock - 1) / kBlock * kBlock * inputs, "the weight's size does not fit ", inputs, " inputs");
  std::vector<int64_t> sizes = rows.sizes().vec();
  sizes.back() = outputs;
  Tensor output = at::empty(sizes, rows.options());
  if (rows.scalar_type() == at::kBFloat16) {
    (scales ? multiply<BFloat16, int8_t> : multiply<BFloat16, BFloat16>)(output, rows, weight, scales, bias, inputs, outputs);
  } else {
    (scales ? multiply<float, int8_t> : multiply<float, float>)(output, rows, weight, scales, bias, inputs, outputs);
  }
  return output;
}

// One row and KV head: where its operands lie, and how they are spaced.
template <typename T>
struct Head {
  const T *query, *key, *value;  // [head of the group, width], [entry, width], [entry, width]
  const float* bias;             // [entry]
  const T* sinks;                // [head of the group], or none
  T* output;                     // [head of the group, width]
  int64_t query_stride, group, entries, width, value_width;
  float scaling, softcap;  // no softcap: 0
};

inline __mmask16 first_lanes(int64_t count) { return count < kLanes ? static_cast<__mmask16>((1u << count) - 1) : 0xffff; }

inline __m512 load(const float* source, __mmask16 lanes) { return _mm512_maskz_loadu_ps(lanes, source); }

inline __m512 load(const BFloat16* source, __mmask16 lanes) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, source)), 16));
}

inline void store(float* target, __m512 values, __mmask16 lanes) { _mm512_mask_storeu_ps(target, lanes, values); }

inline void store(BFloat16* target, __m512 values, __mmask16 lanes) {
  _mm256_mask_storeu_epi16(target, lanes, (__m256i)_mm512_cvtneps_pbh(values));
}

// A vector's worth of a head's numbers as they lie, zeros past the end: `kLanes * kPack<T>` of them.
inline __m512i load_packed(const float* source, int64_t count) { return _mm512_maskz_loadu_epi32(first_lanes(count), source); }

inline __m512i load_packed(const BFloat16* source, int64_t count) {
  return _mm512_maskz_loadu_epi16(count < 32 ? (1u << count) - 1 : 0xffffffffu, source);
}

inline __m512 multiply_add(__m512 sums, __m512i left, __m512i right, float) {
  return _mm512_fmadd_ps(_mm512_castsi512_ps(left), _mm512_castsi512_ps(right), sums);
}

inline __m512 multiply_add(__m512 sums, __m512i left, __m512i right, BFloat16) {
  return _mm512_dpbf16_ps(sums, (__m512bh)left, (__m512bh)right);
}

// Call `work` with the number of heads, as a constant, for all of the group, at most `kRows` at a time.
template <typename Work>
inline void for_heads(int64_t group, const Work& work) {
  for (int64_t g = 0; g < group; g += kRows) {
    switch (group - g) {
      case 1: work(std::integral_constant<int64_t, 1>(), g); break;
      case 2: work(std::integral_constant<int64_t, 2>(), g); break;
      case 3: work(std::integral_constant<int64_t, 3>(), g); break;
      default: work(std::integral_constant<int64_t, kRows>(), g);
    }
  }
}

// Return which of 16 entries may be seen, as bits.
inline __mmask16 seen(const float* bias, int64_t count) {
  const __mmask16 lanes = first_lanes(count);
  return _mm512_mask_cmp_ps_mask(lanes, _mm512_maskz_loadu_ps(lanes, bias), _mm512_set1_ps(kHidden), _CMP_GT_OQ);
}

// Write the scores [head, entry] of up to 16 entries, and raise `largest` [head] to the best of each head.
template <typename T>
void score_block(const Head<T>& head, int64_t first, int64_t count, float* scores, float* largest) {
  for_heads(head.group, [&](auto heads, int64_t g) {
    constexpr int64_t tile = decltype(heads)::value;
    alignas(64) float dots[tile][kLanes];
    for (int64_t e = 0; e < count; ++e) {
      __m512 sums[tile];
      UNROLL for (int64_t h = 0; h < tile; ++h) sums[h] = _mm512_setzero_ps();
      for (int64_t d = 0; d < head.width; d += kLanes * kPack<T>) {
        const __m512i key = load_packed(head.key + (first + e) * head.width + d, head.width - d);
        UNROLL for (int64_t h = 0; h < tile; ++h) {
          sums[h] = multiply_add(sums[h], load_packed(head.query + (g + h) * head.query_stride + d, head.width - d), key, T());
        }
      }
      UNROLL for (int64_t h = 0; h < tile; ++h) dots[h][e] = _mm512_reduce_add_ps(sums[h]);
    }
    const __mmask16 lanes = first_lanes(count);
    for (int64_t h = 0; h < tile; ++h) {
      Vec row = Vec(_mm512_maskz_load_ps(lanes, dots[h])) * Vec(head.scaling);
      if (head.softcap > 0) row = Vec(head.softcap) * (row / Vec(head.softcap)).tanh();
      row = row + Vec(_mm512_maskz_loadu_ps(lanes, head.bias + first));
      store(scores + (g + h) * kLanes, row);
      largest[g + h] = std::max(largest[g + h], _mm512_mask_reduce_max_ps(lanes, row));
    }
  });
}

// Turn the scores [head, entry] of up to 16 entries into weights, and add their values to `sums` [head, width].
template <typename T>
void mix_block(const Head<T>& head, int64_t first, int64_t count, float* scores, const float* largest, float* totals, float* sums) {
  const __mmask16 lanes = first_lanes(count);
  for (int64_t g = 0; g < head.group; ++g) {
    float* row = scores + g * kLanes;
    const __m512 weights = _mm512_maskz_mov_ps(lanes, (Vec(load(row)) - Vec(largest[g])).exp());
    totals[g] += _mm512_reduce_add_ps(weights);
    store(row, weights);
  }
  for_heads(head.group, [&](auto heads, int64_t g) {
    constexpr int64_t tile = decltype(heads)::value;
    for (int64_t d = 0; d < head.value_width; d += kLanes) {
      const __mmask16 lanes = first_lanes(head.value_width - d);
      __m512 mixed[tile];
      UNROLL for (int64_t h = 0; h < tile; ++h) mixed[h] = load(sums + (g + h) * head.value_width + d, lanes);
      for (int64_t e = 0; e < count; ++e) {
        const __m512 values = load(head.value + (first + e) * head.value_width + d, lanes);
        UNROLL for (int64_t h = 0; h < tile; ++h) {
          mixed[h] = _mm512_fmadd_ps(_mm512_set1_ps(scores[(g + h) * kLanes + e]), values, mixed[h]);
        }
      }
      UNROLL for (int64_t h = 0; h < tile; ++h) store(sums + (g + h) * head.value_width + d, mixed[h], lanes);
    }
  });
}

template <typename T>
void attend(const Head<T>& head) {
  thread_local std::vector<float> space;
  const int64_t group = head.group, num_blocks = (head.entries + kLanes - 1) / kLanes;
  space.resize(group * (num_blocks * kLanes + head.value_width + 2));
  float *scores = space.data(), *sums = scores + group * num_blocks * kLanes;
  float *largest = sums + group * head.value_width, *totals = largest + group;
  const auto for_blocks = [&](const auto& work) {
    for (int64_t e = 0; e < head.entries; e += kLanes) {
      const int64_t count = std::min(kLanes, head.entries - e);
      if (seen(head.bias + e, count)) work(e, count, scores + e * group);
    }
  };
  for (int64_t g = 0; g < group; ++g) largest[g] = head.sinks == nullptr ? std::numeric_limits<float>::lowest() : static_cast<float>(head.sinks[g]);
  for_blocks([&](int64_t e, int64_t count, float* block) { score_block(head, e, count, block, largest); });
  std::fill_n(sums, group * head.value_width, 0.0f);
  for (int64_t g = 0; g < group; ++g) totals[g] = head.sinks == nullptr ? 0.0f : std::exp(static_cast<float>(head.sinks[g]) - largest[g]);
  for_blocks([&](int64_t e, int64_t count, float* block) { mix_block(head, e, count, block, largest, totals, sums); });
  for (int64_t g = 0; g < group; ++g) {
    const __m512 factor = _mm512_set1_ps(totals[g] > 0 ? 1 / totals[g] : 0.0f);  // a row that sees nothing has no reader
    for (int64_t d = 0; d < head.value_width; d += kLanes) {
      const __mmask16 lanes = first_lanes(head.value_width - d);
      store(head.output + g * head.value_width + d, _mm512_mul_ps(load(sums + g * head.value_width + d, lanes), factor), lanes);
    }
  }
}

template <typename T>
void write_and_attend(Tensor& output, const Tensor& query, const Tensor& key, const Tensor& value, Tensor& keys, Tensor& values,
                      const Tensor& entries, const Tensor& bias, double scaling, double softcap, const std::optional<Tensor>& sinks) {
  const int64_t rows = query.size(0), kv_heads = key.size(1), group = query.size(1) / kv_heads, capacity = keys.size(2);
  const int64_t width = query.size(3), value_width = value.size(3), num_entries = bias.size(2);
  const int64_t* entry = entries.const_data_ptr<int64_t>();
  const int64_t numbers = num_entries * (width + value_width);
  at::parallel_for(0, rows * kv_heads, std::max<int64_t>(1, kGrain / numbers), [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; ++number) {
      const int64_t row = number / kv_heads, kv_head = number % kv_heads, first = kv_head * group;
      T* key_plane = keys.data_ptr<T>() + number * capacity * width;
      T* value_plane = values.data_ptr<T>() + number * capacity * value_width;
      std::copy_n(key.const_data_ptr<T>() + row * key.stride(0) + kv_head * key.stride(1), width, key_plane + entry[row] * width);
      std::copy_n(value.const_data_ptr<T>() + row * value.stride(0) + kv_head * value.stride(1), value_width,
                  value_plane + entry[row] * value_width);
      attend(Head<T>{query.const_data_ptr<T>() + row * query.stride(0) + first * query.stride(1), key_plane, value_plane,
                     bias.const_data_ptr<float>() + row * num_entries, sinks ? sinks->const_data_ptr<T>() + first : nullptr,
                     output.data_ptr<T>() + (row * query.size(1) + first) * value_width, query.stride(1), group, num_entries, width,
                     value_width, static_cast<float>(scaling), static_cast<float>(softcap)});
    }
  });
}

Tensor slot_attention(const Tensor& query, const Tensor& key, const Tensor& value, Tensor& keys, Tensor& values, const Tensor& entries,
                      const Tensor& bias, double scaling, double softcap, const std::optional<Tensor>& sinks) {
  const int64_t rows = query.size(0);
  TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "a head's numbers must lie side by side");
  TORCH_CHECK(keys.is_contiguous() && values.is_contiguous() && entries.is_contiguous() && bias.is_contiguous(), "planes and plan must be whole");
  TORCH_CHECK(rows <= keys.size(0) && bias.size(2) < keys.size(2), "more is read than the slots hold");
  Tensor output = at::empty({rows, 1, query.size(1), value.size(3)}, query.options());
  if (query.scalar_type() == at::kBFloat16) {
    write_and_attend<BFloat16>(output, query, key, value, keys, values, entries, bias, scaling, softcap, sinks);
  } else {
    write_and_attend<float>(output, query, key, value, keys, values, entries, bias, scaling, softcap, sinks);
  }
  return output;
}

// Return 2 to the power of the exponent, 0 far below: a polynomial on [-1/2, 1/2], whose relative error is below 3e-7.
inline __m512 power_of_two(__m512 exponent) {
  const __m512 whole = _mm512_roundscale_ps(exponent, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 part = _mm512_sub_ps(exponent, whole);
  __m512 power = _mm512_set1_ps(1.33813025e-03f);
  power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(9.66636852e-03f));
  power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(5.55038101e-02f));
  power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(2.40223490e-01f));
  power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(6.93147181e-01f));
  power = _mm512_fmadd_ps(power, part, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(power, whole);
}

constexpr int64_t kEntries = 128;      // entries of a block, whose scores stay in the second-level cache
constexpr float kUnseen = -1e30f;      // the score of an entry that a query does not see
constexpr float kSmallest = -1e20f;    // below every score, far above those
constexpr float kLog2e = 1.44269504f;

// A prompt's queries of one head, and the entries that they attend over.
template <typename T>
struct Prompt {
  const T *query, *key;       // [token, width], [entry, width]
  const T* values;            // [entry / pack, value width, pack]
  const int64_t* last_seen;   // [token]: each sees the entries up to this one; -1: none
  T* output;                  // [token, value width]
  int64_t query_stride, key_stride, value_stride, output_stride, tokens, entries, width, value_width, window;  // a query sees `window` entries at most
  float scaling, softcap, sink;
};

// What a thread needs for a tile of 64 queries, which lie side by side in four vectors.
template <typename T>
struct Tile {
  Tensor space;
  T *queries, *weights;          // [width / pack, 64, pack], [128 / pack, 64, pack]
  float *scores, *sums;          // [128, 64], [value width, 64]
  float *largest, *totals;       // [64]: of the scores, in powers of two; and of the weights
  int32_t last_seen[kBlock];

  explicit Tile(int64_t width, int64_t value_width)
      : space(at::empty({kBlock * (width + kEntries + kEntries + value_width + 2)}, at::kFloat)) {
    scores = space.data_ptr<float>();
    sums = scores + kBlock * kEntries;
    largest = sums + kBlock * value_width;
    totals = largest + kBlock;
    queries = reinterpret_cast<T*>(totals + kBlock);
    weights = reinterpret_cast<T*>(totals + kBlock + kBlock * width);
  }
};

// Lay the values [entry, width] of a head out as [entry / 2, width, 2], as their products want them; zeros past the end.
void pair_values(BFloat16* pairs, const BFloat16* values, int64_t stride, int64_t entries, int64_t width) {
  for (int64_t e = 0; e < entries; e += 2, pairs += 2 * width) {
    const BFloat16 *first = values + e * stride, *second = first + stride;
    for (int64_t d = 0; d < width; d += kLanes) {
      const __mmask16 lanes = first_lanes(width - d), others = e + 1 < entries ? lanes : 0;
      const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, first + d));
      const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(others, second + d));
      _mm512_mask_storeu_epi32(pairs + 2 * d, lanes, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
  }
}

template <typename T>
void begin_tile(Tile<T>& tile, const Prompt<T>& prompt, int64_t first, int64_t count) {
  for (int64_t q = 0; q < kBlock; ++q) {
    tile.last_seen[q] = q < count ? static_cast<int32_t>(prompt.last_seen[first + q]) : -1;
    tile.largest[q] = prompt.sink;
    tile.totals[q] = prompt.sink > kSmallest ? 1.0f : 0.0f;
    for (int64_t d = 0; d < prompt.width; ++d) {
      T* place = tile.queries + (d / kPack<T> * kBlock + q) * kPack<T> + d % kPack<T>;
      *place = q < count ? prompt.query[(first + q) * prompt.query_stride + d] : T(0);
    }
  }
  std::fill_n(tile.sums, kBlock * prompt.value_width, 0.0f);
}

// Give the scores of a block their softcap, and make those unseen that a query may not see.
template <typename T>
void mask_scores(Tile<T>& tile, const Prompt<T>& prompt, int64_t block, int64_t count) {
  const Vec scaling(prompt.scaling), softcap(prompt.softcap);
  for (int64_t v = 0; v < kVectors; ++v) {
    const __m512i last = _mm512_loadu_si512(tile.last_seen + v * kLanes);
    for (int64_t e = 0; e < count; ++e) {
      float* place = tile.scores + e * kBlock + v * kLanes;
      __m512 row = load(place);
      if (prompt.softcap > 0) row = softcap * (Vec(row) * scaling / softcap).tanh();
      const __m512i entry = _mm512_set1_epi32(static_cast<int32_t>(block + e));
      const __mmask16 seen = _mm512_cmple_epi32_mask(entry, last) &
                             _mm512_cmpgt_epi32_mask(entry, _mm512_sub_epi32(last, _mm512_set1_epi32(static_cast<int32_t>(prompt.window))));
      store(place, _mm512_mask_mov_ps(_mm512_set1_ps(kUnseen), seen, row));
    }
  }
}

inline void store_weights(float* place, const __m512 (&weights)[1]) { store(place, weights[0]); }

inline void store_weights(BFloat16* place, const __m512 (&weights)[2]) {
  const __m512i first = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(weights[0]));
  const __m512i second = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(weights[1]));
  _mm512_storeu_si512(place, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
}

// Turn a block's scores into weights, and let what was summed before follow when a larger score has come. `count` is a multiple of the pack.
template <typename T>
void weigh(Tile<T>& tile, int64_t count, int64_t value_width, float scaling) {
  const __m512 factor = _mm512_set1_ps(scaling);
  for (int64_t v = 0; v < kVectors; ++v) {
    const float* scores = tile.scores + v * kLanes;
    __m512 largest = _mm512_set1_ps(kSmallest);
    for (int64_t e = 0; e < count; ++e) largest = _mm512_max_ps(largest, load(scores + e * kBlock));
    const __m512 before = load(tile.largest + v * kLanes);
    largest = _mm512_max_ps(_mm512_mul_ps(largest, factor), before);
    const __m512 shrink = power_of_two(_mm512_sub_ps(before, largest));
    __m512 total = _mm512_mul_ps(load(tile.totals + v * kLanes), shrink);
    for (int64_t e = 0; e < count; e += kPack<T>) {
      __m512 weights[kPack<T>];
      UNROLL for (int64_t i = 0; i < kPack<T>; ++i) {
        weights[i] = power_of_two(_mm512_fmsub_ps(load(scores + (e + i) * kBlock), factor, largest));
        total = _mm512_add_ps(total, weights[i]);
      }
      store_weights(tile.weights + e * kBlock + v * kLanes * kPack<T>, weights);
    }
    store(tile.largest + v * kLanes, largest);
    store(tile.totals + v * kLanes, total);
    if (_mm512_cmpneq_ps_mask(shrink, _mm512_set1_ps(1.0f))) {
      for (int64_t d = 0; d < value_width; ++d) {
        float* sums = tile.sums + d * kBlock + v * kLanes;
        store(sums, _mm512_mul_ps(load(sums), shrink));
      }
    }
  }
}

template <typename T>
void end_tile(Tile<T>& tile, const Prompt<T>& prompt, int64_t first, int64_t count) {
  for (int64_t q = 0; q < count; ++q) tile.totals[q] = tile.totals[q] > 0 ? 1 / tile.totals[q] : 0.0f;  // what sees nothing has no reader
  for (int64_t q = 0; q < count; ++q) {
    T* output = prompt.output + (first + q) * prompt.output_stride;
    for (int64_t d = 0; d < prompt.value_width; ++d) output[d] = static_cast<T>(tile.sums[d * kBlock + q] * tile.totals[q]);
  }
}

template <typename T>
void attend_tile(Tile<T>& tile, const Prompt<T>& prompt, int64_t first) {
  const int64_t count = std::min(kBlock, prompt.tokens - first);
  begin_tile(tile, prompt, first, count);
  int64_t lowest = prompt.entries, highest = -1;
  for (int64_t q = 0; q < kBlock; ++q) {
    highest = std::max<int64_t>(highest, tile.last_seen[q]);
    if (tile.last_seen[q] >= 0) lowest = std::min<int64_t>(lowest, tile.last_seen[q]);
  }
  const bool has_idle = *std::min_element(tile.last_seen, tile.last_seen + kBlock) < 0;
  const float scaling = prompt.softcap > 0 ? kLog2e : prompt.scaling * kLog2e;
  const int64_t from = std::max<int64_t>(0, lowest - prompt.window + 1) / kEntries * kEntries;
  for (int64_t block = from; block <= highest; block += kEntries) {
    const int64_t held = std::min(kEntries, prompt.entries - block), whole = (held + kPack<T> - 1) / kPack<T> * kPack<T>;
    std::fill_n(tile.scores, held * kBlock, 0.0f);
    for (int64_t e = 0; e < held; e += kRows) {
      add_rows(tile.scores + e * kBlock, prompt.key + (block + e) * prompt.key_stride, prompt.key_stride, tile.queries, prompt.width, held - e);
    }
    const bool sees_all = !has_idle && block + held - 1 <= lowest && block > highest - prompt.window;
    if (!sees_all || prompt.softcap > 0) mask_scores(tile, prompt, block, held);
    std::fill_n(tile.scores + held * kBlock, (whole - held) * kBlock, kUnseen);
    weigh(tile, whole, prompt.value_width, scaling);
    const T* values = prompt.values + block / kPack<T> * prompt.value_stride;
    for (int64_t d = 0; d < prompt.value_width; d += kRows) {
      add_rows(tile.sums + d * kBlock, values + d * kPack<T>, kPack<T>, tile.weights, whole, prompt.value_width - d, prompt.value_stride);
    }
  }
  end_tile(tile, prompt, first, count);
}

template <typename T>
void attend_prompts(Tensor& output, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& last_seen, int64_t window,
                    double scaling, double softcap, const std::optional<Tensor>& sinks) {
  const int64_t rows = query.size(0), heads = query.size(1), tokens = query.size(2), width = query.size(3);
  const int64_t kv_heads = key.size(1), entries = key.size(2), value_width = value.size(3);
  const int64_t tiles = (tokens + kBlock - 1) / kBlock;
  std::vector<int64_t> held(rows);  // entries up to the last that a row sees: whatever lies behind them is not met
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t* last = last_seen.const_data_ptr<int64_t>() + row * tokens;
    held[row] = *std::max_element(last, last + tokens) + 1;
  }
  Tensor values = value;
  if constexpr (kPack<T> == 2) {
    values = at::empty({rows, kv_heads, (entries + 1) / 2, 2 * value_width}, value.options());
    at::parallel_for(0, rows * kv_heads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t number = begin; number < end; ++number) {
        const int64_t row = number / kv_heads, kv_head = number % kv_heads;
        pair_values(values.data_ptr<T>() + row * values.stride(0) + kv_head * values.stride(1),
                    value.const_data_ptr<T>() + row * value.stride(0) + kv_head * value.stride(1), value.stride(2), held[row], value_width);
      }
    });
  }
  at::parallel_for(0, rows * heads * tiles, 1, [&](int64_t begin, int64_t end) {
    Tile<T> tile(width, value_width);
    for (int64_t number = begin; number < end; ++number) {
      const int64_t row = number / tiles / heads, head = number / tiles % heads, kv_head = head / (heads / kv_heads);
      const Prompt<T> prompt{query.const_data_ptr<T>() + row * query.stride(0) + head * query.stride(1),
                             key.const_data_ptr<T>() + row * key.stride(0) + kv_head * key.stride(1),
                             values.const_data_ptr<T>() + row * values.stride(0) + kv_head * values.stride(1),
                             last_seen.const_data_ptr<int64_t>() + row * tokens,
                             output.data_ptr<T>() + (row * tokens * heads + head) * value_width,
                             query.stride(2), key.stride(2), values.stride(2), heads * value_width, tokens, held[row], width, value_width, window,
                             static_cast<float>(scaling), static_cast<float>(softcap),
                             sinks ? static_cast<float>(sinks->const_data_ptr<T>()[head]) * kLog2e : kSmallest};
      attend_tile(tile, prompt, number % tiles * kBlock);
    }
  });
}

Tensor prompt_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& last_seen, int64_t window, double scaling,
                        double softcap, const std::optional<Tensor>& sinks) {
  TORCH_CHECK(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "a head's numbers must lie side by side");
  TORCH_CHECK(query.size(3) % 2 == 0, "an even width is needed, not ", query.size(3));
  TORCH_CHECK(last_seen.is_contiguous() && last_seen.max().item<int64_t>() < key.size(2), "a plan must be whole, and in the keys");
  Tensor output = at::empty({query.size(0), query.size(2), query.size(1), value.size(3)}, query.options());
  if (query.scalar_type() == at::kBFloat16) {
    attend_prompts<BFloat16>(output, query, key, value, last_seen, window, scaling, softcap, sinks);
  } else {
    attend_prompts<float>(output, query, key, value, last_seen, window, scaling, softcap, sinks);
  }
  return output;
}

}  // namespace

TORCH_LIBRARY_IMPL(snapserve, CPU, library) {
  library.impl("linear", linear);
  library.impl("slot_attention", slot_attention);
  library.impl("prompt_attention", prompt_attention);
}
