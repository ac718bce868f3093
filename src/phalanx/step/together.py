"""What ends the ranks of a replica together once a step has broken on one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from phalanx.errors import (
    EngineAsleepError,
    InvalidRequestError,
    PhalanxDistError,
    RequestFailedError,
)
from phalanx.step.attempt import attempt

T = TypeVar("T")

_ALIKE = (InvalidRequestError, RequestFailedError, EngineAsleepError)


class Together:
    """One of `num_ranks` that compute each step together.

    What breaks a step may have broken it on this rank only, while the others wait for it in a
    collective: this rank then computes nothing more, and its service ends the replica. A rank alone
    goes on.
    """

    def __init__(self, num_ranks: int) -> None:
        self._alone = num_ranks == 1
        self.failure: Exception | None = None
        """Why this rank cannot go on with the others."""

    def run(self, compute: Callable[[], T]) -> T:
        """Compute a step's part that other ranks take part in."""
        if self._alone:
            return compute()
        if self.failure is not None:
            raise self.failure
        made = attempt(compute)
        if made.error is not None:
            self.note(made.error)
            raise made.error
        assert made.value is not None
        return made.value

    def note(self, error: Exception) -> None:
        """Take what a request ended in. What is wrong with the request is so on every rank, and so is
        that the model is asleep.
        """
        if self._alone or isinstance(error, _ALIKE):
            return
        if self.failure is None:
            self.failure = error

    def check(self) -> None:
        """Raise `PhalanxDistError` where this rank cannot go on with the others."""
        if isinstance(self.failure, PhalanxDistError):
            raise self.failure
        if self.failure is not None:
            raise PhalanxDistError(
                f"a step failed on this rank, which leaves the others waiting for it: {self.failure}"
            ) from self.failure
