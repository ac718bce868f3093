"""Which phase may follow which: batch after batch, each from the first phase to the last."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.errors import ConfigurationError, RoleOperationRefusedError
from phalanx.roles.coordination.record import PhaseState
from phalanx.schema.job_placement import PhaseSpec

_MAX_NAME = 200


class PhaseOrder:
    """The phases of a job, in their order."""

    def __init__(self, phases: Iterable[PhaseSpec]) -> None:
        self.phases = tuple(phases)
        self._names = [phase.name for phase in self.phases]

    def index(self, name: str) -> int:
        """Raises `ConfigurationError` for a phase that does not exist."""
        if name not in self._names:
            raise ConfigurationError(
                f"there is no phase {name!r}; phases: {', '.join(self._names) or 'none'}"
            )
        return self._names.index(name)

    def check(self, state: PhaseState, name: str, batch: str) -> int:
        """The index of phase `name`, where it may be entered for `batch` now.

        The next phase of the same batch, or an earlier one again; of another batch the first, once
        this one has reached its last phase or is given up. Raises `RoleOperationRefusedError`.
        """
        check_label("batch", batch)
        index = self.index(name)
        first, last = self._names[0], self._names[-1]
        if state.batch is None or state.batch != batch or state.abandoned:
            open_batch = state.batch is not None and not state.abandoned
            if open_batch and state.reached != len(self._names) - 1:
                raise RoleOperationRefusedError(
                    f"batch {state.batch!r} is in its phase {self._names[state.reached]!r} and"
                    f" ends with {last!r}, so batch {batch!r} cannot begin; enter"
                    f" {self._names[state.reached + 1]!r} of batch {state.batch!r}, or give that"
                    " one up with `phalanx phase leave --abandon`"
                )
            if index != 0:
                raise RoleOperationRefusedError(
                    f"batch {batch!r} has not begun, so its phase {name!r} cannot be entered; a"
                    f" batch begins with {first!r}"
                )
        elif index > state.reached + 1:
            raise RoleOperationRefusedError(
                f"phase {name!r} of batch {batch!r} cannot follow {self._names[state.reached]!r};"
                f" enter {self._names[state.reached + 1]!r} first (the order is"
                f" {', '.join(self._names)})"
            )
        return index


def check_label(what: str, value: str) -> None:
    """Refuse what could not be shown: raises `ConfigurationError`."""
    if not (0 < len(value) <= _MAX_NAME and value.isprintable()):
        raise ConfigurationError(
            f"{what}={value[:_MAX_NAME]!r} must be 1 to {_MAX_NAME} printable characters"
        )
