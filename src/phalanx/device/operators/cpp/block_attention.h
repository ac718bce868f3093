// Attention of many tokens of one row for one key-value head, with a running softmax (Dao et al.,
// FlashAttention, 2022). A line is one token and query head, token by token; matrices are
// transposed, lines side by side in vectors, so that no sum ever crosses a vector.
#pragma once

#include <limits>
#include <vector>

#include "paged_cache.h"
#include "tile.h"
#include "vector.h"

namespace phalanx {

// Keys taken at a time, and lines in one task.
constexpr int64_t kBlockKeys = 64;
constexpr int64_t kBlockLines = 2 * kPanel;

// Lines [first, first + count) of a row whose first token is token `token` of the step; line l sees
// the row's first `visible + l / group` tokens if `causal`, else the first `visible`.
struct LineBlock {
  int64_t token, first, count;
  const int32_t* pages;
  int64_t visible;
  bool causal;
};

template <typename T>
class BlockAttention {
 public:
  explicit BlockAttention(const Problem<T>& p) : p_(p), head_dim_(p.cache.head_dim) {
    const int64_t panel = kBlockLines * head_dim_;
    scratch_.resize(2 * panel + 2 * kBlockKeys * head_dim_ + kPanel * kBlockKeys + 2 * kBlockLines);
    q_ = scratch_.data();
    out_ = q_ + panel;
    keys_ = out_ + panel;
    values_ = keys_ + kBlockKeys * head_dim_;
    scores_ = values_ + kBlockKeys * head_dim_;
    top_ = scores_ + kPanel * kBlockKeys;
    total_ = top_ + kBlockLines;
  }

  void run(const LineBlock& block, int64_t head) {
    const int64_t panels = (block.count + kPanel - 1) / kPanel;
    start(block, head, panels);
    const int64_t end = seen(block, block.count - 1);
    for (int64_t begin = 0; begin < end; begin += kBlockKeys) {
      const int64_t count = gather(block.pages, head, begin, std::min(end, begin + kBlockKeys));
      for (int64_t panel = 0; panel < panels; ++panel) {
        float* q = q_ + panel * kPanel * head_dim_;
        float* out = out_ + panel * kPanel * head_dim_;
        multiply({keys_, head_dim_, 1}, q, scores_, count, head_dim_, false);
        weigh(block, panel, begin, count);
        multiply({values_, 1, head_dim_}, scores_, out, head_dim_, count, true);
      }
    }
    finish(block, head);
  }

 private:
  int64_t seen(const LineBlock& block, int64_t line) const {
    return block.visible + (block.causal ? (block.first + line) / p_.group() : 0);
  }

  int64_t offset(const LineBlock& block, int64_t line, int64_t head) const {
    const int64_t group = p_.group(), row_line = block.first + line;
    const int64_t token = block.token + row_line / group;
    return (token * p_.num_heads + head * group + row_line % group) * head_dim_;
  }

  // Queries become panels of [head_dim][kPanel]; lines that are missing are zero.
  void start(const LineBlock& block, int64_t head, int64_t panels) {
    std::fill(q_, q_ + panels * kPanel * head_dim_, 0.0f);
    std::fill(out_, out_ + panels * kPanel * head_dim_, 0.0f);
    std::fill(top_, top_ + kBlockLines, -std::numeric_limits<float>::infinity());
    std::fill(total_, total_ + kBlockLines, 0.0f);
    for (int64_t line = 0; line < block.count; ++line) {
      const T* from = p_.q + offset(block, line, head);
      float* to = q_ + (line / kPanel) * kPanel * head_dim_ + line % kPanel;
      for (int64_t d = 0; d < head_dim_; ++d) to[d * kPanel] = static_cast<float>(from[d]) * p_.scale;
    }
  }

  // Keys and values [begin, end) as floats, rounded up to whole tiles with zeros; returns how many.
  int64_t gather(const int32_t* pages, int64_t head, int64_t begin, int64_t end) {
    const PagedCache<T>& cache = p_.cache;
    cache.for_pages(pages, begin, end, [&](int64_t first, int64_t count, int64_t at) {
      const T* keys = cache.keys + at + head * head_dim_;
      const T* values = cache.values + at + head * head_dim_;
      for (int64_t j = 0; j < count; ++j) {
        const int64_t row = (first - begin + j) * head_dim_;
        for (int64_t d = 0; d < head_dim_; d += kLanes) {
          store(keys_ + row + d, load(keys + j * cache.token_stride() + d));
          store(values_ + row + d, load(values + j * cache.token_stride() + d));
        }
      }
    });
    const int64_t count = end - begin, whole = (count + 7) / 8 * 8;
    std::fill(keys_ + count * head_dim_, keys_ + whole * head_dim_, 0.0f);
    std::fill(values_ + count * head_dim_, values_ + whole * head_dim_, 0.0f);
    return whole;
  }

  // Turns a panel's scores into weights relative to the largest so far, and rescales the sums.
  void weigh(const LineBlock& block, int64_t panel, int64_t begin, int64_t count) {
    const bool all_seen = seen(block, panel * kPanel) >= begin + count;
    for (int64_t v = 0; v < kPanel; v += kLanes) {
      const int64_t line = panel * kPanel + v;
      float* scores = scores_ + v;
      if (!all_seen) hide(block, line, begin, count, scores);
      const vfloat before = load(top_ + line);
      vfloat top = before;
      for (int64_t j = 0; j < count; ++j) top = maximum(top, load(scores + j * kPanel));
      vfloat total{};
      for (int64_t j = 0; j < count; ++j) {
        const vfloat e = exponential(load(scores + j * kPanel) - top);
        total += e;
        store(scores + j * kPanel, e);
      }
      const vfloat shrink = exponential(before - top);
      store(total_ + line, load(total_ + line) * shrink + total);
      store(top_ + line, top);
      float* out = out_ + panel * kPanel * head_dim_ + v;
      if (begin == 0) continue;
      for (int64_t d = 0; d < head_dim_; ++d) {
        store(out + d * kPanel, load(out + d * kPanel) * shrink);
      }
    }
  }

  void hide(
      const LineBlock& block, int64_t line, int64_t begin, int64_t count, float* scores) const {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t first_hidden = std::max<int64_t>(0, seen(block, line + lane) - begin);
      for (int64_t j = first_hidden; j < count; ++j) {
        scores[j * kPanel + lane] = -std::numeric_limits<float>::infinity();
      }
    }
  }

  void finish(const LineBlock& block, int64_t head) {
    float row[kLanes];
    for (int64_t line = 0; line < block.count; ++line) {
      T* to = p_.out + offset(block, line, head);
      const float* from = out_ + (line / kPanel) * kPanel * head_dim_ + line % kPanel;
      const float inverse = 1.0f / total_[line];
      for (int64_t d = 0; d < head_dim_; d += kLanes) {
        for (int64_t i = 0; i < kLanes; ++i) row[i] = from[(d + i) * kPanel] * inverse;
        store(to + d, load(row));
      }
    }
  }

  const Problem<T>& p_;
  const int64_t head_dim_;
  std::vector<float> scratch_;
  float *q_, *out_, *keys_, *values_, *scores_, *top_, *total_;
};

}  // namespace phalanx
