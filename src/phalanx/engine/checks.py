"""What an engine refuses before anything is started, and what it refuses of a request."""

from __future__ import annotations

from typing import Any

from phalanx.engine import registry
from phalanx.engine.registry import PluginClass
from phalanx.engine_config import EngineArgs, EngineConfig
from phalanx.errors import (
    ConfigurationError,
    InvalidRequestError,
    WrongRequestTypeError,
    WrongTypeError,
)
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.limits import Limits


def checked_plugin(args: EngineArgs) -> PluginClass:
    """The class of the plugin that `args` names. Raises `ConfigurationError`."""
    if not isinstance(args, EngineArgs):
        raise ConfigurationError(f"args is {type(args).__name__}; it must be phalanx.EngineArgs")
    plugin = registry.plugin_class(args.plugin)
    if not isinstance(args.plugin_args, plugin.args_cls):
        raise ConfigurationError(
            f"plugin {plugin.name!r} takes plugin_args of type {plugin.args_cls.__name__}, "
            f"not {type(args.plugin_args).__name__}"
        )
    if args.config is not None and not isinstance(args.config, EngineConfig):
        raise ConfigurationError(
            f"config is {type(args.config).__name__}; it must be phalanx.EngineConfig or None"
        )
    return plugin


def checked_deployment(deployment: DeploymentConfig | None) -> DeploymentConfig:
    """`deployment`, or the default one. Raises `WrongTypeError`."""
    if deployment is None:
        return DeploymentConfig()
    if not isinstance(deployment, DeploymentConfig):
        raise WrongTypeError(
            f"deployment is {type(deployment).__name__}; it must be phalanx.DeploymentConfig or "
            "None"
        )
    return deployment


def check_request(plugin: PluginClass, limits: Limits, request: Any, rid: str | None) -> None:
    """Refuse what can never be served. Raises `InvalidRequestError`."""
    if rid is not None and not _is_name(rid):
        raise InvalidRequestError(
            f"rid {rid!r} must be a non-empty string that UTF-8 can hold", field="rid"
        )
    _check_type(plugin, plugin.request_cls, request)
    plugin.validate(request, limits)


def check_rollout(plugin: PluginClass, limits: Limits, request: Any) -> None:
    """Refuse a rollout that can never be computed. Raises `InvalidRequestError`."""
    if plugin.rollout_cls is None:
        raise InvalidRequestError(
            f"plugin {plugin.name!r} has no rollouts; its requests go to step()"
        )
    _check_type(plugin, plugin.rollout_cls, request)
    plugin.validate(request, limits)


def _check_type(plugin: PluginClass, wanted: type[Any], request: Any) -> None:
    # An exact match: a rollout's request is one of the plain kind with more to it.
    is_rollout = plugin.rollout_cls is not None and isinstance(request, plugin.rollout_cls)
    if not isinstance(request, wanted) or (is_rollout and wanted is not plugin.rollout_cls):
        raise WrongRequestTypeError(
            f"plugin {plugin.name!r} takes {wanted.__name__}, not {type(request).__name__}"
        )


def _is_name(rid: object) -> bool:
    """Whether `rid` can name a request wherever it goes."""
    if not isinstance(rid, str) or not rid:
        return False
    try:
        rid.encode()
    except UnicodeEncodeError:
        return False
    return True
