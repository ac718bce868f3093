"""Operations on a running engine, applied between two steps of its loop."""

from __future__ import annotations

import enum

import msgspec


class PauseMode(enum.StrEnum):
    """What a pause does with the requests that are running.

    `abort` ends them (their tokens so far are kept), `retract` frees their memory and recomputes
    them later, `in_place` stops them where they are.
    """

    ABORT = "abort"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Stop computing; requests that arrive meanwhile wait."""

    mode: PauseMode = PauseMode.ABORT


class Continue(msgspec.Struct, frozen=True, tag="continue"):
    """Go on after a pause."""


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Drop what is cached of ended requests; refused (False) while any request runs or waits, or
    another engine has yet to take one over.
    """


ControlOp = Pause | Continue | Flush
