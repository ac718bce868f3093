// Sixteen floats at a time, from float or bfloat16 storage, in the compiler's own vector types: one
// source for AVX-512, AVX2 and NEON, with intrinsics where compilers do badly without. Arithmetic
// is float throughout; stores round to nearest even.
#pragma once

#include <c10/util/BFloat16.h>

#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace phalanx {

constexpr int64_t kLanes = 16;

typedef float vfloat __attribute__((vector_size(64)));
typedef int32_t vint __attribute__((vector_size(64)));
typedef uint32_t vuint __attribute__((vector_size(64)));
typedef uint16_t vhalf __attribute__((vector_size(32)));

inline vfloat load(const float* from) {
  vfloat value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline vfloat load(const c10::BFloat16* from) {
  vhalf half;
  std::memcpy(&half, from, sizeof(half));
  return (vfloat)(__builtin_convertvector(half, vuint) << 16);
}

inline void store(float* to, vfloat value) { std::memcpy(to, &value, sizeof(value)); }

inline void store(c10::BFloat16* to, vfloat value) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh(value);
  std::memcpy(to, &half, sizeof(half));
#else
  const vuint bits = (vuint)value;
  const vuint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // Rounding up could turn a NaN into infinity, so NaN is stored as the quiet one.
  const vint is_nan = value != value;
  const vuint chosen = (vuint)((is_nan & 0x7fc0) | (~is_nan & (vint)rounded));
  const vhalf half = __builtin_convertvector(chosen, vhalf);
  std::memcpy(to, &half, sizeof(half));
#endif
}

// The last `count` < 16 elements of a row; missing lanes are zero.
template <typename T>
inline vfloat load_part(const T* from, int64_t count) {
  T padded[kLanes] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load(padded);
}

template <typename T>
inline void store_part(T* to, vfloat value, int64_t count) {
  T padded[kLanes];
  store(padded, value);
  std::memcpy(to, padded, count * sizeof(T));
}

inline vfloat splat(float value) { return vfloat{} + value; }

// Of a NaN and a number, both return the second argument.
inline vfloat maximum(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline vfloat minimum(vfloat a, vfloat b) {
#if defined(__AVX512F__)
  return _mm512_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

inline float sum(vfloat value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(value);
#else
  float total = 0;
  for (int64_t i = 0; i < kLanes; ++i) total += value[i];
  return total;
#endif
}

inline float largest(vfloat value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(value);
#else
  float result = value[0];
  for (int64_t i = 1; i < kLanes; ++i) result = value[i] > result ? value[i] : result;
  return result;
#endif
}

// exp(x) to about 2 units in the last place (Cody-Waite reduction, the polynomial of Cephes' expf).
// Below -87.6 the result is exactly 0, above 88 it is clamped to a finite value; NaN stays NaN.
inline vfloat exponential(vfloat x) {
  const vfloat clamped = minimum(splat(88.0f), maximum(splat(-88.0f), x));
  // Adding and taking away 1.5 * 2^23 rounds to a whole number.
  const vfloat whole = (clamped * 1.44269504088896341f + 12582912.0f) - 12582912.0f;
  const vfloat r = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
  vfloat p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const vint exponent = (__builtin_convertvector(whole, vint) + 127) << 23;
  return p * (vfloat)exponent;
}

// Calls visit(offset, count) over `width` elements, with count 16 except for the last.
template <typename Visit>
inline void for_lanes(int64_t width, Visit visit) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) visit(i, kLanes);
  if (i < width) visit(i, width - i);
}

template <typename T>
inline vfloat load_some(const T* from, int64_t count) {
  return count == kLanes ? load(from) : load_part(from, count);
}

template <typename T>
inline void store_some(T* to, vfloat value, int64_t count) {
  if (count == kLanes) {
    store(to, value);
  } else {
    store_part(to, value, count);
  }
}

}  // namespace phalanx
