"""One rank of an engine as its parent sees it, over a real connection, in this process."""

from __future__ import annotations

import threading

import pytest

from phalanx import DeviceConfig, EngineConfig, RuntimeConfig
from phalanx.engine.deployment_plan import DeploymentPlan
from phalanx.engine.ranks import RankPlace
from phalanx.engine.registry import plugin_ref
from phalanx.engine.workers.channel import connect, open_replica
from phalanx.engine.workers.crashes import crash
from phalanx.engine.workers.engine_runtime import (
    EngineWorkerConfig,
    Outbox,
    engine_worker_factory,
)
from phalanx.engine.workers.messages import Crashed
from phalanx.engine.workers.portable_errors import portable
from phalanx.engine.workers.runtime import DuringRequestError
from phalanx.errors import (
    EngineUnavailableError,
    InvalidRequestError,
    RequestFailedError,
    StreamStalledError,
)
from phalanx.schema.deployment import NodeResources
from phalanx.schema.events import Delta, Failed, Final, Scheduled
from phalanx.schema.parallel import ParallelConfig
from phalanx.schema.statistics import LoopStatistics
from phalanx.testing import Counting, CountingArgs, CountRequest
from phalanx.testing.faulty import Action, Faulty, FaultyArgs, FaultyRequest
from tests.engine.workers.echo_process import next_replies
from tests.engine.workers.supervised import in_background


class OutOfQuotaError(RequestFailedError):
    """Pickles well, and cannot be built from that."""

    def __init__(self, user, quota):
        super().__init__(f"{user} has used {quota}")
        self.lock = None


class OddCounting(Counting):
    """Fails requests for 1 with an error that does not travel, and answers 2 with a lock."""

    name = "odd_counting"

    def _advance(self, rid, count):
        events = super()._advance(rid, count)
        match count.request.count:
            case 1:
                return [Scheduled(rid), Failed(rid, OutOfQuotaError("me", 3))]
            case 2:
                return [Final(rid, threading.Lock())] if count.done == 2 else []
        return events


@pytest.fixture
def served():
    """Serves a plugin; returns the parent's side and the future of what serving ends in."""
    links = []

    def served(plugin, args):
        placement = DeploymentPlan.build(ParallelConfig(), 1, (NodeResources(0, (0,)),)).workers[0]
        engine_config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
        config = EngineWorkerConfig(
            plugin_ref(plugin), args, engine_config, RankPlace(), placement, None
        )
        link = open_replica(1, 1 << 20)
        runtime = engine_worker_factory(config)
        worker = connect(link.endpoints[0])
        serving = in_background(lambda: runtime.serve(worker))
        links.append((link, runtime, worker, serving))
        return link, serving

    yield served
    for link, runtime, worker, serving in links:
        link.sender.shut_down("the test is over")
        serving.exception()
        runtime.close()
        link.sender.close()
        link.channels[0].close()
        worker.close()


@pytest.mark.parametrize(
    ("action", "cause"), [(Action.RAISE, "FaultyError"), (Action.UNPICKLABLE, "TypeError")]
)
def test_what_ends_a_plain_plugin_names_its_request(served, action, cause):
    link, serving = served(Faulty, FaultyArgs())
    link.sender.submit(6, "good", FaultyRequest())
    link.sender.submit(7, "bad", FaultyRequest(action=action))
    error = serving.exception()
    assert isinstance(error, DuringRequestError) and error.number == 7
    said = crash("serving", error)
    assert said.number == 7 and said.error.startswith((cause, f"phalanx.testing.faulty.{cause}"))
    assert "DuringRequestError" not in said.error + said.traceback


def test_a_result_that_cannot_be_pickled_names_its_request_among_others(served):
    link, _ = served(OddCounting, CountingArgs())
    link.sender.submit(4, "good", CountRequest(count=100))
    link.sender.submit(5, "bad", CountRequest(count=2))
    while True:
        crashes = [said for said, _ in next_replies(link.channels[0]) if isinstance(said, Crashed)]
        if crashes:
            break
    assert crashes[0].number == 5 and "cannot pickle '_thread.lock'" in crashes[0].error


def test_an_error_whose_class_does_not_travel_ends_its_request_alone(served):
    link, _ = served(OddCounting, CountingArgs())
    link.sender.submit(4, "bad", CountRequest(count=1))
    ended = []
    while not ended:
        for _, events in next_replies(link.channels[0]):
            ended += [event for _, event in events if isinstance(event, Failed)]
    error = ended[0].error
    assert type(error) is RequestFailedError and str(error) == "me has used 3"
    assert error.__notes__ == [f"in the worker: {__name__}.OutOfQuotaError"]


class OddFieldError(InvalidRequestError):
    def __init__(self, first, second):
        super().__init__(f"{first}{second}", field="image")


class FieldlessError(InvalidRequestError):
    def __init__(self, first, second):
        Exception.__init__(self, first)
        self.field = second


class UnprintableError(RequestFailedError):
    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (StreamStalledError("slow"), StreamStalledError, "slow"),
        (EngineUnavailableError("gone"), EngineUnavailableError, "gone"),
        (OutOfQuotaError("me", 3), RequestFailedError, "me has used 3"),
        (UnprintableError(), RequestFailedError, "UnprintableError"),
        (RequestFailedError("a", threading.Lock()), RequestFailedError, None),
        (ValueError("other"), RequestFailedError, "other"),
        (OddFieldError("a", "b"), InvalidRequestError, "ab"),
        (FieldlessError("a", threading.Lock()), InvalidRequestError, "a"),
    ],
)
def test_an_error_keeps_its_message_and_the_nearest_class_of_ours(error, kind, text):
    found = portable(error)
    assert type(found) is kind and found.args == (str(found),)
    assert text in (None, str(found))


def test_a_portable_error_keeps_its_field_and_its_cause():
    error = OddFieldError("a", "b")
    error.__cause__ = KeyError("of this")
    found = portable(error)
    assert found.field == "image" and portable(FieldlessError("a", threading.Lock())).field == ""
    assert "caused in the worker by:\nKeyError: 'of this'" in found.__notes__


class Journal:
    """What an outbox needs; writes down what is called, in order."""

    loop_statistics = LoopStatistics()

    def __init__(self):
        self.calls = []

    def synchronize(self):
        self.calls.append("synchronize")

    def send_events(self, events, execution_s, statistics):
        self.calls.append(events)


def test_a_device_has_finished_before_events_are_sent():
    journal = Journal()
    outbox = Outbox(journal, journal, journal)
    outbox.wake()
    outbox.add(1, Delta("a", "b"))
    outbox.wake()
    assert journal.calls == ["synchronize", [(1, Delta("a", "b"))]]
