"""From a prompt to a finished file: what the video route does around its engine.

Waiting happens in the event loop; reading a body's pictures, preparing a request and writing a file
run in threads.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from phalanx.clock import Clock
from phalanx.engine.engine import Engine
from phalanx.errors import PhalanxError, RequestFailedError
from phalanx.plugin import VideoAdapter
from phalanx.schema.videos import DenoiseProgress, VideoFile
from phalanx.server.live import LiveRequests
from phalanx.server.metrics import Outcome, ServerMetrics
from phalanx.server.request_record import RequestRecord
from phalanx.wire.videos import VideoCall, parse_video_call


@dataclass(frozen=True, eq=False)
class PreparedVideo:
    """A call, its id, and the plugin's own request."""

    call: VideoCall
    rid: str
    request: Any


class VideoService:
    """Belongs to one event loop."""

    def __init__(
        self,
        engine: Engine,
        adapter: VideoAdapter,
        live: LiveRequests,
        metrics: ServerMetrics,
        clock: Clock,
    ) -> None:
        self.clock = clock
        self._engine = engine
        self._adapter = adapter
        self._live = live
        self._metrics = metrics

    @property
    def stall_timeout_s(self) -> float:
        """How long a reader may take nothing before its stream is cancelled."""
        return self._engine.config.runtime.stall_timeout_s

    async def parse(self, body: bytes) -> VideoCall:
        return await asyncio.to_thread(parse_video_call, body, self._adapter.num_clip_frames)

    async def prepare(self, call: VideoCall) -> PreparedVideo:
        """Raises `InvalidRequestError` naming what the model cannot do, and
        `MissingDependencyError` for a form that nothing here can write.
        """
        rid = call.request_id or f"video-{uuid.uuid4().hex}"
        return PreparedVideo(call, rid, await asyncio.to_thread(self._request, call))

    async def file(self, video: PreparedVideo) -> VideoFile:
        """The finished video. Whoever stops waiting ends the request in the engine."""
        async with aclosing(self.items(video)) as items:
            async for item in items:
                if isinstance(item, VideoFile):
                    return item
        raise AssertionError("a video ends in its file")

    async def items(self, video: PreparedVideo) -> AsyncGenerator[DenoiseProgress | VideoFile]:
        """How far it is, step by step, and its file. Closing this ends the request in the engine."""
        stream = self._engine.astream(video.request, rid=video.rid)
        output_cls = self._engine.plugin.output_cls
        with self._recorded(video.rid) as ended:
            try:
                async for item in stream:
                    if not isinstance(item, output_cls):
                        yield item
                        continue
                    ended.refuse_if_aborted()
                    call = video.call
                    make = partial(self._adapter.file, item, call.prompt, call.format)
                    file = await asyncio.to_thread(make)
                    ended.completed()
                    yield file
            finally:
                await stream.aclose()

    def _request(self, call: VideoCall) -> Any:  # noqa: ANN401
        self._adapter.check_format(call.prompt, call.format)
        return self._adapter.request(call.prompt)

    @contextmanager
    def _recorded(self, rid: str) -> Iterator[_Ending]:
        record = RequestRecord(rid, 0, self._live, self._metrics, self.clock)
        ending = _Ending(record)
        self._live.add(rid, partial(ending.abort, self._engine))
        try:
            yield ending
        except PhalanxError:
            record.end(Outcome.ABORTED if ending.aborted else Outcome.FAILED)
            raise
        finally:
            record.end(Outcome.DISCONNECTED)


class _Ending:
    """How a request ends: by itself, or by its server or operator."""

    def __init__(self, record: RequestRecord) -> None:
        self.aborted = False
        self._record = record

    def abort(self, engine: Engine) -> bool:
        self.aborted = True
        return engine.cancel(self._record.rid)

    def refuse_if_aborted(self) -> None:
        """Half of a video is none."""
        if self.aborted:
            raise RequestFailedError("the server ended the request before the video was complete")

    def completed(self) -> None:
        self._record.end(Outcome.COMPLETED)
