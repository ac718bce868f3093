"""Parses `POST /v1/completions`."""

from __future__ import annotations

from typing import Any

import msgspec

from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.schema.generate import LogprobOptions
from phalanx.schema.sampling import SamplingParams
from phalanx.wire.body import BodyDecoder, refuse_unsupported
from phalanx.wire.bootstrap import Bootstrap
from phalanx.wire.openai.names import in_clients_names
from phalanx.wire.openai.sampling import (
    Extras,
    SharedBody,
    StreamOptions,
    body_bootstraps,
    check_shared,
    extras,
    include_usage,
    sampling_params,
    shared_names,
)
from phalanx.wire.openai.structured import JsonSchema, ResponseFormat, StructuredOutputs

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of this route."""


class CompletionBody(SharedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | bool | None = None
    echo: bool | None = None
    best_of: int | None = None
    prompt_logprobs: int | bool | None = None
    # Known and not supported.
    suffix: Any = None
    prompt_embeds: Any = None


_DECODER = BodyDecoder(
    CompletionBody, [StreamOptions, ResponseFormat, JsonSchema, StructuredOutputs]
)


class CompletionCall(msgspec.Struct, frozen=True, kw_only=True):
    """One call: prompts as text or ids, each completed `n` times."""

    body: CompletionBody
    prompts: tuple[str | tuple[int, ...], ...]
    logprobs: LogprobOptions | None
    num_top: int | None
    """Likeliest tokens to show at each position; None without log-probabilities."""
    num_prompt_top: int | None
    """The same of vLLM's own field for the prompt."""
    extras: Extras
    include_usage: bool

    @property
    def stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def echo(self) -> bool:
        return bool(self.body.echo)

    @property
    def bootstraps(self) -> list[Bootstrap | None]:
        """How a router pairs each prompt."""
        return body_bootstraps(self.body, len(self.prompts))

    @property
    def names(self) -> dict[str, str]:
        """The client's names for the schema's fields."""
        return _names(self.body)

    def sampling(self) -> SamplingParams:
        limit = self.body.max_tokens
        with in_clients_names(self.names):
            return sampling_params(self.body, DEFAULT_MAX_TOKENS if limit is None else limit)


def parse_completion(body: bytes) -> CompletionCall:
    """The call in `body`; raises `MalformedRequestError` or `InvalidRequestError`."""
    parsed = _DECODER.decode(body)
    check_shared(parsed)
    refuse_unsupported({"suffix": parsed.suffix, "prompt_embeds": parsed.prompt_embeds}, {})
    if parsed.best_of is not None and parsed.best_of != (parsed.n or 1):
        raise InvalidRequestError(
            f"best_of={parsed.best_of} must equal n={parsed.n or 1}; completions are not ranked",
            field="best_of",
        )
    num_top, num_prompt_top = _count(parsed.logprobs), _count(parsed.prompt_logprobs)
    if num_prompt_top is not None and parsed.stream:
        raise InvalidRequestError(
            "prompt_logprobs are not available in a stream; send stream=false", field="stream"
        )
    return CompletionCall(
        body=parsed,
        prompts=_prompts(parsed.prompt),
        logprobs=_logprobs(parsed, num_top, num_prompt_top),
        num_top=num_top,
        num_prompt_top=num_prompt_top,
        extras=extras(parsed),
        include_usage=include_usage(parsed),
    )


def _names(body: CompletionBody) -> dict[str, str]:
    return {**shared_names(body), "top_logprobs_num": "logprobs", "input_ids": "prompt"}


def _count(wanted: int | bool | None) -> int | None:
    if wanted is None or wanted is False:
        return None
    return int(wanted)


def _logprobs(
    body: CompletionBody, num_top: int | None, num_prompt_top: int | None
) -> LogprobOptions | None:
    if num_top is None and num_prompt_top is None:
        return None
    names = _names(body)
    with in_clients_names(names):
        LogprobOptions(top_k=num_top or 0)
    with in_clients_names({**names, "top_logprobs_num": "prompt_logprobs"}):
        LogprobOptions(top_k=num_prompt_top or 0)
    of_prompt = num_prompt_top is not None or (num_top is not None and bool(body.echo))
    top = max(num_top or 0, num_prompt_top or 0)
    return LogprobOptions(prompt_start=0 if of_prompt else None, top_k=top)


def _prompts(
    prompt: str | list[str | int | list[int]],
) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise InvalidRequestError("prompt is empty; give a text or token ids", field="prompt")
    ids = [one for one in prompt if isinstance(one, int)]
    if len(ids) == len(prompt):
        return (tuple(ids),)
    if ids:
        raise MalformedRequestError(
            "prompt mixes token ids with prompts; give a text, a list of texts, a list of token "
            "ids, or a list of such lists",
            field="prompt",
        )
    return tuple(one if isinstance(one, str) else tuple(_ids(one)) for one in prompt)


def _ids(one: int | list[int]) -> list[int]:
    assert isinstance(one, list)
    return one
