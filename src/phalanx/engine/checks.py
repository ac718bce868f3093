"""What an engine refuses before anything is started, and what it refuses of a request."""

from __future__ import annotations

from typing import Any

from phalanx.engine import registry
from phalanx.engine.registry import PluginClass
from phalanx.engine_config import EngineArgs, EngineConfig
from phalanx.errors import ConfigurationError, InvalidRequestError, WrongTypeError
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
    if not isinstance(request, plugin.request_cls):
        raise InvalidRequestError(
            f"plugin {plugin.name!r} takes {plugin.request_cls.__name__}, "
            f"not {type(request).__name__}"
        )
    plugin.validate(request, limits)


def _is_name(rid: object) -> bool:
    """Whether `rid` can name a request wherever it goes."""
    if not isinstance(rid, str) or not rid:
        return False
    try:
        rid.encode()
    except UnicodeEncodeError:
        return False
    return True
