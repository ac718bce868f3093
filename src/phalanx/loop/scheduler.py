"""Which rows the next step computes: a pure function of what the loop holds.

Rows of one token (decode) come first, then chunks of longer work under the token budget, in turns
among equals. Work of several tokens is never cut to a single one, which other operators may compute,
and round otherwise: so where it is cut changes nothing. The request whose turn is oldest is in every
step, however many rows compete: so none starves. Waiting requests are admitted in order as long as
everything admitted could finish its present work in the memory there is; the first that does not fit
holds the ones behind it. Who is held by something outside keeps its place and its memory, and is in
no step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from phalanx.errors import ConfigurationError
from phalanx.loop.request import LoopRequest


@dataclass(frozen=True)
class Budget:
    """Bounds of one step and of the running set."""

    max_step_tokens: int
    max_running: int

    def __post_init__(self) -> None:
        if self.max_step_tokens < 1 or self.max_running < 1:
            raise ConfigurationError(f"{self} must allow at least one token and one request")


@dataclass(frozen=True)
class StepPlan:
    """Rows of one (node, walk) with their spans, and who is admitted for it."""

    node: str
    walk: str
    rows: tuple[tuple[LoopRequest, int], ...]
    admitted: tuple[LoopRequest, ...] = ()


class Capacity(Protocol):
    """What limits a step beside the budget; the step engine answers."""

    def fits(self, node: str, totals: Mapping[str, int]) -> bool:
        """Whether these requests could grow to these numbers of tokens together."""
        ...

    def get_max_batch_size(self, node: str, walk: str) -> int | None:
        """The most rows in one step; None for no limit."""
        ...


def plan_step(
    running: Sequence[LoopRequest],
    waiting: Sequence[LoopRequest],
    budget: Budget,
    capacity: Capacity,
) -> StepPlan | None:
    """The next step, or None when nothing can run. Both sequences are in rank order."""
    admitted = _admit(running, waiting, budget, capacity)
    candidates = [*(request for request in running if not request.held), *admitted]
    if not candidates:
        return None
    due = min(candidates, key=_turn)
    node, walk = due.work.node, due.work.walk
    here = [one for one in candidates if (one.work.node, one.work.walk) == (node, walk)]
    max_rows = capacity.get_max_batch_size(node, walk) or len(here)
    return StepPlan(node, walk, _fill(here, due, budget, max_rows), tuple(admitted))


def _admit(
    running: Sequence[LoopRequest],
    waiting: Sequence[LoopRequest],
    budget: Budget,
    capacity: Capacity,
) -> list[LoopRequest]:
    if not waiting or len(running) >= budget.max_running:
        return []
    # A running row of one token may need a page for it in this very step.
    targets = {request.rid: request.work.total for request in running}
    singles = sum(request.work.remaining == 1 and not request.held for request in running)
    admitted: list[LoopRequest] = []
    for request in waiting:
        if request.held:
            continue
        full = len(running) + len(admitted) >= budget.max_running
        if full or singles + len(admitted) >= budget.max_step_tokens:
            break
        targets[request.rid] = request.work.total
        if (running or admitted) and not capacity.fits(request.work.node, targets):
            break
        admitted.append(request)
    return admitted


def _turn(request: LoopRequest) -> tuple[int, int]:
    """Higher priority, then least recently computed."""
    return (request.rank[0], request.turn)


def _fill(
    candidates: Sequence[LoopRequest], due: LoopRequest, budget: Budget, max_rows: int
) -> tuple[tuple[LoopRequest, int], ...]:
    """Rows with their spans. `due` is among them whatever the others take."""
    share = due.work.remaining
    if due.work.divisible:
        share = min(share if share <= 3 else 2, budget.max_step_tokens)
    tokens, places = budget.max_step_tokens - share, max_rows - 1
    rows: list[tuple[LoopRequest, int]] = []
    for request in sorted(candidates, key=lambda one: (one.work.remaining > 1, *_turn(one))):
        if request is due:
            tokens, places = tokens + share, places + 1
        wanted = request.work.remaining
        span = _chunk(wanted, tokens) if request.work.divisible else wanted
        if request is due:
            span = span or share
        if request is due or (1 <= span <= tokens and places > 0):
            rows.append((request, span))
            tokens, places = tokens - span, places - 1
    # Single tokens first: attention treats them as one batch.
    rows.sort(key=lambda row: (row[1] > 1, row[0].rank))
    return tuple(rows)


def _chunk(wanted: int, tokens: int) -> int:
    """How much of divisible work fits into `tokens`, with neither it nor the rest a single token."""
    if wanted <= tokens:
        return wanted
    span = tokens - 1 if wanted - tokens == 1 else tokens
    return span if span > 1 else 0
