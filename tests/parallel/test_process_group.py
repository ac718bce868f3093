"""The process group over all ranks: how it is joined, what it listens on, and losing a rank."""

from __future__ import annotations

import os
import socket

import psutil
import pytest
import torch

from phalanx import parallel as P
from phalanx.errors import ConfigurationError, PhalanxDistError
from phalanx.schema.parallel import ParallelConfig
from tests.parallel.rank_pool import RankPool, free_port, mesh_of


@pytest.fixture
def join(monkeypatch):
    """Joins a process group of one; it is left at the end of the test."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def join(address: str, **arguments: object) -> None:
        P.init_process_group(
            device="cpu", rank=0, world_size=1, init_method=address, timeout_s=20, **arguments
        )

    yield join
    P.destroy_process_group()


def test_r72_an_address_can_be_used_again(join):
    address = f"tcp://127.0.0.1:{free_port()}"
    for _ in range(3):
        assert P.default_group() is None
        join(address)
        assert P.default_group() == P.DefaultGroup(rank=0, size=1, backend="gloo")
        P.destroy_process_group()
        P.destroy_process_group()


def test_a_second_process_group_is_refused(join):
    join(f"tcp://127.0.0.1:{free_port()}")
    with pytest.raises(PhalanxDistError, match="already rank 0 of a process group of 1; destroy"):
        join(f"tcp://127.0.0.1:{free_port()}")


def test_a_taken_address_is_named(join):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(PhalanxDistError, match=f"gloo .* at {address}: .*Address already in"):
            join(address)
    assert P.default_group() is None


@pytest.mark.parametrize("address", ["127.0.0.1:29500", "tcp://:29500", "tcp://h", "file:///x"])
def test_an_address_of_another_form_is_refused(join, address):
    with pytest.raises(ConfigurationError, match="is not valid; allowed: env://, or tcp://HOST"):
        join(address)


def test_a_launchers_environment_is_an_address(join, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    join("env://")
    assert P.default_group() == P.DefaultGroup(rank=0, size=1, backend="gloo")


def test_a_device_without_collectives_is_refused():
    with pytest.raises(ConfigurationError, match="devices of type 'meta'; allowed: cpu, cuda"):
        P.init_process_group(device="meta", rank=0, world_size=1)


def _listening() -> list[str]:
    mesh_of(ParallelConfig())
    P.warmup_collectives()
    connections = psutil.Process().net_connections("tcp")
    return [found.laddr.ip for found in connections if found.status == psutil.CONN_LISTEN]


def test_ranks_on_loopback_listen_nowhere_else(two_ranks):
    first, second = two_ranks.run(_listening)
    assert first, "rank 0 has no server for the others"
    assert set(first) | set(second) == {"127.0.0.1"}


def _die_or_wait(ended: int) -> str:
    mesh = mesh_of(ParallelConfig())
    P.warmup_collectives()
    if mesh.rank == ended:
        os._exit(3)
    with pytest.raises(PhalanxDistError) as caught:
        P.all_reduce(torch.zeros(1), group="dense_tp")
    return str(caught.value)


def test_a_lost_rank_is_an_error_of_the_others():
    pool = RankPool(2)
    message = pool.run_without(1, _die_or_wait, 1)
    assert message.startswith("all_reduce over ranks 0, 1 failed: ")
    assert "a rank has ended" in message
    pool.kill()
