"""The one start of an engine's replicas, at once or with the first request, and their one end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from phalanx.engine.boundary import Raised, attempt, run_every
from phalanx.engine.deployments import Deployment
from phalanx.engine.dispatcher import RequestDispatcher
from phalanx.engine.executors.base import ReplicaExecutor
from phalanx.engine.requests import RequestTable
from phalanx.errors import EngineUnavailableError


class Startup:
    """Builds the dispatcher over a deployment's replicas, once; safe to use from any thread."""

    def __init__(
        self,
        deployment: Deployment,
        requests: RequestTable,
        dispatch: Callable[[Sequence[ReplicaExecutor]], RequestDispatcher],
    ) -> None:
        """`dispatch` is given the replicas that have started."""
        self._deployment = deployment
        self._requests = requests
        self._dispatch = dispatch
        self._lock = threading.RLock()
        self._dispatcher: RequestDispatcher | None = None

    @property
    def current(self) -> RequestDispatcher | None:
        """The dispatcher, unless nothing was started yet; never waits."""
        return self._dispatcher

    def dispatcher(self) -> RequestDispatcher:
        """The dispatcher over all replicas; the first call loads them, others wait for that.

        Raises what the start raised, and `EngineUnavailableError` ever after.
        """
        dispatcher = self._dispatcher
        if dispatcher is not None:
            return dispatcher
        with self._lock:
            if self._dispatcher is None:
                self._dispatcher = self._start()
            return self._dispatcher

    def close(self) -> None:
        """Give up a start that is on its way, and close the replicas."""
        run_every([self._deployment.close, self._close_replicas])

    def _start(self) -> RequestDispatcher:
        if self._requests.refusal is not None:
            raise self._requests.unavailable()
        started = attempt(self._deployment.start)
        if isinstance(started, Raised):
            cause = started.error
            reason = EngineUnavailableError(f"the engine did not start ({cause}); create a new one")
            self._requests.refuse(reason)
            self._deployment.close()
            raise cause
        dispatcher = self._dispatch(started)
        if self._requests.refusal is not None:  # closed meanwhile
            run_every([dispatcher.close, self._deployment.close])
            raise self._requests.unavailable()
        self._requests.open()
        return dispatcher

    def _close_replicas(self) -> None:
        with self._lock:
            if self._dispatcher is not None:
                self._dispatcher.close()
