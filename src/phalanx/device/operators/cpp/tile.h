// A small float matrix product for matrices that lie in cache: columns are vectors, and each element
// of the left matrix is broadcast, so that matrix may lie any way round.
#pragma once

#include <cstdint>

#include "vector.h"

namespace phalanx {

// Columns of a panel; eight rows of one fill the registers.
constexpr int kPanelVectors = 3;
constexpr int64_t kPanel = kPanelVectors * kLanes;

// Element (i, k) is at data[i * row + k * inner].
struct Left {
  const float* data;
  int64_t row, inner;
};

// c[kRows][kPanel] (+)= a[kRows][inner] b[inner][kPanel], the sums held in registers.
template <int kRows>
inline void tile(Left a, const float* b, float* c, int64_t inner, bool add) {
  vfloat total[kRows][kPanelVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kPanelVectors; ++j) {
      total[i][j] = add ? load(c + i * kPanel + j * kLanes) : vfloat{};
    }
  }
  for (int64_t k = 0; k < inner; ++k) {
    vfloat row[kPanelVectors];
#pragma GCC unroll 3
    for (int j = 0; j < kPanelVectors; ++j) row[j] = load(b + k * kPanel + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const vfloat factor = splat(a.data[i * a.row + k * a.inner]);
#pragma GCC unroll 3
      for (int j = 0; j < kPanelVectors; ++j) total[i][j] += factor * row[j];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kPanelVectors; ++j) store(c + i * kPanel + j * kLanes, total[i][j]);
  }
}

// c[rows][kPanel] (+)= a[rows][inner] b[inner][kPanel]; `rows` is a multiple of 8.
inline void multiply(Left a, const float* b, float* c, int64_t rows, int64_t inner, bool add) {
  for (int64_t i = 0; i < rows; i += 8) {
    tile<8>({a.data + i * a.row, a.row, a.inner}, b, c + i * kPanel, inner, add);
  }
}

}  // namespace phalanx
