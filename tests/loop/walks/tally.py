"""A resource that remembers a number for each request and node, which depends on all that was
committed: what a push-back loses, or a step computes twice, shows in every later output."""

from __future__ import annotations

from dataclasses import dataclass

from phalanx.step.declaration import ResourceStep, StepContext
from phalanx.step.resources.base import BuildInfo, Resource, ResourceConfig, ResourceSpec

PRIME = 65521


@dataclass(frozen=True)
class TallySpec(ResourceSpec):
    def build(self, info: BuildInfo) -> Tally:
        return Tally(self.key)


@dataclass(frozen=True)
class TallyStep(ResourceStep):
    node: str
    request_ids: tuple[str, ...]


class Tally(Resource):
    def __init__(self, key: str) -> None:
        self.key = key
        self.counts: dict[str, dict[str, int]] = {}
        self.staged: dict[tuple[str, str], int] = {}

    def ingest_request(self, rid: str, config: ResourceConfig | None) -> None:
        self.counts.setdefault(rid, {})

    def remove_request(self, rid: str) -> None:
        self.counts.pop(rid, None)

    def value(self, rid: str, node: str) -> int:
        return self.counts[rid].get(node, 0)

    def unadmit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, TallyStep)
        for rid in step.request_ids:
            self.staged.pop((rid, step.node), None)

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        assert isinstance(step, TallyStep)
        for rid in step.request_ids:
            value = self.staged.pop((rid, step.node))
            self.counts[rid][step.node] = (self.value(rid, step.node) * 31 + value) % PRIME

    def at_rest(self) -> bool:
        return not self.counts and not self.staged
