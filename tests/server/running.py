"""A model server on a port of its own, in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import httpx
import uvloop

from phalanx.engine.engine import Engine
from phalanx.plugin import ServingAdapter, VideoAdapter
from phalanx.schema.server_config import ServerConfig
from phalanx.server.model_server import ModelServer


class RunningServer:
    """`engine` is known once the server is ready."""

    def __init__(
        self,
        factory: Callable[[], Engine],
        serving: ServingAdapter | None,
        config: ServerConfig,
        videos: VideoAdapter | None = None,
    ) -> None:
        self._videos = videos
        self.bound: Future[str] = Future()
        self.ready: Future[str] = Future()
        self.ended: Future[None] = Future()
        self._engine: Future[Engine] = Future()
        self._stop: Callable[[], None] | None = None

        def load() -> Engine:
            engine = factory()
            self._engine.set_result(engine)
            return engine

        self._thread = threading.Thread(target=self._run, args=(load, serving, config))
        self._thread.start()

    def _run(
        self, load: Callable[[], Engine], serving: ServingAdapter | None, config: ServerConfig
    ) -> None:
        try:
            uvloop.run(self._serve(load, serving, config))
            self.ended.set_result(None)
        except BaseException as error:
            for future in (self.bound, self.ready):
                if not future.done():
                    future.set_exception(error)
            self.ended.set_exception(error)

    async def _serve(
        self, load: Callable[[], Engine], serving: ServingAdapter | None, config: ServerConfig
    ) -> None:
        import asyncio

        loop = asyncio.get_running_loop()
        server = ModelServer(load, serving, config, videos=self._videos)
        self._stop = lambda: loop.call_soon_threadsafe(server.stop)  # type: ignore[func-returns-value]
        await server.run(on_bound=self.bound.set_result, on_ready=self.ready.set_result)

    @property
    def engine(self) -> Engine:
        return self._engine.result()

    @property
    def url(self) -> str:
        return self.bound.result()

    def stop(self) -> None:
        """Ask for the end; does not wait for it."""
        self.bound.exception()
        assert self._stop is not None
        if not self.ended.done():
            self._stop()

    def join(self) -> None:
        self._thread.join()

    def client(self) -> httpx.Client:
        # Without TLS there is nothing to verify, and its context takes long to make.
        return httpx.Client(base_url=self.url, timeout=60.0, verify=False)


@contextmanager
def running(
    factory: Callable[[], Engine],
    serving: ServingAdapter | None,
    config: ServerConfig,
    videos: VideoAdapter | None = None,
) -> Iterator[RunningServer]:
    """Ready on entry, ended on exit."""
    server = RunningServer(factory, serving, config, videos)
    try:
        server.ready.result()
        yield server
    finally:
        server.stop()
        server.stop()
        server.join()
