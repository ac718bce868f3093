"""The captured whole forwards of one node: which one a batch gets, and how it is replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

from torch import Tensor

from phalanx.errors import ConfigurationError
from phalanx.step.graphs.capture_config import CaptureConfig
from phalanx.step.graphs.captures import Captures
from phalanx.step.graphs.capturing import CaptureTask, Capturing
from phalanx.step.graphs.compiling import Forward
from phalanx.step.graphs.slots import NodeSlots
from phalanx.step.graphs.static_inputs import StaticInputs
from phalanx.step.lease import BucketKey, SlotLease
from phalanx.step.outputs import Column, NodeOutputs
from phalanx.step.submodule import NodeSubmodule


class GraphRunner:
    """See the module."""

    def __init__(
        self,
        node: str,
        submodule: NodeSubmodule,
        configs: Sequence[CaptureConfig],
        slots: NodeSlots,
        forward: Forward,
    ) -> None:
        """`forward` computes a batch, under the node's autocast."""
        self._owner = f"node {node!r}"
        self._submodule = submodule
        self._configs = tuple(configs)
        self._forward = forward
        self.captures = Captures(self._owner, slots)

    def capture(self, capturing: Capturing, compiled: Callable[[Forward], Forward]) -> None:
        """Capture all shapes, each config's largest first."""
        for config in self._configs:
            static = StaticInputs(f"{self._owner}, walk {config.walk!r}")
            forward = compiled(self._forward) if config.compiles else self._forward
            for bucket in config.buckets():
                self._capture(bucket, static, forward, capturing)

    def _capture(
        self, bucket: BucketKey, static: StaticInputs, forward: Forward, capturing: Capturing
    ) -> None:
        padding = self._submodule.static_inputs(bucket.walk, bucket.rows, bucket.tokens, bucket.key)
        inputs = static.part(padding)
        task = CaptureTask(
            bucket,
            inputs,
            partial(_columns, forward, inputs, bucket),
            partial(self._submodule.declare_capture, bucket.walk, bucket.key),
            padding,
        )
        self.captures.add(task, capturing)

    def max_batch_size(self, walk: str) -> int | None:
        """The most rows of the captures of a walk that cap its steps; None if none does."""
        rows = [
            bucket.rows
            for config in self._configs
            if config.caps_eager_batch_size and walk in config.walks
            for bucket in config.buckets()
            if bucket in self.captures
        ]
        return max(rows, default=None)

    def bucket_of(
        self, walk: str, key: Hashable, spans: Sequence[int], *, prepared: bool = True
    ) -> BucketKey | None:
        """The shape with the fewest tokens, then rows, that rows of these lengths fit into.

        While inputs are not `prepared` rows may still drop out, and only batched shapes answer:
        the one with the fewest rows.
        """
        fitting = [
            bucket
            for config in self._configs
            if walk in config.walks and config.key == key and config.shapes.takes(spans)
            if prepared or not config.shapes.packed
            for bucket in config.buckets()
            if bucket in self.captures and bucket.rows >= len(spans) and bucket.tokens >= sum(spans)
        ]
        if prepared:
            return min(fitting, key=lambda one: (one.tokens, one.rows), default=None)
        return min(fitting, key=lambda one: (one.rows, one.tokens), default=None)

    def replay(
        self, lease: SlotLease, prepared: object, launch_started: threading.Event
    ) -> NodeOutputs:
        """Stage a step's inputs and replay; the outputs are the step's own.

        The plans must be in the slot's buffers, as far as the current stream is concerned.
        """
        if not isinstance(prepared, Mapping):
            raise ConfigurationError(
                f"preprocess of {self._owner} as {lease.bucket} returned a "
                f"{type(prepared).__name__}; a step that replays a capture (EngineInputs.lease) "
                "needs tensors by name"
            )
        outputs = self.captures.replay(lease, prepared, launch_started.set)
        return NodeOutputs({name: Column.by_row(values) for name, values in outputs.items()})


def _columns(
    forward: Forward, inputs: Mapping[str, Tensor], bucket: BucketKey
) -> Mapping[str, Tensor]:
    """The outputs of a captured forward, by name."""
    outputs = forward(inputs)
    if not isinstance(outputs, NodeOutputs) or outputs.ragged:
        raise ConfigurationError(
            f"the captured forward of walk {bucket.walk!r} must return NodeOutputs of columns only; "
            "ragged outputs are not allowed"
        )
    for name, column in outputs.columns.items():
        if len(column.values) != bucket.rows:
            raise ConfigurationError(
                f"output {name!r} of the captured forward of walk {bucket.walk!r} has "
                f"{len(column.values)} rows; its bucket has {bucket.rows}"
            )
    return {name: column.values for name, column in outputs.columns.items()}
