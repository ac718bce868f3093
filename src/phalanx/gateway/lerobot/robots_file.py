"""The robots' settings in a file, since LeRobot's clients do not send them again after a restart of the
gateway. It is a memory and no more: without it, robots' clients must be restarted too.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)


class SavedRobot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`instructions` is the pickle as the robot sent it, and is read as carefully as then."""

    address: str
    host: str
    session_id: str | None
    seen_wall_s: float
    instructions: bytes


class RobotsFile:
    """Replaced whole with each write; a file that cannot be read or written is logged."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> list[SavedRobot]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[SavedRobot])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            logger.warning("%s cannot be read, no robots are known: %s", self._path, error)
            return []

    def save(self, robots: list[SavedRobot]) -> None:
        beside = self._path.with_name(self._path.name + ".new")
        try:
            beside.write_bytes(msgspec.json.encode(robots))
            beside.replace(self._path)
        except OSError as error:
            logger.warning("%s cannot be written: %s", self._path, error)
