"""What a loaded model holds of its device by tag, as its account is told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from phalanx.device.memory_account import MemoryAccount
from phalanx.schema.control import MemoryTag

UPDATE = "weight_update"
"""Of weights that have come and are not in place yet."""


class ResidentMemory:
    """See the module. A tag's size is that of the tensors that were there when it was first held."""

    def __init__(self, account: MemoryAccount) -> None:
        self._account = account
        self._sizes: dict[MemoryTag, int] = {}

    def hold(self, tag: MemoryTag, num_bytes: int) -> None:
        """So much is there under the tag. Raises `SimulatedOutOfMemoryError` where there is no room."""
        self._account.take(tag, num_bytes)
        self._sizes[tag] = num_bytes

    def take(self, tags: Iterable[MemoryTag]) -> None:
        """Room for what the tags have held before. Raises as `hold`."""
        for tag in sorted(tags):
            self._account.take(tag, self._sizes.get(tag, 0))

    def give(self, tags: Iterable[MemoryTag]) -> None:
        """Nothing is there under these tags any more."""
        for tag in tags:
            self._account.give(tag)

    def take_update(self, num_bytes: int) -> None:
        """Room for weights that come. Raises as `hold`."""
        self._account.take(UPDATE, num_bytes)

    def end_update(self) -> None:
        """They are in place, or dropped. Any number of times."""
        self._account.give(UPDATE)

    def close(self) -> None:
        self.give(MemoryTag)
        self.end_update()

    @contextlib.contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Nothing is held where what is done inside fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise
