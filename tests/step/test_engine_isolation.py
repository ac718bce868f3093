"""What one row's code raises fails that row; its neighbours get what they would have got alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from msgspec import structs

from phalanx.errors import ConfigurationError
from phalanx.step.declaration import ResourceStep, SubmoduleStep
from phalanx.step.outputs import Column, NodeOutputs
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.step_models import CacheReader, cache_reader_engine, expected_tokens
from phalanx.testing.token_request import NODE, InjectedError, Stage, StepFault
from tests.step.stepping import Stepping

PROMPTS = {"a": (3, 1, 4, 1, 5), "b": (9, 2, 6), "c": (5, 3, 5, 8, 9, 7)}
IN_NODE = [
    Stage.PREPARE,
    Stage.DECLARE,
    Stage.PREPROCESS,
    Stage.FORWARD,
    Stage.COLLECT,
    Stage.POSTPROCESS,
    Stage.CHECK_STOP,
]
IN_RESOURCE = [Stage.ADMIT, Stage.PLAN, Stage.COMMIT, Stage.PUBLISH]


def stepping_of(node: CacheReader, states_raise: set[Stage] = frozenset()) -> Stepping:
    """An engine whose probe raises where a request of the step has a fault for it."""

    def react(verb, rids):
        for rid in rids:
            if verb in {stage.value for stage in states_raise} and rid in stepping.states:
                stepping.states[rid].strike(Stage(verb))

    probe = ProbeSpec("probe", frozenset({NODE}), react=react)
    stepping = Stepping(cache_reader_engine(30, 2, node=node, probe=probe))
    return stepping


def outputs(stepping: Stepping, *rids: str) -> dict[str, tuple[int, ...]]:
    return {rid: tuple(stepping.states[rid].outputs) for rid in rids}


def expected(*rids: str, count: int = 3) -> dict[str, tuple[int, ...]]:
    return {rid: expected_tokens(PROMPTS[rid], count) for rid in rids}


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "row by row"])
@pytest.mark.parametrize("stage", IN_NODE + IN_RESOURCE, ids=lambda stage: stage.value)
def test_only_the_culprit_fails(stage, batched, after):
    stepping = stepping_of(CacheReader(batched=batched), set(IN_RESOURCE))
    for rid, prompt in PROMPTS.items():
        fault = StepFault(stage, after) if rid == "b" else None
        stepping.open(rid, prompt, fault=fault)
    failed = stepping.finish(*PROMPTS)
    if stage is Stage.COMMIT and batched:
        # Whose state a shared commit has spoiled cannot be told.
        assert set(failed) == set(PROMPTS)
    else:
        assert failed == {"b": f"InjectedError: {stage.value}"}
        assert outputs(stepping, "a", "c") == expected("a", "c")
    assert not stepping.engine.resource("probe").in_flight
    stepping.close()


def test_two_culprits_fail_with_their_own_errors():
    stepping = stepping_of(CacheReader())
    stepping.open("a", PROMPTS["a"], fault=StepFault(Stage.FORWARD))
    stepping.open("b", PROMPTS["b"])
    stepping.open("c", PROMPTS["c"], fault=StepFault(Stage.PREPARE, 1))
    assert stepping.finish(*PROMPTS) == {
        "a": "InjectedError: forward",
        "c": "InjectedError: prepare_inputs",
    }
    assert outputs(stepping, "b") == expected("b")
    stepping.close()


def test_neighbours_of_a_failed_forward_run_in_the_same_step():
    node = CacheReader()
    stepping = stepping_of(node)
    for rid, prompt in PROMPTS.items():
        stepping.open(rid, prompt, fault=StepFault(Stage.FORWARD) if rid == "b" else None)
    batch = stepping.step(a=0, b=0, c=0)
    assert node.num_forwards == 4, "once together, then one by one"
    assert outputs(stepping, "a", "b", "c") == {**expected("a", "c", count=1), "b": ()}
    assert [row.request_id for row in batch.live_rows()] == ["a", "c"]


def test_a_failed_row_leaves_nothing_behind_but_its_committed_tokens():
    stepping = stepping_of(CacheReader())
    stepping.open("a", PROMPTS["a"], fault=StepFault(Stage.FORWARD, 1))
    stepping.open("b", PROMPTS["b"])
    stepping.step(a=0, b=0)
    cache = stepping.engine.resource("kv")
    free, length = cache.num_free_pages, cache.stored_len("a")
    batch = stepping.step(a=0)
    assert isinstance(batch.failed_requests["a"], InjectedError)
    assert (cache.num_free_pages, cache.stored_len("a")) == (free, length)
    assert stepping.engine.resource("positions").publish("a") == {"main": length}


def test_skipped_rows_leave_the_step_without_an_error():
    node = CacheReader()
    stepping = stepping_of(node)
    for rid, prompt in PROMPTS.items():
        stepping.open(rid, prompt, skips=int(rid == "b"))
    batch = stepping.step(a=0, b=0, c=0)
    assert batch.skipped == {"b"}
    assert batch.request_ids == ("a", "c")
    assert batch.failed_requests == {}
    assert stepping.finish(*PROMPTS) == {}
    assert outputs(stepping, *PROMPTS) == {**expected("b"), **expected("a", "c")}
    stepping.close()


class ReadsTheFirstInput(CacheReader):
    def can_batch(self, walk, rows, inputs):
        return inputs[0] is not None


class CannotSay(CacheReader):
    def can_batch(self, walk, rows, inputs):
        raise InjectedError("can_batch")


def test_a_batch_in_which_all_rows_leave_computes_nothing():
    node = ReadsTheFirstInput()
    stepping = stepping_of(node)
    stepping.open("a", PROMPTS["a"], fault=StepFault(Stage.PREPARE))
    stepping.open("b", PROMPTS["b"], skips=1)
    batch = stepping.step(a=0, b=0)
    assert (batch.skipped, set(batch.failed_requests)) == ({"b"}, {"a"})
    assert node.num_forwards == 0


def test_a_node_that_cannot_say_whether_rows_batch_fails_them():
    node = CannotSay()
    stepping = stepping_of(node)
    for rid in "ab":
        stepping.open(rid, PROMPTS[rid])
    batch = stepping.step(a=0, b=0)
    assert set(batch.failed_requests) == {"a", "b"}
    assert node.num_forwards == 0
    stepping.close()


class Wrong(CacheReader):
    """Breaks the contract for requests whose prompt starts with 9."""

    def __init__(self, broken) -> None:
        super().__init__()
        self.broken = broken

    def declare_step(self, walk, rows, inputs):
        step = super().declare_step(walk, rows, inputs)
        wrong = any(row.info.state.prompt[0] == 9 for row in rows)
        return self.broken("declare", step) if wrong else step

    def forward(self, prepared):
        outputs = super().forward(prepared)
        wrong = any(row.info.state.prompt[0] == 9 for row in prepared.rows)
        return self.broken("forward", outputs) if wrong else outputs


def returns_nothing(stage, value):
    return None if stage == "forward" else value


def returns_a_tensor(stage, value):
    return torch.ones(1) if stage == "forward" else value


def gives_a_bare_tensor(stage, value):
    return NodeOutputs({"token": torch.ones(1)}) if stage == "forward" else value


def gives_a_ragged_number(stage, value):
    return NodeOutputs(value.columns, {"b": {"odd": 3.0}}) if stage == "forward" else value


def returns_too_few_rows(stage, value):
    if stage == "declare":
        return value
    column = value.columns["token"]
    return NodeOutputs({"token": Column(column.request_ids, column.values[1:])})


def names_an_unknown_resource(stage, value):
    if stage == "forward":
        return value
    return replace(value, resources={**value.resources, "nowhere": ResourceStep()})


def names_an_unknown_request(stage, value):
    if stage == "forward":
        return value
    segments = (*value.segments, structs.replace(value.segments[0], request_id="nobody"))
    return SubmoduleStep(
        segments, {**value.resources, "kv": replace(value.resources["kv"], segments=segments)}
    )


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (returns_nothing, "TypeError: the forward of node 'toy' returned a NoneType"),
        (returns_a_tensor, "TypeError: the forward of node 'toy' returned a Tensor"),
        (gives_a_bare_tensor, "TypeError: the forward of node 'toy' returned a Tensor as column"),
        (gives_a_ragged_number, "TypeError: the forward of node 'toy' returned a float as ragged"),
        (returns_too_few_rows, "ValueError: a column of 1 requests has values of shape"),
        (names_an_unknown_resource, "ConfigurationError: node 'toy' declares a step on resources "),
        (names_an_unknown_request, "KeyError: 'nobody'"),
    ],
)
def test_a_broken_contract_fails_the_row(broken, error):
    stepping = stepping_of(Wrong(broken))
    for rid, prompt in PROMPTS.items():
        stepping.open(rid, prompt)
    failed = stepping.finish(*PROMPTS)
    assert list(failed) == ["b"]
    assert failed["b"].startswith(error)
    assert outputs(stepping, "a", "c") == expected("a", "c")
    stepping.close()


def test_an_unknown_resource_is_named_with_those_there_are():
    stepping = stepping_of(Wrong(names_an_unknown_resource))
    stepping.open("b", PROMPTS["b"])
    error = stepping.step(b=0).failed_requests["b"]
    assert isinstance(error, ConfigurationError)
    assert str(error).endswith("['nowhere']; it has ['kv', 'positions', 'probe']")


class Unread(torch.Tensor):
    def clone(self, **options):
        return self

    def tolist(self):
        raise InjectedError("tolist")


class GivesTheUnreadable(CacheReader):
    def forward(self, prepared):
        outputs = super().forward(prepared)
        ragged = {row.request_id: {"number": torch.zeros(1)} for row in prepared.rows}
        if "b" in ragged:
            ragged["b"] = {"number": torch.zeros(1).as_subclass(Unread)}
        return NodeOutputs(outputs.columns, ragged)


def test_only_the_row_whose_values_cannot_be_read_fails():
    stepping = stepping_of(GivesTheUnreadable())
    for rid, prompt in PROMPTS.items():
        stepping.open(rid, prompt)
    assert stepping.finish(*PROMPTS) == {"b": "InjectedError: tolist"}
    assert outputs(stepping, "a", "c") == expected("a", "c")
    stepping.close()


class Reusing(CacheReader):
    """Gives views of one buffer, as a captured forward does."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.zeros(4, dtype=torch.int64)

    def forward(self, prepared):
        column = super().forward(prepared).columns["token"]
        view = self.buffer[: len(column.values)]
        view.copy_(column.values)
        return NodeOutputs(
            {"token": Column(column.request_ids, view)},
            {rid: {"again": view[index]} for index, rid in enumerate(column.request_ids)},
        )


def test_outputs_are_copies_that_no_later_step_overwrites():
    node = Reusing()
    stepping = stepping_of(node)
    stepping.open("a", PROMPTS["a"])
    first = stepping.step(a=0)
    stepping.step(a=0)
    assert int(node.buffer[0]) == expected_tokens(PROMPTS["a"], 2)[1]
    row = first.outputs[0].row("a")
    assert int(row["token"]) == int(row["again"]) == expected_tokens(PROMPTS["a"], 1)[0]
