"""A gateway's keys in a file, so that they are not in the list of this machine's processes."""

from __future__ import annotations

from pathlib import Path

import msgspec

from phalanx.errors import ConfigurationError
from phalanx.schema.file_keys import check_keys, readable
from phalanx.schema.yaml_text import parse_yaml


class KeyFile(msgspec.Struct, frozen=True):
    """Each as the flag of that name."""

    api_key: str | None = None
    admin_key: str | None = None
    backend_key: str | None = None
    roles_key: str | None = None


def read_key_file(path: Path | None) -> KeyFile:
    """The keys in a YAML file; None has none. Raises `ConfigurationError`, which tells no key."""
    if path is None:
        return KeyFile()
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--key-file: cannot read {path}: {error}") from None
    if not isinstance(document, dict):
        raise ConfigurationError(f"--key-file {path} must hold keys, as api_key: KEY")
    check_keys(document, KeyFile, str(path))
    try:
        return msgspec.convert(document, KeyFile)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"--key-file {path}: {readable(error)}") from None
