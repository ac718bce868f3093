"""SGLang's native protocol: `POST /generate`."""

from phalanx.wire.sglang.errors import failure_body, refusal_body, stream_error_line
from phalanx.wire.sglang.request import GenerateCall, PromptCall, parse_generate
from phalanx.wire.sglang.response import Generation, Rendering, render_output
from phalanx.wire.sglang.stream import StreamRenderer

__all__ = [
    "GenerateCall",
    "Generation",
    "PromptCall",
    "Rendering",
    "StreamRenderer",
    "failure_body",
    "parse_generate",
    "refusal_body",
    "render_output",
    "stream_error_line",
]
