"""`phalanx env`: what this installation consists of, for people and for reports of faults."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from typing import Annotated, Any

import msgspec
import typer

from phalanx import __version__, settings
from phalanx.checkpoints import checkpoint_names
from phalanx.device_ledger import MIB, DeviceLedger
from phalanx.errors import ConfigurationError

_REQUIREMENT = re.compile(r"""^([\w.-]+)[^;]*(?:;\s*extra\s*==\s*["'](\w+)["'])?$""")
_NOT_FOR_USERS = "dev"


def env(
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Print versions, devices, plugins and the PHALANX_* variables."""
    facts = environment()
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(facts), indent=2).decode())
        return
    for name, value in facts.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for key, each in value.items():
                print(f"  {key}: {'not installed' if each is None else each}")
        else:
            shown = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
            print(f"{name}: {shown}")


def environment() -> dict[str, Any]:
    """What `phalanx env` prints, by name."""
    import torch

    from phalanx.device import device_names

    return {
        "phalanx": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "not in this build of torch",
        "devices": list(device_names()) or ["cpu"],
        "simulated_devices": _simulated_devices(),
        "plugins": sorted(point.name for point in entry_points(group="phalanx.models")),
        "checkpoints": list(checkpoint_names()),
        "cache_dir": str(settings.cache_dir()),
        "variables": settings.given(),
        "packages": {name: installed for group in extras().values() for name, installed in group},
    }


def _simulated_devices() -> list[str]:
    """Those that this process has by PHALANX_SIMULATED_DEVICES, or why it has none of them."""
    try:
        return [
            f"{one.number} of {one.ledger.path}, {one.ledger.budget_bytes / MIB:.0f} MiB"
            for one in DeviceLedger.from_environment()
        ]
    except ConfigurationError as error:
        return [str(error)]


def extras() -> dict[str, list[tuple[str, str | None]]]:
    """The packages that each extra of this package names, with their versions (None: absent).

    Those that are always needed are under the empty name.
    """
    groups: dict[str, list[tuple[str, str | None]]] = {}
    for requirement in requires("phalanx") or ():
        found = _REQUIREMENT.match(requirement)
        if found is None:
            continue
        name, extra = found[1], found[2] or ""
        if extra != _NOT_FOR_USERS:
            groups.setdefault(extra, []).append((name, _version(name)))
    return groups


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
