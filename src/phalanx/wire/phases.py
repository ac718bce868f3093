"""The phases of a job over HTTP: what a trainer's program says to the control process, and what is
shown of the phases. Every change has an operation's id: the same one again joins the first.
"""

from __future__ import annotations

import enum

import msgspec


class Enter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Go to `phase` of the step that makes `batch`; answered when its roles are ready.

    For the trainer's phase: when nobody else holds its devices, which it has from then on.
    """

    phase: str
    batch: str
    operation_id: str


class Leave(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """To no phase: everybody gives their memory back. `abandon`: the batch is given up, and the
    next one may begin.
    """

    operation_id: str
    abandon: bool = False


class Recover(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Find out what everybody holds of whom nobody is certain. `holds_nothing` names those for whom
    the caller vouches (a role, or the trainer). `seen`: see `AttachTrainer`.
    """

    operation_id: str
    holds_nothing: tuple[str, ...] = ()
    seen: int | None = None


class AttachTrainer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A trainer's process tells of itself before it enters a phase, and again after it was started
    anew. `pid` is on the control process's machine, which then knows when it ends.

    `seen` is the number of the document that the caller saw last: what was said before the trainer
    got its devices is no word on what it holds now, however late it arrives. None: said just now.
    """

    trainer_id: str
    holds: bool = False
    pid: int | None = None
    seen: int | None = None


class ReleaseTrainer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer has given its devices' memory back. `seen`: see `AttachTrainer`."""

    trainer_id: str
    seen: int | None = None


class Holding(enum.StrEnum):
    """What somebody has on devices; `unknown`: perhaps something."""

    NOTHING = "nothing"
    MEMORY = "memory"
    UNKNOWN = "unknown"


class LeaseView(msgspec.Struct, frozen=True):
    """Who may be resident on a bundle (None: nobody), and what they hold."""

    bundle: str
    holder: str | None
    holding: Holding


class PhaseView(msgspec.Struct, frozen=True):
    name: str
    roles: tuple[str, ...]


class TransitionView(msgspec.Struct, frozen=True):
    """One that is under way. `step` says in words what is waited for."""

    phase: str | None
    operation_id: str
    step: str
    since_wall_s: float


class PhasesDocument(msgspec.Struct, frozen=True, kw_only=True):
    """`number` grows with each change. `phase` None: between two, or before the first.

    `blocked` says why no phase can be entered before somebody recovers.
    """

    number: int
    mode: str
    phases: tuple[PhaseView, ...]
    phase: str | None
    batch: str | None
    transition: TransitionView | None = None
    blocked: str | None = None
    leases: tuple[LeaseView, ...] = ()
    trainer_id: str | None = None
    trainer_holding: Holding = Holding.NOTHING
