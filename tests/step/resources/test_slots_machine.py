"""Slots against a plain model: steps that commit or are given up, forks, removals, moves to the host."""

from __future__ import annotations

import enum

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from phalanx.device.cpu import CpuBackend
from phalanx.step.declaration import Fork, Segment, StepContext
from phalanx.step.outcomes import AllocationFailed, RequestOffloading
from phalanx.step.resources.base import BuildInfo
from phalanx.step.resources.recurrent_state import RecurrentStateSpec, StateBlock, StateStep

RIDS = "abcd"
SLOTS, HOST_SLOTS = 4, 2
LABELS = ("main", "branch")
Keys = st.sets(st.tuples(st.sampled_from(RIDS), st.sampled_from(LABELS)), max_size=3)


class Until(enum.IntEnum):
    """How far a step comes; all but the last are given up."""

    ADMITTED = 0
    PLANNED = 1
    BEGUN = 2
    COMPUTED = 3
    COMMITTED = 4


class Slots(RuleBasedStateMachine):
    """The model is what every stream holds, and which of them are on the host."""

    @initialize()
    def start(self) -> None:
        blocks = {"block": StateBlock((2,))}
        spec = RecurrentStateSpec("state", frozenset({"node"}), blocks, 2, SLOTS, HOST_SLOTS)
        self.state = spec.build(BuildInfo(CpuBackend()))
        self.held: dict[str, dict[str, float]] = {}
        self.away: set[tuple[str, str]] = set()
        self.number = 0.0

    @rule(rid=st.sampled_from(RIDS))
    def ingest(self, rid: str) -> None:
        self.state.ingest_request(rid, None)
        self.held.setdefault(rid, {})

    @rule(rid=st.sampled_from([*RIDS, "nobody"]))
    def remove(self, rid: str) -> None:
        self.state.remove_request(rid)
        self.held.pop(rid, None)
        self.away = {key for key in self.away if key[0] != rid}

    @rule(
        keys=Keys,
        until=st.sampled_from(Until),
        forks=st.tuples(st.booleans(), st.booleans()),
        leaver=st.none() | st.sampled_from(RIDS),
    )
    def step(self, keys, until: Until, forks, leaver) -> None:
        keys = sorted(key for key in keys if key[0] in self.held)
        rids = dict.fromkeys(rid for rid, _ in keys)
        pre, post = (
            tuple(Fork(rid, *(LABELS if first else LABELS[::-1])) for rid in rids) if on else ()
            for on, first in zip(forks, (True, False), strict=True)
        )
        step = StateStep(
            tuple(Segment(rid, 1, label) for rid, label in keys), pre_forks=pre, post_forks=post
        )
        ctx = StepContext(tuple(rids), "walk")
        outcome = self.state.admit(step, ctx)
        touched = {*keys, *((rid, label) for rid in rids if pre or post for label in LABELS)}
        if touched & self.away:
            assert isinstance(outcome.reason, RequestOffloading)
            return
        missing = sum(label not in self.held[rid] for rid, label in touched)
        if missing > self.num_free:
            assert isinstance(outcome.reason, AllocationFailed)
            assert outcome.reason.pages_short == missing - self.num_free
            return
        assert outcome.ok
        assert not any(self.state.offload(rid) for rid in rids if (rid, "main") in touched)
        self.drive(step, ctx, until)
        if until is Until.COMMITTED:
            self.learn(keys, pre, post)
            return
        if leaver is not None:
            self.remove(leaver)
        self.state.unadmit(step, ctx)

    def drive(self, step: StateStep, ctx: StepContext, until: Until) -> None:
        if until >= Until.PLANNED:
            ctx.plan_results["state"] = self.state.plan(step, ctx)
        if until >= Until.BEGUN:
            self.state.begin(step, ctx)
        if until >= Until.COMPUTED:
            self.number += 1
            for label in ctx.plan_results["state"].by_label:
                self.state.select(label)
                for _ in range(2):
                    here = self.state.next_layer()
                    here.write("block", here.read("block") * 2 + self.number)
        if until is Until.COMMITTED:
            self.state.commit(step, ctx)

    def learn(self, keys, pre, post) -> None:
        for fork in pre:
            streams = self.held[fork.request_id]
            streams.setdefault(fork.source, 0.0)
            streams[fork.target] = streams[fork.source]
        for rid, label in keys:
            self.held[rid][label] = self.held[rid].get(label, 0.0) * 2 + self.number
        for fork in post:
            streams = self.held[fork.request_id]
            streams.setdefault(fork.source, 0.0)
            streams[fork.target] = streams[fork.source]

    @rule(rid=st.sampled_from(RIDS))
    def offload(self, rid: str) -> None:
        here = [(rid, label) for label in self.held.get(rid, {}) if (rid, label) not in self.away]
        expected = min(len(here), HOST_SLOTS - len(self.away))
        assert self.state.reclaimable(rid) == len(here)
        assert self.state.offload(rid) == expected
        labels = [one for one, blocks in self.state._table.of(rid).items() if blocks.away]
        self.away |= {(rid, label) for label in labels}
        assert self.state.is_offloaded(rid) is bool(labels)

    @rule(rid=st.sampled_from(RIDS))
    def reload(self, rid: str) -> None:
        away = {key for key in self.away if key[0] == rid}
        fits = len(away) <= self.num_free
        assert self.state.reload(rid) is fits
        if fits:
            self.away -= away

    @property
    def num_free(self) -> int:
        return SLOTS - sum(map(len, self.held.values())) + len(self.away)

    @invariant()
    def everybody_holds_what_the_model_says(self) -> None:
        assert self.state.num_free_slots == self.num_free
        for rid in RIDS:
            streams = self.state._table.of(rid)
            # What has no state is cleared before it is read, and may hold anything until then.
            found = {
                label: blocks["block"].flatten().tolist() if streams[label].has_state else [0.0] * 4
                for label, blocks in self.state.contents(rid).items()
            }
            assert found == {
                label: [number] * 4 for label, number in self.held.get(rid, {}).items()
            }

    def teardown(self) -> None:
        for rid in RIDS:
            self.state.remove_request(rid)
        assert self.state.at_rest()


TestSlots = Slots.TestCase
TestSlots.settings = settings(
    max_examples=60, stateful_step_count=20, deadline=None, derandomize=True
)
