"""What a ledger's file holds: a header, and for each device its peak twice and a place an entry.

Everything is of a fixed size and has a checksum, so that what was half written is told from what is
there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.device_ledger.processes import ProcessId
from phalanx.errors import ConfigurationError

MIB = 1 << 20
MAX_DEVICES = 4096
ENTRIES_PER_DEVICE = 32
"""Of processes that live, and tags of theirs."""
MAX_OWNER_BYTES = 256
MAX_TAG_BYTES = 64

_MAGIC = b"phalanx devices\1"
_CRC = struct.Struct("<I")
_HEADER = struct.Struct("<16sIQ")
_HEADER_BYTES = 64
_PEAK = struct.Struct("<Q")
_PEAK_BYTES = 16
_PEAKS_BYTES = 64
_ENTRY = struct.Struct(f"<QQQHH{MAX_OWNER_BYTES}s{MAX_TAG_BYTES}s")
_ENTRY_BYTES = 384
_REGION_BYTES = _PEAKS_BYTES + ENTRIES_PER_DEVICE * _ENTRY_BYTES
_NONE = bytes(_CRC.size)
"""Where a checksum would be: there is no entry, as in a file that is new."""

Write = Callable[[int, bytes, int], int]
"""As `os.pwrite`."""


@dataclass(frozen=True)
class Holding:
    """What a process holds of a device under a tag."""

    device: int
    owner: str
    tag: str
    num_bytes: int
    pid: int


@dataclass(frozen=True)
class Entry:
    """`at` is its place in the device's region; the rest is what is written there."""

    at: int
    process: ProcessId
    holding: Holding

    @property
    def key(self) -> tuple[ProcessId, str, str]:
        """There is one entry of it a device."""
        return self.process, self.holding.owner, self.holding.tag


@dataclass(frozen=True)
class Region:
    """One device's part of the file. An entry that is not whole was left by a process that was
    killed while it wrote.
    """

    entries: tuple[Entry, ...]
    peaks: tuple[int, int]
    """Both copies; 0 for one that is not whole."""

    @property
    def peak(self) -> int:
        return max(self.peaks)


class LedgerFile:
    """See the module. Nobody else reads or writes while it is `opened`."""

    def __init__(self, path: Path, write: Write) -> None:
        """Raises `ConfigurationError` for a file that is none."""
        self.path = path
        self._write = write
        self.num_devices, self.budget_bytes = _shape(path)

    @contextlib.contextmanager
    def opened(self) -> Iterator[OpenLedger]:
        """The file, locked. It is opened anew each time, so that threads exclude one another too,
        and a lock ends with whoever held it though children of his live on.
        """
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigurationError(f"cannot open {self.path}: {error.strerror}") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield OpenLedger(file, self._write)
        finally:
            # Closing alone leaves the lock to a child that was forked meanwhile.
            fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


class OpenLedger:
    """A ledger's file while it is locked."""

    def __init__(self, file: int, write: Write) -> None:
        self._file = file
        self._write = write

    def region(self, device: int) -> Region:
        region = os.pread(self._file, _REGION_BYTES, _HEADER_BYTES + device * _REGION_BYTES)
        first, second = (_peak(region, copy * _PEAK_BYTES) for copy in (0, 1))
        return Region(tuple(_entries(region, device)), (first, second))

    def put(self, at: int, process: ProcessId, holding: Holding) -> None:
        """Write an entry at this place, over none, one of its own key, or one of a dead process."""
        owner, tag = holding.owner.encode(), holding.tag.encode()
        body = _ENTRY.pack(*process, holding.num_bytes, len(owner), len(tag), owner, tag)
        self._write_all(_checked(body), _place(holding.device, at))

    def remove(self, device: int, at: int) -> None:
        """Leave no entry at this place."""
        self._write_all(_NONE, _place(device, at))

    def raise_peak(self, device: int, region: Region, peak: int) -> None:
        """Both copies, one after the other, so that one of them is whole at any time."""
        # The smaller one first: of two that differ the greater is the one that counts.
        for copy in sorted((0, 1), key=lambda copy: region.peaks[copy]):
            start = _HEADER_BYTES + device * _REGION_BYTES + copy * _PEAK_BYTES
            self._write_all(_checked(_PEAK.pack(peak)), start)

    def forget_peak(self, device: int) -> None:
        self._write_all(bytes(_PEAKS_BYTES), _HEADER_BYTES + device * _REGION_BYTES)

    def _write_all(self, data: bytes, at: int) -> None:
        while data:
            written = self._write(self._file, data, at)
            data, at = data[written:], at + written


def make_ledger_file(
    path: Path, num_devices: int, budget_bytes: int, *, replaces: bool = False
) -> None:
    """A file with nothing held, which is there whole or not at all. One that is there already stays,
    unless this `replaces` it.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # All of it now, so that no later write fails for want of room.
            os.posix_fallocate(file, 0, _file_bytes(num_devices))
            os.pwrite(file, _checked(_HEADER.pack(_MAGIC, num_devices, budget_bytes)), 0)
        finally:
            os.close(file)
        if replaces:
            new.replace(path)
            return
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(new)
        new.unlink()
    except OSError as error:
        raise ConfigurationError(
            f"cannot make the ledger of devices {path}: {error.strerror}"
        ) from None


def _shape(path: Path) -> tuple[int, int]:
    """How many devices, and the budget of each."""
    try:
        with path.open("rb") as file:
            header = file.read(_CRC.size + _HEADER.size)
            num_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ConfigurationError(
            f"cannot read the ledger of devices {path}: {error.strerror}"
        ) from None
    body = header[_CRC.size :]
    if len(body) == _HEADER.size and header == _checked(body):
        magic, num_devices, budget_bytes = _HEADER.unpack(body)
        if magic == _MAGIC and num_bytes == _file_bytes(num_devices):
            return num_devices, budget_bytes
    raise ConfigurationError(
        f"{path} is no ledger of devices; make one with DeviceLedger.create, at another path"
    )


def _file_bytes(num_devices: int) -> int:
    return _HEADER_BYTES + num_devices * _REGION_BYTES


def _place(device: int, at: int) -> int:
    return _HEADER_BYTES + device * _REGION_BYTES + _PEAKS_BYTES + at * _ENTRY_BYTES


def _checked(body: bytes) -> bytes:
    return _CRC.pack(zlib.crc32(body)) + body


def _entries(region: bytes, device: int) -> Iterator[Entry]:
    for at in range(ENTRIES_PER_DEVICE):
        start = _PEAKS_BYTES + at * _ENTRY_BYTES
        if region[start : start + _CRC.size] == _NONE:
            continue
        body = region[start + _CRC.size : start + _CRC.size + _ENTRY.size]
        if region[start : start + _CRC.size + _ENTRY.size] != _checked(body):
            continue
        pid, started, num_bytes, owner_bytes, tag_bytes, owner, tag = _ENTRY.unpack(body)
        holding = Holding(
            device, owner[:owner_bytes].decode(), tag[:tag_bytes].decode(), num_bytes, pid
        )
        yield Entry(at, ProcessId(pid, started), holding)


def _peak(region: bytes, start: int) -> int:
    body = region[start + _CRC.size : start + _CRC.size + _PEAK.size]
    if region[start : start + _CRC.size] != _CRC.pack(zlib.crc32(body)):
        return 0
    (peak,) = _PEAK.unpack(body)
    return int(peak)
