// Makes the operators a Python module. Only calls of about a millisecond and more let other Python
// threads run meanwhile: for short ones, over a hundred a step, the hand-over costs more than it
// gives.
#include <torch/csrc/utils/pybind.h>

#include <optional>

#include "operators.h"
#include "packed_linear.h"

namespace py = pybind11;
using namespace phalanx;

// Multiplications that take about a millisecond.
constexpr int64_t kLong = int64_t{1} << 26;

class Released {
 public:
  explicit Released(int64_t multiplications) {
    if (multiplications >= kLong) released_.emplace();
  }

 private:
  std::optional<py::gil_scoped_release> released_;
};

using Norms = std::pair<std::optional<at::Tensor>, std::optional<at::Tensor>>;

PYBIND11_MODULE(PHALANX_MODULE, module) {
  module.def("rms_norm", &rms_norm);
  module.def("add_rms_norm", &add_rms_norm);
  module.def("silu_mul", &silu_mul);
  module.def(
      "rope_and_write",
      [](const at::Tensor& qkv, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
         const Norms& norms, double eps, const Rotary& rotary, const Cache& cache,
         const at::Tensor& slots) {
        return rope_and_write(
            qkv, HeadShape{num_heads, num_kv_heads, head_dim, norms.first, norms.second, eps},
            rotary, cache, slots);
      });
  module.def(
      "paged_attention",
      [](const at::Tensor& q, const Cache& cache, const at::Tensor& query_starts,
         const at::Tensor& page_table, const at::Tensor& kv_lens, int64_t num_single, bool causal,
         double scale) {
        const Released released(q.numel() * page_table.size(1) * cache.first.size(1));
        return paged_attention(
            q, cache, Rows{query_starts, page_table, kv_lens, num_single, causal}, scale);
      });
  module.def("linear_kinds", &linear_kinds);
  module.def("advise_huge_pages", &advise_huge_pages);
  module.def("pack_linear", &pack_linear, py::call_guard<py::gil_scoped_release>());
  module.def("unpack_linear", &unpack_linear, py::call_guard<py::gil_scoped_release>());
  module.def(
      "linear",
      [](const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
         int64_t out_features) {
        const Released released(x.numel() * out_features);
        return linear(x, packed, bias, out_features);
      });
  module.def(
      "linear_int8",
      [](const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
         const at::Tensor& sums, const std::optional<at::Tensor>& bias) {
        const Released released(x.numel() * scales.size(0));
        return linear_int8(x, packed, scales, sums, bias);
      });
}
