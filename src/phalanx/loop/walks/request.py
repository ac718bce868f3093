"""A request that goes through the walks of a model: a `RequestState` for the step loop.

It runs one node at a time, the one that ran longest ago of those that are due, so that its branches
and partitions advance in turns and share steps with other requests. Tensors stay on their device;
nothing here reads a value. What a run gives decides what comes next, so no run is prepared ahead.

When computed state was dropped (`push_back`), the runs of nodes that have resources are computed
again, in their old order and on their old inputs, which are kept for that. What they give then is
dropped: all that was routed, emitted and streamed stays as it was, and so do the walks. Then the
request goes on where it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from phalanx.errors import ConfigurationError, RequestFailedError
from phalanx.loop.request import Work
from phalanx.loop.walks.model import Emitted, Values, WalkModel
from phalanx.loop.walks.node_run import NodeRun, WalkInputs
from phalanx.loop.walks.partition_run import PartitionRun
from phalanx.loop.walks.program import WalkProgram
from phalanx.loop.walks.sections import EMIT_TO_CLIENT, Edge, Node
from phalanx.loop.walks.streams import Streams
from phalanx.step.outputs import NodeOutputs
from phalanx.step.resources.base import ResourceConfig


class WalkRequest:
    """See the module. `request` is the plugin's own; its nodes are `WalkNode`s."""

    def __init__(self, program: WalkProgram, model: WalkModel, request: Any) -> None:  # noqa: ANN401
        self.request = request
        self._program = program
        self._model = model
        self._partitions = {name: PartitionRun(name, program) for name in program.partitions}
        self._streams = Streams(program)
        self._begun = False
        self._bound: NodeRun | None = None
        self._journal: list[NodeRun] = []
        """The finished runs of nodes that have resources."""
        self._num_kept = 0
        """How many of them, from the first, the resources still hold the effects of."""
        self._tokens: dict[str, int] = {}
        self._last_run: dict[tuple[str, str], int] = {}
        self._num_runs = 0
        self._emitted: list[Emitted] = []
        self._num_reported = 0
        self.num_push_backs = 0

    def next_work(self) -> Work | None:
        if not self._begun:
            self._begun = True
            self._begin()
        run = self._current
        if run is None:
            run = self._bound = self._choose()
        if run is None:
            return None
        if run.done == run.span:
            raise ConfigurationError(
                f"node {run.node!r} did not hand over what it computed; derive it from WalkNode"
            )
        total = self._tokens.get(run.node, 0) + run.span - run.done
        return Work(run.node, run.walk, run.span - run.done, total, run.divisible)

    def resource_configs(self) -> Mapping[str, ResourceConfig]:
        return self._model.resource_configs(self.request)

    def inputs(self) -> WalkInputs:
        """What the next step of the current run computes on."""
        run = self._running
        return replace(run.inputs, start=run.done) if run.done else run.inputs

    def take(self, rid: str, outputs: Sequence[NodeOutputs]) -> None:
        """The outputs of a step of the current run, on their device."""
        run = self._running
        run.outputs = {name: tensor for part in outputs for name, tensor in part.row(rid).items()}

    def advance(self, span: int) -> None:
        run = self._running
        run.done += span
        self._tokens[run.node] = self._tokens.get(run.node, 0) + span

    def adopt(self, num_tokens: int) -> None:
        node = self._running.node
        runs = [*self._journal[self._num_kept :], *([] if self._bound is None else [self._bound])]
        for run in (run for run in runs if run.node == node):
            skipped = min(num_tokens, run.span - run.done)
            run.done += skipped
            num_tokens -= skipped
            self._tokens[node] = self._tokens.get(node, 0) + skipped
        self._skip_kept()

    def completed(self) -> WalkInputs | None:
        """The inputs of the current run, if all of it was computed and what it gives is wanted."""
        run = self._running
        return run.inputs if run.done == run.span and run is self._bound else None

    def finish(self, stopped: frozenset[str]) -> None:
        """Go on from a step: if the current run is through, route what it gave."""
        run = self._running
        outputs, run.outputs = run.outputs, {}
        if run.done < run.span:
            return
        if run is not self._bound:
            self._skip_kept()
            return
        self._bound = None
        if run.node in self._program.stateful:
            self._journal.append(run)
            self._num_kept += 1
        partition = self._partitions[run.partition]
        for edge, values in partition.end(run.node, outputs, stopped):
            self._send(edge, values)
        partition.go_on(self._model, self.request)
        self._close_streams(partition)

    def push_back(self) -> None:
        for run in self._journal:
            run.done = 0
        if self._bound is not None:
            self._bound.done = 0
        self._num_kept = 0
        self._tokens.clear()
        self.num_push_backs += 1

    def take_delta(self) -> Any | None:  # noqa: ANN401
        fresh = self._emitted[self._num_reported :]
        self._num_reported = len(self._emitted)
        return self._model.take_delta(self.request, fresh) if fresh else None

    def output(self, *, cancelled: bool) -> Any:  # noqa: ANN401
        return self._model.output(self.request, tuple(self._emitted), cancelled=cancelled)

    def _skip_kept(self) -> None:
        """Pass over the runs that were computed again."""
        for run in self._journal[self._num_kept :]:
            if run.done < run.span:
                return
            self._num_kept += 1

    @property
    def _current(self) -> NodeRun | None:
        """The run that is computed now: one that was lost, before the one that is due."""
        if self._num_kept < len(self._journal):
            return self._journal[self._num_kept]
        return self._bound

    @property
    def _running(self) -> NodeRun:
        run = self._current
        assert run is not None, "no node runs"
        return run

    def _begin(self) -> None:
        first = self._model.first_walks(self.request)
        unknown = first.keys() - self._program.partitions.keys()
        if unknown:
            raise ConfigurationError(
                f"first_walks names partition {sorted(unknown)[0]!r}; "
                f"there are {list(self._program.partitions)}"
            )
        for partition in self._partitions.values():
            partition.begin(first.get(partition.name))
            self._close_streams(partition)

    def _choose(self) -> NodeRun | None:
        """Bind the due node that ran longest ago; None when all partitions are done."""
        due = [
            (self._last_run.get((partition.name, node.name), -1), partition, node)
            for partition in self._partitions.values()
            for node in partition.due
            if all(self._streams.ready(key) for key in partition.chunked(node.name))
        ]
        if due:
            _, partition, node = min(due, key=lambda one: one[0])
            return self._bind(partition, node)
        waiting = [one for one in self._partitions.values() if not one.done]
        if waiting:
            raise RequestFailedError("; ".join(self._why_waiting(one) for one in waiting))
        return None

    def _bind(self, partition: PartitionRun, node: Node) -> NodeRun:
        walk = partition.walk
        self._num_runs += 1
        self._last_run[partition.name, node.name] = self._num_runs
        chunks = {key[1]: self._streams.take(key) for key in partition.chunked(node.name)}
        tensors: dict[str, Values] = {name: chunk.items for name, chunk in chunks.items()}
        for name in node.inputs:
            values = walk.values(node.name, name)
            if values is not None:
                tensors[name] = values
        partition.ended_streams.update(
            (node.name, name) for name, chunk in chunks.items() if chunk.final
        )
        inputs = WalkInputs(self.request, tensors, chunks, walk.iterations(node.name))
        span = self._model.num_tokens(self.request, node.name, tensors)
        if span < 1:
            raise ConfigurationError(
                f"num_tokens gives {span} for node {node.name!r}; a run has at least one token"
            )
        return NodeRun(partition.name, walk.graph.name, node.name, node.divisible, inputs, span)

    def _send(self, edge: Edge, values: Values) -> None:
        if edge.next_node == EMIT_TO_CLIENT:
            self._emitted += [Emitted(edge.name, edge.modality, tensor) for tensor in values]
        elif edge.streaming:
            key = (edge.next_node, edge.name)
            if not self._partitions[self._program.taken_by[key]].done:
                self._streams.send(key, values)

    def _close_streams(self, partition: PartitionRun) -> None:
        if partition.done:
            self._streams.finish(self._program.streams_of(partition.name))

    def _why_waiting(self, partition: PartitionRun) -> str:
        empty = [
            key
            for node in partition.due
            for key in partition.chunked(node.name)
            if not self._streams.ready(key)
        ]
        node, name = empty[0]
        reason = (
            "its final chunk was taken"
            if self._streams.closed(empty[0])
            else f"partition {self._program.fed_by[empty[0]]!r}, which feeds it, waits too"
        )
        return f"partition {partition.name!r} waits at node {node!r} for stream {name!r}: {reason}"
