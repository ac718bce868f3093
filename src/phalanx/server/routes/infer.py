"""`POST /infer`: any plugin's own request and output as JSON, with nothing changed here for it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from typing import Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from phalanx.engine.async_streams import AsyncResponseStream
from phalanx.engine.engine import Engine
from phalanx.errors import InvalidRequestError, MalformedRequestError
from phalanx.server.answering import Answering
from phalanx.server.dialects import SGLANG
from phalanx.server.engine_result import engine_result
from phalanx.server.event_stream import EventStream
from phalanx.server.live import LiveRequests
from phalanx.wire.sse import named_event


class InferRoute:
    """`?stream=true` answers with `delta` events and one `final` event."""

    def __init__(self, engine: Engine, live: LiveRequests, answering: Answering) -> None:
        self._engine = engine
        self._live = live
        self._answering = answering
        self._decoder = _decoder(engine.plugin.request_cls)
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)

    async def __call__(self, request: Request) -> Response:
        stream = _flag(request.query_params.get("stream", "false"))
        rid = request.query_params.get("rid") or uuid.uuid4().hex
        work = self._stream if stream else self._whole
        return await self._answering.model(request, SGLANG, lambda body: work(rid, body))

    async def _whole(self, rid: str, body: bytes) -> Response:
        future = self._engine.submit(self._parsed(body), rid=rid)
        self._live.add(rid)
        try:
            output = await engine_result(future)
        finally:
            self._live.discard(rid)
            if not future.done():
                self._engine.cancel(rid)
        return Response(self._encoder.encode(output), media_type="application/json")

    async def _stream(self, rid: str, body: bytes) -> Response:
        stream = self._engine.astream(self._parsed(body), rid=rid)
        events = self._events(rid, stream)
        return EventStream(
            await anext(events),
            events,
            render_error=SGLANG.stream_error,
            write_timeout_s=self._engine.config.runtime.stall_timeout_s,
        )

    async def _events(self, rid: str, stream: AsyncResponseStream) -> AsyncGenerator[bytes]:
        self._live.add(rid)
        try:
            async for item in stream:
                kind = "final" if isinstance(item, self._engine.plugin.output_cls) else "delta"
                yield named_event(kind, self._encoder.encode(item))
        finally:
            self._live.discard(rid)
            await stream.aclose()

    def _parsed(self, body: bytes) -> object:
        if self._decoder is None:
            raise InvalidRequestError(
                f"plugin {self._engine.plugin.name!r} takes "
                f"{self._engine.plugin.request_cls.__name__}, which has no JSON form; use the "
                "Python API"
            )
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            cause = error.__cause__
            if isinstance(cause, InvalidRequestError):
                raise cause from None
            raise MalformedRequestError(str(error).replace("`", "")) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedRequestError(f"the body is not valid JSON: {error}") from error
        except RecursionError as error:
            raise MalformedRequestError("the body is nested too deeply") from error


@runtime_checkable
class _Listable(Protocol):
    """An array or tensor."""

    def tolist(self) -> object: ...


def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any] | None:
    """A decoder for the plugin's request, None where its class cannot be described."""
    try:
        return msgspec.json.Decoder(kind, dec_hook=_special)
    except TypeError:
        return None


def _special(kind: type[Any], value: object) -> object:
    if kind is np.ndarray:
        return np.asarray(value)
    raise NotImplementedError(f"{kind.__name__} has no JSON form")


def _plain(value: object) -> object:
    if isinstance(value, _Listable):
        return value.tolist()
    raise NotImplementedError(f"{type(value).__name__} has no JSON form")


def _flag(text: str) -> bool:
    return text.lower() in ("1", "true", "yes")
