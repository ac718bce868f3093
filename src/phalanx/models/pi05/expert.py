"""pi0.5's expert: every norm and residual of its layers follows the time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.device.operators.base import Operators
from phalanx.layers.flow_matching import time_embedding
from phalanx.layers.gemma import AdaptiveGemmaLayer, AdaptiveNorm, Modulation, Rotary
from phalanx.layers.linear import Linear
from phalanx.models.pi.expert import ActionExpert
from phalanx.models.pi.geometry import PiGeometry
from phalanx.models.pi.names import EXPERT
from phalanx.models.pi.targets import Named, layer_targets, whole_linear
from phalanx.models.pi05.value_head import ValueHead
from phalanx.step.resources.attention import PagedAttention


class PI05Expert(ActionExpert):
    """A condition is the modulation of every norm, [norms, 3 width], two for each layer and a last."""

    def __init__(
        self,
        geometry: PiGeometry,
        dtype: torch.dtype,
        operators: Operators,
        *,
        value_from: str | None = None,
    ) -> None:
        super().__init__()
        shape = geometry.expert
        width, size = shape.width, geometry.max_action_dim
        self.action_in = Linear(size, width, bias=True, dtype=torch.float32)
        self.action_out = Linear(width, size, bias=True, dtype=torch.float32)
        self.time_in = Linear(width, width, bias=True, dtype=torch.float32)
        self.time_out = Linear(width, width, bias=True, dtype=torch.float32)
        self.layers = nn.ModuleList(
            AdaptiveGemmaLayer(shape, dtype, operators) for _ in range(shape.num_layers)
        )
        self.norm = AdaptiveNorm(width, shape.eps, operators)
        self.values_prefix = value_from == "prefix"
        valued = geometry.text_width if self.values_prefix else width
        self.value_head = None if value_from is None else ValueHead(valued)
        self._geometry = geometry
        self._dtype = dtype

    def targets(self) -> Named:
        """Where a checkpoint's tensors go."""
        for index, layer in enumerate(self._layers()):
            shape = self._geometry.expert
            name = f"{EXPERT}.layers.{index}"
            yield from layer_targets(name, layer, shape.q_rows, shape.kv_rows)
        yield from whole_linear(f"{EXPERT}.norm.dense", self.norm.dense)
        yield from whole_linear("action_in_proj", self.action_in)
        yield from whole_linear("action_out_proj", self.action_out)
        yield from whole_linear("time_mlp_in", self.time_in)
        yield from whole_linear("time_mlp_out", self.time_out)
        if self.value_head is not None:
            yield from self.value_head.targets()

    @property
    def has_value(self) -> bool:
        return self.value_head is not None and not self.values_prefix

    @property
    def trained_later(self) -> frozenset[str]:
        head = self.value_head
        return frozenset() if head is None else frozenset(name for name, _ in head.targets())

    def draw_untrained(self) -> None:
        if self.value_head is not None:
            self.value_head.draw()

    def embedded_time(self, time: float) -> Tensor:
        """Sines and cosines of a time, float32 [1, width]."""
        geometry = self._geometry
        embedded = time_embedding(
            time, geometry.expert_width, geometry.min_period, geometry.max_period
        )
        return embedded[None].to(self.norm.ones.device)

    def time_condition(self, time: float) -> Tensor:
        """What the norms are modulated by, float32 [1, width]."""
        x = self.time_in.forward(self.embedded_time(time))
        return functional.silu(self.time_out.forward(functional.silu(x)))

    def compute_condition(self, time: float) -> Tensor:
        condition = self.time_condition(time)
        norms = [norm for one in self._layers() for norm in (one.input_norm, one.post_norm)]
        return torch.cat([norm.modulation(condition) for norm in (*norms, self.norm)])

    def hidden(
        self, x: Tensor, conditions: Tensor, attention: PagedAttention, rotary: Rotary
    ) -> Tensor:
        by = [Modulation(*norm.chunk(3, dim=-1)) for norm in conditions.unbind(-2)]
        hidden = self.action_in.forward(x.flatten(0, 1)).to(self._dtype)
        for index, layer in enumerate(self._layers()):
            hidden = layer.forward(hidden, (by[2 * index], by[2 * index + 1]), attention, rotary)
        hidden = self.norm.forward(hidden, by[-1])
        return hidden.float().view(*x.shape[:2], -1)

    def velocity(self, hidden: Tensor) -> Tensor:
        return self.action_out.forward(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def value(self, hidden: Tensor) -> Tensor:
        assert self.value_head is not None
        return self.value_head.forward(hidden.mean(1))

    def _layers(self) -> list[AdaptiveGemmaLayer]:
        return [layer for layer in self.layers if isinstance(layer, AdaptiveGemmaLayer)]
