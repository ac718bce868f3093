#include "packed_linear.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>

#include "operators.h"
#include "vector.h"

namespace phalanx {
namespace {

constexpr int kVectors = 3;
constexpr int64_t kChannels = kVectors * kLanes;
// Eight tokens' sums for a panel fill the registers.
constexpr int kTokens = 8;
// Bytes of a panel that belong to the same 4 bytes of a token.
constexpr int64_t kStep = kChannels * 4;

int64_t num_panels(int64_t channels) { return (channels + kChannels - 1) / kChannels; }

// Visits every 4-byte group: visit(offset in the weight, offset in the packed form).
template <typename Visit>
void for_groups(int64_t channels, int64_t row_bytes, Visit visit) {
  at::parallel_for(0, num_panels(channels), 4, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kChannels, count = std::min(kChannels, channels - first);
      for (int64_t c = 0; c < count; ++c) {
        for (int64_t k = 0; k < row_bytes / 4; ++k) {
          visit((first + c) * row_bytes + k * 4, (panel * row_bytes / 4 + k) * kStep + c * 4);
        }
      }
    }
  });
}

#if defined(__AVX512F__)

struct Float32 {
  using Total = __m512;
  static Total dot(Total total, __m512i x, __m512i w) {
    return _mm512_fmadd_ps((__m512)x, (__m512)w, total);
  }
};

#if defined(__AVX512BF16__)
struct Bfloat16 {
  using Total = __m512;
  static Total dot(Total total, __m512i x, __m512i w) {
    return _mm512_dpbf16_ps(total, (__m512bh)x, (__m512bh)w);
  }
};
#endif

#if defined(__AVX512VNNI__)
struct Int8 {
  using Total = __m512i;
  static Total dot(Total total, __m512i x, __m512i w) { return _mm512_dpbusd_epi32(total, x, w); }
};
#endif

// Sums of kCount tokens (rows of x, `stride` bytes apart) with one panel; `next`, if given, is
// fetched meanwhile. finish(token, vector, total) takes the results.
template <typename Kind, int kCount, typename Finish>
inline void panel_sums(
    const char* x, int64_t stride, const char* panel, int64_t steps, const char* next,
    Finish finish) {
  // Unrolled by name: otherwise the compiler keeps the sums in memory.
  typename Kind::Total total[kCount][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) total[i][j] = typename Kind::Total{};
  }
  for (int64_t k = 0; k < steps; ++k) {
    __m512i w[kVectors];
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) {
      w[j] = _mm512_loadu_si512(panel + k * kStep + j * 64);
      if (next != nullptr) _mm_prefetch(next + k * kStep + j * 64, _MM_HINT_T1);
    }
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      int32_t group;
      std::memcpy(&group, x + i * stride + k * 4, 4);
      const __m512i factor = _mm512_set1_epi32(group);
#pragma GCC unroll 3
      for (int j = 0; j < kVectors; ++j) total[i][j] = Kind::dot(total[i][j], factor, w[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kCount; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < kVectors; ++j) finish(i, j, total[i][j]);
  }
}

// Calls visit.operator()<count>() with count = `left`, 1 to 8.
template <int kCount = kTokens, typename Visit>
inline void with_count(int64_t left, Visit visit) {
  if (left >= kCount) {
    visit.template operator()<kCount>();
  } else if constexpr (kCount > 1) {
    with_count<kCount - 1>(left, visit);
  }
}

// finish(token, channel, number of channels, total) for all tokens and panels; x has `steps` * 4
// bytes a token.
template <typename Kind, typename Finish>
void for_panels(
    const char* x, int64_t tokens, const char* packed, int64_t channels, int64_t steps,
    Finish finish) {
  const int64_t panel_bytes = steps * kStep, stride = steps * 4;
  at::parallel_for(0, num_panels(channels), 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const char* panel = packed + p * panel_bytes;
      for (int64_t token = 0; token < tokens; token += kTokens) {
        // The first tokens wait for the panel, the second ones can fetch the one after it.
        const bool fetch = token == kTokens && p + 1 < end;
        with_count(tokens - token, [&]<int kCount>() {
          panel_sums<Kind, kCount>(
              x + token * stride, stride, panel, steps, fetch ? panel + panel_bytes : nullptr,
              [&](int i, int j, typename Kind::Total total) {
                const int64_t channel = p * kChannels + j * kLanes;
                const int64_t count = std::min(kLanes, channels - channel);
                if (count > 0) finish(token + i, channel, count, total);
              });
        });
      }
    }
  });
}

template <typename Kind, typename T>
at::Tensor linear_of(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
    int64_t channels) {
  const int64_t tokens = x.size(0), width = x.size(1);
  at::Tensor out = at::empty({tokens, channels}, x.options());
  T* to = out.mutable_data_ptr<T>();
  const T* added = bias.has_value() ? bias->const_data_ptr<T>() : nullptr;
  for_panels<Kind>(
      static_cast<const char*>(x.const_data_ptr()), tokens,
      static_cast<const char*>(packed.const_data_ptr()), channels,
      width * static_cast<int64_t>(sizeof(T)) / 4,
      [&](int64_t token, int64_t channel, int64_t count, __m512 total) {
        vfloat sum = total;
        if (added != nullptr) sum += load_some(added + channel, count);
        store_some(to + token * channels + channel, sum, count);
      });
  return out;
}

#endif  // __AVX512F__

[[noreturn]] void refuse(const char* kind) {
  TORCH_CHECK(false, "this build of the native operators has no linear layer of ", kind);
}

#if defined(__AVX512VNNI__)

// One token to unsigned 8 bits around 128; returns its scale.
template <typename T>
float quantize(const T* x, uint8_t* to, int64_t width) {
  vfloat most = splat(1e-12f);
  for_lanes(width, [&](int64_t i, int64_t n) {
    const vfloat value = load_some(x + i, n);
    most = maximum(most, maximum(value, -value));
  });
  const float scale = largest(most) / 127.0f;
  const float inverse = 1.0f / scale;
  for_lanes(width, [&](int64_t i, int64_t n) {
    const __m512i whole = _mm512_cvtps_epi32(load_some(x + i, n) * inverse + 128.0f);
    uint8_t bytes[kLanes];
    _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtusepi32_epi8(whole));
    std::memcpy(to + i, bytes, n);
  });
  return scale;
}

template <typename T>
at::Tensor linear_int8_of(
    const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
    const at::Tensor& sums, const std::optional<at::Tensor>& bias) {
  const int64_t tokens = x.size(0), width = x.size(1), channels = scales.size(0);
  at::Tensor out = at::empty({tokens, channels}, x.options());
  const at::Tensor rounded = at::empty({tokens, width}, x.options().dtype(at::kByte));
  std::vector<float> token_scales(tokens);
  at::parallel_for(0, tokens, std::max<int64_t>(1, 32768 / width), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      token_scales[t] = quantize(
          x.const_data_ptr<T>() + t * width, rounded.mutable_data_ptr<uint8_t>() + t * width, width);
    }
  });
  T* to = out.mutable_data_ptr<T>();
  const T* added = bias.has_value() ? bias->const_data_ptr<T>() : nullptr;
  const float* weight_scales = scales.const_data_ptr<float>();
  const int32_t* weight_sums = sums.const_data_ptr<int32_t>();
  for_panels<Int8>(
      static_cast<const char*>(rounded.const_data_ptr()), tokens,
      static_cast<const char*>(packed.const_data_ptr()), channels, width / 4,
      [&](int64_t token, int64_t channel, int64_t count, __m512i total) {
        // What the zero point of 128 added to every product comes off again.
        const __mmask16 lanes = static_cast<__mmask16>((1u << count) - 1u);
        const __m512i surplus = _mm512_slli_epi32(
            _mm512_maskz_loadu_epi32(lanes, weight_sums + channel), 7);
        vfloat sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(total, surplus));
        sum *= token_scales[token] * load_some(weight_scales + channel, count);
        if (added != nullptr) sum += load_some(added + channel, count);
        store_some(to + token * channels + channel, sum, count);
      });
  return out;
}

#endif  // __AVX512VNNI__

}  // namespace

std::vector<std::string> linear_kinds() {
  return {
#if defined(__AVX512F__)
      "float32",
#endif
#if defined(__AVX512BF16__)
      "bfloat16",
#endif
#if defined(__AVX512VNNI__)
      "int8",
#endif
  };
}

void advise_huge_pages(const at::Tensor& memory) {
#if defined(MADV_HUGEPAGE)
  const auto page = uintptr_t{1} << 21;
  const auto begin = reinterpret_cast<uintptr_t>(memory.const_data_ptr());
  const uintptr_t first = (begin + page - 1) / page * page, end = (begin + memory.nbytes()) / page * page;
  // Advice only: where the system has no huge pages, nothing changes.
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

void pack_linear(const at::Tensor& weight, at::Tensor& packed) {
  const auto* from = static_cast<const char*>(weight.const_data_ptr());
  auto* to = static_cast<char*>(packed.mutable_data_ptr());
  std::memset(to, 0, packed.nbytes());
  for_groups(weight.size(0), weight.size(1) * weight.element_size(), [&](int64_t plain, int64_t at) {
    std::memcpy(to + at, from + plain, 4);
  });
}

void unpack_linear(const at::Tensor& packed, at::Tensor& weight) {
  const auto* from = static_cast<const char*>(packed.const_data_ptr());
  auto* to = static_cast<char*>(weight.mutable_data_ptr());
  for_groups(weight.size(0), weight.size(1) * weight.element_size(), [&](int64_t plain, int64_t at) {
    std::memcpy(to + plain, from + at, 4);
  });
}

at::Tensor linear(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
    int64_t out_features) {
#if defined(__AVX512F__)
  if (x.scalar_type() == at::kFloat) return linear_of<Float32, float>(x, packed, bias, out_features);
#endif
#if defined(__AVX512BF16__)
  if (x.scalar_type() == at::kBFloat16) {
    return linear_of<Bfloat16, c10::BFloat16>(x, packed, bias, out_features);
  }
#endif
  refuse(c10::toString(x.scalar_type()));
}

at::Tensor linear_int8(
    const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
    const at::Tensor& sums, const std::optional<at::Tensor>& bias) {
#if defined(__AVX512VNNI__)
  at::Tensor out;
  PHALANX_DISPATCH(x, [&] { out = linear_int8_of<T>(x, packed, scales, sums, bias); });
  return out;
#else
  refuse("8 bits");
#endif
}

}  // namespace phalanx
