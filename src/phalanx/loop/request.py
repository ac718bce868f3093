"""A request in the loop: what it wants next, where it stands, and its place in the order."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from phalanx.step.resources.base import ResourceConfig


class Work(msgspec.Struct, frozen=True, gc=False):
    """What a request wants next: `remaining` tokens of a walk at a node.

    A step may take fewer where `divisible`. `total` is the number of tokens that the request will
    hold when the work is done, which is less only where those are not `kept`.
    """

    node: str
    walk: str
    remaining: int
    total: int
    divisible: bool = True
    kept: bool = True

    def __post_init__(self) -> None:
        if self.remaining < 1 or self.total < (self.remaining if self.kept else 0):
            raise ValueError(
                f"remaining={self.remaining} of total={self.total} tokens at node {self.node!r}; "
                "it must be from 1 to total"
            )


class RequestState(Protocol):
    """A plugin's own state of one request, advanced by the loop.

    What a method raises ends the request, and no other.
    """

    def next_work(self) -> Work | None:
        """What to compute next, or None when the request has ended.

        Asked once at the start, after each step that the request was in, after a push-back, and
        when tokens were found in a cache.
        """
        ...

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        """Settings for each resource, at the first start and after every push-back."""
        ...

    def advance(self, span: int) -> None:
        """`span` tokens were computed and committed."""
        ...

    def adopt(self, num_tokens: int) -> None:
        """The next `num_tokens` tokens were found in a cache, and count as computed."""
        ...

    def push_back(self) -> None:
        """All computed state was dropped; what was produced so far stays and is computed again."""
        ...

    def take_delta(self) -> Any | None:  # noqa: ANN401
        """What was produced since the last call, or None."""
        ...

    def output(self, *, cancelled: bool) -> Any:  # noqa: ANN401
        """The complete output of a request that has ended or is cancelled."""
        ...


class Status(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


_EDGES = {
    (Status.WAITING, Status.RUNNING),
    (Status.RUNNING, Status.WAITING),
    (Status.WAITING, Status.ENDED),
    (Status.RUNNING, Status.ENDED),
}


class LoopRequest:
    """One live request and the work that it wants next.

    `rank` orders requests: higher priority first, then earlier arrival. `turn` orders the steps of
    equals: who was computed longest ago, or arrived before that, has the smallest.

    `opened`: the engine has state of it, on the device or on the host; one that waits like that was
    moved away. `held`: it waits for something outside before its next step. `published`
    is what another engine published of it and is still to be imported.
    """

    __slots__ = (
        "held",
        "opened",
        "published",
        "rank",
        "rid",
        "state",
        "status",
        "turn",
        "was_scheduled",
        "work",
    )

    def __init__(
        self,
        rid: str,
        state: RequestState,
        priority: int,
        arrival: int,
        work: Work,
        published: Mapping[str, object] | None = None,
    ) -> None:
        self.rid = rid
        self.state = state
        self.rank = (-priority, arrival)
        self.work = work
        self.status = Status.WAITING
        self.published: Mapping[str, object] = published or {}
        self.was_scheduled = False
        self.opened = False
        self.held = False
        self.turn = arrival

    @property
    def able(self) -> bool:
        """Whether its next step can be computed."""
        return self.status is Status.RUNNING and not self.held

    def later(self, work: Work, turn: int) -> LoopRequest:
        """The request as it will stand when it wants `work`; this one stays as it is."""
        after = LoopRequest(self.rid, self.state, 0, 0, work, self.published)
        after.rank, after.turn, after.status = self.rank, turn, self.status
        after.was_scheduled, after.opened, after.held = self.was_scheduled, self.opened, self.held
        return after

    def move(self, status: Status) -> None:
        assert (self.status, status) in _EDGES, f"{self.rid}: {self.status} -> {status}"
        self.status = status
