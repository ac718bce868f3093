"""The fields beyond OpenAI's that reinforcement learning reads from an answer."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from phalanx.schema.generate import FinishReason, GenerateOutput, Stop
from phalanx.wire.sglang.response import MetaInfo, Rendering, render_output


class SglExt(msgspec.Struct, kw_only=True):
    """Top-level `sglext`: ids of the prompt, and of each completion."""

    input_ids: list[tuple[int, ...]] | UnsetType = UNSET
    output_ids: list[tuple[int, ...]] | UnsetType = UNSET


def finish_word(reason: FinishReason | None) -> str | None:
    """OpenAI's word for why a completion ended."""
    return None if reason is None else type(reason).__name__.lower()


def matched_stop(reason: FinishReason | None) -> int | str | None:
    """What stopped a completion."""
    return reason.matched if isinstance(reason, Stop) else None


def meta_infos(output: GenerateOutput, rendering: Rendering, elapsed_s: float) -> list[MetaInfo]:
    """SGLang's `meta_info` of each completion."""
    return [one.meta_info for one in render_output(output, rendering, elapsed_s)]
