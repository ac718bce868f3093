"""What a store of batches is, and the states that a batch in it goes through."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from phalanx.distill.sample import Sample
from phalanx.errors import (
    BatchStateError,
    ConfigurationError,
    InvalidRequestError,
    SampleStoreError,
)


class Stage(enum.StrEnum):
    """How far a batch is; it never goes back.

    `collecting`: samples come one by one. `staged`: all are there, in their order. `scored`: all that
    the batch needs was written back. `validated`: and checked as a whole. `published`: it is the
    trainer's. `consumed`: it was trained on, and its samples are gone.
    """

    COLLECTING = "collecting"
    STAGED = "staged"
    SCORED = "scored"
    VALIDATED = "validated"
    PUBLISHED = "published"
    CONSUMED = "consumed"

    @property
    def rank(self) -> int:
        return _ORDER.index(self)


_ORDER = tuple(Stage)
_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Scoring(enum.StrEnum):
    """What can be written back to a staged batch: a judge's rewards, a teacher's scores, and the
    student's own at the teacher's tokens.
    """

    JUDGE = "judge"
    TEACHER = "teacher"
    STUDENT = "student"


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A batch as a store holds it. `samples` are whole: those that were staged, with what was written
    back to all of them. `notes` are copies that somebody is at work on, by sample: while collecting,
    the samples that are there already; later, those that were scored since the last write-back.
    """

    batch_id: str
    stage: Stage
    needs: tuple[Scoring, ...] = ()
    done: tuple[Scoring, ...] = ()
    samples: tuple[Sample, ...] = ()
    notes: dict[str, Sample] = {}

    def __post_init__(self) -> None:
        check_batch_id(self.batch_id)
        unknown = set(self.done) - set(self.needs)
        if unknown:
            raise InvalidRequestError(
                f"batch {self.batch_id!r} was scored by {sorted(unknown)}, which it does not need",
                field="done",
            )

    @property
    def missing(self) -> tuple[Scoring, ...]:
        """What it needs and nobody has written back."""
        return tuple(one for one in self.needs if one not in self.done)


class SampleStore(Protocol):
    """Batches by their id. Every change is whole or did not happen, also where the process is killed
    in the middle of it; one process at a time changes a store. Methods block.

    `published` batches do not change, and a batch is published once, whoever asks.
    """

    def stages(self) -> Mapping[str, Stage]:
        """Every batch that is known."""
        ...

    def load(self, batch_id: str) -> StoredBatch | None:
        """A batch with its notes; None for one that was never saved. A consumed one has no samples."""
        ...

    def save(self, batch: StoredBatch) -> None:
        """Put it in place of what was there, whose notes are gone; those of `batch` are not written.

        Raises `BatchStateError` for a stage before the one that is stored, and for one that only
        `publish` and `consume` may give; `SampleStoreError` where there is no room.
        """
        ...

    def note(self, batch_id: str, samples: Sequence[Sample]) -> None:
        """Keep copies of a batch's samples that are being worked on, in place of earlier ones of
        the same ids. The batch has to be there, and not validated.
        """
        ...

    def publish(self, batch_id: str) -> bool:
        """Give a validated batch to its reader. True for the one call that did it, False for every
        later one. Raises `BatchStateError` for a batch that is not validated.
        """
        ...

    def consume(self, batch_id: str) -> None:
        """Drop the samples of a published batch; that it was published stays known. Again changes
        nothing.
        """
        ...


def check_save(stored: Stage | None, batch: StoredBatch) -> None:
    """Raise `BatchStateError` for a batch that cannot take the place of one at stage `stored`."""
    if batch.stage.rank > Stage.VALIDATED.rank:
        raise BatchStateError(
            f"batch {batch.batch_id!r} cannot be saved as {batch.stage}; publish it, or consume it"
        )
    if stored is not None and stored.rank > batch.stage.rank:
        raise BatchStateError(
            f"batch {batch.batch_id!r} is {stored} and cannot go back to {batch.stage}"
        )
    if batch.missing and batch.stage.rank >= Stage.SCORED.rank:
        raise BatchStateError(
            f"batch {batch.batch_id!r} lacks {', '.join(batch.missing)} and cannot be {batch.stage}"
        )


def check_room(store: str, stages: Iterable[Stage], max_batches: int) -> None:
    """Raise `SampleStoreError` where a store with batches of these stages takes no further one."""
    num_kept = sum(stage is not Stage.CONSUMED for stage in stages)
    if num_kept >= max_batches:
        raise SampleStoreError(
            f"{store} holds {num_kept} batches, which is all that it takes; consume one, or raise"
            " max_batches"
        )


def check_limit(name: str, value: int) -> None:
    """Raise `ConfigurationError` for what is no bound of a store."""
    if value < 1:
        raise ConfigurationError(f"{name}={value} must be at least 1")


def check_note(batch_id: str, stored: Stage | None) -> None:
    """Raise `BatchStateError` where nobody may be at work on the batch."""
    if stored not in (Stage.COLLECTING, Stage.STAGED):
        raise BatchStateError(
            f"batch {batch_id!r} is {stored or 'not there'}; samples are noted while it is collecting"
            " or staged"
        )


def check_publish(batch_id: str, stored: Stage | None) -> bool:
    """Whether it can be published now; False where it was. Raises `BatchStateError` for the rest."""
    if stored is None or stored.rank < Stage.VALIDATED.rank:
        raise BatchStateError(
            f"batch {batch_id!r} is {stored or 'not there'}; only a validated one is published"
        )
    return stored is Stage.VALIDATED


def check_consume(batch_id: str, stored: Stage | None) -> bool:
    """Whether there is something to drop. Raises `BatchStateError` before publication."""
    if stored is None or stored.rank < Stage.PUBLISHED.rank:
        raise BatchStateError(
            f"batch {batch_id!r} is {stored or 'not there'}; only a published one is consumed"
        )
    return stored is Stage.PUBLISHED


def check_batch_id(batch_id: str) -> None:
    """Raise `InvalidRequestError` for what is no name of a batch."""
    if not _NAME.fullmatch(batch_id):
        raise InvalidRequestError(
            f"batch_id {batch_id[:80]!r} must be 1 to 100 letters, digits, '.', '_' and '-', the first"
            " of them a letter or digit",
            field="batch_id",
        )
