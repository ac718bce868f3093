"""Reads a checkpoint's safetensors into a decoder, one tensor at a time, once all are known to fit.

Two layouts are accepted: Hugging Face's separate projections, and the fused one of converted
checkpoints. What a rank holds of a tensor is used as it lies in the mapped file where its dtype and
device fit and it lies there in one piece; else it is copied into place. So no second copy of the
weights ever exists, and a rank reads what it holds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.models.causal_lm.config import DecoderConfig
from phalanx.models.causal_lm.decoder import Decoder
from phalanx.models.causal_lm.weight_files import weight_files
from phalanx.models.causal_lm.weight_slots import Slot, Target

_FUSED = re.compile(r"\.(qkv_proj|gate_up_proj)\.")
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""The dtypes, by their names in safetensors, that are weights as they are."""


Given = tuple[Target, Callable[[], Tensor]]
"""Where a tensor goes, and how to have it."""


class Checkpoint:
    """The open weights files of a directory; tensors are mapped as they are asked for.

    Raises `CheckpointError` where a file is missing or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open = ExitStack()
        self._files: list[tuple[str, safe_open]] = []
        with self._open as undo:
            for path in weight_files(directory):
                with _readable(path):
                    file = undo.enter_context(safe_open(path, framework="pt"))
                    self._files += [(name, file) for name in file.keys()]  # noqa: SIM118
            self._open = undo.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def fitting(self, targets: Mapping[str, Target], config: DecoderConfig) -> list[Given]:
        """Where each tensor goes, and how to read it.

        Raises `CheckpointError` naming missing, unexpected and misshapen tensors before anything is
        read.
        """
        filled: Counter[Slot] = Counter()
        fitting: list[tuple[str, safe_open]] = []
        unexpected: list[str] = []
        misshapen: list[str] = []
        for name, file in self._files:
            if ignored(name, config):
                continue
            target = targets.get(name)
            if target is None or filled[target.slot] >= target.slot.shape[0]:
                unexpected.append(name)
                continue
            filled[target.slot] += target.rows
            fitting.append((name, file))
            part = file.get_slice(name)  # type: ignore[no-untyped-call]
            shape = tuple(part.get_shape())
            if shape != target.shape:
                misshapen.append(f"{name} of {shape} instead of {target.shape}")
            elif part.get_dtype() not in _FLOATS:
                misshapen.append(
                    f"{name} in {part.get_dtype()} instead of floats of 16 bits or more"
                )
        incomplete = {one.slot for one in targets.values() if filled[one.slot] < one.slot.shape[0]}
        missing = _missing(targets, {name for name, _ in fitting}, incomplete)
        if missing or unexpected or misshapen:
            raise CheckpointError(
                f"the weights in {self._directory} do not fit its config.json "
                f"({config.architecture}): missing {_listed(missing)}; "
                f"unexpected {_listed(unexpected)}; misshapen {_listed(misshapen)}"
            )
        return [(targets[name], partial(file.get_tensor, name)) for name, file in fitting]


def load_weights(
    decoder: Decoder,
    targets: Mapping[str, Target],
    directory: Path,
    device: torch.device,
    *,
    copy: bool = False,
) -> None:
    """Fill every parameter of `decoder`, whose places for tensors are `targets`.

    With `copy` nothing refers to the files afterwards, which may then be written to in place. Raises `CheckpointError` naming missing, unexpected and misshapen tensors, or a damaged file.
    """
    with Checkpoint(directory) as checkpoint:
        for target, read in checkpoint.fitting(targets, decoder.config):
            if target.place(read(), device) and copy:
                target.slot.own()
    if decoder.config.tied_head:
        decoder.tie_head()


def is_fused(name: str) -> bool:
    """Whether a tensor of this name is several others, which also have names of their own."""
    return bool(_FUSED.search(name))


def ignored(name: str, config: DecoderConfig) -> bool:
    """Whether a checkpoint may have a tensor of this name that the model does not need."""
    return bool(_IGNORED.search(name)) or (name == "lm_head.weight" and config.tied_head)


def _missing(targets: Mapping[str, Target], found: set[str], incomplete: set[Slot]) -> list[str]:
    """Tensors that the incomplete parameters lack; a fused one is named by its parts."""
    return [
        name
        for name, target in targets.items()
        if target.slot in incomplete and name not in found and not is_fused(name)
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete: {error}; download or convert it again"
        ) from error
