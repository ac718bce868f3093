"""The networks of a pi policy: what its nodes compute with, and where its weights are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from phalanx.device.operators.base import Operators
from phalanx.layers.gemma import CachingLayer, GemmaLayer, GemmaNorm, GemmaRotary, Rotary
from phalanx.layers.linear import Linear
from phalanx.layers.siglip import SiglipTower
from phalanx.models.pi.expert import ActionExpert
from phalanx.models.pi.geometry import PiGeometry
from phalanx.step.resources.attention import PagedAttention


class Eye(nn.Module):
    """The vision tower and the projection into the language model's width."""

    def __init__(self, geometry: PiGeometry, dtype: torch.dtype) -> None:
        super().__init__()
        self.tower = SiglipTower(geometry.vision, dtype)
        self.projector = Linear(geometry.vision_width, geometry.text_width, bias=True, dtype=dtype)

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, C, S, S] in [-1, 1] as tokens [N * patches, width]."""
        return self.projector.forward(self.tower.forward(images))


class LanguageModel(nn.Module):
    """Reads the prefix. Only its keys and values are of use, unless it is `whole`."""

    def __init__(
        self,
        geometry: PiGeometry,
        dtype: torch.dtype,
        operators: Operators,
        *,
        whole: bool = False,
    ) -> None:
        super().__init__()
        shape = geometry.text
        table = torch.empty(geometry.vocab_size, shape.width, dtype=dtype)
        self.embedding = nn.Parameter(table, requires_grad=False)
        self.layers = nn.ModuleList(
            GemmaLayer(shape, dtype, operators) for _ in range(shape.num_layers - 1)
        )
        last = GemmaLayer if whole else CachingLayer
        self.last = last(shape, dtype, operators)
        self.norm = GemmaNorm(shape.width, shape.eps, operators) if whole else None
        # In bfloat16 the factor is rounded too, as it is where it is multiplied inside the model.
        self._scale = float(torch.tensor(shape.width**0.5, dtype=torch.float32).to(dtype))

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    def embed(self, token_ids: Tensor) -> Tensor:
        """Tokens [T, width] of a text."""
        return self.embedding.index_select(0, token_ids) * self._scale

    def forward(
        self, x: Tensor, attention: PagedAttention, rotary: Rotary, *, whole: bool = False
    ) -> Tensor | None:
        """Leave what is known of tokens `x` [T, width] in the cache; where `whole`, give it too."""
        for layer in self.layers:
            x = layer.forward(x, attention, rotary)
        if not whole:
            self.last.remember(x, attention, rotary)
            return None
        assert isinstance(self.last, GemmaLayer)
        assert self.norm is not None
        return self.norm.forward(self.last.forward(x, attention, rotary)).float()


class PiModel(nn.Module):
    """All networks of a policy."""

    def __init__(
        self,
        geometry: PiGeometry,
        expert: ActionExpert,
        dtype: torch.dtype,
        vision_dtype: torch.dtype,
        operators: Operators,
    ) -> None:
        super().__init__()
        self.geometry = geometry
        self.eye = Eye(geometry, vision_dtype)
        self.language = LanguageModel(geometry, dtype, operators, whole=expert.values_prefix)
        self.expert = expert
        # A state and a chunk stand behind the longest prefix.
        self.max_tokens = geometry.max_prefix + 1 + geometry.chunk_size
        self.rotary = GemmaRotary(geometry.head_dim, self.max_tokens, dtype)
        self._operators = operators

    def pack(self) -> None:
        """Bring the weights into their fastest form, when all are there."""
        self.pack_again([one for one in self.modules() if isinstance(one, Linear)])

    def pack_again(self, changed: Iterable[Linear]) -> None:
        """The same for some whose weights are new."""
        self.expert.forget_conditions()
        for linear in changed:
            linear.pack(operators=self._operators)
