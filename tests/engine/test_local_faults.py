"""What happened to a worker, and what its engine makes of it: everything ends, nothing stays."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path

import pytest

from phalanx import DeploymentConfig, Engine, EngineArgs, EngineUnavailableError, RequestFailedError
from phalanx.engine.workers.messages import Finished
from phalanx.errors import PhalanxError
from phalanx.schema.control import Continue
from phalanx.server import WorkerSupervisorConfig
from phalanx.testing import Counting, CountingArgs, CountRequest, Fault
from phalanx.testing.faulty import Action, Faulty, FaultyArgs, FaultyRequest

from .local_plugins import RankSum, cpu
from .ports import free_base_port

pytestmark = pytest.mark.long

for plugin in (Faulty, Counting, RankSum):
    Engine.register(plugin)


def local(replica_count=1, *, auto_start=True, output_rank=0, **process):
    process.setdefault("base_port", free_base_port(replica_count))
    return DeploymentConfig.local(
        replica_count=replica_count,
        process_config=WorkerSupervisorConfig(**process),
        auto_start=auto_start,
        output_rank=output_rank,
    )


def build(args=None, deployment=None, plugin="faulty", tp=1):
    args = FaultyArgs() if args is None else args
    return Engine(EngineArgs(plugin, args, cpu(tp)), deployment=deployment or local())


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)


def open_when_read(fifo):
    """Returns once somebody waits at `fifo`, without letting it go on; close the result."""
    return open(fifo, "w")


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def check_over(engine):
    """The engine serves no more, says why, and closes."""
    assert isinstance(engine.failure, EngineUnavailableError)
    with pytest.raises(EngineUnavailableError):
        engine.step(FaultyRequest())
    late = engine.submit(FaultyRequest())
    assert isinstance(late.exception(), EngineUnavailableError)
    assert engine.statistics().num_in_flight == 0
    engine.close()
    engine.close()


@pytest.mark.parametrize("action", [Action.EXIT, Action.KILL])
def test_r50_r61_r64_r65_r66_r109_a_worker_that_ends_fails_every_replica(action, fifo, tmp_path):
    log = tmp_path / "steps"
    engine = build(FaultyArgs(log=str(log)), local(2))
    pids = {engine.step(FaultyRequest("warm")).pid for _ in range(2)}
    other = engine.submit(FaultyRequest("other", Action.WAIT, fifo))
    with open_when_read(fifo):
        killed = engine.submit(FaultyRequest("killed", action))
        errors = [future.exception() for future in (other, killed)]
    assert all(isinstance(error, EngineUnavailableError) for error in errors)
    check_over(engine)
    assert all(gone(pid) for pid in pids)
    # R65: what was executing was not executed again.
    assert sorted(log.read_text().split("\n")[:-1]) == ["0 killed", "0 other", "0 warm", "0 warm"]


def test_r49_r51_a_plain_plugin_s_exception_in_a_worker_fails_the_engine_with_its_traceback():
    engine = build()
    future = engine.submit(FaultyRequest(action=Action.RAISE))
    with pytest.raises(EngineUnavailableError) as raised:
        future.result()
    assert "FaultyError: raised as it was told to" in str(raised.value)
    assert "Traceback" in str(raised.value)
    check_over(engine)


def test_r62_an_unpicklable_result_fails_the_engine():
    engine = build()
    with pytest.raises(EngineUnavailableError, match="pickle"):
        engine.step(FaultyRequest(action=Action.UNPICKLABLE))
    check_over(engine)


def test_r62_a_request_that_nobody_sent_is_a_malformed_response():
    engine = build()
    executor = engine._startup.current._replicas[0]
    worker = engine._startup._deployment._plan.workers[0]
    executor.received(worker, Finished(99), [])
    with pytest.raises(EngineUnavailableError, match="malformed response.*request 99"):
        engine.step(FaultyRequest())
    check_over(engine)


def test_r63_r67_an_expired_time_counts_queueing_and_names_every_request(fifo):
    engine = build(deployment=local(execution_timeout_s=0.5))
    running = engine.submit(FaultyRequest(1, Action.WAIT, fifo), rid="running")
    with open_when_read(fifo):
        queued = engine.submit(FaultyRequest(2), rid="queued")
        errors = [future.exception() for future in (running, queued)]
    assert all(isinstance(error, EngineUnavailableError) for error in errors)
    assert "running" in str(errors[0]) and "execution_timeout_s" in str(errors[0])
    check_over(engine)


def test_r52_r72_after_a_failure_another_engine_takes_the_same_port():
    deployment = local()
    first = build(deployment=deployment, plugin="rank_sum", tp=2)
    assert isinstance(first.submit(FaultyRequest(1, Action.KILL)).exception(), PhalanxError)
    first.close()
    with build(deployment=deployment, plugin="rank_sum", tp=2) as second:
        assert second.step(FaultyRequest(4)).payload == 8.0


def test_r70_r71_s11_a_close_fails_what_is_pending_and_stops_the_workers(fifo):
    engine = build(deployment=local(shutdown_timeout_s=0.2))
    pid = engine.step(FaultyRequest()).pid
    pending = [engine.submit(FaultyRequest(1, Action.WAIT, fifo))]
    with open_when_read(fifo):
        pending += [engine.submit(FaultyRequest(2)) for _ in range(3)]
        closers = [threading.Thread(target=engine.close) for _ in range(3)]  # S13
        for closer in closers:
            closer.start()
        for closer in closers:
            closer.join()
    errors = [future.exception() for future in pending]
    assert {type(error) for error in errors} == {EngineUnavailableError}
    assert "closed" in str(errors[0])
    assert gone(pid)
    assert isinstance(engine.submit(FaultyRequest()).exception(), EngineUnavailableError)


def test_s14_a_worker_that_will_not_stop_is_killed_and_close_does_not_raise(fifo):
    args = FaultyArgs(in_close=Action.WAIT, fifo=fifo)
    engine = build(args, local(shutdown_timeout_s=0.1))
    pid = engine.step(FaultyRequest()).pid
    engine.close()
    assert gone(pid)


@pytest.mark.parametrize("action", [Action.RAISE, Action.EXIT, Action.KILL])
def test_s6_a_start_that_fails_leaves_nothing(action):
    with pytest.raises(EngineUnavailableError) as raised:
        build(FaultyArgs(in_setup=action, only_on_rank=1), plugin="rank_sum", tp=2)
    if action is Action.RAISE:
        assert "FaultyError: raised as it was told to" in str(raised.value)


def test_r55_s6_one_slow_worker_delays_the_start_until_its_time_is_over(fifo):
    with pytest.raises(EngineUnavailableError, match="startup_timeout_s"):
        build(
            FaultyArgs(in_setup=Action.WAIT, fifo=fifo, only_on_rank=1),
            local(startup_timeout_s=6.0),
            "rank_sum",
            tp=2,
        )


def test_r55_the_engine_is_built_when_the_slowest_worker_is_ready(fifo):
    built = threading.Event()
    engines = []

    def start():
        args = FaultyArgs(in_setup=Action.WAIT, fifo=fifo, only_on_rank=1)
        engines.append(build(args, plugin="rank_sum", tp=2))
        built.set()

    # Workers must outlive the thread that builds their engine.
    thread = threading.Thread(target=start)
    thread.start()
    with open_when_read(fifo):
        assert not built.is_set()
    thread.join()
    assert engines[0].step(FaultyRequest(1)).payload == 2.0
    engines[0].close()


def test_a_close_gives_up_a_start_that_is_on_its_way(fifo):
    args = FaultyArgs(in_setup=Action.WAIT, fifo=fifo)
    engine = build(args, local(auto_start=False))
    failures = []

    def start():
        try:
            engine.setup()
        except EngineUnavailableError as error:
            failures.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    with open_when_read(fifo):
        engine.close()
        thread.join()
    assert len(failures) == 1


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EngineUnavailableError, match=rf"{port}.*base_port"):
            build(deployment=local(base_port=port), plugin="rank_sum", tp=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_in_a_step_fails_the_whole_replica(rank):
    engine = build(FaultyArgs(only_on_rank=rank), plugin="rank_sum", tp=2)
    assert engine.step(FaultyRequest(1)).payload == 2.0
    with pytest.raises(EngineUnavailableError):
        engine.step(FaultyRequest(1, Action.KILL))
    check_over(engine)


def test_r49_a_batching_plugin_s_failed_request_fails_alone():
    with build(CountingArgs(), plugin="counting") as engine:
        with pytest.raises(RequestFailedError, match="fails as it was told to"):
            engine.step(CountRequest(count=3, fault=Fault.FAIL))
        assert engine.step(CountRequest(count=2)).numbers == (0, 1)
        assert engine.statistics().num_failed == 1


@pytest.mark.parametrize("fault", [Fault.RAISE_IN_START, Fault.RAISE_IN_TICK])
def test_a_batching_plugin_that_breaks_fails_the_engine(fault):
    engine = build(CountingArgs(), plugin="counting")
    stream = engine.stream(CountRequest(count=3, fault=fault))
    with pytest.raises(EngineUnavailableError, match="CountingError"):
        list(stream)
    with pytest.raises(EngineUnavailableError):
        engine.control(Continue())
    engine.close()


def test_streams_and_waiting_steps_end_when_the_workers_die():
    engine = build(CountingArgs(max_count=10**9), plugin="counting")
    stream = engine.stream(CountRequest(count=10**9))
    next(stream)
    raised = []

    def step():
        try:
            engine.step(CountRequest(count=10**9))
        except EngineUnavailableError as error:
            raised.append(error)

    waiting = threading.Thread(target=step)
    waiting.start()
    while engine.statistics().num_in_flight < 2:
        next(stream)
    for pid in engine._startup._deployment._supervisor.pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailableError):
        for _ in stream:
            pass
    waiting.join()
    assert len(raised) == 1
    engine.close()


def test_two_engines_in_one_process_do_not_see_each_other(fifo):
    with build(deployment=local(2)) as first, build(CountingArgs(), plugin="counting") as second:
        assert first.submit(FaultyRequest(action=Action.KILL)).exception() is not None
        assert second.step(CountRequest(count=2)).numbers == (0, 1)
        assert first.failure is not None and second.failure is None


def test_engines_one_after_another_leave_nothing():
    ours = {str(os.getpid())}

    def is_foreign(name):
        """OpenMP's come and go with other processes, and so do torch's, which name theirs."""
        maker, _, rest = name.partition("_")
        return name.startswith("__KMP_") or (
            maker == "torch" and rest.partition("_")[0] not in ours
        )

    def left():
        return (
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
            sorted(name for name in os.listdir("/dev/shm") if not is_foreign(name)),
        )

    def children():
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

    with build(deployment=local(2)) as engine:
        engine.step(FaultyRequest())
    before, children_before = left(), children()
    for _ in range(4):
        with build(deployment=local(2)) as engine:
            assert engine.step(FaultyRequest(1)).payload == 1
            ours.update(children())
    assert left() == before
    assert children() == children_before
