"""A store in a directory, which outlives its process.

`ID.batch` is one batch, written beside its place, synced and renamed. `ID.published` is the decision
that it is published: whoever makes that file first has published it, and a batch of which only that
file is left was consumed. `ID.N.notes` grows by one record for each copy of a sample, where N counts
the saves of the batch, so that notes of before the last save are none. A record that was not written
to its end is ignored, and the next one takes its place.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from phalanx.distill.sample import Sample
from phalanx.distill.stores.base import (
    Stage,
    StoredBatch,
    check_consume,
    check_limit,
    check_note,
    check_publish,
    check_room,
    check_save,
)
from phalanx.distill.stores.records import framed, read_record, read_records
from phalanx.errors import SampleStoreError

_T = TypeVar("_T")
_BATCH, _NOTES, _PUBLISHED, _NEW = ".batch", ".notes", ".published", ".new"


class _Head(msgspec.Struct, frozen=True):
    """The first record of a batch's file."""

    batch_id: str
    stage: Stage
    num_saves: int


@dataclass
class _Entry:
    """What is known of a batch without reading it. `notes_end`: where the next note goes."""

    stage: Stage
    num_saves: int
    notes_end: int | None = None


class DiskStore:
    """At most `max_batches` with samples and `max_bytes` of files, in `directory`, which is made.

    One process has it at a time; `close`, the end of `with` or its own end gives it up.
    """

    def __init__(
        self, directory: Path | str, *, max_batches: int = 64, max_bytes: int = 64 << 30
    ) -> None:
        check_limit("max_batches", max_batches)
        check_limit("max_bytes", max_bytes)
        self.directory = Path(directory)
        self.max_batches = max_batches
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._held = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SampleStoreError(f"{self.directory} cannot be used: {error}") from error
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._held)
            raise SampleStoreError(
                f"{self.directory} is in use by a store of this process or of another one; close"
                " that, or give another directory"
            ) from error
        try:
            self._entries = self._found()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Any number of times; nothing is used afterwards."""
        with self._lock:
            if self._held >= 0:
                # Closing alone leaves the lock to children that were forked with this file open.
                fcntl.flock(self._held, fcntl.LOCK_UN)
                os.close(self._held)
                self._held = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def stages(self) -> Mapping[str, Stage]:
        with self._using():
            return {batch_id: entry.stage for batch_id, entry in sorted(self._entries.items())}

    def load(self, batch_id: str) -> StoredBatch | None:
        with self._using():
            entry = self._entries.get(batch_id)
            if entry is None:
                return None
            if entry.stage is Stage.CONSUMED:
                return StoredBatch(batch_id=batch_id, stage=entry.stage)
            batch = self._read(batch_id)
            notes = self._read_notes(batch_id, entry)
            return msgspec.structs.replace(batch, stage=entry.stage, notes=notes)

    def save(self, batch: StoredBatch) -> None:
        with self._using():
            entry = self._entries.get(batch.batch_id)
            check_save(None if entry is None else entry.stage, batch)
            num_saves = 1 if entry is None else entry.num_saves + 1
            head = _Head(batch.batch_id, batch.stage, num_saves)
            bare = msgspec.structs.replace(batch, notes={})
            data = b"".join(framed(msgspec.msgpack.encode(one)) for one in (head, bare))
            if entry is None:
                stages = [one.stage for one in self._entries.values()]
                check_room(str(self.directory), stages, self.max_batches)
            self._check_bytes(len(data))
            path = self._path(batch.batch_id, _BATCH)
            with (new := path.with_name(path.name + _NEW)).open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.rename(path)
            self._sync()
            self._entries[batch.batch_id] = _Entry(batch.stage, num_saves)
            if entry is not None:
                self._notes_path(batch.batch_id, entry).unlink(missing_ok=True)

    def note(self, batch_id: str, samples: Sequence[Sample]) -> None:
        with self._using():
            entry = self._entries.get(batch_id)
            check_note(batch_id, None if entry is None else entry.stage)
            assert entry is not None
            data = b"".join(framed(msgspec.msgpack.encode(one)) for one in samples)
            self._check_bytes(len(data))
            if entry.notes_end is None:
                self._read_notes(batch_id, entry)
            assert entry.notes_end is not None
            descriptor = os.open(self._notes_path(batch_id, entry), os.O_RDWR | os.O_CREAT, 0o644)
            with open(descriptor, "r+b") as file:
                # What is behind was torn when a process ended.
                file.truncate(entry.notes_end)
                file.seek(entry.notes_end)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if entry.notes_end == 0:
                self._sync()
            entry.notes_end += len(data)

    def publish(self, batch_id: str) -> bool:
        with self._using():
            entry = self._entries.get(batch_id)
            if not check_publish(batch_id, None if entry is None else entry.stage):
                return False
            assert entry is not None
            marker = self._path(batch_id, _PUBLISHED)
            os.close(os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
            entry.stage = Stage.PUBLISHED
            self._sync()
            return True

    def consume(self, batch_id: str) -> None:
        with self._using():
            entry = self._entries.get(batch_id)
            if not check_consume(batch_id, None if entry is None else entry.stage):
                return
            assert entry is not None
            self._path(batch_id, _BATCH).unlink(missing_ok=True)
            entry.stage = Stage.CONSUMED
            self._sync()

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock:
            if self._held < 0:
                raise SampleStoreError(f"the store at {self.directory} is closed; open it again")
            try:
                yield
            except OSError as error:
                raise SampleStoreError(
                    f"{error.filename or self.directory} cannot be read or written: {error}"
                ) from error

    def _found(self) -> dict[str, _Entry]:
        """What an earlier process left."""
        entries: dict[str, _Entry] = {}
        for path in sorted(self.directory.iterdir()):
            if path.name.endswith(_NEW):
                path.unlink()
            elif path.name.endswith(_BATCH):
                with path.open("rb") as file:
                    head = self._decoded(path, read_record(file), _Head)
                entries[head.batch_id] = _Entry(head.stage, head.num_saves)
        for path in self.directory.glob(f"*{_PUBLISHED}"):
            batch_id = path.name.removesuffix(_PUBLISHED)
            there = entries.get(batch_id)
            if there is None:
                entries[batch_id] = _Entry(Stage.CONSUMED, 0)
            else:
                there.stage = Stage.PUBLISHED
        wanted = {self._notes_path(batch_id, entry) for batch_id, entry in entries.items()}
        for path in set(self.directory.glob(f"*{_NOTES}")) - wanted:
            path.unlink()
        return entries

    def _read(self, batch_id: str) -> StoredBatch:
        path = self._path(batch_id, _BATCH)
        with path.open("rb") as file:
            read_record(file)
            return self._decoded(path, read_record(file), StoredBatch)

    def _read_notes(self, batch_id: str, entry: _Entry) -> dict[str, Sample]:
        notes: dict[str, Sample] = {}
        path = self._notes_path(batch_id, entry)
        entry.notes_end = 0
        if path.exists():
            with path.open("rb") as file:
                for data, entry.notes_end in read_records(file):
                    note = self._decoded(path, data, Sample)
                    notes[note.sample_id] = note
        return notes

    def _decoded(self, path: Path, data: bytes | None, kind: type[_T]) -> _T:
        try:
            return msgspec.msgpack.decode(data or b"", type=kind)
        except (msgspec.DecodeError, ValueError) as error:
            raise SampleStoreError(
                f"{path} is damaged ({error}); put back a copy of it, or remove it to collect its batch"
                " again"
            ) from error

    def _check_bytes(self, num_bytes: int) -> None:
        files = [
            path
            for batch_id, entry in self._entries.items()
            if entry.stage is not Stage.CONSUMED
            for path in (self._path(batch_id, _BATCH), self._notes_path(batch_id, entry))
        ]
        used = sum(path.stat().st_size for path in files if path.exists())
        if used + num_bytes > self.max_bytes:
            raise SampleStoreError(
                f"{self.directory} holds {used} bytes, and {num_bytes} more are more than the"
                f" {self.max_bytes} that it takes; consume a batch, or raise max_bytes"
            )

    def _path(self, batch_id: str, suffix: str) -> Path:
        return self.directory / f"{batch_id}{suffix}"

    def _notes_path(self, batch_id: str, entry: _Entry) -> Path:
        return self.directory / f"{batch_id}.{entry.num_saves}{_NOTES}"

    def _sync(self) -> None:
        """Names of files outlast a loss of power only when their directory is synced too."""
        descriptor = os.open(self.directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
