"""Which way of running a deployment comes to: a pure choice from configuration and launcher."""

from __future__ import annotations

import enum

from phalanx.errors import ConfigurationError
from phalanx.schema.deployment import DeploymentConfig
from phalanx.settings import Launcher


class Mode(enum.StrEnum):
    """Where replicas run: in the calling process, in local workers, in a launcher's ranks."""

    INLINE = "inline"
    LOCAL = "local"
    EXTERNAL = "external"


def choose_mode(config: DeploymentConfig, replica_world: int, launcher: Launcher | None) -> Mode:
    """The mode of a deployment whose replicas have `replica_world` ranks each.

    Raises `ConfigurationError` where `output_rank` is not one of them, or the launcher that made
    this process (None: there is none) does not fit.
    """
    if config.output_rank >= replica_world:
        raise ConfigurationError(
            f"output_rank={config.output_rank} must be a rank of the replica, 0 to "
            f"{replica_world - 1}: ParallelConfig describes {_ranks(replica_world)}"
        )
    if config.mode == "external":
        _check_launched(replica_world, launcher)
        return Mode.EXTERNAL
    if launcher is not None and launcher.world_size > 1:
        raise ConfigurationError(
            f"a launcher started this process (RANK={launcher.rank}, "
            f"WORLD_SIZE={launcher.world_size}) and mode={config.mode!r} would run the model once "
            "in each of its processes; use DeploymentConfig.external(), or start one process only"
        )
    single = config.replica_count == 1 and replica_world == 1
    if config.mode == "auto" and single and not config.devices:
        return Mode.INLINE
    return Mode.LOCAL


def _check_launched(replica_world: int, launcher: Launcher | None) -> None:
    if launcher is None:
        if replica_world > 1:
            raise ConfigurationError(
                f"mode='external' with {_ranks(replica_world)} a replica needs RANK and WORLD_SIZE "
                f"from a launcher; start it with torchrun --nproc-per-node {replica_world}, or use "
                "DeploymentConfig.local()"
            )
    elif launcher.world_size != replica_world:
        raise ConfigurationError(
            f"WORLD_SIZE={launcher.world_size} of the launcher must be the {_ranks(replica_world)} "
            "that ParallelConfig describes; start as many processes, or change the sizes"
        )


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
