"""A refused step takes nothing: neither pages, nor marks, nor half of a batch."""

from __future__ import annotations

import pytest

from phalanx.step.outcomes import AdmitOutcome, AdmitRuntimeError, AllocationFailed
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.step_models import CacheReader, cache_reader_engine, expected_tokens
from phalanx.testing.token_request import NODE
from tests.step.caches import in_flight, lengths
from tests.step.stepping import Stepping

X, Y = (1, 2, 3, 4), (5, 6, 7, 8)


@pytest.fixture(params=[True, False], ids=["batched", "row by row"])
def node(request) -> CacheReader:
    return CacheReader(batched=request.param)


def test_item_8_5_4_x_admitted_y_refused_gives_x_back(node):
    stepping = Stepping(cache_reader_engine(3, 2, node=node))
    cache = stepping.engine.resource("kv")
    x, y = stepping.open("x", X), stepping.open("y", Y)
    batch = stepping.step(x=0, y=0)
    assert isinstance(batch.admit_error, AllocationFailed)
    assert batch.admit_error.request_id == "y"
    assert batch.admit_error.pages_short == 1
    assert batch.failed_resource == "kv"
    assert (batch.outputs, batch.failed_requests) == ([], {})
    assert (x.outputs, y.outputs) == ([], [])
    assert node.num_forwards == 0
    assert cache.num_free_pages == 3
    assert in_flight(cache) == []
    assert lengths(cache, "x") == {}
    assert not stepping.step(x=0).failed_requests
    assert x.outputs == list(expected_tokens(X, 1))
    stepping.close()


def test_defect_8_6_1_running_rows_keep_what_they_had_when_a_step_is_refused(node):
    stepping = Stepping(cache_reader_engine(4, 2, node=node))
    cache = stepping.engine.resource("kv")
    stepping.open("x", X)
    stepping.open("y", Y[:3])
    stepping.step(x=0, y=0)
    assert cache.num_free_pages == 0
    batch = stepping.step(x=0, y=0)
    assert batch.admit_error.request_id == "x"
    assert (cache.stored_len("x"), cache.stored_len("y")) == (4, 3)
    assert cache.num_free_pages == 0
    assert in_flight(cache) == []
    assert stepping.step(y=0).admit_error is None, "y has a place left in its page"
    stepping.engine.remove_request("y")
    assert stepping.finish("x") == {}
    assert tuple(stepping.states["x"].outputs) == expected_tokens(X, 3)
    stepping.close()


@pytest.mark.parametrize(
    "reason", [AllocationFailed("full", 1, "y"), AdmitRuntimeError("never", "y")]
)
def test_defect_8_6_1_a_refusal_of_the_second_resource_rolls_back_the_first(node, reason):
    refusing = [True]

    def react(verb, rids):
        refused = verb == "admit" and "y" in rids and refusing
        return AdmitOutcome(ok=False, reason=reason) if refused else None

    probe = ProbeSpec("probe", frozenset({NODE}), react=react)
    stepping = Stepping(cache_reader_engine(8, 2, node=node, probe=probe))
    stepping.open("x", X)
    stepping.open("y", Y)
    batch = stepping.step(x=0, y=0)
    assert batch.admit_error is reason
    assert batch.failed_resource == "probe"
    cache = stepping.engine.resource("kv")
    assert cache.num_free_pages == 8
    assert in_flight(cache) == []
    assert not stepping.engine.resource("probe").in_flight
    refusing.clear()
    assert stepping.finish("x", "y") == {}
    assert tuple(stepping.states["y"].outputs) == expected_tokens(Y, 3)
    stepping.close()


def test_a_terminal_refusal_names_its_request(node):
    stepping = Stepping(cache_reader_engine(8, 2, node=node, max_seq_len=4))
    stepping.open("x", X)
    stepping.open("y", (*Y, 9))
    batch = stepping.step(x=0, y=0)
    assert isinstance(batch.admit_error, AdmitRuntimeError)
    assert batch.admit_error.request_id == "y"
    assert stepping.engine.resource("kv").num_free_pages == 8


def test_a_refused_row_of_a_failed_batch_fails_alone():
    """One that is refused only on its own, after the forward of all has failed."""
    calls = []

    def react(verb, rids):
        calls.append((verb, rids))
        if verb == "plan" and len(rids) > 1:
            raise ValueError("not together")
        if verb == "admit" and rids == ("y",):
            return AdmitOutcome(ok=False, reason=AllocationFailed("full", 1, "y"))
        return None

    probe = ProbeSpec("probe", frozenset({NODE}), react=react)
    stepping = Stepping(cache_reader_engine(8, 2, probe=probe))
    stepping.open("x", X)
    stepping.open("y", Y)
    batch = stepping.step(x=0, y=0)
    assert batch.admit_error is None
    assert "refused on its own" in str(batch.failed_requests["y"])
    assert stepping.states["x"].outputs == list(expected_tokens(X, 1))
    stepping.close()
