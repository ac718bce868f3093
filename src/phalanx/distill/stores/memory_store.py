"""A store in this process's memory, which ends with it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

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


class MemoryStore:
    """At most `max_batches` with samples. For any number of threads."""

    def __init__(self, max_batches: int = 64) -> None:
        check_limit("max_batches", max_batches)
        self.max_batches = max_batches
        self._batches: dict[str, StoredBatch] = {}
        self._lock = threading.Lock()

    def stages(self) -> Mapping[str, Stage]:
        with self._lock:
            return {batch_id: batch.stage for batch_id, batch in self._batches.items()}

    def load(self, batch_id: str) -> StoredBatch | None:
        with self._lock:
            return self._batches.get(batch_id)

    def save(self, batch: StoredBatch) -> None:
        with self._lock:
            check_save(self._stage(batch.batch_id), batch)
            if batch.batch_id not in self._batches:
                stages = [one.stage for one in self._batches.values()]
                check_room("the store", stages, self.max_batches)
            self._batches[batch.batch_id] = msgspec.structs.replace(batch, notes={})

    def note(self, batch_id: str, samples: Sequence[Sample]) -> None:
        with self._lock:
            check_note(batch_id, self._stage(batch_id))
            batch = self._batches[batch_id]
            notes = {**batch.notes, **{one.sample_id: one for one in samples}}
            self._batches[batch_id] = msgspec.structs.replace(batch, notes=notes)

    def publish(self, batch_id: str) -> bool:
        with self._lock:
            if not check_publish(batch_id, self._stage(batch_id)):
                return False
            batch = self._batches[batch_id]
            self._batches[batch_id] = msgspec.structs.replace(batch, stage=Stage.PUBLISHED)
            return True

    def consume(self, batch_id: str) -> None:
        with self._lock:
            if check_consume(batch_id, self._stage(batch_id)):
                self._batches[batch_id] = StoredBatch(batch_id=batch_id, stage=Stage.CONSUMED)

    def _stage(self, batch_id: str) -> Stage | None:
        batch = self._batches.get(batch_id)
        return None if batch is None else batch.stage
