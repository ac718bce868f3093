// Matrix products with a weight that was packed once. A packed weight is a sequence of panels of 48
// output channels (the last filled up with zeros); in a panel, each 4 bytes of consecutive inputs
// of a channel lie beside those of the next channel, as dot-product instructions take them.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <vector>

namespace phalanx {

// Which weight types this CPU has fast instructions for: "float32", "bfloat16", "int8".
std::vector<std::string> linear_kinds();

// Asks the system to back `memory` with huge pages: a step reads every weight once, and page walks
// cost a third of the bandwidth.
void advise_huge_pages(const at::Tensor& memory);

// [out, in] of any type whose row is a multiple of 4 bytes, to bytes and back.
void pack_linear(const at::Tensor& weight, at::Tensor& packed);
void unpack_linear(const at::Tensor& packed, at::Tensor& weight);

// x [T, in] float32 or bfloat16, times a weight of the same type.
at::Tensor linear(
    const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
    int64_t out_features);

// Quantizes each token of x to unsigned 8 bits around 128. `scales` float32 [out] are the weight's,
// `sums` int32 [out] its sums over the inputs.
at::Tensor linear_int8(
    const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
    const at::Tensor& sums, const std::optional<at::Tensor>& bias);

}  // namespace phalanx
