"""A request's answer as it is made, with the text of each part."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec

from phalanx.engine.async_streams import AsyncResponseStream
from phalanx.errors import PhalanxError
from phalanx.schema.generate import Completion, GenerateDelta, GenerateOutput, TokenLogprobs
from phalanx.server.completion_text import StreamTexts
from phalanx.server.handover.base import LEFT, Exchange
from phalanx.server.metrics import Outcome
from phalanx.server.request_record import RequestRecord, outcome_of
from phalanx.wire.version_spans import after


class Part(msgspec.Struct, frozen=True):
    """One delta with its text; the last one brings the whole output."""

    delta: GenerateDelta
    output: GenerateOutput | None = None


class TextStream:
    """For one reader. Every completion ends with a part that has a finish reason."""

    def __init__(
        self,
        stream: AsyncResponseStream,
        texts: StreamTexts,
        record: RequestRecord,
        n: int,
        exchange: Exchange | None = None,
    ) -> None:
        self._stream = stream
        self._exchange = exchange
        self._texts = texts
        self._record = record
        self._progress = [_Progress() for _ in range(n)]

    @property
    def elapsed_s(self) -> float:
        return self._record.elapsed_s

    async def parts(self) -> AsyncGenerator[Part]:
        """The parts in order; raises what the engine raised."""
        held: GenerateDelta | None = None
        try:
            async for item in self._stream:
                if isinstance(item, GenerateOutput):
                    if self._exchange is not None:
                        item = await self._exchange.complete(item)
                    reasons = [one.finish_reason for one in item.completions]
                    self._record.end(outcome_of(reasons))
                    for part in self._last_parts(item, held):
                        yield part
                    return
                delta = self._texts.with_text(item)
                self._note(delta)
                if delta.finish_reason is not None and all(one.over for one in self._progress):
                    # The output follows at once and belongs to the same part.
                    held = delta
                else:
                    yield Part(delta)
        except PhalanxError as error:
            if self._exchange is not None:
                self._exchange.close(str(error))
            self._record.end(Outcome.FAILED)
            raise
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Cancel the request where it has not ended."""
        if self._exchange is not None:
            self._exchange.close(LEFT)
        await self._stream.aclose()
        self._record.end(Outcome.DISCONNECTED)

    def _note(self, delta: GenerateDelta) -> None:
        metrics, progress = self._record.metrics, self._progress[delta.index]
        progress.over = delta.finish_reason is not None
        progress.num_characters += len(delta.text or "")
        num_tokens = len(delta.token_ids)
        if num_tokens == 0:
            return
        now_s = self._record.elapsed_s
        if progress.num_tokens:
            metrics.further_tokens(num_tokens, now_s - progress.last_s)
        elif delta.index == 0:
            metrics.first_token(now_s)
        metrics.generated(num_tokens)
        progress.num_tokens += num_tokens
        progress.last_s = now_s

    def _last_parts(self, output: GenerateOutput, held: GenerateDelta | None) -> list[Part]:
        """What is left when the output is known; a cancelled request may end without a delta."""
        deltas = [] if held is None else [held]
        for index, progress in enumerate(self._progress):
            if not progress.over:
                rest = _rest(index, output, progress)
                deltas.append(self._texts.with_text(rest))
        *earlier, last = deltas
        return [*(Part(delta) for delta in earlier), Part(last, output)]


class _Progress:
    """One completion so far."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_characters = 0
        self.last_s = 0.0
        self.over = False


def _rest(index: int, output: GenerateOutput, seen: _Progress) -> GenerateDelta:
    """What completion `index` has beyond what was `seen` of it.

    Text may have been held back for tokens that were seen: the two are counted apart.
    """
    completion: Completion = output.completions[index]
    num_seen, text, logprobs = seen.num_tokens, completion.text, completion.logprobs
    return GenerateDelta(
        index=index,
        token_ids=completion.token_ids[num_seen:],
        text=None if text is None else text[seen.num_characters :],
        logprobs=None if logprobs is None else _after(logprobs, num_seen),
        prompt_logprobs=output.prompt_logprobs if index == 0 and num_seen == 0 else None,
        finish_reason=completion.finish_reason,
        weight_versions=after(completion.weight_versions, num_seen),
    )


def _after(logprobs: TokenLogprobs, num_seen: int) -> TokenLogprobs:
    return TokenLogprobs(
        token_ids=logprobs.token_ids[num_seen:],
        values=logprobs.values[num_seen:],
        top=None if logprobs.top is None else logprobs.top[num_seen:],
        selected=None if logprobs.selected is None else logprobs.selected[num_seen:],
    )
