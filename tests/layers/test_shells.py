"""Networks whose weights are given up and taken again."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.device.operators import create_operators
from phalanx.layers.linear import Linear
from phalanx.layers.shells import drop_parameters, parameter_bytes, take_parameters

CPU = torch.device("cpu")


def network() -> nn.Module:
    """A packed matrix with its bias, a list of parameters, and one with channels last."""
    linear = Linear(64, 32, bias=True, dtype=torch.float32)
    linear.pack(operators=create_operators("off", "cpu", torch.float32), keep_dense=True)
    last = torch.rand(4, 3, 2, 2).to(memory_format=torch.channels_last)
    made = nn.Module()
    made.linear = linear
    made.parts = nn.ParameterList([nn.Parameter(torch.rand(5), requires_grad=False)])
    made.kernel = nn.Parameter(last, requires_grad=False)
    return made


def test_nothing_is_held_of_what_was_given_up():
    made = network()
    assert parameter_bytes(made) >= 4 * (64 * 32 + 32 + 5 + 48)
    drop_parameters(made)
    assert parameter_bytes(made) == made.linear.packed_bytes == 0
    assert all(one.is_meta for one in made.parameters())
    drop_parameters(made)


def test_what_is_taken_again_is_as_it_was():
    made = network()
    before = {name: (one.shape, one.stride(), one.dtype) for name, one in made.named_parameters()}
    kept = made.parts[0]
    drop_parameters(made)
    take_parameters(made, CPU)
    after = dict(made.named_parameters())
    assert {n: (one.shape, one.stride(), one.dtype) for n, one in after.items()} == before
    assert not any(one.is_meta or one.requires_grad for one in after.values())
    assert after["parts.0"].data_ptr() != kept.data_ptr()


def test_what_is_there_is_not_taken_anew():
    made = network()
    there = {name: one.data_ptr() for name, one in made.named_parameters() if not one.is_meta}
    take_parameters(made, CPU)
    assert all(made.get_parameter(name).data_ptr() == at for name, at in there.items())
