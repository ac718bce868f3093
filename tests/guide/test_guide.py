"""Every code block of the serving guide, run as it stands there."""

from __future__ import annotations

import os

import pytest
import torch

from phalanx import DeploymentConfig, Engine
from tests.guide.extract import guide_blocks
from tests.guide.stand_ins import ModelArgs, MyModel, MyParallelModel, Question

BLOCKS = guide_blocks(torch.cuda.device_count())


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    Engine.register(MyModel)
    Engine.register(MyParallelModel)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def run(title: str, **names: object) -> dict[str, object]:
    """Executes a block that may use `names`; gives what it leaves defined."""
    exec(compile(BLOCKS[title], f"guide: {title}", "exec"), names)
    return names


def test_there_are_all_blocks():
    assert list(BLOCKS) == [
        "the topology of a replica",
        "ranks and workers",
        "a single device",
        "two replicas of two ranks",
    ]
    assert not any("phyai" in block for block in BLOCKS.values())


def test_r11_r12_r23_r24_topology_and_number_of_workers():
    parallel = run("the topology of a replica")["parallel"]
    deployment = DeploymentConfig.local(replica_count=3)
    counted = run("ranks and workers", parallel=parallel, deployment=deployment)
    assert (counted["ranks_per_replica"], counted["worker_count"]) == (8, 24)


def test_r29_a_single_device_needs_no_deployment():
    left = run("a single device", model_args=ModelArgs(), request=Question(1))
    assert left["result"].number == 2
    assert left["result"].pid == os.getpid()
    assert left["engine"].mode == "inline"
    assert left["engine"].closed


@pytest.mark.long
def test_r30_r31_r33_two_replicas_of_two_ranks():
    """The first two requests go to different replicas; two ranks take part in each."""
    engine = run("two replicas of two ranks", model_args=ModelArgs())["engine"]
    with engine:
        assert engine.mode == "local"
        replies = [future.result() for future in [engine.submit(Question(n)) for n in range(4)]]
        completed = [replica.num_completed for replica in engine.statistics().replicas]
    assert [reply.number for reply in replies] == [1, 2, 3, 4]
    assert {reply.num_ranks for reply in replies} == {2}
    assert len({reply.pid for reply in replies} - {os.getpid()}) == 2
    assert sum(completed) == 4
    assert all(completed)
