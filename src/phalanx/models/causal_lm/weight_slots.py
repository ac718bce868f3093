"""Where each tensor of a checkpoint goes: by its name there, the parameter that holds it or a part.

A parameter may take several tensors, such as the three projections that it fuses, and over several
ranks each holds some of the whole's rows or columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from phalanx.layers.linear import Linear
from phalanx.models.causal_lm.config import DecoderConfig
from phalanx.models.causal_lm.decoder import Cut, Decoder, DecoderLayer
from phalanx.parallel.sharding import Span


@dataclass(frozen=True, eq=False)
class Slot:
    """A parameter of this rank's decoder, and the part that it holds of a whole of `shape`.

    That part is the spans of `rows`, one below the other, each of `columns` (None for a vector).
    Without rows the rank has no such parameter.
    """

    owner: nn.Module
    attribute: str
    shape: tuple[int, ...]
    rows: tuple[Span, ...]
    columns: Span | None = None

    @property
    def linear(self) -> Linear | None:
        """The layer whose matrix this is, which may be packed."""
        owner = self.owner
        return owner if isinstance(owner, Linear) and self.attribute == "weight" else None

    @property
    def is_here(self) -> bool:
        """Whether this rank holds some of it."""
        return bool(self.rows)

    def value(self) -> Tensor:
        """What this rank holds, as a plain tensor; of a packed matrix a copy."""
        linear = self.linear
        if linear is not None:
            return linear.dense_weight()
        return self.owner.get_parameter(self.attribute).detach()

    def drop(self) -> None:
        """Give the memory up; the parameter is an empty shell on `meta` then."""
        if not self.is_here:
            return
        linear = self.linear
        if linear is not None:
            linear.drop_weight()
        else:
            parameter = self.owner.get_parameter(self.attribute)
            self._assign(torch.empty_like(parameter, device="meta"))

    def own(self) -> None:
        """Have the parameter in memory of its own."""
        parameter = self.owner.get_parameter(self.attribute)
        if not parameter.is_meta:
            self._assign(parameter.detach().clone())

    def fill(self, start: int, part: Tensor, device: torch.device) -> bool:
        """Put `part` into the parameter from its row `start` on; True where it is now `part` itself,
        which is all of it.
        """
        parameter = self.owner.get_parameter(self.attribute)
        fits = part.shape == parameter.shape and part.dtype == parameter.dtype
        on_cpu = device.type == "cpu" and part.device.type == "cpu"
        if fits and on_cpu and part.is_contiguous():
            self._assign(part)
            return True
        if parameter.is_meta:
            parameter = self._assign(torch.empty_like(parameter, device=device))
        parameter.data[start : start + part.shape[0]].copy_(part)
        return False

    def _assign(self, tensor: Tensor) -> nn.Parameter:
        parameter = nn.Parameter(tensor, requires_grad=False)
        self.owner.register_parameter(self.attribute, parameter)
        return parameter


@dataclass(frozen=True)
class Target:
    """Rows `start` to `start + rows` of the whole that a slot holds a part of."""

    slot: Slot
    start: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.slot.shape[1:])

    def place(self, tensor: Tensor, device: torch.device) -> bool:
        """Put what this rank holds of `tensor` into its slot; True where that refers to it now."""
        columns = self.slot.columns
        lent = False
        for start, span in self.held():
            part = tensor[span.slice]
            lent |= self.slot.fill(
                start, part if columns is None else part[:, columns.slice], device
            )
        return lent

    def held(self) -> Iterator[tuple[int, Span]]:
        """The parts of the tensor that this rank holds, each with its first row in the slot."""
        at = 0
        for span in self.slot.rows:
            first = max(span.start, self.start)
            stop = min(span.stop, self.start + self.rows)
            if first < stop:
                yield at + first - span.start, Span(first, stop).shifted(-self.start)
            at += span.size


def targets_of(decoder: Decoder) -> dict[str, Target]:
    """Where each tensor of a checkpoint goes, by its name there."""
    config, cuts = decoder.config, decoder.cuts
    table = (config.vocab_size, config.width)
    found = {
        "model.embed_tokens.weight": _whole(_weight(cuts["embedding"], table)),
        "model.norm.weight": _whole(_vector(decoder.norm, "weight", config.width)),
    }
    if not config.tied_head:
        found["lm_head.weight"] = _whole(_weight(cuts["head"], table))
    for index, layer in enumerate(decoder.blocks()):
        for name, target in _layer_targets(layer, config):
            found[f"model.layers.{index}.{name}"] = target
    return found


def _layer_targets(layer: DecoderLayer, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    q, kv, width, inner = config.q_rows, config.kv_rows, config.width, config.inner_width
    cuts = layer.cuts
    yield "input_layernorm.weight", _whole(_vector(layer.input_norm, "weight", width))
    yield "post_attention_layernorm.weight", _whole(_vector(layer.post_norm, "weight", width))
    yield "self_attn.o_proj.weight", _whole(_weight(cuts["output"], (width, q)))
    gate_up = _weight(cuts["gate_up"], (2 * inner, width))
    yield "mlp.gate_proj.weight", Target(gate_up, 0, inner)
    yield "mlp.up_proj.weight", Target(gate_up, inner, inner)
    yield "mlp.gate_up_proj.weight", _whole(gate_up)
    yield "mlp.down_proj.weight", _whole(_weight(cuts["down"], (width, inner)))
    qkv = {"weight": _weight(cuts["qkv"], (q + 2 * kv, width))}
    if config.qkv_bias:
        qkv["bias"] = _bias(cuts["qkv"], q + 2 * kv)
    for kind, slot in qkv.items():
        yield f"self_attn.q_proj.{kind}", Target(slot, 0, q)
        yield f"self_attn.k_proj.{kind}", Target(slot, q, kv)
        yield f"self_attn.v_proj.{kind}", Target(slot, q + kv, kv)
        yield f"self_attn.qkv_proj.{kind}", _whole(slot)
    if config.output_bias:
        yield "self_attn.o_proj.bias", _whole(_bias(cuts["output"], width))
    if config.qk_norm:
        yield "self_attn.q_norm.weight", _whole(_vector(layer, "q_norm", config.head_dim))
        yield "self_attn.k_norm.weight", _whole(_vector(layer, "k_norm", config.head_dim))


def _whole(slot: Slot) -> Target:
    return Target(slot, 0, slot.shape[0])


def _weight(cut: Cut, shape: tuple[int, int]) -> Slot:
    return Slot(cut.local, "weight", shape, _joined(cut.shard.rows), cut.shard.columns)


def _bias(cut: Cut, rows: int) -> Slot:
    held = _joined(cut.shard.rows) if cut.shard.holds_bias else ()
    return Slot(cut.local, "bias", (rows,), held)


def _vector(owner: nn.Module, attribute: str, rows: int) -> Slot:
    return Slot(owner, attribute, (rows,), (Span(0, rows),))


def _joined(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The same rows in as few spans as possible, so that a part that lies whole is found whole."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            span = Span(joined.pop().start, span.stop)
        joined.append(span)
    return tuple(joined)
