"""New weights for a loaded policy, by their names in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from phalanx.errors import InvalidRequestError
from phalanx.layers.linear import Linear
from phalanx.models.pi.checkpoint import WeightRemap, renamed
from phalanx.models.pi.loading import Targets
from phalanx.models.pi.model import PiModel


class PolicyWeights:
    """A `WeightStore`. Names that no action depends on are taken, and change nothing."""

    def __init__(
        self, model: PiModel, targets: Targets, unused: frozenset[str], remap: WeightRemap
    ) -> None:
        self._model = model
        self._targets = targets
        self._unused = unused
        self._remap = remap

    def check_weight(self, name: str, tensor: Tensor) -> None:
        plain = renamed(name, self._remap)
        if plain is None or plain in self._unused:
            return
        places = self._targets.get(plain)
        if places is None:
            raise InvalidRequestError(
                f"weight {name!r} is not one of this policy; names are those of its checkpoint",
                field=name,
            )
        shape = places[0].shape
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise InvalidRequestError(
                f"weight {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; it takes floats "
                f"of shape {shape}",
                field=name,
            )

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Put checked tensors in place of the old ones, and forget what followed from those."""
        packed: list[Linear] = []
        for name, tensor in tensors.items():
            plain = renamed(name, self._remap)
            for place in () if plain is None else self._targets.get(plain, ()):
                owner = place.owner
                if isinstance(owner, Linear) and owner not in packed:
                    owner.unpack()
                    packed.append(owner)
                place.place(tensor)
        self._model.pack_again(packed)
