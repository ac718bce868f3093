"""A trainer's weights on their way into the engine.

As in SGLang, an update waits until no request runs, unless generation is paused: so an answer is of
one version, or its `weight_versions` say which tokens are of which.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from phalanx.checkpoints import checkpoint_dir, checkpoint_names
from phalanx.engine.engine import Engine
from phalanx.errors import InvalidRequestError
from phalanx.schema.control import (
    CheckWeights,
    ControlOp,
    JoinWeightGroup,
    LeaveWeightGroup,
    LoadWeights,
    ReadWeight,
    ReceiveWeights,
    ReplaceWeights,
    SetWeightVersion,
    WeightCheck,
    WeightReport,
    WeightSample,
)
from phalanx.server.live import LiveRequests
from phalanx.server.operations.quiescence import Quiescence
from phalanx.server.operations.undertakings import Undertakings
from phalanx.server.operations.update_session import UpdateSession
from phalanx.wire.sglang.weights import MOST_NUMBERS

if TYPE_CHECKING:
    import torch

Numbers = list["Numbers"] | list[float] | float


class WeightOperations:
    """`dynamic` False: the checkpoint's weights are served, and all others refused."""

    def __init__(
        self,
        engine: Engine,
        live: LiveRequests,
        quiescence: Quiescence,
        session: UpdateSession,
        undertakings: Undertakings,
        *,
        dynamic: bool,
    ) -> None:
        self._engine = engine
        self._live = live
        self._quiescence = quiescence
        self._session = session
        self._undertakings = undertakings
        self.dynamic = dynamic
        """Whether other weights than the checkpoint's are taken."""
        self.replaced = False
        """Whether other weights than the checkpoint's have been put in."""

    @property
    def num_ranks(self) -> int:
        """Of one replica."""
        return self._engine.config.parallel.infer_replica_world_size()

    @property
    def world_size(self) -> int:
        """Ranks of all replicas."""
        return self._engine.deployment.replica_count * self.num_ranks

    @property
    def version(self) -> str:
        return self._engine.version

    @property
    def num_paused(self) -> int:
        """Requests that stand still."""
        return len(self._live) if self._quiescence.paused else 0

    def check_dynamic(self) -> None:
        """Refuse, where the server is static, whatever would change its weights."""
        if not self.dynamic:
            raise InvalidRequestError(
                "this server serves the weights of its checkpoint alone (weight_source=static) and "
                "takes no others; start it with --weight-source dynamic for a model that is trained"
            )

    async def load(self, path: str, version: str | None, *, abort: bool = False) -> None:
        """Put the weights of a checkpoint in: a directory, or a name that a server starts with."""
        self.check_dynamic()
        directory = await asyncio.to_thread(_directory, path)
        await self._put(LoadWeights(directory, version), abort=abort)

    async def replace(
        self, tensors: Mapping[str, torch.Tensor], version: str | None, *, abort: bool = False
    ) -> None:
        """Put these tensors in."""
        await self._put(ReplaceWeights(tensors, version), abort=abort)

    async def receive(self, op: ReceiveWeights, *, abort: bool = False) -> None:
        """Take tensors from rank 0 of a group, and put them in."""
        await self._put(op, abort=abort)

    async def join(self, op: JoinWeightGroup) -> None:
        """Join a trainer's process group; returns when all of it have come together."""
        self.check_dynamic()
        await self._applied(op)

    async def leave(self, op: LeaveWeightGroup) -> None:
        await self._applied(op)

    async def rename(self, version: str, *, abort: bool) -> None:
        """Call the weights that are there `version`."""
        self.check_dynamic()
        if abort:
            self._live.abort("")
        await self._applied(SetWeightVersion(version))

    async def begin(self) -> None:
        """Updates until `end` belong together: no request sees a part of them."""
        self.check_dynamic()
        # Held for this caller alone while it waits: it may leave, and another wait as well.
        async with self._quiescence.quiet():
            self._session.begin()

    async def end(self, version: str | None) -> bool:
        """Let requests in again; False where nothing had begun."""
        self.check_dynamic()
        if version is not None:
            await self._applied(SetWeightVersion(version))
        return self._session.end()

    async def read(self, name: str, rows: int) -> Numbers:
        """The first `rows` rows of a weight (numbers, where it has one dimension)."""
        first = await self._sample(name, 1)
        rows = min(rows, first.shape[0]) if first.shape else 1
        wanted = rows * math.prod(first.shape[1:])
        if wanted > MOST_NUMBERS:
            raise InvalidRequestError(
                f"{rows} rows of {name!r} of shape {list(first.shape)} are {wanted} numbers; at "
                f"most {MOST_NUMBERS} are answered, give a smaller truncate_size",
                field="truncate_size",
            )
        sample = await self._sample(name, max(wanted, 1))
        return _shaped(list(sample.values), first.shape[1:])

    async def check(self, action: WeightCheck) -> list[WeightReport]:
        """What each replica finds."""
        if action is WeightCheck.RESET_TENSORS:
            self.check_dynamic()
            self.replaced = True
        answers = await asyncio.to_thread(self._engine.ask, CheckWeights(action))
        return [one for one in answers if isinstance(one, WeightReport)]

    async def _sample(self, name: str, limit: int) -> WeightSample:
        answers = await asyncio.to_thread(self._engine.ask, ReadWeight(name, limit))
        sample = answers[0]
        assert isinstance(sample, WeightSample)
        return sample

    async def _put(self, op: ControlOp, *, abort: bool) -> None:
        self.check_dynamic()
        async with self._quiet(abort=abort):
            # Half-way into the engine it is too late to call them the checkpoint's.
            self.replaced = True
            await self._undertakings.done(self._in_session(op))

    async def _in_session(self, op: ControlOp) -> None:
        with self._session.working():
            await self._apply(op)

    @asynccontextmanager
    async def _quiet(self, *, abort: bool) -> AsyncIterator[None]:
        with self._quiescence.holding():
            if abort:
                self._live.abort("")
            await self._quiescence.settled()
            yield

    async def _applied(self, op: ControlOp) -> None:
        await self._undertakings.done(self._apply(op))

    async def _apply(self, op: ControlOp) -> None:
        if not await asyncio.to_thread(self._engine.control, op):
            raise InvalidRequestError(
                f"the engine refused {type(op).__name__} in the state that it is in; nothing has "
                "changed, see memory and internal_states in /server_info"
            )


def _directory(path: str) -> str:
    """What is no known name the engine looks at, and says what is wrong with it."""
    return str(checkpoint_dir(path)) if path in checkpoint_names() else path


def _shaped(values: list[float], shape: tuple[int, ...]) -> Numbers:
    """Rows of `shape`, as nested lists."""
    if not shape:
        return values
    size = math.prod(shape)
    rows = [values[at : at + size] for at in range(0, len(values), size)] if size else []
    return [_shaped(row, shape[1:]) for row in rows]
