"""Tokens shown by their ids, as vLLM's `return_tokens_as_token_ids` asks for."""

from __future__ import annotations

from phalanx.wire.openai.logprobs import TokenTexts


class TokenIdTexts:
    """Every token is `token_id:N`; its bytes stay what they are."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts

    def token_text(self, token_id: int) -> str:
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        return self._texts.token_bytes(token_id)
