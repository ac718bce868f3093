"""`peek` for a request that came in pieces, which are not put together for it: that would copy all of
its images for the sake of two names.
"""

from __future__ import annotations

from phalanx.gateway.grpc.message_reader import Pieces
from phalanx.wire.protobuf import BYTES, MAX_FIELDS, VARINT
from phalanx.wire.robot_inference import RequestHead, peek

_REQUEST_ID, _MODEL_NAME = 1, 8
_MAX_FIELD = 15
"""The highest number that a key of one byte has."""
_MAX_VARINT_BYTES = 9
_CUT = (1 << 7) - 1


def head_of(pieces: Pieces) -> RequestHead:
    """The head of an `InferenceRequest`, as `peek` gives it, which also words what is wrong."""
    found = glance(pieces) if len(pieces) > 1 else None
    return peek(b"".join(pieces)) if found is None else found


def glance(pieces: Pieces) -> RequestHead | None:
    """The same, or None where a name, or a key or length, lies in two pieces, and for all that is not plain."""
    texts: dict[int, bytes] = {}
    num_fields = at = 0
    try:
        for piece in pieces:
            end = len(piece)
            while at < end:
                key = piece[at]
                at += 1
                number, wire_type = key >> 3, key & 7
                num_fields += 1
                if number > _MAX_FIELD or num_fields > MAX_FIELDS:
                    return None
                value, length_end = _varint(piece, at)
                if wire_type == BYTES:
                    at = length_end + value
                    if number in (_REQUEST_ID, _MODEL_NAME):
                        if at > end:
                            return None
                        texts[number] = bytes(piece[length_end:at])
                elif wire_type == VARINT and number not in (_REQUEST_ID, _MODEL_NAME):
                    at = length_end
                else:
                    return None
            at -= end
        if at:
            return None  # it ends within a field
        return RequestHead(
            texts.get(_REQUEST_ID, b"").decode(), texts.get(_MODEL_NAME, b"").decode()
        )
    except (IndexError, UnicodeDecodeError):
        return None


def _varint(piece: bytes | memoryview, at: int) -> tuple[int, int]:
    """The number that begins at `at`, and where it ends."""
    value = shift = 0
    while (byte := piece[at]) >= 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        at += 1
        if shift > 56:
            raise IndexError
    return value | byte << shift, at + 1
