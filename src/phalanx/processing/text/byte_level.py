"""The byte-level alphabet of GPT-2 vocabularies: one printable character for each byte."""

from __future__ import annotations

import msgspec


def _alphabet() -> dict[str, int]:
    """Printable Latin-1 bytes stand for themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    alphabet.update({chr(0x100 + at): byte for at, byte in enumerate(others)})
    return alphabet


BYTES = _alphabet()


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a token; one with a character outside the alphabet is taken as plain text."""
    try:
        return bytes([BYTES[character] for character in token])
    except KeyError:
        return token.encode("utf-8", "surrogatepass")


class _Decoder(msgspec.Struct):
    type: str
    decoders: list[_Decoder] | None = None


class _TokenizerFile(msgspec.Struct):
    decoder: _Decoder | None = None


def is_byte_level(tokenizer_json: str) -> bool:
    """Whether the decoder of a `tokenizer.json` only turns byte-level tokens into bytes."""
    decoder = msgspec.json.decode(tokenizer_json, type=_TokenizerFile).decoder
    while decoder is not None and decoder.decoders is not None and len(decoder.decoders) == 1:
        decoder = decoder.decoders[0]
    return decoder is not None and decoder.type == "ByteLevel"
