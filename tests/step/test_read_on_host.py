"""Only what a node looks at on the host is copied there."""

from __future__ import annotations

import torch

from phalanx.step.outputs import Column, NodeOutputs, to_host

PARTS = [
    NodeOutputs(
        {
            "token": Column(("a", "b"), torch.tensor([1, 2])),
            "wave": Column(("a",), torch.ones(1, 2)),
        },
        {"b": {"mask": torch.tensor([True]), "token": torch.tensor(3)}},
    )
]


def test_all_outputs_without_a_choice():
    assert to_host(PARTS) == {
        "a": {"token": 1, "wave": [1.0, 1.0]},
        "b": {"token": 3, "mask": [True]},
    }


def test_the_chosen_outputs_alone():
    assert to_host(PARTS, {"token"}) == {"a": {"token": 1}, "b": {"token": 3}}
    assert to_host(PARTS, {"wave"}) == {"a": {"wave": [1.0, 1.0]}, "b": {}}
    assert to_host(PARTS, frozenset()) == {"b": {}}
