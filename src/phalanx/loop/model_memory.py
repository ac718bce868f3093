"""The memory of a loaded model, given back and taken again by tags, on every rank alike.

What is refused is refused on all ranks, before anything has changed.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

from phalanx.errors import (
    DeviceMemoryError,
    InvalidRequestError,
    PhalanxError,
    RequestFailedError,
)
from phalanx.loop.resident_memory import ResidentMemory
from phalanx.loop.step_loop import StepLoop
from phalanx.parallel.ranks import Ranks
from phalanx.schema.control import MemoryTag
from phalanx.schema.statistics import EngineMemory
from phalanx.step.attempt import attempt
from phalanx.step.engine import StepEngine

logger = logging.getLogger(__name__)


class ModelWeights(Protocol):
    """A model's weights, whose memory goes and comes."""

    @property
    def complete(self) -> bool:
        """Whether every weight is there."""
        ...

    @property
    def can_return(self) -> bool:
        """Whether those that are served can be brought back by `restore`; else others have to come."""
        ...

    def release(self) -> None:
        """Give up every weight, in every form."""
        ...

    def restore(self) -> None:
        """Bring all weights back from where they were loaded from."""
        ...


class ModelMemory:
    """See the module. The loop must compute nothing while `state` is not ready."""

    def __init__(
        self,
        engine: StepEngine,
        loop: StepLoop,
        weights: ModelWeights,
        ranks: Ranks,
        resident: ResidentMemory,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self._weights = weights
        self._ranks = ranks
        self._resident = resident
        self._asleep: frozenset[MemoryTag] = frozenset()
        self._is_warm = True

    @property
    def state(self) -> EngineMemory:
        """What is given back, and whether weights have yet to come."""
        lost = MemoryTag.WEIGHTS not in self._asleep and not self._weights.complete
        return EngineMemory(asleep=self._asleep, waiting_for_weights=lost)

    def sleep(self, tags: frozenset[MemoryTag], *, at_rest: bool) -> bool:
        """Give the memory of these tags back; False where that was refused.

        `at_rest`: no request is live, or all are paused. Those are computed anew.
        """
        fresh = tags - self._asleep
        if not fresh:
            return True
        if self.state.ready and not at_rest:
            return False
        self._loop.push_back_all()
        if MemoryTag.KV_CACHE in fresh and not self._engine.at_rest():
            return False  # some of it is held for another engine
        self._give_back(fresh)
        self._ranks.least([0])  # one rank answers, and memory is free on all of them when it does
        self._asleep |= fresh
        return True

    def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Take the memory of these tags again.

        Raises `DeviceMemoryError` or `RequestFailedError` where that fails; what slept sleeps on.
        """
        due = tags & self._asleep
        if not due:
            return
        self._expect_room(partial(self._resident.take, due), partial(self._resident.give, due))
        returning = False
        if MemoryTag.WEIGHTS in due:
            returning = bool(self._ranks.least([self._weights.can_return])[0])
        failed = self.failed(partial(self._take, due, returning=returning))
        if failed is not None:
            self._give_back(due)
            raise RequestFailedError(
                f"memory for {', '.join(sorted(due))} could not be taken, and the engine sleeps on: "
                f"{failed}"
            )
        self._asleep -= due
        if not self._weights.complete:
            logger.info("the weights were replaced since they were loaded: new ones are awaited")
        self.warm_up()

    def expect_weights(self) -> None:
        """Raise `InvalidRequestError` where there is no memory for weights."""
        if MemoryTag.WEIGHTS in self._asleep:
            raise InvalidRequestError(
                "the memory for weights was given back; take it again first, with "
                "control(Wake(frozenset({MemoryTag.WEIGHTS}))) or POST /resume_memory_occupation "
                '{"tags": ["weights"]}'
            )

    @contextlib.contextmanager
    def coming(self, sizes: Iterable[int]) -> Iterator[None]:
        """Weights of these sizes are there beside the ones that they replace.

        Raises `DeviceMemoryError` where there is no room for them.
        """
        take = partial(self._resident.take_update, sum(sizes))
        self._expect_room(take, self._resident.end_update)
        try:
            yield
        finally:
            self._resident.end_update()

    def failed(self, call: Callable[[], object]) -> str | None:
        """Why `call` failed on the first rank on which it did."""
        made = attempt(call)
        said = None
        if made.error is not None:
            logger.info("an operation failed", exc_info=made.error)
            ours = isinstance(made.error, PhalanxError)
            said = str(made.error) if ours else f"{type(made.error).__name__}: {made.error}"
        return self._ranks.first_said(said)

    def drop_captures(self) -> None:
        """Weights are elsewhere now, or no more; `warm_up` captures anew."""
        self._engine.drop_captures()
        self._is_warm = False

    def warm_up(self) -> None:
        """Capture again what was captured, once everything is there that a capture addresses."""
        if self._is_warm or not self.state.ready:
            return
        self._is_warm = True
        made = attempt(self._engine.warm_up)
        if made.error is not None:
            self._engine.drop_captures()
            logger.warning("steps are computed without captures from now on: %s", made.error)

    def close(self) -> None:
        """Nothing of the device is held any more."""
        self._resident.close()

    def _expect_room(self, take: Callable[[], None], give: Callable[[], None]) -> None:
        """Have every rank take memory of its device, or none: raises `DeviceMemoryError`."""
        failed = self.failed(take)
        if failed is not None:
            give()
            raise DeviceMemoryError(f"{failed}. Nothing has changed; what was asleep sleeps on")

    def _take(self, due: frozenset[MemoryTag], *, returning: bool) -> None:
        self._engine.restore(frozenset(due))
        if returning:
            self._weights.restore()
            # What they were read and packed from is free, and may be as large as they are.
            self._engine.backend.release_cached_memory()

    def _give_back(self, tags: frozenset[MemoryTag]) -> None:
        # What is captured addresses all of it.
        self._is_warm = False
        if MemoryTag.WEIGHTS in tags:
            self._weights.release()
        self._engine.release(frozenset(tags))
        self._resident.give(tags)
