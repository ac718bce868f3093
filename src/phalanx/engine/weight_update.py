"""New weights for a plugin that runs in this process, all or nothing.

What a controller sends is kept beside the model until it says that it is complete: inference goes on
meanwhile, whatever becomes of the controller. Only then is it put in, between two steps.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from phalanx.clock import Clock
from phalanx.errors import InvalidRequestError, WeightUpdateError
from phalanx.plugin import WeightStore
from phalanx.schema.control import ControlOp, ReplaceWeights

if TYPE_CHECKING:
    from torch import Tensor

SESSION_TTL_S = 600.0


class UpdateState(enum.Enum):
    """`BROKEN`: a batch was refused, so the update can only be aborted."""

    IDLE = "idle"
    OPEN = "open"
    BROKEN = "broken"
    COMMITTING = "committing"


class WeightUpdate:
    """The one update that may be under way; safe to use from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state = UpdateState.IDLE
        self._staged: dict[str, Tensor] = {}
        self._expires_s = math.inf
        self._num_committed = 0
        self.version = "default"

    @property
    def state(self) -> UpdateState:
        return self._state

    def begin(self, ttl_s: float) -> None:
        """Open an update. One that nothing was heard of for its `ttl_s` gives way to a new one."""
        if not ttl_s > 0:
            raise InvalidRequestError(f"ttl_s={ttl_s} must be above 0", field="ttl_s")
        with self._lock:
            now_s = self._clock.monotonic_s()
            open_ = self._state is not UpdateState.IDLE
            if self._state is UpdateState.COMMITTING or (open_ and now_s < self._expires_s):
                raise WeightUpdateError(
                    f"a weight update is {self._state.value}; finish or abort it first"
                )
            self._staged = {}
            self._state = UpdateState.OPEN
            self._ttl_s = ttl_s
            self._expires_s = now_s + ttl_s

    def stage(
        self, store: WeightStore, batch: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
    ) -> None:
        """Keep a copy of each tensor. One that does not fit breaks the update."""
        with self._lock:
            self._expect_open("update_weights")
            self._state = UpdateState.BROKEN
            pairs = batch.items() if isinstance(batch, Mapping) else batch
            for name, tensor in pairs:
                store.check_weight(name, tensor)
                self._staged[name] = tensor.detach().clone()
            self._state = UpdateState.OPEN
            self._expires_s = self._clock.monotonic_s() + self._ttl_s

    def commit(self, apply: Callable[[ControlOp], bool], version: str | int | None) -> str:
        """Put everything in, between two steps; the version that is served from then on."""
        with self._lock:
            self._expect_open("finish_weight_update")
            if not self._staged:
                raise WeightUpdateError(
                    "the update has no weights; send some with update_weights, or abort it"
                )
            self._state, staged = UpdateState.COMMITTING, self._staged
            self._staged = {}
        named = str(self._num_committed + 1) if version is None else str(version)
        try:
            apply(ReplaceWeights(staged, named))
        finally:
            with self._lock:
                self._state = UpdateState.IDLE
        self._num_committed += 1
        self.version = named
        return named

    def abort(self) -> None:
        """Forget what was sent; nothing has changed. Without an update there is nothing to do."""
        with self._lock:
            if self._state is not UpdateState.COMMITTING:
                self._staged = {}
                self._state = UpdateState.IDLE

    def _expect_open(self, verb: str) -> None:
        if self._state is UpdateState.BROKEN:
            raise WeightUpdateError(
                f"{verb}(): a batch of this update was refused, so it is incomplete; call "
                "abort_weight_update() and begin again"
            )
        if self._state is not UpdateState.OPEN:
            raise WeightUpdateError(f"{verb}(): call begin_weight_update() first")
        if self._clock.monotonic_s() >= self._expires_s:
            self._staged = {}
            self._state = UpdateState.IDLE
            raise WeightUpdateError(
                f"{verb}(): nothing was heard of the update for {self._ttl_s:g} s, so it was "
                "dropped; begin again"
            )
