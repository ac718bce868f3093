"""Replicas in worker processes: real spawned ones, shared by the tests that leave them whole."""

from __future__ import annotations

import os
import pickle
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch

from phalanx import DeploymentConfig, Engine, EngineArgs, EngineUnavailableError
from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.schema.control import (
    Continue,
    Pause,
)
from phalanx.server import WorkerSupervisorConfig
from phalanx.testing import Counting, CountingArgs, CountRequest
from phalanx.testing.faulty import Action, Faulty, FaultyArgs, FaultyRequest

from .local_plugins import Environment, LoggedCounting, RankSum, cpu
from .ports import free_base_port
from .processes import children

for plugin in (Faulty, Counting, Environment, LoggedCounting, RankSum):
    Engine.register(plugin)


def local(replica_count=1, *, process=None, **values):
    return DeploymentConfig.local(
        replica_count=replica_count,
        process_config=WorkerSupervisorConfig(base_port=free_base_port(replica_count), **process)
        if process is not None
        else WorkerSupervisorConfig(base_port=free_base_port(replica_count)),
        **values,
    )


def build(plugin="faulty", args=None, deployment=None, tp=1, **runtime):
    args = FaultyArgs() if args is None else args
    return Engine(EngineArgs(plugin, args, cpu(tp, **runtime)), deployment=deployment or local())


@pytest.fixture(scope="module")
def pool():
    """Two replicas of a plain plugin."""
    with build(deployment=local(2)) as engine:
        yield engine


@pytest.fixture
def fifo(tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return str(path)


def release(fifo: str) -> None:
    """Let the step that waits at `fifo` go on; returns once it has come there."""
    with open(fifo, "w"):
        pass


def test_r1_r6_r27_r30_r35_r80_two_replicas_are_two_processes_with_the_same_calls(pool):
    assert pool.mode == "local"
    assert pool.entry is None
    pids = {pool.submit(FaultyRequest(number)).result().pid for number in range(4)}
    assert len(pids) == 2 and os.getpid() not in pids
    assert pool.step(FaultyRequest("whole")).payload == "whole"


def test_r41_ties_rotate_and_sequential_steps_alternate(pool):
    pids = [pool.step(FaultyRequest()).pid for _ in range(4)]
    assert pids[0] == pids[2] != pids[1] == pids[3]


def test_r40_r75_r81_r84_a_waiting_replica_gets_nothing_while_another_is_free(pool, fifo):
    held = pool.submit(FaultyRequest("held", Action.WAIT, fifo))
    others = [pool.submit(FaultyRequest(number)).result() for number in range(3)]
    assert len({other.pid for other in others}) == 1
    assert not held.done()  # what came later has ended before it, in any order
    release(fifo)
    assert held.result().pid != others[0].pid


def test_r44_r76_a_request_goes_whole_to_one_replica(pool):
    payload = {"images": np.arange(3 * 8 * 8, dtype=np.uint8).reshape(3, 8, 8), "state": [1.0, 2.0]}
    answered = pool.step(FaultyRequest(payload)).payload
    assert np.array_equal(answered["images"], payload["images"])
    assert answered["state"] == payload["state"]


def test_r45_r87_a_caller_shards_a_batch_itself(pool):
    batch = torch.arange(10.0).reshape(5, 2)
    futures = [pool.submit(FaultyRequest(shard)) for shard in batch.split(3)]
    assert torch.equal(torch.cat([future.result().payload for future in futures]), batch)


def test_r46_r47_a_submit_gives_a_standard_future_that_cannot_be_cancelled(pool, fifo):
    running = pool.submit(FaultyRequest("first", Action.WAIT, fifo))
    futures = [pool.submit(FaultyRequest(number)) for number in range(4)]
    assert all(isinstance(future, Future) for future in (running, *futures))
    assert [future.cancel() for future in (running, *futures)] == [False] * 5
    release(fifo)
    assert [future.result().payload for future in futures] == [0, 1, 2, 3]


def test_a_plain_plugin_s_request_in_a_worker_cannot_be_cancelled_by_id(pool, fifo):
    held = pool.submit(FaultyRequest("held", Action.WAIT, fifo), rid="held")
    assert pool.cancel("held") is False
    release(fifo)
    assert held.result().payload == "held"


def test_r56_r60_a_tensor_is_taken_at_submit_and_comes_back_as_it_is(pool, fifo):
    held = pool.submit(FaultyRequest(None, Action.WAIT, fifo))
    tensor = torch.ones(300_000)
    array = np.ones(300_000)
    futures = [pool.submit(FaultyRequest((tensor, array))) for _ in range(2)]
    tensor.zero_()
    array[:] = 0
    release(fifo)
    held.result()
    for future in futures:
        tensor_back, array_back = future.result().payload
        assert tensor_back.device.type == "cpu" and tensor_back.dtype == torch.float32
        assert bool((tensor_back == 1).all()) and bool((array_back == 1).all())
        tensor_back.add_(1)  # it is the caller's own


def test_a_big_result_arrives_whole(pool):
    output = pool.step(FaultyRequest(action=Action.BIG_TENSOR, num_elements=5_000_000)).payload
    assert output.shape == (5_000_000,) and output[-1] == 4_999_999


def test_an_unpicklable_request_is_refused_and_nothing_was_sent(pool):
    before = pool.statistics()
    for call in (pool.submit, pool.step):
        with pytest.raises(InvalidRequestError, match="pickle"):
            call(FaultyRequest(threading.Lock()))
    after = pool.statistics()
    assert after.num_refused == before.num_refused + 2
    assert (after.num_accepted, after.num_in_flight) == (before.num_accepted, 0)
    assert pool.step(FaultyRequest("on")).payload == "on"


@pytest.mark.long
def test_r20_r53_workers_inherit_the_environment_and_get_their_place_in_it(monkeypatch):
    monkeypatch.setenv("MADE_BY_THE_PARENT", "yes")
    deployment = local(2, process={"extra_env": (("EXTRA", "1"),)}, devices=(0, 3))
    with build("environment", deployment=deployment) as engine:
        seen = [engine.step(FaultyRequest()).payload for _ in range(2)]
    ports = [int(worker["MASTER_PORT"]) for worker in seen]
    assert ports[1] == ports[0] + 1  # S7
    for index, worker in zip((0, 3), seen, strict=True):
        assert worker["MADE_BY_THE_PARENT"] == "yes" and worker["EXTRA"] == "1"
        assert (worker["RANK"], worker["WORLD_SIZE"], worker["LOCAL_RANK"]) == (
            "0",
            "1",
            str(index),
        )
        assert worker["PHALANX_DEVICE"] == "cpu"
    assert "RANK" not in os.environ


def test_r114_statistics_say_what_each_replica_did(pool):
    before = pool.statistics()
    payload = np.zeros(100_000, np.uint8)
    for _ in range(4):
        pool.step(FaultyRequest(payload))
    after = pool.statistics()
    assert after.num_completed == before.num_completed + 4
    for old, new in zip(before.replicas, after.replicas, strict=True):
        assert new.num_completed == old.num_completed + 2
        assert new.request_bytes - old.request_bytes >= 200_000
        assert new.response_bytes - old.response_bytes >= 200_000
        assert new.max_request_bytes >= 100_000
        assert new.busy_s > old.busy_s and new.uptime_s > old.uptime_s
        assert new.queue_time_s >= old.queue_time_s and new.execution_time_s >= old.execution_time_s
    assert after.num_in_flight == 0


@pytest.mark.long  # in the quick run two ranks form one replica, in `test_spanning`
def test_r22_r24_r42_r43_r89_r92_two_replicas_of_two_ranks(tmp_path):
    log = tmp_path / "steps"
    with build("rank_sum", FaultyArgs(log=str(log)), local(2), tp=2) as engine:
        assert len(engine._startup.current._replicas) == 2
        futures = [engine.submit(FaultyRequest(number)) for number in range(6)]
        outputs = [future.result() for future in futures]
    # Each sum is over the two ranks of one replica, and rank 0 answers.
    assert [output.payload for output in outputs] == [2.0 * number for number in range(6)]
    assert {(output.rank, output.world) for output in outputs} == {(0, 2)}
    assert len({output.pid for output in outputs}) == 2
    lines = sorted(log.read_text().split("\n")[:-1])
    assert lines == sorted(f"{rank} {number}" for rank in (0, 1) for number in range(6))


@pytest.mark.long
def test_r42_r43_another_output_rank_answers():
    with build("rank_sum", deployment=local(output_rank=1), tp=2) as engine:
        output = engine.step(FaultyRequest(21))
    assert (output.payload, output.rank) == (42.0, 1)


@pytest.mark.long
def test_the_ranks_of_a_batching_replica_form_the_same_batches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with build("logged_counting", CountingArgs(max_batch_size=2), local(), tp=2) as engine:
        futures = [engine.submit(CountRequest(count=9), rid=f"r{number}") for number in range(5)]
        engine.control(Pause())
        engine.cancel("r4")
        engine.control(Continue())
        for future in futures:
            future.result()
        stream = engine.stream(CountRequest(count=3))
        assert list(stream)[-1].numbers == (0, 1, 2)
    logs = [Path(f"counting-{rank}.log").read_text() for rank in (0, 1)]
    assert logs[0] == logs[1] != ""


def test_r17_a_topology_that_the_plugin_cannot_run_starts_no_process():
    before = children()
    with pytest.raises(ConfigurationError, match="counting"):
        build("counting", CountingArgs(), local(), tp=2)
    assert children() == before


def test_a_plugin_inside_a_function_is_refused_before_any_process_starts():
    class Inner(Faulty):
        name = "inner"

    Engine.register(Inner)
    with pytest.raises(ConfigurationError, match="top level of a module"):
        build("inner")


def test_plugin_arguments_that_cannot_travel_are_refused_before_any_process_starts():
    args = FaultyArgs(log=threading.Lock())
    with pytest.raises((ConfigurationError, pickle.PicklingError), match="plugin_args of plugin"):
        build(args=args)


def test_s4_s5_workers_start_with_the_first_request_where_they_were_told_to():
    before = children()
    with build(deployment=local(auto_start=False)) as engine:
        assert children() == before
        assert engine.statistics().replicas[0].num_in_flight == 0
        assert engine._startup.current is None
        assert engine.step(FaultyRequest("late")).payload == "late"
        assert len(children()) == len(before) + 1
        engine.setup()  # again: nothing happens


def test_an_engine_that_was_never_started_closes():
    engine = build(deployment=local(auto_start=False))
    engine.close()
    with pytest.raises(EngineUnavailableError, match="closed"):
        engine.setup()


def test_many_requests_at_once_end_each_exactly_once(pool):
    ended = []
    futures = [pool.submit(FaultyRequest(number)) for number in range(500)]
    for future in futures:
        future.add_done_callback(ended.append)
    assert [future.result().payload for future in futures] == list(range(500))
    pool.step(FaultyRequest())
    assert len(ended) == len(set(map(id, ended))) == 500
