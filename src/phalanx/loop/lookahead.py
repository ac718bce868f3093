"""Which step comes after the one that is being computed: a pure function of what the loop holds.

The rows of the running step are taken to go on as their requests foresee; they come into the next
one by the same turns as everybody, so other ready work is never passed over for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.loop.outlook import Foreseeing, Outlook
from phalanx.loop.request import LoopRequest, Work
from phalanx.loop.scheduler import Budget, Capacity, StepPlan, plan_step


@dataclass(frozen=True)
class Foreseen:
    """The requests as they will stand after a step, if all goes on as they foresee.

    `works` is what those of the step's rows will want that go on, `ending` how many tokens those
    hold that want nothing more, by request.
    """

    running: tuple[LoopRequest, ...]
    works: Mapping[str, Work]
    ending: Mapping[str, int]


@dataclass(frozen=True)
class _Withholding:
    """A capacity of which requests that are about to end still hold their part."""

    capacity: Capacity
    ending: Mapping[str, int]

    def fits(self, node: str, totals: Mapping[str, int]) -> bool:
        return self.capacity.fits(node, {**self.ending, **totals})

    def get_max_batch_size(self, node: str, walk: str) -> int | None:
        return self.capacity.get_max_batch_size(node, walk)


def outlook(row: tuple[LoopRequest, int]) -> Work | Outlook:
    """What the request of a row says it will want after a step of so many tokens."""
    request, span = row
    state = request.state
    return state.work_after(span) if isinstance(state, Foreseeing) else Outlook.UNKNOWN


def foresee(
    flying: Sequence[tuple[LoopRequest, Work | Outlook]],
    running: Sequence[LoopRequest],
    turn: int,
) -> Foreseen | None:
    """How `running` will stand after the step of `flying`, with their outlooks; None if one cannot
    say.

    `turn` is the last that was given; the rows will get the next ones, in the order of their own.
    """
    works: dict[str, Work] = {}
    ending: dict[str, int] = {}
    shadows: dict[str, LoopRequest] = {}
    for request, wanted in sorted(flying, key=lambda row: row[0].turn):
        turn += 1
        if wanted is Outlook.UNKNOWN:
            return None
        if wanted is Outlook.ENDS:
            ending[request.rid] = request.work.total
            continue
        shadows[request.rid] = request.later(wanted, turn)
        works[request.rid] = wanted
    after = [shadows.get(one.rid, one) for one in running if one.rid not in ending]
    return Foreseen(tuple(after), works, ending)


def plan_ahead(
    foreseen: Foreseen, waiting: Sequence[LoopRequest], budget: Budget, capacity: Capacity
) -> StepPlan | None:
    """The step after, or None if nothing will be ready; its rows may be copies of requests."""
    room = budget.max_running - len(foreseen.ending)
    if room < 1:
        waiting, room = (), 1
    return plan_step(
        foreseen.running,
        waiting,
        Budget(budget.max_step_tokens, room),
        _Withholding(capacity, foreseen.ending),
    )
