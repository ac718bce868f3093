"""Operations on a running engine, applied between two steps of its loop."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

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


class ReplaceWeights(msgspec.Struct, frozen=True, tag="replace_weights"):
    """Put `tensors` (torch tensors by their names in a checkpoint, all of them checked) in place of
    the old ones, as `version`. Running requests are computed anew, so none mixes two versions.
    """

    tensors: Mapping[str, Any]
    version: str


ControlOp = Pause | Continue | Flush | ReplaceWeights
