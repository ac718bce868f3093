"""A loop that looks ahead when something goes wrong: faults, refusals, pauses and interrupts."""

from __future__ import annotations

import threading

import pytest

from phalanx.step.outcomes import AdmitOutcome, AllocationFailed
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.step_models import CacheReader
from phalanx.testing.token_request import NODE, InjectedError, Stage, StepFault
from tests.loop.surprising import check_outputs, due_tokens
from tests.step.caches import in_flight

IN_PROBE = {one.value: one for one in (Stage.ADMIT, Stage.PLAN, Stage.COMMIT, Stage.PUBLISH)}
WHERE = [one for one in Stage if one not in (Stage.CONFIGS, Stage.PUSH_BACK)]


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("stage", WHERE)
def test_item_8_5_9_a_fault_at_any_stage_ends_its_own_request(benches, stage, batched):
    """The prepared step is given up first; what a fault in it leaves behind would be seen."""

    def react(verb, rids):
        for rid in rids if verb in IN_PROBE else ():
            bench.states[rid].strike(IN_PROBE[verb])

    probe = ProbeSpec("probe", frozenset({NODE}), react=react)
    bench = benches(node=CacheReader(batched=batched), probe=probe)
    bench.start("a", 4, 5)
    bench.start("bad", 4, 5, fault=StepFault(stage, 2))
    bench.start("c", 4, 5)
    bench.finish()
    assert str(bench.error("bad")) == stage.value
    for rid in "ac":
        if stage is Stage.COMMIT and batched:
            assert str(bench.error(rid)) == "commit", "nobody can trust what is committed"
        else:
            assert bench.output(rid) == due_tokens(bench.states[rid])


def test_item_8_5_9_a_refused_step_gives_up_the_one_that_was_prepared_on_it(benches):
    """A pool for one and a half: whoever is pushed back is computed again and gives the same."""
    bench = benches(num_pages=5, page_size=2)
    for index in range(3):
        bench.start(f"r{index}", 3, 6)
    bench.finish()
    assert bench.loop.num_push_backs > 0
    check_outputs(bench)


def test_room_that_ended_requests_have_freed_meanwhile_is_room(benches):
    """b's first step ahead finds no room while a, which ends now, still holds its pages."""
    bench = benches(num_pages=4, page_size=2, running=2)
    bench.start("a", 6, 2)
    bench.start("b", 6, 2)
    bench.finish()
    assert bench.loop.num_push_backs == 0
    check_outputs(bench)


def test_rule_2_17_6_every_outcome_is_published(benches):
    log, answers = [], {}

    def react(verb, rids):
        return answers.pop(verb, None)

    bench = benches(probe=ProbeSpec("probe", frozenset({NODE}), log, react))
    bench.start("a", 3, 3)
    bench.start("bad", 3, 3, fault=StepFault(Stage.FORWARD, 1))
    answers["admit"] = AdmitOutcome(ok=False, reason=AllocationFailed("told to", 1, "a"))
    bench.finish()
    steps: list[list[str]] = [[]]
    for one in log:
        if one.verb == "publish":
            steps[-1].append("publish")
        elif one.verb == "admit" and steps[-1]:
            steps.append([])
    assert steps[0] == ["publish"] * 2, "the refused step"
    assert all("publish" in step for step in steps)


@pytest.mark.parametrize("verb", ["plan", "commit"])
def test_what_escapes_on_a_thread_is_raised_by_the_tick(benches, verb):
    calls = []

    def react(called, rids):
        if called == verb:
            calls.append(rids)
            if len(calls) == 2:
                raise KeyboardInterrupt(verb)

    bench = benches(probe=ProbeSpec("probe", frozenset({NODE}), react=react))
    bench.start("a", 3, 6)
    with pytest.raises(KeyboardInterrupt, match=verb):
        for _ in range(4):
            bench.loop.tick()
    bench.loop.cancel_all()
    bench.loop.tick()
    assert bench.loop.idle
    assert not bench.loop.busy


def test_closing_ends_the_threads_and_may_be_repeated(benches):
    before = set(threading.enumerate())
    bench = benches()
    bench.start("a", 3, 6)
    bench.tick()
    own = set(threading.enumerate()) - before
    assert sorted(thread.name for thread in own) == ["phalanx-plan_0", "phalanx-step_0"]
    bench.loop.cancel_all()
    bench.loop.close()
    bench.loop.close()
    assert not any(thread.is_alive() for thread in own)
    assert bench.engine.at_rest()


class FailsLate(CacheReader):
    """Fails the second step of "bad" when the third is planned already."""

    def __init__(self) -> None:
        super().__init__()
        self.planned = threading.Event()
        self.num_plans = 0

    def react(self, verb, rids):
        self.num_plans += verb == "plan"
        if self.num_plans == 3:
            self.planned.set()

    def postprocess(self, row, outputs):
        if row.request_id == "bad" and self.num_forwards == 2:
            assert self.planned.wait(20)
            raise InjectedError("late")


def test_item_8_5_2_a_failure_gives_up_the_step_that_was_prepared_on_it(benches):
    node = FailsLate()
    bench = benches(node=node, probe=ProbeSpec("probe", frozenset({NODE}), react=node.react))
    bench.start("a", 3, 6)
    bench.start("bad", 3, 6)
    while "bad" not in bench.ledger.ended:
        bench.tick()
    assert in_flight(bench.cache) == []
    assert not bench.engine.resource("probe").in_flight
    bench.finish()
    assert bench.output("a") == due_tokens(bench.states["a"])
