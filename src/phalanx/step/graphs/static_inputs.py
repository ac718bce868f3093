"""The input tensors that captures of one config read, at addresses that never change.

The first shape, which is the largest, is what is kept; smaller ones are leading parts of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from phalanx.errors import ConfigurationError


@dataclass
class StaticInputs:
    """See the module. `owner` names the node and walk, or the region, in errors."""

    owner: str
    _whole: dict[str, Tensor] = field(default_factory=dict)

    def part(self, template: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors of the template's names, shapes and dtypes, and of its values for now."""
        if not self._whole:
            with torch.inference_mode(False):
                self._whole = {name: tensor.clone() for name, tensor in template.items()}
        if template.keys() != self._whole.keys():
            raise ConfigurationError(
                f"static inputs of {self.owner} are {sorted(template)} for one shape and "
                f"{sorted(self._whole)} for the largest; give every shape the same names"
            )
        parts = {name: self._leading(name, tensor) for name, tensor in template.items()}
        for name, tensor in template.items():
            parts[name].copy_(tensor)
        return parts

    def _leading(self, name: str, like: Tensor) -> Tensor:
        whole = self._whole[name]
        grows = like.dim() != whole.dim() or any(
            new > old for new, old in zip(like.shape, whole.shape, strict=False)
        )
        if grows or like.dtype != whole.dtype:
            raise ConfigurationError(
                f"static input {name!r} of {self.owner} is {tuple(like.shape)} of {like.dtype} and "
                f"was {tuple(whole.shape)} of {whole.dtype} for the largest shape; static inputs "
                "never grow: give the largest rows and tokens the largest inputs"
            )
        return leading(whole, like)


def leading(whole: Tensor, like: Tensor) -> Tensor:
    """The part of `whole` with the shape of `like`."""
    return whole[tuple(slice(0, size) for size in like.shape)]


def stage(
    owner: str,
    static: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    padding: Mapping[str, Tensor],
) -> None:
    """Copy a step's inputs into the leading parts of the static ones, and `padding` behind them
    (zeros where it has none): a larger shape of before may have left there what fits no smaller one.
    """
    if given.keys() != static.keys():
        raise ConfigurationError(
            f"{owner} has static inputs {sorted(static)} and was given {sorted(given)}; "
            "give a tensor for each"
        )
    for name, tensor in given.items():
        whole = static[name]
        sizes = zip(tensor.shape, whole.shape, strict=False)
        if tensor.dim() != whole.dim() or any(new > old for new, old in sizes):
            raise ConfigurationError(
                f"input {name!r} of {owner} is {tuple(tensor.shape)}; its captured shape has room "
                f"for {tuple(whole.shape)}"
            )
        if tensor.shape != whole.shape:
            behind = padding.get(name)
            whole.zero_() if behind is None else whole.copy_(behind)
        leading(whole, tensor).copy_(tensor, non_blocking=True)
