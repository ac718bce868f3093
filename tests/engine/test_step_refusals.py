"""What a resource answers to a step, and what the caller of an engine sees of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest

from phalanx import Engine, EngineArgs, RequestFailedError
from phalanx.engine_config import EntryArgs
from phalanx.loop.scheduler import Budget
from phalanx.loop.step_loop import StepLoop
from phalanx.plugin import BatchingEntry
from phalanx.schema.control import Flush
from phalanx.step.outcomes import (
    AdmitOutcome,
    AdmitRuntimeError,
    AllocationFailed,
    NotReady,
    RequestOffloading,
)
from phalanx.testing.probe_resource import ProbeSpec
from phalanx.testing.step_models import cache_reader_engine, expected_tokens
from phalanx.testing.token_request import NODE, TokenRequest

PROMPT = (3, 1, 4, 1, 5)


class Ask(msgspec.Struct, frozen=True):
    count: int
    published: bool = False


class Outside:
    """What the engine's resource answers, and how often it was asked; `asked` is set each time."""

    def __init__(self) -> None:
        self.answers: dict[str, AdmitOutcome] = {}
        self.num_asked = 0
        self.asked = threading.Event()

    def react(self, verb: str, rids: tuple[str, ...]) -> AdmitOutcome | None:
        answer = self.answers.get(verb)
        if answer is not None:
            self.num_asked += 1
            self.asked.set()
        return answer


@dataclass(frozen=True)
class SteppedArgs(EntryArgs):
    outside: Outside


class Stepped(BatchingEntry):
    """A step loop over a toy node and a probe."""

    name = "stepped"
    args_cls = SteppedArgs
    request_cls = Ask
    output_cls = tuple

    def setup(self, args: SteppedArgs) -> None:
        probe = ProbeSpec("probe", frozenset({NODE}), react=args.outside.react)
        self.steps = cache_reader_engine(16, 2, probe=probe, host_pages=16)
        self.loop = StepLoop(self.steps, Budget(64, 8))
        self.num_ticks = 0

    def wake_with(self, wake: Callable[[], None]) -> None:
        self.steps.waker.bind(wake)

    def start(self, rid: str, request: Ask) -> None:
        published = {"probe": "pages"} if request.published else None
        self.loop.start(rid, TokenRequest(PROMPT, request.count), published=published)

    def cancel(self, rid: str) -> None:
        self.loop.cancel(rid)

    def tick(self):
        self.num_ticks += 1
        return self.loop.tick()

    @property
    def busy(self) -> bool:
        return self.loop.busy

    def control(self, op) -> bool:
        return self.loop.idle


Engine.register(Stepped)


@pytest.fixture
def outside():
    return Outside()


@pytest.fixture
def engine(outside):
    with Engine(EngineArgs("stepped", SteppedArgs(outside))) as engine:
        yield engine


def stepped(engine) -> Stepped:
    entry = engine.entry
    assert isinstance(entry, Stepped)
    return entry


def check_at_rest(engine) -> None:
    assert engine.control(Flush()), "nobody is left"
    assert stepped(engine).steps.at_rest()


@pytest.mark.parametrize(
    ("reason", "message"),
    [
        (AllocationFailed("never enough", 1, ""), "no room can be made: never enough"),
        (AdmitRuntimeError("of another size"), "the step was refused: of another size"),
    ],
)
def test_item_8_5_7_defect_8_6_5_a_refusal_that_nothing_can_help_reaches_the_caller(
    engine, outside, reason, message
):
    outside.answers["admit"] = AdmitOutcome(ok=False, reason=reason)
    with pytest.raises(RequestFailedError, match=message):
        engine.step(Ask(3))
    outside.answers.clear()
    assert engine.step(Ask(3)) == expected_tokens(PROMPT, 3)
    check_at_rest(engine)


@pytest.mark.parametrize(
    ("verb", "answer"),
    [
        ("admit", AdmitOutcome(ready=False)),
        ("admit", AdmitOutcome(ok=False, reason=NotReady("told so"))),
        ("admit", AdmitOutcome(ok=False, reason=RequestOffloading("told so"))),
        ("retrieve", AdmitOutcome(ready=False)),
    ],
)
def test_item_8_5_7_defect_8_6_6_who_waits_costs_no_tick_and_goes_on_when_it_is_woken(
    engine, outside, verb, answer
):
    outside.answers[verb] = answer
    future = engine.submit(Ask(3, published=True))
    outside.asked.wait()
    for _ in range(10):
        assert not engine.control(Flush()), "it is still there"
    assert stepped(engine).num_ticks <= 2, "between operations the loop sleeps"
    outside.answers.clear()
    stepped(engine).steps.waker.wake()
    assert future.result() == expected_tokens(PROMPT, 3)
    assert outside.num_asked == 1
    check_at_rest(engine)


def test_item_8_5_7_a_waiting_request_can_be_cancelled(engine, outside):
    outside.answers["admit"] = AdmitOutcome(ready=False)
    future = engine.submit(Ask(3), rid="waits")
    outside.asked.wait()
    engine.cancel("waits")
    assert future.result() == ()
    check_at_rest(engine)


def test_an_engine_closes_while_a_request_waits(outside):
    outside.answers["admit"] = AdmitOutcome(ready=False)
    engine = Engine(EngineArgs("stepped", SteppedArgs(outside)))
    future = engine.submit(Ask(3))
    outside.asked.wait()
    engine.close()
    assert future.exception() is not None
