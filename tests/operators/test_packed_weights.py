"""Packed weights of every implementation against plain float64 products."""

from __future__ import annotations

import pytest
import torch

SHAPES = [(48, 64), (96, 576), (50, 36), (1, 8), (147, 128)]
TOKENS = [1, 2, 7, 8, 9, 19]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.double() @ weight.double().t()
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product_and_plain_matrix(operators, dtype, shape, with_bias):
    weight = torch.randn(shape).to(dtype)
    packed = operators.pack_weight(weight, None)
    assert packed is not None
    assert packed.num_bytes >= weight.numel() * weight.element_size()
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    for tokens in TOKENS:
        x = torch.randn(tokens, shape[1]).to(dtype)
        out = packed.apply(x, bias)
        assert out.dtype == dtype
        reference = expected(x, weight, bias)
        limit = TOLERANCE[dtype] * float(reference.abs().max())
        assert float((out.double() - reference).abs().max()) < limit
    assert torch.equal(packed.dense(), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_int8_rounds_weights_and_each_tokens_activations(operators, dtype, shape, with_bias):
    weight = torch.randn(shape).to(dtype)
    packed = operators.pack_weight(weight, "int8")
    step = weight.float().abs().amax(dim=1, keepdim=True) / 127
    assert (
        (packed.dense().float() - weight.float()).abs() <= 0.6 * step + 0.005 * weight.abs()
    ).all()
    bias = torch.randn(shape[0]).to(dtype) if with_bias else None
    for tokens in TOKENS:
        # Tokens of very different size: one scale for all would lose the small ones.
        x = (torch.randn(tokens, shape[1]) * torch.logspace(-3, 3, tokens)[:, None]).to(dtype)
        x[-1] = 0
        out = packed.apply(x, bias)
        assert out.dtype == dtype
        reference = expected(x, packed.dense(), bias)
        rounding = x.double().abs().amax(dim=1, keepdim=True) / 127
        limit = rounding * packed.dense().double().norm(dim=1) * 2 + 0.02 * reference.abs() + 1e-6
        assert ((out.double() - reference).abs() <= limit).all()


def test_rows_of_any_layout(operators):
    weight, x = torch.randn(48, 32), torch.randn(32, 6)
    packed = operators.pack_weight(weight, None)
    torch.testing.assert_close(packed.apply(x.t(), None), x.t() @ weight.t())


def test_packed_bytes_stay_when_the_weight_changes(operators):
    weight = torch.randn(48, 32)
    before = weight.clone()
    packed = operators.pack_weight(weight, None)
    weight.zero_()
    assert torch.equal(packed.dense(), before)


def test_many_weights_share_memory_without_touching_each_other(operators):
    weights = [torch.randn(48 * n, 64) for n in (1, 2, 3)]
    packed = [operators.pack_weight(weight, None) for weight in weights]
    del packed[1]
    for kept, weight in zip(packed, (weights[0], weights[2]), strict=True):
        assert torch.equal(kept.dense(), weight)
