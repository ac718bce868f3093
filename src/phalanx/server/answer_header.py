"""What stands above every part of an answer of OpenAI's text routes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from phalanx.server.served_models import ServedModels
from phalanx.server.text_service import TextService
from phalanx.wire.openai import ChatCall, CompletionCall, Header, TokenIdTexts, extras_with_headers


def answer_header(
    call: ChatCall | CompletionCall,
    headers: Mapping[str, str],
    service: TextService,
    models: ServedModels,
    *,
    id_begins: str,
) -> Header:
    """`headers` are the request's. An id that the client has not given begins with `id_begins`."""
    body = call.body
    return Header(
        id=body.rid or body.request_id or f"{id_begins}-{uuid.uuid4().hex}",
        model=body.model or models.name,
        created=int(service.clock.wall_s()),
        texts=TokenIdTexts(service.tokenizer)
        if body.return_tokens_as_token_ids
        else service.tokenizer,
        logprobs=call.logprobs,
        extras=extras_with_headers(call.extras, headers, stream=call.stream),
        include_usage=call.include_usage,
    )
