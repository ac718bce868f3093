// Norms, the gated activation, and rotation of queries and keys with the write into the cache.
#include "operators.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <cmath>

#include "vector.h"

namespace phalanx {
namespace {

// Elements that are worth a second thread.
constexpr int64_t kGrain = 16384;

int64_t rows_per_task(int64_t width) { return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)); }

template <typename T>
void norm_row(const T* x, const T* weight, T* out, int64_t width, float eps) {
  vfloat squares{};
  for_lanes(width, [&](int64_t i, int64_t n) {
    const vfloat value = load_some(x + i, n);
    squares += value * value;
  });
  const float scale = 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + eps);
  for_lanes(width, [&](int64_t i, int64_t n) {
    store_some(out + i, load_some(x + i, n) * scale * load_some(weight + i, n), n);
  });
}

template <typename T>
void rotate_row(const T* x, const float* cos, const float* sin, T* out, int64_t head_dim) {
  const int64_t half = head_dim / 2;
  for_lanes(half, [&](int64_t i, int64_t n) {
    const vfloat first = load_some(x + i, n), second = load_some(x + half + i, n);
    const vfloat c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(out + i, first * c - second * s, n);
    store_some(out + half + i, second * c + first * s, n);
  });
}

template <typename T>
void silu_mul_rows(const T* gate_up, T* out, int64_t begin, int64_t end, int64_t width) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = gate_up + row * 2 * width;
    T* to = out + row * width;
    for_lanes(width, [&](int64_t i, int64_t n) {
      const vfloat g = load_some(gate + i, n);
      store_some(to + i, g / (1.0f + exponential(-g)) * load_some(gate + width + i, n), n);
    });
  }
}

template <typename T>
struct RopeTask {
  const T* qkv;
  const float *cos, *sin;
  const int64_t* slots;
  const T *q_norm, *k_norm;
  T *q, *keys, *values;
  int64_t num_heads, num_kv_heads, head_dim;
  float eps;

  void head(const T* from, const T* norm, T* to, int64_t token) const {
    const float* c = cos + token * (head_dim / 2);
    const float* s = sin + token * (head_dim / 2);
    if (norm == nullptr) {
      rotate_row(from, c, s, to, head_dim);
      return;
    }
    norm_row(from, norm, to, head_dim, eps);
    rotate_row(to, c, s, to, head_dim);
  }

  void token(int64_t t) const {
    const int64_t kv_width = num_kv_heads * head_dim;
    const T* from = qkv + t * (num_heads * head_dim + 2 * kv_width);
    for (int64_t h = 0; h < num_heads; ++h, from += head_dim) {
      head(from, q_norm, q + (t * num_heads + h) * head_dim, t);
    }
    T* key = keys + slots[t] * kv_width;
    for (int64_t h = 0; h < num_kv_heads; ++h, from += head_dim) {
      head(from, k_norm, key + h * head_dim, t);
    }
    std::memcpy(values + slots[t] * kv_width, from, kv_width * sizeof(T));
  }
};

}  // namespace

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  const int64_t width = x.size(-1), rows = x.numel() / std::max<int64_t>(1, width);
  at::Tensor out = at::empty_like(x);
  PHALANX_DISPATCH(x, [&] {
    const T* from = x.const_data_ptr<T>();
    const T* w = weight.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, rows, rows_per_task(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        norm_row(from + row * width, w, to + row * width, width, static_cast<float>(eps));
      }
    });
  });
  return out;
}

at::Tensor add_rms_norm(
    const at::Tensor& x, at::Tensor& residual, const at::Tensor& weight, double eps) {
  const int64_t width = x.size(-1), rows = x.numel() / std::max<int64_t>(1, width);
  at::Tensor out = at::empty_like(x);
  PHALANX_DISPATCH(x, [&] {
    const T* from = x.const_data_ptr<T>();
    const T* w = weight.const_data_ptr<T>();
    T* total = residual.mutable_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, rows, rows_per_task(width), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* added = from + row * width;
        T* sums = total + row * width;
        for_lanes(width, [&](int64_t i, int64_t n) {
          store_some(sums + i, load_some(sums + i, n) + load_some(added + i, n), n);
        });
        norm_row(sums, w, to + row * width, width, static_cast<float>(eps));
      }
    });
  });
  return out;
}

at::Tensor silu_mul(const at::Tensor& gate_up) {
  const int64_t rows = gate_up.size(0), width = gate_up.size(1) / 2;
  at::Tensor out = at::empty({rows, width}, gate_up.options());
  PHALANX_DISPATCH(gate_up, [&] {
    const T* from = gate_up.const_data_ptr<T>();
    T* to = out.mutable_data_ptr<T>();
    at::parallel_for(0, rows, rows_per_task(width), [&](int64_t begin, int64_t end) {
      silu_mul_rows(from, to, begin, end, width);
    });
  });
  return out;
}

at::Tensor rope_and_write(
    const at::Tensor& qkv,
    const HeadShape& heads,
    const Rotary& rotary,
    const Cache& cache,
    const at::Tensor& slots) {
  const int64_t tokens = qkv.size(0);
  at::Tensor q = at::empty({tokens, heads.num_heads, heads.head_dim}, qkv.options());
  PHALANX_DISPATCH(qkv, [&] {
    const auto norm = [](const std::optional<at::Tensor>& weight) {
      return weight.has_value() ? weight->const_data_ptr<T>() : nullptr;
    };
    const RopeTask<T> task{
        qkv.const_data_ptr<T>(), rotary.first.const_data_ptr<float>(),
        rotary.second.const_data_ptr<float>(), slots.const_data_ptr<int64_t>(),
        norm(heads.q_norm), norm(heads.k_norm), q.mutable_data_ptr<T>(),
        cache.first.mutable_data_ptr<T>(), cache.second.mutable_data_ptr<T>(), heads.num_heads,
        heads.num_kv_heads, heads.head_dim, static_cast<float>(heads.eps)};
    at::parallel_for(0, tokens, rows_per_task(qkv.size(1)), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) task.token(t);
    });
  });
  return q;
}

}  // namespace phalanx
