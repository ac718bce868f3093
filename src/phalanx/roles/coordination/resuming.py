"""What a journal means for a job that is started: where it was, or that it was another job."""

from __future__ import annotations

import msgspec

from phalanx.errors import ConfigurationError
from phalanx.roles.coordination.journal import Journal
from phalanx.roles.coordination.record import JobShape, PhaseState, Remembered
from phalanx.wire.phases import Holding

_NUMBERS_APART = 1000
"""Changes that were not written down have numbers too, so that a restart begins beyond them."""


def resume(journal: Journal, shape: JobShape) -> Remembered:
    """What is remembered, with the roles gone: their processes end with the control process.

    Raises `ConfigurationError` where it cannot be gone on from with a job of this shape.
    """
    known = journal.read()
    if known is None:
        return Remembered(shape, PhaseState())
    if known.shape != shape and (problem := _problem(known, shape)):
        raise ConfigurationError(
            f"{journal.where} says that {problem}. Start the job with the file that it had, or"
            " delete the journal to begin with no batch, where no trainer of the job has memory on"
            " devices any more"
        )
    state = known.state
    if known.shape.phases != shape.phases:
        state = msgspec.structs.replace(state, batch=None, reached=-1, abandoned=False)
    state = msgspec.structs.replace(
        state, number=state.number + _NUMBERS_APART, phase=None, holders=(), blocked=None
    )
    return Remembered(shape, state, known.operations)


def _problem(known: Remembered, shape: JobShape) -> str:
    """What of the remembered job means nothing for this one; empty where nothing does."""
    state, before = known.state, known.shape
    names = ", ".join(phase.name for phase in before.phases)
    is_open = state.batch is not None and not state.abandoned
    if before.phases != shape.phases and is_open and state.reached != len(before.phases) - 1:
        now = ", ".join(phase.name for phase in shape.phases)
        return (
            f"batch {state.batch!r} is in phase {before.phases[state.reached].name!r} of {names},"
            f" and the job has the phases {now} now"
        )
    trainer = state.trainer
    holds = trainer is not None and trainer.holding is not Holding.NOTHING
    if trainer is not None and holds and before.trainer_bundles != shape.trainer_bundles:
        return (
            f"trainer {trainer.trainer_id!r} holds {', '.join(before.trainer_bundles) or 'nothing'},"
            f" and its devices are {', '.join(shape.trainer_bundles) or 'none'} now"
        )
    return ""
