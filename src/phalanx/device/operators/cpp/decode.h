// Attention of one token over its row's pages: each key and value is read once for all query heads
// that share it, page by page in the order in which they lie in memory.
#pragma once

#include <limits>
#include <vector>

#include "paged_cache.h"
#include "vector.h"

namespace phalanx {

// A run of one head's keys or values: the first one, how many, and how far ahead the next run lies.
template <typename T>
struct Run {
  const T* data;
  int64_t count, ahead;
};

// Scores of a run of keys for kHeads query heads; q is [kHeads][head_dim].
template <int kHeads, typename T>
inline void score_page(
    const PagedCache<T>& cache, const float* q, Run<T> run, float* scores, int64_t stride) {
  const T* keys = run.data;
  for (int64_t j = 0; j < run.count; ++j, keys += cache.token_stride()) {
    fetch(keys + run.ahead, cache.head_dim);
    vfloat total[kHeads] = {};
    for (int64_t d = 0; d < cache.head_dim; d += kLanes) {
      const vfloat k = load(keys + d);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) total[h] += load(q + h * cache.head_dim + d) * k;
    }
#pragma GCC unroll 4
    for (int h = 0; h < kHeads; ++h) scores[h * stride + j] = sum(total[h]);
  }
}

// out[kHeads][head_dim] += weights times a run of values.
template <int kHeads, int kParts, typename T>
inline void mix_part(
    const PagedCache<T>& cache, const float* weights, int64_t stride, Run<T> run, float* out) {
  vfloat total[kHeads][kParts];
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      total[h][part] = load(out + h * cache.head_dim + part * kLanes);
    }
  }
  const T* values = run.data;
  for (int64_t j = 0; j < run.count; ++j, values += cache.token_stride()) {
    fetch(values + run.ahead, kParts * kLanes);
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      const vfloat v = load(values + part * kLanes);
#pragma GCC unroll 4
      for (int h = 0; h < kHeads; ++h) total[h][part] += weights[h * stride + j] * v;
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < kHeads; ++h) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) {
      store(out + h * cache.head_dim + part * kLanes, total[h][part]);
    }
  }
}

template <int kHeads, typename T>
inline void mix_page(
    const PagedCache<T>& cache, const float* weights, int64_t stride, Run<T> run, float* out) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= cache.head_dim; d += 4 * kLanes) {
    mix_part<kHeads, 4>(cache, weights, stride, {run.data + d, run.count, run.ahead}, out + d);
  }
  for (; d < cache.head_dim; d += kLanes) {
    mix_part<kHeads, 1>(cache, weights, stride, {run.data + d, run.count, run.ahead}, out + d);
  }
}

// Turns scores into weights that sum to one; lanes beyond `length` are scratch.
inline void softmax(float* scores, int64_t length, int64_t padded) {
  std::fill(scores + length, scores + padded, -std::numeric_limits<float>::infinity());
  vfloat top = load(scores);
  for (int64_t i = kLanes; i < padded; i += kLanes) top = maximum(top, load(scores + i));
  const float most = largest(top);
  vfloat total{};
  for (int64_t i = 0; i < padded; i += kLanes) {
    const vfloat e = exponential(load(scores + i) - most);
    total += e;
    store(scores + i, e);
  }
  const float inverse = 1.0f / sum(total);
  for (int64_t i = 0; i < padded; i += kLanes) store(scores + i, load(scores + i) * inverse);
}

// Calls visit.operator()<n>(first) for `count` heads in blocks of n <= 4.
template <typename Visit>
inline void for_heads(int64_t count, Visit visit) {
  int64_t first = 0;
  for (; first + 4 <= count; first += 4) visit.template operator()<4>(first);
  if (count - first == 3) visit.template operator()<3>(first);
  if (count - first == 2) visit.template operator()<2>(first);
  if (count - first == 1) visit.template operator()<1>(first);
}

// Key-value heads [first_head, last_head) of the token `token`, which sees `length` tokens.
template <typename T>
void decode(
    const Problem<T>& p, int64_t token, const int32_t* pages, int64_t length, int64_t first_head,
    int64_t last_head, std::vector<float>& scratch) {
  const PagedCache<T>& cache = p.cache;
  const int64_t group = p.group(), head_dim = cache.head_dim;
  const int64_t lines = (last_head - first_head) * group;
  const int64_t padded = (length + kLanes - 1) / kLanes * kLanes;
  scratch.resize(lines * (2 * head_dim + padded));
  float* queries = scratch.data();
  float* out = queries + lines * head_dim;
  float* scores = out + lines * head_dim;
  const int64_t first_line = token * p.num_heads + first_head * group;
  for (int64_t i = 0; i < lines * head_dim; i += kLanes) {
    store(queries + i, load(p.q + first_line * head_dim + i) * p.scale);
    store(out + i, vfloat{});
  }
  cache.for_pages(pages, 0, length, [&](int64_t first, int64_t count, int64_t offset) {
    const int64_t ahead = cache.ahead(pages, first, length);
    for (int64_t head = first_head; head < last_head; ++head) {
      const Run<T> run{cache.keys + offset + head * head_dim, count, ahead};
      for_heads(group, [&]<int kHeads>(int64_t g) {
        const int64_t line = (head - first_head) * group + g;
        score_page<kHeads>(
            cache, queries + line * head_dim, run, scores + line * padded + first, padded);
      });
    }
  });
  for (int64_t line = 0; line < lines; ++line) softmax(scores + line * padded, length, padded);
  cache.for_pages(pages, 0, length, [&](int64_t first, int64_t count, int64_t offset) {
    const int64_t ahead = cache.ahead(pages, first, length);
    for (int64_t head = first_head; head < last_head; ++head) {
      const Run<T> run{cache.values + offset + head * head_dim, count, ahead};
      for_heads(group, [&]<int kHeads>(int64_t g) {
        const int64_t line = (head - first_head) * group + g;
        mix_page<kHeads>(
            cache, scores + line * padded + first, padded, run, out + line * head_dim);
      });
    }
  });
  T* to = p.out + first_line * head_dim;
  for (int64_t i = 0; i < lines * head_dim; i += kLanes) store(to + i, load(out + i));
}

}  // namespace phalanx
