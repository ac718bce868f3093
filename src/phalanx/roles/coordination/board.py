"""What is shown of a job's phases, and whoever waits for it to change."""

from __future__ import annotations

import asyncio

import msgspec

from phalanx.roles.coordination.phase_operations import RunningOperation
from phalanx.roles.coordination.record import PhaseState
from phalanx.roles.coordination.schedule import Schedule
from phalanx.roles.coordination.steps import Step
from phalanx.roles.coordination.turns import Turns
from phalanx.wire.phases import PhasesDocument, TransitionView


class PhaseBoard:
    """`state` is where the job is, in memory. Every change has a number of its own."""

    def __init__(self, schedule: Schedule, state: PhaseState) -> None:
        self._schedule = schedule
        self._transition: TransitionView | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self.state = state

    def set(self, state: PhaseState) -> None:
        self.state = msgspec.structs.replace(state, number=self.state.number + 1)
        # Whoever waits holds the old one; the next to wait gets a new one.
        self._changed.set()
        self._changed = asyncio.Event()

    def show_step(self, running: RunningOperation, step: Step) -> None:
        self._transition = TransitionView(
            phase=running.target,
            operation_id=running.ids[0],
            step=step.does,
            since_wall_s=running.since_wall_s,
        )
        self.set(self.state)

    def show_end(self) -> None:
        """Nothing is under way."""
        self._transition = None
        self.set(self.state)

    def document(self, turns: Turns) -> PhasesDocument:
        state, trainer = self.state, turns.trainer.record
        return PhasesDocument(
            number=state.number,
            mode=self._schedule.mode.value,
            phases=self._schedule.views,
            phase=state.phase,
            batch=None if state.abandoned else state.batch,
            transition=self._transition,
            blocked=turns.blocked,
            leases=turns.leases.views(turns.holding),
            trainer_id=None if trainer is None else trainer.trainer_id,
            trainer_holding=turns.trainer.holding,
        )

    async def wait(self, number: int, timeout_s: float) -> None:
        """Until the number is another one, or for `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while number == self.state.number and not self._closed:
                    await self._changed.wait()
        except TimeoutError:
            pass

    def close(self) -> None:
        """Nobody waits any longer."""
        self._closed = True
        self._changed.set()
