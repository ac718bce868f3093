"""What a reinforcement-learning controller asks of an engine that runs its policy in this process:
rollouts, and new weights, all or nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from phalanx.engine.dispatcher import RequestDispatcher
from phalanx.engine.operating import Operating
from phalanx.engine.weight_update import SESSION_TTL_S
from phalanx.errors import EngineUnavailableError, InvalidRequestError
from phalanx.plugin import WeightStore

if TYPE_CHECKING:
    from torch import Tensor


class Training(Operating):
    """The part of an `Engine` for controllers. Replicas in workers, and a launcher's ranks of which
    there are several, have none of it: an RL framework manages those by itself.
    """

    @abstractmethod
    def _single_core(self, verb: str) -> RequestDispatcher:
        """Who serves the only rank, in this process; else raises `EngineUnavailableError`."""

    @abstractmethod
    def _step_rollout(self, dispatcher: RequestDispatcher, request: Any) -> Any:
        """Check and compute a rollout."""

    def rollout_step(self, request: Any) -> Any:
        """The rollout that `request`, of the plugin's `rollout_cls`, asks for."""
        return self._step_rollout(self._single_core("rollout_step"), request)

    def begin_weight_update(self, *, ttl_s: float = SESSION_TTL_S) -> None:
        """Open an update. Requests are served with the old weights until it is finished.

        One update at a time (`WeightUpdateError`); when nothing was heard of it for `ttl_s`
        seconds, it is dropped.
        """
        self._store("begin_weight_update")
        self._weight_update.begin(ttl_s)

    def update_weights(self, batch: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> None:
        """Send weights by their names in a checkpoint, any subset, any number of times.

        They are copied: the caller may change its tensors afterwards. A tensor that does not fit
        raises `InvalidRequestError`, and the update can then only be aborted.
        """
        self._weight_update.stage(self._store("update_weights"), batch)

    def finish_weight_update(self, version: str | int | None = None) -> str:
        """Put everything that was sent in, between two steps; the new version (None: the next one).

        Requests that are under way are computed anew. Without a weight, or after a batch that was
        refused, raises `WeightUpdateError`, and the old weights stay. Where putting them in fails
        half-way, the engine serves no more.
        """
        dispatcher = self._single_core("finish_weight_update")
        return self._weight_update.commit(dispatcher.control, version)

    def abort_weight_update(self) -> None:
        """Drop what was sent; nothing has changed. Allowed at any time."""
        self._single_core("abort_weight_update")
        self._weight_update.abort()

    def _store(self, verb: str) -> WeightStore:
        entry = self._single_core(verb).entry
        store = None if entry is None else entry.weights
        if store is None:
            name = "" if entry is None else f" {entry.name!r}"
            raise InvalidRequestError(f"{verb}(): the plugin{name} takes no new weights")
        return store


def not_here(verb: str, why: str) -> EngineUnavailableError:
    return EngineUnavailableError(
        f"{verb}() requires an inline or single external core, and {why}; run the policy in the "
        "controller's process, or let the RL framework manage its rollout workers"
    )
