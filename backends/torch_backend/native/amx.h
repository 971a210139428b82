// The tile of a matrix product on processors with AMX: up to 32 rows by a block of 64 columns, by the
// processor's matrix unit. Weights are packed as in tile.h, which is the layout that the unit reads: for
// attention, a block's queries or their softmax weights.
//
// Batch invariance: a row adds the products of `kTileInputs` inputs at a time, in ascending order, with one
// instruction for any number of rows. In bfloat16 it rounds otherwise than tile.h, so a product uses this for
// all numbers of rows, or for none.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include "tile.h"

namespace {

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
// Rows of float32 have no matrix instruction.
template <typename R>
constexpr bool kHasTiles = !std::is_same_v<R, float>;
#else
template <typename R>
constexpr bool kHasTiles = false;
#endif

constexpr int64_t kTileBytes = 64;  // of a row of a tile
constexpr int64_t kMaxTileRows = 16;
constexpr int64_t kWeightStride = kBlock * 4;  // bytes from a row of weights or sums to the next one
constexpr int64_t kStepBytes = kMaxTileRows * kWeightStride;  // of a block's weights for `kTileInputs`

template <typename R>
constexpr int64_t kTileInputs = kTileBytes / sizeof(R);

// Tiles 0 to 3 are sums, 4 rows, 6 and 7 weights. Tile 5 is the second 16 rows, or weights if there are none.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// The tiles of this thread, from their first configuration until the end of its products.
//
// The instructions are written out here and below, since GCC's intrinsics do not say which memory they
// access: it drops or moves the stores before them.
class Tiles {
 public:
  ~Tiles() {
    if constexpr (kHasTiles<BFloat16>) {  // other builds' assemblers may not know the instruction
      if (num_rows_ > 0) asm volatile("tilerelease");
    }
  }

  // Set the tiles' rows for a product of up to 32 rows.
  void configure(int64_t num_rows) {
    if (num_rows == num_rows_) return;
    num_rows_ = num_rows;
    const int64_t first_rows = std::min(num_rows, kMaxTileRows);
    const bool is_wide = num_rows > kMaxTileRows;
    const int64_t second_rows = is_wide ? num_rows - kMaxTileRows : first_rows;
    const int64_t rows[] = {first_rows,   first_rows,  second_rows,
                            second_rows,  first_rows,  is_wide ? second_rows : kMaxTileRows,
                            kMaxTileRows, kMaxTileRows};
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) {
      config.num_rows[tile] = static_cast<uint8_t>(rows[tile]);
      config.row_bytes[tile] = kTileBytes;
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }

 private:
  int64_t num_rows_ = 0;
};

template <int tile>
inline void load_tile(const void* source, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(source), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}

template <int tile>
inline void store_tile(void* target, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(target), "r"(stride), "i"(tile) : "memory");
}

template <int sums, int rows, int weights>
inline void multiply_tiles(const BFloat16*) {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(weights));
}

template <int sums, int rows, int weights>
inline void multiply_tiles(const int8_t*) {  // signed rows, unsigned weights
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(weights));
}

// Whether the processor and the operating system let this process use tiles.
inline bool tiles_are_usable() {
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  static const bool are_usable = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return are_usable;
}

// Return whether a product of this number of inputs can be computed by tiles.
template <typename R>
bool takes_tiles(int64_t num_inputs) {
  return kHasTiles<R> && num_inputs % kTileInputs<R> == 0 && tiles_are_usable();
}

// Prefetch `size` bytes of the weights after the next step's. A tile's rows are apart in memory, and memory
// is faster in its own order: so between a step's tiles, the lines that follow are prefetched in that order.
template <int64_t size>
inline void prefetch_in_order(const char* weights) {
  UNROLL for (int64_t n = 0; n < size; n += kCacheLine) {
    _mm_prefetch(weights + 2 * kStepBytes + n, _MM_HINT_T0);
  }
}

// Load the sums that products are added to, or begin with zeros.
template <int tile, bool from_zero>
inline void begin_sums(const void* sums) {
  if constexpr (from_zero) {
    clear_tile<tile>();
  } else {
    load_tile<tile>(sums, kWeightStride);
  }
}

// Add the products of up to 16 rows with a block.
template <bool from_zero, typename R>
inline void accumulate_narrow(float* sums, const R* input, int64_t row_stride, const char* weights,
                              int64_t num_inputs, bool prefetches) {
  constexpr int64_t kQuarter = kStepBytes / 4;
  char* target = reinterpret_cast<char*>(sums);
  begin_sums<0, from_zero>(target);
  begin_sums<1, from_zero>(target + kTileBytes);
  begin_sums<2, from_zero>(target + 2 * kTileBytes);
  begin_sums<3, from_zero>(target + 3 * kTileBytes);
  for (int64_t k = 0; k < num_inputs; k += kTileInputs<R>, weights += kStepBytes) {
    load_tile<4>(input + k, row_stride * sizeof(R));
    if (prefetches) prefetch_in_order<kQuarter>(weights);
    load_tile<5>(weights, kWeightStride);
    if (prefetches) prefetch_in_order<kQuarter>(weights + kQuarter);
    load_tile<6>(weights + kTileBytes, kWeightStride);
    if (prefetches) prefetch_in_order<kQuarter>(weights + 2 * kQuarter);
    load_tile<7>(weights + 2 * kTileBytes, kWeightStride);
    multiply_tiles<0, 4, 5>(input);
    multiply_tiles<1, 4, 6>(input);
    if (prefetches) prefetch_in_order<kQuarter>(weights + 3 * kQuarter);
    load_tile<5>(weights + 3 * kTileBytes, kWeightStride);
    multiply_tiles<2, 4, 7>(input);
    multiply_tiles<3, 4, 5>(input);
  }
  store_tile<0>(target, kWeightStride);
  store_tile<1>(target + kTileBytes, kWeightStride);
  store_tile<2>(target + 2 * kTileBytes, kWeightStride);
  store_tile<3>(target + 3 * kTileBytes, kWeightStride);
}

// Add the products of 17 to 32 rows with half a block.
template <bool from_zero, typename R>
inline void accumulate_wide(float* sums, const R* input, int64_t row_stride, const char* weights,
                            int64_t num_inputs, bool prefetches) {
  constexpr int64_t kHalf = kStepBytes / 2;
  char* target = reinterpret_cast<char*>(sums);
  char* second = target + kMaxTileRows * kWeightStride;
  const R* second_input = input + kMaxTileRows * row_stride;
  begin_sums<0, from_zero>(target);
  begin_sums<1, from_zero>(target + kTileBytes);
  begin_sums<2, from_zero>(second);
  begin_sums<3, from_zero>(second + kTileBytes);
  for (int64_t k = 0; k < num_inputs; k += kTileInputs<R>, weights += kStepBytes) {
    if (prefetches) prefetch_in_order<kHalf>(weights);
    load_tile<6>(weights, kWeightStride);
    load_tile<4>(input + k, row_stride * sizeof(R));
    multiply_tiles<0, 4, 6>(input);
    if (prefetches) prefetch_in_order<kHalf>(weights + kHalf);
    load_tile<7>(weights + kTileBytes, kWeightStride);
    multiply_tiles<1, 4, 7>(input);
    load_tile<5>(second_input + k, row_stride * sizeof(R));
    multiply_tiles<2, 5, 6>(input);
    multiply_tiles<3, 5, 7>(input);
  }
  store_tile<0>(target, kWeightStride);
  store_tile<1>(target + kTileBytes, kWeightStride);
  store_tile<2>(second, kWeightStride);
  store_tile<3>(second + kTileBytes, kWeightStride);
}

// Add the products of all rows with a block's weights, over `num_inputs` inputs, a multiple of
// `kTileInputs<R>`, to `sums` [row, 64], which are int32 for int8 rows.
//
// - `prefetches`, `from_zero`: as in tile.h.
template <bool prefetches, bool from_zero, typename R>
void accumulate_tiles(Tiles& tiles, float* sums, const R* input, int64_t row_stride, const void* weight,
                      int64_t num_inputs, int64_t num_rows) {
  for (int64_t r = 0; r < num_rows; r += 2 * kMaxTileRows) {
    const int64_t rows = std::min(2 * kMaxTileRows, num_rows - r);
    tiles.configure(rows);
    const bool is_first = prefetches && r == 0;  // the next rows find the weights in the cache
    const char* weights = static_cast<const char*>(weight);
    float* row_sums = sums + r * kBlock;
    const R* row_input = input + r * row_stride;
    if (rows <= kMaxTileRows) {
      accumulate_narrow<from_zero>(row_sums, row_input, row_stride, weights, num_inputs, is_first);
    } else {
      accumulate_wide<from_zero>(row_sums, row_input, row_stride, weights, num_inputs, is_first);
      accumulate_wide<from_zero>(row_sums + kBlock / 2, row_input, row_stride, weights + kWeightStride / 2,
                                 num_inputs, false);
    }
  }
}

}  // namespace
