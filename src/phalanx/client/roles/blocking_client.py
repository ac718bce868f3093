"""A client for programs without an event loop: its asynchronous twin in a thread, waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

from phalanx.client.roles.loop_thread import LoopThread


class _Closes(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=_Closes)


class BlockingClient(Generic[C]):
    """For any number of threads, whose calls run at the same time, but not inside a running event
    loop. Closed by `close` or at the end of `with`.
    """

    def __init__(self, name: str, make: Callable[[], C]) -> None:
        """`make` is called in the thread's event loop. The twin of `name` is called `Async{name}`."""
        self._loop = LoopThread(name)
        try:
            self._client = self._loop.run(_made(make))
        except BaseException:
            self._loop.close()
            raise

    def close(self) -> None:
        """Calls that still run end with `EngineUnavailableError`. Again changes nothing."""
        self._loop.close(self._client.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


async def _made(make: Callable[[], C]) -> C:
    return make()
