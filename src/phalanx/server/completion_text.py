"""The text of completions whose tokens come from the engine without it."""

from __future__ import annotations

import msgspec

from phalanx.processing.text import IncrementalDetokenizer, TextTokenizer
from phalanx.schema.generate import (
    Completion,
    FinishReason,
    GenerateDelta,
    GenerateOutput,
    GenerateRequest,
    Stop,
)


def with_texts(
    output: GenerateOutput, request: GenerateRequest, tokenizer: TextTokenizer
) -> GenerateOutput:
    """`output` with the text of each completion that has none."""
    if request.detokenize:
        return output
    completions = tuple(_with_text(one, request, tokenizer) for one in output.completions)
    return msgspec.structs.replace(output, completions=completions)


def _with_text(
    completion: Completion, request: GenerateRequest, tokenizer: TextTokenizer
) -> Completion:
    ids = shown_ids(completion.token_ids, completion.finish_reason, request)
    text = tokenizer.decode(ids, skip_special_tokens=request.sampling.skip_special_tokens)
    return msgspec.structs.replace(completion, text=text)


def shown_ids(
    ids: tuple[int, ...], reason: FinishReason | None, request: GenerateRequest
) -> tuple[int, ...]:
    """The tokens that become text: a stop token at the end does not, unless it is wanted."""
    stopped = isinstance(reason, Stop) and isinstance(reason.matched, int)
    if stopped and ids and not request.sampling.no_stop_trim:
        return ids[:-1]
    return ids


class StreamTexts:
    """Gives each delta of one request its text."""

    def __init__(self, request: GenerateRequest, tokenizer: TextTokenizer) -> None:
        self._request = request
        skip = request.sampling.skip_special_tokens
        self._detokenizers = [
            IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
            for _ in range(0 if request.detokenize else request.sampling.n)
        ]

    def with_text(self, delta: GenerateDelta) -> GenerateDelta:
        """`delta` with the text that its tokens complete."""
        if self._request.detokenize:
            return delta
        detokenizer = self._detokenizers[delta.index]
        reason = delta.finish_reason
        text = detokenizer.feed(shown_ids(delta.token_ids, reason, self._request))
        if reason is not None:
            text += detokenizer.finish()
        return msgspec.structs.replace(delta, text=text)
