"""OpenAI's protocol: chat completions, completions, models, with SGLang's extras."""

from phalanx.wire.openai.answer import Header, PromptAnswer
from phalanx.wire.openai.chat import ChatCall, parse_chat
from phalanx.wire.openai.chat_response import ChatRenderer
from phalanx.wire.openai.completion_response import CompletionRenderer, CompletionShows
from phalanx.wire.openai.completions import CompletionCall, parse_completion
from phalanx.wire.openai.errors import error_body, stream_error_line
from phalanx.wire.openai.models import model_body, models_body
from phalanx.wire.openai.names import in_clients_names
from phalanx.wire.openai.sampling import extras_with_headers
from phalanx.wire.openai.token_ids import TokenIdTexts

__all__ = [
    "ChatCall",
    "ChatRenderer",
    "CompletionCall",
    "CompletionRenderer",
    "CompletionShows",
    "Header",
    "PromptAnswer",
    "TokenIdTexts",
    "error_body",
    "extras_with_headers",
    "in_clients_names",
    "model_body",
    "models_body",
    "parse_chat",
    "parse_completion",
    "stream_error_line",
]
