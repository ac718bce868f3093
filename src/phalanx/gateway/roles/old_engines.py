"""The older form of `/engines`, which its consumers read until they know the common one: a group of
engines a model, with the heads of replicas that take requests themselves.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from phalanx.routing.roles.snapshot import RoleContent, RoleModel, RoleSnapshot
from phalanx.schema.roles import WorkerType


class OldEngine(msgspec.Struct, frozen=True):
    """`rank` counts a model's replicas; `url` is null where clients are not told."""

    rank: int
    status: str
    url: str | None
    engine_id: str
    generation: int


class OldGroup(msgspec.Struct, frozen=True):
    """`num_new_engines` is how many are on their way."""

    group_index: int
    num_gpus_per_engine: int
    num_new_engines: int
    engines: tuple[OldEngine, ...]


class OldModel(msgspec.Struct, frozen=True):
    """The router is null where the model has none, or clients are not told."""

    router_ip: str | None
    router_port: int | None
    engine_groups: tuple[OldGroup, ...]
    total_engines: int


class OldEngines(msgspec.Struct, frozen=True):
    """`GET /<role>/engines?schema=1`."""

    models: dict[str, OldModel]
    total_engines: int


def old_engines(snapshot: RoleSnapshot, model_name: str | None = None) -> OldEngines:
    """Of one model, or of all."""
    content = snapshot.content
    models = {
        model.name: _model(content, model)
        for model in content.models
        if model_name in (None, model.name)
    }
    return OldEngines(models, sum(model.total_engines for model in models.values()))


def _model(content: RoleContent, model: RoleModel) -> OldModel:
    exposed = content.expose_engine_urls
    heads = [each for each in model.replicas if each.worker_type is WorkerType.REGULAR]
    engines = tuple(
        OldEngine(
            rank,
            str(head.state),
            head.base_url if exposed and head.exposed else None,
            head.engine_id,
            head.generation,
        )
        for rank, head in enumerate(heads)
    )
    num_new = sum(head.state in ("starting", "onloading") for head in heads)
    router = urlsplit(model.router_url or "") if exposed else urlsplit("")
    # How many devices an engine has is its launcher's own matter, and not published.
    groups = (OldGroup(0, 1, num_new, engines),) if engines else ()
    return OldModel(router.hostname, router.port, groups, len(engines))
