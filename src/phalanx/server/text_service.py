"""Serves a language model's requests: tokens in, the engine's answer out, with text at both ends.

Tokenization and decoding run here, off the engine's loop; only stop strings and expressions are
left to the engine, which decides them where tokens are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from phalanx.clock import Clock
from phalanx.engine.engine import Engine
from phalanx.errors import EngineUnavailableError, InvalidRequestError
from phalanx.processing.text import TextTokenizer
from phalanx.schema.generate import GenerateOutput, GenerateRequest
from phalanx.schema.sampling import SamplingParams
from phalanx.server.completion_text import StreamTexts, with_texts
from phalanx.server.handover.base import Arrival, Both, Exchange, Role
from phalanx.server.live import LiveRequests
from phalanx.server.metrics import ServerMetrics
from phalanx.server.pending_output import PendingOutput
from phalanx.server.request_record import RequestRecord
from phalanx.server.text_stream import TextStream
from phalanx.wire.bootstrap import Bootstrap
from phalanx.wire.version_spans import HEADER

T = TypeVar("T")

THREAD_CHARACTERS = 16_384
"""Longer texts are treated in a thread, so that other requests are served meanwhile."""
DEFAULT_ROOM = 1024
"""Tokens to generate where neither the request nor a context length bounds them."""
MAX_BATCH_EXPRESSIONS = 64
"""Different stop expressions of one call. Half of what RE2's module keeps compiled: the engine's
own check of the request, on the event loop, then finds them there."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """A request as the engine takes it: token ids, under its id."""

    rid: str
    request: GenerateRequest
    prompt_ids: tuple[int, ...]
    exchange: Exchange | None = None


class TextService:
    """One engine and its tokenizer; belongs to the server's event loop."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        live: LiveRequests,
        metrics: ServerMetrics,
        clock: Clock,
        role: Role | None = None,
    ) -> None:
        """`role` None: a server that answers alone."""
        self._role = Both() if role is None else role
        self.engine = engine
        self.tokenizer = tokenizer
        self.clock = clock
        self._live = live
        self._metrics = metrics

    @property
    def stall_timeout_s(self) -> float:
        """How long a reader may take nothing before its stream is cancelled."""
        return self.engine.config.runtime.stall_timeout_s

    @property
    def version_header(self) -> dict[str, str]:
        """The header of an answer that begins now; its end tells of updates on the way."""
        return {HEADER: _header_value(self.engine.version)}

    def room(self, num_prompt_tokens: int) -> int:
        """Tokens that one request may generate after its prompt; at least one."""
        limits = self.engine.limits
        bounds = [one for one in (limits.context_length, limits.pool_tokens) if one is not None]
        return max(1, min(bounds) - num_prompt_tokens) if bounds else DEFAULT_ROOM

    def checked_length(self, text: str) -> int:
        """Characters of `text`; refused where it cannot fit the context however it is tokenized."""
        context_length = self.engine.limits.context_length
        if context_length is not None:
            longest = context_length * self.tokenizer.longest_token
            if len(text) > longest:
                raise InvalidRequestError(
                    f"the prompt has {len(text)} characters, more than the context of "
                    f"{context_length} tokens can hold (at most {longest}); shorten it",
                    field="prompt",
                )
        return len(text)

    async def off_loop(self, num_characters: int, work: Callable[[], T]) -> T:
        """The result of `work`, run in a thread where the text it treats is long."""
        return await asyncio.to_thread(work) if num_characters > THREAD_CHARACTERS else work()

    async def _validate(self, prepared: Sequence[Prepared]) -> None:
        """Have the plugin check all requests: in a thread where something is to be compiled."""

        def work() -> None:
            for one in prepared:
                self.engine.plugin.validate(one.request, self.engine.limits)

        if any(_compiles(one.request.sampling) for one in prepared):
            await asyncio.to_thread(work)
        else:
            work()

    async def prepare(
        self,
        calls: Sequence[tuple[str, GenerateRequest]],
        bootstraps: Sequence[Bootstrap | None] = (),
    ) -> list[Prepared]:
        """All requests of one call, tokenized and checked: one that is refused refuses the call.

        Nothing has reached the engine yet; what comes before it in this server's role is done.
        Whoever gets this submits it next.
        """
        most = self.engine.config.runtime.max_pending_requests
        if len(calls) > most:
            raise InvalidRequestError(
                f"the batch has {len(calls)} prompts; at most max_pending_requests={most} can be "
                "pending at once; send fewer"
            )
        _check_expressions(calls)
        num_characters = sum(self.checked_length(request.prompt or "") for _, request in calls)
        prepared = await self.off_loop(
            num_characters, lambda: [self._prepared(*one) for one in calls]
        )
        await self._validate(prepared)
        return await self._in_role(prepared, bootstraps)

    async def _in_role(
        self, prepared: Sequence[Prepared], bootstraps: Sequence[Bootstrap | None]
    ) -> list[Prepared]:
        arrivals = [Arrival(rid=one.rid, request=one.request) for one in prepared]
        arrived = await self._role.arrive(arrivals, bootstraps)
        return [
            msgspec.structs.replace(one, request=arrival.request, exchange=arrival.exchange)
            for one, arrival in zip(prepared, arrived, strict=True)
        ]

    def submit(self, prepared: Sequence[Prepared]) -> list[PendingOutput]:
        """Have the engine take all requests, or none."""
        pending: list[PendingOutput] = []
        try:
            for one in prepared:
                pending.append(self._submitted(one))
        except (InvalidRequestError, EngineUnavailableError) as error:
            _close_exchanges(prepared, error)
            for taken in pending:
                taken.close()
            raise
        return pending

    async def stream(self, prepared: Sequence[Prepared]) -> list[TextStream]:
        """Have the engine take all requests as streams, or none."""
        streams: list[TextStream] = []
        try:
            for one in prepared:
                streams.append(self._opened(one))
        except (InvalidRequestError, EngineUnavailableError) as error:
            _close_exchanges(prepared, error)
            for taken in streams:
                await taken.aclose()
            raise
        return streams

    def _prepared(self, rid: str, request: GenerateRequest) -> Prepared:
        ids = request.input_ids
        if ids is None:
            assert request.prompt is not None
            ids = tuple(self.tokenizer.encode(request.prompt))
        sampling = request.sampling
        tokens = msgspec.structs.replace(
            request,
            prompt=None,
            input_ids=ids,
            detokenize=bool(sampling.stop or sampling.stop_regex),
        )
        return Prepared(rid=rid, request=tokens, prompt_ids=ids)

    def _submitted(self, one: Prepared) -> PendingOutput:
        future = self.engine.submit(one.request, rid=one.rid)
        complete = partial(with_texts, request=one.request, tokenizer=self.tokenizer)
        record = self._record(one)
        return PendingOutput(future, record, self.engine.cancel, complete, one.exchange)

    def _opened(self, one: Prepared) -> TextStream:
        stream = self.engine.astream(one.request, rid=one.rid)
        texts = StreamTexts(one.request, self.tokenizer)
        n = one.request.sampling.n
        return TextStream(stream, texts, self._record(one), n, one.exchange)

    def _record(self, one: Prepared) -> RequestRecord:
        return RequestRecord(one.rid, len(one.prompt_ids), self._live, self._metrics, self.clock)


def version_header(outputs: Iterable[GenerateOutput]) -> dict[str, str]:
    """The header that names the versions of the weights that ended these answers."""
    versions = dict.fromkeys(one.weight_version for one in outputs)
    return {HEADER: ", ".join(map(_header_value, versions))}


def _header_value(version: str) -> str:
    """A trainer may call its weights anything."""
    return version if version.isascii() and version.isprintable() else ascii(version)


def _close_exchanges(prepared: Sequence[Prepared], error: Exception) -> None:
    """The engine does not take these."""
    for one in prepared:
        if one.exchange is not None:
            one.exchange.close(str(error))


def _compiles(sampling: SamplingParams) -> bool:
    """Whether checking the request takes more than comparisons."""
    grammars = (sampling.json_schema, sampling.regex, sampling.ebnf)
    return bool(sampling.stop_regex) or any(one is not None for one in grammars)


def _check_expressions(calls: Sequence[tuple[str, GenerateRequest]]) -> None:
    expressions = {one for _, request in calls for one in request.sampling.stop_regex}
    if len(expressions) > MAX_BATCH_EXPRESSIONS:
        raise InvalidRequestError(
            f"the batch has {len(expressions)} different stop_regex expressions; at most "
            f"{MAX_BATCH_EXPRESSIONS} are allowed in one call; send fewer prompts at once",
            field="stop_regex",
        )
