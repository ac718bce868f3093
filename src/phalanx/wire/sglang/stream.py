"""Renders the chunks of a `/generate` stream: everything so far, or only what is new."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from phalanx.schema.generate import GenerateDelta, GenerateOutput, TokenLogprobs, VersionSpan
from phalanx.wire.sglang.response import (
    Generation,
    LogprobTexts,
    MetaInfo,
    Rendering,
    Triple,
    add_input_logprobs,
)
from phalanx.wire.sse import data_line
from phalanx.wire.version_spans import extended


class StreamRenderer:
    """The stream of one prompt; `first_index` is the index of its first completion, None where
    the answer is a single one and chunks carry no index."""

    def __init__(
        self, rendering: Rendering, *, incremental: bool = False, first_index: int | None = None
    ) -> None:
        self._rendering = rendering
        self._incremental = incremental
        self._first_index = first_index
        self._texts = LogprobTexts(rendering.token_text)
        self._prompt_logprobs: TokenLogprobs | None = None
        self._completions = [_Progress() for _ in range(rendering.num_completions)]
        self._encoder = msgspec.json.Encoder()

    def chunk(self, delta: GenerateDelta, output: GenerateOutput | None, elapsed_s: float) -> bytes:
        """The event for `delta`, whose text is filled in; `output` is known for the last one."""
        rendering = self._rendering
        self._prompt_logprobs = delta.prompt_logprobs or self._prompt_logprobs
        progress = self._completions[delta.index]
        first = progress.num_tokens == 0
        shown = progress.extended(delta, self._texts, rendering, keep=not self._incremental)
        meta = MetaInfo(
            id=rendering.completion_id(delta.index),
            finish_reason=delta.finish_reason,
            prompt_tokens=len(rendering.prompt_ids),
            completion_tokens=progress.num_tokens,
        )
        if progress.versions:
            meta.weight_version = progress.versions[-1][0]
            meta.weight_versions = progress.versions
        if output is not None:
            meta.cached_tokens = output.cached_tokens
            meta.num_retractions = output.num_retractions
            meta.weight_version = output.weight_version
        if delta.finish_reason is not None:
            meta.e2e_latency = elapsed_s
        if rendering.logprobs:
            if first or not self._incremental:
                add_input_logprobs(meta, self._texts, self._prompt_logprobs, rendering)
            meta.output_token_logprobs = shown.values
            meta.output_token_logprobs_length = progress.num_logprobs
            if rendering.top:
                meta.output_top_logprobs = shown.top
            if rendering.selected:
                meta.output_token_ids_logprobs = shown.selected
        generation = Generation(
            text=shown.text,
            output_ids=shown.token_ids,
            meta_info=meta,
            prompt_token_ids=rendering.prompt_ids if rendering.prompt_token_ids else UNSET,
            index=UNSET if self._first_index is None else self._first_index + delta.index,
        )
        return data_line(self._encoder.encode(generation))


class _Shown:
    """What one chunk shows of a completion."""

    __slots__ = ("selected", "text", "token_ids", "top", "values")

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.values: list[Triple] = []
        self.top: list[list[Triple] | None] = []
        self.selected: list[list[Triple] | None] = []


class _Progress:
    """One completion so far."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_logprobs = 0
        self.versions: list[VersionSpan] = []
        self._kept = _Shown()

    def extended(
        self, delta: GenerateDelta, texts: LogprobTexts, rendering: Rendering, *, keep: bool
    ) -> _Shown:
        """Take `delta` in; what the next chunk shows: all with `keep`, else the delta alone."""
        shown = self._kept if keep else _Shown()
        shown.text += delta.text or ""
        shown.token_ids.extend(delta.token_ids)
        self.num_tokens += len(delta.token_ids)
        extended(self.versions, delta.weight_versions)
        if rendering.logprobs and delta.logprobs is not None:
            shown.values.extend(texts.values(delta.logprobs))
            self.num_logprobs += len(delta.logprobs.values)
            if rendering.top:
                shown.top.extend(texts.rows(delta.logprobs.top))
            if rendering.selected:
                shown.selected.extend(texts.rows(delta.logprobs.selected))
        return shown
