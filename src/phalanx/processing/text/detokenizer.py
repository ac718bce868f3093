"""Token ids to text piece by piece: what is handed out never splits a character, and all pieces
joined are the text of all ids.

Byte-level vocabularies feed bytes to an incremental UTF-8 decoder. Others decode a short window
of recent tokens again; a run of byte tokens is held until it ends, since one invalid byte changes
how the whole run reads. Both cost a constant amount of work a token.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from phalanx.processing.text.byte_level import byte_level_bytes
from phalanx.processing.text.tokenizer import TextTokenizer


class IncrementalDetokenizer:
    """Decodes one sequence; `feed` ids as they come, then `finish` once."""

    def __init__(self, tokenizer: TextTokenizer, *, skip_special_tokens: bool = True) -> None:
        self._decoder: _Decoder
        if tokenizer.byte_level:
            self._decoder = _ByteDecoder(tokenizer, skip_special_tokens)
        else:
            self._decoder = _WindowDecoder(tokenizer, skip_special_tokens)

    def feed(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        return self._decoder.feed(ids)

    def finish(self) -> str:
        """What was held back, incomplete characters as U+FFFD."""
        return self._decoder.finish()


class _Decoder(Protocol):
    def feed(self, ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


class _ByteDecoder:
    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, ids: Iterable[int]) -> str:
        data = bytearray()
        for token_id in ids:
            if token_id in self._skipped:
                continue
            token = self._tokenizer.token(token_id)
            if token is not None:
                data += byte_level_bytes(token)
        return self._utf8.decode(bytes(data))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def feed(self, ids: Iterable[int]) -> str:
        pieces: list[str] = []
        for token_id in ids:
            if token_id in self._skipped or self._tokenizer.token(token_id) is None:
                continue
            self._pending.append(token_id)
            if token_id not in self._tokenizer.byte_fallback_ids:
                pieces.append(self._release())
        return "".join(pieces)

    def finish(self) -> str:
        return self._release() if self._pending else ""

    def _release(self) -> str:
        """The text of the pending tokens, which become the context of the next ones."""
        text = self._decode(self._context + self._pending)
        piece = text[len(self._context_text) :]
        if piece:
            self._context = self._pending
            self._context_text = self._decode(self._context)
            self._pending = []
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
