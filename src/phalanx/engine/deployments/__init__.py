"""Where an engine's replicas run: in this process, in local workers, or in a launcher's ranks."""

from __future__ import annotations

from dataclasses import replace

from phalanx import settings
from phalanx.clock import Clock
from phalanx.engine.deployments.base import Deployment
from phalanx.engine.deployments.here import ExternalDeployment, InlineDeployment
from phalanx.engine.ranks import RankPlace
from phalanx.engine.registry import PluginClass
from phalanx.engine.requests import RequestTable
from phalanx.engine_config import EngineConfig, EntryArgs
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.launch import Mode
from phalanx.settings import Launcher

__all__ = ["Deployment", "create_deployment"]


def create_deployment(
    mode: Mode,
    plugin: PluginClass,
    plugin_args: EntryArgs,
    config: EngineConfig,
    deployment: DeploymentConfig,
    requests: RequestTable,
    clock: Clock,
) -> Deployment:
    """The deployment of a mode, with nothing started. Raises where it could never be."""
    if mode is Mode.LOCAL:
        from phalanx.engine.deployments.local import LocalDeployment

        return LocalDeployment(plugin, plugin_args, config, deployment, requests, clock)
    if mode is Mode.INLINE:
        return InlineDeployment(plugin, plugin_args, config, requests, clock)
    launcher = settings.launcher()
    inline = InlineDeployment(
        plugin, plugin_args, launched_config(config, launcher), requests, clock
    )
    world = config.parallel.infer_replica_world_size()
    place = _launched_place(launcher, world, deployment.output_rank)
    return ExternalDeployment(inline, place, requests)


def launched_config(config: EngineConfig, launcher: Launcher | None) -> EngineConfig:
    """`config` on the device that belongs to this process: `cuda` becomes `cuda:LOCAL_RANK`."""
    if launcher is None or launcher.local_rank is None or config.device.target != "cuda":
        return config
    device = replace(config.device, target=f"cuda:{launcher.local_rank}")
    return config.replace(device=device)


def _launched_place(launcher: Launcher | None, world: int, output_rank: int) -> RankPlace:
    if launcher is None or world == 1:
        return RankPlace(output_rank=output_rank)
    return RankPlace(
        launcher.rank, world, output_rank, master=settings.launcher_address(), launched=True
    )
