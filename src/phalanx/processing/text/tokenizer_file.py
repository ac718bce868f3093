"""A `tokenizer.json`, as the `tokenizers` library reads it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from phalanx.errors import CheckpointError


def parsed_tokenizer(source: str, path: Path) -> Tokenizer:
    """The tokenizer that `source`, read from `path`, describes; it neither cuts nor pads."""
    try:
        tokenizer = Tokenizer.from_str(source)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{path} is not a tokenizer file: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
