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

  // Distance from a token in the page of token `index` to the same place in the row's next page, or
  // 0 if token `end` comes before that. Only the page table knows in which order a row is read, so
  // readers fetch this far ahead.
  int64_t ahead(const int32_t* pages, int64_t index, int64_t end) const {
    const int64_t page = index / page_size;
    if ((page + 1) * page_size >= end) return 0;
    return static_cast<int64_t>(pages[page + 1] - pages[page]) * page_size * token_stride();
  }

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
inline void fetch(const T* from, int64_t count) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < count; i += kLine) __builtin_prefetch(from + i);
}

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
