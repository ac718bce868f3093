"""Models and launches for tests."""

from __future__ import annotations

from phalanx.roles.contracts import ReplicaLaunch
from phalanx.schema.roles import EngineGroupSpec, EngineKind, InferenceModelSpec
from phalanx.testing.tiny_llama import write_tiny_llama

__all__ = ["launch_of", "model_of", "sglang_group", "write_tiny_llama"]


def model_of(*groups: EngineGroupSpec, name: str = "student", path: str = "m", **fields: object):
    return InferenceModelSpec(name, path, groups or (EngineGroupSpec(),), **fields)


def launch_of(
    model: InferenceModelSpec,
    ordinal: int = 0,
    *,
    group: int = 0,
    generation: int = 0,
    role: str = "rollout",
    **extra_args: object,
) -> ReplicaLaunch:
    return ReplicaLaunch(
        role,
        f"{model.name}/{ordinal}",
        generation,
        model,
        model.engine_groups[group],
        group,
        ordinal,
        extra_args,
    )


def sglang_group(**fields: object) -> EngineGroupSpec:
    return EngineGroupSpec(engine=EngineKind.SGLANG, **fields)
