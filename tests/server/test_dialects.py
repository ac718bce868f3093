"""How failures are worded where no server is needed to see it."""

import json

from phalanx.errors import EngineUnavailableError
from phalanx.server.dialects import SGLANG


def test_an_error_inside_a_stream_is_never_retryable():
    line = SGLANG.stream_error(EngineUnavailableError("the engine was closed"))
    event, done, _ = line.split(b"\n\n")
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert (error["code"], error["retryable"]) == (503, False)
    assert done == b"data: [DONE]"
