// Attention over a paged cache, shared out over threads: single tokens through `decode`, longer rows
// through `BlockAttention`. Every row is computed alone, so no result depends on the batch.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <vector>

#include "block_attention.h"
#include "decode.h"
#include "operators.h"

namespace phalanx {
namespace {

template <typename T>
void attend_single(const Problem<T>& p, const Rows& rows) {
  const int32_t* table = rows.page_table.const_data_ptr<int32_t>();
  const int32_t* lens = rows.kv_lens.const_data_ptr<int32_t>();
  const int64_t num_pages = rows.page_table.size(1), heads = p.cache.num_kv_heads;
  // Heads of a token lie side by side: they are split only where there are too few rows.
  const int64_t parts = rows.num_single < 4 * at::get_num_threads() ? heads : 1;
  at::parallel_for(0, rows.num_single * parts, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts, head = i % parts;
      decode(p, row, table + row * num_pages, lens[row], head, parts == 1 ? heads : head + 1,
             scratch);
    }
  });
}

template <typename T>
std::vector<LineBlock> blocks_of(const Problem<T>& p, const Rows& rows) {
  const int32_t* starts = rows.query_starts.const_data_ptr<int32_t>();
  const int32_t* table = rows.page_table.const_data_ptr<int32_t>();
  const int32_t* lens = rows.kv_lens.const_data_ptr<int32_t>();
  std::vector<LineBlock> blocks;
  for (int64_t row = rows.num_single; row < rows.kv_lens.numel(); ++row) {
    const int64_t span = starts[row + 1] - starts[row], lines = span * p.group();
    const int64_t visible = rows.causal ? lens[row] - span + 1 : lens[row];
    const int32_t* pages = table + row * rows.page_table.size(1);
    for (int64_t first = 0; first < lines; first += kBlockLines) {
      const int64_t count = std::min(kBlockLines, lines - first);
      blocks.push_back({starts[row], first, count, pages, visible, rows.causal});
    }
  }
  return blocks;
}

template <typename T>
void attend_blocks(const Problem<T>& p, const Rows& rows) {
  const std::vector<LineBlock> blocks = blocks_of(p, rows);
  const int64_t heads = p.cache.num_kv_heads;
  const int64_t tasks = static_cast<int64_t>(blocks.size()) * heads;
  if (tasks == 0) return;
  // Later blocks of a row see more keys, so each thread takes the next one when it is free, the
  // last blocks first.
  std::atomic<int64_t> next{0};
  const int64_t workers = std::min<int64_t>(tasks, at::get_num_threads());
  at::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    BlockAttention<T> attention(p);
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t i = next++; i < tasks; i = next++) {
        attention.run(blocks[blocks.size() - 1 - i / heads], i % heads);
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
    attend_single(problem, rows);
    attend_blocks(problem, rows);
  });
  return out;
}

}  // namespace phalanx
