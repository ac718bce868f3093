"""What a rank holds of its device, told to whoever bounds that: a ledger, where devices are simulated."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from phalanx import settings
from phalanx.device_ledger import DeviceLedger
from phalanx.errors import ConfigurationError


class MemoryAccount(Protocol):
    """The account of one rank with its device."""

    def take(self, tag: str, num_bytes: int) -> None:
        """Hold `num_bytes` under the tag, instead of what was held there.

        Raises `SimulatedOutOfMemoryError` where they do not fit; nothing has changed then.
        """
        ...

    def give(self, tag: str) -> None:
        """Hold nothing under the tag. Any number of times."""
        ...


class Unbounded:
    """A real device bounds its memory itself."""

    def take(self, tag: str, num_bytes: int) -> None:
        return

    def give(self, tag: str) -> None:
        return


def create_account(device: torch.device) -> MemoryAccount:
    """This process's account: with the simulated device that its place among the ranks of the
    machine gives it, of those in `PHALANX_SIMULATED_DEVICES`.
    """
    given = settings.simulated_devices()
    if given is None:
        return Unbounded()
    if device.type != "cpu":
        raise ConfigurationError(
            f"PHALANX_SIMULATED_DEVICES is set, and the engine computes on {device}; simulated"
            " devices are for CPUs: unset it, or use the device cpu"
        )
    launcher = settings.launcher()
    index = 0
    if launcher is not None:
        index = launcher.rank if launcher.local_rank is None else launcher.local_rank
    devices = DeviceLedger.from_environment()
    if index >= len(devices):
        raise ConfigurationError(
            f"PHALANX_SIMULATED_DEVICES names {len(devices)} devices, and this process is rank"
            f" {index} on this machine, counted from 0; name one for every rank"
        )
    return devices[index]


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """What these tensors hold of a device, each counted once however often it comes, and one that is
    the beginning of another not at all.
    """
    held: dict[int, int] = {}
    for tensor in tensors:
        if not tensor.is_meta:
            start = tensor.data_ptr()
            held[start] = max(held.get(start, 0), tensor.nbytes)
    return sum(held.values())
