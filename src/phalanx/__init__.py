"""Phalanx: one dependable interface for robot policies, rollout models, judges and teachers.

Public names are resolved on first use, so that `import phalanx` loads neither torch nor HTTP.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "AttentionParallelConfig": "phalanx.schema.parallel",
    "BatchingEntry": "phalanx.plugin",
    "DenseParallelConfig": "phalanx.schema.parallel",
    "DeploymentConfig": "phalanx.schema.deployment",
    "DeviceConfig": "phalanx.engine_config",
    "Engine": "phalanx.engine.engine",
    "EngineArgs": "phalanx.engine_config",
    "EngineConfig": "phalanx.engine_config",
    "EngineUnavailableError": "phalanx.errors",
    "Entry": "phalanx.plugin",
    "EntryArgs": "phalanx.engine_config",
    "GenerateDelta": "phalanx.schema.generate",
    "GenerateOutput": "phalanx.schema.generate",
    "GenerateRequest": "phalanx.schema.generate",
    "InvalidRequestError": "phalanx.errors",
    "LogprobOptions": "phalanx.schema.generate",
    "MoeParallelConfig": "phalanx.schema.parallel",
    "OuterParallelConfig": "phalanx.schema.parallel",
    "ParallelConfig": "phalanx.schema.parallel",
    "RequestFailedError": "phalanx.errors",
    "RuntimeConfig": "phalanx.engine_config",
    "SamplingParams": "phalanx.schema.sampling",
    "get_engine_config": "phalanx.engine_config",
    "init_engine_config": "phalanx.engine_config",
    "set_engine_config": "phalanx.engine_config",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'phalanx' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
