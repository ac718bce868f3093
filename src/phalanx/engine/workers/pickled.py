"""A value that workers are started with: pickled once, before any of them runs."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Generic, Self, TypeVar

from phalanx.engine.workers.payload import find_culprit
from phalanx.errors import ConfigurationError

T = TypeVar("T")


@dataclass(frozen=True)
class Pickled(Generic[T]):
    """What `load` returns, in any process; pickling this copies the bytes only."""

    data: bytes

    @classmethod
    def of(cls, value: T, what: str) -> Self:
        """Raises ConfigurationError where it cannot be pickled; `what` is what it says of it."""
        try:
            return cls(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
        except Exception as error:
            path, culprit = find_culprit(value)
            where = f"{'.'.join(path)} is a {type(culprit).__qualname__}: " if path else ""
            raise ConfigurationError(
                f"{what} cannot be pickled, so that no worker can be given it: {where}"
                f"{type(error).__name__}: {error}; keep open files, locks and classes defined "
                "inside functions out of it"
            ) from error

    def load(self) -> T:
        """A copy of the value."""
        value: T = pickle.loads(self.data)
        return value
