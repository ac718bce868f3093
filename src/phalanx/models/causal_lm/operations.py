"""What an operator does to a running model: its memory given back and taken again, its weights
replaced, questions about them.

Every rank of a replica does the same at the same point between two steps. What is refused is refused
on all of them, before anything has changed.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from phalanx.errors import (
    DeviceMemoryError,
    InvalidInputError,
    InvalidRequestError,
    PhalanxError,
    RequestFailedError,
    WeightUpdateError,
)
from phalanx.loop.step_loop import StepLoop
from phalanx.models.causal_lm.resident_memory import ResidentMemory
from phalanx.models.causal_lm.weight_groups import WeightGroups
from phalanx.models.causal_lm.weight_questions import WeightQuestions
from phalanx.models.causal_lm.weight_store import DecoderWeights
from phalanx.models.causal_lm.weight_version import ServedVersion
from phalanx.parallel.ranks import Ranks
from phalanx.schema.control import (
    CheckWeights,
    JoinWeightGroup,
    LeaveWeightGroup,
    LoadWeights,
    MemoryTag,
    Question,
    ReceiveWeights,
    ReplaceWeights,
    SetWeightVersion,
    Sleep,
    Wake,
    WeightAnswer,
    WeightCheck,
)
from phalanx.schema.statistics import EngineMemory
from phalanx.step.attempt import attempt
from phalanx.step.engine import StepEngine

logger = logging.getLogger(__name__)

WeightOp = LoadWeights | ReplaceWeights | ReceiveWeights
Operation = Sleep | Wake | WeightOp | SetWeightVersion | JoinWeightGroup | LeaveWeightGroup


class Operations:
    """See the module. The loop must compute nothing while `memory` is not ready."""

    def __init__(
        self,
        engine: StepEngine,
        loop: StepLoop,
        weights: DecoderWeights,
        ranks: Ranks,
        groups: WeightGroups,
        resident: ResidentMemory,
    ) -> None:
        self._engine = engine
        self._loop = loop
        self.weights = self._weights = weights
        self._ranks = ranks
        self._groups = groups
        self._resident = resident
        self._questions = WeightQuestions(weights, ranks)
        self._asleep: frozenset[MemoryTag] = frozenset()
        self._is_warm = True
        self.served = ServedVersion()

    @property
    def memory(self) -> EngineMemory:
        """What is given back, and whether weights have yet to come."""
        lost = MemoryTag.WEIGHTS not in self._asleep and not self._weights.complete
        return EngineMemory(asleep=self._asleep, waiting_for_weights=lost)

    def apply(self, op: Operation, *, at_rest: bool) -> bool:
        """Apply `op`; False where it was refused. `at_rest`: no request is live, or all are paused.

        Raises the errors that `BatchingEntry.control` may raise.
        """
        match op:
            case Sleep(tags=tags):
                return self._sleep(tags, at_rest=at_rest)
            case Wake(tags=tags):
                self._wake(tags & self._asleep)
            case LoadWeights(path=path, version=version):
                self._expect_memory()
                self._check(partial(self._weights.check_directory, Path(path)))
                self._change(partial(self._weights.replace_all, Path(path)), version)
                self._engine.backend.release_cached_memory()
            case ReplaceWeights(tensors=tensors, version=version):
                self._replace(tensors, version)
            case ReceiveWeights():
                self._receive(op)
            case SetWeightVersion(version=version):
                self.served.update(version)
            case JoinWeightGroup():
                self._join(op)
            case LeaveWeightGroup(group_name=name):
                self._groups.leave(name)
        return True

    def ask(self, question: Question) -> WeightAnswer:
        """Raises `InvalidRequestError` where there is no answer."""
        self._expect_memory()
        if not self._weights.complete:
            raise InvalidRequestError("the engine waits for weights; send all of them first")
        answer = self._questions.answer(question)
        if isinstance(question, CheckWeights) and question.action is WeightCheck.RESET_TENSORS:
            self._renewed(None)
        return answer

    def close(self) -> None:
        self._groups.close()
        self._resident.close()

    def _sleep(self, tags: frozenset[MemoryTag], *, at_rest: bool) -> bool:
        fresh = tags - self._asleep
        if not fresh:
            return True
        if self.memory.ready and not at_rest:
            return False
        self._loop.push_back_all()
        if MemoryTag.KV_CACHE in fresh and not self._engine.at_rest():
            return False  # some of it is held for another engine
        self._give_back(fresh)
        self._ranks.least([0])  # one rank answers, and memory is free on all of them when it does
        self._asleep |= fresh
        return True

    def _wake(self, due: frozenset[MemoryTag]) -> None:
        if not due:
            return
        self._expect_room(partial(self._resident.take, due), partial(self._resident.give, due))
        returning = False
        if MemoryTag.WEIGHTS in due:
            returning = bool(self._ranks.least([self._weights.can_return])[0])
        failed = self._failed(partial(self._take, due, returning=returning))
        if failed is not None:
            self._give_back(due)
            raise RequestFailedError(
                f"memory for {', '.join(sorted(due))} could not be taken, and the engine sleeps on: "
                f"{failed}"
            )
        self._asleep -= due
        if not self._weights.complete:
            logger.info("the weights were replaced since they were loaded: new ones are awaited")
        self._warm_up()

    def _take(self, due: frozenset[MemoryTag], *, returning: bool) -> None:
        self._engine.restore(frozenset(due))
        if returning:
            self._weights.restore()
            # What they were read and packed from is free, and may be as large as they are.
            self._engine.backend.release_cached_memory()

    def _give_back(self, tags: frozenset[MemoryTag]) -> None:
        # What is captured addresses all of it.
        self._is_warm = False
        if MemoryTag.WEIGHTS in tags:
            self._weights.release()
        self._engine.release(frozenset(tags))
        self._resident.give(tags)

    def _expect_room(self, take: Callable[[], None], give: Callable[[], None]) -> None:
        """Have every rank take memory of its device, or none: raises `DeviceMemoryError`."""
        failed = self._failed(take)
        if failed is not None:
            give()
            raise DeviceMemoryError(f"{failed}. Nothing has changed; what was asleep sleeps on")

    def _replace(self, tensors: Mapping[str, Tensor], version: str | None) -> None:
        self._expect_memory()
        for name, tensor in tensors.items():
            self._weights.check_weight(name, tensor)
        with self._coming(tensor.nbytes for tensor in tensors.values()):
            self._change(partial(self._weights.replace, tensors), version)

    @contextlib.contextmanager
    def _coming(self, sizes: Iterable[int]) -> Iterator[None]:
        """Weights of these sizes are there beside the ones that they replace."""
        take = partial(self._resident.take_update, sum(sizes))
        self._expect_room(take, self._resident.end_update)
        try:
            yield
        finally:
            self._resident.end_update()

    def _receive(self, op: ReceiveWeights) -> None:
        self._expect_memory()
        wanted = self._groups.announced(op)
        for name, shape, dtype in wanted:
            self._weights.check_shape(name, shape, dtype)
        with self._coming(math.prod(shape) * dtype.itemsize for _, shape, dtype in wanted):
            received: dict[str, Tensor] = {}
            failed = self._failed(partial(self._groups.receive, op.group_name, wanted, received))
            if failed is not None:
                self._groups.leave(op.group_name)
                raise WeightUpdateError(
                    f"{failed}. Nothing has changed; join the weight group {op.group_name!r} again"
                )
            self._change(partial(self._weights.replace, received), op.version)

    def _join(self, op: JoinWeightGroup) -> None:
        self._groups.check(op, self._ranks.size)
        failed = self._failed(partial(self._groups.join, op, self._ranks.rank))
        if failed is not None:
            self._groups.leave(op.group_name)
            raise WeightUpdateError(failed)

    def _change(self, put: Callable[[], None], version: str | None) -> None:
        """Put weights that fit in place of the old ones."""
        self._loop.push_back_all()
        failed = self._failed(put)
        if failed is not None:
            self._weights.lose()
            self._is_warm = False
            raise RequestFailedError(
                f"the new weights could not be put in, which has lost the old ones too: {failed}. "
                "The engine waits for weights; send all of them"
            )
        self._renewed(version)

    def _renewed(self, version: str | None) -> None:
        """Other weights are there: what was made for the old ones is made anew."""
        self._loop.push_back_all()
        self._engine.prefixes.forget()
        self.served.update(version)
        if not self._weights.stay_in_place:
            self._engine.drop_captures()
            self._is_warm = False
        self._warm_up()

    def _warm_up(self) -> None:
        """Capture again what was captured, once everything is there that a capture addresses."""
        if self._is_warm or not self.memory.ready:
            return
        self._is_warm = True
        made = attempt(self._engine.warm_up)
        if made.error is not None:
            self._engine.drop_captures()
            logger.warning("steps are computed without captures from now on: %s", made.error)

    def _expect_memory(self) -> None:
        if MemoryTag.WEIGHTS in self._asleep:
            raise InvalidRequestError(
                "the memory for weights was given back; take it again first, with "
                "control(Wake(frozenset({MemoryTag.WEIGHTS}))) or POST /resume_memory_occupation "
                '{"tags": ["weights"]}'
            )

    def _check(self, check: Callable[[], None]) -> None:
        """Raise on every rank what `check` refuses on one."""
        made = attempt(check)
        if made.error is not None and not isinstance(made.error, InvalidInputError):
            raise made.error
        refusal = self._ranks.first_said(None if made.error is None else str(made.error))
        if refusal is not None:
            field = made.error.field if isinstance(made.error, InvalidRequestError) else ""
            raise InvalidRequestError(refusal, field=field) from made.error

    def _failed(self, call: Callable[[], object]) -> str | None:
        """Why `call` failed on the first rank on which it did."""
        made = attempt(call)
        said = None
        if made.error is not None:
            logger.info("an operation failed", exc_info=made.error)
            ours = isinstance(made.error, PhalanxError)
            said = str(made.error) if ours else f"{type(made.error).__name__}: {made.error}"
        return self._ranks.first_said(said)
