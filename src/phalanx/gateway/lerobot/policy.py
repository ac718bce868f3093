"""Turns one observation of a robot into the bytes of its answer, by way of a policy server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import grpc
import numpy as np

from phalanx.errors import InvalidRequestError, NoServerError
from phalanx.gateway.http.request_ids import RequestIds
from phalanx.gateway.inference import UpstreamError
from phalanx.gateway.lerobot.settings import LeRobotSettings
from phalanx.gateway.workers import Workers
from phalanx.schema.observation import Observation
from phalanx.wire.lerobot import (
    MAX_MESSAGE_BYTES,
    PolicyInstructions,
    TimedObservation,
    blank_observation,
    decode_observation,
    encode_actions,
    encode_data,
    to_observation,
)
from phalanx.wire.robot_inference import InferenceAnswer, InferenceCall

SETUP_PAUSE_S = 0.2
EARLY_S = 0.01
"""By how much a deadline may be early by the event loop's clock."""


class Answers(Protocol):
    """What is needed of `PolicyCaller`."""

    async def answer(
        self, call: InferenceCall, timeout_s: float | None = None
    ) -> InferenceAnswer: ...


@dataclass(frozen=True)
class Chunk:
    """The answer to one observation, encoded: actions `timestep` to `timestep + horizon - 1`."""

    message: bytes
    timestep: int
    horizon: int


class Policy:
    """Belongs to the gateway's event loop; large pickles are read by `workers`."""

    def __init__(
        self,
        answers: Answers,
        workers: Workers,
        settings: LeRobotSettings,
        ids: RequestIds,
    ) -> None:
        self._answers = answers
        self._workers = workers
        self._settings = settings
        self._ids = ids

    async def check(self, instructions: PolicyInstructions) -> tuple[int, int]:
        """Ask a server for actions of a blank observation; gives their horizon and width.

        So that a robot whose cameras or joints are not the policy's is told before it moves. Waits
        for a server of the model to become ready.
        """
        observation = blank_observation(instructions)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._settings.setup_wait_s
        while True:
            try:
                answer = await self._infer(instructions, observation, 0)
            except NoServerError as error:
                pause_s = min(error.retry_after_s, SETUP_PAUSE_S)
                if loop.time() + pause_s > end_s:
                    raise
                await asyncio.sleep(pause_s)
            else:
                horizon, width = answer.actions.values.shape
                return horizon, width

    async def decode(self, data: bytes | memoryview) -> TimedObservation:
        return await self._workers.run(lambda: decode_observation(data), len(data))

    async def chunk(
        self, instructions: PolicyInstructions, timed: TimedObservation, fps: float
    ) -> Chunk:
        """Its actions are `1 / fps` seconds apart."""
        observation = to_observation(instructions, timed)
        timestamp_ns = int(max(min(timed.timestamp_s * 1e9, 2.0**62), 0.0))
        answer = await self._infer(instructions, observation, timestamp_ns)
        values = answer.actions.values[: instructions.actions_per_chunk]
        data = encode_actions(values, timed.timestamp_s, timed.timestep, fps, instructions.module)
        message = encode_data(data)
        if len(message) > MAX_MESSAGE_BYTES:
            raise InvalidRequestError(
                f"{len(values)} actions are {len(message)} bytes; LeRobot's client takes "
                f"{MAX_MESSAGE_BYTES}: ask for fewer with --actions_per_chunk",
                field="actions_per_chunk",
            )
        return Chunk(message, timed.timestep, len(values))

    async def _infer(
        self, instructions: PolicyInstructions, observation: Observation, timestamp_ns: int
    ) -> InferenceAnswer:
        call = InferenceCall(
            self._ids.of(None).decode(), instructions.model, observation, timestamp_ns
        )
        answer = await self._answered(call)
        values = answer.actions.values
        if not len(values) or not np.isfinite(values).all():
            what = "actions that are not finite" if len(values) else "no actions"
            raise UpstreamError(grpc.StatusCode.INTERNAL, f"the server answered {what}")
        return answer

    async def _answered(self, call: InferenceCall) -> InferenceAnswer:
        """A server that takes longer than a robot can wait is told of in words."""
        loop, longest_s = asyncio.get_running_loop(), self._settings.infer_timeout_s
        start_s = loop.time()
        try:
            return await self._answers.answer(call, longest_s)
        except UpstreamError as error:
            in_time = loop.time() - start_s < longest_s - EARLY_S
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED or in_time:
                raise
            raise UpstreamError(
                error.code,
                f"no actions came within {longest_s:g} s; the robot's newest observation is sent "
                "instead (--lerobot-timeout-s)",
            ) from error
