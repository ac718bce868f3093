"""A job on a Ray cluster: real placement groups, and one actor a machine of each replica.

Nothing here is imported unless a job asks for it (`launcher: ray`); only then does Ray have to be
installed. Ray decides what is free and where; what it gave is checked against the plan before
anything is started.
"""

from __future__ import annotations

from importlib.util import find_spec

from phalanx.errors import ConfigurationError


def check_installed() -> None:
    """Raises `ConfigurationError` where there is no Ray; loads nothing."""
    if find_spec("ray") is None:
        raise missing("it is not installed")


def missing(reason: str) -> ConfigurationError:
    """What to say where Ray cannot be used."""
    return ConfigurationError(
        f"launcher: ray needs Ray ({reason}); install it with `pip install phalanx[ray]`, here and"
        " on every machine of the cluster"
    )
