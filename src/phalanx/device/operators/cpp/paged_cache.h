// A paged key-value cache as attention reads it, and one call's whole problem.
#pragma once

#include <algorithm>
#include <cstdint>

namespace phalanx {

template <typename T>
struct PagedCache {
  const T *keys, *values;
  int64_t page_size, num_kv_heads, head_dim;

  int64_t token_stride() const { return num_kv_heads * head_dim; }

  // Visits a row's tokens [begin, end) in runs that lie one after another: visit(first token,
  // count, offset of the first token's first head).
  template <typename Visit>
  void for_pages(const int32_t* pages, int64_t begin, int64_t end, Visit visit) const {
    for (int64_t i = begin; i < end;) {
      const int64_t within = i % page_size, count = std::min(end - i, page_size - within);
      visit(i, count, (pages[i / page_size] * page_size + within) * token_stride());
      i += count;
    }
  }
};

template <typename T>
struct Problem {
  PagedCache<T> cache;
  const T* q;
  T* out;
  int64_t num_heads;
  float scale;

  int64_t group() const { return num_heads / cache.num_kv_heads; }
};

}  // namespace phalanx
