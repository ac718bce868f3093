"""The action expert: from noisy actions, at a time, to the velocity that leads to clean ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable

from torch import Tensor, nn

from phalanx.layers.gemma import Rotary
from phalanx.models.pi.targets import Target
from phalanx.step.resources.attention import PagedAttention

MAX_CONDITIONS = 256


class ActionExpert(nn.Module, ABC):
    """What is computed of a time depends on no request, and is kept for those that come there too."""

    def __init__(self) -> None:
        super().__init__()
        self._conditions: OrderedDict[float, Tensor] = OrderedDict()

    def condition(self, time: float) -> Tensor:
        """What a float32 `time` makes of the network: one tensor, of a shape of the expert's own."""
        found = self._conditions.get(time)
        if found is None:
            found = self.compute_condition(time)
            if len(self._conditions) >= MAX_CONDITIONS:
                self._conditions.popitem(last=False)
            self._conditions[time] = found
        else:
            self._conditions.move_to_end(time)
        return found

    def forget_conditions(self) -> None:
        """The weights have changed."""
        self._conditions.clear()

    @abstractmethod
    def targets(self) -> Iterable[tuple[str, Target]]:
        """Where a checkpoint's tensors go, by their plain names."""

    @abstractmethod
    def compute_condition(self, time: float) -> Tensor: ...

    @abstractmethod
    def velocity(
        self, x: Tensor, conditions: Tensor, attention: PagedAttention, rotary: Rotary
    ) -> Tensor:
        """Of `x` [R, chunk, actions], float32, each row at its own time.

        `conditions` are [R, 1, ...], or [R, chunk, ...] where actions of a row are at several times.
        """
        ...

    def remember_state(self, state: Tensor, attention: PagedAttention, rotary: Rotary) -> None:
        """Leave the states [R, size] of rows in the cache, for experts that read them there."""
        raise AssertionError("this expert has no state of its own")
