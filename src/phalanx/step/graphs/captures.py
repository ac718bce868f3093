"""What is captured of one forward or region: by shape and slot, and why the rest is not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from phalanx.step.graphs.capturing import Captured, CaptureTask, Capturing
from phalanx.step.graphs.slots import NodeSlots
from phalanx.step.graphs.static_inputs import stage
from phalanx.step.lease import BucketKey, SlotLease

logger = logging.getLogger(__name__)


def _nobody_waits() -> None:
    """Nobody is told that inputs are staged."""


class Captures:
    """See the module. `owner` names the forward or region in errors and in the log."""

    def __init__(self, owner: str, slots: NodeSlots) -> None:
        self.owner = owner
        self._slots = slots
        self._made: dict[BucketKey, dict[int, Captured]] = {}
        self.refused: dict[BucketKey, str] = {}

    def __contains__(self, bucket: BucketKey) -> bool:
        return bucket in self._made

    def __iter__(self) -> Iterator[BucketKey]:
        return iter(self._made)

    def __len__(self) -> int:
        return len(self._made)

    def add(self, task: CaptureTask, capturing: Capturing) -> None:
        """Capture one shape on every slot, or keep the reason why it is not."""
        made = capturing.capture(task, self._slots.numbers)
        if isinstance(made, str):
            self.refused[task.bucket] = made
            logger.warning("%s is not captured as %s: %s", self.owner, task.bucket, made)
        else:
            self._made[task.bucket] = made

    def replay(
        self,
        lease: SlotLease,
        inputs: Mapping[str, Tensor],
        staged: Callable[[], object] = _nobody_waits,
    ) -> dict[str, Tensor]:
        """Stage the inputs, with padding behind them, call `staged`, and replay; the outputs are
        the caller's own.
        """
        captured = self._made[lease.bucket][lease.slot]
        stage(f"{self.owner} as {lease.bucket}", captured.inputs, inputs, captured.padding)
        staged()
        outputs = captured.replay()
        self._slots.replayed(lease.slot)
        return outputs

    def drop(self) -> None:
        """Forget all, as when memory that captures address is given back."""
        self._made.clear()
        self.refused.clear()
