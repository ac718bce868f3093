"""State of fixed size a (request, label), in slots: what recurrent and per-slot state have in common.

A slot is cleared when the first step of its holder begins: in order with the forwards, whose device
stream whoever frees a slot may not be on. A forward writes its slots in place. So that a step which fails can be undone and its rows computed
one by one, `begin` keeps what they held, and `unadmit` puts it back. Methods hold one lock, since
removal, moves and steps may come from several threads.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phalanx.device.base import DeviceBackend
from phalanx.step.declaration import DEFAULT_LABEL, Fork, ResourceStep, Segment, StepContext
from phalanx.step.lease import BufferClaim, SlotLease
from phalanx.step.outcomes import ADMITTED, AdmitOutcome, AdmitRuntimeError
from phalanx.step.resources.base import Evictable, Growing, Resource, ResourceConfig
from phalanx.step.resources.kv_cache import KV_TAG
from phalanx.step.resources.layout import rows_by_label
from phalanx.step.resources.slot_buffers import SlotBuffers
from phalanx.step.resources.slot_plan import (
    Place,
    SlotPlan,
    SlotRows,
    captured_rows,
    eager_rows,
)
from phalanx.step.resources.slot_storage import SINK_SLOT, Contents, SlotStorage
from phalanx.step.resources.slot_table import SlotReservation, SlotStream, SlotTable, StreamKey


@dataclass(frozen=True)
class StateStep(ResourceStep):
    """The streams that a step works on, one row each; a segment of span 0 reads and leaves no mark.

    Forks and combined labels are as in a step on the paged cache. There is no step that leaves its
    state uncommitted: what the forward writes is there at once. Captured, a step has a plan of each
    of the `labels`, also without rows.
    """

    segments: tuple[Segment, ...]
    combined_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pre_forks: tuple[Fork, ...] = ()
    post_forks: tuple[Fork, ...] = ()
    labels: tuple[str, ...] = (DEFAULT_LABEL,)

    def touched(self) -> list[StreamKey]:
        """Every stream that the step reads or writes, once."""
        forks = (*self.pre_forks, *self.post_forks)
        keys = [(one.request_id, one.label) for one in self.segments]
        keys += [(fork.request_id, name) for fork in forks for name in (fork.source, fork.target)]
        return list(dict.fromkeys(keys))


class SlottedState(Resource, Growing, Evictable):
    """See the module. `num_host_slots` bounds what can be moved to the host at one time."""

    skips = False

    def __init__(
        self,
        key: str,
        storage: SlotStorage,
        max_slots: int,
        num_host_slots: int,
        backend: DeviceBackend,
    ) -> None:
        self.key = key
        self._storage = storage
        self._backend = backend
        self._table = SlotTable(max_slots)
        self._buffers = SlotBuffers(backend)
        self._num_host_slots = num_host_slots
        self._num_host_free = num_host_slots
        self._lock = threading.RLock()
        self._plan = SlotPlan({})
        self._label = DEFAULT_LABEL

    @property
    def num_free_slots(self) -> int:
        return self._table.num_free

    @property
    def rows(self) -> SlotRows:
        """The rows of the running step under the selected label."""
        return self._plan.by_label[self._label]

    def select(self, label: str) -> None:
        """Go on with the rows of `label`."""
        self._label = label

    def contents(self, rid: str) -> Mapping[str, Contents]:
        """A copy of what a request's streams hold, each tensor with one slot, by label."""
        with self._lock:
            return {
                label: self._storage.read([one.slot]) if one.away is None else one.away
                for label, one in self._table.of(rid).items()
            }

    def ingest_request(self, rid: str, config: ResourceConfig | None) -> None:
        with self._lock:
            self._table.streams.setdefault(rid, {})

    def remove_request(self, rid: str) -> None:
        with self._lock:
            streams = self._table.streams.pop(rid, {}).values()
            self._num_host_free += sum(stream.away is not None for stream in streams)
            for stream in streams:
                self._table.vacate(stream)

    def fits(self, totals: Mapping[str, int]) -> bool:
        with self._lock:
            wanted = 0
            for rid in totals:
                streams = self._table.of(rid)
                wanted += max(1, len(streams)) - len(self._table.held(rid))
            return wanted <= self._table.num_free

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        assert isinstance(step, StateStep)
        with self._lock:
            self.unadmit(step, ctx)
            if self._storage.released:
                message = f"state {self.key!r} is released; restore it first"
                return AdmitOutcome(ok=False, reason=AdmitRuntimeError(message))
            touched = step.touched()
            refusal = self._table.refusal(touched)
            if refusal is not None:
                return AdmitOutcome(ok=False, reason=refusal)
            ctx.reservations[self.key] = self._table.reserve(touched)
            return ADMITTED

    def unadmit(self, step: ResourceStep, ctx: StepContext) -> None:
        with self._lock:
            taken = ctx.reservations.pop(self.key, None)
            if taken is None:
                return
            assert isinstance(taken, SlotReservation)
            if taken.begun:
                self._put_back(taken)
            self._table.undo(taken)

    def plan(self, step: ResourceStep, ctx: StepContext) -> SlotPlan:
        assert isinstance(step, StateStep)
        with self._lock:
            copies: list[tuple[int, int]] = []
            forked: dict[StreamKey, bool] = {}
            for fork in step.pre_forks:
                source, target = (fork.request_id, fork.source), (fork.request_id, fork.target)
                copies.append((self._find(source).slot, self._find(target).slot))
                forked[target] = forked.get(source, self._find(source).has_state)
            return SlotPlan(self._by_label(step, ctx.lease, forked), tuple(copies))

    def begin(self, step: ResourceStep, ctx: StepContext) -> None:
        plan = ctx.plan_results[self.key]
        assert isinstance(plan, SlotPlan)
        with self._lock:
            taken = ctx.reservations[self.key]
            taken.begun = True
            self._start([stream for stream in taken.touched if not stream.has_state], ctx)
            holding = [stream for stream in taken.touched if stream.has_state]
            if holding:
                taken.saved = holding, self._storage.read([stream.slot for stream in holding])
            for source, target in plan.copies:
                self._storage.copy(source, target)
            self._plan = plan
            self.select(DEFAULT_LABEL)

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, StateStep)
        with self._lock:
            taken = ctx.reservations.pop(self.key, None)
            for stream in () if taken is None else taken.touched:
                stream.step_in_flight = False
            for fork in step.pre_forks:
                self._inherit(fork)
            for segment in step.segments:
                if segment.span:
                    self._find((segment.request_id, segment.label)).has_state = True
            for fork in step.post_forks:
                source, target = self._inherit(fork)
                self._storage.copy(source.slot, target.slot)

    def claim_buffers(self, claim: BufferClaim) -> None:
        self._buffers.claim(claim)

    def is_offloaded(self, rid: str) -> bool:
        with self._lock:
            return any(stream.away is not None for stream in self._table.of(rid).values())

    def reclaimable(self, rid: str) -> int:
        with self._lock:
            return len(self._table.held(rid))

    def offload(self, rid: str) -> int:
        with self._lock:
            held = self._table.held(rid)
            if any(stream.step_in_flight for stream in held):
                return 0
            moved = held[: self._num_host_free]
            for stream in moved:
                kept = self._storage.read([stream.slot])
                stream.away = {name: block.cpu() for name, block in kept.items()}
                self._table.vacate(stream)
            self._num_host_free -= len(moved)
            return len(moved)

    def reload(self, rid: str) -> bool:
        with self._lock:
            away = [one for one in self._table.of(rid).values() if one.away is not None]
            if len(away) > self._table.num_free:
                return False
            for stream in away:
                assert stream.away is not None
                device = self._backend.device
                blocks = {name: block.to(device) for name, block in stream.away.items()}
                self._storage.write([self._table.occupy(stream)], blocks)
                stream.away = None
                self._num_host_free += 1
            if away:
                # The next step may run on another stream.
                self._backend.record_event().synchronize()
            return True

    def release(self, tags: frozenset[str]) -> None:
        if KV_TAG not in tags or self._storage.released:
            return
        assert self.at_rest(), "state is released only when no request holds any of it"
        self._storage.release()

    def restore(self, tags: frozenset[str]) -> None:
        if KV_TAG in tags and self._storage.released:
            self._storage.restore()

    def at_rest(self) -> bool:
        with self._lock:
            table = self._table
            free = not table.streams and table.num_free == table.max_slots
            return free and self._num_host_free == self._num_host_slots

    def _by_label(
        self, step: StateStep, lease: SlotLease | None, forked: Mapping[StreamKey, bool]
    ) -> dict[str, SlotRows]:
        always = () if lease is None else step.labels
        groups = rows_by_label(step.segments, step.combined_labels, always)
        if lease is None:
            return {
                label: eager_rows(self._places(rows, forked), rows, self._backend)
                for label, rows in groups.items()
            }
        planned: dict[str, SlotRows] = {}
        for label, rows in groups.items():
            names = step.combined_labels.get(label, (label,))
            sources = [self._places(groups.get(name, ()), forked) for name in names]
            planned[label] = SlotRows(*captured_rows(label, sources, lease, self._buffers), rows)
        return planned

    def _places(self, rows: Sequence[Segment], forked: Mapping[StreamKey, bool]) -> list[Place]:
        keys = [(row.request_id, row.label) for row in rows]
        streams = [self._find(key) for key in keys]
        return [
            (stream.slot, forked.get(key, stream.has_state))
            for key, stream in zip(keys, streams, strict=True)
        ]

    def _find(self, key: StreamKey) -> SlotStream:
        rid, label = key
        return self._table.streams[rid][label]

    def _inherit(self, fork: Fork) -> tuple[SlotStream, SlotStream]:
        source = self._find((fork.request_id, fork.source))
        target = self._find((fork.request_id, fork.target))
        target.has_state = source.has_state
        return source, target

    def _put_back(self, taken: SlotReservation) -> None:
        """Undo what a begun step may have written; what is fresh is cleared when it begins again."""
        if taken.saved is not None:
            streams, contents = taken.saved
            self._storage.write([stream.slot for stream in streams], contents)

    def _start(self, fresh: Sequence[SlotStream], ctx: StepContext) -> None:
        """Let streams without state begin. One that was removed meanwhile has the sink for its
        slot.
        """
        self._storage.zero([stream.slot for stream in fresh if stream.slot != SINK_SLOT])
