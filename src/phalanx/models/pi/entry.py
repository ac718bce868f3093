"""What the entries of pi policies have in common."""

from __future__ import annotations

from torch import Tensor

from phalanx.models.pi.service import PolicyService
from phalanx.models.pi.weight_store import PolicyWeights
from phalanx.plugin import ServiceEntry


class PiEntry(ServiceEntry[PolicyService]):
    """On a single rank; several copies are replicas."""

    output_cls = Tensor

    @property
    def weights(self) -> PolicyWeights:
        return self._service.weights
