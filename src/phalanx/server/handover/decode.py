"""The role decode: requests go on from prompts that a prefill server has computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from phalanx.errors import RequestFailedError
from phalanx.schema.generate import GenerateOutput, Handoff
from phalanx.schema.server_config import ServerConfig
from phalanx.server.handover.base import Arrival, needed
from phalanx.server.handover.holds import Releases
from phalanx.server.handover.messages import MAX_BYTES, Ask, Given, Refused, receive, send
from phalanx.server.live import LiveRequests
from phalanx.wire.bootstrap import Bootstrap

CONNECT_TIMEOUT_S = 5.0
_ANSWERS: msgspec.msgpack.Decoder[Given | Refused] = msgspec.msgpack.Decoder(Given | Refused)


class Decode:
    """See the module."""

    def __init__(self, config: ServerConfig) -> None:
        self._timeout_s = config.handoff_timeout_s
        self._live: LiveRequests
        self._releases = Releases()

    def bind(self, live: LiveRequests, cancel: Callable[[str], bool]) -> None:
        self._live = live

    async def arrive(
        self, arrivals: Sequence[Arrival], bootstraps: Sequence[Bootstrap | None]
    ) -> list[Arrival]:
        pairs = zip(arrivals, needed(bootstraps, len(arrivals), "decode"), strict=True)
        fetching = [asyncio.create_task(self._fetched(*pair)) for pair in pairs]
        for one, task in zip(arrivals, fetching, strict=True):
            self._live.add(one.rid, task.cancel)
        try:
            await asyncio.wait(fetching, return_when=asyncio.FIRST_EXCEPTION)
            # Where one has failed, others may still be under way.
            for task in filter(_failed, fetching):
                _result(task)
            return [_result(task) for task in fetching]
        except BaseException as error:
            reason = str(error) or "the request was cancelled on the decode server"
            await _give_up(fetching, reason)
            raise
        finally:
            for one in arrivals:
                self._live.discard(one.rid)

    async def aclose(self) -> None:
        await self._releases.aclose()

    async def _fetched(self, one: Arrival, bootstrap: Bootstrap) -> Arrival:
        handoff = await self._asked(bootstrap)
        request = msgspec.structs.replace(one.request, handoff=handoff.at_host(bootstrap.host))
        return Arrival(
            rid=one.rid, request=request, exchange=_Taking(request.handoff, self._releases)
        )

    async def _asked(self, bootstrap: Bootstrap) -> Handoff:
        where = f"the prefill server at {bootstrap.host}:{bootstrap.port}"
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(bootstrap.host, bootstrap.port)
        except (OSError, TimeoutError) as error:
            raise RequestFailedError(
                f"{where} cannot be reached: {error or 'no answer'}"
            ) from error
        try:
            async with asyncio.timeout(self._timeout_s):
                await send(writer, Ask(bootstrap.room))
                answer = await receive(reader, _ANSWERS, MAX_BYTES)
        except TimeoutError:
            raise RequestFailedError(
                f"{where} did not compute the prompt within {self._timeout_s:g} s"
            ) from None
        except (OSError, ValueError) as error:
            raise RequestFailedError(f"{where} failed: {error}") from error
        finally:
            writer.close()
        if isinstance(answer, Refused):
            raise RequestFailedError(f"{where} has not computed the prompt: {answer.message}")
        return answer.handoff


class _Taking:
    """One request of a decode server, whose engine reads what is held for it."""

    def __init__(self, handoff: Handoff | None, releases: Releases) -> None:
        self._handoff = handoff
        self._releases = releases

    async def complete(self, output: GenerateOutput) -> GenerateOutput:
        self._handoff = None
        return output

    def close(self, reason: str) -> None:
        handoff, self._handoff = self._handoff, None
        if handoff is not None:
            self._releases.drop(handoff, reason)


def _result(task: asyncio.Task[Arrival]) -> Arrival:
    if task.cancelled():
        raise RequestFailedError("the request was aborted while its prompt was computed elsewhere")
    return task.result()


def _failed(task: asyncio.Task[Arrival]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _give_up(fetching: Sequence[asyncio.Task[Arrival]], reason: str) -> None:
    """One of a call's requests fails, or its client is gone: drop the others."""
    for task in fetching:
        task.cancel()
    await asyncio.wait(fetching)
    for task in fetching:
        if not _failed(task):
            exchange = task.result().exchange
            assert exchange is not None
            exchange.close(reason)
