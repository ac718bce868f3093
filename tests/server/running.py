"""A model server on a port of its own, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import httpx
import uvloop

from phalanx.engine.engine import Engine
from phalanx.plugin import ServingAdapter, VideoAdapter
from phalanx.schema.server_config import ServerConfig
from phalanx.server.model_server import ModelServer


class Server(Protocol):
    """A `ModelServer` or a `PolicyServer`."""

    def stop(self) -> None: ...

    async def run(self, *, on_bound: Callable, on_ready: Callable) -> None: ...


class ServerThread:
    """A server on ports of its own, in a thread of this process. `engine` is known once the server is
    ready; `make` gives the server when it has been given what loads its engine.
    """

    def __init__(
        self, factory: Callable[[], Engine], make: Callable[[Callable[[], Engine]], Server]
    ) -> None:
        self.bound: Future = Future()
        self.ready: Future = Future()
        self.ended: Future[None] = Future()
        self._engine: Future[Engine] = Future()
        self._stop: Callable[[], object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

        def load() -> Engine:
            engine = factory()
            self._engine.set_result(engine)
            return engine

        self._thread = threading.Thread(target=self._run, args=(lambda: make(load),))
        self._thread.start()

    def _run(self, make: Callable[[], Server]) -> None:
        try:
            uvloop.run(self._serve(make))
            self.ended.set_result(None)
        except BaseException as error:
            for future in (self.bound, self.ready):
                if not future.done():
                    future.set_exception(error)
            self.ended.set_exception(error)

    async def _serve(self, make: Callable[[], Server]) -> None:
        self._loop = loop = asyncio.get_running_loop()
        server = make()
        self._stop = lambda: loop.call_soon_threadsafe(server.stop)
        await server.run(on_bound=self.bound.set_result, on_ready=self.ready.set_result)

    @property
    def engine(self) -> Engine:
        return self._engine.result()

    def in_its_loop(self, work: Callable[[], object]) -> None:
        """Let the server's event loop do nothing but `work`."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(work)

    def stop(self) -> None:
        """Ask for the end; does not wait for it."""
        if self.bound.exception() is None and not self.ended.done():
            assert self._stop is not None
            self._stop()

    def join(self) -> None:
        self._thread.join()


class RunningServer(ServerThread):
    """Of a text or video model, over HTTP."""

    bound: Future[str]
    ready: Future[str]

    def __init__(
        self,
        factory: Callable[[], Engine],
        serving: ServingAdapter | None,
        config: ServerConfig,
        videos: VideoAdapter | None = None,
    ) -> None:
        super().__init__(factory, lambda load: ModelServer(load, serving, config, videos=videos))

    @property
    def url(self) -> str:
        return self.bound.result()

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
