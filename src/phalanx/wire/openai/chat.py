"""Parses `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
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

ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One turn; fields beyond these reach the chat template as they are."""

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(SharedBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    # Accepted without effect: nothing here parses reasoning out of the text.
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    # Known and not supported.
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None
    functions: Any = None
    function_call: Any = None
    verbosity: Any = None


_UNSUPPORTED = (
    "audio",
    "modalities",
    "prediction",
    "web_search_options",
    "functions",
    "function_call",
    "verbosity",
    "tool_choice",
)
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "modalities": (["text"],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
    "tool_choice": ("none", "auto"),
}
_DECODER = BodyDecoder(ChatBody, [StreamOptions, ResponseFormat, JsonSchema, StructuredOutputs])


class ChatCall(msgspec.Struct, frozen=True, kw_only=True):
    """One chat completion. `max_tokens` None: as far as the context goes."""

    body: ChatBody
    messages: tuple[dict[str, Any], ...]
    variables: dict[str, Any]
    max_tokens: int | None
    logprobs: LogprobOptions | None
    extras: Extras
    include_usage: bool

    @property
    def stream(self) -> bool:
        return bool(self.body.stream)

    @property
    def continue_final_message(self) -> bool:
        return bool(self.body.continue_final_message)

    @property
    def add_generation_prompt(self) -> bool:
        return self.body.add_generation_prompt is not False

    @property
    def bootstraps(self) -> list[Bootstrap | None]:
        """How a router pairs each prompt."""
        return body_bootstraps(self.body, 1)

    @property
    def names(self) -> dict[str, str]:
        """The client's names for the schema's fields."""
        return _names(self.body)

    def sampling(self, max_new_tokens: int) -> SamplingParams:
        """The sampling, where the context leaves room for `max_new_tokens`."""
        limit = self.max_tokens if self.max_tokens is not None else max_new_tokens
        with in_clients_names(self.names):
            return sampling_params(self.body, limit)


def parse_chat(body: bytes) -> ChatCall:
    """The call in `body`; raises `MalformedRequestError` or `InvalidRequestError`."""
    parsed = _DECODER.decode(body)
    check_shared(parsed)
    fields = msgspec.structs.asdict(parsed)
    refuse_unsupported({name: fields[name] for name in _UNSUPPORTED}, _NEUTRAL)
    variables = dict(parsed.chat_template_kwargs or {})
    if parsed.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", parsed.reasoning_effort)
    limit = parsed.max_completion_tokens
    return ChatCall(
        body=parsed,
        messages=checked_messages(parsed.messages, continues=bool(parsed.continue_final_message)),
        variables=variables,
        max_tokens=parsed.max_tokens if limit is None else limit,
        logprobs=_logprobs(parsed),
        extras=extras(parsed),
        include_usage=include_usage(parsed),
    )


def _names(body: ChatBody) -> dict[str, str]:
    names = {
        **shared_names(body),
        "top_logprobs_num": "top_logprobs",
        "prompt": "messages",
        "input_ids": "messages",
    }
    if body.max_completion_tokens is not None:
        names["max_new_tokens"] = "max_completion_tokens"
    return names


def _logprobs(body: ChatBody) -> LogprobOptions | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs=true", field="top_logprobs")
        return None
    with in_clients_names(_names(body)):
        return LogprobOptions(top_k=body.top_logprobs or 0)


def checked_messages(
    given: Sequence[dict[str, Any]], *, continues: bool
) -> tuple[dict[str, Any], ...]:
    """The messages with their contents as one text each; the last one is to be continued, or not."""
    if not given:
        raise InvalidRequestError("messages is empty; give at least one message", field="messages")
    messages = tuple(_message(one, at) for at, one in enumerate(given))
    if continues and messages[-1]["role"] != "assistant":
        raise InvalidRequestError(
            "continue_final_message needs a last message of the role assistant",
            field="continue_final_message",
        )
    return messages


def _message(message: dict[str, Any], at: int) -> dict[str, Any]:
    """`message` with its content as one text."""
    where = f"messages[{at}]"
    try:
        known = msgspec.convert(message, ChatMessage)
    except msgspec.ValidationError as error:
        raise MalformedRequestError(f"{where}: {error}".replace("`", ""), field=where) from error
    if known.role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role={known.role!r}; allowed: {', '.join(ROLES)}", field=f"{where}.role"
        )
    content = known.content
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))
    return {**message, "content": "" if content is None else content}


def _part(part: dict[str, Any], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        refusal: str = part["refusal"]
        return refusal
    raise InvalidRequestError(
        f"{where} of type {kind!r} is not supported; give parts of type 'text' with a text",
        field=where,
    )
