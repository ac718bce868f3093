"""One answer of `/generate` to a rollout, or the part of it up to where it was cut off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from phalanx.distill.sample import Span
from phalanx.errors import RequestFailedError


class _Finish(msgspec.Struct, frozen=True):
    type: str


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    value: float
    token: int
    text: str | None = None


class _Meta(msgspec.Struct, frozen=True):
    finish_reason: _Finish
    output_token_logprobs: list[_Entry]
    output_top_logprobs: list[list[_Entry] | None] | None = None
    weight_version: str | int | None = None
    weight_versions: list[tuple[str, int]] | None = None


class _Answer(msgspec.Struct, frozen=True):
    meta_info: _Meta
    output_ids: tuple[int, ...]
    text: str = ""
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class AnswerPart:
    """Tokens in a row with their log-probabilities, and the likeliest ones beside each."""

    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    top_ids: tuple[tuple[int, ...], ...]
    top_log_probs: tuple[tuple[float, ...], ...]
    weight_versions: tuple[Span, ...]
    finish_reason: str
    text: str
    prompt_ids: tuple[int, ...]

    @classmethod
    def read(cls, answer: Mapping[str, object], num_top: int) -> AnswerPart:
        """Raises `RequestFailedError` for an answer that lacks what was asked for."""
        try:
            read = msgspec.convert(answer, _Answer)
        except msgspec.ValidationError as error:
            raise RequestFailedError(
                f"the answer to a rollout cannot be used: {error}; it has to be one of /generate with"
                " return_logprob"
            ) from error
        meta, ids = read.meta_info, read.output_ids
        scored = tuple(entry.token for entry in meta.output_token_logprobs)
        if scored != ids:
            raise RequestFailedError(
                f"the answer's {len(ids)} output_ids and {len(scored)} output_token_logprobs are not"
                " of the same tokens"
            )
        tops = _tops(meta, len(ids), num_top)
        return cls(
            ids,
            tuple(entry.value for entry in meta.output_token_logprobs),
            tuple(tuple(entry.token for entry in row) for row in tops),
            tuple(tuple(entry.value for entry in row) for row in tops),
            _spans(meta, len(ids)),
            meta.finish_reason.type,
            read.text,
            read.prompt_token_ids,
        )


def joined_spans(parts: Sequence[AnswerPart]) -> tuple[Span, ...]:
    """The spans of all parts; neighbours of one version are one."""
    spans: list[Span] = []
    for version, count in (span for part in parts for span in part.weight_versions):
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + count)
        else:
            spans.append((version, count))
    return tuple(spans)


def _tops(meta: _Meta, length: int, num_top: int) -> list[list[_Entry]]:
    if not num_top:
        return []
    tops = [row for row in meta.output_top_logprobs or () if row is not None]
    if len(tops) != length or any(len(row) != num_top for row in tops):
        raise RequestFailedError(
            f"the answer lacks output_top_logprobs of {num_top} tokens at each of {length} positions"
        )
    return tops


def _spans(meta: _Meta, length: int) -> tuple[Span, ...]:
    if meta.weight_versions and sum(count for _, count in meta.weight_versions) == length:
        return tuple((str(version), count) for version, count in meta.weight_versions)
    if meta.weight_version is None or not length:
        return ()
    return ((str(meta.weight_version), length),)
