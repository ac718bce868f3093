"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

from typing import Protocol

import msgspec

from phalanx.schema.generate import TokenLogprobs


class TokenTexts(Protocol):
    """What a token shows as."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct, frozen=True):
    """One token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatToken]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Columns of equal length; a prompt's first token has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


def chat_logprobs(logprobs: TokenLogprobs | None, texts: TokenTexts) -> ChatLogprobs | None:
    """The form of chat completions."""
    if logprobs is None:
        return None
    content: list[ChatToken] = []
    for at, (token_id, value) in enumerate(zip(logprobs.token_ids, logprobs.values, strict=True)):
        row = logprobs.top[at] if logprobs.top is not None else None
        top = [
            TopLogprob(texts.token_text(one), score, list(texts.token_bytes(one)))
            for score, one in row or ()
        ]
        data = list(texts.token_bytes(token_id))
        score = 0.0 if value is None else value
        content.append(ChatToken(texts.token_text(token_id), score, data, top))
    return ChatLogprobs(content)


def completion_logprobs(
    logprobs: TokenLogprobs | None, texts: TokenTexts, offset: int, *, with_own: bool = False
) -> CompletionLogprobs | None:
    """The form of completions; `offset`: characters before the first of these tokens.

    `with_own`: each token is among the likeliest at its position in any case, as vLLM has it.
    """
    if logprobs is None:
        return None
    tokens = [texts.token_text(one) for one in logprobs.token_ids]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    top: list[dict[str, float] | None] | None = None
    if logprobs.top is not None:
        top = [
            None if row is None else {texts.token_text(one): value for value, one in row}
            for row in logprobs.top
        ]
    if with_own:
        top = [
            {**(row or {}), token: value} if value is not None else row
            for token, value, row in zip(
                tokens, logprobs.values, top or [None] * len(tokens), strict=True
            )
        ]
    return CompletionLogprobs(tokens, list(logprobs.values), top, offsets)


def cut(logprobs: TokenLogprobs | None, num_top: int) -> TokenLogprobs | None:
    """These with at most `num_top` of the likeliest tokens at each position."""
    if logprobs is None or logprobs.top is None:
        return logprobs
    if num_top == 0:
        return msgspec.structs.replace(logprobs, top=None)
    top = tuple(None if row is None else row[:num_top] for row in logprobs.top)
    return msgspec.structs.replace(logprobs, top=top)
