"""Requests that fail in the loop: for want of room, by a refusal, or by what their own code raises."""

from __future__ import annotations

import pytest

from phalanx.errors import ConfigurationError, RequestFailedError
from phalanx.loop.step_loop import StepLoop
from phalanx.step.outcomes import AdmitOutcome, AdmitRuntimeError, AllocationFailed
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.step_models import CacheReader, cache_reader_engine
from phalanx.testing.token_request import NODE, InjectedError, Stage, StepFault
from tests.loop.ledger import Bench, bench_of, expected
from tests.loop.threaded import ThreadedLoop


def test_a_request_beyond_the_pool_fails_and_others_go_on():
    bench = bench_of(num_pages=4, page_size=2)
    bench.start("a", 3, 3)
    bench.start("too long", 9, 3)
    bench.start("b", 3, 3)
    bench.finish()
    error = bench.error("too long")
    assert isinstance(error, RequestFailedError)
    assert "no room can be made: 5 pages wanted, 4 free" in str(error)
    for rid in "ab":
        assert bench.output(rid) == expected(bench, rid)


def test_a_request_that_grows_beyond_the_pool_fails_alone():
    bench = bench_of(num_pages=4, page_size=2)
    bench.start("grows", 4, 30)
    bench.start("b", 3, 3)
    bench.finish()
    assert isinstance(bench.error("grows"), RequestFailedError)
    assert bench.output("b") == expected(bench, "b")


def test_defect_8_6_5_a_terminal_refusal_ends_the_request_it_names():
    engine = cache_reader_engine(64, 4, max_seq_len=6)
    bench = Bench(engine)
    bench.start("a", 3, 3)
    bench.start("too long", 5, 3)
    bench.finish()
    assert "the step was refused: 7 tokens exceed" in str(bench.error("too long"))
    assert bench.output("a") == expected(bench, "a")


@pytest.mark.parametrize("named", [None, "somebody else"])
def test_defect_8_6_5_a_terminal_refusal_of_nobody_known_ends_all_rows(named):
    reason = AdmitRuntimeError("cannot work", named)

    def react(verb, rids):
        return AdmitOutcome(ok=False, reason=reason) if verb == "admit" else None

    bench = bench_of(probe=ProbeSpec("probe", frozenset({NODE}), react=react))
    for rid in "ab":
        bench.start(rid, 3, 3)
    bench.finish(max_ticks=3)
    assert all("cannot work" in str(bench.error(rid)) for rid in "ab")


def test_a_refusal_for_want_of_room_that_names_nobody_ends_too():
    reason = AllocationFailed("never enough", 1, "")

    def react(verb, rids):
        return AdmitOutcome(ok=False, reason=reason) if verb == "admit" else None

    bench = bench_of(probe=ProbeSpec("probe", frozenset({NODE}), react=react))
    for rid in "abc":
        bench.start(rid, 3, 3)
    bench.finish(max_ticks=9)
    assert all("never enough" in str(bench.error(rid)) for rid in "abc")


def test_room_that_a_failed_row_frees_is_used_before_anyone_is_pushed_back():
    """b fails while it declares; what it held is enough for a, who would fail otherwise."""
    bench = bench_of(num_pages=4, page_size=2, node=CacheReader(batched=False))
    bench.start("b", 4, 4, fault=StepFault(Stage.DECLARE, 1))
    bench.start("a", 4, 4)
    bench.tick()
    assert bench.cache.num_free_pages == 0
    bench.finish()
    assert isinstance(bench.error("b"), InjectedError)
    assert bench.output("a") == expected(bench, "a")
    assert bench.loop.num_push_backs == 0


@pytest.mark.parametrize("stage", [Stage.NEXT_WORK, Stage.CONFIGS, Stage.ADVANCE, Stage.TAKE_DELTA])
@pytest.mark.parametrize("after", [0, 1])
def test_a_state_that_raises_ends_its_own_request(stage, after):
    bench = bench_of(num_pages=16, page_size=2)
    bench.start("a", 4, 4)
    bench.start("bad", 4, 4, fault=StepFault(stage, after))
    bench.start("c", 4, 4)
    if stage is Stage.CONFIGS:
        bench.tick()
        bench.loop.push_back_all()
    bench.finish()
    assert str(bench.error("bad")) == stage.value
    for rid in "ac":
        assert bench.output(rid) == expected(bench, rid)


@pytest.mark.parametrize("cancel", [True, False])
def test_an_output_that_cannot_be_made_is_a_failure(cancel):
    bench = bench_of()
    bench.start("bad", 4, 4, fault=StepFault(Stage.OUTPUT))
    bench.start("c", 4, 4)
    bench.tick()
    if cancel:
        bench.loop.cancel("bad")
    bench.finish()
    assert str(bench.error("bad")) == "output"
    assert bench.output("c") == expected(bench, "c")


def test_a_push_back_that_raises_ends_the_request():
    bench = bench_of(num_pages=4, page_size=2)
    bench.start("old", 2, 6)
    bench.start("bad", 2, 6, fault=StepFault(Stage.PUSH_BACK))
    bench.finish()
    assert str(bench.error("bad")) == "push_back"
    assert bench.output("old") == expected(bench, "old")


def test_work_at_an_unknown_node_ends_the_request():
    bench = bench_of()
    bench.start("a", 2, 2, place=("nowhere", "w"))
    bench.start("b", 2, 2)
    bench.finish()
    assert isinstance(bench.error("a"), ConfigurationError)
    assert "'nowhere'; there are ['toy']" in str(bench.error("a"))
    assert bench.output("b") == expected(bench, "b")


@pytest.mark.parametrize("batched", [True, False])
def test_a_resource_that_cannot_open_a_request_ends_it(batched):
    def react(verb, rids):
        if verb == "ingest" and rids == ("bad",):
            raise InjectedError(verb)

    probe = ProbeSpec("probe", frozenset({NODE}), react=react)
    bench = bench_of(probe=probe, node=CacheReader(batched=batched))
    for rid in ("a", "bad", "c"):
        bench.start(rid, 3, 2)
    bench.finish()
    assert str(bench.error("bad")) == "ingest"
    assert "bad" not in bench.ledger.scheduled
    for rid in "ac":
        assert bench.output(rid) == expected(bench, rid)


class Forgetful(CacheReader):
    def cleanup_request(self, request_id):
        super().cleanup_request(request_id)
        if request_id == "bad":
            raise InjectedError("cleanup")


@pytest.mark.parametrize("kind", [StepLoop, ThreadedLoop])
def test_a_node_that_fails_to_clean_up_keeps_nobody_from_ending(kind, caplog):
    node = Forgetful()
    bench = bench_of(node=node, kind=kind)
    bench.start("a", 3, 4)
    bench.start("bad", 3, 2)
    bench.finish()
    for rid in ("a", "bad"):
        assert bench.output(rid) == expected(bench, rid)
    assert node.forgotten == ["bad", "a"]
    assert "node 'toy' did not forget request 'bad'" in caplog.text
    bench.loop.close()


def test_a_resource_that_fails_to_free_a_request_keeps_the_others_from_nothing(caplog):
    def react(verb, rids):
        if verb == "remove" and rids == ("bad",):
            raise InjectedError(verb)

    bench = bench_of(probe=ProbeSpec("probe", frozenset({NODE}), react=react))
    bench.start("bad", 3, 2)
    while bench.loop.busy:
        bench.tick()
    assert bench.output("bad") == expected(bench, "bad")
    assert bench.cache.at_rest()
    assert "resource 'probe' did not forget request 'bad'" in caplog.text


class Limitless(CacheReader):
    def max_batch_size(self, walk):
        if walk == "w":
            raise InjectedError("max_batch_size")
        return None


@pytest.mark.parametrize("kind", [StepLoop, ThreadedLoop])
def test_a_node_that_cannot_say_how_many_rows_it_takes_fails_them(kind):
    bench = bench_of(node=Limitless(), kind=kind)
    bench.start("a", 3, 3)
    for rid in ("bad", "worse"):
        bench.start(rid, 3, 3, place=(NODE, "w"))
    bench.finish()
    for rid in ("bad", "worse"):
        assert str(bench.error(rid)) == "max_batch_size"
    assert bench.output("a") == expected(bench, "a")
    bench.loop.close()
