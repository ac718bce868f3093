"""`POST /tokenize` and `/detokenize`: the tokenizer alone, without the model."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from phalanx.server.answering import Answering
from phalanx.server.dialects import OPENAI
from phalanx.server.served_models import ServedModels
from phalanx.server.text_service import TextService
from phalanx.wire.openai.chat import checked_messages
from phalanx.wire.vllm.tokens import (
    Detokenized,
    TokenizeBody,
    Tokenized,
    parse_detokenize,
    parse_tokenize,
)


class TokenRoutes:
    """Answered while the engine sleeps, too."""

    def __init__(self, service: TextService, models: ServedModels, answering: Answering) -> None:
        self._service = service
        self._models = models
        self._answering = answering

    async def tokenize(self, request: Request) -> Response:
        return await self._answering.control(request, OPENAI, self._tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._answering.control(request, OPENAI, self._detokenize)

    async def _tokenize(self, body: bytes) -> Response:
        wanted = parse_tokenize(body)
        self._models.check(wanted.model)
        tokenizer = self._service.tokenizer
        ids = await self._service.off_loop(len(body), lambda: self._ids(wanted))
        strings = [tokenizer.token_text(one) for one in ids] if wanted.return_token_strs else None
        answer = Tokenized(
            count=len(ids),
            max_model_len=self._service.engine.limits.context_length,
            tokens=ids,
            token_strs=strings,
        )
        return Response(msgspec.json.encode(answer), media_type="application/json")

    def _ids(self, wanted: TokenizeBody) -> list[int]:
        tokenizer = self._service.tokenizer
        if wanted.prompt is not None:
            return tokenizer.encode(wanted.prompt, add_special_tokens=wanted.add_special_tokens)
        prompt = tokenizer.render_chat(
            checked_messages(wanted.messages or [], continues=wanted.continue_final_message),
            add_generation_prompt=wanted.add_generation_prompt,
            continue_final_message=wanted.continue_final_message,
            tools=wanted.tools,
            variables=wanted.chat_template_kwargs or {},
        )
        return tokenizer.encode_chat(prompt)

    async def _detokenize(self, body: bytes) -> Response:
        wanted = parse_detokenize(body)
        self._models.check(wanted.model)
        tokenizer = self._service.tokenizer
        text = await self._service.off_loop(
            len(body), lambda: tokenizer.decode(wanted.tokens, skip_special_tokens=False)
        )
        answer = Detokenized(prompt=text, text=text)
        return Response(msgspec.json.encode(answer), media_type="application/json")
