"""`GET /health_generate`: healthy when the model makes one real token in time."""

from __future__ import annotations

import asyncio
import uuid

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from phalanx.errors import PhalanxError
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.sampling import SamplingParams
from phalanx.server.failures import failure_of
from phalanx.server.text_service import TextService


class HealthGenerateRoute:
    """`timeout_s` is how long the token may take."""

    def __init__(self, service: TextService, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s

    async def __call__(self, request: Request) -> Response:
        probe = GenerateRequest(
            input_ids=(self._service.tokenizer.bos_token_id or 0,),
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
        )
        try:
            prepared = await self._service.prepare([(f"health-{uuid.uuid4().hex}", probe)])
            (waiting,) = self._service.submit(prepared)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await waiting.output()
            finally:
                waiting.close()
        except TimeoutError:
            return PlainTextResponse(f"no token within {self._timeout_s:g} s\n", 503)
        except PhalanxError as error:
            status = failure_of(error).status
            return PlainTextResponse(f"{error}\n", max(status, 503))
        return PlainTextResponse("ok\n")
