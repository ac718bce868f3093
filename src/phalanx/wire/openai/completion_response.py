"""Renders completions, whole and as chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from phalanx.schema.generate import GenerateDelta, GenerateOutput, TokenLogprobs, VersionSpan
from phalanx.wire.openai.answer import Header, PromptAnswer, rendering_of, sglext_of
from phalanx.wire.openai.extras import SglExt, finish_word, matched_stop, meta_infos
from phalanx.wire.openai.logprobs import CompletionLogprobs, completion_logprobs, cut
from phalanx.wire.openai.prompt_logprobs import PromptLogprobs, prompt_logprobs
from phalanx.wire.openai.usage import Usage, usage_of
from phalanx.wire.sglang.response import MetaInfo
from phalanx.wire.sse import data_line
from phalanx.wire.version_spans import extended


class _Choice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    finish_reason: str | None
    matched_stop: int | str | UnsetType | None = UNSET
    logprobs: CompletionLogprobs | None = None
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    response_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    meta_info: MetaInfo | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    weight_versions: Sequence[VersionSpan] | UnsetType = UNSET


class CompletionShows(msgspec.Struct, frozen=True, kw_only=True):
    """What of log-probabilities an answer shows: how many of the likeliest tokens at each position
    of the output (with `echo` of the prompt too), and of the prompt in vLLM's form; None for no
    log-probabilities. `with_own`: each token is among the likeliest in any case.
    """

    num_top: int | None = None
    num_prompt_top: int | None = None
    echo: bool = False
    with_own: bool = False


class _Completion(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    object: str = "text_completion"
    usage: Usage | UnsetType | None = UNSET
    sglext: SglExt | UnsetType = UNSET


class CompletionRenderer:
    """Writes the answer of one call; `echoes` holds the prompts' texts where they are wanted."""

    def __init__(
        self,
        header: Header,
        shows: CompletionShows,
        *,
        num_completions: int,
        echoes: Sequence[str] | None = None,
    ) -> None:
        self._header = header
        self._shows = shows
        self._num_completions = num_completions
        self._echoes = echoes
        self._encoder = msgspec.json.Encoder()
        self._num_characters: dict[int, int] = {}
        self._versions: dict[int, list[VersionSpan]] = {}

    def whole(self, answers: list[PromptAnswer]) -> bytes:
        """The body of an answer that is not streamed."""
        choices: list[_Choice] = []
        for prompt, answer in enumerate(answers):
            choices += self._choices(prompt, answer)
        return self._encode(
            choices,
            usage_of([answer.output for answer in answers]),
            sglext_of(self._header, answers),
        )

    def chunk(self, prompt: int, delta: GenerateDelta) -> bytes:
        """The event for `delta` of the given prompt; b"" where it shows nothing yet."""
        index = prompt * self._num_completions + delta.index
        first = index not in self._num_characters
        offset = self._num_characters.setdefault(index, 0)
        text = (self._echo(prompt) if first else "") + (delta.text or "")
        logprobs = self._logprobs(delta.prompt_logprobs, delta.logprobs, offset)
        versions = self._versions.setdefault(index, [])
        extended(versions, delta.weight_versions)
        self._num_characters[index] = offset + len(text)
        if not (text or (logprobs and logprobs.tokens) or delta.finish_reason):
            return b""
        choice = _Choice(
            index=index,
            text=text,
            finish_reason=finish_word(delta.finish_reason),
            logprobs=logprobs,
        )
        if delta.finish_reason is not None:
            choice.matched_stop = matched_stop(delta.finish_reason)
            choice.weight_versions = versions if len(versions) > 1 else UNSET
        usage = None if self._header.include_usage else UNSET
        return data_line(self._encode([choice], usage, UNSET))

    def closing(self, outputs: list[GenerateOutput]) -> bytes:
        """The usage event, where the call wants one."""
        if not self._header.include_usage:
            return b""
        return data_line(self._encode([], usage_of(outputs), UNSET))

    def _choices(self, prompt: int, answer: PromptAnswer) -> list[_Choice]:
        header, wanted = self._header, self._header.extras
        echo = self._echo(prompt)
        metas = meta_infos(answer.output, rendering_of(header, answer), answer.elapsed_s)
        choices: list[_Choice] = []
        for index, one in enumerate(answer.output.completions):
            logprobs = self._logprobs(answer.output.prompt_logprobs, one.logprobs, 0)
            versions = one.weight_versions
            choices.append(
                _Choice(
                    index=prompt * self._num_completions + index,
                    text=echo + (one.text or ""),
                    finish_reason=finish_word(one.finish_reason),
                    matched_stop=matched_stop(one.finish_reason),
                    logprobs=logprobs,
                    prompt_token_ids=answer.prompt_ids if wanted.prompt_token_ids else UNSET,
                    response_token_ids=one.token_ids if wanted.token_ids else UNSET,
                    token_ids=one.token_ids if wanted.token_ids else UNSET,
                    meta_info=metas[index] if wanted.meta_info else UNSET,
                    prompt_logprobs=self._of_prompt(answer.output.prompt_logprobs),
                    weight_versions=versions if len(versions) > 1 else UNSET,
                )
            )
        return choices

    def _logprobs(
        self, prompt: TokenLogprobs | None, output: TokenLogprobs | None, offset: int
    ) -> CompletionLogprobs | None:
        shows = self._shows
        if shows.num_top is None:
            return None
        joined = cut(_joined(prompt if shows.echo else None, output), shows.num_top)
        return completion_logprobs(joined, self._header.texts, offset, with_own=shows.with_own)

    def _of_prompt(self, logprobs: TokenLogprobs | None) -> PromptLogprobs | UnsetType:
        num_top = self._shows.num_prompt_top
        if num_top is None or logprobs is None:
            return UNSET
        return prompt_logprobs(logprobs, num_top, self._header.texts)

    def _echo(self, prompt: int) -> str:
        return "" if self._echoes is None else self._echoes[prompt]

    def _encode(
        self,
        choices: list[_Choice],
        usage: Usage | UnsetType | None,
        sglext: SglExt | UnsetType,
    ) -> bytes:
        header = self._header
        return self._encoder.encode(
            _Completion(
                id=header.id,
                created=header.created,
                model=header.model,
                choices=choices,
                usage=usage,
                sglext=sglext,
            )
        )


def _joined(prompt: TokenLogprobs | None, output: TokenLogprobs | None) -> TokenLogprobs | None:
    if prompt is None or output is None:
        return output or prompt
    return prompt.extended(output)
