"""What a configuration file names as `module:name`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from phalanx.errors import ConfigurationError


def imported(target: str, key: str) -> Any:  # noqa: ANN401
    """What `module:name` names. Raises `ConfigurationError`, which calls it `key`."""
    module, _, name = target.partition(":")
    try:
        found: object = import_module(module)
        for part in name.split("."):
            found = vars(found)[part]
    except (ImportError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{key}={target!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigurationError(f"{key}={target!r} is not callable; give module:callable")
    return found
