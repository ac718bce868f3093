"""The groups in which trainers send weights to this rank, by their names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx.engine_config import get_engine_config
from phalanx.errors import InvalidRequestError
from phalanx.parallel.process_group import BACKENDS
from phalanx.parallel.weight_group import WeightGroup
from phalanx.schema.control import JoinWeightGroup, ReceiveWeights

MOST_TIMEOUT_S = 300.0
PART = 3
"""A trainer is waited for, when it makes the group and whenever it is to send, for this part of the
time that the ranks wait for one another: else those that wait for this one would give up first."""

Announced = tuple[str, tuple[int, ...], torch.dtype]
"""A tensor that is to come: name, shape, dtype."""


class WeightGroups:
    """See the module. Plain bookkeeping: several ranks must call it alike."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._timeout_s = min(MOST_TIMEOUT_S, get_engine_config().runtime.dist_timeout_s / PART)
        self._groups: dict[str, tuple[JoinWeightGroup, WeightGroup]] = {}

    def check(self, op: JoinWeightGroup, num_ranks: int) -> None:
        """Refuse a group that this replica's ranks cannot join. Raises `InvalidRequestError`."""
        backend = BACKENDS[self._device.type]
        if op.backend != backend:
            raise InvalidRequestError(
                f"backend={op.backend!r} cannot send to an engine on a {self._device.type} device; "
                f"use {backend!r} on both sides",
                field="backend",
            )
        last = op.rank_offset + num_ranks - 1
        if not 1 <= op.rank_offset <= last < op.world_size:
            raise InvalidRequestError(
                f"rank_offset={op.rank_offset} puts this replica's {num_ranks} ranks at "
                f"{op.rank_offset} to {last} of world_size={op.world_size}; rank 0 is the trainer's, "
                "and every rank of every replica needs one of the others",
                field="rank_offset",
            )

    def join(self, op: JoinWeightGroup, rank: int) -> None:
        """Join as the replica's rank `rank`; a group that was joined just so is kept, unless its
        trainer has ended: another may have come in its place.

        Raises `PhalanxDistError`.
        """
        known = self._groups.get(op.group_name)
        if known is not None and known[0] == op and known[1].stands:
            return
        self.leave(op.group_name)
        address = (op.master_address, op.master_port)
        self._groups[op.group_name] = (
            op,
            WeightGroup(
                address,
                op.rank_offset + rank,
                op.world_size,
                op.group_name,
                self._device,
                self._timeout_s,
            ),
        )

    def leave(self, name: str) -> None:
        """Leave a group, if it is joined."""
        self._groups.pop(name, None)

    def close(self) -> None:
        """Leave all groups."""
        self._groups.clear()

    def announced(self, op: ReceiveWeights) -> Sequence[Announced]:
        """What is to come. Raises `InvalidRequestError` where that cannot be."""
        if op.group_name not in self._groups:
            joined = ", ".join(map(repr, self._groups)) or "none"
            raise InvalidRequestError(
                f"weight group {op.group_name!r} is not joined (joined: {joined}); join it first "
                "(JoinWeightGroup, or POST /init_weights_update_group)",
                field="group_name",
            )
        if not len(op.names) == len(op.dtypes) == len(op.shapes):
            raise InvalidRequestError(
                f"{len(op.names)} names, {len(op.dtypes)} dtypes and {len(op.shapes)} shapes; give "
                "equally many",
                field="names",
            )
        dtypes = map(_dtype, op.dtypes)
        return list(zip(op.names, op.shapes, dtypes, strict=True))

    def receive(self, name: str, wanted: Sequence[Announced], received: dict[str, Tensor]) -> None:
        """Take these tensors from the trainer. Raises `PhalanxDistError`."""
        _, group = self._groups[name]
        for each, shape, dtype in wanted:
            tensor = torch.empty(shape, dtype=dtype, device=self._device)
            group.receive(tensor)
            received[each] = tensor


def _dtype(name: str) -> torch.dtype:
    """The dtype of a name such as `bfloat16` or `torch.bfloat16`."""
    found = _DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise InvalidRequestError(
            f"dtype {name!r} is none that weights come in; allowed: {', '.join(_DTYPES)}",
            field="dtypes",
        )
    return found


_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
