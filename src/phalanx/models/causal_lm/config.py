"""The geometry of a decoder, read from a checkpoint's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from phalanx.errors import CheckpointError
from phalanx.layers.rotary import RopeParameters

_BIASED = {"Qwen2ForCausalLM"}
_QK_NORMED = {"Qwen3ForCausalLM"}
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class DecoderConfig:
    """One decoder-only transformer of the Llama family."""

    architecture: str
    model_type: str
    vocab_size: int
    width: int
    inner_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeParameters
    max_positions: int
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    eos_ids: frozenset[int]

    @classmethod
    def from_directory(cls, directory: Path) -> DecoderConfig:
        """Read and check `config.json` and `generation_config.json`."""
        raw = _read_json(directory / "config.json")
        architecture = _architecture(raw, directory)
        _refuse_unsupported(raw, architecture)
        width = _count(raw, "hidden_size")
        num_heads = _count(raw, "num_attention_heads")
        num_kv_heads = _count(raw, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads={num_heads} is not a multiple of "
                f"num_key_value_heads={num_kv_heads}"
            )
        bias = bool(raw.get("attention_bias", False))
        return cls(
            architecture=architecture,
            model_type=str(raw.get("model_type", "")),
            vocab_size=_count(raw, "vocab_size"),
            width=width,
            inner_width=_count(raw, "intermediate_size"),
            num_layers=_count(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=_count(raw, "head_dim", width // num_heads),
            norm_eps=_positive(raw, "rms_norm_eps", 1e-6),
            rope=RopeParameters.from_config(raw),
            max_positions=_count(raw, "max_position_embeddings"),
            tied_head=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=architecture in _BIASED or bias,
            output_bias=bias and architecture not in _BIASED,
            qk_norm=architecture in _QK_NORMED,
            eos_ids=_eos_ids(raw, directory),
        )

    @property
    def q_rows(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_dim


def _read_json(path: Path) -> dict[str, Any]:
    if not path.parent.is_dir():
        raise CheckpointError(f"checkpoint directory {str(path.parent)!r} does not exist")
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}; give a Hugging Face model directory"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _architecture(raw: Mapping[str, Any], directory: Path) -> str:
    names = raw.get("architectures")
    names = names if isinstance(names, list) else []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise CheckpointError(
        f"{directory}: architecture {', '.join(map(str, names)) or 'unnamed'} is not supported; "
        f"allowed: {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(raw: Mapping[str, Any], architecture: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(f"config.json: hidden_act={activation!r} is not supported; use silu")
    if raw.get("use_sliding_window"):
        raise CheckpointError("config.json: use_sliding_window=true is not supported")
    if raw.get("mlp_bias"):
        raise CheckpointError("config.json: mlp_bias=true is not supported")
    if raw.get("quantization_config"):
        raise CheckpointError(
            "config.json: quantized checkpoints are not supported; convert the weights first"
        )


def _count(raw: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = raw.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"config.json: {name}={value!r} must be a positive integer")
    return value


def _positive(raw: Mapping[str, Any], name: str, default: float) -> float:
    value = raw.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"config.json: {name}={value!r} must be a positive number")
    return float(value)


def _eos_ids(raw: Mapping[str, Any], directory: Path) -> frozenset[int]:
    """Every id that ends a text: those of the generation settings, else of the model."""
    path = directory / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    value = generation.get("eos_token_id")
    if value is None:
        value = raw.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    for token in ids:
        known = isinstance(token, int) and not isinstance(token, bool)
        if not known or not 0 <= token < _count(raw, "vocab_size"):
            raise CheckpointError(f"{directory}: eos_token_id={value!r} must be token ids")
    return frozenset(ids)
