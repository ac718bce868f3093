"""What a trainer opens with `/begin_weight_update`: several updates that no request sees a part of.

Requests wait at the gate while it is open. A trainer that has died, or is not heard of for long,
gives it up: requests are then refused where a part of its weights is in already, and go on where
none is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from phalanx.errors import InvalidRequestError, WeightUpdateError
from phalanx.server.lifecycle import Lifecycle
from phalanx.server.operations.quiescence import Quiescence

logger = logging.getLogger(__name__)


class UpdateSession:
    """Belongs to the server's event loop. `timeout_s`: between two calls of its trainer."""

    def __init__(self, quiescence: Quiescence, lifecycle: Lifecycle, timeout_s: float) -> None:
        self._quiescence = quiescence
        self._lifecycle = lifecycle
        self._timeout_s = timeout_s
        self._open = False
        self._num_working = 0
        self._has_changed = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Any number of times."""
        self._open = True
        self._hold()

    def end(self) -> bool:
        """Let requests in again; False where nothing had begun."""
        had_begun = self._open
        self._open = self._has_changed = False
        self._stop_timer()
        self._lifecycle.refuse(None)
        self._quiescence.close_session()
        return had_begun

    @contextmanager
    def working(self) -> Iterator[None]:
        """An update is under way; where a session is open, it belongs to that."""
        self._num_working += 1
        if self._open:
            self._hold()
        lost, changed = "", True
        try:
            yield
        except (InvalidRequestError, WeightUpdateError) as error:
            changed = False
            # Where the trainer has died nobody ends what it began.
            if isinstance(error, WeightUpdateError):
                lost = f"its weights did not come: {error}"
            raise
        finally:
            self._num_working -= 1
            self._has_changed |= self._open and changed
            if self._open and lost:
                self._give_up(lost)
            else:
                self._wait_for_next()

    def _hold(self) -> None:
        """Requests wait, also those that would have been refused since it was given up."""
        self._lifecycle.refuse(None)
        self._quiescence.open_session()
        self._wait_for_next()

    def _wait_for_next(self) -> None:
        self._stop_timer()
        if self._open and self._num_working == 0:
            loop = asyncio.get_running_loop()
            why = f"its trainer was not heard of for {self._timeout_s:g} s"
            self._timer = loop.call_later(self._timeout_s, self._give_up, why)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self, why: str) -> None:
        self._stop_timer()
        if not self._has_changed:
            logger.warning("the weight update is over before it has changed anything: %s", why)
            self.end()
            return
        logger.error("requests are refused, since a weight update was begun and not ended: %s", why)
        self._lifecycle.refuse(
            "a weight update was begun and not ended, so that a part of the weights may be new: "
            f"{why}. Send all of them again, and then POST /end_weight_update"
        )
        self._quiescence.close_session()
