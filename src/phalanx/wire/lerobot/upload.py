"""Puts an observation together from the messages that it was sent in."""

from __future__ import annotations

from phalanx.errors import BodyTooLargeError, MalformedRequestError
from phalanx.wire.lerobot.messages import TransferState, UploadPart

DEFAULT_MAX_BYTES = 100 * 1024 * 1024
MAX_MESSAGES = 16_384
"""Of one call; LeRobot's client sends one for each 2 MiB."""


class Upload:
    """The messages of one call. `add` gives the payload with the last message, else None.

    A BEGIN starts anew; MIDDLE needs a BEGIN before it, and an END without one is the payload.
    """

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._parts: list[memoryview] = []
        self._num_bytes = 0
        self._num_messages = 0
        self._begun = False

    def add(self, part: UploadPart) -> bytes | memoryview | None:
        """Raises `BodyTooLargeError` before it keeps what is too large, and
        `MalformedRequestError` for messages out of order or too many of them.
        """
        self._num_messages += 1
        if self._num_messages > MAX_MESSAGES:
            raise MalformedRequestError(
                f"the upload has more than {MAX_MESSAGES} messages; send larger ones"
            )
        if part.state == TransferState.BEGIN:
            self._reset()
            self._begun = True
        elif part.state not in (TransferState.MIDDLE, TransferState.END):
            raise MalformedRequestError(
                f"the upload has a message of transfer_state={part.state}; BEGIN is 1, MIDDLE 2, END 3"
            )
        elif part.state == TransferState.MIDDLE and not self._begun:
            raise MalformedRequestError("the upload has a MIDDLE message before its BEGIN")
        if self._num_bytes + len(part.data) > self._max_bytes:
            raise BodyTooLargeError(
                f"the upload has more than {self._max_bytes} bytes; send smaller images or fewer"
            )
        if part.data:
            self._parts.append(part.data)
        self._num_bytes += len(part.data)
        if part.state != TransferState.END:
            return None
        whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._reset()
        return whole

    def close(self) -> None:
        """There are no more messages. Raises `MalformedRequestError` in the middle of a payload."""
        if self._begun or self._parts:
            raise MalformedRequestError(
                f"the upload stopped after {self._num_bytes} bytes without its END; the observation "
                "is dropped"
            )

    def _reset(self) -> None:
        self._parts, self._num_bytes, self._begun = [], 0, False
