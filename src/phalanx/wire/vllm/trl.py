"""The bodies of TRL's own vLLM server (`trl vllm-serve`), whose paths end in a slash."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from phalanx.errors import InvalidRequestError
from phalanx.schema.generate import (
    Completion,
    GenerateOutput,
    GenerateRequest,
    LogprobOptions,
    TokenLogprobs,
)
from phalanx.schema.sampling import SamplingParams
from phalanx.wire.body import BodyDecoder, refuse_unsupported
from phalanx.wire.openai.chat import ChatCall, parse_chat
from phalanx.wire.openai.completions import CompletionCall, parse_completion

FORMATS = ("json", "binary")
Row = list[float]


class _Shared(msgspec.Struct, frozen=True, kw_only=True):
    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | UnsetType | None = UNSET
    structured_outputs_regex: str | None = None
    guided_decoding_regex: str | None = None
    truncate_prompt_tokens: int | None = None
    generation_kwargs: dict[str, Any] | None = None

    @property
    def nested(self) -> bool:
        """Newer clients ask for a number of log-probabilities and get lists of them; older ones
        get the token's own."""
        return self.logprobs is not UNSET

    @property
    def num_top(self) -> int | None:
        return 0 if self.logprobs is UNSET else self.logprobs

    def sampling(self) -> dict[str, Any]:
        """The same in the words of vLLM's OpenAI routes."""
        refuse_unsupported({"truncate_prompt_tokens": self.truncate_prompt_tokens}, {})
        regex = self.structured_outputs_regex or self.guided_decoding_regex
        fields: dict[str, Any] = {
            "n": self.n,
            "repetition_penalty": self.repetition_penalty,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "max_tokens": self.max_tokens,
            **(self.generation_kwargs or {}),
        }
        return {**fields, "structured_outputs": {"regex": regex}} if regex else fields


class GenerateBody(_Shared, frozen=True, kw_only=True):
    """`POST /generate/`."""

    prompts: list[str | list[int]]
    images: list[Any] | None = None

    def call(self) -> CompletionCall:
        refuse_unsupported({"images": [one for one in self.images or () if one]}, {})
        fields = {**self.sampling(), "prompt": self.prompts}
        if self.num_top is not None:
            fields["logprobs"] = self.num_top
        return parse_completion(msgspec.json.encode(fields))


class ChatBody(_Shared, frozen=True, kw_only=True):
    """`POST /chat/`."""

    messages: list[list[dict[str, Any]]]
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None

    def calls(self) -> list[ChatCall]:
        """One for each conversation."""
        fields = self.sampling()
        if self.num_top is not None:
            fields |= {"logprobs": True, "top_logprobs": self.num_top}
        fields |= {"chat_template_kwargs": self.chat_template_kwargs, "tools": self.tools}
        return [
            parse_chat(msgspec.json.encode({**fields, "messages": one})) for one in self.messages
        ]


class ScoreBody(msgspec.Struct, frozen=True, kw_only=True):
    """`POST /get_sequence_logprobs/`: of each sequence the tokens after its prompt are scored."""

    sequences: list[list[int]]
    prompt_lengths: list[int]
    top_logprobs: int = 100
    temperature: float = 1.0
    response_format: str = "json"

    def requests(self) -> list[GenerateRequest]:
        """One for each sequence, which generates nothing."""
        self._check()
        return [
            GenerateRequest(
                input_ids=tuple(sequence),
                sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
                logprobs=LogprobOptions(prompt_start=start, top_k=self.top_logprobs),
                detokenize=False,
            )
            for sequence, start in zip(self.sequences, self.prompt_lengths, strict=True)
        ]

    def _check(self) -> None:
        if len(self.sequences) != len(self.prompt_lengths):
            raise InvalidRequestError(
                f"sequences has {len(self.sequences)} and prompt_lengths "
                f"{len(self.prompt_lengths)} entries; give one length for each sequence",
                field="prompt_lengths",
            )
        for at, (one, start) in enumerate(zip(self.sequences, self.prompt_lengths, strict=True)):
            if not 0 <= start <= len(one):
                raise InvalidRequestError(
                    f"prompt_lengths[{at}]={start} must be from 0 to the {len(one)} tokens of its "
                    "sequence",
                    field="prompt_lengths",
                )
        if self.temperature != 1.0:
            raise InvalidRequestError(
                f"temperature={self.temperature}: log-probabilities are those of the model's own "
                "distribution; give 1.0 and scale them yourself",
                field="temperature",
            )
        if self.response_format not in FORMATS:
            raise InvalidRequestError(
                f"response_format={self.response_format!r}; allowed: {', '.join(FORMATS)}",
                field="response_format",
            )


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `/generate/` and `/chat/`: a row for each completion, a prompt for each prompt."""

    prompt_ids: list[tuple[int, ...]]
    completion_ids: list[tuple[int, ...]]
    logprobs: list[list[Row]] | list[Row] | None
    logprob_token_ids: list[list[list[int]]] | UnsetType | None = UNSET


_GENERATE = BodyDecoder(GenerateBody)
_CHAT = BodyDecoder(ChatBody)
_SCORE = BodyDecoder(ScoreBody)


def parse_generate(body: bytes) -> GenerateBody:
    return _GENERATE.decode(body)


def parse_chats(body: bytes) -> ChatBody:
    return _CHAT.decode(body)


def parse_score(body: bytes) -> ScoreBody:
    return _SCORE.decode(body)


def generated(
    prompts: Sequence[tuple[int, ...]], outputs: Sequence[GenerateOutput], wanted: _Shared
) -> bytes:
    """The answer to a call of either kind."""
    completions = [one for output in outputs for one in output.completions]
    rows = None if wanted.num_top is None else [_rows(one) for one in completions]
    flat = rows is not None and not wanted.nested
    answer = Generated(
        prompt_ids=list(prompts),
        completion_ids=[one.token_ids for one in completions],
        logprobs=(
            [_values(one) for one in completions]
            if flat
            else None
            if rows is None
            else [[values for _, values in row] for row in rows]
        ),
        logprob_token_ids=(
            UNSET if flat else None if rows is None else [[ids for ids, _ in row] for row in rows]
        ),
    )
    return msgspec.json.encode(answer)


def scored(wanted: ScoreBody, outputs: Sequence[GenerateOutput]) -> bytes:
    """The answer to `/get_sequence_logprobs/`."""
    scores = [one.prompt_logprobs or TokenLogprobs() for one in outputs]
    if wanted.response_format == "binary":
        return msgspec.json.encode(_arrays(scores, wanted.top_logprobs))
    rows = [[_ranked(one, at) for at in range(len(one.values))] for one in scores]
    return msgspec.json.encode(
        {
            "logprobs": [[values for _, values in row] for row in rows],
            "logprob_token_ids": [[ids for ids, _ in row] for row in rows],
        }
    )


def _values(completion: Completion) -> Row:
    scores = completion.logprobs or TokenLogprobs()
    return [math.nan if one is None else one for one in scores.values]


def _rows(completion: Completion) -> list[tuple[list[int], Row]]:
    scores = completion.logprobs or TokenLogprobs()
    return [_ranked(scores, at) for at in range(len(scores.values))]


def _ranked(scores: TokenLogprobs, at: int) -> tuple[list[int], Row]:
    """Ids and log-probabilities at a position, the likeliest first, the token's own in any case."""
    value = scores.values[at]
    if value is None:
        return [], []
    top = list((scores.top[at] if scores.top is not None else None) or ())
    own = scores.token_ids[at]
    if all(one != own for _, one in top):
        top.append((value, own))
    return [one for _, one in top], [score for score, _ in top]


def _arrays(scores: Sequence[TokenLogprobs], num_top: int) -> dict[str, object]:
    """Padded arrays of float32 and int32 in base64: the likeliest tokens, and the sequence's own."""
    longest = max((len(one.values) for one in scores), default=0)
    values = np.full((len(scores), longest, num_top), -np.inf, np.float32)
    ids = np.zeros((len(scores), longest, num_top), np.int32)
    own_values = np.full((len(scores), longest, 1), -np.inf, np.float32)
    own_ids = np.zeros((len(scores), longest, 1), np.int32)
    for row, one in enumerate(scores):
        for at, value in enumerate(one.values):
            own_ids[row, at, 0] = one.token_ids[at]
            if value is None:
                continue
            own_values[row, at, 0] = value
            top = ((one.top[at] if one.top is not None else None) or ())[:num_top]
            values[row, at, : len(top)] = [score for score, _ in top]
            ids[row, at, : len(top)] = [token for _, token in top]
    return {
        "logprobs_b64": _base64(values),
        "token_ids_b64": _base64(ids),
        "actual_logprobs_b64": _base64(own_values),
        "actual_token_ids_b64": _base64(own_ids),
        "shape": [len(scores), longest, num_top],
        "completion_lengths": [len(one.values) for one in scores],
    }


def _base64(array: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")
