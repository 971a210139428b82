// Vectors of 16 lanes, for processors with AVX-512 and its VNNI. avx2.h has the same for other processors.

#pragma once

namespace {

using Floats = __m512;
typedef uint32_t Ints __attribute__((vector_size(64)));
using Lanes = __mmask16;

// Vectors of a row that a product sums at once, in registers: 16 for 4 rows, with room for weights in 32.
template <int64_t rows>
constexpr int64_t kVectorsAtOnce = 4;

// Rows that a large batch's product sums at once: 24 accumulators, 4 weights and an input fill the registers.
template <typename T>
constexpr int64_t kRowsAtOnce = 6;

inline Floats broadcast(float value) { return _mm512_set1_ps(value); }
inline Ints broadcast(int32_t value) { return (Ints)_mm512_set1_epi32(value); }

// Return `left * right + addend`, and the same with other signs, rounded once.
inline Floats fmadd(Floats left, Floats right, Floats addend) { return _mm512_fmadd_ps(left, right, addend); }
inline Floats fmsub(Floats left, Floats right, Floats amount) { return _mm512_fmsub_ps(left, right, amount); }
inline Floats fnmadd(Floats left, Floats right, Floats addend) {
  return _mm512_fnmadd_ps(left, right, addend);
}

// The second operand is the result if one is NaN.
inline Floats max(Floats left, Floats right) { return _mm512_max_ps(left, right); }
inline Floats min(Floats left, Floats right) { return _mm512_min_ps(left, right); }
inline Ints max(Ints left, Ints right) { return (Ints)_mm512_max_epi32((__m512i)left, (__m512i)right); }

inline Floats exp(Floats values) { return at::vec::Vectorized<float>(values).exp(); }
inline Floats tanh(Floats values) { return at::vec::Vectorized<float>(values).tanh(); }

inline float total_of(Floats values) { return _mm512_reduce_add_ps(values); }
inline int32_t total_of(Ints values) { return _mm512_reduce_add_epi32((__m512i)values); }
inline float largest_of(Floats values) { return _mm512_reduce_max_ps(values); }
inline int32_t largest_of(Ints values) { return _mm512_reduce_max_epi32((__m512i)values); }
inline float largest_of(Lanes lanes, Floats values) { return _mm512_mask_reduce_max_ps(lanes, values); }
inline float smallest_of(Floats values) { return _mm512_reduce_min_ps(values); }

inline Lanes all_lanes() { return 0xffff; }
inline Lanes no_lanes() { return 0; }

// Return the first `count` lanes: all of them from 16 on.
inline Lanes first_lanes(int64_t count) {
  return count < 16 ? static_cast<Lanes>((1u << count) - 1) : all_lanes();
}

inline uint32_t bits(Lanes lanes) { return lanes; }
inline bool any(Lanes lanes) { return lanes != 0; }
inline Lanes without(Lanes lanes, Lanes others) { return static_cast<Lanes>(lanes & ~others); }

inline Lanes greater(Floats left, Floats right) { return _mm512_cmp_ps_mask(left, right, _CMP_GT_OQ); }
inline Lanes at_least(Floats left, Floats right) { return _mm512_cmp_ps_mask(left, right, _CMP_GE_OQ); }
inline Lanes are_numbers(Floats values) { return _mm512_cmp_ps_mask(values, values, _CMP_ORD_Q); }
inline Lanes greater(Ints left, Ints right) { return _mm512_cmpgt_epi32_mask((__m512i)left, (__m512i)right); }
inline Lanes at_least(Ints left, Ints right) {
  return _mm512_cmpge_epi32_mask((__m512i)left, (__m512i)right);
}

// Return `values` in the lanes, and `others` or zeros elsewhere.
inline Floats select(Lanes lanes, Floats values, Floats others) {
  return _mm512_mask_mov_ps(others, lanes, values);
}
inline Floats keep(Lanes lanes, Floats values) { return _mm512_maskz_mov_ps(lanes, values); }

inline Ints as_ints(Floats values) { return (Ints)values; }
inline Floats as_floats(Ints bits) { return (Floats)bits; }
inline Ints to_ints(Floats values) { return (Ints)_mm512_cvtps_epi32(values); }  // to nearest even
inline Floats to_floats(Ints integers) { return _mm512_cvtepi32_ps((__m512i)integers); }

template <int count>
inline Ints shift_left(Ints integers) {
  return (Ints)_mm512_slli_epi32((__m512i)integers, count);
}

template <int count>
inline Ints shift_right(Ints integers) {  // zeros come in from the left
  return (Ints)_mm512_srli_epi32((__m512i)integers, count);
}

inline Floats nearest(Floats values) {
  return _mm512_roundscale_ps(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

// Return `values` times 2^`exponents`, which are whole, or 0 where that is far too small.
inline Floats scale_by_powers(Floats values, Floats exponents) { return _mm512_scalef_ps(values, exponents); }

// A bfloat16 is the upper half of a float32, so loading one is a shift.
inline Floats widen(__m256i numbers) {
  return as_floats(shift_left<16>((Ints)_mm512_cvtepu16_epi32(numbers)));
}

// The bfloat16 instructions, or the same by float32 where the processor lacks them: numbers rounded to
// nearest even, and sums of the products of pairs that share a lane.
#ifdef __AVX512BF16__

inline __m256i narrow(Floats values) { return (__m256i)_mm512_cvtneps_pbh(values); }

inline Ints narrow(Floats high, Floats low) { return (Ints)_mm512_cvtne2ps_pbh(high, low); }

inline Floats add_pairs(Floats sums, Ints left, Ints right, BFloat16) {
  return _mm512_dpbf16_ps(sums, (__m512bh)left, (__m512bh)right);
}

#else

inline __m256i narrow(Floats values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i nearest = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), is_odd);
  // Rounding could turn a NaN into an infinity.
  const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i rounded_bits = _mm512_mask_mov_epi32(nearest, is_nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits, 16));
}

inline Ints narrow(Floats high, Floats low) {
  return (Ints)_mm512_inserti64x4(_mm512_castsi256_si512(narrow(low)), narrow(high), 1);
}

inline Floats add_pairs(Floats sums, Ints left, Ints right, BFloat16) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000));
  const auto odd_numbers = [&](Ints pairs) { return (Floats)_mm512_and_si512((__m512i)pairs, upper); };
  const auto even_numbers = [](Ints pairs) { return as_floats(shift_left<16>(pairs)); };
  const Floats odd = fmadd(odd_numbers(left), odd_numbers(right), sums);
  return fmadd(even_numbers(left), even_numbers(right), odd);
}

#endif

// Pairs of bfloat16, as a product takes them.
using PairOperand = Ints;

inline PairOperand as_pairs(Ints bits) { return bits; }

// Return pairs of bfloat16 that share a lane.
inline Ints paired(Floats evens, Floats odds) {
  // The conversion leaves the evens in the lower half and the odds in the upper: interleave them.
  const __m512i interleave =
      _mm512_set_epi32(0x1f000f, 0x1e000e, 0x1d000d, 0x1c000c, 0x1b000b, 0x1a000a, 0x190009, 0x180008,  //
                       0x170007, 0x160006, 0x150005, 0x140004, 0x130003, 0x120002, 0x110001, 0x100000);
  return (Ints)_mm512_permutexvar_epi16(interleave, (__m512i)narrow(odds, evens));
}

// Sums of products are exact. They are int32 here: of pairs of int16, and of four bytes. `add_fours` takes
// numbers from 0 to 127 on the left, and `add_weights` any weights of uint8.
inline Ints add_pairs(Ints sums, Ints left, Ints right) {
  return (Ints)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)left, (__m512i)right);
}
inline Ints add_fours(Ints sums, Ints left, Ints right) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)left, (__m512i)right);
}

// Whether `add_weights` subtracts the weights' zero point, 128.
constexpr bool kSubtractsZeroPoint = false;

inline Ints add_weights(Ints sums, Ints weights, Ints row) { return add_fours(sums, weights, row); }

// Sums of products with levels, numbers from 0 to 15, over at most `kMaxLevelInputs` inputs. They may have
// fewer bits, until `level_totals` returns them as int32.
constexpr int64_t kMaxLevelInputs = 1 << 16;

inline Ints add_levels(Ints sums, Ints levels, Ints row) { return add_fours(sums, levels, row); }
inline Ints level_totals(Ints sums) { return sums; }

inline Ints load_bits(const void* source) { return (Ints)_mm512_loadu_si512(source); }
inline void store_bits(void* target, Ints bits) { _mm512_storeu_si512(target, (__m512i)bits); }
inline void store_bits(void* target, Ints bits, Lanes lanes) {
  _mm512_mask_storeu_epi32(target, lanes, (__m512i)bits);
}

// Store the lanes' bits `stride` elements apart.
inline void store_apart(BFloat16* target, int64_t stride, Ints bits, Lanes lanes) {
  const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i offsets = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int32_t>(stride)));
  _mm512_mask_i32scatter_epi32(target, lanes, offsets, (__m512i)bits, sizeof(BFloat16));
}

inline Floats load(const float* source) { return _mm512_loadu_ps(source); }
inline Floats load(const BFloat16* source) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
inline Floats load(const int8_t* source) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
}
inline Floats load(const uint8_t* source) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
}

// Load 32 int8 as bfloat16.
inline Ints load_as_bfloat16(const int8_t* source) { return narrow(load(source + 16), load(source)); }
inline PairOperand load_as_pairs(const int8_t* source) { return load_as_bfloat16(source); }

// Lanes that are not loaded are 0.
inline Floats load(const float* source, Lanes lanes) { return _mm512_maskz_loadu_ps(lanes, source); }
inline Floats load(const BFloat16* source, Lanes lanes) {
  return widen(_mm256_maskz_loadu_epi16(lanes, source));
}
inline Floats load(const int8_t* source, Lanes lanes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(lanes, source)));
}
inline Ints load_bytes(const uint8_t* source, Lanes lanes) {
  return (Ints)_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(lanes, source));
}
inline Ints load_halves(const BFloat16* source, Lanes lanes) {
  return (Ints)_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, source));
}

inline void store(float* target, Floats values) { _mm512_storeu_ps(target, values); }
inline void store(BFloat16* target, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), narrow(values));
}
inline void store(float* target, Floats values, Lanes lanes) { _mm512_mask_storeu_ps(target, lanes, values); }
inline void store(BFloat16* target, Floats values, Lanes lanes) {
  _mm256_mask_storeu_epi16(target, lanes, narrow(values));
}

// Store integers of fewer bits. Those out of range become the nearest in range.
inline void store(int8_t* target, Ints integers, Lanes lanes) {
  _mm512_mask_cvtsepi32_storeu_epi8(target, lanes, (__m512i)integers);
}
inline void store(int16_t* target, Ints integers, Lanes lanes) {
  _mm512_mask_cvtsepi32_storeu_epi16(target, lanes, (__m512i)integers);
}

// Load 64 bytes, or 32 bytes of int8 as int16, of which `count` elements are loaded and the others are 0.
// `is_whole`: all are loaded, and no mask is computed.
template <bool is_whole>
inline __mmask32 first_halves(int64_t count) {
  return is_whole || count >= 32 ? 0xffffffffu : (1u << count) - 1;
}

template <bool is_whole>
inline Ints load_packed(const float* source, int64_t count) {
  return (Ints)_mm512_maskz_loadu_epi32(is_whole ? all_lanes() : first_lanes(count), source);
}

template <bool is_whole>
inline Ints load_packed(const BFloat16* source, int64_t count) {
  return (Ints)_mm512_maskz_loadu_epi16(first_halves<is_whole>(count), source);
}

template <bool is_whole>
inline Ints load_packed(const int16_t* source, int64_t count) {
  return (Ints)_mm512_maskz_loadu_epi16(first_halves<is_whole>(count), source);
}

template <bool is_whole>
inline Ints load_packed(const int8_t* source, int64_t count) {
  return (Ints)_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(first_halves<is_whole>(count), source));
}

// Return the sums of 16 vectors, one per lane: a transposition that adds at each step. Each vector is added
// in the same order: neither its lane nor the other vectors change its sum.
inline Floats horizontal_sums(const float (&vectors)[16][16]) {
  __m512 pairs[8];
  __m512 fours[4];
  UNROLL for (int64_t i = 0; i < 8; ++i) {
    const __m512 a = _mm512_load_ps(vectors[2 * i]);
    const __m512 b = _mm512_load_ps(vectors[2 * i + 1]);
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
  UNROLL for (int64_t i = 0; i < 4; ++i) {
    const __m512d a = _mm512_castps_pd(pairs[2 * i]);
    const __m512d b = _mm512_castps_pd(pairs[2 * i + 1]);
    const __m512 low = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
    fours[i] = _mm512_add_ps(low, _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
  const auto add_halves = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  return add_halves(add_halves(fours[0], fours[1]), add_halves(fours[2], fours[3]));
}

// 16 lanes of float64: the lower 8 and the upper 8.
struct Doubles {
  __m512d low;
  __m512d high;
};

inline Doubles broadcast(double value) { return {_mm512_set1_pd(value), _mm512_set1_pd(value)}; }
inline Doubles load(const double* source) { return {_mm512_loadu_pd(source), _mm512_loadu_pd(source + 8)}; }
inline void store(double* target, const Doubles& values) {
  _mm512_storeu_pd(target, values.low);
  _mm512_storeu_pd(target + 8, values.high);
}
inline double total_of(const Doubles& values) {
  return _mm512_reduce_add_pd(_mm512_add_pd(values.low, values.high));
}
inline Doubles add(const Doubles& sums, const Doubles& values, Lanes lanes) {
  return {_mm512_mask_add_pd(sums.low, static_cast<__mmask8>(lanes), sums.low, values.low),
          _mm512_mask_add_pd(sums.high, static_cast<__mmask8>(lanes >> 8), sums.high, values.high)};
}
inline Doubles exp_in_doubles(Floats values) {
  const auto exp_half = [](__m256 half) {
    return __m512d(at::vec::Vectorized<double>(_mm512_cvtps_pd(half)).exp());
  };
  return {exp_half(_mm512_castps512_ps256(values)), exp_half(_mm512_extractf32x8_ps(values, 1))};
}

// Store the values in the lanes side by side. Up to 16 elements are written.
inline void compress(float* target, Floats values, Lanes lanes) {
  store(target, _mm512_maskz_compress_ps(lanes, values));
}
inline void compress(double* target, const Doubles& values, Lanes lanes) {
  const __mmask8 low_lanes = static_cast<__mmask8>(lanes);
  const __mmask8 high_lanes = static_cast<__mmask8>(lanes >> 8);
  _mm512_storeu_pd(target, _mm512_maskz_compress_pd(low_lanes, values.low));
  _mm512_storeu_pd(target + __builtin_popcount(low_lanes), _mm512_maskz_compress_pd(high_lanes, values.high));
}

}  // namespace
