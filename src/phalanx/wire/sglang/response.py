"""Renders outputs as SGLang's `/generate` answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from phalanx.schema.generate import (
    FinishReason,
    GenerateOutput,
    TokenLogprobs,
    TokenScore,
    VersionSpan,
)

Triple = tuple[float | None, int, str | None]
"""(log-probability, token id, text where it was asked for)."""


class MetaInfo(msgspec.Struct, kw_only=True):
    """`meta_info` of one completion. `weight_versions`: (version, tokens in a row) in their order.
    `dp_rank`: to its callers a server is one data-parallel rank, however many replicas it has; it is
    what `routed_dp_rank` may ask for and `/v1/loads` tells of.
    """

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    num_retractions: int = 0
    dp_rank: int = 0
    weight_version: str = "default"
    weight_versions: Sequence[VersionSpan] | UnsetType = UNSET
    e2e_latency: float | UnsetType = UNSET
    output_token_logprobs_length: int | UnsetType = UNSET
    input_token_logprobs: list[Triple] | UnsetType = UNSET
    output_token_logprobs: list[Triple] | UnsetType = UNSET
    input_top_logprobs: list[list[Triple] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Triple] | None] | UnsetType = UNSET
    input_token_ids_logprobs: list[list[Triple] | None] | UnsetType = UNSET
    output_token_ids_logprobs: list[list[Triple] | None] | UnsetType = UNSET


class Generation(msgspec.Struct, kw_only=True):
    """One completion, or one chunk of its stream."""

    text: str
    output_ids: list[int] | tuple[int, ...]
    meta_info: MetaInfo
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    index: int | UnsetType = UNSET


class Rendering(msgspec.Struct, frozen=True, kw_only=True):
    """What the rendering of one prompt's answer depends on beside the output itself.

    `token_text` is given where texts are wanted beside log-probabilities. `top` and `selected`
    say whether the most likely and the chosen tokens were asked for.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    num_completions: int = 1
    logprobs: bool = False
    top: bool = False
    selected: bool = False
    token_text: Callable[[int], str] | None = None
    prompt_token_ids: bool = False

    def completion_id(self, index: int) -> str:
        """The id that `meta_info` names."""
        return self.rid if self.num_completions == 1 else f"{self.rid}_{index}"


def render_output(
    output: GenerateOutput, rendering: Rendering, e2e_latency_s: float
) -> list[Generation]:
    """One answer for each completion of a prompt."""
    answers: list[Generation] = []
    for index, completion in enumerate(output.completions):
        meta = MetaInfo(
            id=rendering.completion_id(index),
            finish_reason=completion.finish_reason,
            prompt_tokens=output.prompt_tokens,
            completion_tokens=len(completion.token_ids),
            cached_tokens=output.cached_tokens,
            num_retractions=output.num_retractions,
            weight_version=output.weight_version,
            weight_versions=completion.weight_versions or UNSET,
            e2e_latency=e2e_latency_s,
        )
        if rendering.logprobs:
            texts = LogprobTexts(rendering.token_text)
            add_input_logprobs(meta, texts, output.prompt_logprobs, rendering)
            add_output_logprobs(meta, texts, completion.logprobs, rendering)
        answers.append(
            Generation(
                text=completion.text or "",
                output_ids=completion.token_ids,
                meta_info=meta,
                prompt_token_ids=rendering.prompt_ids if rendering.prompt_token_ids else UNSET,
            )
        )
    return answers


class LogprobTexts:
    """Turns log-probabilities into SGLang's triples."""

    def __init__(self, token_text: Callable[[int], str] | None) -> None:
        self._token_text = token_text

    def values(self, logprobs: TokenLogprobs) -> list[Triple]:
        """The triples of the tokens themselves."""
        pairs = zip(logprobs.values, logprobs.token_ids, strict=True)
        return [(value, token_id, self._text(token_id)) for value, token_id in pairs]

    def rows(
        self, positions: Iterable[tuple[TokenScore, ...] | None] | None
    ) -> list[list[Triple] | None]:
        """The triples of further tokens at each position."""
        return [
            None if row is None else [(value, one, self._text(one)) for value, one in row]
            for row in positions or ()
        ]

    def _text(self, token_id: int) -> str | None:
        return None if self._token_text is None else self._token_text(token_id)


def add_input_logprobs(
    meta: MetaInfo, texts: LogprobTexts, logprobs: TokenLogprobs | None, rendering: Rendering
) -> None:
    """Fill in the prompt's part; empty lists where none was asked for.

    The first entry has no values wherever the part begins: SGLang's clients drop it unread.
    """
    prompt = _without_first(logprobs) if logprobs is not None else TokenLogprobs()
    meta.input_token_logprobs = texts.values(prompt)
    if rendering.top:
        meta.input_top_logprobs = texts.rows(prompt.top)
    if rendering.selected:
        meta.input_token_ids_logprobs = texts.rows(prompt.selected)


def _without_first(prompt: TokenLogprobs) -> TokenLogprobs:
    if not prompt.values:
        return prompt
    return TokenLogprobs(
        token_ids=prompt.token_ids,
        values=(None, *prompt.values[1:]),
        top=None if prompt.top is None else (None, *prompt.top[1:]),
        selected=None if prompt.selected is None else (None, *prompt.selected[1:]),
    )


def add_output_logprobs(
    meta: MetaInfo, texts: LogprobTexts, logprobs: TokenLogprobs | None, rendering: Rendering
) -> None:
    """Fill in the output's part."""
    output = logprobs if logprobs is not None else TokenLogprobs()
    meta.output_token_logprobs = texts.values(output)
    meta.output_token_logprobs_length = len(output.values)
    if rendering.top:
        meta.output_top_logprobs = texts.rows(output.top)
    if rendering.selected:
        meta.output_token_ids_logprobs = texts.rows(output.selected)
