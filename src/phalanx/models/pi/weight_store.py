"""The weights of a loaded policy, by their names in a checkpoint: loaded, replaced, given up, brought
back.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from phalanx.errors import InvalidRequestError
from phalanx.layers.linear import Linear
from phalanx.layers.shells import drop_parameters, take_parameter, take_parameters
from phalanx.layers.weight_files import WeightOrigin
from phalanx.models.pi.checkpoint import WeightRemap, renamed
from phalanx.models.pi.loading import Targets, WeightSource
from phalanx.models.pi.model import PiModel
from phalanx.models.pi.names import EMBEDDING, LM_HEAD
from phalanx.models.pi.targets import Target


class PolicyWeights:
    """A `WeightStore`. Names that no action depends on are taken, and change nothing."""

    def __init__(
        self,
        model: PiModel,
        targets: Targets,
        unused: frozenset[str],
        remap: WeightRemap,
        source: WeightSource,
    ) -> None:
        """Loads the weights from `source`."""
        self._model = model
        self._loaded = targets
        # Where a checkpoint embeds by its head, a trainer may send either name, or both.
        self._targets = (
            targets if EMBEDDING in targets else {**targets, EMBEDDING: targets[LM_HEAD]}
        )
        self._unused = unused
        self._remap = remap
        self._source = source
        self._device = model.language.embedding.device
        self._awaited: set[Target] = set()
        """What has yet to come since all were lost."""
        origin = source.origin
        source.fill(model, targets, unused)
        self._origin: WeightOrigin | None = origin

    @property
    def complete(self) -> bool:
        """Whether every weight is there."""
        return not self._awaited

    @property
    def can_return(self) -> bool:
        """Whether what was loaded is what is served, and is still on disk."""
        return self._origin is not None and self._origin.unchanged

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
        self._origin = None
        packed: list[Linear] = []
        for name, tensor in tensors.items():
            plain = renamed(name, self._remap)
            for place in () if plain is None else self._targets.get(plain, ()):
                owner = place.owner
                if isinstance(owner, Linear) and owner not in packed:
                    owner.unpack()
                    packed.append(owner)
                if owner.get_parameter(place.attribute).is_meta:
                    take_parameter(owner, place.attribute, self._device)
                place.place(tensor)
                self._awaited.discard(place)
        self._model.pack_again(packed)

    def release(self) -> None:
        """Give up every weight, in every form."""
        drop_parameters(self._model)
        self._model.expert.forget_conditions()
        self._awaited = {place for places in self._loaded.values() for place in places}

    def restore(self) -> None:
        """Bring all weights back from where they were loaded from."""
        take_parameters(self._model, self._device)
        self._model.expert.draw_untrained()
        self._source.fill(self._model, self._loaded, self._unused)
        self._awaited.clear()
