"""`adapter.args` of a served policy: how the robot's names and sizes become the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from phalanx.errors import ConfigurationError


class AdapterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`tokenizer_dir`: where `tokenizer.json` is, if the checkpoint does not have it. `image_names`:
    the robot's name of each camera, in the checkpoint's order. `state_dim`, `action_dim`: how many
    numbers the robot's state and actions have, if fewer than the checkpoint's. `state_names`: the
    inputs that, one after another, are the state, for robots that send it in parts. `asset_id`:
    whose statistics count, where a checkpoint of openpi has several robots'.
    """

    tokenizer_dir: str | None = None
    image_names: list[str] = []
    state_dim: int | None = None
    action_dim: int | None = None
    state_names: list[str] = []
    asset_id: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("state_dim", self.state_dim), ("action_dim", self.action_dim)):
            if value is not None and value < 1:
                raise ConfigurationError(f"{name}={value} must be at least 1")


def adapter_settings(given: Mapping[str, object]) -> AdapterSettings:
    """Raises `ConfigurationError` naming the key that is unknown or of a wrong type."""
    try:
        return msgspec.convert(dict(given), AdapterSettings)
    except msgspec.ValidationError as error:
        known = ", ".join(AdapterSettings.__struct_fields__)
        raise ConfigurationError(f"adapter.args: {error}; known: {known}") from error
