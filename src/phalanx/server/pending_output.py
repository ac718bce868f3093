"""A request whose complete answer is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

from phalanx.errors import PhalanxError
from phalanx.schema.generate import GenerateOutput
from phalanx.server.engine_result import engine_result
from phalanx.server.handover.base import LEFT, Exchange
from phalanx.server.metrics import Outcome
from phalanx.server.request_record import RequestRecord, outcome_of


class PendingOutput:
    """`close` it when nobody waits any more: that cancels a request that has not ended."""

    def __init__(
        self,
        future: Future[GenerateOutput],
        record: RequestRecord,
        cancel: Callable[[str], bool],
        complete: Callable[[GenerateOutput], GenerateOutput],
        exchange: Exchange | None = None,
    ) -> None:
        self._future = future
        self._record = record
        self._cancel = cancel
        self._complete = complete
        self._exchange = exchange
        # The other side gets its part when the engine is ready, whether anybody waits here or not.
        self._exchanged = None if exchange is None else asyncio.create_task(self._of(exchange))

    async def _of(self, exchange: Exchange) -> GenerateOutput:
        try:
            output = await engine_result(self._future)
        except PhalanxError as error:
            exchange.close(str(error))
            raise
        return await exchange.complete(output)

    async def output(self) -> GenerateOutput:
        """The answer with its texts, or what the engine raised."""
        try:
            exchanged = self._exchanged
            output = await (engine_result(self._future) if exchanged is None else exchanged)
        except PhalanxError:
            self._record.end(Outcome.FAILED)
            raise
        self._record.end(outcome_of([one.finish_reason for one in output.completions]))
        self._record.metrics.generated(sum(len(one.token_ids) for one in output.completions))
        return self._complete(output)

    @property
    def elapsed_s(self) -> float:
        return self._record.elapsed_s

    def close(self) -> None:
        if not self._future.done():
            self._cancel(self._record.rid)
        if self._exchanged is not None and self._exchange is not None:
            self._exchange.close(LEFT)
            self._exchanged.cancel()
            self._exchanged.add_done_callback(_read)
        self._record.end(Outcome.DISCONNECTED)


def _read(task: asyncio.Task[GenerateOutput]) -> None:
    """Nobody asks for its error any more."""
    if not task.cancelled():
        task.exception()
