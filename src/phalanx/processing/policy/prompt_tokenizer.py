"""The `tokenizers` library, set to pad and cut prompts as a policy's training did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from phalanx.errors import CheckpointError, InvalidRequestError, MissingDependencyError
from phalanx.processing.text.files import read_json, read_text

try:
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    from phalanx.processing.text.tokenizer_file import parsed_tokenizer
except ImportError as error:
    raise MissingDependencyError(
        "policies that take instructions need the tokenizers library; install it with "
        "`pip install phalanx[llm]`"
    ) from error

TOKENIZER_FILE = "tokenizer.json"
_ADDS_BEGINNING = "Gemma"
"""Tokenizer classes of this family begin each prompt with their `bos_token`, whatever else the file
says, unless `add_bos_token` is false."""


class PromptTokenizer:
    """Used by many threads at once; nothing of it changes after it was made."""

    def __init__(
        self,
        directory: Path,
        *,
        length: int,
        pad_to_length: bool = True,
        side: Literal["left", "right"] = "right",
        truncate: bool = True,
    ) -> None:
        """Raises `CheckpointError` naming the file that is missing or broken."""
        self._length = length
        self._pad_to_length = pad_to_length
        config = read_json(directory / "tokenizer_config.json", required=False)
        self._tokenizer = _read(directory / TOKENIZER_FILE)
        self._begin(_spelling(config.get("bos_token")), config)
        pad = _spelling(config.get("pad_token")) or "<pad>"
        pad_id = self._tokenizer.token_to_id(pad)
        self._tokenizer.enable_padding(
            direction=side,
            pad_id=0 if pad_id is None else pad_id,
            pad_token=pad,
            length=length if pad_to_length else None,
        )
        if truncate:
            self._tokenizer.enable_truncation(length)

    def encode(self, texts: Sequence[str]) -> tuple[list[list[int]], list[list[int]]]:
        """Ids and mask of each text, all of one length."""
        found = self._tokenizer.encode_batch(list(texts))
        for text, one in zip(texts, found, strict=True):
            if self._pad_to_length and len(one.ids) > self._length:
                raise InvalidRequestError(
                    f"the instruction makes a prompt of {len(one.ids)} tokens, and this policy "
                    f"takes {self._length}; shorten it: {text[:80]!r}",
                    field="instructions",
                )
        return [one.ids for one in found], [one.attention_mask for one in found]

    def _begin(self, bos: str | None, config: dict[str, object]) -> None:
        """Has every prompt begin with `bos` where its class says so and its file does not."""
        family = str(config.get("tokenizer_class", "")).startswith(_ADDS_BEGINNING)
        if bos is None or not config.get("add_bos_token", family):
            return
        token_id = self._tokenizer.token_to_id(bos)
        if token_id is None or self._tokenizer.encode("").ids[:1] == [token_id]:
            return
        self._tokenizer.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, token_id)]
        )


def _read(path: Path) -> Tokenizer:
    source = read_text(path)
    if source is None:
        raise CheckpointError(f"{path} does not exist; give the folder of a fast tokenizer")
    return parsed_tokenizer(source, path)


def _spelling(value: object) -> str | None:
    """A token as configurations name it: its text, or a mapping that has it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
