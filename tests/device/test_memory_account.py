"""Which simulated device a rank accounts with, and what tensors hold."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.memory_account import Unbounded, create_account, tensor_bytes
from phalanx.device_ledger import DeviceLedger, SimulatedDevice
from phalanx.errors import ConfigurationError

CPU = torch.device("cpu")


@pytest.fixture
def devices(tmp_path, monkeypatch) -> DeviceLedger:
    ledger = DeviceLedger.create(tmp_path / "devices", 4, 100)
    monkeypatch.setenv("PHALANX_SIMULATED_DEVICES", f"{ledger.path}:3,1@student")
    return ledger


def number(account) -> int:
    assert isinstance(account, SimulatedDevice) and account.owner == "student"
    return account.number


def test_without_simulated_devices_nothing_is_bounded():
    account = create_account(CPU)
    assert isinstance(account, Unbounded)
    account.take("weights", 1 << 62)
    account.give("weights")


def test_ranks_take_the_devices_in_their_order(devices, monkeypatch):
    assert number(create_account(CPU)) == 3
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, expected in enumerate((3, 1)):
        monkeypatch.setenv("RANK", str(rank))
        assert number(create_account(CPU)) == expected
        # On the second of two machines.
        monkeypatch.setenv("LOCAL_RANK", str(1 - rank))
        assert number(create_account(CPU)) == (1, 3)[rank]
        monkeypatch.delenv("LOCAL_RANK")


def test_a_rank_without_a_device_is_refused(devices, monkeypatch):
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigurationError, match="names 2 devices, and this process is rank 2"):
        create_account(CPU)


def test_a_real_device_is_not_simulated_as_well(devices):
    with pytest.raises(
        ConfigurationError, match="computes on cuda:0; simulated devices are for CPUs"
    ):
        create_account(torch.device("cuda:0"))


def test_a_tensor_counts_once_and_a_shell_not_at_all():
    tensor = torch.zeros(10, dtype=torch.float32)
    shell = torch.empty(1000, device="meta")
    assert tensor_bytes([tensor, tensor, shell, torch.zeros(3, dtype=torch.int8)]) == 43
    assert tensor_bytes([tensor, tensor[:5]]) == tensor_bytes([tensor[:5], tensor]) == 40
