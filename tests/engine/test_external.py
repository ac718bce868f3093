"""Ranks that a launcher makes: the real torchrun, one process a rank."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import (
    DenseParallelConfig,
    DeploymentConfig,
    DeviceConfig,
    Engine,
    EngineArgs,
    EngineConfig,
    ParallelConfig,
)
from phalanx.engine.deployments import launched_config
from phalanx.errors import ConfigurationError
from phalanx.settings import Launcher
from phalanx.testing.faulty import Action, Faulty, FaultyArgs, FaultyError, FaultyRequest

from .conftest import cpu_config

Engine.register(Faulty)
SCRIPT = Path(__file__).with_name("external_rank.py")
CPU = DeviceConfig("cpu", "float32")


def torchrun(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> list[dict]:
    out, errors = process.communicate()
    assert process.returncode == 0, errors
    return sorted(map(json.loads, out.splitlines()), key=lambda rank: rank["world"])


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def check(ranks: list[dict], output_rank: int) -> None:
    assert [rank["world"] for rank in ranks] == [0, 1]
    for number, rank in enumerate(ranks):
        answers = number == output_rank
        assert rank["mode"] == "external"
        assert rank["steps"] == ([2.0, 20.0] if answers else [None, None])
        assert rank["submitted"] == (200.0 if answers else None)
        # A failure of the request alone is the plugin's own on every rank, which serves on.
        assert rank["raised"] == "refused on every rank"
        counted = [[0, 1, 2], [0], [0, 1, 2, 3]]
        assert rank["counted"] == (counted if answers else [None, None, None])
        assert rank["cancel"] is False
        assert rank["streamed"] >= 1


@pytest.mark.long
def test_r7_r28_r36_r37_r38_a_launcher_s_ranks_are_one_replica():
    """Whose second rank answers; of two nodes, below, it is the first."""
    process = torchrun("--standalone", "--nproc-per-node", "2", str(SCRIPT), "2", "1")
    check(said(process), 1)


@pytest.mark.long
def test_r36_two_nodes_on_two_addresses_are_one_replica():
    port = free_port()
    common = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1")
    nodes = [
        torchrun(
            *common,
            *("--master-port", str(port), "--node-rank", str(node)),
            *("--local-addr", f"127.0.0.{node + 1}", str(SCRIPT), "2", "0"),
        )
        for node in (0, 1)
    ]
    check([rank for node in nodes for rank in said(node)], 0)


def test_r48_a_single_external_rank_needs_no_launcher_and_raises_the_plugin_s_own_error():
    args = EngineArgs("faulty", FaultyArgs(), cpu_config())
    with Engine(args, deployment=DeploymentConfig.external()) as engine:
        assert engine.mode == "external"
        with pytest.raises(FaultyError):
            engine.step(FaultyRequest(action=Action.RAISE))
        assert engine.step(FaultyRequest("on")).payload == "on"


def test_s3_a_launcher_and_the_automatic_mode_are_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match=r"use DeploymentConfig\.external\(\)"):
        Engine(EngineArgs("faulty", FaultyArgs(), cpu_config()))


def test_s2_half_a_launcher_is_refused(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match="without WORLD_SIZE"):
        Engine(EngineArgs("faulty", FaultyArgs(), cpu_config()))


def test_several_ranks_without_a_launcher_are_refused():
    config = EngineConfig(CPU, parallel=ParallelConfig(dense=DenseParallelConfig(tp_size=2)))
    with pytest.raises(ConfigurationError, match="torchrun"):
        Engine(EngineArgs("faulty", FaultyArgs(), config), deployment=DeploymentConfig.external())


@pytest.mark.parametrize(
    ("target", "local_rank", "placed"),
    [("cuda", 3, "cuda:3"), ("cuda:1", 3, "cuda:1"), ("cuda", None, "cuda"), ("cpu", 3, "cpu")],
)
def test_a_launched_rank_takes_the_device_of_its_local_rank(target, local_rank, placed):
    config = EngineConfig(DeviceConfig(target, "float32"))
    launcher = Launcher(rank=5, world_size=8, local_rank=local_rank)
    assert launched_config(config, launcher).device.target == placed
    assert launched_config(config, None) is config
