"""Prompts as the tensors of a request: tokenized by the checkpoint, each on its own."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.models.cosmos3.prompt import (
    FOLDER,
    SYSTEM_IMAGE,
    SYSTEM_VIDEO,
    Format,
    PromptTokenizer,
)
from phalanx.processing.text.files import read_json

TextTensors = tuple[Tensor, Tensor]
"""Token ids and mask, int64 (1, S)."""


class Texts:
    """The tokenizer of a checkpoint, and whether its prompts have a system's turn."""

    def __init__(self, checkpoint: Path, tokenizer_dir: str | None) -> None:
        """Raises `CheckpointError` saying which file is missing."""
        given = None if tokenizer_dir is None else Path(tokenizer_dir)
        folder = checkpoint / FOLDER if given is None else given
        if not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"no tokenizer: {folder / 'tokenizer.json'} does not exist, and prompts are text; "
                "copy the model's tokenizer there, or name its folder by tokenizer_dir"
            )
        self._tokenizer = PromptTokenizer(checkpoint, given)
        index = read_json(checkpoint / "model_index.json", required=False)
        self._has_system = index.get("default_use_system_prompt", True) is not False

    def tensors(self, prompt: str, format: Format) -> TextTensors:
        """Of a whole text, whose turns are begun and ended."""
        system = SYSTEM_IMAGE if format.frames == 1 else SYSTEM_VIDEO
        ids = torch.tensor([self._tokenizer.encode(prompt, system if self._has_system else None)])
        return ids, torch.ones_like(ids)
