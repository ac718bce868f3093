"""Lists on a benchmark's command line: systems by name, numbers, and where peers are installed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from phalanx.errors import ConfigurationError

T = TypeVar("T")


def chosen(names: str, known: Mapping[str, T], flag: str) -> list[T]:
    """What stands for the names of a list by comma; an unknown one is refused with the known."""
    found = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in known:
            raise ConfigurationError(f"{flag}: {name!r} is not known; allowed: {', '.join(known)}")
        found.append(known[name])
    return found


def interpreters(
    pairs: Sequence[str], peers: Collection[str], flag: str = "--peer-python"
) -> dict[str, Path]:
    """`NAME=PATH` pairs as a mapping; a name must be a peer's."""
    result = {}
    for pair in pairs:
        name, separator, path = pair.partition("=")
        if not separator or name not in peers:
            raise ConfigurationError(
                f"{flag} {pair!r} must be NAME=PATH with a name of {', '.join(peers)}"
            )
        result[name] = Path(path)
    return result


def numbers(text: str, flag: str) -> tuple[int, ...]:
    """Numbers by comma, each once, sorted."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise ConfigurationError(
            f"{flag} {text!r} must be numbers by comma, for example 1,8"
        ) from None
