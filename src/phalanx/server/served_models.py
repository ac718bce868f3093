"""The names under which the one model of this server is known."""

from __future__ import annotations

from pathlib import Path

from phalanx.errors import UnknownModelError


class ServedModels:
    """`name` is what answers say; the checkpoint's own name, which is `listed` with it, and
    its path are understood too."""

    def __init__(self, served_name: str | None, checkpoint: str) -> None:
        own = Path(checkpoint).name
        self.name = served_name or own
        self.checkpoint = checkpoint
        self.listed = tuple(dict.fromkeys((self.name, own)))
        self._names = {*self.listed, checkpoint}

    def check(self, name: str | None) -> None:
        """Refuse a name that is not served; none at all means the one model."""
        if name is not None and name not in self._names:
            raise UnknownModelError(
                f"the model {name!r} does not exist here; this server has {self.name!r}",
                field="model",
            )
