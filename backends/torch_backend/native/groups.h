// Products of rows of int8, which have a scale for each group of 32 inputs, with weights of 8 bits, and with
// weights of 4 bits, whose groups share a scale and a zero point for each output.

#pragma once

#include "tile.h"

namespace {

constexpr int64_t kGroup = 32;         // inputs of a group; `GROUP` in kernels.py
constexpr int64_t kPerZeroPoint = 16;  // steps of a zero point in a level; `STEPS` in kernels.py
constexpr int64_t kGroupTile = kRowsAtOnce<int8_t>;
constexpr int64_t kUnpackedGroups = 8;  // stay in half of the first-level cache while all rows are multiplied
constexpr int64_t kUnpackedBytes = kGroup * kBlock;  // of a group
static_assert(kGroup <= kMaxLevelInputs);

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
inline void unpack(uint8_t* unpacked, const Group* group) {
  prefetch_after(group);
  for (int64_t n = 0; n < kUnpackedBytes / 2; n += 4 * kBlock) {
    UNROLL for (int64_t v = 0; v < 4 * kBlock; v += kCacheLine) {
      const Ints bytes = load_bits(group->levels + n + v);
      store_bits(unpacked + 2 * n + v, half_bytes<false>(bytes));
      store_bits(unpacked + 2 * n + v + 4 * kBlock, half_bytes<true>(bytes));
    }
  }
}

// Rows of int8. Each of their groups has a scale and a zero point term: for levels, that of one step and
// scaled; for weights of 8 bits, that of their zero point and not scaled.
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

// The scales and zero points of 16 of a group's outputs.
struct GroupScales {
  Floats scales;
  Floats zero_points;

  GroupScales(const Group& group, int64_t v)
      : scales(load(group.scales + v * kLanes)), zero_points(load(group.zero_points + v * kLanes)) {}

  // Return `sum` and the integer products of a row's group.
  Floats add(Floats sum, Ints products, float row_scale, float zero_point_term) const {
    const Floats scaled = to_floats(products) * broadcast(row_scale);
    const Floats values = fnmadd(zero_points, broadcast(zero_point_term), scaled);
    return fmadd(values, scales, sum);
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
    Ints products[kBlockVectors];
    UNROLL for (int64_t v = 0; v < kBlockVectors; ++v)
      products[v] = Ints{};
    UNROLL for (int64_t k = 0; k < kGroup; k += 8) {
      const int8_t* input = row.elements + g * kGroup + k;
      UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) {
        const Ints bytes = load_bits(group.levels + k / 2 * kBlock + v * kCacheLine);
        products[v] = add_levels(products[v], half_bytes<false>(bytes), broadcast_four(input));
        products[v] = add_levels(products[v], half_bytes<true>(bytes), broadcast_four(input + 4));
      }
    }
    UNROLL for (int64_t v = 0; v < kBlockVectors; ++v) {
      const GroupScales scales(group, v);
      totals[v] = scales.add(totals[v], level_totals(products[v]), row.scales[g], row.zero_point_terms[g]);
    }
  }
  UNROLL for (int64_t v = 0; v < kBlockVectors; ++v)
    store(sums + v * kLanes, totals[v]);
}

// Add the products of `rows` rows with a group's unpacked levels to `sums` [row, 64]. A function of its own:
// inlined, GCC 12 spills its accumulators to memory.
template <int64_t rows>
[[gnu::noinline]] void add_group(float* sums, const GroupedRows& input, const uint8_t* levels,
                                 const Group& group) {
  constexpr int64_t count = kVectorsAtOnce<rows>;
  const int64_t row_stride = input.num_groups * kGroup;
  UNROLL for (int64_t first = 0; first < kBlockVectors; first += count) {
    Ints products[rows][count];
    UNROLL for (int64_t r = 0; r < rows; ++r) {
      UNROLL for (int64_t v = 0; v < count; ++v)
        products[r][v] = Ints{};
    }
    for (int64_t k = 0; k < kGroup; k += 4) {
      Ints weights[count];
      UNROLL for (int64_t v = 0; v < count; ++v) {
        weights[v] = load_bits(levels + k * kBlock + (first + v) * kCacheLine);
      }
      UNROLL for (int64_t r = 0; r < rows; ++r) {
        const Ints four = broadcast_four(input.elements + r * row_stride + k);
        UNROLL for (int64_t v = 0; v < count; ++v) {
          products[r][v] = add_levels(products[r][v], weights[v], four);
        }
      }
    }
    UNROLL for (int64_t v = 0; v < count; ++v) {
      const GroupScales scales(group, first + v);
      UNROLL for (int64_t r = 0; r < rows; ++r) {
        float* target = sums + r * kBlock + (first + v) * kLanes;
        const int64_t place = r * input.num_groups;
        store(target, scales.add(load(target), level_totals(products[r][v]), input.scales[place],
                                 input.zero_point_terms[place]));
      }
    }
  }
}

// Do the same for `num_rows` rows, up to `max_rows`. The recursion turns their number into a constant.
template <int64_t max_rows = kGroupTile>
void add_group(float* sums, const GroupedRows& input, const uint8_t* levels, const Group& group,
               int64_t num_rows) {
  if constexpr (max_rows > 1) {
    if (num_rows < max_rows) return add_group<max_rows - 1>(sums, input, levels, group, num_rows);
  }
  add_group<max_rows>(sums, input, levels, group);
}

// Write the products [row, 64] of all rows with a block. They share levels that are unpacked once.
//
// Batch invariance: a group's integer products are exact, and a row adds its groups in ascending order.
inline void multiply_groups(float* sums, const GroupedRows& rows, const Group* groups, int64_t num_rows) {
  if (num_rows == 1) return multiply_row(sums, rows, groups);
  alignas(64) uint8_t unpacked[kUnpackedGroups * kUnpackedBytes];
  std::memset(sums, 0, num_rows * kBlock * sizeof(float));
  for (int64_t first = 0; first < rows.num_groups; first += kUnpackedGroups) {
    const int64_t end = std::min(first + kUnpackedGroups, rows.num_groups);
    for (int64_t g = first; g < end; ++g) unpack(unpacked + (g - first) * kUnpackedBytes, groups + g);
    for (int64_t tile = 0; tile < num_rows; tile += kGroupTile) {
      const int64_t tile_rows = std::min(kGroupTile, num_rows - tile);
      for (int64_t g = first; g < end; ++g) {
        add_group(sums + tile * kBlock, rows.from(tile, g), unpacked + (g - first) * kUnpackedBytes,
                  groups[g], tile_rows);
      }
    }
  }
}

// Add the products of `rows` rows with a group's weights of 8 bits to `sums` [row, 64].
template <int64_t rows>
[[gnu::noinline]] void add_group(float* sums, const GroupedRows& input, const uint8_t* weights) {
  constexpr int64_t count = kVectorsAtOnce<rows>;
  const int64_t row_stride = input.num_groups * kGroup;
  UNROLL for (int64_t first = 0; first < kBlockVectors; first += count) {
    Ints products[rows][count];
    UNROLL for (int64_t r = 0; r < rows; ++r) {
      UNROLL for (int64_t v = 0; v < count; ++v)
        products[r][v] = Ints{};
    }
    for (int64_t k = 0; k < kGroup; k += 4) {
      const uint8_t* source = weights + k * kBlock;
      for (int64_t n = 0; first == 0 && n < 4 * kBlock; n += kCacheLine) {
        _mm_prefetch(reinterpret_cast<const char*>(source) + kPrefetchDistance + n, _MM_HINT_T1);
      }
      UNROLL for (int64_t v = 0; v < count; ++v) {
        const Ints bytes = load_bits(source + (first + v) * kCacheLine);
        UNROLL for (int64_t r = 0; r < rows; ++r) {
          const Ints four = broadcast_four(input.elements + r * row_stride + k);
          products[r][v] = add_weights(products[r][v], bytes, four);
        }
      }
    }
    UNROLL for (int64_t r = 0; r < rows; ++r) {
      const int64_t place = r * input.num_groups;
      const Ints zero = broadcast(static_cast<int32_t>(input.zero_point_terms[place]));
      const Floats scale = broadcast(input.scales[place]);
      UNROLL for (int64_t v = 0; v < count; ++v) {
        float* target = sums + r * kBlock + (first + v) * kLanes;
        store(target, fmadd(to_floats(products[r][v] - zero), scale, load(target)));
      }
    }
  }
}

template <int64_t max_rows = kTileRows>
void add_group(float* sums, const GroupedRows& input, const uint8_t* weights, int64_t num_rows) {
  if constexpr (max_rows > 1) {
    if (num_rows < max_rows) return add_group<max_rows - 1>(sums, input, weights, num_rows);
  }
  add_group<max_rows>(sums, input, weights);
}

inline void multiply_groups(float* sums, const GroupedRows& rows, const uint8_t* weights, int64_t num_rows) {
  std::memset(sums, 0, num_rows * kBlock * sizeof(float));
  for (int64_t g = 0; g < rows.num_groups; ++g) {
    for (int64_t tile = 0; tile < num_rows; tile += kTileRows) {
      add_group(sums + tile * kBlock, rows.from(tile, g), weights + g * kUnpackedBytes,
                std::min(kTileRows, num_rows - tile));
    }
  }
}

}  // namespace
