"""What `phalanx serve` would run: all of a configuration, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import yaml
from msgspec.structs import replace

from phalanx.checkpoints import check_checkpoint
from phalanx.cli.checkpoint_progress import prepared_checkpoint
from phalanx.cli.listening import check_host
from phalanx.cli.placement import Placement, place
from phalanx.cli.policy_plan import (
    check_policy_server,
    create_policy,
    create_videos,
    refuse_policy_keys,
)
from phalanx.engine_config import EngineArgs, EngineConfig, EntryArgs
from phalanx.errors import ConfigurationError
from phalanx.plugin import PolicyAdapter, ServingAdapter, VideoAdapter
from phalanx.schema.deployment_section import DeploymentSection
from phalanx.schema.plugin_args import build_plugin_args
from phalanx.schema.serve_config import AdapterSection, LogSection, ServeConfig
from phalanx.schema.server_config import HTTP_PORT, POLICY_PORT, ServerConfig
from phalanx.server.tls import load_tls

CHECKPOINT_KEY = "checkpoint_dir"


@dataclasses.dataclass(frozen=True)
class ServePlan:
    """What a configuration comes to.

    `serving` is for text, `policy` for robots, `videos` for videos; all are None until the
    checkpoint is on disk.
    """

    engine: EngineArgs
    deployment: DeploymentSection
    placement: Placement
    serving: ServingAdapter | None
    policy: PolicyAdapter | None
    videos: VideoAdapter | None
    server: ServerConfig
    adapter: AdapterSection
    log: LogSection


def plan(config: ServeConfig, source: str, *, prepare: bool) -> ServePlan:
    """Check all of `config`; with `prepare`, a model known by name is made ready on disk."""
    from phalanx.engine.registry import plugin_class

    plugin = plugin_class(config.plugin)
    engine_config = config.engine.engine_config(config.parallel)
    plugin.validate_parallel(engine_config.parallel)
    placement = place(config.deployment, engine_config)
    values = dict(config.plugin_args)
    build_plugin_args(plugin.args_cls, values, source)
    model = values.get(CHECKPOINT_KEY)
    if isinstance(model, str):
        check_checkpoint(model)
        if prepare:
            values[CHECKPOINT_KEY] = str(prepared_checkpoint(model))
    args: EntryArgs = build_plugin_args(plugin.args_cls, values, source)
    plugin.validate_args(args, engine_config.parallel)
    on_disk = prepare or not isinstance(model, str) or Path(model).is_dir()
    serving = plugin.serving(args) if on_disk else None
    policy = create_policy(plugin, args, config.adapter, source) if on_disk else None
    videos = create_videos(plugin, args, config.adapter, source) if on_disk else None
    _check_role(config, engine_config, source, has_text=serving is not None or not on_disk)
    if policy is not None:
        check_policy_server(config.server, source)
    elif on_disk:
        own = AdapterSection() if videos is not None else config.adapter
        refuse_policy_keys(config.server, own, plugin.name, source)
    load_tls(config.server)
    check_host("server.host", config.server.host)
    port = HTTP_PORT if policy is None else POLICY_PORT
    server = config.server if config.server.port is not None else replace(config.server, port=port)
    return ServePlan(
        EngineArgs(config.plugin, args, engine_config),
        config.deployment,
        placement,
        serving,
        policy,
        videos,
        server,
        config.adapter,
        config.log,
    )


def _check_role(
    config: ServeConfig, engine_config: EngineConfig, source: str, *, has_text: bool
) -> None:
    """Refuse what cannot share the work of a request with another server."""
    role = config.server.role
    if role == "both":
        return
    if not has_text:
        raise ConfigurationError(
            f"{source}: server.role={role} needs a plugin that serves text, and "
            f"{config.plugin!r} does not; leave it out"
        )
    ranks = engine_config.parallel.infer_replica_world_size()
    if ranks > 1:
        raise ConfigurationError(
            f"{source}: server.role={role} needs replicas of one rank, and these have {ranks}; set "
            "parallel.dense.tp_size and parallel.attention.tp_size to 1"
        )


def describe(plan: ServePlan) -> str:
    """`plan` as the YAML file that would give it; an API key is not shown.

    Comments at the end say which rank runs where.
    """
    config = plan.engine.config
    assert config is not None and dataclasses.is_dataclass(plan.engine.plugin_args)
    has_adapter = plan.policy is not None or plan.videos is not None
    document: dict[str, Any] = {
        "plugin": plan.engine.plugin,
        "plugin_args": {
            field.name: _plain(getattr(plan.engine.plugin_args, field.name))
            for field in dataclasses.fields(plan.engine.plugin_args)
        },
        "engine": {
            "device": config.device.target,
            "dtype": config.device.params_dtype,
            **dataclasses.asdict(config.runtime),
        },
        "deployment": msgspec.to_builtins(plan.deployment),
        "parallel": dataclasses.asdict(config.parallel),
        "server": plan.server.shown(),
        **({"adapter": msgspec.to_builtins(plan.adapter)} if has_adapter else {}),
        "log": {"level": plan.log.effective_level, "file": plan.log.file},
    }
    comments = "".join(f"# {line}\n" for line in plan.placement.lines())
    return yaml.safe_dump(document, sort_keys=False) + comments


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else msgspec.to_builtins(value, enc_hook=str)
