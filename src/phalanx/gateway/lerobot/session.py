"""One robot: its newest observation, the request that runs for it, and the answer that it waits for.

An observation is answered when the robot asks for actions. While a request runs, newer observations
replace one another. What fails is kept and tried again with the robot's next call, so that no
failure ends the robot's control loop.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from phalanx.clock import Clock
from phalanx.errors import InvalidRequestError, PhalanxError
from phalanx.gateway.lerobot.account import Account, ControlRate
from phalanx.gateway.lerobot.faults import Faults, Way, lasts
from phalanx.gateway.lerobot.overlaps import WORDS, Overlaps
from phalanx.gateway.lerobot.policy import Chunk, Policy
from phalanx.gateway.lerobot.settings import LeRobotSettings
from phalanx.wire.lerobot import EMPTY, PolicyInstructions, TimedObservation

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0

OTHER_RATE = (
    "robot {0} takes {1:.1f} actions a second, and is given them 1/{2:g} s apart: start the gateway "
    "with --lerobot-fps {1:.0f}, or give the robot a port of its own with --lerobot-port PORT@{1:.0f}"
)
SKEWED = (
    "the robot's clock is {:.1f} s {} the gateway's; its observations are answered, and the times of "
    "its actions are by its own clock"
)


@dataclass(frozen=True, eq=False)
class Arrived:
    """An observation that is not read yet, and when it came by the gateway's clock."""

    data: bytes | memoryview
    wall_s: float
    monotonic_s: float


@dataclass(frozen=True, eq=False)
class _Ready:
    arrived: Arrived
    chunk: Chunk


class Session:
    """Belongs to the gateway's event loop. `name` is for the log and for operators."""

    def __init__(self, name: str, policy: Policy, settings: LeRobotSettings, clock: Clock) -> None:
        self.name = name
        self.instructions: PolicyInstructions | None = None
        self.instructions_data = b""
        self.fps = settings.fps
        self.account = Account(settings.fps)
        self.faults = Faults(clock)
        self._policy = policy
        self._settings = settings
        self._clock = clock
        self._newest: Arrived | None = None
        self._asking: Arrived | None = None
        self._ready: _Ready | None = None
        self._handed: tuple[Chunk, float] | None = None
        self._work: asyncio.Task[None] | None = None
        self._stopped: set[asyncio.Task[None]] = set()
        self._num_polls = 0
        self._overlaps = Overlaps(clock)
        self._shared = False
        self._pause_s = 0.0
        self._resume_s = 0.0
        self._notes: list[str] = []
        self._skew_noted = False
        self._changed = asyncio.Event()

    def reset(self) -> None:
        """The robot begins anew: nothing of what it sent before is answered any more."""
        self._stop_work()
        self._newest = self._ready = self._handed = None
        self._pause_s = self._resume_s = 0.0
        self._notes.clear()
        self._skew_noted = self._shared = False
        self._overlaps.forget()
        self.account.rate = ControlRate(self.fps)
        self.faults.clear()
        self.interrupt()

    def pace(self, fps: float | None) -> None:
        """The robot takes so many actions a second; None: as many as the gateway's others."""
        fps = fps or self._settings.fps
        if fps != self.fps:
            self.fps = fps
            self.account.rate = ControlRate(fps)

    def instruct(self, instructions: PolicyInstructions, data: bytes) -> None:
        """What the robot asks for from now on; `data` is how it said so."""
        self.reset()
        self.instructions, self.instructions_data = instructions, data

    def interrupt(self) -> None:
        """Whoever waits for actions is answered that there are none."""
        self._num_polls += 1
        self._pulse()

    async def close(self) -> None:
        self.reset()
        await asyncio.gather(*self._stopped, return_exceptions=True)

    def observe(self, data: bytes | memoryview) -> None:
        """Keep the robot's newest observation. Raises what its operator is to be told of earlier
        ones; this one is kept all the same.
        """
        if self.instructions is None:
            raise InvalidRequestError(
                "the robot has sent no policy instructions; send them before observations"
            )
        if self._shared:
            self._tell(Way.SENDING)
            return
        if self._newest is not None and self._newest is not self._asking:
            self.account.num_replaced += 1
        self.account.num_observations += 1
        self._newest = Arrived(data, self._clock.wall_s(), self._clock.monotonic_s())
        self._resume_s = 0.0
        self._pulse()
        self._tell(Way.SENDING)
        if self._notes:
            raise InvalidRequestError(self._notes.pop(0), field="timestamp")

    async def actions(self) -> bytes:
        """The message for `GetActions`: the newest observation's actions, or empty after a while.

        Of two calls at once the later one is answered: the earlier one's connection may be gone.
        Raises what the robot's operator is to be told.
        """
        with self._overlaps.asking() as are_many:
            if are_many and not self._shared:
                self._keep_apart()
            return await self._poll()

    async def _poll(self) -> bytes:
        if self._shared:
            self._tell(Way.POLLING)
        else:
            self.interrupt()
        poll = self._num_polls
        try:
            async with asyncio.timeout(self._settings.poll_s):
                while poll == self._num_polls:
                    changed = self._changed
                    self._reap()
                    if self._ready is not None:
                        return self._hand_over(self._ready)
                    self._tell(Way.POLLING)
                    self._start_work()
                    await changed.wait()
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            # The robot has gone: unless it asks again by now, nobody wants the answer.
            if poll == self._num_polls:
                self._stop_work()
            raise
        return EMPTY

    def _keep_apart(self) -> None:
        """Two clients take this for their own; neither is to get what is for the other."""
        self.reset()
        self._shared = True
        error = InvalidRequestError(WORDS)
        self.faults.record(error)
        logger.warning("robot %s: %s", self.name, error)

    def _tell(self, way: Way) -> None:
        """Raise what the robot's operator is to be told, if anything."""
        error = self.faults.take(way)
        if error is not None:
            raise error

    def _hand_over(self, ready: _Ready) -> bytes:
        now_s = self._clock.monotonic_s()
        self._ready = None
        self._handed = (ready.chunk, now_s)
        self.account.answered(now_s - ready.arrived.monotonic_s)
        return ready.chunk.message

    def _start_work(self) -> None:
        loop = asyncio.get_running_loop()
        if self._work is not None or self._newest is None or self.instructions is None:
            return
        if loop.time() < self._resume_s:
            loop.call_at(self._resume_s, self._pulse)
            return
        self._asking = self._newest
        self._work = loop.create_task(self._answer(self._newest, self.instructions))
        self._work.add_done_callback(lambda _: self._pulse())

    def _stop_work(self) -> None:
        """What was being answered stays the newest, unless there is a newer one."""
        if self._work is not None:
            work, self._work, self._asking = self._work, None, None
            work.cancel()
            self._stopped.add(work)
            work.add_done_callback(self._stopped.discard)

    def _reap(self) -> None:
        if self._work is not None and self._work.done():
            work, self._work, self._asking = self._work, None, None
            if work.exception() is not None:
                self._rest()
            work.result()

    async def _answer(self, arrived: Arrived, instructions: PolicyInstructions) -> None:
        try:
            timed = await self._policy.decode(arrived.data)
            self._note_clock(arrived, timed)
            if self._is_outdated(arrived, timed):
                self.account.num_outdated += 1
                self._done_with(arrived)
                return
            chunk = await self._policy.chunk(instructions, timed, self.fps)
        except PhalanxError as error:
            if self._asking is arrived:
                self._failed(arrived, error)
        else:
            if self._asking is not arrived:
                # It was stopped too late to end here.
                return
            self._done_with(arrived)
            self._pause_s = 0.0
            self.faults.clear()
            self._ready = _Ready(arrived, chunk)

    def _failed(self, arrived: Arrived, error: PhalanxError) -> None:
        self.account.num_failed += 1
        self.faults.record(error)
        logger.warning("robot %s: %s", self.name, error)
        if lasts(error):
            self._done_with(arrived)
        elif self._newest is arrived:
            self._rest()

    def _rest(self) -> None:
        """What failed is tried again, but not at once: the robot asks again without a pause."""
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._resume_s = asyncio.get_running_loop().time() + self._pause_s

    def _done_with(self, arrived: Arrived) -> None:
        if self._newest is arrived:
            self._newest = None

    def _is_outdated(self, arrived: Arrived, timed: TimedObservation) -> bool:
        """Whether it was sent before the robot got its last actions, of which it still has some.

        A robot sends observations with every step until actions come; those after the first would
        be answered for nothing. One that waits, or that has carried out all that it got, is
        always answered.
        """
        if self._handed is None or timed.must_go:
            return False
        chunk, handed_s = self._handed
        last = chunk.timestep + chunk.horizon - 1
        return arrived.monotonic_s < handed_s and chunk.timestep <= timed.timestep < last

    def _note_clock(self, arrived: Arrived, timed: TimedObservation) -> None:
        rate = self.account.rate.observe(timed.timestep, timed.timestamp_s)
        if rate is not None:
            logger.warning(OTHER_RATE.format(self.name, rate, self.fps))
        skew_s = timed.timestamp_s - arrived.wall_s
        if self._skew_noted or abs(skew_s) <= self._settings.max_skew_s:
            return
        self._skew_noted = True
        words = SKEWED.format(abs(skew_s), "ahead of" if skew_s > 0 else "behind")
        logger.warning("robot %s: %s", self.name, words)
        self._notes.append(words)

    def _pulse(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
