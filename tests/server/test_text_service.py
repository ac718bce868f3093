"""What of a request's preparation leaves the event loop to others."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from phalanx.clock import SystemClock
from phalanx.engine_config import EngineConfig
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.limits import Limits
from phalanx.schema.sampling import SamplingParams
from phalanx.server.text_service import TextService


@pytest.mark.parametrize(
    "sampling",
    [{"stop_regex": ("a",)}, {"regex": "a"}, {"json_schema": "{}"}, {"ebnf": 'root ::= "a"'}],
)
def test_what_is_compiled_is_checked_off_the_event_loop(tokenizer, sampling):
    served = threading.Event()
    seen: list[bool] = []

    def validate(request: GenerateRequest, limits: Limits) -> None:
        loop.call_soon_threadsafe(served.set)
        seen.append(threading.current_thread() is not main and served.wait(10))

    main = threading.current_thread()
    loop = asyncio.new_event_loop()
    engine = SimpleNamespace(
        plugin=SimpleNamespace(validate=validate), limits=Limits(), config=EngineConfig()
    )
    service = TextService(engine, tokenizer, None, None, SystemClock())
    request = GenerateRequest(prompt="a", sampling=SamplingParams(**sampling))
    try:
        [prepared] = loop.run_until_complete(service.prepare([("r", request)]))
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()
    assert prepared.rid == "r"
    assert seen == [True]
