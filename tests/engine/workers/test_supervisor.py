"""Starting, feeding and stopping a group of workers, over stand-ins in processes of their own."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest

from phalanx.engine.workers.lifecycle import LifecycleState
from phalanx.engine.workers.messages import Answer, Apply, Cancel, Events, Finished
from phalanx.engine.workers.runtime import WorkerFactorySpec
from phalanx.errors import ConfigurationError, EngineUnavailableError, InvalidRequestError
from phalanx.schema.control import Flush
from phalanx.schema.deployment import NodeResources
from phalanx.testing.worker_runtimes import Deed, Held, Misdeed, Phase
from tests.engine.workers.supervised import Recorder, children, in_background, is_alive, supervise

PLACEMENT_VARIABLES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "PHALANX_DEVICE",
    "OMP_NUM_THREADS",
)


@pytest.fixture(scope="module")
def shared():
    """A listener, and a started supervisor of two replicas of two ranks that tells it."""
    listener = Recorder()
    supervisor = supervise(
        listener=listener,
        shape={"replicas": 2, "ranks": 2, "output_rank": 1},
        report=PLACEMENT_VARIABLES,
        base_port=29610,
        extra_env=(("OMP_NUM_THREADS", "7"),),
    )
    ready = supervisor.start()
    yield listener, supervisor, ready
    supervisor.close()
    assert supervisor.state is LifecycleState.STOPPED


def test_r6_s12_every_rank_is_a_worker_that_tells_what_it_is(shared):
    _, supervisor, ready = shared
    facts = [
        (each.metadata["worker_id"], each.metadata["replica_id"], each.metadata["replica_rank"])
        for each in ready
    ]
    assert facts == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    assert [each.metadata["pid"] for each in ready] == list(supervisor.pids)
    assert len(set(supervisor.pids)) == 4 and os.getpid() not in supervisor.pids
    assert all(is_alive(pid) for pid in supervisor.pids)


def test_s7_s8_the_environment_of_a_worker_says_where_it_is_placed(shared):
    before = dict(os.environ)
    _, _, ready = shared
    assert dict(os.environ) == before
    reported = [{name: str(each.metadata[name]) for name in PLACEMENT_VARIABLES} for each in ready]
    for worker_id, environment in enumerate(reported):
        replica_id, rank = divmod(worker_id, 2)
        assert environment == {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(29610 + replica_id),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(worker_id),
            "PHALANX_DEVICE": "cpu",
            "OMP_NUM_THREADS": "7",
        }


def test_r42_r43_every_rank_gets_a_request_and_the_output_rank_answers(shared):
    listener, supervisor, _ = shared
    request = {"image": np.arange(100_000, dtype=np.uint8), "text": "hello"}
    num_bytes = supervisor.submit(1, 10, "a", request)
    assert num_bytes > 100_000
    kinds = {}
    for _ in range(2):
        worker_id, reply, events = listener.replies.get()
        kinds[worker_id] = (type(reply), [number for number, _ in events])
        if events:
            np.testing.assert_array_equal(events[0][1].payload["image"], request["image"])
            assert events[0][1].rid == "a" and reply.execution_s == 0.0
    supervisor.completed(10)
    assert kinds == {2: (Finished, []), 3: (Events, [10])}


def test_r60_the_request_may_change_when_submit_returns(shared):
    listener, supervisor, _ = shared
    arrays = [np.full(300_000, number, dtype=np.uint8) for number in range(20)]
    for number, array in enumerate(arrays):
        supervisor.submit(0, number, str(number), array)
        array[:] = 255
    replies = [listener.replies.get() for _ in range(40)]
    answers = dict(answer for _, _, events in replies for answer in events)
    assert [int(answers[number].payload[-1]) for number in range(20)] == list(range(20))


def test_commands_go_to_a_replica_after_what_was_submitted_before(shared):
    """A cancel to the rank that answers, an operation to all."""
    listener, supervisor, _ = shared
    supervisor.submit(0, 30, "held", Held())
    supervisor.send(0, Cancel(30))
    worker_id, _, events = listener.replies.get()
    assert worker_id == 1
    assert [(number, event.rid, event.cancelled) for number, event in events] == [
        (30, "held", True)
    ]
    supervisor.send(0, Apply(31, Flush()))
    answers = sorted(listener.replies.get()[:2] for _ in range(2))
    assert answers == [(0, Answer(31, True)), (1, Answer(31, True))]


def test_a_request_that_cannot_be_pickled_is_refused_and_nothing_is_sent(shared):
    listener, supervisor, _ = shared
    with pytest.raises(InvalidRequestError, match="request.lock of type lock"):
        supervisor.submit(0, 40, "a", {"lock": threading.Lock()})
    supervisor.submit(0, 41, "b", "next")
    replies = [listener.replies.get() for _ in range(2)]
    assert [number for _, _, events in replies for number, _ in events] == [41]


def test_workers_are_started_once_only(shared):
    _, supervisor, _ = shared
    with pytest.raises(EngineUnavailableError, match="started once only, and these are running"):
        supervisor.start()
    assert supervisor.state is LifecycleState.RUNNING


def test_r55_the_start_is_over_when_every_worker_is_ready(build, pipe, gate):
    slow, fast = pipe("slow"), pipe("fast")
    supervisor = build(
        Misdeed(Phase.LOADING, Deed.WAIT, worker_id=0, announce=slow.path, gate=gate.path),
        Misdeed(Phase.RECEIVING, Deed.ANNOUNCE, worker_id=1, announce=fast.path),
        shape={"replicas": 2},
    )
    starting = in_background(supervisor.start)
    # The fast one serves already while the slow one, launched before it, still loads.
    slow.pid(), fast.pid()
    assert supervisor.state is LifecycleState.STARTING and not starting.done()
    with pytest.raises(EngineUnavailableError, match="still starting"):
        supervisor.submit(1, 1, "early", None)
    gate.open()
    assert [each.worker_id for each in starting.result()] == [0, 1]
    assert supervisor.state is LifecycleState.RUNNING


def test_a_supervisor_that_was_never_started_refuses_and_closes(build):
    supervisor = build()
    assert supervisor.state is LifecycleState.CREATED and supervisor.pids == ()
    with pytest.raises(EngineUnavailableError, match="have not been started"):
        supervisor.submit(0, 1, "a", None)
    supervisor.close()
    assert supervisor.state is LifecycleState.STOPPED
    with pytest.raises(EngineUnavailableError, match="started once only, and these are stopped"):
        supervisor.start()


def test_r68_r71_a_close_ends_every_worker_and_may_be_repeated(started):
    supervisor = started(shape={"replicas": 2})
    pids = supervisor.pids
    supervisor.close()
    assert supervisor.state is LifecycleState.STOPPED and supervisor.failure is None
    assert not any(is_alive(pid) for pid in pids) and supervisor.pids == ()
    supervisor.close()
    with pytest.raises(EngineUnavailableError, match="it is closed"):
        supervisor.submit(0, 1, "a", None)
    with pytest.raises(EngineUnavailableError, match="it is closed"):
        supervisor.send(0, Cancel(1))


def test_s13_whoever_closes_returns_when_all_workers_have_ended(started, pipe, gate):
    stopping = pipe()
    supervisor = started(Misdeed(Phase.STOPPING, Deed.WAIT, announce=stopping.path, gate=gate.path))
    closers = [in_background(supervisor.close) for _ in range(8)]
    pid = stopping.pid()
    assert not any(closer.done() for closer in closers)
    assert supervisor.state is LifecycleState.STOPPING
    with pytest.raises(EngineUnavailableError, match="being closed"):
        supervisor.submit(0, 1, "a", None)
    gate.open()
    for closer in closers:
        closer.result()
    assert not is_alive(pid) and supervisor.state is LifecycleState.STOPPED


def test_a_close_on_the_listeners_thread_does_not_wait_for_itself(build):
    listener = Recorder(on_reply=lambda *reply: supervisor.close())
    supervisor = build(listener=listener)
    supervisor.start()
    supervisor.submit(0, 1, "a", "b")
    assert listener.answers(1) == {1: "b"}
    supervisor.close()
    assert supervisor.state is LifecycleState.STOPPED and listener.failures.empty()


@pytest.mark.long
@pytest.mark.parametrize("phase", [Phase.HELLO, Phase.LOADING, Phase.READY])
def test_a_close_while_workers_start_kills_them(phase, build, pipe):
    beginning = pipe()
    supervisor = build(Misdeed(phase, Deed.HANG, announce=beginning.path))
    starting = in_background(supervisor.start)
    beginning.pid()
    supervisor.close()
    beginning.await_end()
    with pytest.raises(EngineUnavailableError, match="closed"):
        starting.result()
    assert supervisor.state is LifecycleState.STOPPED and supervisor.failure is None


@pytest.mark.long
@pytest.mark.parametrize("phase", [Phase.RECEIVING, Phase.EXECUTING, Phase.REPLYING])
def test_a_close_while_a_worker_is_at_work_ends_one_that_does_not_come_back(phase, started, pipe):
    working = pipe()
    misdeed = Misdeed(phase, Deed.HANG, announce=working.path)
    at_request = phase is not Phase.RECEIVING
    supervisor = started(*(() if at_request else (misdeed,)), shutdown_timeout_s=0.1)
    supervisor.submit(0, 1, "a", misdeed if at_request else "b")
    working.pid()
    supervisor.close()
    working.await_end()
    assert supervisor.state is LifecycleState.FAILED
    assert "shutdown_timeout_s" in str(supervisor.failure)


@pytest.mark.long
def test_pending_replies_are_not_told_once_a_close_has_begun(started, listener, pipe, gate):
    executing, told = pipe("executing"), pipe("told")
    supervisor = started(
        Misdeed(Phase.STOPPING, Deed.ANNOUNCE, worker_id=1, announce=told.path),
        shape={"replicas": 2},
    )
    supervisor.submit(
        0, 1, "a", Misdeed(Phase.EXECUTING, Deed.WAIT, announce=executing.path, gate=gate.path)
    )
    executing.pid()
    closing = in_background(supervisor.close)
    told.pid()
    gate.open()
    closing.result()
    assert listener.replies.empty() and supervisor.state is LifecycleState.STOPPED


def test_an_interrupted_start_kills_the_workers(build, pipe, interrupt_when, gate):
    loading = pipe()
    supervisor = build(Misdeed(Phase.LOADING, Deed.WAIT, announce=loading.path, gate=gate.path))
    interrupt_when(loading.pid)
    with pytest.raises(KeyboardInterrupt):
        supervisor.start()
    loading.await_end()
    assert supervisor.state is LifecycleState.STOPPED


@pytest.mark.long
def test_workers_outlive_the_thread_that_started_them(build, listener):
    supervisor = build()
    before = threading.enumerate()
    in_background(supervisor.start).result()
    for thread in threading.enumerate():
        if thread not in before and thread.name != "phalanx-workers":
            thread.join()
    supervisor.submit(0, 1, "a", "b")
    assert listener.answers(1) == {1: "b"}


def test_arguments_that_cannot_be_pickled_are_refused_before_any_process_starts(build):
    supervisor = build(factory=lambda placement: WorkerFactorySpec("any:thing", threading.Lock()))
    before = children()
    with pytest.raises(ConfigurationError, match="any:thing cannot be pickled.*lock"):
        supervisor.start()
    assert children() == before
    assert supervisor.state is LifecycleState.FAILED
    with pytest.raises(EngineUnavailableError, match="could not start its workers: the config"):
        supervisor.submit(0, 1, "a", None)


@pytest.mark.long
def test_r52_a_second_group_works_after_the_first_has_failed(started, listener):
    first = started()
    first.submit(0, 1, "a", Misdeed(Phase.EXECUTING, Deed.EXIT))
    listener.failures.get()
    second = started()
    second.submit(0, 2, "b", "again")
    assert listener.answers(1) == {2: "again"}


@pytest.mark.long
def test_two_groups_do_not_share_their_fate(started):
    listeners = [Recorder(), Recorder()]
    groups = [started(listener=each) for each in listeners]
    groups[0].submit(0, 1, "a", Misdeed(Phase.EXECUTING, Deed.KILL))
    listeners[0].failures.get()
    groups[1].submit(0, 1, "a", "b")
    assert listeners[1].answers(1) == {1: "b"} and listeners[1].failures.empty()


@pytest.mark.long
def test_only_the_workers_of_this_node_are_started(build, listener):
    nodes = (NodeResources(0, (0,)), NodeResources(1, (0,)))
    supervisor = build(shape={"replicas": 2, "nodes": nodes}, node_rank=1)
    ready = supervisor.start()
    assert [each.worker_id for each in ready] == [1] and len(supervisor.pids) == 1
    supervisor.submit(1, 1, "a", "b")
    assert listener.answers(1) == {1: "b"}


def test_a_node_without_workers_is_refused(build):
    supervisor = build(node_rank=3)
    with pytest.raises(ConfigurationError, match=r"node_rank=3; its workers are on \[0\]"):
        supervisor.start()
    assert supervisor.state is LifecycleState.FAILED
