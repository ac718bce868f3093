// Makes the operators a Python module. Only attention, which may take milliseconds, lets other
// Python threads run meanwhile: for the short ones the hand-over costs more than it gives.
#include <torch/csrc/utils/pybind.h>

#include "operators.h"

namespace py = pybind11;
using namespace phalanx;

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
        const py::gil_scoped_release released;
        return paged_attention(
            q, cache, Rows{query_starts, page_table, kv_lens, num_single, causal}, scale);
      });
}
