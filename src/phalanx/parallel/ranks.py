"""The ranks that compute one model together: their groups, and how they come to the same decision.

Every rank takes the same steps in the same order. What could differ between processes (time, free
memory, what a device rounds) is agreed on here before it decides anything.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.engine_config import get_engine_config
from phalanx.errors import ConfigurationError
from phalanx.parallel.collectives.base import ReduceOp
from phalanx.parallel.current import current_mesh, default_mesh
from phalanx.parallel.mesh import Group
from phalanx.parallel.ops import all_gather, all_reduce_, broadcast

Fact = int | str | None
_MAX_MESSAGE_BYTES = 1024


@dataclass(frozen=True)
class Ranks:
    """This rank's tensor-parallel groups, which have the same members; all calls are collective."""

    dense: Group
    attention: Group

    @classmethod
    def alone(cls, device: torch.device) -> Ranks:
        """One rank that holds the whole model."""
        dense, attention = (
            Group(name, (0,), 0, device, None) for name in ("dense_tp", "attention_tp")
        )
        return cls(dense, attention)

    @classmethod
    def current(cls, device: torch.device) -> Ranks:
        """Those of the current mesh; one rank alone where there is none.

        Raises `PhalanxDistError` where the configuration asks for several and there is none.
        """
        mesh = current_mesh()
        if mesh is None and get_engine_config().parallel.infer_replica_world_size() == 1:
            return cls.alone(device)
        mesh = default_mesh()
        return cls(mesh.group("dense_tp"), mesh.group("attention_tp"))

    @property
    def size(self) -> int:
        return self.dense.size

    @property
    def rank(self) -> int:
        return self.dense.rank

    def least(self, values: Sequence[int]) -> list[int]:
        """The smallest of every rank's values, place by place; all give equally many."""
        if self.size == 1 or not values:
            return list(values)
        return all_reduce_(self._tensor(values), self.dense, ReduceOp.MIN).tolist()

    def greatest(self, x: Tensor) -> Tensor:
        """The largest of every rank's `x`, element by element."""
        return x if self.size == 1 else all_reduce_(x, self.dense, ReduceOp.MAX)

    def of_all(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values; all give equally many."""
        if self.size == 1 or not values:
            return [list(values)]
        gathered: list[list[int]] = all_gather(self._tensor(values)[None], self.dense, 0).tolist()
        return gathered

    def first_said(self, message: str | None) -> str | None:
        """What the first rank says that says anything."""
        if self.size == 1:
            return message
        said = [] if message is None else list(message.encode()[:_MAX_MESSAGE_BYTES])
        rows = self.of_all([len(said), *said, *[0] * (_MAX_MESSAGE_BYTES - len(said))])
        for length, *row in rows:
            if length:
                return bytes(row[:length]).decode(errors="ignore")
        return None

    def take_first(self, x: Tensor) -> None:
        """Put the first rank's `x` into every rank's."""
        if self.size > 1:
            x.copy_(broadcast(x, self.dense))

    def check_same(self, facts: Mapping[str, Fact]) -> None:
        """Refuse ranks whose facts differ; all give the same names in the same order."""
        numbers = self._tensor([_number(value) for value in facts.values()])
        of_rank = all_gather(numbers[None], self.dense, 0).tolist()
        for place, (name, value) in enumerate(facts.items()):
            others = [rank for rank, row in enumerate(of_rank) if row[place] != numbers[place]]
            if others:
                raise ConfigurationError(
                    f"{name}={value!r} on rank {self.rank} differs from rank {others[0]}'s; all "
                    "ranks of a replica load the same checkpoint with the same arguments"
                )

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.dense.device)


def _number(value: Fact) -> int:
    """Different for different values, as good as surely."""
    if isinstance(value, int):
        return value
    return -1 - zlib.crc32(repr(value).encode())
