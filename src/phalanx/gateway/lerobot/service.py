"""LeRobot's `transport.AsyncInference`, for clients that were not changed: one session a robot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import msgspec

from phalanx.clock import Clock
from phalanx.errors import MalformedRequestError, PhalanxError
from phalanx.gateway.grpc.service import Context, Service
from phalanx.gateway.http.request_ids import RequestIds
from phalanx.gateway.lerobot.caller import Caller, caller_of
from phalanx.gateway.lerobot.faults import tellable
from phalanx.gateway.lerobot.policy import Answers, Policy
from phalanx.gateway.lerobot.robots_file import RobotsFile
from phalanx.gateway.lerobot.session import Session
from phalanx.gateway.lerobot.sessions import Sessions
from phalanx.gateway.lerobot.settings import LeRobotSettings
from phalanx.gateway.traffic import Quantiles
from phalanx.gateway.workers import Workers
from phalanx.wire.lerobot import (
    EMPTY,
    SERVICE,
    Upload,
    decode_data,
    decode_policy_instructions,
    decode_upload_part,
)

logger = logging.getLogger(__name__)

SAVE_S = 60.0
"""How old the times in the file may be at which robots were last heard of."""


class RobotView(msgspec.Struct, frozen=True, kw_only=True):
    """One robot for operators. `actions_per_s` is an estimate, None before there is one."""

    name: str
    model: str | None
    num_observations: int
    num_answered: int
    num_replaced: int
    num_outdated: int
    num_failed: int
    latency_ms: Quantiles
    actions_per_s: float | None
    fault: str


class LeRobotService:
    """Belongs to the gateway's event loop. Add `service(address)` to each gRPC port."""

    def __init__(
        self,
        answers: Answers,
        workers: Workers,
        clock: Clock,
        settings: LeRobotSettings | None = None,
        file: RobotsFile | None = None,
    ) -> None:
        """`file` keeps what robots asked for over a restart."""
        self._settings = settings or LeRobotSettings()
        self._clock = clock
        self._file = file
        self._saved_s = clock.monotonic_s()
        self._policy = Policy(answers, workers, self._settings, RequestIds())
        self._sessions = Sessions(
            lambda name: Session(name, self._policy, self._settings, clock), self._settings, clock
        )
        self._restore()

    def service(self, address: str = "") -> Service:
        """`address` names the port, where there are several: robots of different ones never mix."""
        return _Methods(self, address).service()

    def robots(self) -> tuple[RobotView, ...]:
        return tuple(_view(session) for session, _ in self._sessions.all())

    async def ready(self, caller: Caller) -> bytes:
        session = self._sessions.begin(caller)
        logger.info("robot %s begins", session.name)
        return EMPTY

    async def instruct(self, caller: Caller, message: bytes) -> bytes:
        """Raises what its operator is to be told, before the robot moves."""
        with self._sessions.instructing(caller) as session:
            data = decode_data(message)
            instructions = decode_policy_instructions(data)
            try:
                horizon, width = await self._policy.check(instructions)
            except PhalanxError as error:
                logger.warning("robot %s: %s", session.name, error)
                raise tellable(error) from error
            session.instruct(instructions, data)
            self._save()
            logger.info(
                "robot %s uses model %s: cameras %s, %d joints, %d of %d actions of %d numbers",
                session.name,
                instructions.model,
                [camera.name for camera in instructions.features.cameras],
                len(instructions.features.state_names),
                min(horizon, instructions.actions_per_chunk),
                horizon,
                width,
            )
        return EMPTY

    def upload(self) -> Upload:
        """What puts one observation's messages together."""
        return Upload(self._settings.max_upload_bytes)

    async def observe(self, caller: Caller, messages: AsyncIterator[bytes]) -> bytes:
        upload = self.upload()
        payload: bytes | memoryview | None = None
        try:
            async with asyncio.timeout(self._settings.upload_timeout_s):
                async for message in messages:
                    payload = upload.add(decode_upload_part(message)) or payload
        except TimeoutError:
            raise self._late() from None
        upload.close()
        return await self.keep(caller, payload)

    async def end_upload(self, caller: Caller, cancel: Callable[[], object]) -> None:
        """Cancel an upload that somebody else puts together, when it takes too long."""
        await asyncio.sleep(self._settings.upload_timeout_s)
        error = self._late()
        logger.warning("robot %s: %s", caller.peer, error)
        self._sessions.tell(caller, error)
        cancel()

    async def keep(self, caller: Caller, payload: bytes | memoryview | None) -> bytes:
        """An observation has come. It is acknowledged before it is read, since the robot's control
        loop waits for this.
        """
        session = self._sessions.find(caller)
        with self._sessions.calling(session):
            if payload is None:
                raise MalformedRequestError(
                    "the upload has no messages; the observation is missing"
                )
            session.observe(payload)
        return EMPTY

    async def actions(self, caller: Caller) -> bytes:
        session = await self._sessions.returned(caller)
        with self._sessions.calling(session):
            if self._clock.monotonic_s() - self._saved_s > SAVE_S:
                self._save()
            return await session.actions()

    async def close(self) -> None:
        self._save()
        await self._sessions.close()

    def _late(self) -> MalformedRequestError:
        return MalformedRequestError(
            f"the upload did not end within {self._settings.upload_timeout_s:g} s; the observation is "
            "dropped"
        )

    def _restore(self) -> None:
        for robot in () if self._file is None else self._file.load():
            try:
                self._sessions.restore(robot)
            except PhalanxError as error:
                logger.warning("a robot at %s is not known any more: %s", robot.address, error)

    def _save(self) -> None:
        self._saved_s = self._clock.monotonic_s()
        if self._file is not None:
            self._file.save(self._sessions.saved())


class _Methods:
    """The service on one port."""

    def __init__(self, robots: LeRobotService, address: str) -> None:
        self._robots = robots
        self._address = address

    def service(self) -> Service:
        return Service(
            SERVICE,
            unary={
                "Ready": self._ready,
                "SendPolicyInstructions": self._instruct,
                "GetActions": self._actions,
            },
            collecting={"SendObservations": self._observe},
        )

    async def _ready(self, message: bytes, context: Context) -> bytes:
        return await self._robots.ready(caller_of(context, self._address))

    async def _instruct(self, message: bytes, context: Context) -> bytes:
        return await self._robots.instruct(caller_of(context, self._address), message)

    async def _observe(self, messages: AsyncIterator[bytes], context: Context) -> bytes:
        return await self._robots.observe(caller_of(context, self._address), messages)

    async def _actions(self, message: bytes, context: Context) -> bytes:
        return await self._robots.actions(caller_of(context, self._address))


def _view(session: Session) -> RobotView:
    account = session.account
    return RobotView(
        name=session.name,
        model=session.instructions.model if session.instructions else None,
        num_observations=account.num_observations,
        num_answered=account.num_answered,
        num_replaced=account.num_replaced,
        num_outdated=account.num_outdated,
        num_failed=account.num_failed,
        latency_ms=account.latency(),
        actions_per_s=account.rate.value,
        fault=session.faults.last,
    )
