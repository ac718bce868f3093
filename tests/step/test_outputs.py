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


class Searched(tuple):
    def index(self, *args):
        raise AssertionError("searched for each row")

    __contains__ = index


def test_rows_are_found_without_a_search_through_all_requests():
    rids = Searched(f"r{index}" for index in range(4))
    outputs = NodeOutputs({"token": Column(rids, torch.arange(4))})
    assert [int(outputs.row(f"r{index}")["token"]) for index in range(4)] == [0, 1, 2, 3]
    assert outputs.row("nobody") == {}
    taken = outputs.of_rows(rids, {"token": ("r2", "r0")})
    assert taken.columns["token"].values.tolist() == [2, 0]


def test_a_request_alone_has_its_row_and_nobody_elses():
    outputs = NodeOutputs(
        {"token": Column(("a", "b"), torch.tensor([1, 2]))}, {"a": {"mask": torch.tensor(3)}}
    )
    assert outputs.receivers == ("a", "b")
    assert to_host([outputs.alone("a")]) == {"a": {"token": 1, "mask": 3}}
    assert to_host([outputs.alone("b")]) == {"b": {"token": 2}}


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
