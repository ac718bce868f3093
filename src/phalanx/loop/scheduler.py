"""Which rows the next step computes: a pure function of what the loop holds.

Rows of one token (decode) come first, then chunks of longer work under the token budget, in turns
among equals. Waiting requests are admitted in order as long as everything admitted could finish
its present work in the memory there is; the first that does not fit holds the ones behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from phalanx.loop.request import LoopRequest, Work


@dataclass(frozen=True)
class Budget:
    """Bounds of one step and of the running set."""

    max_step_tokens: int
    max_running: int


@dataclass(frozen=True)
class StepPlan:
    """Rows of one (node, walk) with their spans, and who is admitted for it."""

    node: str
    walk: str
    rows: tuple[tuple[LoopRequest, int], ...]
    admitted: tuple[LoopRequest, ...] = ()


Fits = Callable[[str, Mapping[str, int]], bool]
"""Whether these requests could grow to these numbers of tokens together, at a node."""


def plan_step(
    running: Sequence[LoopRequest],
    waiting: Sequence[LoopRequest],
    budget: Budget,
    fits: Fits,
) -> StepPlan | None:
    """The next step, or None when nothing can run. Both sequences are in rank order."""
    admitted = _admit(running, waiting, budget, fits)
    candidates = [(request, _work(request)) for request in (*running, *admitted)]
    if not candidates:
        return None
    node, walk = _choose(candidates)
    here = [pair for pair in candidates if (pair[1].node, pair[1].walk) == (node, walk)]
    return StepPlan(node, walk, _fill(here, budget), tuple(admitted))


def _work(request: LoopRequest) -> Work:
    work = request.state.next_work()
    assert work is not None, f"{request.rid} has ended and is still scheduled"
    return work


def _admit(
    running: Sequence[LoopRequest],
    waiting: Sequence[LoopRequest],
    budget: Budget,
    fits: Fits,
) -> list[LoopRequest]:
    if not waiting or len(running) >= budget.max_running:
        return []
    # A running row of one token may need a page for it in this very step.
    targets = {request.rid: _work(request).total for request in running}
    singles = sum(_work(request).remaining == 1 for request in running)
    admitted: list[LoopRequest] = []
    for request in waiting:
        full = len(running) + len(admitted) >= budget.max_running
        if full or singles + len(admitted) >= budget.max_step_tokens:
            break
        work = _work(request)
        targets[request.rid] = work.total
        if (running or admitted) and not fits(work.node, targets):
            break
        admitted.append(request)
    return admitted


def _choose(candidates: Sequence[tuple[LoopRequest, Work]]) -> tuple[str, str]:
    """The (node, walk) whose best-ranked request has waited longest."""
    _, work = min(candidates, key=lambda pair: _turn(pair[0]))
    return work.node, work.walk


def _turn(request: LoopRequest) -> tuple[int, int, int]:
    """Higher priority, then least recently computed, then earlier arrival."""
    return (request.rank[0], request.last_step, request.rank[1])


def _fill(
    candidates: Sequence[tuple[LoopRequest, Work]], budget: Budget
) -> tuple[tuple[LoopRequest, int], ...]:
    ordered = sorted(candidates, key=lambda pair: (pair[1].remaining > 1, *_turn(pair[0])))
    rows: list[tuple[LoopRequest, int]] = []
    left = budget.max_step_tokens
    for request, work in ordered:
        span = min(work.remaining, left) if work.divisible else work.remaining
        if span > left and rows:
            continue
        if span < 1:
            break
        rows.append((request, span))
        left -= span
    # Single tokens first: attention treats them as one batch.
    rows.sort(key=lambda row: (row[1] > 1, row[0].rank))
    return tuple(rows)
