"""`POST /tokenize` and `/detokenize`, as vLLM and SGLang have them."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.errors import MalformedRequestError
from phalanx.wire.body import BodyDecoder


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """A text, or a conversation that is rendered first."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


class Tokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/tokenize`."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/detokenize`: vLLM's name for the text, and SGLang's."""

    prompt: str
    text: str


_TOKENIZE = BodyDecoder(TokenizeBody)
_DETOKENIZE = BodyDecoder(DetokenizeBody)


def parse_tokenize(body: bytes) -> TokenizeBody:
    parsed = _TOKENIZE.decode(body)
    if (parsed.prompt is None) == (parsed.messages is None):
        raise MalformedRequestError("give exactly one of prompt and messages", field="prompt")
    return parsed


def parse_detokenize(body: bytes) -> DetokenizeBody:
    return _DETOKENIZE.decode(body)
