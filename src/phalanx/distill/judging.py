"""Asks a judge for its words about a sample, at a gateway's `/generate` or as a chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from phalanx.client import AsyncRoleClient
from phalanx.client.roles.answers import JsonObject
from phalanx.distill.asking import Route, generate, sent
from phalanx.distill.rollout import Grading, Message
from phalanx.distill.sample import Sample
from phalanx.errors import RequestFailedError

_CHAT_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}


class _Response(msgspec.Struct, frozen=True):
    response: str


class _Words(msgspec.Struct, frozen=True):
    content: str


class _Choice(msgspec.Struct, frozen=True):
    message: _Words


class _Completion(msgspec.Struct, frozen=True):
    choices: tuple[_Choice]


async def verdict(judge: AsyncRoleClient, grading: Grading, sample: Sample) -> str:
    """What the judge says. A judge is asked again where its answer got lost: that does no harm."""
    route = Route(grading.model, grading.route_key)
    messages = grading.messages(sample)
    if judge.is_engine or judge.mode == "direct":
        answer = await _chat(judge, messages, route, grading)
    else:
        payload = {"messages": list(messages), "sampling_params": dict(grading.sampling)}
        answer = await generate(judge, payload, route, grading.asking, harmless=True)
    try:
        if "response" in answer:
            return msgspec.convert(answer, _Response).response
        return msgspec.convert(answer, _Completion).choices[0].message.content
    except msgspec.ValidationError as error:
        raise RequestFailedError(
            f"the judge's answer about sample {sample.sample_id!r} has no text: {error}"
        ) from error


async def _chat(
    judge: AsyncRoleClient, messages: Sequence[Message], route: Route, grading: Grading
) -> Mapping[str, object]:
    """For engines, which know no messages at `/generate`."""
    sampling = {_CHAT_NAMES.get(name, name): value for name, value in grading.sampling.items()}
    payload: JsonObject = {**sampling, "messages": list(messages)}

    async def send() -> JsonObject:
        return await judge.chat(
            payload,
            model=route.model,
            route_key=route.route_key,
            timeout_s=grading.asking.timeout_s,
        )

    return await sent(send, judge, route, grading.asking, harmless=True)
