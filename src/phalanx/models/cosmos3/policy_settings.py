"""`adapter.args` of a served Cosmos3 policy, and what one observation may say otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from phalanx.errors import ConfigurationError, InvalidRequestError
from phalanx.models.cosmos3.adapter_args import adapter_args, checked_as_requests
from phalanx.models.cosmos3.conditioning import TIERS
from phalanx.models.cosmos3.domains import DOMAINS, Domain
from phalanx.models.cosmos3.prompt import VIEWPOINTS
from phalanx.models.cosmos3.validation import check_number, check_sampling
from phalanx.processing.policy.parameters import check_policy_type
from phalanx.schema.observation import Observation


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`domain`: the embodiment, by name or id. `action_dim`: how many numbers an action has, where the
    domain does not tell. `action_chunk`: actions of one answer, at `fps` a second. `state_dim`: the
    numbers of a robot's state, for checkpoints that were trained with one. `action_range` and
    `state_range`: what -1 and 1 stand for, one pair a number, or one for all; without them actions
    are in the model's own units. `image_name`: the robot's name of its camera, None: the only one.
    `prompt_style`: `json` as published, `plain` as policies have it that were trained further on
    DROID. `viewpoint`: where the camera is; `none` leaves it out.
    """

    domain: str | int
    action_dim: int | None = None
    action_chunk: int = 16
    fps: float = 15.0
    state_dim: int | None = None
    action_range: list[tuple[float, float]] | None = None
    state_range: list[tuple[float, float]] | None = None
    image_name: str | None = None
    prompt_style: Literal["json", "plain"] = "json"
    viewpoint: str = "ego_view"
    negative_prompt: str = ""
    resolution_tier: int = 480
    num_inference_steps: int = 30
    guidance_scale: float = 1.0
    guidance_interval: tuple[int, int] | None = None
    flow_shift: float | None = 5.0
    tokenizer_dir: str | None = None

    def __post_init__(self) -> None:
        named = domain_of(self.domain).raw_action_dim if isinstance(self.domain, str) else None
        width = self.action_dim or named
        if width is None:
            raise ConfigurationError(
                f"domain={self.domain!r} does not tell how many numbers an action has; give "
                "action_dim"
            )
        for name, value in (
            ("action_dim", width),
            ("action_chunk", self.action_chunk),
            ("state_dim", self.state_dim),
        ):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}={value} must be at least 1")
        if self.state_dim not in (None, width):
            raise ConfigurationError(
                f"state_dim={self.state_dim}: a state has as many numbers as an action, {width}"
            )
        if self.resolution_tier not in TIERS:
            allowed = ", ".join(map(str, TIERS))
            raise ConfigurationError(f"resolution_tier={self.resolution_tier}; allowed: {allowed}")
        if isinstance(self.domain, int) and self.domain < 0:
            raise ConfigurationError(f"domain={self.domain} must be a name, or an id from 0 on")
        with checked_as_requests():
            check_number("fps", self.fps)
            check_sampling(
                self.num_inference_steps,
                self.guidance_scale,
                self.flow_shift,
                self.guidance_interval,
            )
        if self.viewpoint not in (*VIEWPOINTS, "none"):
            allowed = ", ".join((*VIEWPOINTS, "none"))
            raise ConfigurationError(f"viewpoint={self.viewpoint!r}; allowed: {allowed}")
        _check_range("action_range", self.action_range, width)
        _check_range("state_range", self.state_range, width)

    @property
    def domain_id(self) -> int:
        return domain_of(self.domain).id if isinstance(self.domain, str) else self.domain

    @property
    def width(self) -> int:
        """How many numbers an action has."""
        if self.action_dim is not None:
            return self.action_dim
        assert isinstance(self.domain, str)
        found = domain_of(self.domain).raw_action_dim
        assert found is not None
        return found


class ActionParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one observation may say: `mode`, `seed`, `num_steps`, `guidance_scale`, and `lerobot`, the
    settings of LeRobot's client."""

    mode: Literal["policy", "forward_dynamics", "inverse_dynamics"] = "policy"
    seed: int | None = None
    num_steps: int | None = None
    guidance_scale: float | None = None
    lerobot: dict[str, Any] | None = None


def domain_of(name: str) -> Domain:
    """Raises `ConfigurationError` with the names that there are."""
    found = DOMAINS.get(name)
    if found is None:
        raise ConfigurationError(
            f"domain={name!r}; allowed: {', '.join(DOMAINS)}, or the id of another"
        )
    return found


def policy_settings(given: Mapping[str, object]) -> PolicySettings:
    """Raises `ConfigurationError` as `adapter_args`."""
    return adapter_args(given, PolicySettings)


def action_parameters(observation: Observation, policy: str) -> ActionParameters:
    """Raises `InvalidRequestError` naming the parameter that is unknown or wrong."""
    try:
        found = msgspec.convert(dict(observation.parameters), ActionParameters)
    except msgspec.ValidationError as error:
        known = ", ".join(ActionParameters.__struct_fields__)
        raise InvalidRequestError(
            f"parameters: {error}; this policy knows {known}", field="parameters"
        ) from error
    check_policy_type(found.lerobot, policy)
    return found


def _check_range(name: str, pairs: list[tuple[float, float]] | None, width: int) -> None:
    if pairs is None:
        return
    if len(pairs) not in (1, width):
        raise ConfigurationError(f"{name} has {len(pairs)} pairs; give {width}, or 1 for all")
    for low, high in pairs:
        if not low < high or not math.isfinite(high - low):
            raise ConfigurationError(
                f"{name} has [{low}, {high}]; give two numbers, of which the lower one comes first"
            )
