// What the binding file exports; shapes are those of the Python interface. Arguments arrive
// contiguous and of one dtype, float32 or bfloat16: the Python side sees to it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/BFloat16.h>

#include <optional>
#include <utility>

// Runs the lambda that follows with T as the storage type of `tensor`.
#define PHALANX_DISPATCH(tensor, ...)                              \
  do {                                                             \
    if ((tensor).scalar_type() == at::kFloat) {                    \
      using T = float;                                             \
      (__VA_ARGS__)();                                             \
    } else {                                                       \
      TORCH_CHECK((tensor).scalar_type() == at::kBFloat16,         \
                  "the native operators know float32 and bfloat16, not ", \
                  (tensor).scalar_type());                         \
      using T = c10::BFloat16;                                     \
      (__VA_ARGS__)();                                             \
    }                                                              \
  } while (false)

namespace phalanx {

using Rotary = std::pair<at::Tensor, at::Tensor>;
using Cache = std::pair<at::Tensor, at::Tensor>;

struct HeadShape {
  int64_t num_heads, num_kv_heads, head_dim;
  std::optional<at::Tensor> q_norm, k_norm;
  double eps;
};

struct Rows {
  const at::Tensor& query_starts;
  const at::Tensor& page_table;
  const at::Tensor& kv_lens;
  int64_t num_single;
  bool causal;
};

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps);

at::Tensor add_rms_norm(
    const at::Tensor& x, at::Tensor& residual, const at::Tensor& weight, double eps);

at::Tensor silu_mul(const at::Tensor& gate_up);

at::Tensor rope_and_write(
    const at::Tensor& qkv,
    const HeadShape& heads,
    const Rotary& rotary,
    const Cache& cache,
    const at::Tensor& slots);

at::Tensor paged_attention(
    const at::Tensor& q, const Cache& cache, const Rows& rows, double scale);

}  // namespace phalanx
