"""The configuration of `phalanx serve`, and of nothing else: which plugin, which engine on which
devices, which server. Defaults < environment < file < flags; a key that does not exist is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from phalanx import settings
from phalanx.engine_config import DeviceConfig, EngineConfig, RuntimeConfig
from phalanx.errors import ConfigurationError
from phalanx.schema.config_section import merge_config
from phalanx.schema.deployment_section import DeploymentSection
from phalanx.schema.file_keys import check_keys, readable
from phalanx.schema.file_paths import resolve_paths
from phalanx.schema.parallel import ParallelConfig
from phalanx.schema.server_config import ServerConfig
from phalanx.schema.yaml_text import parse_yaml

T = TypeVar("T")


class EngineSection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What differs from the defaults of `EngineConfig`; None where nothing does.

    Without `dtype` it is bfloat16 on CUDA and float32 on a CPU.
    """

    device: str | None = None
    dtype: str | None = None
    num_threads: int | None = None
    seed: int | None = None
    max_pending_requests: int | None = None
    stall_timeout_s: float | None = None
    dist_timeout_s: float | None = None
    step_timings: bool | None = None
    use_cuda_graph: bool | None = None

    def engine_config(self, parallel: ParallelConfig | None = None) -> EngineConfig:
        """The whole configuration: these values, then the environment's, then the defaults.

        `parallel` is the topology of a replica (None: a single rank).
        """
        base = None
        if self.device is not None:
            on_cpu = self.device == "cpu"
            base = EngineConfig(
                device=DeviceConfig(self.device, "float32" if on_cpu else "bfloat16")
            )
        config = EngineConfig.from_env(base)
        device, runtime = config.device, config.runtime
        return EngineConfig(
            device=DeviceConfig(
                self.device or device.target,
                device.params_dtype if self.dtype is None else self.dtype,
            ),
            runtime=RuntimeConfig(
                num_threads=_chosen(self.num_threads, runtime.num_threads),
                seed=_chosen(self.seed, runtime.seed),
                max_pending_requests=_chosen(
                    self.max_pending_requests, runtime.max_pending_requests
                ),
                stall_timeout_s=_chosen(self.stall_timeout_s, runtime.stall_timeout_s),
                dist_timeout_s=_chosen(self.dist_timeout_s, runtime.dist_timeout_s),
                step_timings=_chosen(self.step_timings, runtime.step_timings),
                use_cuda_graph=_chosen(self.use_cuda_graph, runtime.use_cuda_graph),
            ),
            parallel=_chosen(parallel, config.parallel),
        )


class LogSection(msgspec.Struct, frozen=True, kw_only=True):
    """What is logged and where: from `level` (None: PHALANX_LOG_LEVEL, else INFO) on, to stderr
    or to the end of `file`. `server.log_json` makes the lines JSON.
    """

    level: str | None = None
    file: str | None = None

    def __post_init__(self) -> None:
        if self.level is not None and self.level not in settings.LOG_LEVELS:
            allowed = ", ".join(settings.LOG_LEVELS)
            raise ConfigurationError(f"level={self.level!r} is not known; allowed: {allowed}")

    @property
    def effective_level(self) -> str:
        """The level after environment and default."""
        return self.level or settings.log_level() or "INFO"


class AdapterSection(msgspec.Struct, frozen=True, kw_only=True):
    """What stands between robot protocols and the plugin.

    `factory` (`module:callable`) is called with the plugin's arguments and `args`; without it the
    plugin's own adapter is used.
    """

    factory: str | None = None
    args: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if self.factory is not None:
            module, colon, name = self.factory.partition(":")
            if not (module and colon and name):
                raise ConfigurationError(
                    f"factory={self.factory!r} must be module:callable, as in "
                    "phalanx.server.backends.pi05:PI05Backend"
                )


class ServeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One served model. `plugin_args` are checked against the plugin's own `args_cls`."""

    plugin: str
    plugin_args: dict[str, Any] = {}
    engine: EngineSection = EngineSection()
    deployment: DeploymentSection = DeploymentSection()
    parallel: ParallelConfig = ParallelConfig()
    server: ServerConfig = ServerConfig()
    adapter: AdapterSection = AdapterSection()
    log: LogSection = LogSection()


def parse_serve_config(
    text: str,
    source: str,
    overrides: Mapping[str, object] | None = None,
    directory: Path | None = None,
) -> ServeConfig:
    """The configuration in the YAML `text`, with `overrides` by dotted key put over it.

    `source` names the text in errors. Values of `plugin_args` and `adapter.args` in the text that
    are paths start at `directory`.
    """
    document = parse_yaml(text, source)
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigurationError(f"{source} must hold a mapping with keys such as plugin, server")
    if "roles" in document:
        raise ConfigurationError(
            f"{source} is the file of a job, not of a server; `phalanx up` starts it"
        )
    merge_config(document, source)
    if directory is not None:
        resolve_paths(document, directory)
    for key, value in (overrides or {}).items():
        _put(document, key, value, source)
    check_keys(document, ServeConfig, source)
    if "plugin" not in document:
        raise ConfigurationError(f"{source}: the key plugin is missing; it names what to serve")
    try:
        return msgspec.convert(document, ServeConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{source}: {readable(error, document)}") from None


def _put(document: dict[str, Any], dotted: str, value: object, source: str) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        if document.get(section) is None:
            document[section] = {}
        document = document[section]
        if not isinstance(document, dict):
            raise ConfigurationError(f"{source}: {section} must hold keys of its own")
    document[last] = value


def _chosen(value: T | None, default: T) -> T:
    return default if value is None else value
