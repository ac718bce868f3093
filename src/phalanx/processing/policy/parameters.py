"""What a request may say beside its observation, for policies that denoise and for those that do not."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import msgspec

from phalanx.errors import InvalidRequestError
from phalanx.schema.observation import Observation

P = TypeVar("P", bound=msgspec.Struct)


class RealTimeParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left of the chunk before: `prev_chunk_left_over` in the policy's units, or
    `prev_actions` in the robot's; a list of actions, or one a row. The rest as the policy has it.
    """

    prev_chunk_left_over: list[Any] | None = None
    prev_actions: list[Any] | None = None
    inference_delay: int = 0
    execution_horizon: int | None = None
    mode: Literal["guided", "trained"] = "guided"
    schedule: str = "LINEAR"
    max_guidance_weight: float = 10.0


class FlowParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`num_steps`: Euler steps. `seed`: the same noise for the same seed. `rtc`: go on from a chunk.
    `lerobot`: the settings of LeRobot's client.
    """

    num_steps: int | None = None
    seed: int | None = None
    rtc: RealTimeParameters | None = None
    lerobot: dict[str, Any] | None = None


class PlainParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`lerobot`: the settings of LeRobot's client."""

    lerobot: dict[str, Any] | None = None


def flow_parameters(observation: Observation, policy: str) -> FlowParameters:
    """Raises `InvalidRequestError` naming the parameter that is unknown or wrong."""
    found = _parameters(observation, FlowParameters)
    check_policy_type(found.lerobot, policy)
    return found


def check_parameters(observation: Observation, policy: str) -> None:
    """The same for a policy without a denoising loop."""
    check_policy_type(_parameters(observation, PlainParameters).lerobot, policy)


def _parameters(observation: Observation, kind: type[P]) -> P:
    try:
        return msgspec.convert(dict(observation.parameters), kind)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise InvalidRequestError(
            f"parameters: {error}; this policy knows {known}", field="parameters"
        ) from error


def check_policy_type(lerobot: dict[str, Any] | None, policy: str) -> None:
    """LeRobot's client names the type of policy that it expects to find."""
    wanted = (lerobot or {}).get("policy_type")
    if wanted is not None and wanted != policy:
        raise InvalidRequestError(
            f"the robot's client asks for policy_type={wanted!r}, and this server runs "
            f"{policy!r}; start the client with --policy_type={policy}",
            field="policy_type",
        )
