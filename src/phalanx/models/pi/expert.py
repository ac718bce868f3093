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
    """What is computed of a time depends on no request, and is kept for those that come there too.

    `values_prefix`: whether it has a head that values what the language model knows.
    """

    values_prefix: bool = False

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

    @property
    def has_value(self) -> bool:
        """Whether it has a head that values its own hidden values, at each step."""
        return False

    @property
    def trained_later(self) -> frozenset[str]:
        """Names of tensors that a checkpoint may lack, since only a trained policy has them."""
        return frozenset()

    def draw_untrained(self) -> None:
        """Give those the values that an untrained policy has there."""

    @abstractmethod
    def targets(self) -> Iterable[tuple[str, Target]]:
        """Where a checkpoint's tensors go, by their plain names."""

    @abstractmethod
    def compute_condition(self, time: float) -> Tensor: ...

    @abstractmethod
    def hidden(
        self, x: Tensor, conditions: Tensor, attention: PagedAttention, rotary: Rotary
    ) -> Tensor:
        """What is known of `x` [R, chunk, actions], float32, each row at its own time: float32
        [R, chunk, width].

        `conditions` are [R, 1, ...], or [R, chunk, ...] where actions of a row are at several times.
        """
        ...

    @abstractmethod
    def velocity(self, hidden: Tensor) -> Tensor:
        """Float32 [R, chunk, actions]."""
        ...

    def value(self, hidden: Tensor) -> Tensor:
        """How much return is expected, float32 [R, 1], of what is known of some tokens, float32
        [R, tokens, width], by an expert that has a head for it.
        """
        raise AssertionError("this expert has no value head")

    def remember_state(self, state: Tensor, attention: PagedAttention, rotary: Rotary) -> None:
        """Leave the states [R, size] of rows in the cache, for experts that read them there."""
        raise AssertionError("this expert has no state of its own")
