"""vLLM's control calls: parameters come in the query, or as SkyRL sends them in a JSON body."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from phalanx.errors import InvalidRequestError
from phalanx.schema.control import ALL_TAGS, JoinWeightGroup, MemoryTag, ReceiveWeights
from phalanx.wire.body import BodyDecoder
from phalanx.wire.sglang.memory import memory_tags

Query = Sequence[tuple[str, str]]
"""The parameters of a query in their order; a name may come several times."""

LEVELS = (0, 1, 2)
SKYRL_GROUP = "skyrl"


class PauseKind(enum.StrEnum):
    """What a pause does with running requests: `abort` ends them, `wait` lets them end first,
    `keep` stops them where they are."""

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"


class PauseCall(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /pause`."""

    kind: PauseKind
    clear_cache: bool


class SleepCall(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /sleep`. Level 0 pauses, 1 keeps the weights so that they come back by themselves, 2
    gives everything back; `tags`, where given, say it instead."""

    level: int
    tags: frozenset[MemoryTag] | None
    kind: PauseKind


class _PauseBody(msgspec.Struct, frozen=True, kw_only=True):
    mode: str | None = None
    clear_cache: bool | None = None
    wait_for_inflight_requests: bool | None = None
    wait_for_inflight_request: bool | None = None


class _SleepBody(msgspec.Struct, frozen=True, kw_only=True):
    level: int | None = None
    tags: str | list[str] | None = None
    mode: str | None = None


class _WakeBody(msgspec.Struct, frozen=True, kw_only=True):
    tags: str | list[str] | None = None


class UpdateBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /update_weights`: a directory (prime-rl), or what the joined group broadcasts (SkyRL)."""

    weight_dir: str | None = None
    names: list[str] | None = None
    dtypes: list[str] = []
    shapes: list[list[int]] = []
    update_info: Any = None
    weight_version: str | None = None

    def received(self, group_name: str) -> ReceiveWeights:
        """What the engine is asked, where weights come by a group."""
        names = self.names or []
        if not names or not len(names) == len(self.dtypes) == len(self.shapes):
            raise InvalidRequestError(
                f"names has {len(names)}, dtypes {len(self.dtypes)} and shapes {len(self.shapes)} "
                "entries; give one of each for every weight",
                field="names",
            )
        return ReceiveWeights(
            names=tuple(names),
            dtypes=tuple(one.removeprefix("torch.") for one in self.dtypes),
            shapes=tuple(map(tuple, self.shapes)),
            group_name=group_name,
            version=self.weight_version,
        )


class JoinBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /init_weight_update_communicator` and `/init_weight_transfer`, as SkyRL calls them."""

    master_addr: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = SKYRL_GROUP
    backend: str = "nccl"

    def op(self) -> JoinWeightGroup:
        return JoinWeightGroup(
            master_address=self.master_addr,
            master_port=self.master_port,
            rank_offset=self.rank_offset,
            world_size=self.world_size,
            group_name=self.group_name,
            backend=self.backend,
        )


_PAUSE = BodyDecoder(_PauseBody)
_SLEEP = BodyDecoder(_SleepBody)
_WAKE = BodyDecoder(_WakeBody)
_UPDATE = BodyDecoder(UpdateBody)
_JOIN = BodyDecoder(JoinBody)


def flag(query: Query, name: str) -> bool | None:
    """A parameter that is true or false; None where it is not given."""
    value = dict(query).get(name)
    if value is None:
        return None
    if value.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"{name}={value!r} must be true or false", field=name)
    return value.lower() in ("true", "1")


def parse_pause(query: Query, body: bytes) -> PauseCall:
    given = _PAUSE.decode(body or b"{}")
    asked = dict(query)
    waits = (
        flag(query, "wait_for_inflight_requests")
        or given.wait_for_inflight_requests
        or given.wait_for_inflight_request
    )
    clears = flag(query, "clear_cache")
    if clears is None:
        clears = given.clear_cache is not False
    kind = _kind(asked.get("mode") or given.mode)
    return PauseCall(kind=PauseKind.WAIT if waits else kind, clear_cache=clears)


def parse_sleep(query: Query, body: bytes) -> SleepCall:
    given = _SLEEP.decode(body or b"{}")
    asked = dict(query)
    level: int | str = asked.get("level", 1 if given.level is None else given.level)
    if str(level) not in map(str, LEVELS):
        raise InvalidRequestError(
            f"level={level!r}; allowed: 1 (weights come back by themselves), 2 (everything is "
            "given back), 0 (a pause)",
            field="level",
        )
    names = _names(query, given.tags)
    return SleepCall(
        level=int(level),
        tags=_tags(names) if names else None,
        kind=_kind(asked.get("mode") or given.mode),
    )


def parse_wake(query: Query, body: bytes) -> frozenset[MemoryTag]:
    """The tags to take again; all where none is named."""
    names = _names(query, _WAKE.decode(body or b"{}").tags)
    return _tags(names) if names else ALL_TAGS


def parse_update(body: bytes) -> UpdateBody:
    return _UPDATE.decode(body)


def parse_join(body: bytes) -> JoinBody:
    return _JOIN.decode(body)


def _kind(mode: str | None) -> PauseKind:
    try:
        return PauseKind(mode or PauseKind.ABORT)
    except ValueError:
        raise InvalidRequestError(
            f"mode={mode!r}; allowed: {', '.join(PauseKind)}", field="mode"
        ) from None


def _names(query: Query, given: str | list[str] | None) -> list[str]:
    asked = [value for name, value in query if name == "tags"]
    return asked or ([given] if isinstance(given, str) else list(given or ()))


def _tags(names: list[str]) -> frozenset[MemoryTag]:
    """vLLM's callers know no graphs, which are of no use without the cache that they read."""
    tags = memory_tags(names)
    return tags | {MemoryTag.CUDA_GRAPH} if MemoryTag.KV_CACHE in tags else tags
