"""Writes a Llama model in GGUF form as a Hugging Face directory in float32.

Weights are dequantized and written one tensor at a time, so memory stays that of the largest.
GGUF stores the rows of the query and key projections in the order of interleaved rotation; they
are put back into the order of Hugging Face, which rotates halves. The tokenizer is built with the
split into single digits that the model was trained with and that GGUF only names
(`tokenizer.ggml.pre = smollm`).
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from phalanx.errors import CheckpointError, MissingDependencyError
from phalanx.schema.checkpoints import Progress

if TYPE_CHECKING:
    from gguf import GGUFReader

Array = npt.NDArray[np.float32]

_CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of the special tokens."""


class Layout(enum.StrEnum):
    """Whether projections that share an input are stored as one tensor, or as in Hugging Face."""

    FUSED = "fused"
    SEPARATE = "separate"


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What the GGUF metadata says of a Llama model."""

    num_layers: int
    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rope_theta: float
    norm_epsilon: float
    vocab_size: int
    bos: int
    eos: int
    pad: int
    unk: int


@dataclass(frozen=True)
class _Tensor:
    """One tensor to write: its name, its shape, and the GGUF tensors whose rows it joins."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return 4 * int(np.prod(self.shape))


def convert(source: Path, directory: Path, layout: Layout, progress: Progress) -> None:
    """Write `source` into the existing, empty `directory`; `progress` counts bytes of weights."""
    reader = _open(source)
    facts = _facts(reader)
    tensors = _plan(facts, layout)
    parts = {tensor.name: tensor for tensor in reader.tensors}
    wanted = {part for tensor in tensors for part in tensor.parts}
    if wanted != set(parts):
        missing, unexpected = sorted(wanted - set(parts)), sorted(set(parts) - wanted)
        raise CheckpointError(f"{source}: missing tensors {missing}, unexpected {unexpected}")

    def load(name: str) -> Array:
        from gguf.quants import dequantize

        part = parts[name]
        rows = dequantize(part.data, part.tensor_type).astype(np.float32, copy=False)
        for suffix, num_heads in _ROTATED.items():
            if name.endswith(suffix):
                return _half_rotation_order(rows, num_heads(facts))
        return rows

    _write_safetensors(directory / "model.safetensors", tensors, load, progress)
    _write_json(directory / "config.json", _config(facts, layout))
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": facts.bos, "eos_token_id": facts.eos, "pad_token_id": facts.pad},
    )
    _write_tokenizer(reader, facts, directory)


_ROTATED: dict[str, Callable[[Facts], int]] = {
    "attn_q.weight": lambda facts: facts.num_heads,
    "attn_k.weight": lambda facts: facts.num_kv_heads,
}


def _open(source: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingDependencyError(
            "converting a GGUF model needs gguf; install it with: pip install 'phalanx[llm]'"
        ) from None
    try:
        return GGUFReader(str(source))
    except (ValueError, IndexError, OSError) as error:
        raise CheckpointError(f"{source} is not a readable GGUF file: {error}") from error


def _field(reader: GGUFReader, key: str) -> object:
    field = reader.get_field(key)
    if field is None:
        raise CheckpointError(f"the GGUF file has no metadata {key!r}")
    value: object = field.contents()
    return value


def _facts(reader: GGUFReader) -> Facts:
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"GGUF architecture {architecture!r} is not supported; allowed: llama"
        )
    pre_tokenizer = _field(reader, "tokenizer.ggml.pre")
    if pre_tokenizer != "smollm":
        raise CheckpointError(f"GGUF tokenizer {pre_tokenizer!r} is not supported; allowed: smollm")
    keys = {
        "num_layers": "llama.block_count",
        "width": "llama.embedding_length",
        "ffn_width": "llama.feed_forward_length",
        "num_heads": "llama.attention.head_count",
        "num_kv_heads": "llama.attention.head_count_kv",
        "head_dim": "llama.rope.dimension_count",
        "context_length": "llama.context_length",
        "rope_theta": "llama.rope.freq_base",
        "norm_epsilon": "llama.attention.layer_norm_rms_epsilon",
        "vocab_size": "llama.vocab_size",
        "bos": "tokenizer.ggml.bos_token_id",
        "eos": "tokenizer.ggml.eos_token_id",
        "pad": "tokenizer.ggml.padding_token_id",
        "unk": "tokenizer.ggml.unknown_token_id",
    }
    return msgspec.convert({name: _field(reader, key) for name, key in keys.items()}, Facts)


def _plan(facts: Facts, layout: Layout) -> list[_Tensor]:
    width, queries = facts.width, facts.num_heads * facts.head_dim
    keys = facts.num_kv_heads * facts.head_dim

    def layer(number: int) -> Iterator[_Tensor]:
        source, target = f"blk.{number}.", f"model.layers.{number}."

        def rows(name: str, sizes: dict[str, int]) -> Iterator[_Tensor]:
            """The projections in `sizes`, joined as `name` or, kept separate, each as its own."""
            stored = {key: f"{source}{_GGUF_NAMES[key]}.weight" for key in sizes}
            block = name.split(".")[0]
            if layout is Layout.FUSED:
                shape = (sum(sizes.values()), width)
                yield _Tensor(f"{target}{name}.weight", shape, tuple(stored.values()))
                return
            for key, size in sizes.items():
                yield _Tensor(f"{target}{block}.{key}.weight", (size, width), (stored[key],))

        def single(name: str, shape: tuple[int, ...]) -> _Tensor:
            part = _GGUF_NAMES[name.split(".")[-1]]
            return _Tensor(f"{target}{name}.weight", shape, (f"{source}{part}.weight",))

        yield single("input_layernorm", (width,))
        yield from rows("self_attn.qkv_proj", {"q_proj": queries, "k_proj": keys, "v_proj": keys})
        yield single("self_attn.o_proj", (width, queries))
        yield single("post_attention_layernorm", (width,))
        ffn_width = facts.ffn_width
        yield from rows("mlp.gate_up_proj", {"gate_proj": ffn_width, "up_proj": ffn_width})
        yield single("mlp.down_proj", (width, ffn_width))

    vocabulary = (facts.vocab_size, width)
    return [
        _Tensor("model.embed_tokens.weight", vocabulary, ("token_embd.weight",)),
        *(tensor for number in range(facts.num_layers) for tensor in layer(number)),
        _Tensor("model.norm.weight", (width,), ("output_norm.weight",)),
    ]


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def _half_rotation_order(rows: Array, num_heads: int) -> Array:
    """Rows of each head from (pair, element) to (element, pair) order."""
    pairs = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _write_safetensors(
    path: Path, tensors: list[_Tensor], load: Callable[[str], Array], progress: Progress
) -> None:
    """The safetensors format: header length (8 bytes), JSON header, data in the header's order."""
    total, offset = sum(tensor.num_bytes for tensor in tensors), 0
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        span = [offset, offset + tensor.num_bytes]
        header[tensor.name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": span}
        offset = span[1]
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    done = 0
    progress(done, total)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for tensor in tensors:
            parts = [load(part) for part in tensor.parts]
            shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
            if shape != tensor.shape:
                raise CheckpointError(f"{tensor.name} has shape {shape}, expected {tensor.shape}")
            for part in parts:
                file.write(part.astype("<f4", copy=False).data)
            done += tensor.num_bytes
            progress(done, total)
        file.flush()
        os.fsync(file.fileno())


def _config(facts: Facts, layout: Layout) -> dict[str, object]:
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": facts.width,
        "intermediate_size": facts.ffn_width,
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "max_position_embeddings": facts.context_length,
        "rms_norm_eps": facts.norm_epsilon,
        "rope_theta": facts.rope_theta,
        "vocab_size": facts.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": facts.bos,
        "eos_token_id": facts.eos,
        "pad_token_id": facts.pad,
    }
    if layout is Layout.FUSED:
        config["phalanx_layout"] = layout.value
    return config


def _write_tokenizer(reader: GGUFReader, facts: Facts, directory: Path) -> None:
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    except ImportError:
        raise MissingDependencyError(
            "writing a tokenizer needs tokenizers; install it with: pip install 'phalanx[llm]'"
        ) from None
    tokens = msgspec.convert(_field(reader, "tokenizer.ggml.tokens"), list[str])
    kinds = msgspec.convert(_field(reader, "tokenizer.ggml.token_type"), list[int])
    merges = msgspec.convert(_field(reader, "tokenizer.ggml.merges"), list[str])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ", 1) for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": facts.context_length,
        "clean_up_tokenization_spaces": False,
        "bos_token": tokens[facts.bos],
        "eos_token": tokens[facts.eos],
        "pad_token": tokens[facts.pad],
        "unk_token": tokens[facts.unk],
        "additional_special_tokens": special,
        "chat_template": _field(reader, "tokenizer.chat_template"),
    }
    _write_json(directory / "tokenizer_config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
