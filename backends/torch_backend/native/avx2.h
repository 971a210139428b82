// Vectors of 16 lanes, for processors with AVX2 and FMA: pairs of vectors of 8 lanes. The functions are those
// of avx512.h, which says what they return.

#pragma once

namespace {

struct Floats {
  __m256 low;
  __m256 high;
};

struct Ints {
  __m256i low;
  __m256i high;
};

struct Lanes {  // all bits of a lane's 32 are set, or none
  __m256i low;
  __m256i high;
};

// There are 16 registers, and two of them make a vector.
template <int64_t rows>
constexpr int64_t kVectorsAtOnce = rows == 1   ? 4
                                   : rows == 2 ? 2
                                               : 1;

template <typename T>  // pairs of bfloat16 need registers for both numbers
constexpr int64_t kRowsAtOnce = std::is_same_v<T, BFloat16> ? 4 : 6;

inline Floats operator+(Floats left, Floats right) { return {left.low + right.low, left.high + right.high}; }
inline Floats operator-(Floats left, Floats right) { return {left.low - right.low, left.high - right.high}; }
inline Floats operator*(Floats left, Floats right) { return {left.low * right.low, left.high * right.high}; }
inline Floats operator/(Floats left, Floats right) { return {left.low / right.low, left.high / right.high}; }
inline Floats operator-(Floats values) { return {-values.low, -values.high}; }

inline Floats broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Ints broadcast(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }

inline Ints operator+(Ints left, Ints right) {
  return {_mm256_add_epi32(left.low, right.low), _mm256_add_epi32(left.high, right.high)};
}
inline Ints operator-(Ints left, Ints right) {
  return {_mm256_sub_epi32(left.low, right.low), _mm256_sub_epi32(left.high, right.high)};
}
inline Ints operator&(Ints left, Ints right) {
  return {_mm256_and_si256(left.low, right.low), _mm256_and_si256(left.high, right.high)};
}
inline Ints operator|(Ints left, Ints right) {
  return {_mm256_or_si256(left.low, right.low), _mm256_or_si256(left.high, right.high)};
}

inline Floats fmadd(Floats left, Floats right, Floats addend) {
  return {_mm256_fmadd_ps(left.low, right.low, addend.low),
          _mm256_fmadd_ps(left.high, right.high, addend.high)};
}
inline Floats fmsub(Floats left, Floats right, Floats amount) {
  return {_mm256_fmsub_ps(left.low, right.low, amount.low),
          _mm256_fmsub_ps(left.high, right.high, amount.high)};
}
inline Floats fnmadd(Floats left, Floats right, Floats addend) {
  return {_mm256_fnmadd_ps(left.low, right.low, addend.low),
          _mm256_fnmadd_ps(left.high, right.high, addend.high)};
}

inline Floats max(Floats left, Floats right) {
  return {_mm256_max_ps(left.low, right.low), _mm256_max_ps(left.high, right.high)};
}
inline Floats min(Floats left, Floats right) {
  return {_mm256_min_ps(left.low, right.low), _mm256_min_ps(left.high, right.high)};
}
inline Ints max(Ints left, Ints right) {
  return {_mm256_max_epi32(left.low, right.low), _mm256_max_epi32(left.high, right.high)};
}

inline Floats exp(Floats values) {
  using Half = at::vec::Vectorized<float>;
  return {Half(values.low).exp(), Half(values.high).exp()};
}
inline Floats tanh(Floats values) {
  using Half = at::vec::Vectorized<float>;
  return {Half(values.low).tanh(), Half(values.high).tanh()};
}

// Return `combine` of all lanes, halves first.
template <typename Combine>
inline float reduce(Floats values, const Combine& combine) {
  const __m256 eight = combine(values.low, values.high);
  const __m128 four = combine(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = combine(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(combine(two, _mm_movehdup_ps(two)));
}

inline float total_of(Floats values) {
  return reduce(values, [](auto left, auto right) { return left + right; });
}
inline float largest_of(Floats values) {
  return reduce(values, [](auto left, auto right) { return left > right ? left : right; });
}
inline float smallest_of(Floats values) {
  return reduce(values, [](auto left, auto right) { return left < right ? left : right; });
}

template <typename Combine>
inline int32_t reduce(Ints values, const Combine& combine) {
  alignas(64) int32_t lanes[16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), values.low);
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes + 8), values.high);
  return std::accumulate(lanes + 1, lanes + 16, lanes[0], combine);
}

inline int32_t total_of(Ints values) {
  return reduce(values, [](uint32_t left, uint32_t right) { return static_cast<int32_t>(left + right); });
}
inline int32_t largest_of(Ints values) {
  return reduce(values, [](int32_t left, int32_t right) { return std::max(left, right); });
}

inline Lanes all_lanes() { return {_mm256_set1_epi32(-1), _mm256_set1_epi32(-1)}; }
inline Lanes no_lanes() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }

inline Lanes first_lanes(int64_t count) {
  const __m256i end = _mm256_set1_epi32(static_cast<int32_t>(std::min<int64_t>(count, 16)));
  return {_mm256_cmpgt_epi32(end, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
          _mm256_cmpgt_epi32(end, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}

inline Lanes operator&(Lanes left, Lanes right) {
  return {_mm256_and_si256(left.low, right.low), _mm256_and_si256(left.high, right.high)};
}
inline Lanes without(Lanes lanes, Lanes others) {
  return {_mm256_andnot_si256(others.low, lanes.low), _mm256_andnot_si256(others.high, lanes.high)};
}

inline uint32_t bits(Lanes lanes) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes.low))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes.high))) << 8;
}
inline bool any(Lanes lanes) { return bits(lanes) != 0; }
inline bool all(Lanes lanes) { return bits(lanes) == 0xffff; }

template <int comparison>
inline Lanes compare(Floats left, Floats right) {
  return {_mm256_castps_si256(_mm256_cmp_ps(left.low, right.low, comparison)),
          _mm256_castps_si256(_mm256_cmp_ps(left.high, right.high, comparison))};
}

inline Lanes greater(Floats left, Floats right) { return compare<_CMP_GT_OQ>(left, right); }
inline Lanes at_least(Floats left, Floats right) { return compare<_CMP_GE_OQ>(left, right); }
inline Lanes are_numbers(Floats values) { return compare<_CMP_ORD_Q>(values, values); }
inline Lanes greater(Ints left, Ints right) {
  return {_mm256_cmpgt_epi32(left.low, right.low), _mm256_cmpgt_epi32(left.high, right.high)};
}
inline Lanes at_least(Ints left, Ints right) { return without(all_lanes(), greater(right, left)); }

inline Floats select(Lanes lanes, Floats values, Floats others) {
  return {_mm256_blendv_ps(others.low, values.low, _mm256_castsi256_ps(lanes.low)),
          _mm256_blendv_ps(others.high, values.high, _mm256_castsi256_ps(lanes.high))};
}
inline Floats keep(Lanes lanes, Floats values) {
  return {_mm256_and_ps(values.low, _mm256_castsi256_ps(lanes.low)),
          _mm256_and_ps(values.high, _mm256_castsi256_ps(lanes.high))};
}

inline float largest_of(Lanes lanes, Floats values) {
  return largest_of(select(lanes, values, broadcast(-std::numeric_limits<float>::infinity())));
}

inline Ints as_ints(Floats values) {
  return {_mm256_castps_si256(values.low), _mm256_castps_si256(values.high)};
}
inline Floats as_floats(Ints bits) { return {_mm256_castsi256_ps(bits.low), _mm256_castsi256_ps(bits.high)}; }
inline Ints to_ints(Floats values) {
  return {_mm256_cvtps_epi32(values.low), _mm256_cvtps_epi32(values.high)};
}
inline Floats to_floats(Ints integers) {
  return {_mm256_cvtepi32_ps(integers.low), _mm256_cvtepi32_ps(integers.high)};
}

template <int count>
inline Ints shift_left(Ints integers) {
  return {_mm256_slli_epi32(integers.low, count), _mm256_slli_epi32(integers.high, count)};
}

template <int count>
inline Ints shift_right(Ints integers) {
  return {_mm256_srli_epi32(integers.low, count), _mm256_srli_epi32(integers.high, count)};
}

inline Floats nearest(Floats values) {
  constexpr int kRounding = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(values.low, kRounding), _mm256_round_ps(values.high, kRounding)};
}

// The power is made of its exponent's bits: above 2^127 it is 2^127. Below 2^-126 the result is 0, of NaN
// too.
inline Floats scale_by_powers(Floats values, Floats exponents) {
  const Floats in_range = max(min(exponents, broadcast(127.0f)), broadcast(-127.0f));
  const Floats scaled = values * as_floats(shift_left<23>(to_ints(in_range) + broadcast(127)));
  return keep(without(all_lanes(), greater(broadcast(-126.0f), exponents)), scaled);
}

inline Floats widen(__m256i numbers) {
  const Ints halves{_mm256_cvtepu16_epi32(_mm256_castsi256_si128(numbers)),
                    _mm256_cvtepu16_epi32(_mm256_extracti128_si256(numbers, 1))};
  return as_floats(shift_left<16>(halves));
}

// Return the bits of the nearest bfloat16, in each lane's upper half. The lower half holds anything.
inline Ints nearest_bfloat16(Floats values) {
  const Ints bits = as_ints(values);
  const Ints is_odd = shift_right<16>(bits) & broadcast(1);
  const Ints nearest = bits + broadcast(0x7fff) + is_odd;
  // Rounding could turn a NaN into an infinity.
  return as_ints(select(are_numbers(values), as_floats(nearest), as_floats(broadcast(0x7fc00000))));
}

inline __m256i narrow(Floats values) {
  const Ints halves = shift_right<16>(nearest_bfloat16(values));
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(halves.low, halves.high), 0xd8);
}

inline Ints narrow(Floats high, Floats low) { return {narrow(low), narrow(high)}; }

struct PairOperand {
  Floats evens;
  Floats odds;
};

inline PairOperand as_pairs(Ints bits) {
  return {as_floats(shift_left<16>(bits)), as_floats(bits & broadcast(static_cast<int32_t>(0xffff0000)))};
}

inline Floats add_pairs(Floats sums, const PairOperand& left, const PairOperand& right, BFloat16) {
  return fmadd(left.evens, right.evens, fmadd(left.odds, right.odds, sums));
}

inline Ints paired(Floats evens, Floats odds) {
  const Ints upper = broadcast(static_cast<int32_t>(0xffff0000));
  return shift_right<16>(nearest_bfloat16(evens)) | (nearest_bfloat16(odds) & upper);
}

inline Ints add_pairs(Ints sums, Ints left, Ints right) {
  return {_mm256_add_epi32(sums.low, _mm256_madd_epi16(left.low, right.low)),
          _mm256_add_epi32(sums.high, _mm256_madd_epi16(left.high, right.high))};
}

inline __m256i add_fours(__m256i sums, __m256i left, __m256i right) {
  const __m256i pairs = _mm256_maddubs_epi16(left, right);
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Ints add_fours(Ints sums, Ints left, Ints right) {
  return {add_fours(sums.low, left.low, right.low), add_fours(sums.high, left.high, right.high)};
}

constexpr bool kSubtractsZeroPoint = true;

// The instruction adds two products in 16 bits, which would overflow for weights above 128. Without their
// zero point they have signs, which go to the other operand.
inline __m256i add_weights(__m256i sums, __m256i weights, __m256i row) {
  const __m256i centred = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
  return add_fours(sums, _mm256_abs_epi8(centred), _mm256_sign_epi8(row, centred));
}
inline Ints add_weights(Ints sums, Ints weights, Ints row) {
  return {add_weights(sums.low, weights.low, row.low), add_weights(sums.high, weights.high, row.high)};
}

// Lanes of 16 bits hold the sums of pairs: each of them is at most 2 x 15 x 127, and of eight at most 30,480.
constexpr int64_t kMaxLevelInputs = 32;

inline Ints add_levels(Ints sums, Ints levels, Ints row) {
  return {_mm256_add_epi16(sums.low, _mm256_maddubs_epi16(levels.low, row.low)),
          _mm256_add_epi16(sums.high, _mm256_maddubs_epi16(levels.high, row.high))};
}
inline Ints level_totals(Ints sums) { return add_pairs(Ints{}, sums, broadcast(0x00010001)); }

inline Ints load_bits(const void* source) {
  const auto* halves = static_cast<const __m256i*>(source);
  return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline void store_bits(void* target, Ints bits) {
  auto* halves = static_cast<__m256i*>(target);
  _mm256_storeu_si256(halves, bits.low);
  _mm256_storeu_si256(halves + 1, bits.high);
}
inline void store_bits(void* target, Ints bits, Lanes lanes) {
  if (all(lanes)) return store_bits(target, bits);
  auto* integers = static_cast<int32_t*>(target);
  _mm256_maskstore_epi32(integers, lanes.low, bits.low);
  _mm256_maskstore_epi32(integers + 8, lanes.high, bits.high);
}

inline void store_apart(BFloat16* target, int64_t stride, Ints bits, Lanes lanes) {
  int32_t all[16];
  store_bits(all, bits);
  for (int64_t i = 0; i < std::popcount(::bits(lanes)); ++i) {
    std::memcpy(target + i * stride, all + i, sizeof(int32_t));
  }
}

inline Floats load(const float* source) { return {_mm256_loadu_ps(source), _mm256_loadu_ps(source + 8)}; }
inline Floats load(const BFloat16* source) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
}
inline Ints load_bytes(const uint8_t* source) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_bsrli_si128(bytes, 8))};
}
inline Floats load(const uint8_t* source) { return to_floats(load_bytes(source)); }
inline Floats load(const int8_t* source) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return to_floats(Ints{_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_bsrli_si128(bytes, 8))});
}

inline PairOperand load_as_pairs(const int8_t* source) {
  const auto* halves = reinterpret_cast<const __m128i*>(source);
  const Ints pairs{_mm256_cvtepi16_epi32(_mm_loadu_si128(halves)),
                   _mm256_cvtepi16_epi32(_mm_loadu_si128(halves + 1))};
  const Ints evens = shift_left<24>(pairs);
  return {to_floats({_mm256_srai_epi32(evens.low, 24), _mm256_srai_epi32(evens.high, 24)}),
          to_floats({_mm256_srai_epi32(pairs.low, 8), _mm256_srai_epi32(pairs.high, 8)})};
}

// Numbers up to 127 are exact in bfloat16: their lower bits in float32 are zeros.
inline Ints load_as_bfloat16(const int8_t* source) {
  const PairOperand pairs = load_as_pairs(source);
  return shift_right<16>(as_ints(pairs.evens)) | as_ints(pairs.odds);
}

// No instruction loads or stores some of several bytes or halves, so these are copied. `lanes` are the first.
template <typename T, typename Load>
inline auto load_some(const T* source, Lanes lanes, const Load& load_all) {
  if (all(lanes)) return load_all(source);
  T copy[16] = {};
  std::memcpy(copy, source, std::popcount(bits(lanes)) * sizeof(T));
  return load_all(static_cast<const T*>(copy));
}

inline Floats load(const float* source, Lanes lanes) {
  return {_mm256_maskload_ps(source, lanes.low), _mm256_maskload_ps(source + 8, lanes.high)};
}
inline Floats load(const BFloat16* source, Lanes lanes) {
  return load_some(source, lanes, [](const BFloat16* all) { return load(all); });
}
inline Floats load(const int8_t* source, Lanes lanes) {
  return load_some(source, lanes, [](const int8_t* all) { return load(all); });
}
inline Ints load_bytes(const uint8_t* source, Lanes lanes) {
  return load_some(source, lanes, [](const uint8_t* all) { return load_bytes(all); });
}
inline Ints load_halves(const BFloat16* source, Lanes lanes) {
  return shift_right<16>(as_ints(load(source, lanes)));
}

inline void store(float* target, Floats values) {
  _mm256_storeu_ps(target, values.low);
  _mm256_storeu_ps(target + 8, values.high);
}
inline void store(BFloat16* target, Floats values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), narrow(values));
}
inline void store(float* target, Floats values, Lanes lanes) { store_bits(target, as_ints(values), lanes); }
inline void store(BFloat16* target, Floats values, Lanes lanes) {
  if (all(lanes)) return store(target, values);
  const __m256i halves = narrow(values);
  std::memcpy(target, &halves, std::popcount(bits(lanes)) * sizeof(BFloat16));
}

// Return integers as int16 of their order. Those out of range become the nearest in range.
inline __m256i saturated_halves(Ints integers) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(integers.low, integers.high), 0xd8);
}
inline void store(int16_t* target, Ints integers, Lanes lanes) {
  const __m256i halves = saturated_halves(integers);
  std::memcpy(target, &halves, std::popcount(bits(lanes)) * sizeof(int16_t));
}
inline void store(int8_t* target, Ints integers, Lanes lanes) {
  const __m256i halves = saturated_halves(integers);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  if (all(lanes)) return _mm_storeu_si128(reinterpret_cast<__m128i*>(target), bytes);
  std::memcpy(target, &bytes, std::popcount(bits(lanes)));
}

template <bool is_whole, typename T>
inline Ints load_packed(const T* source, int64_t count) {
  constexpr int64_t kElements = 64 / sizeof(T);
  if (is_whole || count >= kElements) return load_bits(source);
  T copy[kElements] = {};
  std::memcpy(copy, source, count * sizeof(T));
  return load_bits(copy);
}

template <bool is_whole>
inline Ints load_packed(const int8_t* source, int64_t count) {
  int8_t copy[32] = {};
  if (!is_whole && count < 32) {
    std::memcpy(copy, source, count);
    source = copy;
  }
  const auto* halves = reinterpret_cast<const __m128i*>(source);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(halves)), _mm256_cvtepi8_epi16(_mm_loadu_si128(halves + 1))};
}

// Return the sums of 8 vectors of 16.
inline __m256 eight_sums(const float (*vectors)[16]) {
  __m256 pairs[4];
  __m256 fours[2];
  const auto half_sums = [](const float (&vector)[16]) {
    return _mm256_load_ps(vector) + _mm256_load_ps(vector + 8);
  };
  UNROLL for (int64_t i = 0; i < 4; ++i) {
    pairs[i] = _mm256_hadd_ps(half_sums(vectors[2 * i]), half_sums(vectors[2 * i + 1]));
  }
  UNROLL for (int64_t i = 0; i < 2; ++i)
    fours[i] = _mm256_hadd_ps(pairs[2 * i], pairs[2 * i + 1]);
  return _mm256_permute2f128_ps(fours[0], fours[1], 0x20) + _mm256_permute2f128_ps(fours[0], fours[1], 0x31);
}
inline Floats horizontal_sums(const float (&vectors)[16][16]) {
  return {eight_sums(vectors), eight_sums(vectors + 8)};
}

struct Doubles {  // 16 lanes of float64
  __m256d quarters[4];
};

inline Doubles broadcast(double value) {
  const __m256d quarter = _mm256_set1_pd(value);
  return {quarter, quarter, quarter, quarter};
}
inline Doubles load(const double* source) {
  return {_mm256_loadu_pd(source), _mm256_loadu_pd(source + 4), _mm256_loadu_pd(source + 8),
          _mm256_loadu_pd(source + 12)};
}
inline void store(double* target, const Doubles& values) {
  UNROLL for (int64_t i = 0; i < 4; ++i)
    _mm256_storeu_pd(target + 4 * i, values.quarters[i]);
}
inline double total_of(const Doubles& values) {
  const auto& quarters = values.quarters;
  const __m256d four = (quarters[0] + quarters[2]) + (quarters[1] + quarters[3]);
  const __m128d two = _mm256_castpd256_pd128(four) + _mm256_extractf128_pd(four, 1);
  return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}
inline Doubles add(const Doubles& sums, const Doubles& values, Lanes lanes) {
  Doubles result;
  UNROLL for (int64_t i = 0; i < 4; ++i) {
    const __m256i half = i < 2 ? lanes.low : lanes.high;
    const __m128i quarter = i % 2 == 0 ? _mm256_castsi256_si128(half) : _mm256_extracti128_si256(half, 1);
    const __m256d mask = _mm256_castsi256_pd(_mm256_cvtepi32_epi64(quarter));
    const __m256d total = sums.quarters[i] + values.quarters[i];
    result.quarters[i] = _mm256_blendv_pd(sums.quarters[i], total, mask);
  }
  return result;
}
inline Doubles exp_in_doubles(Floats values) {
  Doubles result;
  UNROLL for (int64_t i = 0; i < 4; ++i) {
    const __m256 half = i < 2 ? values.low : values.high;
    const __m128 quarter = i % 2 == 0 ? _mm256_castps256_ps128(half) : _mm256_extractf128_ps(half, 1);
    result.quarters[i] = at::vec::Vectorized<double>(_mm256_cvtps_pd(quarter)).exp();
  }
  return result;
}

template <typename T, typename Vector>
inline void compress(T* target, const Vector& values, Lanes lanes) {
  T all[16];
  store(all, values);
  for (uint32_t left = bits(lanes); left != 0; left &= left - 1) *target++ = all[__builtin_ctz(left)];
}

}  // namespace
