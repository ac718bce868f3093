"""What the entries of pi policies have in common: they hand their calls to a service."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from phalanx.models.pi.service import PolicyService
from phalanx.models.pi.weight_store import PolicyWeights
from phalanx.plugin import BatchingEntry
from phalanx.schema.control import ControlOp
from phalanx.schema.events import Event
from phalanx.schema.limits import Limits
from phalanx.schema.statistics import LoopStatistics


class PiEntry(BatchingEntry):
    """On a single rank; several copies are replicas."""

    output_cls = Tensor

    _service: PolicyService

    @abstractmethod
    def load(self, args: Any) -> PolicyService:  # noqa: ANN401 - the plugin's own arguments
        """Load the checkpoint and build everything that serves it."""

    def setup(self, args: Any) -> None:  # noqa: ANN401
        self._service = self.load(args)

    @property
    def limits(self) -> Limits:
        return self._service.limits

    @property
    def weights(self) -> PolicyWeights:
        return self._service.weights

    def cancel(self, rid: str) -> None:
        self._service.cancel(rid)

    def tick(self) -> Sequence[Event]:
        return self._service.tick()

    @property
    def busy(self) -> bool:
        return self._service.busy

    def control(self, op: ControlOp) -> bool:
        return self._service.control(op)

    def statistics(self) -> LoopStatistics:
        return self._service.statistics()

    def close(self) -> None:
        self._service.close()
