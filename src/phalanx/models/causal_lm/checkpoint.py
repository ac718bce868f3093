"""Reads a checkpoint's safetensors into a decoder, one tensor at a time.

Two layouts are accepted: Hugging Face's separate projections, and the fused one of converted
checkpoints. A tensor that already has the parameter's dtype, shape and device is used as it lies
in the mapped file; others are copied into place, so no second copy of the weights ever exists.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from phalanx.errors import CheckpointError
from phalanx.models.causal_lm.config import DecoderConfig
from phalanx.models.causal_lm.decoder import Decoder

_FUSED = re.compile(r"\.(qkv_proj|gate_up_proj)\.")
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class _Target:
    """Rows `start` to `start + rows` of a parameter."""

    parameter: str
    start: int
    rows: int


class _Index(msgspec.Struct):
    """Which file holds which tensor."""

    weight_map: dict[str, str]


def load_weights(decoder: Decoder, directory: Path, device: torch.device) -> None:
    """Fill every parameter of `decoder`.

    Raises `CheckpointError` naming missing, unexpected and misshapen tensors, or a damaged file.
    """
    targets = _targets(decoder.config)
    parameters = dict(decoder.named_parameters())
    filled: Counter[str] = Counter()
    found: set[str] = set()
    unexpected: list[str] = []
    misshapen: list[str] = []
    for name, tensor in _tensors(directory):
        if _IGNORED.search(name) or (name == "lm_head.weight" and decoder.config.tied_head):
            continue
        target = targets.get(name)
        if target is None or filled[target.parameter] >= parameters[target.parameter].shape[0]:
            unexpected.append(name)
            continue
        found.add(name)
        filled[target.parameter] += target.rows
        shape = (target.rows, *parameters[target.parameter].shape[1:])
        if tuple(tensor.shape) == shape:
            _place(decoder, target, tensor, parameters, device)
        else:
            misshapen.append(f"{name} of {tuple(tensor.shape)} instead of {shape}")
    incomplete = {name for name in parameters if filled[name] < parameters[name].shape[0]}
    missing = _missing(targets, found, incomplete)
    if missing or unexpected or misshapen:
        raise CheckpointError(
            f"the weights in {directory} do not fit its config.json "
            f"({decoder.config.architecture}): missing {_listed(missing)}; "
            f"unexpected {_listed(unexpected)}; misshapen {_listed(misshapen)}"
        )
    if decoder.config.tied_head:
        decoder.head.tie(parameters["embedding.weight"])


def _missing(targets: Mapping[str, _Target], found: set[str], incomplete: set[str]) -> list[str]:
    """Tensors that the incomplete parameters lack; a fused one is named by its parts."""
    return [
        name
        for name, target in targets.items()
        if target.parameter in incomplete and name not in found and not _FUSED.search(name)
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def _targets(config: DecoderConfig) -> dict[str, _Target]:
    """Where each tensor of a checkpoint goes, by its name there."""
    found = {
        "model.embed_tokens.weight": _Target("embedding.weight", 0, config.vocab_size),
        "model.norm.weight": _Target("norm.weight", 0, config.width),
    }
    if not config.tied_head:
        found["lm_head.weight"] = _Target("head.weight", 0, config.vocab_size)
    for index in range(config.num_layers):
        for source, target in _layer_targets(config).items():
            found[f"model.layers.{index}.{source}"] = _Target(
                f"layers.{index}.{target.parameter}", target.start, target.rows
            )
    return found


def _layer_targets(config: DecoderConfig) -> dict[str, _Target]:
    q, kv, width, inner = config.q_rows, config.kv_rows, config.width, config.inner_width
    found = {
        "input_layernorm.weight": _Target("input_norm.weight", 0, width),
        "post_attention_layernorm.weight": _Target("post_norm.weight", 0, width),
        "self_attn.o_proj.weight": _Target("output.weight", 0, width),
        "mlp.gate_proj.weight": _Target("mlp.gate_up.weight", 0, inner),
        "mlp.up_proj.weight": _Target("mlp.gate_up.weight", inner, inner),
        "mlp.gate_up_proj.weight": _Target("mlp.gate_up.weight", 0, 2 * inner),
        "mlp.down_proj.weight": _Target("mlp.down.weight", 0, width),
    }
    kinds = ["weight", "bias"] if config.qkv_bias else ["weight"]
    for kind in kinds:
        found[f"self_attn.q_proj.{kind}"] = _Target(f"qkv.{kind}", 0, q)
        found[f"self_attn.k_proj.{kind}"] = _Target(f"qkv.{kind}", q, kv)
        found[f"self_attn.v_proj.{kind}"] = _Target(f"qkv.{kind}", q + kv, kv)
        found[f"self_attn.qkv_proj.{kind}"] = _Target(f"qkv.{kind}", 0, q + 2 * kv)
    if config.output_bias:
        found["self_attn.o_proj.bias"] = _Target("output.bias", 0, width)
    if config.qk_norm:
        found["self_attn.q_norm.weight"] = _Target("q_norm", 0, config.head_dim)
        found["self_attn.k_norm.weight"] = _Target("k_norm", 0, config.head_dim)
    return found


def _place(
    decoder: Decoder,
    target: _Target,
    tensor: Tensor,
    parameters: dict[str, nn.Parameter],
    device: torch.device,
) -> None:
    parameter = parameters[target.parameter]
    whole = target.rows == parameter.shape[0]
    if whole and tensor.dtype == parameter.dtype and device.type == "cpu":
        _assign(decoder, target.parameter, tensor, parameters)
        return
    if parameter.is_meta:
        _assign(decoder, target.parameter, torch.empty_like(parameter, device=device), parameters)
    parameters[target.parameter].data[target.start : target.start + target.rows].copy_(tensor)


def _assign(
    decoder: Decoder, name: str, tensor: Tensor, parameters: dict[str, nn.Parameter]
) -> None:
    owner, _, attribute = name.rpartition(".")
    parameter = nn.Parameter(tensor, requires_grad=False)
    module = decoder.get_submodule(owner)
    module.register_parameter(attribute, parameter)
    parameters[name] = parameter


def _tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    for path in _files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path} is damaged or incomplete: {error}; download or convert it again"
            ) from error


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            content = msgspec.json.decode(index.read_bytes(), type=_Index)
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(f"{index} is not an index of weights: {error}") from error
        files = [directory / name for name in sorted(set(content.weight_map.values()))]
    else:
        files = [directory / "model.safetensors"]
    for path in files:
        if not path.is_file():
            raise CheckpointError(
                f"weights file {path} does not exist; weights are read from model.safetensors, or "
                "from the files that model.safetensors.index.json names"
            )
    return files
