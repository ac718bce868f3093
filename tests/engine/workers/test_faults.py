"""What goes wrong in one worker fails the whole group, at once and with its reason."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading

import pytest

from phalanx.engine.workers.lifecycle import LifecycleState
from phalanx.engine.workers.messages import Cancel, Hello, Ready, Stopped
from phalanx.errors import EngineUnavailableError
from phalanx.schema.limits import Limits
from phalanx.testing.worker_runtimes import Deed, Held, Misdeed, Phase
from tests.engine.workers.runtimes import factory
from tests.engine.workers.supervised import Recorder, in_background, is_alive, kill

pytestmark = pytest.mark.long

GARBAGE = b"\xff no message"
WHAT = {
    Deed.EXIT: (ChildProcessError, "worker 0 .* exited with status 3 while {stage}"),
    Deed.KILL: (ChildProcessError, "worker 0 .* was killed by SIGKILL .* while {stage}"),
    Deed.RAISE: (ChildProcessError, "worker 0 .* failed while {stage}: .*MisdeedError: as asked"),
    Deed.DISCONNECT: (EOFError, "worker 0 .* closed its connection while {stage}"),
    Deed.SEND: (Exception, "malformed response of worker 0 .*: a packet of 12 bytes is not a mess"),
}
"""The cause, and what the error says, of a misdeed of worker 0."""


def patience(deed):
    """One that lets go of its connection never ends; the others do, if only after some time."""
    return {"status_timeout_s": 0.04} if deed is Deed.DISCONNECT else {}


def assert_failed(supervisor, error, deed, stage):
    cause, text = WHAT[deed]
    assert isinstance(error.__cause__, cause)
    assert_that_text(str(error), text.format(stage=stage))
    if deed is Deed.RAISE:
        assert "in the worker:\nTraceback (most recent call last)" in str(error)
    assert supervisor.state is LifecycleState.FAILED
    assert str(supervisor.failure) == str(error)


def assert_that_text(text, pattern):
    __tracebackhide__ = True
    assert re.search(pattern, text, re.DOTALL), text


@pytest.mark.parametrize(
    ("phase", "deed"),
    list(itertools.product([Phase.HELLO, Phase.LOADING, Phase.READY], WHAT)),
)
def test_s6_a_fault_in_the_start_kills_every_worker(build, listener, gate, phase, deed):
    supervisor = build(
        Misdeed(phase, deed, worker_id=0, packet=GARBAGE),
        Misdeed(Phase.HELLO, Deed.WAIT, worker_id=1, gate=gate.path),  # for ever
        shape={"replicas": 2},
        **patience(deed),
    )
    with pytest.raises(EngineUnavailableError, match="create a new one") as caught:
        supervisor.start()
    assert_failed(supervisor, caught.value, deed, "loading")
    supervisor.close()
    assert supervisor.pids == ()
    assert listener.failures.empty(), "the caller of start was told"
    with pytest.raises(EngineUnavailableError, match="worker 0"):
        supervisor.submit(0, 1, "a", None)


@pytest.mark.parametrize(
    ("phase", "deed"),
    list(itertools.product([Phase.RECEIVING, Phase.EXECUTING, Phase.REPLYING], WHAT)),
)
def test_r61_r62_r64_r66_a_fault_in_a_request_fails_every_replica(
    build, listener, phase, deed, pipe, gate
):
    entered = pipe()
    misdeed = Misdeed(phase, deed, worker_id=0, packet=GARBAGE)
    at_gate = Misdeed(
        Phase.RECEIVING, Deed.WAIT, worker_id=0, announce=entered.path, gate=gate.path
    )
    before_requests = [at_gate, misdeed] if phase is Phase.RECEIVING else []
    supervisor = build(*before_requests, shape={"replicas": 2}, **patience(deed))
    supervisor.start()
    pids = supervisor.pids
    supervisor.submit(1, 1, "held on the other replica", Held())
    supervisor.submit(0, 2, "the bad one", misdeed)
    if before_requests:
        entered.pid()
        gate.open()
    error = listener.failures.get()
    assert_failed(supervisor, error, deed, "serving")
    with pytest.raises(EngineUnavailableError, match="worker 0") as refused:
        supervisor.submit(1, 3, "later", None)
    assert refused.value.__cause__ is error.__cause__
    with pytest.raises(EngineUnavailableError, match="worker 0"):
        supervisor.send(1, Cancel(1))
    supervisor.close()
    assert not any(is_alive(pid) for pid in pids)
    assert supervisor.state is LifecycleState.FAILED
    assert listener.failures.empty(), "it is told once"


@pytest.mark.parametrize("phase", [Phase.HELLO, Phase.LOADING, Phase.READY])
def test_kill_9_of_a_worker_that_starts(build, phase, pipe, gate):
    entered = pipe()
    supervisor = build(
        Misdeed(phase, Deed.WAIT, worker_id=1, announce=entered.path, gate=gate.path),
        shape={"replicas": 2},
    )
    starting = in_background(supervisor.start)
    kill(entered.pid())
    with pytest.raises(EngineUnavailableError, match=r"worker 1 .*SIGKILL .* while loading"):
        starting.result()


@pytest.mark.parametrize("phase", [Phase.RECEIVING, Phase.EXECUTING, Phase.REPLYING])
def test_kill_9_of_a_worker_that_serves(started, listener, phase, pipe, gate):
    entered = pipe()
    misdeed = Misdeed(phase, Deed.WAIT, worker_id=1, announce=entered.path, gate=gate.path)
    receiving = phase is Phase.RECEIVING
    supervisor = started(*([misdeed] if receiving else []), shape={"replicas": 2})
    supervisor.submit(1, 1, "a", bytes(1_000_000) if receiving else misdeed)
    kill(entered.pid())
    assert_that_text(str(listener.failures.get()), "worker 1 .*SIGKILL .* while serving")


def test_kill_9_of_a_worker_that_stops(started, listener, pipe, gate):
    entered = pipe()
    supervisor = started(
        Misdeed(Phase.STOPPING, Deed.WAIT, worker_id=1, announce=entered.path, gate=gate.path),
        shape={"replicas": 2},
    )
    closing = in_background(supervisor.close)
    kill(entered.pid())
    closing.result()
    assert supervisor.state is LifecycleState.FAILED and listener.failures.empty()
    assert_that_text(str(supervisor.failure), "worker 1 .*SIGKILL")


def test_kill_9_of_a_worker_before_its_first_line(build, pipe, gate, tmp_path, monkeypatch):
    entered = pipe()
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'phalanx.engine.workers.process' in ' '.join(sys.orig_argv):\n"
        f"    os.write(os.open({entered.path!r}, os.O_WRONLY), b'%d\\n' % os.getpid())\n"
        f"    open({gate.path!r}).read()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    supervisor = build()
    starting = in_background(supervisor.start)
    kill(entered.pid())
    with pytest.raises(EngineUnavailableError, match=r"SIGKILL .* while beginning"):
        starting.result()


def test_a_death_is_noticed_although_a_child_of_the_worker_holds_the_connection(
    started, listener, pipe, gate
):
    orphan = pipe()
    supervisor = started()
    supervisor.submit(
        0, 1, "a", Misdeed(Phase.EXECUTING, Deed.ORPHAN, announce=orphan.path, gate=gate.path)
    )
    worker = orphan.pid()
    assert "SIGKILL" in str(listener.failures.get())
    supervisor.close()
    assert not is_alive(worker) and not orphan.ended(), "its child lives"
    gate.open()
    orphan.await_end()


@pytest.mark.parametrize(
    ("phase", "packet", "text"),
    [
        (Phase.HELLO, Hello(0, 0, 0, 1), "it sent Hello while loading, where Ready was expected"),
        (Phase.LOADING, Ready(7, Limits(), {}), "its Ready says worker_id=7 instead of 0"),
        (Phase.LOADING, Ready(0, Limits(), {}), "it sent Ready while serving, where nothing was"),
        (Phase.LOADING, Stopped(), "it sent Stopped while loading"),
        (Phase.EXECUTING, Stopped(), "it sent Stopped while serving"),
        (Phase.EXECUTING, Hello(0, 0, 0, 1), "it sent Hello while serving"),
    ],
)
def test_r62_a_message_out_of_turn_fails_the_group(build, listener, gate, phase, packet, text):
    misdeed = Misdeed(phase, Deed.SEND, worker_id=0, packet=packet)
    waiting = Misdeed(Phase.LOADING, Deed.WAIT, worker_id=1, gate=gate.path)
    if phase is Phase.EXECUTING:
        supervisor = build()
        supervisor.start()
        supervisor.submit(0, 1, "a", misdeed)
        error = listener.failures.get()
    else:
        supervisor = build(misdeed, waiting, shape={"replicas": 2})
        with pytest.raises(EngineUnavailableError) as caught:
            supervisor.start()
        error = caught.value
    assert "malformed response of worker 0 (replica 0, rank 0, pid" in str(error)
    assert text in str(error)


@pytest.mark.parametrize(
    ("deed", "text", "logged"),
    [
        (Deed.EXIT, "exited with status 3 while serving", ""),
        (Deed.RAISE, "failed while stopping: .*MisdeedError", "exited with status 1"),
        (Deed.SEND, "malformed response", ""),
    ],
)
def test_s14_a_failed_stop_is_recorded_and_not_raised(
    started, listener, caplog, deed, text, logged
):
    supervisor = started(
        Misdeed(Phase.STOPPING, deed, worker_id=0, packet=GARBAGE), shape={"replicas": 2}
    )
    pids = supervisor.pids
    supervisor.close()
    assert supervisor.state is LifecycleState.FAILED
    assert_that_text(str(supervisor.failure), f"worker 0 .*{text}|{text} of worker 0")
    assert logged in caplog.text
    assert not any(is_alive(pid) for pid in pids)
    assert listener.failures.empty()
    supervisor.close()


@pytest.mark.parametrize(
    ("deed", "signal_name"),
    [(Deed.WAIT, "SIGTERM"), (Deed.HANG, "SIGKILL")],
)
def test_s14_a_worker_that_does_not_stop_is_ended_by_force(
    started, pipe, gate, caplog, deed, signal_name
):
    """Also one that is inside of a request."""
    executing = pipe()
    supervisor = started(shutdown_timeout_s=0.1)
    supervisor.submit(
        0, 1, "a", Misdeed(Phase.EXECUTING, deed, announce=executing.path, gate=gate.path)
    )
    executing.pid()
    supervisor.close()
    executing.await_end()
    assert supervisor.state is LifecycleState.FAILED
    assert_that_text(
        str(supervisor.failure), "worker 0 .* did not stop within shutdown_timeout_s=0.1 and was"
    )
    assert f"was killed by {signal_name}" in caplog.text


def test_a_reply_that_its_owner_cannot_handle_fails_the_group(build):
    def refuse(placement, reply, events):
        raise ValueError("no such request")

    listener = Recorder(on_reply=refuse)
    supervisor = build(listener=listener)
    supervisor.start()
    supervisor.submit(0, 1, "a", "b")
    error = listener.failures.get()
    assert "could not be handled: ValueError: no such request" in str(error)
    assert isinstance(error.__cause__, ValueError)


class Unreadable:
    """Pickles well; unpickling raises."""

    def __reduce__(self):
        return int, ("not a number",)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Unreadable(), "during request 'the bad one': .*request 'the bad one' cannot be decoded"),
        ("serve", "during request 'the bad one': ValueError: as asked"),
    ],
)
def test_a_worker_that_fails_names_the_request(build, listener, request_, text):
    supervisor = build(factory=factory("FailingInRequests"))
    supervisor.start()
    supervisor.submit(0, 7, "the bad one", request_)
    assert_that_text(str(listener.failures.get()), f"failed while serving, {text}")


def test_what_a_worker_said_is_heard_to_its_last_word(build):
    heard = threading.Event()
    listener = Recorder(on_reply=lambda *reply: heard.wait())
    supervisor = build(listener=listener, factory=factory("Talkative"))
    supervisor.start()
    (pid,) = supervisor.pids
    supervisor.submit(0, 1, "a", None)
    while is_alive(pid):
        os.sched_yield()
    heard.set()
    assert "failed while serving: ValueError: these were my" in str(listener.failures.get())


def test_the_owner_can_fail_the_group(started, listener):
    supervisor = started()
    reason = EngineUnavailableError("two answers to one request")
    supervisor.fail(reason)
    assert supervisor.state is LifecycleState.FAILED
    supervisor.fail(EngineUnavailableError("another"))
    assert listener.failures.get() is reason and supervisor.failure is reason
    supervisor.close()
    assert listener.failures.empty() and supervisor.pids == ()


def test_a_stopped_worker_holds_up_neither_its_senders_nor_its_siblings(started, listener):
    """What its socket does not take waits, and goes out when it reads again."""
    supervisor = started(shape={"replicas": 2}, arena_bytes=65536)
    stopped, _ = supervisor.pids
    os.kill(stopped, signal.SIGSTOP)
    for number in range(2000):
        supervisor.submit(0, number, str(number), number)
    supervisor.submit(0, 2000, "large", bytes(1_000_000))
    supervisor.submit(1, 2001, "sibling", "answered")
    assert listener.answers(1) == {2001: "answered"}
    os.kill(stopped, signal.SIGCONT)
    answers = listener.answers(2001)
    assert [answers[number] for number in range(2000)] == list(range(2000))
    assert len(answers[2000]) == 1_000_000
