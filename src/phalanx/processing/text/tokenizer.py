"""A Hugging Face tokenizer directory, read with the `tokenizers` library alone.

Text is decoded exactly as stored: no clean-up of spaces follows, so that decoding piece by piece
and decoding the whole agree.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from phalanx.clock import Clock
from phalanx.errors import CheckpointError, InvalidRequestError, MissingDependencyError
from phalanx.processing.text.byte_level import byte_level_bytes, is_byte_level
from phalanx.processing.text.chat_template import ChatTemplate
from phalanx.processing.text.files import read_json, read_text

try:
    from phalanx.processing.text.tokenizer_file import parsed_tokenizer
except ImportError as error:
    raise MissingDependencyError(
        "text needs the tokenizers library; install it with `pip install phalanx[llm]`"
    ) from error

TOKENIZER_FILE = "tokenizer.json"
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class TextTokenizer:
    """Encodes and decodes text; pickled by the directory it was read from."""

    def __init__(self, directory: str | Path, *, clock: Clock | None = None) -> None:
        """Read `directory`. Raises `CheckpointError` naming the file that is missing or broken."""
        self._directory = Path(directory)
        self._clock = clock
        source = _read_tokenizer(self._directory / TOKENIZER_FILE)
        self._tokenizer = parsed_tokenizer(source, self._directory / TOKENIZER_FILE)
        config = read_json(self._directory / "tokenizer_config.json", required=False)
        self._special_tokens = _special_tokens(
            {**read_json(self._directory / "special_tokens_map.json", required=False), **config}
        )
        self.eos_token_ids = self._read_eos_token_ids()
        self.chat_template = self._read_chat_template(config)
        self.byte_level = is_byte_level(source)
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.get_added_tokens_decoder().items()
            if token.special
        )

    @classmethod
    def from_directory(cls, directory: str | Path) -> TextTokenizer:
        """The tokenizer of a checkpoint directory."""
        return cls(directory)

    def __reduce__(self) -> tuple[Any, tuple[Path, Clock | None]]:
        return _rebuild, (self._directory, self._clock)

    eos_token_ids: tuple[int, ...]
    """Ids that end a generation, by the generation configuration, the model and the tokenizer."""
    chat_template: ChatTemplate | None
    """None where the checkpoint has none."""
    byte_level: bool
    """Whether a token stands for bytes, and text for the bytes of its tokens joined."""

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return self._special_ids

    @property
    def bos_token_id(self) -> int | None:
        token = self._special_tokens.get("bos_token")
        return None if token is None else self.token_id(token)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own; `eos_token_ids` also has those of the model."""
        token = self._special_tokens.get("eos_token")
        return None if token is None else self.token_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`, with the template's special tokens around it if wanted."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(self, prompt: str) -> list[int]:
        """The ids of a rendered chat prompt, which brings its own special tokens."""
        return self.encode(prompt, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; ids outside the vocabulary stand for nothing."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token, None where there is no such id."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def token_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's own spelling."""
        token_id: int | None = self._tokenizer.token_to_id(token)
        return token_id

    def token_text(self, token_id: int) -> str:
        """The text of one token on its own; a part of a character shows as U+FFFD."""
        return self.decode((token_id,), skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token on its own, which may be a part of a character."""
        token = self.token(token_id)
        if token is None:
            return b""
        if self.byte_level:
            return byte_level_bytes(token)
        byte = byte_fallback_value(token)
        return self.token_text(token_id).encode() if byte is None else bytes([byte])

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. Raises `InvalidRequestError` without a chat template."""
        if self.chat_template is None:
            raise InvalidRequestError(
                f"the checkpoint {self._directory.name!r} has no chat template; use the "
                "completions route with a prompt",
                field="messages",
            )
        return self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables=variables,
        )

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary spells it."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @functools.cached_property
    def byte_fallback_ids(self) -> frozenset[int]:
        """Ids of the tokens `<0x00>` to `<0xFF>`, where the vocabulary spells single bytes so."""
        ids = (self.token_id(f"<0x{byte:02X}>") for byte in range(256))
        return frozenset(token_id for token_id in ids if token_id is not None)

    def _read_eos_token_ids(self) -> tuple[int, ...]:
        found: dict[int, None] = {}
        for name in ("generation_config.json", "config.json"):
            value = read_json(self._directory / name, required=False).get("eos_token_id")
            for token_id in value if isinstance(value, list) else [value]:
                if isinstance(token_id, int):
                    found[token_id] = None
        token_id = self.eos_token_id
        if token_id is not None:
            found[token_id] = None
        return tuple(found)

    def _read_chat_template(self, config: Mapping[str, Any]) -> ChatTemplate | None:
        source = read_text(self._directory / "chat_template.jinja")
        if source is None:
            source = _template_source(config.get("chat_template"))
        if source is None:
            return None
        return ChatTemplate(source, self._special_tokens, self._clock)


def byte_fallback_value(token: str) -> int | None:
    """The byte that a token `<0xNN>` stands for."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return int(token[3:5], 16)
        except ValueError:
            return None
    return None


def _rebuild(directory: Path, clock: Clock | None) -> TextTokenizer:
    return TextTokenizer(directory, clock=clock)


def _read_tokenizer(path: Path) -> str:
    text = read_text(path)
    if text is None:
        raise CheckpointError(
            f"no tokenizer: {path} does not exist; a checkpoint directory needs {TOKENIZER_FILE} "
            "(slow tokenizers are not supported; save the fast one)"
        )
    return text


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _template_source(value: object) -> str | None:
    """A template given as such, or the default one of a list of named templates."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict)}
        source = named.get("default")
        return source if isinstance(source, str) else None
    return None
