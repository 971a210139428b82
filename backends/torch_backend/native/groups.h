// Weights of 4 bits, in groups of 32 inputs that share a scale and a zero point for each output, and their
// products with rows of int8.

#pragma once

#include "tile.h"

namespace {

constexpr int64_t kGroup = 32;         // inputs of a group; `GROUP` in kernels.py
constexpr int64_t kPerZeroPoint = 16;  // steps of a zero point in a level; `STEPS` in kernels.py
constexpr int64_t kGroupTile = kRowsAtOnce<int8_t>;
constexpr int64_t kUnpackedGroups = 8;  // stay in half of the first-level cache while all rows are multiplied
constexpr int64_t kUnpackedBytes = kGroup * kBlock;  // of a group

// The weights of a group of inputs, for a block of outputs: scale × (level - zero point).
struct Group {
  // Each byte has a level of an input in its low half, and one of the fourth input after it in its high half:
  // [8 inputs, 64, 4].
  uint8_t levels[kUnpackedBytes / 2];
  uint8_t zero_points[kBlock];
  BFloat16 scales[kBlock];
};
static_assert(sizeof(Group) == kUnpackedBytes / 2 + 3 * kBlock);  // `GROUP_BYTES` in kernels.py

template <bool is_high>
inline Ints half_bytes(Ints bytes) {
  return (is_high ? shift_right<4>(bytes) : bytes) & broadcast(0x0f0f0f0f);
}

inline void prefetch_after(const Group* group) {
  const char* ahead = reinterpret_cast<const char*>(group) + kPrefetchDistance;
  UNROLL for (int64_t n = 0; n < int64_t{sizeof(Group)}; n += kCacheLine) {
    _mm_prefetch(ahead + n, _MM_HINT_T1);
  }
}

// Write the levels of a group, one in each byte: [8, 64, 4].
inline void unpack(Level* unpacked, const Group* group) {
  prefetch_after(group);
  for (int64_t n = 0; n < kUnpackedBytes / 2; n += 4 * kBlock) {
    UNROLL for (int64_t v = 0; v < 4 * kBlock; v += kCacheLine) {
      const Ints bytes = load_bits(group->levels + n + v);
      store_bits(unpacked + 2 * n + v, half_bytes<false>(bytes));
      store_bits(unpacked + 2 * n + v + 4 * kBlock, half_bytes<true>(bytes));
    }
  }
}

// Rows of int8. Each of their groups has a scale. Its zero point term is its scale times the sum of its numbers,
// for one step of a weight's zero point.
struct GroupedRows {
  const int8_t* elements;         // [row, input]
  const float* scales;            // [row, group]
  const float* zero_point_terms;  // [row, group]
  int64_t num_groups;             // of a row

  GroupedRows from(int64_t row, int64_t group) const {
    const int64_t first = row * num_groups + group;
    return {elements + first * kGroup, scales + first, zero_point_terms + first, num_groups};
  }
};

// The scales and zero points of a group's outputs.
struct GroupScales {
  Floats scales[kBlockVectors];
  Floats zero_points[kBlockVectors];

  explicit GroupScales(const Group& group) {
    UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) {
      scales[v] = load(group.scales + v * kLanes);
      zero_points[v] = load(group.zero_points + v * kLanes);
    }
  }

  // Return `sum` and the integer products of a row's group.
  Floats add(Floats sum, Ints products, int64_t v, float row_scale, float zero_point_term) const {
    const Floats scaled = to_floats(products) * broadcast(row_scale);
    const Floats values = fnmadd(zero_points[v], broadcast(zero_point_term), scaled);
    return fmadd(values, scales[v], sum);
  }
};

// Write the products [64] of one row with a block. Its levels are unpacked in registers.
inline void multiply_row(float* sums, const GroupedRows& row, const Group* groups) {
  Floats totals[kBlockVectors];
  UNROLL for (int64_t v = 0; v < kBlockVectors; ++v)
    totals[v] = Floats{};
  for (int64_t g = 0; g < row.num_groups; ++g) {
    const Group& group = groups[g];
    prefetch_after(&group);
    Floats products[kBlockVectors];
    UNROLL for (int64_t v = 0; v < kBlockVectors; ++v)
      products[v] = Floats{};
    UNROLL for (int64_t k = 0; k < kGroup; k += 8) {
      const int8_t* input = row.elements + g * kGroup + k;
      constexpr const Level* levels = nullptr;
      UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) {
        const Ints bytes = load_bits(group.levels + k / 2 * kBlock + v * kCacheLine);
        products[v] = multiply_add(products[v], input, half_bytes<false>(bytes), levels);
        products[v] = multiply_add(products[v], input + 4, half_bytes<true>(bytes), levels);
      }
    }
    const GroupScales scales(group);
    UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) {
      totals[v] = scales.add(totals[v], as_ints(products[v]), v, row.scales[g], row.zero_point_terms[g]);
    }
  }
  UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) store(sums + v * kLanes, totals[v]);
}

// Add the products of up to `kGroupTile` rows with unpacked levels. A function of its own: inlined, GCC 12 spills
// its accumulators to memory.
[[gnu::noinline]] inline void multiply_levels(float* products, const int8_t* input, int64_t row_stride,
                                              const Level* levels, int64_t num_inputs, int64_t num_rows) {
  accumulate_rows<false, kGroupTile>(products, input, row_stride, levels, num_inputs, num_rows);
}

// Write the products [row, 64] of all rows with a block. They share levels that are unpacked once.
//
// Batch invariance: a group's integer products are exact, and a row adds its groups in ascending order.
inline void multiply_groups(float* sums, const GroupedRows& rows, const Group* groups, int64_t num_rows) {
  if (num_rows == 1) return multiply_row(sums, rows, groups);
  alignas(64) Level unpacked[kUnpackedGroups * kUnpackedBytes];
  alignas(64) float products[kGroupTile * kBlock];  // int32, as in tile.h
  std::memset(sums, 0, num_rows * kBlock * sizeof(float));
  for (int64_t first = 0; first < rows.num_groups; first += kUnpackedGroups) {
    const int64_t end = std::min(first + kUnpackedGroups, rows.num_groups);
    for (int64_t g = first; g < end; ++g) unpack(unpacked + (g - first) * kUnpackedBytes, groups + g);
    for (int64_t tile = 0; tile < num_rows; tile += kGroupTile) {
      const int64_t tile_rows = std::min(kGroupTile, num_rows - tile);
      for (int64_t g = first; g < end; ++g) {
        const GroupedRows input = rows.from(tile, g);
        std::memset(products, 0, tile_rows * kBlock * sizeof(float));
        multiply_levels(products, input.elements, rows.num_groups * kGroup,
                        unpacked + (g - first) * kUnpackedBytes, kGroup, tile_rows);
        const GroupScales scales(groups[g]);
        for (int64_t r = 0; r < tile_rows; ++r) {
          float* row_sums = sums + (tile + r) * kBlock;
          const int64_t place = r * rows.num_groups;
          UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) {
            const Ints of_row = load_bits(products + r * kBlock + v * kLanes);
            store(row_sums + v * kLanes, scales.add(load(row_sums + v * kLanes), of_row, v, input.scales[place],
                                                    input.zero_point_terms[place]));
          }
        }
      }
    }
  }
}

}  // namespace
