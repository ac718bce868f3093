from __future__ import annotations

import pytest
import torch

from phalanx.step.outputs import Column, NodeOutputs, to_host


def test_owned_outputs_are_copies():
    values, mask = torch.tensor([1, 2]), torch.tensor([1.5])
    outputs = NodeOutputs({"token": Column(("a", "b"), values)}, {"b": {"mask": mask}})
    owned = outputs.owned()
    values.zero_()
    mask.zero_()
    assert to_host([owned]) == {"a": {"token": 1}, "b": {"token": 2, "mask": [1.5]}}
    assert to_host([outputs])["a"] == {"token": 0}


def test_a_row_is_all_that_one_request_gave():
    outputs = NodeOutputs(
        {
            "token": Column(("a", "b"), torch.tensor([1, 2])),
            "other": Column(("a",), torch.ones(1, 2)),
        },
        {"b": {"mask": torch.tensor(3)}},
    )
    assert outputs.row("a")["other"].tolist() == [1.0, 1.0]
    assert {name: value.tolist() for name, value in outputs.row("b").items()} == {
        "token": 2,
        "mask": 3,
    }
    assert outputs.row("nobody") == {}


def test_parts_of_a_step_are_joined():
    parts = [
        NodeOutputs({"token": Column(("a",), torch.tensor([1]))}),
        NodeOutputs({"token": Column(("b",), torch.tensor([2]))}, {"a": {"late": torch.tensor(7)}}),
    ]
    assert to_host(parts) == {"a": {"token": 1, "late": 7}, "b": {"token": 2}}
    assert to_host([]) == {}


@pytest.mark.parametrize("values", [torch.tensor([1]), torch.tensor([1, 2, 3]), torch.tensor(1)])
def test_a_column_has_a_row_a_request(values):
    with pytest.raises(ValueError, match="a column of 2 requests has values of shape"):
        Column(("a", "b"), values)
