"""What is remembered of the phases of a job, also through a restart: values, each change a new one."""

from __future__ import annotations

import enum

import msgspec

from phalanx.wire.phases import Holding, PhaseView


class Outcome(enum.StrEnum):
    """Of an operation; `begun` of one that nobody has seen the end of."""

    BEGUN = "begun"
    DONE = "done"
    FAILED = "failed"


class OperationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An operation by its caller's id. `meaning` says in words what was asked for; `detail` why it
    failed.
    """

    operation_id: str
    meaning: str
    outcome: Outcome
    detail: str = ""


class TrainerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer that has told of itself. `started` tells its process from a later one of the same
    `pid`. `since` is the number of the change by which it last got its devices.
    """

    trainer_id: str
    pid: int | None = None
    started: str | None = None
    holding: Holding = Holding.NOTHING
    since: int = 0


class PhaseState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a job is. `reached` is the index of the phase that was entered last in `batch`, -1 before
    the first; `abandoned`: the batch was given up. `holders` are those with leases.
    """

    number: int = 0
    phase: str | None = None
    batch: str | None = None
    reached: int = -1
    abandoned: bool = False
    holders: tuple[str, ...] = ()
    blocked: str | None = None
    trainer: TrainerRecord | None = None


class JobShape(msgspec.Struct, frozen=True, kw_only=True):
    """What the remembered state is about, so that it means nothing for a job of another shape."""

    mode: str
    phases: tuple[PhaseView, ...]
    trainer_bundles: tuple[str, ...] = ()


class Remembered(msgspec.Struct, frozen=True):
    """All that a journal knows: the shape it was written for, the last state, and the operations,
    oldest first.
    """

    shape: JobShape
    state: PhaseState
    operations: tuple[OperationRecord, ...] = ()

    def after(self, state: PhaseState, operation: OperationRecord | None) -> Remembered:
        """This with a change: the new state, and the operation that changed as the last one."""
        others = [
            each
            for each in self.operations
            if operation is None or each.operation_id != operation.operation_id
        ]
        changed = [] if operation is None else [operation]
        return Remembered(self.shape, state, (*others, *changed))
