"""Linear layers before and after packing: results, recovery of the plain weight, and updates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from phalanx.device.operators import create_operators
from phalanx.errors import MissingDependencyError
from phalanx.layers.linear import Linear
from tests.forked import run_forked


class NothingFaster:
    """Operators of a device that has no packed form."""

    def pack_weight(self, weight, quantization):
        return None


class NoInt8:
    def pack_weight(self, weight, quantization):
        raise MissingDependencyError("no int8 here")


@pytest.fixture(params=["off", "required"], ids=["torch", "native"])
def operators(request):
    return create_operators(request.param, "cpu", torch.float32)


def layer(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> Linear:
    made = Linear(24, 40, bias=bias, dtype=dtype)
    nn.init.normal_(made.weight)
    if made.bias is not None:
        nn.init.normal_(made.bias)
    return made


@pytest.mark.parametrize("bias", [False, True])
def test_packing_keeps_results_and_gives_the_plain_weight_back(operators, bias):
    linear = layer(bias=bias)
    weight, x = linear.weight.detach().clone(), torch.randn(5, 24)
    expected = linear(x)
    linear.pack(operators=operators)
    assert linear.weight.is_meta and linear.weight.shape == (40, 24)
    assert linear.packed_bytes >= 40 * 24 * 4
    torch.testing.assert_close(linear(x), expected)
    assert torch.equal(linear.dense_weight(), weight)
    linear.unpack()
    assert torch.equal(linear.weight, weight) and linear.packed_bytes == 0
    assert torch.equal(linear(x), expected)


def test_packing_may_keep_the_plain_weight(operators):
    linear = layer()
    storage = linear.weight.data_ptr()
    linear.pack(operators=operators, keep_dense=True)
    assert linear.weight.data_ptr() == storage
    assert linear.dense_weight().data_ptr() == storage


def test_packing_twice_changes_the_form(operators):
    linear = layer()
    linear.pack(operators=operators)
    exact = linear.packed_bytes
    linear.pack("int8", operators=operators)
    assert linear.packed_bytes < exact


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_new_weight_is_packed_as_the_old_one_was(operators, quantization):
    linear = layer(bias=False)
    linear.pack(quantization, operators=operators)
    before, weight, x = linear.packed_bytes, torch.randn(40, 24), torch.randn(3, 24)
    linear.replace_weight(weight)
    assert linear.packed_bytes == before and linear.weight.is_meta
    tolerance = 1e-4 if quantization is None else 0.3
    torch.testing.assert_close(linear(x), x @ weight.t(), rtol=tolerance, atol=tolerance)


def test_a_new_weight_of_an_unpacked_layer_stays_plain():
    linear = layer(bias=False, dtype=torch.bfloat16)
    linear.replace_weight(torch.ones(40, 24))
    assert linear.weight.dtype == torch.bfloat16 and linear.packed_bytes == 0


def test_a_tied_layer_shares_storage_until_it_is_packed(operators):
    embedding = nn.Embedding(40, 24)
    linear = Linear(24, 40, device="meta")
    linear.tie(embedding.weight)
    assert linear.weight is embedding.weight
    x = torch.randn(2, 24)
    expected = x @ embedding.weight.t()
    linear.pack(operators=operators)
    assert not embedding.weight.is_meta
    torch.testing.assert_close(linear(x), expected)


def test_a_layer_without_a_faster_form_stays_as_it_is():
    linear = layer()
    linear.pack(operators=NothingFaster())
    assert linear.packed_bytes == 0 and not linear.weight.is_meta


def test_int8_that_cannot_run_is_refused_and_leaves_the_layer_whole():
    linear = layer()
    x = torch.randn(2, 24)
    expected = linear(x)
    with pytest.raises(MissingDependencyError):
        linear.pack("int8", operators=NoInt8())
    assert torch.equal(linear(x), expected)


def test_a_weight_comes_and_goes_without_torchs_symbolic_shapes():
    """They are tens of megabytes, and seconds."""
    program = """
import sys, torch
from phalanx.device.operators import create_operators
from phalanx.layers.linear import Linear
layer = Linear(64, 64, bias=False, dtype=torch.float32, device="meta")
layer.replace_weight(torch.ones(64, 64))
layer.pack(None, operators=create_operators("off", "cpu", torch.float32))
layer.drop_weight()
layer.drop_weight()
sys.exit("sympy" in sys.modules)
"""
    assert run_forked(program).returncode == 0
