"""The ledger, and one device of it for one owner."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from phalanx import settings
from phalanx.device_ledger.ledger_file import (
    ENTRIES_PER_DEVICE,
    MAX_DEVICES,
    MAX_OWNER_BYTES,
    MAX_TAG_BYTES,
    MIB,
    Entry,
    Holding,
    LedgerFile,
    Write,
    make_ledger_file,
)
from phalanx.device_ledger.processes import LinuxProcesses, Processes, ProcessId
from phalanx.errors import ConfigurationError, SimulatedOutOfMemoryError


@dataclass(frozen=True)
class DeviceMemory:
    """A simulated device: its size, the most that was ever held of it at once, and what is now."""

    device: int
    budget_bytes: int
    peak_bytes: int
    held: tuple[Holding, ...]

    @property
    def held_bytes(self) -> int:
        return sum(holding.num_bytes for holding in self.held)


class DeviceLedger:
    """See the package. Any number of threads and processes may use one file at once."""

    def __init__(
        self, path: Path, processes: Processes | None = None, write: Write = os.pwrite
    ) -> None:
        """The ledger in an existing file. Raises `ConfigurationError` where it is none."""
        self._file = LedgerFile(path, write)
        self._processes = LinuxProcesses() if processes is None else processes

    @classmethod
    def create(cls, path: Path, num_devices: int, budget_bytes: int) -> Self:
        """The ledger of so many devices of that size, in a file that is made where there is none.

        One that is there and agrees is kept, with what is held; where nothing is, its peaks are
        forgotten. Raises `ConfigurationError` where it does not agree and somebody holds memory of it.
        """
        if not 1 <= num_devices <= MAX_DEVICES:
            raise ConfigurationError(f"num_devices={num_devices} must be from 1 to {MAX_DEVICES}")
        if not 1 <= budget_bytes < 1 << 63:
            raise ConfigurationError(f"budget_bytes={budget_bytes} must be from 1 to 2**63 - 1")
        if not path.exists():
            # Of several that make it at once the first one's is kept, and is everybody's.
            make_ledger_file(path, num_devices, budget_bytes)
        existing = cls(path)
        if (existing.num_devices, existing.budget_bytes) == (num_devices, budget_bytes):
            existing.forget_peaks()
            return existing
        if held := existing.held():
            raise ConfigurationError(
                f"{path} is the ledger of {existing.num_devices} devices of"
                f" {existing.budget_bytes} bytes, not of {num_devices} of {budget_bytes}, and"
                f" {_who(held)}; end what holds it, or use another file"
            )
        make_ledger_file(path, num_devices, budget_bytes, replaces=True)
        return cls(path)

    @classmethod
    def from_environment(cls, owner: str | None = None) -> tuple[SimulatedDevice, ...]:
        """The devices that `PHALANX_SIMULATED_DEVICES` gives to this process; none without it.

        `owner` is what others are told of who holds them; left out, it is the variable's, or the
        pid. Raises `ConfigurationError` for a file or a device that is not there.
        """
        given = settings.simulated_devices()
        if given is None:
            return ()
        ledger = cls(given.file)
        name = owner or given.owner or f"process {os.getpid()}"
        return tuple(SimulatedDevice(ledger, number, name) for number in given.devices)

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def num_devices(self) -> int:
        return self._file.num_devices

    @property
    def budget_bytes(self) -> int:
        """Of each device."""
        return self._file.budget_bytes

    def take(self, device: int, owner: str, tag: str, num_bytes: int) -> None:
        """This process holds `num_bytes` of the device under the tag, instead of what it held there.

        Raises `SimulatedOutOfMemoryError` where they do not fit; then it holds what it did before.
        """
        if num_bytes < 0:
            raise ConfigurationError(f"num_bytes={num_bytes} of {tag!r} is below 0")
        if num_bytes == 0:
            self.give(device, owner, tag)
            return
        self.check_device(device)
        process = self._own(owner, tag)
        holding = Holding(device, owner, tag, num_bytes, process.pid)
        with self._file.opened() as file:
            region = file.region(device)
            entries = self._alive(region.entries)
            mine = next((one for one in entries if one.key == (process, owner, tag)), None)
            more = num_bytes - (0 if mine is None else mine.holding.num_bytes)
            total = sum(one.holding.num_bytes for one in entries) + more
            if more > 0 and total > self.budget_bytes:
                raise self._out_of_memory(holding, [one.holding for one in entries])
            at = self._free_place(entries, holding) if mine is None else mine.at
            file.put(at, process, holding)
            if total > region.peak:
                file.raise_peak(device, region, total)

    def give(self, device: int, owner: str, tag: str) -> None:
        """This process holds nothing of the device under the tag. Any number of times."""
        self.check_device(device)
        key = (self._own(owner, tag), owner, tag)
        with self._file.opened() as file:
            for entry in file.region(device).entries:
                if entry.key == key:
                    file.remove(device, entry.at)

    def held(self) -> tuple[Holding, ...]:
        """What living processes hold, device by device."""
        return tuple(holding for device in self.devices() for holding in device.held)

    def peaks(self) -> tuple[int, ...]:
        """The most bytes of each device that were ever held at once."""
        return tuple(device.peak_bytes for device in self.devices())

    def devices(self) -> tuple[DeviceMemory, ...]:
        """All of them at one moment."""
        with self._file.opened() as file:
            regions = [file.region(device) for device in range(self.num_devices)]
        found = []
        for device, region in enumerate(regions):
            held = tuple(entry.holding for entry in self._alive(region.entries))
            found.append(DeviceMemory(device, self.budget_bytes, region.peak, held))
        return tuple(found)

    def forget_peaks(self) -> None:
        """Begin them anew, unless a living process holds something."""
        with self._file.opened() as file:
            regions = [file.region(device) for device in range(self.num_devices)]
            if any(self._alive(region.entries) for region in regions):
                return
            for device in range(self.num_devices):
                file.forget_peak(device)

    def check_device(self, device: int) -> None:
        """Raise `ConfigurationError` for one that the ledger does not have."""
        if not 0 <= device < self.num_devices:
            raise ConfigurationError(
                f"simulated device {device} is not one of {self.path}, which has"
                f" {self.num_devices}, numbered from 0"
            )

    def _own(self, owner: str, tag: str) -> ProcessId:
        for name, text, most in (("owner", owner, MAX_OWNER_BYTES), ("tag", tag, MAX_TAG_BYTES)):
            if not 0 < len(text.encode()) <= most:
                raise ConfigurationError(f"{name}={text!r} must have from 1 to {most} bytes")
        return self._processes.own()

    def _alive(self, entries: Sequence[Entry]) -> list[Entry]:
        processes = {entry.process for entry in entries}
        living = {process for process in processes if self._processes.is_alive(process)}
        return [entry for entry in entries if entry.process in living]

    def _free_place(self, entries: Collection[Entry], wanted: Holding) -> int:
        used = {entry.at for entry in entries}
        for at in range(ENTRIES_PER_DEVICE):
            if at not in used:
                return at
        raise SimulatedOutOfMemoryError(
            f"simulated device {wanted.device} of {self.path} has {ENTRIES_PER_DEVICE} entries of"
            f" processes that live, and no place for one more ({wanted.owner}, {wanted.tag})"
        )

    def _out_of_memory(self, wanted: Holding, held: Sequence[Holding]) -> SimulatedOutOfMemoryError:
        free = self.budget_bytes - sum(holding.num_bytes for holding in held)
        return SimulatedOutOfMemoryError(
            f"simulated device {wanted.device} is out of memory: {wanted.owner} (pid {wanted.pid})"
            f" tried to take {_size(wanted.num_bytes)} for {wanted.tag}; of"
            f" {_size(self.budget_bytes)} {_size(max(free, 0))} are free, and"
            f" {_who(held) if held else 'nobody holds any'}; let it take less (a KV cache has the size"
            " of pool_tokens), or give the devices more (placement.device_memory_mib)"
        )


@dataclass(frozen=True)
class SimulatedDevice:
    """One device of a ledger, for one owner in this process."""

    ledger: DeviceLedger
    number: int
    owner: str

    def __post_init__(self) -> None:
        self.ledger.check_device(self.number)

    def take(self, tag: str, num_bytes: int) -> None:
        """As `DeviceLedger.take`."""
        self.ledger.take(self.number, self.owner, tag, num_bytes)

    def give(self, tag: str) -> None:
        """As `DeviceLedger.give`."""
        self.ledger.give(self.number, self.owner, tag)

    @contextlib.contextmanager
    def holding(self, tag: str, num_bytes: int) -> Iterator[None]:
        """Hold so much for as long as this is open."""
        self.take(tag, num_bytes)
        try:
            yield
        finally:
            self.give(tag)


def _who(held: Sequence[Holding]) -> str:
    """Who holds how much, in words."""
    parts: dict[tuple[str, int], list[str]] = {}
    for one in held:
        parts.setdefault((one.owner, one.pid), []).append(f"{_size(one.num_bytes)} for {one.tag}")
    return "; ".join(
        f"{owner} (pid {pid}) holds {' and '.join(each)}" for (owner, pid), each in parts.items()
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB" if num_bytes >= MIB else f"{num_bytes} bytes"
