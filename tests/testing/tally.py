"""A resource as small as the contract allows: every stream is a list of numbers, of which a step
writes one more. Each takes one of a few places.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from phalanx.step.declaration import Fork, ResourceStep, StepContext
from phalanx.step.outcomes import (
    ADMITTED,
    AdmitOutcome,
    AdmitRuntimeError,
    AllocationFailed,
    RequestOffloading,
)
from phalanx.step.resources.base import Evictable, Resource
from phalanx.testing.resource_case import ResourceCase

TAG = frozenset({"tally"})


@dataclass(frozen=True)
class TallyStep(ResourceStep):
    """These requests' main streams take one more number; forks come first."""

    rids: tuple[str, ...]
    forks: tuple[Fork, ...] = ()


@dataclass(eq=False)
class Stream:
    """`numbers` may have one more than `length`: what a step wrote and has not committed."""

    numbers: list[int] = field(default_factory=list)
    length: int = 0
    in_flight: bool = False
    away: bool = False


class Tally(Resource, Evictable):
    """See the module."""

    def __init__(self, places: int = 6, host_places: int = 4) -> None:
        self.key = "tally"
        self.places = self.free = places
        self.host_places = self.host_free = host_places
        self.streams: dict[str, dict[str, Stream]] = {}
        self.current: list[Stream] = []
        self.released = False

    def ingest_request(self, rid, config):
        self.streams.setdefault(rid, {})

    def remove_request(self, rid):
        for stream in self.streams.pop(rid, {}).values():
            self.give_back(stream)

    def give_back(self, stream):
        if stream.away:
            self.host_free += 1
        else:
            self.free += 1

    def wanted(self, step):
        """The streams that a step needs, by (request, label)."""
        return [(rid, "main") for rid in step.rids] + [
            (fork.request_id, fork.target) for fork in step.forks
        ]

    def refusal(self, step):
        wanted = self.wanted(step)
        for rid, label in wanted:
            stream = self.streams[rid].get(label)
            if stream is not None and stream.away:
                return RequestOffloading("it is away", rid)
        short = sum(label not in self.streams[rid] for rid, label in wanted) - self.free
        return AllocationFailed("no place", short, wanted[-1][0]) if short > 0 else None

    def admit(self, step, ctx: StepContext) -> AdmitOutcome:
        self.unadmit(step, ctx)
        if self.released:
            return AdmitOutcome(ok=False, reason=AdmitRuntimeError("released"))
        reason = self.refusal(step)
        if reason is not None:
            return AdmitOutcome(ok=False, reason=reason)
        invented = [key for key in self.wanted(step) if key[1] not in self.streams[key[0]]]
        for rid, label in invented:
            self.streams[rid][label] = Stream()
            self.free -= 1
        touched = [self.streams[rid][label] for rid, label in self.wanted(step)]
        for stream in touched:
            stream.in_flight = True
        ctx.reservations[self.key] = (touched, invented)
        return ADMITTED

    def unadmit(self, step, ctx):
        touched, invented = ctx.reservations.pop(self.key, ((), ()))
        for stream in touched:
            stream.in_flight = False
            del stream.numbers[stream.length :]
        for rid, label in invented:
            if self.streams.get(rid, {}).get(label) in touched:
                self.give_back(self.streams[rid].pop(label))

    def plan(self, step, ctx):
        return [self.streams[rid]["main"] for rid in step.rids]

    def begin(self, step, ctx):
        self.current = ctx.plan_results[self.key]
        for fork in step.forks:
            labels = self.streams[fork.request_id]
            source = labels[fork.source]
            labels[fork.target].numbers[:] = source.numbers[: source.length]

    def count(self, rids):
        """The forward: the running rows' next numbers."""
        for rid, stream in zip(rids, self.current, strict=True):
            stream.numbers.append(sum(map(ord, rid)) * 100 + stream.length)

    def commit(self, step, ctx):
        touched, _ = ctx.reservations.pop(self.key, ((), ()))
        for stream in touched:
            stream.in_flight = False
            stream.length = len(stream.numbers)

    def is_offloaded(self, rid):
        return any(stream.away for stream in self.streams.get(rid, {}).values())

    def reclaimable(self, rid):
        return sum(not stream.away for stream in self.streams.get(rid, {}).values())

    def offload(self, rid):
        here = [one for one in self.streams.get(rid, {}).values() if not one.away]
        if any(one.in_flight for one in here) or len(here) > self.host_free:
            return 0
        for stream in here:
            self.move(stream, away=True)
        return len(here)

    def reload(self, rid):
        away = [one for one in self.streams.get(rid, {}).values() if one.away]
        if len(away) > self.free:
            return False
        for stream in away:
            self.move(stream, away=False)
        return True

    def move(self, stream, *, away):
        stream.away = away
        self.free += 1 if away else -1
        self.host_free -= 1 if away else -1

    def release(self, tags):
        self.released = self.released or bool(TAG & tags)

    def restore(self, tags):
        self.released = self.released and not TAG & tags

    def at_rest(self):
        full = self.free == self.places and self.host_free == self.host_places
        return full and not self.streams


def fork_of(rid: str):
    return {"tally": TallyStep((rid,), (Fork(rid, "main", "branch"),))}


CASE = ResourceCase(
    step=lambda rids: {"tally": TallyStep(rids)},
    read=lambda resources, rid: {
        label: stream.numbers[: stream.length]
        for label, stream in resources["tally"].streams[rid].items()
    },
    compute=lambda resources, ctx: resources["tally"].count(ctx.request_ids),
    fork=fork_of,
    tags=TAG,
)
