"""Configuration of an engine: frozen values, checked when built, importable without torch.

`params_dtype` accepts a `torch.dtype` or its name and is kept as the name. An engine makes its
configuration current around each call into its plugin, so that two engines in one process do not
see each other's.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from phalanx import settings
from phalanx.errors import ConfigurationError, WrongTypeError
from phalanx.schema.parallel import (
    AttentionParallelConfig,
    DenseParallelConfig,
    MoeParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
    ResolvedParallelConfig,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "DTYPES",
    "AttentionParallelConfig",
    "DenseParallelConfig",
    "DeviceConfig",
    "EngineArgs",
    "EngineConfig",
    "EntryArgs",
    "MoeParallelConfig",
    "OuterParallelConfig",
    "ParallelConfig",
    "ResolvedParallelConfig",
    "RuntimeConfig",
    "get_engine_config",
    "init_engine_config",
    "resolve_params_dtype",
    "resolve_params_dtype_name",
    "set_engine_config",
    "use_engine_config",
]

DTYPES = ("float32", "bfloat16", "float16")
_TARGET = re.compile(r"^(cpu|cuda(:\d+)?)$")


class EntryArgs:
    """Base of a plugin's own arguments, which are a dataclass, frozen or not."""


@dataclass(frozen=True)
class DeviceConfig:
    """Where parameters live (`cpu`, `cuda` or `cuda:N`) and their dtype."""

    target: str = "cuda"
    params_dtype: Any = "bfloat16"

    def __post_init__(self) -> None:
        if not isinstance(self.target, str) or not _TARGET.match(self.target):
            raise ConfigurationError(
                f"device target {self.target!r} is not known; allowed: cpu, cuda, cuda:N"
            )
        object.__setattr__(self, "params_dtype", resolve_params_dtype_name(self.params_dtype))

    @property
    def torch_dtype(self) -> torch.dtype:
        """`params_dtype` as a `torch.dtype`."""
        return resolve_params_dtype(self.params_dtype)


@dataclass(frozen=True)
class RuntimeConfig:
    """How the engine runs.

    `num_threads`: torch threads of the computing thread (None: torch's own choice). `seed` seeds
    torch's generators (a request's draws follow its own seed). `max_pending_requests` bounds what
    is accepted and not ended; beyond it a submit is refused. A stream whose reader takes nothing
    for `stall_timeout_s` while output waits is cancelled. `dist_timeout_s` is how long a rank waits
    for the others of its replica, at the start and in a collective. With `step_timings` the loop's
    statistics tell how much time each stage of the steps took. `use_cuda_graph`: nodes that can be
    captured are, on a CUDA device.
    """

    num_threads: int | None = None
    seed: int | None = None
    max_pending_requests: int = 1024
    stall_timeout_s: float = 60.0
    dist_timeout_s: float = 1800.0
    step_timings: bool = False
    use_cuda_graph: bool = True

    def __post_init__(self) -> None:
        for name in ("num_threads", "max_pending_requests"):
            value = getattr(self, name)
            if value is None and name == "num_threads":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigurationError(f"{name}={value!r} must be a positive integer")
        _seconds("stall_timeout_s", self.stall_timeout_s)
        _seconds("dist_timeout_s", self.dist_timeout_s)


def _seconds(name: str, value: object) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0.0 < float(value) < float("inf"):  # type: ignore[arg-type]
        raise ConfigurationError(f"{name}={value!r} must be a positive number of seconds")


@dataclass(frozen=True)
class EngineConfig:
    """Device, runtime and topology of one replica of an engine."""

    device: DeviceConfig = field(default_factory=DeviceConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        if not isinstance(self.parallel, ParallelConfig):
            raise WrongTypeError(
                f"EngineConfig.parallel must be a ParallelConfig, not "
                f"{type(self.parallel).__name__} {self.parallel!r}"
            )

    @classmethod
    def auto(cls) -> EngineConfig:
        """CUDA and bfloat16 where CUDA is available, else CPU and float32."""
        import torch

        if torch.accelerator.is_available() and torch.accelerator.current_accelerator() is not None:
            return cls(device=DeviceConfig("cuda", "bfloat16"))
        return cls(device=DeviceConfig("cpu", "float32"))

    @classmethod
    def from_env(cls, base: EngineConfig | None = None) -> EngineConfig:
        """`base` (or `auto()`) with the `PHALANX_*` variables applied.

        The topology is never read from them: a variable that would set it is refused by name.
        """
        settings.refuse_removed()
        config = base if base is not None else cls.auto()
        device = DeviceConfig(
            settings.device() or config.device.target,
            settings.params_dtype() or config.device.params_dtype,
        )
        threads, seed = settings.num_threads(), settings.seed()
        dist_timeout_s = settings.dist_timeout_s()
        runtime = replace(
            config.runtime,
            num_threads=config.runtime.num_threads if threads is None else threads,
            seed=config.runtime.seed if seed is None else seed,
            dist_timeout_s=dist_timeout_s or config.runtime.dist_timeout_s,
        )
        return config.replace(device=device, runtime=runtime)

    def replace(
        self,
        *,
        device: DeviceConfig | None = None,
        runtime: RuntimeConfig | None = None,
        parallel: ParallelConfig | None = None,
    ) -> EngineConfig:
        """A copy with the given parts exchanged."""
        return EngineConfig(
            device=device or self.device,
            runtime=runtime or self.runtime,
            parallel=parallel or self.parallel,
        )


@dataclass(frozen=True)
class EngineArgs:
    """Which plugin to run, with which arguments, under which configuration.

    Without `config` the environment decides (`EngineConfig.from_env()`).
    """

    plugin: str
    plugin_args: EntryArgs
    config: EngineConfig | None = None


def resolve_params_dtype_name(value: object) -> str:
    """The name of a dtype given as a `torch.dtype` or as its name."""
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigurationError(
            f"params_dtype {value!r} is not supported; allowed: {', '.join(DTYPES)}"
        )
    return name


def resolve_params_dtype(value: object) -> torch.dtype:
    """The `torch.dtype` of a dtype given as such or by name."""
    import torch

    dtype = getattr(torch, resolve_params_dtype_name(value))
    assert isinstance(dtype, torch.dtype)
    return dtype


class _ProcessConfig:
    """The configuration that scripts set for their whole process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.value: EngineConfig | None = None


_current: ContextVar[EngineConfig] = ContextVar("phalanx_engine_config")
_process = _ProcessConfig()


def get_engine_config() -> EngineConfig:
    """The configuration of the engine that is calling its plugin, else the process's own.

    A thread that a plugin starts by itself is outside of that call. Raises `ConfigurationError`
    where neither exists.
    """
    config = _current.get(None) or _process.value
    if config is None:
        raise ConfigurationError(
            "no engine configuration is current here; call this from a plugin's methods, "
            "inside `use_engine_config(config)`, or after `set_engine_config(config)`"
        )
    return config


def set_engine_config(config: EngineConfig | None) -> None:
    """Set what `get_engine_config` returns outside of engines' calls, in all threads; None unsets."""
    if config is not None and not isinstance(config, EngineConfig):
        raise WrongTypeError(
            f"config is {type(config).__name__}; it must be phalanx.EngineConfig or None"
        )
    with _process.lock:
        _process.value = config


def init_engine_config(config: EngineConfig | None = None) -> EngineConfig:
    """Set the process's configuration unless it is set, and return it.

    Without `config` the environment decides (`EngineConfig.from_env()`).
    """
    chosen = config if config is not None else EngineConfig.from_env()
    with _process.lock:
        if _process.value is None:
            _process.value = chosen
        return _process.value


@contextmanager
def use_engine_config(config: EngineConfig) -> Iterator[None]:
    """Make `config` what `get_engine_config` returns in this thread."""
    token = _current.set(config)
    try:
        yield
    finally:
        _current.reset(token)
