"""Engines that give memory back: what they refuse, when they may, and who slips in meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from phalanx import DeploymentConfig, Engine, EngineArgs, InvalidRequestError, RuntimeConfig
from phalanx.engine.dispatcher import RequestDispatcher
from phalanx.engine.requests import RequestTable
from phalanx.engine.resident_memory import rss_bytes
from phalanx.engine.sinks import FutureSink
from phalanx.errors import (
    EngineAsleepError,
    EngineOverloadedError,
    PhalanxError,
    RequestFailedError,
)
from phalanx.schema.control import (
    ALL_TAGS,
    CheckWeights,
    Continue,
    JoinWeightGroup,
    LoadWeights,
    MemoryTag,
    Pause,
    PauseMode,
    ReplaceWeights,
    SetWeightVersion,
    Sleep,
    Wake,
    WeightCheck,
)
from phalanx.schema.statistics import EngineMemory, LoopStatistics
from phalanx.testing import CountingArgs, CountOutput, CountRequest, ManualClock

KV = frozenset({MemoryTag.KV_CACHE})
WEIGHTS = frozenset({MemoryTag.WEIGHTS})


@dataclass
class ScriptedReplica:
    """Answers operations when the test says so."""

    answers: list[Future] = field(default_factory=list)
    ops: list[object] = field(default_factory=list)
    loop_statistics: LoopStatistics = field(default_factory=LoopStatistics)
    called: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    refusal: Exception | None = None
    """What it raises at once."""

    def control(self, op):
        self.ops.append(op)
        if self.refusal is not None:
            self.called.release()
            raise self.refusal
        self.answers.append(Future())
        self.called.release()
        return self.answers[-1]

    def answer(self, value, asleep=None):
        if asleep is not None:
            self.loop_statistics = LoopStatistics(asleep=asleep)
        self.answers[-1].set_result(value)


def await_call(replicas):
    for replica in replicas:
        replica.called.acquire()


@pytest.fixture
def scripted():
    """A dispatcher over two scripted replicas, and what runs an operation on a thread of its own."""
    requests = RequestTable(ManualClock(), RuntimeConfig(), 2)
    replicas = [ScriptedReplica(), ScriptedReplica()]
    dispatcher = RequestDispatcher(replicas, requests, 2)
    outcomes: list[object] = []

    def outcome(op):
        try:
            return dispatcher.control(op)
        except PhalanxError as error:
            return error

    def begin(op):
        thread = threading.Thread(target=lambda: outcomes.append(outcome(op)))
        thread.start()
        await_call(replicas)
        return thread

    yield requests, replicas, outcomes, begin
    for replica in replicas:
        for answer in replica.answers:
            assert answer.done()


def test_a_sleeping_engine_refuses_at_once_and_says_what_to_do(counting):
    assert counting.control(Sleep(KV))
    for call in (counting.step, counting.submit, counting.stream):
        with pytest.raises(EngineAsleepError, match=r"kv_cache.*Wake.*not started") as raised:
            call(CountRequest(count=1))
        assert raised.value.retry_after_s == 1
    memory = counting.memory
    assert (memory.asleep, memory.resident, memory.ready) == (KV, ALL_TAGS - KV, False)
    assert counting.statistics().num_accepted == 0
    assert counting.statistics().num_refused == 3
    assert counting.control(Wake())
    assert counting.step(CountRequest(count=2)) == CountOutput((0, 1))
    assert counting.memory.ready
    assert counting.memory.rss_bytes > 1 << 20


def test_i86_sleep_and_wake_may_be_repeated_in_any_order(counting):
    for op in (Wake(KV), Sleep(KV), Sleep(KV), Sleep(WEIGHTS), Wake(KV), Wake(KV), Sleep(WEIGHTS)):
        assert counting.control(op)
    assert counting.memory.asleep == WEIGHTS
    assert counting.control(Wake())
    assert counting.memory.ready


def test_an_engine_with_live_requests_does_not_sleep(gated, gate):
    future = gated.submit(CountRequest(count=3))
    gate.await_tick()
    assert gated.control(Sleep()) is False
    assert gated.memory.ready
    gate.open()
    assert future.result() == CountOutput((0, 1, 2))
    assert gated.control(Sleep())


def test_i82_what_is_paused_is_held_over_a_sleep(counting):
    assert counting.control(Pause(PauseMode.IN_PLACE))
    future = counting.submit(CountRequest(count=3))
    assert counting.control(Sleep())
    # It is held, whatever else is done, until everything is there again.
    assert counting.control(Continue())
    assert counting.control(Sleep(KV))
    assert counting.control(Wake(WEIGHTS))
    assert not future.done()
    assert counting.control(Wake())
    assert future.result() == CountOutput((0, 1, 2))


def test_complaint_slime_2015_no_request_slips_in_while_the_engine_falls_asleep(scripted):
    requests, replicas, outcomes, begin = scripted
    thread = begin(Sleep())
    with pytest.raises(EngineAsleepError, match="falls asleep"):
        requests.accept("late", FutureSink())
    for tags in (KV, ALL_TAGS):
        for replica in replicas:
            replica.answer(True, tags)
        if tags == KV:
            await_call(replicas)
    thread.join()
    assert outcomes == [True]
    with pytest.raises(EngineAsleepError, match="Wake"):
        requests.accept("later", FutureSink())
    thread = begin(Wake())
    for replica in replicas:
        replica.answer(True, frozenset())
    thread.join()
    assert requests.accept("awake", FutureSink())


def test_replicas_fall_asleep_together_or_not_at_all(scripted):
    requests, replicas, outcomes, begin = scripted
    thread = begin(Sleep(KV))
    replicas[0].answer(True, KV)
    replicas[1].answer(False)
    await_call(replicas)
    assert [replica.ops[-1] for replica in replicas] == [Wake(KV), Wake(KV)]
    for replica in replicas:
        replica.answer(True, frozenset())
    thread.join()
    assert outcomes == [False]
    assert requests.accept("still awake", FutureSink())


def test_weights_stay_where_a_replica_refuses_to_sleep(scripted):
    """Those of a trainer would not come back with a wake."""
    _, replicas, outcomes, begin = scripted
    thread = begin(Sleep())
    replicas[0].answer(True, KV)
    replicas[1].answer(False)
    await_call(replicas)
    for replica in replicas:
        assert replica.ops == [Sleep(KV), Wake(KV)]
        replica.answer(True, frozenset())
    thread.join()
    assert outcomes == [False]


def test_an_operation_that_one_replica_refuses_is_waited_for_on_all(scripted):
    _, replicas, outcomes, begin = scripted
    thread = begin(SetWeightVersion("v2"))
    replicas[0].answers[-1].set_result(False)
    assert thread.is_alive()
    replicas[1].answer(True)
    thread.join()
    assert outcomes == [False]


def test_weights_that_one_replica_has_and_another_refuses_are_no_refusal(scripted):
    _, replicas, outcomes, begin = scripted
    thread = begin(LoadWeights("new", "v2"))
    refusal = InvalidRequestError("it is not there", field="path")
    replicas[0].answer(True)
    replicas[1].answers[-1].set_exception(refusal)
    thread.join()
    thread = begin(LoadWeights("nowhere", "v2"))
    for replica in replicas:
        replica.answers[-1].set_exception(refusal)
    thread.join()
    [mixed, refused] = outcomes
    assert isinstance(mixed, RequestFailedError)
    assert str(mixed).startswith("1 of 2 replicas have the new weights")
    assert refused is refusal


def test_weights_for_which_one_replica_has_no_room_are_waited_for_on_the_others(scripted):
    _, replicas, outcomes, begin = scripted
    replicas[1].refusal = EngineOverloadedError("no shared memory is left")
    thread = begin(ReplaceWeights({}, "v2"))
    assert thread.is_alive()
    replicas[0].answer(True)
    thread.join()
    [mixed] = outcomes
    assert isinstance(mixed, RequestFailedError)
    assert str(mixed).endswith("send them again, to all: no shared memory is left")


def test_each_replica_joins_a_weight_group_at_ranks_of_its_own(scripted):
    _, replicas, _, begin = scripted
    thread = begin(JoinWeightGroup("127.0.0.1", 1, 1, 5, "g", "gloo"))
    assert [replica.ops[0].rank_offset for replica in replicas] == [1, 3]
    for replica in replicas:
        replica.answer(True)
    thread.join()


def test_the_version_follows_what_was_applied(counting):
    assert counting.version == "default"
    assert counting.control(SetWeightVersion("step-7"))
    assert counting.version == "step-7"
    assert counting.control(Sleep())
    assert counting.version == "step-7"


def test_a_question_that_a_plugin_cannot_answer_is_refused(counting):
    with pytest.raises(InvalidRequestError, match="counting"):
        counting.ask(CheckWeights(WeightCheck.CHECKSUM))
    assert counting.step(CountRequest(count=1)) == CountOutput((0,))


def test_an_engine_that_has_not_started_holds_nothing():
    deployment = DeploymentConfig.local(auto_start=False)
    args = EngineArgs("counting", CountingArgs())
    with Engine(args, deployment=deployment) as engine:
        assert engine.memory.asleep == frozenset()
        assert engine.memory.rss_bytes > 0
        assert engine.version == "default"


def test_the_resident_set_of_a_process_that_has_ended_is_nothing():
    assert rss_bytes([2**22 + 1]) == 0


def test_memory_says_why_nothing_is_taken():
    waiting = EngineMemory(waiting_for_weights=True)
    assert not waiting.ready
    assert "ReplaceWeights" in str(waiting.refusal())
