"""The step engine: one step of one node over a batch of requests.

declare -> admit -> plan -> preprocess -> forward -> commit -> publish. All admits of a step come
before any plan; nothing commits if any row was refused; what one row's code raises fails that row,
and its neighbours finish.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from phalanx.device.base import DeviceBackend
from phalanx.errors import ConfigurationError
from phalanx.step.aftermath import adjust, collect, forget, publish, read, show
from phalanx.step.attempt import attempt
from phalanx.step.batch import ExecutingBatch
from phalanx.step.execution import StepExecution
from phalanx.step.graphs.capturing import Agree, CaptureReport, Capturing, agree_alone
from phalanx.step.graphs.node_graphs import NodeGraphs
from phalanx.step.graphs.slots import NodeSlots
from phalanx.step.lease import SlotLease
from phalanx.step.outcomes import ADMITTED, AdmitOutcome, RequestOffloading
from phalanx.step.outputs import NodeOutputs
from phalanx.step.prefixes import Prefixes
from phalanx.step.preparation import prepare, thread
from phalanx.step.preplanning import PrePlanning
from phalanx.step.reserving import Reserving
from phalanx.step.residency import Residency
from phalanx.step.resources.base import (
    BuildInfo,
    Growing,
    Resource,
    ResourceConfig,
    ResourceSpec,
)
from phalanx.step.runner import StepRunner, check_plans_ahead, dependency_order
from phalanx.step.submodule import NodeSubmodule, RequestInfo, StepRow
from phalanx.step.waker import Waker


@dataclass
class _Node:
    submodule: NodeSubmodule
    resources: Mapping[str, Resource]
    reserving: Reserving
    preplanning: PrePlanning
    graphs: NodeGraphs


class StepEngine:
    """See the module. One thread drives it; `add_request` opens a request on every resource."""

    def __init__(self, backend: DeviceBackend, *, num_slots: int = 2) -> None:
        """`num_slots` sets of static buffers for captured steps, where a node plans ahead."""
        if num_slots < 2:
            raise ConfigurationError(
                f"num_slots={num_slots}; give at least 2, or a step cannot be planned while the one "
                "before it is replayed"
            )
        self.backend = backend
        self._num_slots = num_slots
        self._nodes: dict[str, _Node] = {}
        self._resources: dict[str, Resource] = {}
        self._runner = StepRunner({})
        self._requests: dict[str, RequestInfo] = {}
        self.waker = Waker()
        self.residency = Residency({}, {})
        self.prefixes = Prefixes({}, {})

    def load_model(
        self, submodules: Mapping[str, NodeSubmodule], specs: Sequence[ResourceSpec]
    ) -> None:
        """Build every resource once, in dependency order, and bind each node to its own."""
        for spec in specs:
            unknown = spec.nodes - submodules.keys()
            if unknown or not spec.nodes:
                raise ConfigurationError(
                    f"resource {spec.key!r} names nodes {sorted(spec.nodes)}; "
                    f"there are {sorted(submodules)}"
                )
        for spec in dependency_order(specs):
            needed = {key: self._resources[key] for key in spec.depends_on()}
            self._resources[spec.key] = spec.build(BuildInfo(self.backend, needed, self.waker))
        check_plans_ahead(specs, self._resources)
        self._runner = StepRunner(self._resources)
        plan_stream = self.backend.stream()
        first_slot = 0
        for name, submodule in submodules.items():
            own = {spec.key: self._resources[spec.key] for spec in specs if name in spec.nodes}
            submodule.requires_grad_(False)
            submodule.bind_node_resources(own)
            ahead = any(one.plans_ahead for one in own.values())
            slots = NodeSlots(first_slot, self._num_slots if ahead else 1, self.backend)
            first_slot += len(slots.numbers)
            graphs = NodeGraphs(name, submodule, own, self._runner, self.backend, slots)
            reserving = Reserving(name, submodule, own.keys(), self._runner, self.backend, graphs)
            preplanning = PrePlanning(reserving, self._runner, self.backend, plan_stream, graphs)
            self._nodes[name] = _Node(submodule, own, reserving, preplanning, graphs)
        owned = {name: node.resources.keys() for name, node in self._nodes.items()}
        self.residency = Residency(self._resources, owned)
        self.prefixes = Prefixes(self._resources, owned)

    @property
    def nodes(self) -> Collection[str]:
        """Names of the loaded nodes."""
        return self._nodes.keys()

    def resource(self, key: str) -> Resource:
        return self._resources[key]

    def get_max_batch_size(self, node: str, walk: str) -> int | None:
        """The most rows that one step of this node takes; None for no limit.

        1 where the node fails to say: `prepare_inputs` then fails that row.
        """
        made = attempt(partial(self._nodes[node].graphs.max_batch_size, walk))
        return made.value if made.error is None else 1

    def warm_up(self, agree: Agree = agree_alone) -> dict[str, CaptureReport]:
        """Capture what nodes want captured, and compile what they want compiled.

        All static buffers are taken before the first capture: nodes share resources, and a buffer
        that grew would move from under it. `agree` makes the ranks of a replica capture the same.
        No request may be open. Where the device does not capture, every step stays eager.
        """
        nodes = self._nodes
        if self.backend.captures:
            for node in nodes.values():
                node.graphs.prepare_for_capture()
        capturing = Capturing(self._runner, self.backend, agree)
        reports = {name: node.graphs.capture(capturing) for name, node in nodes.items()}
        for node in nodes.values():
            node.graphs.compile_eager()
        return reports

    def drop_captures(self) -> None:
        """Forget what was captured, before memory that it addresses moves; `warm_up` makes it anew."""
        for node in self._nodes.values():
            node.graphs.drop()

    def reserve_slot(self, batch: ExecutingBatch) -> SlotLease | None:
        """The captured shape and slot of the batch as it is now; None if it is to run eagerly.

        `exec` does this itself, also where rows have dropped out since.
        """
        return self._nodes[batch.node].graphs.lease(batch)

    def add_request(self, rid: str, state: object, configs: Mapping[str, ResourceConfig]) -> None:
        """Open a request on all resources; adding it again changes nothing."""
        if rid not in self._requests:
            self._requests[rid] = RequestInfo(rid, state)
        for key, resource in self._resources.items():
            resource.ingest_request(rid, configs.get(key))

    def remove_request(self, rid: str) -> None:
        """Free a request everywhere; unknown ids are ignored.

        What one place raises is logged, and leaves nothing of the request in the others.
        """
        self._requests.pop(rid, None)
        forget(self._resources, {name: node.submodule for name, node in self._nodes.items()}, rid)

    def row(self, rid: str, span: int, ahead: int = 0) -> StepRow:
        """A live request as a row of a step; `ahead` if it is prepared ahead by so many tokens."""
        return StepRow(self._requests[rid], span, ahead)

    def speculates(self, node: str) -> bool:
        """Whether steps of this node may be prepared ahead, and others behind them."""
        return self._nodes[node].submodule.speculates

    def fits(self, node: str, totals: Mapping[str, int]) -> bool:
        """Whether these requests could grow to these numbers of tokens at the same time."""
        return all(
            resource.fits(totals)
            for resource in self._nodes[node].resources.values()
            if isinstance(resource, Growing)
        )

    def check_ready(self, node: str, rid: str, published: Mapping[str, object]) -> AdmitOutcome:
        """Bring a request's state here: from the host, and what other engines published of it.

        `ready` once all of it has landed. A refusal that is not terminal wants room.
        """
        if not self.residency.reload(rid):
            reason = RequestOffloading(f"no room to reload request {rid!r}", rid)
            return AdmitOutcome(ok=False, reason=reason)
        ready = True
        for key, resource in self._nodes[node].resources.items():
            outcome = resource.admit_retrieve(rid, published.get(key))
            if not outcome.ok:
                return outcome
            ready = ready and outcome.ready
        return ADMITTED if ready else AdmitOutcome(ready=False)

    def prepare_inputs(self, batch: ExecutingBatch) -> None:
        """Ask the node for each row's inputs; rows that fail or are left out leave the batch."""
        prepare(self._nodes[batch.node].submodule, batch)

    def thread_outputs(self, batch: ExecutingBatch, before: Sequence[NodeOutputs]) -> None:
        """Give rows that were prepared ahead what the step before them has computed."""
        with torch.inference_mode():
            thread(self._nodes[batch.node].submodule, batch, before)

    def can_pre_plan(self, node: str) -> bool:
        """Whether some of a step of this node can be planned before its turn."""
        return any(one.plans_ahead for one in self._nodes[node].resources.values())

    def pre_plan(self, batch: ExecutingBatch) -> bool:
        """Admit and plan a prepared batch before its turn, when the step before is committed.

        False, and nothing is held, where that cannot be done: `exec` then does all of it.
        """
        with torch.inference_mode():
            return self._nodes[batch.node].preplanning.stage(batch)

    def reset_pre_plan(self, batch: ExecutingBatch) -> None:
        """Undo `pre_plan`, if it was done."""
        self._nodes[batch.node].preplanning.unstage(batch)

    def preplan_is_stale(self, batch: ExecutingBatch) -> bool:
        """Whether the batch was planned for other rows than it has now; `exec` plans it again."""
        return batch.preplan_is_stale

    def exec(self, batch: ExecutingBatch) -> list[NodeOutputs]:
        """Run the step. A refused admit leaves `batch.admit_error` and nothing else behind."""
        try:
            node = self._nodes[batch.node]
            execution = StepExecution(
                batch,
                node.submodule,
                node.reserving,
                node.preplanning,
                node.graphs,
                self._runner,
                self.backend,
            )
            with torch.inference_mode(), self.backend.range(f"step.exec.{batch.node}"):
                computed = execution.run()
                batch.commit_done.set()
                with self.backend.range("step.collect"):
                    batch.outputs = collect(batch, computed)
                batch.completed = self.backend.record_event()
            return batch.outputs
        finally:
            batch.release_waiters()

    def postprocess(self, batch: ExecutingBatch) -> None:
        """Let the node adjust each row's metadata."""
        adjust(self._nodes[batch.node].submodule, batch)

    def check_stop(self, batch: ExecutingBatch) -> dict[str, frozenset[str]]:
        """Hand every row its values and return the loops that ended, by request."""
        submodule = self._nodes[batch.node].submodule
        with self.backend.range("step.to_host"):
            values = read(submodule, batch)
        return show(submodule, batch, values)

    def finalize(self, batch: ExecutingBatch) -> None:
        """Publish what the rows' state has become; called after every step, whatever came of it."""
        node = self._nodes[batch.node]
        if node.submodule.publishes:
            publish(node.resources, batch)

    def release(self, tags: frozenset[str]) -> None:
        """Free the memory of every resource under these tags; requests must have ended.

        What was captured addresses that memory, and is forgotten.
        """
        self.drop_captures()
        for resource in self._resources.values():
            resource.release(tags)
        self.backend.release_cached_memory()

    def restore(self, tags: frozenset[str]) -> None:
        """Take that memory again."""
        for resource in self._resources.values():
            resource.restore(tags)

    def stage_s(self) -> dict[str, float]:
        """Host seconds of each stage of the steps so far; empty where nobody asked for them."""
        return self.backend.stage_s()

    def at_rest(self) -> bool:
        """Whether no request is left and every resource is as it was at the start."""
        resting = all(resource.at_rest() for resource in self._resources.values())
        return not self._requests and resting

    def shutdown(self) -> None:
        for resource in self._resources.values():
            resource.cleanup()
