"""The `deployment` block of a configuration file: `DeploymentConfig` as YAML writes it."""

from __future__ import annotations

import msgspec

from phalanx.schema.deployment import (
    DeploymentConfig,
    WorkerSupervisorConfig,
    normalize_device_indices,
)

_DEPLOYMENT = DeploymentConfig()
_PROCESS = WorkerSupervisorConfig()


class ProcessSection(msgspec.Struct, frozen=True, kw_only=True):
    """`WorkerSupervisorConfig`; without `base_port` the command takes free ports."""

    num_nodes: int = _PROCESS.num_nodes
    node_rank: int = _PROCESS.node_rank
    master_addr: str = _PROCESS.master_addr
    base_port: int | None = None
    startup_timeout_s: float = _PROCESS.startup_timeout_s
    shutdown_timeout_s: float = _PROCESS.shutdown_timeout_s
    execution_timeout_s: float | None = _PROCESS.execution_timeout_s
    extra_env: dict[str, str] = {}

    def supervisor_config(self) -> WorkerSupervisorConfig:
        """The value that an engine takes; without `base_port`, with the usual one."""
        return WorkerSupervisorConfig(
            num_nodes=self.num_nodes,
            node_rank=self.node_rank,
            master_addr=self.master_addr,
            base_port=_PROCESS.base_port if self.base_port is None else self.base_port,
            startup_timeout_s=self.startup_timeout_s,
            shutdown_timeout_s=self.shutdown_timeout_s,
            execution_timeout_s=self.execution_timeout_s,
            extra_env=tuple(self.extra_env.items()),
        )


class DeploymentSection(msgspec.Struct, frozen=True, kw_only=True):
    """`DeploymentConfig`, with the same defaults."""

    mode: str = _DEPLOYMENT.mode
    replica_count: int = _DEPLOYMENT.replica_count
    devices: tuple[int | str, ...] = ()
    output_rank: int = _DEPLOYMENT.output_rank
    auto_start: bool = _DEPLOYMENT.auto_start
    process_config: ProcessSection = ProcessSection()

    def __post_init__(self) -> None:
        self.deployment_config()

    def deployment_config(self) -> DeploymentConfig:
        """The value that an engine takes. Raises `ConfigurationError` for one that is not valid."""
        given = self.process_config != ProcessSection()
        return DeploymentConfig(
            mode=self.mode,
            replica_count=self.replica_count,
            devices=normalize_device_indices(self.devices),
            output_rank=self.output_rank,
            process_config=self.process_config.supervisor_config() if given else None,
            auto_start=self.auto_start,
        )
