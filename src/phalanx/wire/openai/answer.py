"""What the renderers of both routes know about the answer they write."""

from __future__ import annotations

import msgspec

from phalanx.schema.generate import GenerateOutput, LogprobOptions
from phalanx.wire.openai.extras import SglExt
from phalanx.wire.openai.logprobs import TokenTexts
from phalanx.wire.openai.sampling import Extras
from phalanx.wire.sglang.response import Rendering


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What is the same in every chunk of an answer, and what the call wants in it."""

    id: str
    model: str
    created: int
    texts: TokenTexts
    logprobs: LogprobOptions | None = None
    extras: Extras = Extras()
    include_usage: bool = False


class PromptAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to one prompt, with its texts filled in."""

    prompt_ids: tuple[int, ...]
    output: GenerateOutput
    elapsed_s: float = 0.0


def rendering_of(header: Header, answer: PromptAnswer) -> Rendering:
    """How `meta_info` of this answer is written."""
    options = header.logprobs
    return Rendering(
        rid=header.id,
        prompt_ids=answer.prompt_ids,
        num_completions=len(answer.output.completions),
        logprobs=options is not None,
        top=options is not None and options.top_k > 0,
    )


def sglext_of(header: Header, answers: list[PromptAnswer]) -> SglExt | msgspec.UnsetType:
    """`sglext`, where the call wants it."""
    wanted = header.extras
    if not (wanted.sglext_input_ids or wanted.sglext_output_ids):
        return msgspec.UNSET
    extension = SglExt()
    if wanted.sglext_input_ids:
        extension.input_ids = [answer.prompt_ids for answer in answers]
    if wanted.sglext_output_ids:
        extension.output_ids = [
            one.token_ids for answer in answers for one in answer.output.completions
        ]
    return extension
