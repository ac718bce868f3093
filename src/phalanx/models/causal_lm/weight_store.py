"""The weights of a loaded decoder as its operator sees them: checked, put in, given up, brought back.

What this rank holds of a weight is replaced as a whole or in parts (the projections that a parameter
fuses); packed copies are made anew. Nothing here talks to other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from phalanx.device.operators.base import Operators
from phalanx.errors import CheckpointError, InvalidRequestError
from phalanx.layers.checkpoint import Given
from phalanx.layers.linear import Linear
from phalanx.layers.shells import parameter_bytes
from phalanx.layers.weight_files import WeightOrigin
from phalanx.layers.weight_slots import Slot, Target
from phalanx.models.causal_lm.checkpoint import ignored, load_weights, names_in, opened
from phalanx.models.causal_lm.decoder import Decoder
from phalanx.models.causal_lm.weight_targets import targets_of

logger = logging.getLogger(__name__)


class DecoderWeights:
    """See the module. A `WeightStore`: `check_weight` may be called from any thread."""

    def __init__(
        self,
        decoder: Decoder,
        operators: Operators,
        device: torch.device,
        directory: Path,
        quantization: str | None = None,
    ) -> None:
        """Loads the weights from `directory`."""
        self._decoder = decoder
        self._operators = operators
        self._device = device
        self._quantization = quantization
        self.targets: Mapping[str, Target] = targets_of(decoder)
        """Where each tensor of a checkpoint goes, by its name there."""
        self._slots = tuple(dict.fromkeys(target.slot for target in self.targets.values()))
        self._given: dict[Slot, set[Target]] | None = None
        """What has come of each parameter since they were lost; None where all is there."""
        self._directory = directory
        self._rewritten = False
        """Whether the directory has brought other weights since: a trainer writes to it."""
        origin = WeightOrigin.of(directory)
        self._load()
        self._origin: WeightOrigin | None = origin

    @property
    def packed_bytes(self) -> int:
        """Memory that packed copies hold."""
        return sum(
            module.packed_bytes for module in self._decoder.modules() if isinstance(module, Linear)
        )

    @property
    def num_bytes(self) -> int:
        """Memory that all of them hold, in every form."""
        return parameter_bytes(self._decoder)

    @property
    def dtype(self) -> torch.dtype:
        """What weights are kept in, unless packed copies are quantized."""
        return self._decoder.norm.weight.dtype

    @property
    def stay_in_place(self) -> bool:
        """Whether weights that are replaced are where they were, so that captures address them."""
        return self._device.type != "cpu"

    @property
    def complete(self) -> bool:
        """Whether every weight is there."""
        return self._given is None

    @property
    def can_return(self) -> bool:
        """Whether what was loaded is what is served, and is still on disk."""
        return self._origin is not None and self._origin.unchanged

    def check_weight(self, name: str, tensor: Tensor) -> None:
        """Refuse a tensor that no weight of the model takes. Raises `InvalidRequestError`."""
        if not isinstance(tensor, Tensor):
            raise InvalidRequestError(
                f"weight {name!r} is a {type(tensor).__name__}; give a torch tensor", field=name
            )
        self.check_shape(name, tuple(tensor.shape), tensor.dtype)

    def check_shape(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """As `check_weight`, of a tensor that has yet to come."""
        if ignored(name, self._decoder.config):
            return
        target = self.targets.get(name)
        if target is None:
            raise InvalidRequestError(
                f"weight {name!r} is not one of this model; names are those of its checkpoint, such "
                f"as {next(iter(self.targets))!r}",
                field=name,
            )
        if shape != target.shape or not dtype.is_floating_point:
            raise InvalidRequestError(
                f"weight {name!r} is {dtype} of shape {shape}; it takes floats of shape "
                f"{target.shape}",
                field=name,
            )

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Put checked tensors in place of the old ones; they are copied."""
        config = self._decoder.config
        given = [
            (self.targets[name], _just(tensor))
            for name, tensor in tensors.items()
            if not ignored(name, config)
        ]
        self._origin = None
        self._put(given)

    def check_directory(self, directory: Path) -> None:
        """Refuse a checkpoint that does not fit. Raises `InvalidRequestError`."""
        try:
            with opened(directory) as checkpoint:
                checkpoint.fitting(self.targets, names_in(directory, self._decoder.config))
        except CheckpointError as error:
            raise InvalidRequestError(str(error), field="path") from error

    def replace_all(self, directory: Path) -> None:
        """Put a checkpoint's weights in place of the old ones.

        They are copied: its files may be written anew. From the directory that was loaded first
        they may come back later as well.
        """
        self._origin = None
        origin = WeightOrigin.of(directory)
        with opened(directory) as checkpoint:
            self._put(checkpoint.fitting(self.targets, names_in(directory, self._decoder.config)))
        if directory.resolve() == self._directory.resolve():
            self._origin = origin
            self._rewritten = True

    def scramble(self) -> None:
        """Fill every weight with noise, ranks that hold the same with the same."""
        self._origin = None
        for seed, slot in enumerate(self._slots):
            if not slot.is_here:
                continue
            linear = slot.linear
            if linear is not None and linear.packed_bytes:
                linear.unpack()
            noise = torch.Generator(self._device).manual_seed(seed)
            slot.owner.get_parameter(slot.attribute).data.normal_(generator=noise)
            self._finish(slot, lent=False)

    def release(self) -> None:
        """Give up every weight, in every form."""
        for slot in self._slots:
            slot.drop()
        if self._decoder.config.tied_head:
            self._head.drop_weight()
            self._decoder.tie_head()
        self._given = {}

    def restore(self) -> None:
        """Bring all weights back from where they were loaded from."""
        self._load()
        self._given = None

    def lose(self) -> None:
        """What is there is no model's: wait for every weight to come."""
        self.release()
        self._origin = None

    def _load(self) -> None:
        load_weights(
            self._decoder, self.targets, self._directory, self._device, copy=self._rewritten
        )
        self._decoder.pack(self._operators, self._quantization)

    def _put(self, given: Iterable[Given]) -> None:
        by_slot: dict[Slot, list[Given]] = {}
        for target, read in given:
            by_slot.setdefault(target.slot, []).append((target, read))
        for slot, parts in by_slot.items():
            lent = self._fill(slot, parts)
            if self._given is not None:
                self._given.setdefault(slot, set()).update(target for target, _ in parts)
            if slot.is_here and self._is_whole(slot):
                self._finish(slot, lent=lent)
        if self._given is not None and all(map(self._is_whole, self._slots)):
            self._given = None

    def _fill(self, slot: Slot, parts: list[Given]) -> bool:
        """Whether the parameter refers to what was given now."""
        linear = slot.linear
        if linear is not None and linear.packed_bytes:
            # One that is replaced as a whole need not be unpacked first.
            if sum(target.rows for target, _ in parts) >= slot.shape[0]:
                slot.drop()
            else:
                linear.unpack()
        return any([target.place(read(), self._device) for target, read in parts])

    def _finish(self, slot: Slot, *, lent: bool) -> None:
        """A parameter is whole: give it the form in which it is computed with."""
        if slot.linear is not None:
            slot.linear.pack(self._quantization, operators=self._operators)
        if lent:
            slot.own()
        decoder = self._decoder
        if decoder.config.tied_head and slot.owner is decoder.cuts["embedding"].local:
            decoder.tie_head()
            self._head.pack(self._quantization, operators=self._operators)

    @property
    def _head(self) -> Linear:
        head = self._decoder.cuts["head"].local
        assert isinstance(head, Linear)
        return head

    def _is_whole(self, slot: Slot) -> bool:
        if self._given is None:
            return True
        return sum(target.rows for target in self._given.get(slot, ())) >= slot.shape[0]


def _just(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor.detach()
