"""Token counts of an answer."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from phalanx.schema.generate import GenerateOutput


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | None = None


def usage_of(outputs: Iterable[GenerateOutput]) -> Usage:
    """The counts over all prompts of a call."""
    prompt = completion = cached = 0
    for output in outputs:
        prompt += output.prompt_tokens
        cached += output.cached_tokens
        completion += sum(len(one.token_ids) for one in output.completions)
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=PromptDetails(cached) if cached else None,
    )
