"""A model server, and the deployment types that the serving guide imports from here.

Names are resolved on first use: importing this package loads neither torch nor HTTP.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phalanx.engine.deployment_plan import DeploymentPlan
    from phalanx.engine.executors.multiprocess import MultiprocessExecutor
    from phalanx.engine.workers.engine_runtime import EngineWorkerConfig, engine_worker_factory
    from phalanx.engine.workers.lifecycle import LifecycleState
    from phalanx.engine.workers.runtime import WorkerFactorySpec, WorkerRuntime
    from phalanx.engine.workers.supervisor import WorkerSupervisor
    from phalanx.schema.deployment import (
        DeploymentConfig,
        NodeResources,
        WorkerSupervisorConfig,
        normalize_device_indices,
    )
    from phalanx.schema.placement import WorkerPlacement

__all__ = [
    "DeploymentConfig",
    "DeploymentPlan",
    "EngineWorkerConfig",
    "LifecycleState",
    "MultiprocessExecutor",
    "NodeResources",
    "WorkerFactorySpec",
    "WorkerPlacement",
    "WorkerRuntime",
    "WorkerSupervisor",
    "WorkerSupervisorConfig",
    "engine_worker_factory",
    "normalize_device_indices",
]

_HOME = {
    "DeploymentConfig": "phalanx.schema.deployment",
    "DeploymentPlan": "phalanx.engine.deployment_plan",
    "EngineWorkerConfig": "phalanx.engine.workers.engine_runtime",
    "LifecycleState": "phalanx.engine.workers.lifecycle",
    "MultiprocessExecutor": "phalanx.engine.executors.multiprocess",
    "NodeResources": "phalanx.schema.deployment",
    "WorkerFactorySpec": "phalanx.engine.workers.runtime",
    "WorkerPlacement": "phalanx.schema.placement",
    "WorkerRuntime": "phalanx.engine.workers.runtime",
    "WorkerSupervisor": "phalanx.engine.workers.supervisor",
    "WorkerSupervisorConfig": "phalanx.schema.deployment",
    "engine_worker_factory": "phalanx.engine.workers.engine_runtime",
    "normalize_device_indices": "phalanx.schema.deployment",
}


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'phalanx.server' has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
