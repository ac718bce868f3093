"""The judge's request of a caller who sends messages to `/generate`, and what it is answered."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from phalanx.errors import InvalidRequestError, MalformedRequestError, RequestFailedError
from phalanx.gateway.roles.routing_fields import RoutingFields
from phalanx.routing.roles.snapshot import RoleModel
from phalanx.schema.sampling import SamplingParams

_CHAT_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
"""Of sampling parameters that chat completions call otherwise."""
_GENERATE_NAMES = {
    **{chat: own for own, chat in _CHAT_NAMES.items()},
    "max_completion_tokens": "max_new_tokens",
}
_UNKNOWN = re.compile(r"unknown field `(.*?)`")


class JudgeRequest(RoutingFields, frozen=True, forbid_unknown_fields=True):
    """The body; all but `messages` may be left out."""

    messages: tuple[msgspec.Raw, ...] = ()
    sampling_params: dict[str, msgspec.Raw] | None = None
    chat_template_kwargs: dict[str, msgspec.Raw] | None = None
    rid: str | None = None
    stream: bool | None = None


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    message: _Message


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...]


class _Response(msgspec.Struct, frozen=True):
    response: str


_requests = msgspec.json.Decoder(JudgeRequest)
_completions = msgspec.json.Decoder(_Completion)


def parse_judge_request(body: bytes) -> JudgeRequest:
    """Raises `InvalidRequestError` for other fields, such as those of an engine's own request."""
    try:
        asked = _requests.decode(body)
    except msgspec.ValidationError as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown:
            raise _unknown_field(unknown[1]) from None
        raise MalformedRequestError(
            f"a request with messages has the fields {', '.join(JudgeRequest.__struct_fields__)}:"
            f" {error}; send text or input_ids without messages",
            field="messages",
        ) from None
    if asked.stream:
        raise InvalidRequestError(
            "messages at /generate are answered as one; stream at /v1/chat/completions",
            field="stream",
        )
    if not asked.messages:
        raise InvalidRequestError("messages is empty; send at least one", field="messages")
    sampling = asked.sampling_params or {}
    for name in sampling.keys() & JudgeRequest.__struct_fields__:
        raise InvalidRequestError(
            f"sampling_params.{name} is no sampling parameter; give {name} beside them",
            field="sampling_params",
        )
    if bytes(sampling.get("n", b"1")) not in (b"1", b"null"):
        raise InvalidRequestError(
            "sampling_params.n must be 1: there is one response", field="sampling_params"
        )
    return asked


def _unknown_field(name: str) -> MalformedRequestError:
    """Callers of chat completions send sampling parameters beside messages, by their names there."""
    here = _GENERATE_NAMES.get(name, name)
    if here in SamplingParams.__struct_fields__:
        hint = f"; give it as sampling_params.{here}"
    elif name in ("text", "input_ids"):
        hint = "; send it without messages"
    else:
        hint = f"; there are {', '.join(JudgeRequest.__struct_fields__)}"
    return MalformedRequestError(
        f"a request with messages has no field {name!r} at /generate{hint}", field=name
    )


def chat_request(asked: JudgeRequest, model: RoleModel) -> bytes:
    """The chat completion that `model` is asked for; the caller's values win over its defaults."""
    sampling = {**_in_chat(model.sampling_defaults), **_in_chat(asked.sampling_params or {})}
    template = {**model.chat_template_kwargs, **(asked.chat_template_kwargs or {})}
    body: dict[str, object] = {
        "model": model.served_model_name or model.name,
        "messages": asked.messages,
        **sampling,
        "stream": False,
    }
    if template:
        body["chat_template_kwargs"] = template
    if asked.rid is not None:
        body["rid"] = asked.rid
    return msgspec.json.encode(body)


def judge_response(completion: bytes) -> bytes:
    """`{"response": ...}`, of a chat completion. Raises `RequestFailedError` where it is none."""
    try:
        choices = _completions.decode(completion).choices
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestFailedError(f"it answered what is no chat completion: {error}") from None
    if len(choices) != 1:
        raise RequestFailedError(f"it answered {len(choices)} choices instead of one")
    return msgspec.json.encode(_Response(choices[0].message.content or ""))


def _in_chat(sampling: Mapping[str, object]) -> dict[str, object]:
    return {_CHAT_NAMES.get(name, name): value for name, value in sampling.items()}
