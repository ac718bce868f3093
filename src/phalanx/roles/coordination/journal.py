"""Where a job's phases are written down so that a restart knows them.

A file of lines of JSON, each written before the next step of anything is done, and on the disk where
somebody is answered by it. Whatever ends the process, at whatever byte, what is read is the state after
some line; a line that was cut off counts as never written.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import msgspec

from phalanx.errors import ConfigurationError, RoleOperationFailedError
from phalanx.roles.coordination.record import (
    JobShape,
    OperationRecord,
    PhaseState,
    Remembered,
)

FORMAT = 1
MAX_OPERATIONS = 1000
"""Older ones are forgotten: whoever asks for one again has it done again."""
MAX_LINES = 10_000
"""A longer file is written anew with what it means."""


class Journal(Protocol):
    """Written by one coordinator alone."""

    @property
    def where(self) -> str:
        """What it is, for messages."""
        ...

    def read(self) -> Remembered | None:
        """What was written before; None for nothing. Raises `ConfigurationError` for what is no
        journal.
        """
        ...

    def begin(self, remembered: Remembered) -> None:
        """Start anew with this. Raises as `write` does."""
        ...

    def write(
        self, state: PhaseState, operation: OperationRecord | None = None, *, sync: bool = True
    ) -> None:
        """Returns when it is safe from the end of this process and, with `sync`, of the machine;
        `operation` is the one that changed.

        Raises `RoleOperationFailedError` where it may not have been written.
        """
        ...

    def close(self) -> None: ...


class _JobLine(msgspec.Struct, frozen=True, tag="job", tag_field="line"):
    format: int
    shape: JobShape


class _StateLine(msgspec.Struct, frozen=True, tag="state", tag_field="line", omit_defaults=True):
    state: PhaseState
    operation: OperationRecord | None = None


_decoder = msgspec.json.Decoder(_JobLine | _StateLine)


class FileJournal:
    """One in a file, which whoever claimed the job's name has for itself."""

    def __init__(self, path: Path, max_lines: int = MAX_LINES) -> None:
        self.path = path
        self._max_lines = max_lines
        self._file: int | None = None
        self._lines = 0
        self._shape: JobShape | None = None
        self._state = PhaseState()
        self._operations: dict[str, OperationRecord] = {}

    @property
    def where(self) -> str:
        return f"the journal {self.path}"

    def read(self) -> Remembered | None:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ConfigurationError(
                f"cannot read the journal {self.path}: {error.strerror}"
            ) from None
        return self.parse(content)

    def parse(self, content: bytes) -> Remembered | None:
        """What a file with this content says. Raises as `read` does."""
        lines = self._whole_lines(content)
        if not lines:
            return None
        first, *others = lines
        if not isinstance(first, _JobLine) or first.format != FORMAT:
            raise self._unreadable("its first line is not that of a journal")
        state, operations = PhaseState(), dict[str, OperationRecord]()
        for line in others:
            if isinstance(line, _JobLine):
                raise self._unreadable("it begins twice")
            state = line.state
            if line.operation is not None:
                operations.pop(line.operation.operation_id, None)
                operations[line.operation.operation_id] = line.operation
        return Remembered(first.shape, state, tuple(operations.values()))

    def begin(self, remembered: Remembered) -> None:
        self._shape, self._state = remembered.shape, remembered.state
        self._operations = {each.operation_id: each for each in remembered.operations}
        self._rewrite()

    def write(
        self, state: PhaseState, operation: OperationRecord | None = None, *, sync: bool = True
    ) -> None:
        self._state = state
        if operation is not None:
            self._operations.pop(operation.operation_id, None)
            self._operations[operation.operation_id] = operation
            while len(self._operations) > MAX_OPERATIONS:
                del self._operations[next(iter(self._operations))]
        if self._file is None or self._lines >= self._max_lines:
            self._rewrite()
            return
        try:
            _write(self._file, _encoded(_StateLine(state, operation)))
            if sync:
                os.fdatasync(self._file)
        except OSError as error:
            # What is there of the line would swallow the next one: all of it is written anew then.
            self.close()
            raise self._unwritten(error) from error
        self._lines += 1

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _rewrite(self) -> None:
        """Whole or not at all, in the place of what is there."""
        assert self._shape is not None
        self.close()
        lines = [
            _encoded(_JobLine(FORMAT, self._shape)),
            *(_encoded(_StateLine(self._state, each)) for each in self._operations.values()),
            _encoded(_StateLine(self._state)),
        ]
        whole = self.path.with_name(f"{self.path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        try:
            file = os.open(whole, flags, 0o600)
            try:
                _write(file, b"".join(lines))
                os.fsync(file)
                whole.replace(self.path)
                _sync_directory(self.path.parent)
            except BaseException:
                os.close(file)
                raise
        except OSError as error:
            raise self._unwritten(error) from error
        self._file, self._lines = file, len(lines)

    def _whole_lines(self, content: bytes) -> list[_JobLine | _StateLine]:
        *lines, _cut_off = content.split(b"\n")
        found: list[_JobLine | _StateLine] = []
        for at, line in enumerate(lines):
            try:
                found.append(_decoder.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if at == len(lines) - 1:
                    break  # the machine stopped while it was written
                raise self._unreadable(f"its line {at + 1} cannot be read ({error})") from None
        return found

    def _unreadable(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"the journal of the job's phases {self.path} is damaged: {why}. Where no trainer of"
            " this job runs any more, delete the file: the job then begins with no batch"
        )

    def _unwritten(self, error: OSError) -> RoleOperationFailedError:
        return RoleOperationFailedError(
            f"cannot write the journal {self.path}: {error.strerror or error}"
        )


def _encoded(line: _JobLine | _StateLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def _write(file: int, content: bytes) -> None:
    while content:
        content = content[os.write(file, content) :]


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
