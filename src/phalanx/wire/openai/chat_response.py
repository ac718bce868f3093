"""Renders chat completions, whole and as chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from phalanx.schema.generate import GenerateDelta, GenerateOutput, VersionSpan
from phalanx.wire.openai.answer import Header, PromptAnswer, rendering_of, sglext_of
from phalanx.wire.openai.extras import SglExt, finish_word, matched_stop, meta_infos
from phalanx.wire.openai.logprobs import ChatLogprobs, chat_logprobs
from phalanx.wire.openai.usage import Usage, usage_of
from phalanx.wire.sglang.response import MetaInfo
from phalanx.wire.sse import data_line
from phalanx.wire.version_spans import extended


class _Message(msgspec.Struct, kw_only=True):
    content: str
    role: str = "assistant"
    refusal: None = None
    tool_calls: None = None


class _Choice(msgspec.Struct, kw_only=True):
    index: int
    message: _Message
    finish_reason: str | None
    matched_stop: int | str | None
    logprobs: ChatLogprobs | None = None
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    response_token_ids: tuple[int, ...] | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    meta_info: MetaInfo | UnsetType = UNSET
    weight_versions: Sequence[VersionSpan] | UnsetType = UNSET


class _Completion(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[_Choice]
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    sglext: SglExt | UnsetType = UNSET


class _Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class _ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: _Delta
    finish_reason: str | None = None
    matched_stop: int | str | UnsetType | None = UNSET
    logprobs: ChatLogprobs | None = None
    weight_versions: Sequence[VersionSpan] | UnsetType = UNSET


class _Chunk(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[_ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | UnsetType | None = UNSET


class ChatRenderer:
    """Writes the answer of one chat completion."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._encoder = msgspec.json.Encoder()
        self._begun: set[int] = set()
        self._versions: dict[int, list[VersionSpan]] = {}

    def whole(self, answer: PromptAnswer) -> bytes:
        """The body of an answer that is not streamed."""
        header, wanted = self._header, self._header.extras
        metas = meta_infos(answer.output, rendering_of(header, answer), answer.elapsed_s)
        choices = [
            _Choice(
                index=index,
                message=_Message(content=one.text or ""),
                finish_reason=finish_word(one.finish_reason),
                matched_stop=matched_stop(one.finish_reason),
                logprobs=chat_logprobs(one.logprobs, header.texts) if header.logprobs else None,
                prompt_token_ids=answer.prompt_ids if wanted.prompt_token_ids else UNSET,
                response_token_ids=one.token_ids if wanted.token_ids else UNSET,
                token_ids=one.token_ids if wanted.token_ids else UNSET,
                meta_info=metas[index] if wanted.meta_info else UNSET,
                weight_versions=one.weight_versions if len(one.weight_versions) > 1 else UNSET,
            )
            for index, one in enumerate(answer.output.completions)
        ]
        completion = _Completion(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=choices,
            usage=usage_of([answer.output]),
            prompt_token_ids=answer.prompt_ids if wanted.prompt_token_ids else UNSET,
            sglext=sglext_of(header, [answer]),
        )
        return self._encoder.encode(completion)

    def chunk(self, delta: GenerateDelta) -> bytes:
        """The events for `delta`, whose text is filled in; b"" where it shows nothing yet."""
        events = b""
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            opening = _Delta(role="assistant", content="")
            events = self._event(_ChunkChoice(index=delta.index, delta=opening))
        versions = self._versions.setdefault(delta.index, [])
        extended(versions, delta.weight_versions)
        logprobs = None
        if self._header.logprobs and delta.logprobs is not None and delta.logprobs.token_ids:
            logprobs = chat_logprobs(delta.logprobs, self._header.texts)
        if not (delta.text or logprobs or delta.finish_reason):
            return events
        choice = _ChunkChoice(
            index=delta.index,
            delta=_Delta(content=delta.text or None),
            finish_reason=finish_word(delta.finish_reason),
            logprobs=logprobs,
        )
        if delta.finish_reason is not None:
            choice.matched_stop = matched_stop(delta.finish_reason)
            choice.weight_versions = versions if len(versions) > 1 else UNSET
        return events + self._event(choice)

    def closing(self, outputs: list[GenerateOutput]) -> bytes:
        """The usage event, where the call wants one."""
        if not self._header.include_usage:
            return b""
        return self._encode([], usage_of(outputs))

    def _event(self, choice: _ChunkChoice) -> bytes:
        return self._encode([choice], None if self._header.include_usage else UNSET)

    def _encode(self, choices: list[_ChunkChoice], usage: Usage | UnsetType | None) -> bytes:
        header = self._header
        chunk = _Chunk(
            id=header.id,
            created=header.created,
            model=header.model,
            choices=choices,
            usage=usage,
        )
        return data_line(self._encoder.encode(chunk))
