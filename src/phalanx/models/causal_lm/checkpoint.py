"""Reads a checkpoint's safetensors into a decoder, one tensor at a time.

Two layouts are accepted: Hugging Face's separate projections, and the fused one of converted
checkpoints. What a rank holds of a tensor is used as it lies in the mapped file where its dtype and
device fit and it lies there in one piece; else it is copied into place. So no second copy of the
weights ever exists, and a rank reads what it holds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.models.causal_lm.decoder import Decoder
from phalanx.models.causal_lm.weight_slots import Slot, Target, targets_of

_FUSED = re.compile(r"\.(qkv_proj|gate_up_proj)\.")
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


class _Index(msgspec.Struct):
    """Which file holds which tensor."""

    weight_map: dict[str, str]


def load_weights(decoder: Decoder, directory: Path, device: torch.device) -> None:
    """Fill every parameter of `decoder`.

    Raises `CheckpointError` naming missing, unexpected and misshapen tensors, or a damaged file.
    """
    targets = targets_of(decoder)
    filled: Counter[Slot] = Counter()
    found: set[str] = set()
    unexpected: list[str] = []
    misshapen: list[str] = []
    for name, tensor in _tensors(directory):
        if _IGNORED.search(name) or (name == "lm_head.weight" and decoder.config.tied_head):
            continue
        target = targets.get(name)
        if target is None or filled[target.slot] >= target.slot.shape[0]:
            unexpected.append(name)
            continue
        found.add(name)
        filled[target.slot] += target.rows
        if tuple(tensor.shape) == target.shape:
            target.place(tensor, device)
        else:
            misshapen.append(f"{name} of {tuple(tensor.shape)} instead of {target.shape}")
    incomplete = {one.slot for one in targets.values() if filled[one.slot] < one.slot.shape[0]}
    missing = _missing(targets, found, incomplete)
    if missing or unexpected or misshapen:
        raise CheckpointError(
            f"the weights in {directory} do not fit its config.json "
            f"({decoder.config.architecture}): missing {_listed(missing)}; "
            f"unexpected {_listed(unexpected)}; misshapen {_listed(misshapen)}"
        )
    if decoder.config.tied_head:
        decoder.tie_head()


def _missing(targets: Mapping[str, Target], found: set[str], incomplete: set[Slot]) -> list[str]:
    """Tensors that the incomplete parameters lack; a fused one is named by its parts."""
    return [
        name
        for name, target in targets.items()
        if target.slot in incomplete and name not in found and not _FUSED.search(name)
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


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
