"""Operations on a running engine, applied between two steps of its loop, on every rank alike."""

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
    another engine has yet to take one over. While paused, those that wait without a part of the
    cache do not count.
    """


class ReplaceWeights(msgspec.Struct, frozen=True, tag="replace_weights"):
    """Put `tensors` (torch tensors by their names in a checkpoint, any of them, all checked) in place
    of the old ones, as `version` (None: the version stays).

    What running requests have computed is computed anew; their outputs name each version that
    their tokens came from.
    """

    tensors: Mapping[str, Any]
    version: str | None = None


class MemoryTag(enum.StrEnum):
    """The parts of an engine's memory that can be given back and taken again (SGLang's names)."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    CUDA_GRAPH = "cuda_graph"


ALL_TAGS = frozenset(MemoryTag)


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Give back the memory of these tags; those that were given back already change nothing.

    Refused (False) while any request runs or waits, unless the engine is paused.
    """

    tags: frozenset[MemoryTag] = ALL_TAGS


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Take the memory of these tags again; those that are held already change nothing.

    Weights come back from the checkpoint where no others have been put in, else the engine waits
    for new ones: until then it computes nothing, and says so.
    """

    tags: frozenset[MemoryTag] = ALL_TAGS


class LoadWeights(msgspec.Struct, frozen=True, tag="load_weights"):
    """Put the weights of a checkpoint directory, which every rank reads, in place of the old ones.

    All or nothing: a checkpoint that does not fit is refused before anything has changed.
    """

    path: str
    version: str | None = None


class SetWeightVersion(msgspec.Struct, frozen=True, tag="set_weight_version"):
    """Call the weights that are there `version`."""

    version: str


class JoinWeightGroup(msgspec.Struct, frozen=True, tag="join_weight_group"):
    """Join the process group in which a trainer (rank 0) broadcasts weights.

    This engine's rank r of replica i is rank `rank_offset` + i * ranks + r there.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str
    backend: str


class ReceiveWeights(msgspec.Struct, frozen=True, tag="receive_weights"):
    """Take these tensors, in this order, from rank 0 of the group, and put them in."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    group_name: str
    version: str | None = None


class LeaveWeightGroup(msgspec.Struct, frozen=True, tag="leave_weight_group"):
    """Leave that group; leaving one that is not joined changes nothing."""

    group_name: str


class ReadWeight(msgspec.Struct, frozen=True, tag="read_weight"):
    """A question: the first `limit` numbers of a weight, by its name in a checkpoint.

    Answered by a `WeightSample`.
    """

    name: str
    limit: int


class WeightCheck(enum.StrEnum):
    """What to do with the weights to learn whether an update arrives.

    `snapshot` remembers what they are, `compare` names those that differ from that since,
    `checksum` does neither, `reset_tensors` fills them with noise, so that they are no model's.
    """

    SNAPSHOT = "snapshot"
    COMPARE = "compare"
    CHECKSUM = "checksum"
    RESET_TENSORS = "reset_tensors"


class CheckWeights(msgspec.Struct, frozen=True, tag="check_weights"):
    """A question, answered by a `WeightReport`."""

    action: WeightCheck


class WeightSample(msgspec.Struct, frozen=True, kw_only=True, tag="weight_sample"):
    """The first numbers of a weight, row by row; `shape` and `dtype` are the whole weight's."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: tuple[float, ...]


class WeightReport(msgspec.Struct, frozen=True, kw_only=True, tag="weight_report"):
    """What a `CheckWeights` found.

    `checksum` is equal for equal weights in replicas of equally many ranks. `differing` names the
    weights that are not what they were in the snapshot; None where that was not asked.
    """

    checksum: str
    differing: tuple[str, ...] | None = None


Question = ReadWeight | CheckWeights
"""What `Engine.ask` takes."""
WeightAnswer = WeightSample | WeightReport
ControlAnswer = bool | WeightAnswer
"""Whether an operation was applied, or what a question asked for."""

ControlOp = (
    Pause
    | Continue
    | Flush
    | ReplaceWeights
    | Sleep
    | Wake
    | LoadWeights
    | SetWeightVersion
    | JoinWeightGroup
    | ReceiveWeights
    | LeaveWeightGroup
)
"""What `Engine.control` takes."""
