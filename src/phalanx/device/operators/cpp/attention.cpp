// Attention over a paged cache. A row of one token goes through `decode`, which reads each key once
// for all query heads of its group; longer rows through `BlockAttention`, in blocks of 64 keys with
// a running softmax. Every row is computed alone, so a result never depends on the batch.
#include "operators.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "tile.h"
#include "vector.h"

namespace phalanx {
namespace {

constexpr float kHidden = -std::numeric_limits<float>::infinity();
constexpr int64_t kBlockTokens = 32;

template <typename T>
struct PagedCache {
  const T *keys, *values;
  int64_t page_size, num_kv_heads, head_dim;

  int64_t token_stride() const { return num_kv_heads * head_dim; }

  // Offset of token `index` of a row, for one head.
  int64_t at(const int32_t* pages, int64_t index, int64_t head) const {
    const int64_t slot = pages[index / page_size] * page_size + index % page_size;
    return slot * token_stride() + head * head_dim;
  }

  // Visits runs of tokens that lie one after another: visit(first token, count, offset).
  template <typename Visit>
  void for_pages(const int32_t* pages, int64_t begin, int64_t end, int64_t head, Visit visit) const {
    for (int64_t i = begin; i < end;) {
      const int64_t count = std::min(end - i, page_size - i % page_size);
      visit(i, count, at(pages, i, head));
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

// Scores of one key for kHeads query heads; `q` is [kHeads][head_dim].
template <int kHeads, typename T>
inline void score_key(
    const float* q, const T* key, int64_t head_dim, float* scores, int64_t stride) {
  vfloat total[kHeads] = {};
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    const vfloat k = load(key + d);
    for (int h = 0; h < kHeads; ++h) total[h] += load(q + h * head_dim + d) * k;
  }
  for (int h = 0; h < kHeads; ++h) scores[h * stride] = sum(total[h]);
}

// out[kHeads][head_dim] = sum of probabilities times values.
template <int kHeads, typename T>
void mix_values(
    const Problem<T>& p, const int32_t* pages, int64_t head, int64_t length,
    const float* probabilities, int64_t stride, T* out) {
  const PagedCache<T>& cache = p.cache;
  constexpr int kParts = 4;
  for (int64_t d = 0; d < cache.head_dim; d += kParts * kLanes) {
    const int parts = static_cast<int>(std::min<int64_t>(kParts, (cache.head_dim - d) / kLanes));
    vfloat total[kHeads][kParts] = {};
    const auto run = [&](auto part_count) {
      cache.for_pages(pages, 0, length, head, [&](int64_t first, int64_t count, int64_t offset) {
        for (int64_t j = 0; j < count; ++j) {
          const T* value = cache.values + offset + j * cache.token_stride() + d;
          for (int part = 0; part < part_count; ++part) {
            const vfloat v = load(value + part * kLanes);
            for (int h = 0; h < kHeads; ++h) {
              total[h][part] += probabilities[h * stride + first + j] * v;
            }
          }
        }
      });
    };
    if (parts == kParts) {
      run(std::integral_constant<int, kParts>{});
    } else {
      run(parts);
    }
    for (int h = 0; h < kHeads; ++h) {
      for (int part = 0; part < parts; ++part) {
        store(out + h * cache.head_dim + d + part * kLanes, total[h][part]);
      }
    }
  }
}

inline void softmax(float* scores, int64_t length, int64_t padded) {
  std::fill(scores + length, scores + padded, kHidden);
  vfloat top = splat(kHidden);
  for (int64_t i = 0; i < padded; i += kLanes) top = maximum(load(scores + i), top);
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

template <int kHeads, typename T>
void decode_heads(
    const Problem<T>& p, const int32_t* pages, int64_t head, int64_t length, const T* q, T* out,
    std::vector<float>& scratch) {
  const PagedCache<T>& cache = p.cache;
  const int64_t padded = (length + kLanes - 1) / kLanes * kLanes;
  scratch.resize(kHeads * (cache.head_dim + padded));
  float* queries = scratch.data();
  float* scores = queries + kHeads * cache.head_dim;
  for (int64_t i = 0; i < kHeads * cache.head_dim; i += kLanes) {
    store(queries + i, load(q + i) * p.scale);
  }
  cache.for_pages(pages, 0, length, head, [&](int64_t first, int64_t count, int64_t offset) {
    for (int64_t j = 0; j < count; ++j) {
      const T* key = cache.keys + offset + j * cache.token_stride();
      score_key<kHeads>(queries, key, cache.head_dim, scores + first + j, padded);
    }
  });
  for (int h = 0; h < kHeads; ++h) softmax(scores + h * padded, length, padded);
  mix_values<kHeads>(p, pages, head, length, scores, padded, out);
}

template <typename T>
void decode(
    const Problem<T>& p, int64_t token, const int32_t* pages, int64_t head, int64_t length,
    std::vector<float>& scratch) {
  const int64_t head_dim = p.cache.head_dim;
  const int64_t first = token * p.num_heads + head * p.group();
  for (int64_t g = 0; g < p.group();) {
    const T* q = p.q + (first + g) * head_dim;
    T* out = p.out + (first + g) * head_dim;
    const int64_t left = p.group() - g;
    if (left >= 4) {
      decode_heads<4>(p, pages, head, length, q, out, scratch);
    } else if (left == 3) {
      decode_heads<3>(p, pages, head, length, q, out, scratch);
    } else if (left == 2) {
      decode_heads<2>(p, pages, head, length, q, out, scratch);
    } else {
      decode_heads<1>(p, pages, head, length, q, out, scratch);
    }
    g += std::min<int64_t>(left, 4);
  }
}

// Attention of up to kBlockTokens tokens of one row, for one key-value head. A line is one token
// and query head, token by token.
template <typename T>
class BlockAttention {
 public:
  BlockAttention(const Problem<T>& p)
      : p_(p), head_dim_(p.cache.head_dim), max_lines_(kBlockTokens * p.group()) {
    scratch_.resize(2 * max_lines_ * head_dim_ + 2 * kTile * head_dim_ +
                    max_lines_ * (kTile + 2));
    q_ = scratch_.data();
    out_ = q_ + max_lines_ * head_dim_;
    keys_ = out_ + max_lines_ * head_dim_;
    values_ = keys_ + kTile * head_dim_;
    scores_ = values_ + kTile * head_dim_;
    top_ = scores_ + max_lines_ * kTile;
    total_ = top_ + max_lines_;
  }

  // `visible`: keys that the block's first token sees; each later token sees one more if `causal`.
  void run(
      int64_t token, int64_t tokens, const int32_t* pages, int64_t head, int64_t visible,
      bool causal) {
    const int64_t group = p_.group(), lines = tokens * group;
    for (int64_t t = 0; t < tokens; ++t) {
      const T* from = p_.q + ((token + t) * p_.num_heads + head * group) * head_dim_;
      float* to = q_ + t * group * head_dim_;
      for (int64_t i = 0; i < group * head_dim_; i += kLanes) store(to + i, load(from + i) * p_.scale);
    }
    std::fill(out_, out_ + lines * head_dim_, 0.0f);
    std::fill(top_, top_ + lines, kHidden);
    std::fill(total_, total_ + lines, 0.0f);
    const int64_t end = visible + (causal ? tokens - 1 : 0);
    for (int64_t begin = 0; begin < end; begin += kTile) {
      gather(pages, head, begin, std::min(end, begin + kTile));
      multiply(q_, keys_, scores_, {lines, head_dim_, kTile}, {head_dim_, kTile, kTile}, false);
      for (int64_t line = 0; line < lines; ++line) {
        const int64_t seen = visible + (causal ? line / group : 0) - begin;
        accumulate(line, std::min(seen, kTile));
      }
      multiply(scores_, values_, out_, {lines, kTile, head_dim_}, {kTile, head_dim_, head_dim_}, true);
    }
    for (int64_t line = 0; line < lines; ++line) {
      const int64_t t = line / group, g = line % group;
      T* to = p_.out + ((token + t) * p_.num_heads + head * group + g) * head_dim_;
      const float inverse = 1.0f / total_[line];
      const float* from = out_ + line * head_dim_;
      for (int64_t i = 0; i < head_dim_; i += kLanes) store(to + i, load(from + i) * inverse);
    }
  }

 private:
  // Keys become [head_dim][kTile], values [kTile][head_dim]; what is missing is zero.
  void gather(const int32_t* pages, int64_t head, int64_t begin, int64_t end) {
    const PagedCache<T>& cache = p_.cache;
    if (end - begin < kTile) {
      std::fill(keys_, keys_ + kTile * head_dim_, 0.0f);
      std::fill(values_, values_ + kTile * head_dim_, 0.0f);
    }
    cache.for_pages(pages, begin, end, head, [&](int64_t first, int64_t count, int64_t offset) {
      for (int64_t j = 0; j < count; ++j) {
        const T* key = cache.keys + offset + j * cache.token_stride();
        const T* value = cache.values + offset + j * cache.token_stride();
        float* column = keys_ + first - begin + j;
        float* row = values_ + (first - begin + j) * head_dim_;
        for (int64_t d = 0; d < head_dim_; ++d) column[d * kTile] = static_cast<float>(key[d]);
        for (int64_t d = 0; d < head_dim_; d += kLanes) store(row + d, load(value + d));
      }
    });
  }

  // Turns a line's scores into weights relative to the largest so far, and rescales what was summed.
  void accumulate(int64_t line, int64_t seen) {
    float* scores = scores_ + line * kTile;
    if (seen < kTile) std::fill(scores + std::max<int64_t>(seen, 0), scores + kTile, kHidden);
    vfloat top = splat(top_[line]);
    for (int64_t i = 0; i < kTile; i += kLanes) top = maximum(load(scores + i), top);
    const float most = largest(top);
    vfloat total{};
    for (int64_t i = 0; i < kTile; i += kLanes) {
      const vfloat e = exponential(load(scores + i) - most);
      total += e;
      store(scores + i, e);
    }
    const float shrink = exponential(splat(top_[line] - most))[0];
    total_[line] = total_[line] * shrink + sum(total);
    top_[line] = most;
    if (shrink == 1.0f) return;
    float* out = out_ + line * head_dim_;
    for (int64_t i = 0; i < head_dim_; i += kLanes) store(out + i, load(out + i) * shrink);
  }

  const Problem<T>& p_;
  const int64_t head_dim_, max_lines_;
  std::vector<float> scratch_;
  float *q_, *out_, *keys_, *values_, *scores_, *top_, *total_;
};

struct Block {
  int64_t row, token, tokens, visible;
};

std::vector<Block> blocks_of(const Rows& rows) {
  const int32_t* starts = rows.query_starts.const_data_ptr<int32_t>();
  const int32_t* lens = rows.kv_lens.const_data_ptr<int32_t>();
  std::vector<Block> blocks;
  for (int64_t row = rows.num_single; row < rows.kv_lens.numel(); ++row) {
    const int64_t span = starts[row + 1] - starts[row];
    for (int64_t t = 0; t < span; t += kBlockTokens) {
      const int64_t visible = rows.causal ? lens[row] - span + t + 1 : lens[row];
      blocks.push_back({row, starts[row] + t, std::min(kBlockTokens, span - t), visible});
    }
  }
  return blocks;
}

template <typename T>
void attend(const Problem<T>& p, const Rows& rows) {
  const int32_t* table = rows.page_table.const_data_ptr<int32_t>();
  const int32_t* lens = rows.kv_lens.const_data_ptr<int32_t>();
  const int64_t num_pages = rows.page_table.size(1), heads = p.cache.num_kv_heads;
  at::parallel_for(0, rows.num_single * heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / heads;
      decode(p, row, table + row * num_pages, i % heads, lens[row], scratch);
    }
  });
  const std::vector<Block> blocks = blocks_of(rows);
  if (blocks.empty()) return;
  // Later blocks of a row see more keys, so threads take the next one when they are free; the
  // longest come first.
  const int64_t tasks = static_cast<int64_t>(blocks.size()) * heads;
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(tasks, at::get_num_threads()), 1, [&](int64_t begin, int64_t end) {
    BlockAttention<T> attention(p);
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = next++; i < tasks; i = next++) {
        const Block& block = blocks[blocks.size() - 1 - i / heads];
        const int32_t* pages = table + block.row * num_pages;
        attention.run(block.token, block.tokens, pages, i % heads, block.visible, rows.causal);
      }
    }
  });
}

}  // namespace

at::Tensor paged_attention(
    const at::Tensor& q, const Cache& cache, const Rows& rows, double scale) {
  const int64_t tokens = q.size(0), num_heads = q.size(1), head_dim = q.size(2);
  TORCH_CHECK(head_dim % kLanes == 0, "head size ", head_dim, " is not a multiple of ", kLanes);
  at::Tensor out = at::empty({tokens, num_heads * head_dim}, q.options());
  PHALANX_DISPATCH(q, [&] {
    const Problem<T> problem{
        {cache.first.const_data_ptr<T>(), cache.second.const_data_ptr<T>(), cache.first.size(1),
         cache.first.size(2), head_dim},
        q.const_data_ptr<T>(), out.mutable_data_ptr<T>(), num_heads, static_cast<float>(scale)};
    attend(problem, rows);
  });
  return out;
}

}  // namespace phalanx
