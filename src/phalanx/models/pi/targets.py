"""Places in a model that tensors of a checkpoint go to: a parameter, a part of one, or parts of several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from phalanx.layers.gemma import (
    AdaptiveGemmaLayer,
    GemmaAttention,
    GemmaLayer,
    GemmaMLP,
)
from phalanx.layers.linear import Linear


@dataclass(frozen=True)
class Target:
    """Rows from `start` on of a parameter, which take some columns of a tensor of `shape`."""

    owner: nn.Module
    attribute: str
    shape: tuple[int, ...]
    start: int = 0
    first_column: int = 0
    num_columns: int | None = None

    def place(self, tensor: Tensor) -> None:
        """Put `tensor` into its place; the parameter is a plain matrix."""
        parameter = self.owner.get_parameter(self.attribute)
        part = tensor
        if tensor.dim() > 1:
            flat = tensor.flatten(1)
            part = flat.narrow(1, self.first_column, self.num_columns or flat.shape[1])
        parameter.data[self.start : self.start + len(part)].copy_(part)


Named = Iterator[tuple[str, Target]]


def whole_linear(name: str, linear: Linear) -> Named:
    """A linear layer that a checkpoint has as it is."""
    yield f"{name}.weight", Target(linear, "weight", tuple(linear.weight.shape))
    if linear.bias is not None:
        yield f"{name}.bias", Target(linear, "bias", tuple(linear.bias.shape))


def stacked(names: dict[str, int], linear: Linear) -> Named:
    """A linear layer whose rows are those of several, by name with their numbers of rows."""
    start = 0
    for name, rows in names.items():
        yield f"{name}.weight", Target(linear, "weight", (rows, linear.weight.shape[1]), start)
        if linear.bias is not None:
            yield f"{name}.bias", Target(linear, "bias", (rows,), start)
        start += rows


def attention_targets(name: str, attention: GemmaAttention, q_rows: int, kv_rows: int) -> Named:
    rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    yield from stacked(
        {f"{name}.self_attn.{part}": count for part, count in rows.items()}, attention.qkv
    )
    yield from whole_linear(f"{name}.self_attn.o_proj", attention.out)


def mlp_targets(name: str, mlp: GemmaMLP) -> Named:
    inner = mlp.down.weight.shape[1]
    yield from stacked({f"{name}.mlp.gate_proj": inner, f"{name}.mlp.up_proj": inner}, mlp.gate_up)
    yield from whole_linear(f"{name}.mlp.down_proj", mlp.down)


def vector(name: str, owner: nn.Module, attribute: str = "weight") -> Named:
    yield (
        f"{name}.{attribute}",
        Target(owner, attribute, tuple(owner.get_parameter(attribute).shape)),
    )


def layer_targets(
    name: str, layer: GemmaLayer | AdaptiveGemmaLayer, q_rows: int, kv_rows: int
) -> Named:
    """A whole layer of Gemma, with plain norms or adaptive ones."""
    before, between = f"{name}.input_layernorm", f"{name}.post_attention_layernorm"
    if isinstance(layer, GemmaLayer):
        yield from vector(before, layer.input_norm)
        yield from vector(between, layer.post_norm)
    else:
        yield from whole_linear(f"{before}.dense", layer.input_norm.dense)
        yield from whole_linear(f"{between}.dense", layer.post_norm.dense)
    yield from attention_targets(name, layer.attention, q_rows, kv_rows)
    yield from mlp_targets(name, layer.mlp)


def layer_norm(name: str, norm: nn.Module) -> Named:
    yield from vector(name, norm)
    yield from vector(name, norm, "bias")
