"""Requests and answers of SGLang's text routes, for `sglang_server`: what is asked for, as requests of
its scheduler, and what comes of them, in SGLang's words.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx.testing.sglang_scheduler import Ending, Running, SGLangScheduler

Answer = dict[str, Any]
_TOP = 4096
_NUMBERS = itertools.count()


class BadRequestError(Exception):
    """The request is refused with 400."""


@dataclass(frozen=True)
class Asked:
    """One prompt of `/generate` and what its answer holds."""

    rid: str
    prompt: Sequence[int]
    sampling: Mapping[str, Any]
    body: Mapping[str, Any]
    started_s: float

    def running(self) -> list[Running]:
        """One request for each of `n` answers."""
        n = int(self.sampling.get("n", 1))
        limit = self.sampling.get("max_new_tokens")
        return [
            Running(
                self.rid if n == 1 else f"{self.rid}_{index}",
                self.prompt,
                128 if limit is None else int(limit),
                frozenset(self.sampling.get("stop_token_ids") or ()),
            )
            for index in range(n)
        ]


def parse_generate(body: Mapping[str, Any], context_length: int) -> tuple[list[Asked], bool]:
    """The prompts, and whether they came as a batch."""
    given = [name for name in ("text", "input_ids", "input_embeds") if body.get(name) is not None]
    if len(given) != 1 or given[0] == "input_embeds":
        raise BadRequestError("Either text, input_ids or input_embeds should be provided.")
    value = body[given[0]]
    is_batch = isinstance(value, list) and (not value or isinstance(value[0], (str, list)))
    prompts = [_token_ids(one) for one in (value if is_batch else [value])]
    if not prompts or not all(prompts):
        raise BadRequestError("The prompt is empty.")
    rids, sampling = body.get("rid"), body.get("sampling_params") or {}
    now = time.monotonic()
    asked = [
        Asked(
            (rids[at] if isinstance(rids, list) else rids) or f"sglang-{next(_NUMBERS)}",
            prompt,
            sampling[at] if isinstance(sampling, list) else sampling,
            body,
            now,
        )
        for at, prompt in enumerate(prompts)
    ]
    for one in asked:
        _check(one, context_length)
    return asked, is_batch


def _token_ids(value: object) -> Sequence[int]:
    if isinstance(value, str):
        return tuple(value.encode())
    if isinstance(value, list) and all(type(one) is int for one in value):
        return tuple(value)
    raise BadRequestError("text must be a string, input_ids a list of integers")


def _check(asked: Asked, context_length: int) -> None:
    if not isinstance(asked.sampling, dict):
        raise BadRequestError("sampling_params must be an object")
    temperature = asked.sampling.get("temperature", 1.0)
    if not isinstance(temperature, (int, float)) or temperature < 0:
        raise BadRequestError(f"temperature must be non-negative, got {temperature}.")
    if len(asked.prompt) >= context_length:
        raise BadRequestError(
            f"The input ({len(asked.prompt)} tokens) is longer than the model's context length"
            f" ({context_length} tokens)."
        )
    start = asked.body.get("logprob_start_len")
    if isinstance(start, int) and start > len(asked.prompt):
        raise BadRequestError(
            f"logprob_start_len, ({start}) is higher than the number of input tokens"
            f" ({len(asked.prompt)}). Request with a lower logprob_start_len."
        )


def text_of(tokens: Sequence[int]) -> str:
    """A token below 256 is a byte."""
    return bytes(token if token < 256 else ord("?") for token in tokens).decode("utf-8", "replace")


def render(asked: Asked, request: Running, scheduler: SGLangScheduler, first: int = 0) -> Answer:
    """The answer so far, from token `first` on."""
    tokens = request.tokens[first:]
    answer: Answer = {
        "text": text_of(tokens),
        "output_ids": tokens,
        "meta_info": _meta(asked, request, scheduler, first),
    }
    if asked.body.get("return_prompt_token_ids"):
        answer["prompt_token_ids"] = list(asked.prompt)
    return answer


def _meta(asked: Asked, request: Running, scheduler: SGLangScheduler, first: int) -> Answer:
    meta: Answer = {
        "id": request.rid,
        "finish_reason": finish_reason(request),
        "prompt_tokens": len(asked.prompt),
        "weight_version": scheduler.version,
        "completion_tokens": len(request.tokens),
        "cached_tokens": 0,
        "reasoning_tokens": 0,
        "num_retractions": 0,
        "e2e_latency": time.monotonic() - asked.started_s,
    }
    if asked.body.get("return_logprob"):
        _add_logprobs(meta, asked, request, scheduler, first)
    if asked.body.get("return_routed_experts"):
        meta["routed_experts"] = "AAAA"
    return meta


def _add_logprobs(
    meta: Answer, asked: Asked, request: Running, scheduler: SGLangScheduler, first: int
) -> None:
    with_text = bool(asked.body.get("return_text_in_logprobs"))

    def triple(logprob: float | None, token: int) -> list[object]:
        return [logprob, token, text_of([token]) if with_text else None]

    start = asked.body.get("logprob_start_len")
    begin = len(asked.prompt) if start is None or start < 0 else start
    scores: list[float | None] = [*scheduler.scores(asked.prompt)[begin:]]
    if scores:
        scores[0] = None
    given = list(zip(scores, asked.prompt[begin:], strict=True))
    made = list(zip(request.logprobs[first:], request.tokens[first:], strict=True))
    meta["output_token_logprobs_length"] = len(request.tokens)
    meta["input_token_logprobs"] = [triple(*one) for one in given]
    meta["output_token_logprobs"] = [triple(*one) for one in made]
    count = int(asked.body.get("top_logprobs_num") or 0)
    chosen = asked.body.get("token_ids_logprob")

    def others(scored: Sequence[tuple[float | None, int]], ids: Sequence[int]) -> list[object]:
        return [
            None
            if score is None
            else [triple(score - 0.001 * at, one) for at, one in enumerate(ids)]
            for score, _ in scored
        ]

    if count > 0:
        top = [ord("a") + at for at in range(min(count, _TOP))]
        meta["input_top_logprobs"], meta["output_top_logprobs"] = (
            others(given, top),
            others(made, top),
        )
    if chosen is not None:
        meta["input_token_ids_logprobs"] = others(given, chosen)
        meta["output_token_ids_logprobs"] = others(made, chosen)


def finish_reason(request: Running) -> Answer | None:
    match request.ending:
        case None:
            return None
        case Ending.LENGTH:
            return {"type": "length", "length": request.max_new_tokens}
        case Ending.STOP:
            return {"type": "stop", "matched": request.tokens[-1]}
        case Ending.ABORT:
            return {"type": "abort", "message": "Abort in waiting queue", "status_code": None}


def parse_chat(body: Mapping[str, Any]) -> Asked:
    """The one prompt of a chat or of `/v1/completions`."""
    messages, prompt = body.get("messages"), body.get("prompt")
    if isinstance(messages, list) and messages:
        text = "".join(f"{one.get('role')}: {one.get('content')}\n" for one in messages)
    elif isinstance(prompt, str) and prompt:
        text = prompt
    else:
        raise BadRequestError("messages, or for completions a prompt, must be given")
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    return Asked(
        str(body.get("rid") or f"chatcmpl-{next(_NUMBERS)}"),
        tuple(text.encode()),
        {"max_new_tokens": limit, "n": 1},
        body,
        time.monotonic(),
    )


def render_chat(asked: Asked, request: Running, model: str, *, delta: str | None) -> Answer:
    """The whole answer, or (`delta`) one chunk of it."""
    reason = finish_reason(request)
    choice: Answer = {"index": 0, "finish_reason": None if reason is None else reason["type"]}
    if "messages" not in asked.body:
        choice["text"] = text_of(request.tokens) if delta is None else delta
    elif delta is None:
        choice["message"] = {"role": "assistant", "content": text_of(request.tokens)}
    else:
        choice["delta"] = {"role": "assistant", "content": delta}
    if asked.body.get("return_prompt_token_ids"):
        choice["prompt_token_ids"] = list(asked.prompt)
    if asked.body.get("return_token_ids"):
        choice["response_token_ids"] = list(request.tokens)
    kind = "chat.completion" if "messages" in asked.body else "text_completion"
    used = {"prompt_tokens": len(asked.prompt), "completion_tokens": len(request.tokens)}
    return {
        "id": asked.rid,
        "object": kind if delta is None else f"{kind}.chunk",
        "created": 0,
        "model": asked.body.get("model") or model,
        "choices": [choice],
        "usage": {**used, "total_tokens": sum(used.values())},
    }
