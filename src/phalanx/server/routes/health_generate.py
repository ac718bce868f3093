"""`GET /health_generate`: healthy when the model makes one real token, or others' steps, in time."""

from __future__ import annotations

import asyncio
import uuid

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from phalanx.errors import EngineOverloadedError, PhalanxError
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.sampling import SamplingParams
from phalanx.server.engine_result import engine_result
from phalanx.server.failures import failure_of
from phalanx.server.text_service import TextService

PRIORITY = 2**31 - 1
"""Ahead of whatever waits: a probe is one token."""
LOOK_AGAIN_S = 0.02


class HealthGenerateRoute:
    """`timeout_s` is how long the token may take.

    A busy engine has no place for the probe, or not in time; it is healthy if it made steps since.
    The probe goes to the engine directly: it is nobody's request and in no request metric.
    """

    def __init__(self, service: TextService, timeout_s: float) -> None:
        self._engine = service.engine
        self._token_id = service.tokenizer.bos_token_id or 0
        self._timeout_s = timeout_s

    async def __call__(self, request: Request) -> Response:
        before = self._num_steps()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._token_or_step(before)
        except TimeoutError:
            if self._num_steps() == before:
                return PlainTextResponse(f"no token within {self._timeout_s:g} s\n", 503)
        except PhalanxError as error:
            status = failure_of(error).status
            return PlainTextResponse(f"{error}\n", max(status, 503))
        return PlainTextResponse("ok\n")

    async def _token_or_step(self, before: int) -> None:
        """Returns when the probe has its token or, where the queue is full, after a step."""
        probe = GenerateRequest(
            input_ids=(self._token_id,),
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            priority=PRIORITY,
            detokenize=False,
        )
        rid = f"health-{uuid.uuid4().hex}"
        try:
            future = self._engine.submit(probe, rid=rid)
        except EngineOverloadedError:
            while True:
                await asyncio.sleep(LOOK_AGAIN_S)
                if self._num_steps() != before:
                    return
        try:
            await engine_result(future)
        finally:
            if not future.done():
                self._engine.cancel(rid)

    def _num_steps(self) -> int:
        loop = self._engine.statistics().loop
        return 0 if loop is None else loop.num_steps
