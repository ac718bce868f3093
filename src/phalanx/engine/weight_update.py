"""New weights for a plugin that runs in this process, all or nothing.

What a controller sends is kept beside the model until it says that it is complete: inference goes on
meanwhile, whatever becomes of the controller. Only then is it put in, between two steps.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from phalanx.clock import Clock
from phalanx.errors import InvalidRequestError, WeightUpdateError
from phalanx.plugin import WeightStore
from phalanx.schema.control import ControlOp, ReplaceWeights

if TYPE_CHECKING:
    from torch import Tensor

SESSION_TTL_S = 600.0


class UpdateState(enum.Enum):
    """`RECEIVING`: a batch is coming in. `BROKEN`: one was refused, so the update can only be aborted."""

    IDLE = "idle"
    OPEN = "open"
    RECEIVING = "receiving a batch"
    BROKEN = "broken"
    COMMITTING = "committing"


@dataclass
class _Session:
    """What one update has been sent. Batches come one after another, however long one takes."""

    staged: dict[str, Tensor] = field(default_factory=dict)
    sending: threading.Lock = field(default_factory=threading.Lock)


class WeightUpdate:
    """The one update that may be under way; safe to use from any thread.

    A batch may come from a controller that never ends it: nothing but that batch waits for it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._state = UpdateState.IDLE
        self._session = _Session()
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
            self._session = _Session()
            self._state = UpdateState.OPEN
            self._ttl_s = ttl_s
            self._expires_s = now_s + ttl_s

    def stage(
        self, store: WeightStore, batch: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
    ) -> None:
        """Keep a copy of each tensor. One that does not fit breaks the update."""
        session = self._session
        with session.sending:
            with self._lock:
                self._expect_open("update_weights")
                if self._session is not session:
                    raise _replaced()
                self._state = UpdateState.RECEIVING
            try:
                received = _copies(store, batch)
            except BaseException:
                self._receive(session, UpdateState.BROKEN, {})
                raise
            if not self._receive(session, UpdateState.OPEN, received):
                raise _replaced()

    def commit(self, apply: Callable[[ControlOp], bool], version: str | int | None) -> str:
        """Put everything in, between two steps; the version that is served from then on."""
        with self._lock:
            self._expect_open("finish_weight_update")
            staged = self._session.staged
            if not staged:
                raise WeightUpdateError(
                    "the update has no weights; send some with update_weights, or abort it"
                )
            self._state, self._session = UpdateState.COMMITTING, _Session()
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
                self._session = _Session()
                self._state = UpdateState.IDLE

    def _receive(
        self, session: _Session, state: UpdateState, received: Mapping[str, Tensor]
    ) -> bool:
        """The end of a batch of `session`; whether that still is the update."""
        with self._lock:
            if self._session is not session:
                return False
            session.staged.update(received)
            self._state = state
            self._expires_s = self._clock.monotonic_s() + self._ttl_s
            return True

    def _expect_open(self, verb: str) -> None:
        if self._state is UpdateState.RECEIVING:
            raise WeightUpdateError(
                f"{verb}(): a batch is still coming in; call it when update_weights() has returned"
            )
        if self._state is UpdateState.BROKEN:
            raise WeightUpdateError(
                f"{verb}(): a batch of this update was refused, so it is incomplete; call "
                "abort_weight_update() and begin again"
            )
        if self._state is not UpdateState.OPEN:
            raise WeightUpdateError(f"{verb}(): call begin_weight_update() first")
        if self._clock.monotonic_s() >= self._expires_s:
            self._session = _Session()
            self._state = UpdateState.IDLE
            raise WeightUpdateError(
                f"{verb}(): nothing was heard of the update for {self._ttl_s:g} s, so it was "
                "dropped; begin again"
            )


def _replaced() -> WeightUpdateError:
    return WeightUpdateError(
        "update_weights(): the update was aborted, or gave way to a new one, while a batch came in; "
        "begin again"
    )


def _copies(
    store: WeightStore, batch: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """The tensors of a batch, each checked before it is copied."""
    copies: dict[str, Tensor] = {}
    for name, tensor in batch.items() if isinstance(batch, Mapping) else batch:
        store.check_weight(name, tensor)
        copies[name] = tensor.detach().clone()
    return copies
