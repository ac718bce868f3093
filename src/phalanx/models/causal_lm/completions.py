"""Requests for several completions: each is a sequence in the loop, and their events come back under
the request's id.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from phalanx.schema.events import Delta, Event, Failed, Final, Scheduled
from phalanx.schema.generate import GenerateDelta, GenerateOutput, Handoff

NOT_WHOLE = "another completion of the request could not be handed over"


@dataclass
class _Group:
    """The completions of one request that have not all ended."""

    children: tuple[str, ...]
    outputs: dict[str, GenerateOutput] = field(default_factory=dict)
    scheduled: bool = False
    cancelled: bool = False


class Completions:
    """See the module. A request for one completion is no matter of this."""

    def __init__(
        self, drop: Callable[[str, str], None], unwanted: Callable[[Handoff | None, str], None]
    ) -> None:
        """`drop` ends a completion of which nobody wants to hear any more, saying why; `unwanted`
        lets go of what is held for another engine.
        """
        self._drop = drop
        self._unwanted = unwanted
        self._groups: dict[str, _Group] = {}
        self._parents: dict[str, str] = {}
        self._dropped: set[str] = set()
        """Completions of a failed request whose events of the running tick nobody wants."""

    def open(self, rid: str, children: tuple[str, ...]) -> None:
        """A request begins whose completions have these ids."""
        if len(children) > 1:
            self._groups[rid] = _Group(children)
            self._parents.update(dict.fromkeys(children, rid))

    def of(self, rid: str) -> tuple[str, ...]:
        """The ids of a request's completions."""
        group = self._groups.get(rid)
        return (rid,) if group is None else group.children

    def wants(self, event: Event) -> bool:
        """Whether this event of a completion is still to be reported."""
        if event.rid not in self._dropped:
            return True
        if isinstance(event, Final):
            self._unwanted(event.payload.handoff, NOT_WHOLE)
        return False

    def end_tick(self) -> None:
        """The events of the loop's tick have all been looked at."""
        self._dropped.clear()

    def reported(self, event: Event) -> list[Event]:
        """A completion's event as its request's: one `Scheduled`, one end when all have ended."""
        rid = self._parents.get(event.rid)
        if rid is None:
            return [event]
        group = self._groups[rid]
        match event:
            case Scheduled():
                first, group.scheduled = not group.scheduled, True
                return [Scheduled(rid)] if first else []
            case Delta(_, payload):
                return [Delta(rid, _without_repeated_prompt(payload))]
            case Final():
                return self._ended(rid, group, event)
            case Failed(child, error):
                return self._failed(rid, group, child, error)

    def _ended(self, rid: str, group: _Group, event: Final) -> list[Event]:
        group.outputs[event.rid] = event.payload
        group.cancelled |= event.cancelled
        del self._parents[event.rid]
        if len(group.outputs) < len(group.children):
            return []
        del self._groups[rid]
        whole = combined([group.outputs[child] for child in group.children])
        whole = msgspec.structs.replace(whole, weight_version=event.payload.weight_version)
        if whole.handoff is None:
            self._drop_held(group)
        return [Final(rid, whole, cancelled=group.cancelled)]

    def _failed(self, rid: str, group: _Group, child: str, error: Exception) -> list[Event]:
        """One completion's failure ends the request; its other completions are dropped."""
        del self._groups[rid]
        self._drop_held(group)
        for other in group.children:
            self._parents.pop(other, None)
            if other != child:
                self._dropped.add(other)
                self._drop(other, str(error))
        return [Failed(rid, error)]

    def _drop_held(self, group: _Group) -> None:
        """Nobody will read what was held of the completions that have ended."""
        for output in group.outputs.values():
            self._unwanted(output.handoff, NOT_WHOLE)


def combined(outputs: list[GenerateOutput]) -> GenerateOutput:
    """The outputs of one prompt's completions as one."""
    handoffs = [output.handoff for output in outputs if output.handoff is not None]
    handoff = None
    if len(handoffs) == len(outputs):
        sequences = tuple(one for each in handoffs for one in each.sequences)
        handoff = msgspec.structs.replace(handoffs[0], sequences=sequences)
    return msgspec.structs.replace(
        outputs[0],
        handoff=handoff,
        completions=tuple(output.completions[0] for output in outputs),
        num_retractions=sum(output.num_retractions for output in outputs),
    )


def _without_repeated_prompt(delta: GenerateDelta) -> GenerateDelta:
    """Only completion 0 reports the prompt."""
    if delta.index == 0 or delta.prompt_logprobs is None:
        return delta
    return msgspec.structs.replace(delta, prompt_logprobs=None)
