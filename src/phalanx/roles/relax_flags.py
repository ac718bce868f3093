"""Arguments of Relax as they come, by name: which of them are about engines, and their values."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

from phalanx.errors import ConfigurationError

ENGINE_PREFIX = "sglang_"
TEACHER_PREFIX = "teacher_sglang_"
ROUTER_PREFIX = "sglang_router_"
KNOWN = frozenset(
    {
        "actor_num_gpus_per_node",
        "actor_num_nodes",
        "autoscaler_config",
        "colocate",
        "debug_rollout_only",
        "defer_reward_to_post_process",
        "fully_async",
        "genrm_engine_config",
        "genrm_instances",
        "genrm_model_path",
        "genrm_num_gpus",
        "genrm_num_gpus_per_engine",
        "genrm_sampling_config",
        "hf_checkpoint",
        "hybrid",
        "num_gpus_per_node",
        "opd_teacher_defer",
        "opd_teacher_routes",
        "opd_teacher_url",
        "opd_teacher_urls",
        "opd_type",
        "prefill_num_servers",
        "resource",
        "rollout_external",
        "rollout_external_engine_addrs",
        "rollout_health_check_interval",
        "rollout_health_check_timeout",
        "rollout_num_gpus",
        "rollout_num_gpus_per_engine",
        "sglang_config",
        "sglang_external_model_package",
        "sglang_router_ip",
        "sglang_router_policy",
        "sglang_router_port",
        "teacher_hf_checkpoint",
        "teacher_num_gpus_per_engine",
        "use_fault_tolerance",
        "use_opd",
    }
)
NO_EFFECT = frozenset(
    {
        "checkpoint_engine_backend",
        "max_staleness",
        "offload",
        "offload_rollout",
        "offload_train",
        "opd_teacher_key",
        "opd_teacher_timeout_s",
        "rollout_health_check_first_wait",
        "sglang_profile",
        "sglang_server_concurrency",
    }
)
"""Of callers, of the trainer, or what is always so here."""


class RelaxFlags:
    """The given arguments, whose values are those of a command line or parsed ones."""

    def __init__(self, arguments: Mapping[str, object]) -> None:
        """Raises `ConfigurationError` for one that is not about engines, or is given twice."""
        self._given: dict[str, object] = {}
        for written, value in arguments.items():
            name = written.removeprefix("--").replace("-", "_")
            if name in self._given:
                raise ConfigurationError(f"{_flag(name)} is given twice")
            if not _is_known(name):
                raise _unknown(written, name)
            if value is not None:
                self._given[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._given

    def text(self, name: str) -> str | None:
        value = self._given.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value or None

    def needed_text(self, name: str, why: str) -> str:
        value = self.text(name)
        if value is None:
            raise ConfigurationError(f"{_flag(name)} is missing: {why}")
        return value

    def is_on(self, name: str) -> bool:
        """Whether a switch is given; of a command line it has no value."""
        value = self._given.get(name, False)
        if isinstance(value, str) and value.lower() in ("", "true", "false"):
            return value.lower() != "false"
        if not isinstance(value, bool):
            raise self.wrong(name, "a switch")
        return value

    def number(self, name: str, default: int | None = None) -> int | None:
        """A whole number from 0 on."""
        value = self._given.get(name, default)
        if isinstance(value, str) and value.isascii() and value.isdecimal():
            return int(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise self.wrong(name, "a whole number")
        if value is not None and value < 0:
            raise self.wrong(name, "a whole number from 0 on")
        return value

    def seconds(self, name: str, default: float) -> float:
        value = self._given.get(name, default)
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise self.wrong(name, "a number of seconds") from None

    def texts(self, name: str) -> tuple[str, ...]:
        """A list, or words of a command line."""
        value = self._given.get(name, ())
        words = value.split() if isinstance(value, str) else value
        if not isinstance(words, (list, tuple)) or not all(isinstance(one, str) for one in words):
            raise self.wrong(name, "a list of texts")
        return tuple(words)

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A mapping, or its JSON; empty where it is not given."""
        value = self._given.get(name, {})
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ConfigurationError(f"{_flag(name)}={value!r} is no JSON: {error}") from None
        if not isinstance(value, dict):
            raise self.wrong(name, "a JSON object")
        return value

    def below(self, prefix: str) -> dict[str, object]:
        """What is given to engines under a prefix, by the engine's own names."""
        return {
            name.removeprefix(prefix): value
            for name, value in self._given.items()
            if name.startswith(prefix) and name not in KNOWN and name not in NO_EFFECT
        }

    def wrong(self, name: str, what: str) -> ConfigurationError:
        return ConfigurationError(f"{_flag(name)}={self._given.get(name)!r} must be {what}")


def _is_known(name: str) -> bool:
    if name.startswith(ROUTER_PREFIX):
        return name in KNOWN
    return name in KNOWN or name in NO_EFFECT or name.startswith((ENGINE_PREFIX, TEACHER_PREFIX))


def _unknown(written: str, name: str) -> ConfigurationError:
    near = difflib.get_close_matches(name, KNOWN, 1)
    hint = f"did you mean {_flag(near[0])}?" if near else "leave out what is not about engines"
    return ConfigurationError(f"{written} is not known here; {hint}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
