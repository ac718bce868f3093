"""Which weights the replicas of a model have to hold, and how each gets them.

A replica of a dynamic model serves only with the version that its model is at: the checkpoint that
it was started from, one that was loaded later, a broadcast, or what a trainer has put in itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from phalanx.errors import ConfigurationError, RoleOperationRefusedError
from phalanx.roles.calls import RETRY_S, Deadline, attempt, insist
from phalanx.roles.contracts import EngineCallError, Tag
from phalanx.roles.memory import NUM_TRIES
from phalanx.roles.replica import Replica
from phalanx.schema.roles import InferenceModelSpec, WeightSource

INITIAL_VERSION = "default"
"""What an engine calls the weights that it was started with."""


@dataclass(frozen=True)
class WeightTarget:
    """The version that replicas have to hold. `path` None: a trainer has put it in itself."""

    version: str
    path: str | None


def initial_target(model: InferenceModelSpec) -> WeightTarget | None:
    """Before anybody has brought weights: the checkpoint that engines start from, or none."""
    if model.weight_source is not WeightSource.LOCAL:
        return None
    return WeightTarget(INITIAL_VERSION, model.model_path)


class ModelWeights:
    """The weights of one model. `target` is None while there are none to serve with."""

    def __init__(self, model: InferenceModelSpec, timeout_s: float) -> None:
        self._model = model
        self._timeout_s = timeout_s
        self.target = initial_target(model)

    @property
    def version(self) -> str | None:
        """Of a dynamic model, what it is at."""
        return None if self.target is None else self.target.version

    def broadcast_version(self) -> int | None:
        """The newest broadcast. Raises `ConfigurationError` where the model follows none."""
        if not self._model.needs_dcs:
            raise ConfigurationError(
                f"model {self._model.name!r} has weight_source={self._model.weight_source.value!r};"
                " only models with weight_source 'dcs' register for broadcasts"
            )
        return None if self.target is None else int(self.target.version)

    def check_update(self, path: str, version: str) -> WeightTarget:
        """The target of an update; raises where the model does not take it, and changes nothing."""
        target = WeightTarget(self.check_version(version), path)
        if not path:
            raise ConfigurationError("path is empty; give the directory of a checkpoint")
        if self._model.needs_dcs:
            self._check_broadcast(target)
        known = None if self.target is None or self.target.version != version else self.target.path
        if known is not None and known != path:
            raise ConfigurationError(
                f"version {version!r} of model {self._model.name!r} is {known!r}; give {path!r}"
                " another version"
            )
        return target

    def check_version(self, version: str) -> str:
        """A version that weights from outside may have. Raises `ConfigurationError`."""
        if not self._model.needs_weight_update:
            raise ConfigurationError(
                f"model {self._model.name!r} has weight_source='static': its weights never change;"
                " give it another weight_source"
            )
        if not version or version == INITIAL_VERSION:
            raise ConfigurationError(
                f"version {version!r} must not be empty, nor {INITIAL_VERSION!r}, which is what an"
                " engine calls the weights that it was started with"
            )
        return version

    def _check_broadcast(self, target: WeightTarget) -> None:
        newest = self.broadcast_version()
        if not target.version.isascii() or not target.version.isdecimal():
            raise ConfigurationError(
                f"version {target.version!r} of model {self._model.name!r}, which follows"
                " broadcasts, must be a whole number"
            )
        number = int(target.version)
        if newest is not None and (number < newest or (number == newest and target != self.target)):
            raise RoleOperationRefusedError(
                f"model {self._model.name!r} is at broadcast {newest} from"
                f" {self.target and self.target.path!r}; {number} from {target.path!r} is not newer"
            )

    async def sync(self, replica: Replica) -> bool:
        """Have it hold the target; False where it has to wait for a trainer's weights.

        Its weights are resident, or can be overwritten. Raises `EngineCallError` where nobody knows
        what it holds, or it has refused: `replica.weights` says which version is certain.
        """
        if not replica.is_dynamic:
            return True
        target = self.target
        if target is None:
            return False
        if replica.weights == target.version:
            return True
        if await self._has(replica, target):
            replica.has_weights(target.version)
            return True
        if target.path is None:
            return False
        await self._load(replica, target.version, target.path)
        return True

    async def note_lost(self, replica: Replica) -> None:
        """Its weights were given back and it has memory for others: unless it has kept them, the
        version that it says now is of lost ones, perhaps of some that nobody was told of.

        Raises `EngineCallError`.
        """
        deadline = Deadline(self._timeout_s)
        if await self._waits(replica, deadline) is not False:
            replica.lost_weights = await self._said(replica, deadline)

    async def _has(self, replica: Replica, target: WeightTarget) -> bool:
        """Whether it says for certain that it holds the target already."""
        deadline = Deadline(self._timeout_s)
        if await self._said(replica, deadline) != target.version:
            return False
        waits = await self._waits(replica, deadline)
        # What it says of weights that were given back since means nothing, unless it knows of that.
        return waits is False or (waits is None and replica.lost_weights is None)

    async def _load(self, replica: Replica, version: str, path: str) -> None:
        """Loading the same checkpoint twice does no harm, so that a lost answer is asked for again."""
        deadline = Deadline(self._timeout_s)
        before = await self._said(replica, deadline)
        what = f"{replica.engine_id}: load weights {version!r} from {path}"
        replica.busy, is_certain = True, True
        try:
            while True:
                try:
                    await attempt(
                        lambda: replica.engine.load_weights(path, version),
                        what,
                        max(deadline.left_s / NUM_TRIES, 1.0),
                    )
                    break
                except EngineCallError as error:
                    is_certain = is_certain and not error.uncertain
                    if before != version and await self._said(replica, deadline) == version:
                        break  # they are in; only the answer was lost, or what came after failed
                    if not error.uncertain or deadline.left_s <= RETRY_S:
                        raise
                await asyncio.sleep(RETRY_S)
        except BaseException:
            # Until then it is said to have what it had: it serves that, or what it is to have.
            if not is_certain:
                replica.weights = None
            raise
        finally:
            replica.busy = False
        replica.has_weights(version)

    async def _waits(self, replica: Replica, deadline: Deadline) -> bool | None:
        what = f"{replica.engine_id}: does it wait for weights"
        return await insist(replica.engine.waits_for_weights, what, deadline)

    async def _said(self, replica: Replica, deadline: Deadline) -> str:
        what = f"{replica.engine_id}: its weight version"
        return await insist(replica.engine.weight_version, what, deadline)


def holds_weights(replica: Replica) -> bool:
    """Whether there is memory that weights could be put into."""
    return Tag.WEIGHTS in replica.residency.held
