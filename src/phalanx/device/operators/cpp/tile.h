// A small float matrix product for matrices that lie in cache.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vector.h"

namespace phalanx {

// Keys that attention takes at a time.
constexpr int64_t kTile = 64;

struct Size {
  int64_t rows, inner, columns;
};

struct Strides {
  int64_t a, b, c;
};

// c[kRows][kColumns * 16] (+)= a[kRows][inner] b[inner][...], held in registers.
template <int kRows, int kColumns>
inline void tile(const float* a, const float* b, float* c, int64_t inner, Strides s, bool add) {
  vfloat total[kRows][kColumns];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) {
      total[i][j] = add ? load(c + i * s.c + j * kLanes) : vfloat{};
    }
  }
  for (int64_t k = 0; k < inner; ++k) {
    vfloat row[kColumns];
    for (int j = 0; j < kColumns; ++j) row[j] = load(b + k * s.b + j * kLanes);
    for (int i = 0; i < kRows; ++i) {
      const float factor = a[i * s.a + k];
      for (int j = 0; j < kColumns; ++j) total[i][j] += factor * row[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kColumns; ++j) store(c + i * s.c + j * kLanes, total[i][j]);
  }
}

template <int kColumns>
inline void tile_rows(
    const float* a, const float* b, float* c, int64_t rows, int64_t inner, Strides s, bool add) {
  constexpr int kRows = 6;
  int64_t i = 0;
  for (; i + kRows <= rows; i += kRows) {
    tile<kRows, kColumns>(a + i * s.a, b, c + i * s.c, inner, s, add);
  }
  for (; i < rows; ++i) tile<1, kColumns>(a + i * s.a, b, c + i * s.c, inner, s, add);
}

// c (+)= a b, with strides between rows; `columns` is a multiple of 16.
inline void multiply(
    const float* a, const float* b, float* c, Size size, Strides s, bool add) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= size.columns; j += 4 * kLanes) {
    tile_rows<4>(a, b + j, c + j, size.rows, size.inner, s, add);
  }
  for (; j < size.columns; j += kLanes) {
    tile_rows<1>(a, b + j, c + j, size.rows, size.inner, s, add);
  }
}

}  // namespace phalanx
