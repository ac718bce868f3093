"""A store in TransferQueue, the sample queue of several trainers, which lives in a Ray cluster.

Every record is a key of one partition: first its bytes, then a tag that says that they are whole, so
that a record without its tag is none. A batch is a head, which is a tag alone (its stage, and how often
it was saved), and the record of its last save; the head's tag changes at once, and is the decision.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Protocol, TypeVar, cast

import msgspec
import numpy as np

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
from phalanx.errors import MissingDependencyError, PhalanxError, SampleStoreError

_T = TypeVar("_T")
Tag = dict[str, object]
Publisher = Callable[[StoredBatch], None]
_DATA = "data"


class _Head(msgspec.Struct, frozen=True):
    stage: Stage
    num_saves: int


class _Note(msgspec.Struct, frozen=True):
    batch_id: str
    num_saves: int
    sample_id: str
    whole: bool


class Queue(Protocol):
    """What is used of the module `transfer_queue`."""

    def kv_put(
        self,
        key: str,
        partition_id: str,
        fields: Mapping[str, object] | None = None,
        tag: Tag | None = None,
    ) -> object: ...

    def kv_batch_get(
        self, keys: list[str], partition_id: str, select_fields: list[str]
    ) -> Mapping[str, Sequence[object]]: ...

    def kv_list(self, partition_id: str) -> Mapping[str, Mapping[str, Tag]]: ...

    def kv_clear(self, keys: list[str], partition_id: str) -> None: ...


class TransferQueueStore:
    """At most `max_batches` with samples, in `partition` of the queue that `transfer_queue.init` has
    connected this process to; that is the caller's to do, and to close.

    One process at a time writes to a partition. `publish_rows` is called before a batch is published,
    to give its samples to readers of the queue in their own form (see `QueueRows`); it is called
    again where the process ended in between, and has to put the same keys then.
    """

    def __init__(
        self,
        partition: str = "phalanx",
        *,
        max_batches: int = 64,
        publish_rows: Publisher | None = None,
    ) -> None:
        check_limit("max_batches", max_batches)
        try:
            self._queue = cast(Queue, import_module("transfer_queue"))
            self._torch = import_module("torch")
        except ImportError as error:
            raise MissingDependencyError(
                f"TransferQueueStore needs {error.name}; install it with `pip install"
                " phalanx[transferqueue]`"
            ) from error
        self.partition = partition
        self.max_batches = max_batches
        self._publish_rows = publish_rows
        self._lock = threading.Lock()

    def stages(self) -> Mapping[str, Stage]:
        with self._using():
            return {batch_id: head.stage for batch_id, head in self._heads().items()}

    def load(self, batch_id: str) -> StoredBatch | None:
        with self._using():
            head = self._heads().get(batch_id)
            if head is None:
                return None
            if head.stage is Stage.CONSUMED:
                return StoredBatch(batch_id=batch_id, stage=head.stage)
            [data] = self._read([_save_key(batch_id, head)])
            batch = _decoded(batch_id, data, StoredBatch)
            notes = {one.sample_id: one for one in self._read_notes(batch_id, head)}
            return msgspec.structs.replace(batch, stage=head.stage, notes=notes)

    def save(self, batch: StoredBatch) -> None:
        with self._using():
            heads = self._heads()
            head = heads.get(batch.batch_id)
            check_save(None if head is None else head.stage, batch)
            if head is None:
                stages = [one.stage for one in heads.values()]
                check_room(f"partition {self.partition!r}", stages, self.max_batches)
            new = _Head(batch.stage, 1 if head is None else head.num_saves + 1)
            bare = msgspec.structs.replace(batch, notes={})
            key = _save_key(batch.batch_id, new)
            self._write(key, msgspec.msgpack.encode(bare))
            self._set_head(batch.batch_id, new)
            self._drop(batch.batch_id, kept=key)

    def note(self, batch_id: str, samples: Sequence[Sample]) -> None:
        with self._using():
            head = self._heads().get(batch_id)
            check_note(batch_id, None if head is None else head.stage)
            assert head is not None
            for sample in samples:
                key = f"note/{batch_id}/{head.num_saves}/{sample.sample_id}"
                note = _Note(batch_id, head.num_saves, sample.sample_id, whole=True)
                # In place of an earlier one: that is none from here on, and not half of this.
                self._put_tag(key, msgspec.structs.replace(note, whole=False))
                self._write(key, msgspec.msgpack.encode(sample))
                self._put_tag(key, note)

    def publish(self, batch_id: str) -> bool:
        with self._using():
            head = self._heads().get(batch_id)
            if not check_publish(batch_id, None if head is None else head.stage):
                return False
            assert head is not None
            if self._publish_rows is not None:
                [data] = self._read([_save_key(batch_id, head)])
                self._publish_rows(_decoded(batch_id, data, StoredBatch))
            self._set_head(batch_id, msgspec.structs.replace(head, stage=Stage.PUBLISHED))
            return True

    def consume(self, batch_id: str) -> None:
        with self._using():
            head = self._heads().get(batch_id)
            if check_consume(batch_id, None if head is None else head.stage):
                assert head is not None
                self._set_head(batch_id, msgspec.structs.replace(head, stage=Stage.CONSUMED))
                self._drop(batch_id)

    @contextmanager
    def _using(self) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except PhalanxError:
                raise
            except (RuntimeError, ValueError, OSError, TimeoutError, AssertionError) as error:
                raise SampleStoreError(
                    f"partition {self.partition!r} of TransferQueue cannot be used: {error}; call"
                    " transfer_queue.init() first, and see that its Ray cluster runs"
                ) from error

    def _tags(self) -> Mapping[str, Tag]:
        return self._queue.kv_list(self.partition).get(self.partition, {})

    def _heads(self) -> dict[str, _Head]:
        return {
            key.removeprefix("head/"): msgspec.convert(tag, _Head)
            for key, tag in sorted(self._tags().items())
            if key.startswith("head/") and tag
        }

    def _set_head(self, batch_id: str, head: _Head) -> None:
        self._put_tag(f"head/{batch_id}", head)

    def _put_tag(self, key: str, tag: msgspec.Struct) -> None:
        self._queue.kv_put(key, self.partition, tag=msgspec.to_builtins(tag))

    def _write(self, key: str, data: bytes) -> None:
        tensor = self._torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        self._queue.kv_put(key, self.partition, fields={_DATA: tensor})

    def _read(self, keys: list[str]) -> list[bytes]:
        if not keys:
            return []
        found = self._queue.kv_batch_get(keys, self.partition, [_DATA])
        return [np.asarray(one, dtype=np.uint8).tobytes() for one in found[_DATA]]

    def _read_notes(self, batch_id: str, head: _Head) -> list[Sample]:
        keys = [key for key, note in self._notes(batch_id) if note.num_saves == head.num_saves]
        return [_decoded(batch_id, data, Sample) for data in self._read(keys)]

    def _notes(self, batch_id: str) -> list[tuple[str, _Note]]:
        """The keys of whole notes of a batch, of all its saves."""
        found = [
            (key, msgspec.convert(tag, _Note))
            for key, tag in self._tags().items()
            if key.startswith(f"note/{batch_id}/") and tag
        ]
        return [(key, note) for key, note in found if note.whole]

    def _drop(self, batch_id: str, kept: str = "") -> None:
        """All records of a batch but the one that is `kept`; also those of a process that ended
        before it had dropped them.
        """
        begins = (f"note/{batch_id}/", f"save/{batch_id}/")
        old = [key for key in self._tags() if key.startswith(begins) and key != kept]
        if old:
            self._queue.kv_clear(old, self.partition)


def _save_key(batch_id: str, head: _Head) -> str:
    return f"save/{batch_id}/{head.num_saves}"


def _decoded(batch_id: str, data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise SampleStoreError(f"batch {batch_id!r} cannot be read: {error}") from error
