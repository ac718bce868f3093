from pathlib import Path

import pytest

from phalanx.processing.text import TextTokenizer
from phalanx.testing.tiny_tokenizer import (
    write_byte_fallback_tokenizer,
    write_byte_level_tokenizer,
    write_word_piece_tokenizer,
)

WRITERS = {
    "byte_level": write_byte_level_tokenizer,
    "byte_fallback": write_byte_fallback_tokenizer,
    "word_piece": write_word_piece_tokenizer,
}


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    return {kind: TextTokenizer(write(root / kind)) for kind, write in WRITERS.items()}


@pytest.fixture(scope="session")
def byte_level(tokenizers: dict[str, TextTokenizer]) -> TextTokenizer:
    return tokenizers["byte_level"]
