"""pi0's expert: plain layers; actions are joined with their time, and a token has the state."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.device.operators.base import Operators
from phalanx.layers.flow_matching import time_embedding
from phalanx.layers.gemma import GemmaLayer, GemmaNorm, Rotary
from phalanx.layers.linear import Linear
from phalanx.models.pi.expert import ActionExpert
from phalanx.models.pi.geometry import PiGeometry
from phalanx.models.pi.names import EXPERT
from phalanx.models.pi.targets import Named, Target, layer_targets, vector, whole_linear
from phalanx.step.resources.attention import PagedAttention


class PI0Expert(ActionExpert):
    """A condition is what the time adds to every action, [width].

    The state's token sees no action and no time, so it is computed once, before the first step.
    """

    def __init__(self, geometry: PiGeometry, dtype: torch.dtype, operators: Operators) -> None:
        super().__init__()
        shape = geometry.expert
        width, size = shape.width, geometry.max_action_dim
        self.state_in = Linear(geometry.max_state_dim, width, bias=True, dtype=torch.float32)
        self.action_in = Linear(size, width, bias=True, dtype=torch.float32)
        self.action_out = Linear(width, size, bias=True, dtype=torch.float32)
        # A checkpoint has the two as one matrix, over the action's vector and the time's.
        self.mix_action = Linear(width, width, dtype=torch.float32)
        self.mix_time = Linear(width, width, bias=True, dtype=torch.float32)
        self.mix_out = Linear(width, width, bias=True, dtype=torch.float32)
        self.layers = nn.ModuleList(
            GemmaLayer(shape, dtype, operators) for _ in range(shape.num_layers)
        )
        self.norm = GemmaNorm(width, shape.eps, operators)
        self._geometry = geometry
        self._dtype = dtype

    def targets(self) -> Named:
        shape = self._geometry.expert
        for index, layer in enumerate(self._layers()):
            name = f"{EXPERT}.layers.{index}"
            yield from layer_targets(name, layer, shape.q_rows, shape.kv_rows)
        yield from vector(f"{EXPERT}.norm", self.norm)
        yield from whole_linear("state_proj", self.state_in)
        yield from whole_linear("action_in_proj", self.action_in)
        yield from whole_linear("action_out_proj", self.action_out)
        mixed, width = "action_time_mlp_in", shape.width
        size = (width, 2 * width)
        yield f"{mixed}.weight", Target(self.mix_action, "weight", size, 0, 0, width)
        yield f"{mixed}.weight", Target(self.mix_time, "weight", size, 0, width, width)
        yield f"{mixed}.bias", Target(self.mix_time, "bias", (width,))
        yield from whole_linear("action_time_mlp_out", self.mix_out)

    def compute_condition(self, time: float) -> Tensor:
        geometry = self._geometry
        embedded = time_embedding(
            time, geometry.expert_width, geometry.min_period, geometry.max_period
        )
        return self.mix_time.forward(embedded[None].to(self.norm.weight.device))[0]

    def hidden(
        self, x: Tensor, conditions: Tensor, attention: PagedAttention, rotary: Rotary
    ) -> Tensor:
        mixed = self.mix_action.forward(self.action_in.forward(x.flatten(0, 1)))
        mixed = functional.silu(mixed.view(*x.shape[:2], -1) + conditions)
        hidden = self.mix_out.forward(mixed.flatten(0, 1)).to(self._dtype)
        for layer in self._layers():
            hidden = layer.forward(hidden, attention, rotary)
        return self.norm.forward(hidden).float().view(*x.shape[:2], -1)

    def velocity(self, hidden: Tensor) -> Tensor:
        return self.action_out.forward(hidden.flatten(0, 1)).view(*hidden.shape[:2], -1)

    def remember_state(self, state: Tensor, attention: PagedAttention, rotary: Rotary) -> None:
        hidden = self.state_in.forward(state).to(self._dtype)
        *layers, last = self._layers()
        for layer in layers:
            hidden = layer.forward(hidden, attention, rotary)
        last.remember(hidden, attention, rotary)

    def _layers(self) -> list[GemmaLayer]:
        return [layer for layer in self.layers if isinstance(layer, GemmaLayer)]
