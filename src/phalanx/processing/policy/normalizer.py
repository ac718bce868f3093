"""Normalizes the observation before the policy, and what the policy gives after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec
import torch
from msgspec import UNSET, UnsetType
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.processing.policy.normalization import (
    NormalizationMode,
    Statistics,
    normalize,
    unnormalize,
)
from phalanx.processing.policy.step import StepRecord, Surroundings, as_config
from phalanx.processing.policy.transition import ACTION, Transition

NORMALIZER = "normalizer_processor"
UNNORMALIZER = "unnormalizer_processor"
VISUAL, ACTION_TYPE = "VISUAL", "ACTION"


class Feature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`type`: STATE, VISUAL, ENV, ACTION, ...; `shape` without rows; images are (C, H, W)."""

    type: str
    shape: list[int]


class NormalizerSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`norm_map`: the mode of each type of feature; a type that is not in it is left alone."""

    eps: float = 1e-8
    features: dict[str, Feature] = {}
    norm_map: dict[str, NormalizationMode] = {}
    normalize_observation_keys: list[str] | UnsetType = UNSET


@dataclass(frozen=True, eq=False)
class _Scaling:
    """What both directions share. A feature without statistics is left as it is."""

    settings: NormalizerSettings
    statistics: Mapping[str, Statistics]

    @property
    def config(self) -> dict[str, object]:
        return as_config(self.settings)

    @property
    def state(self) -> Mapping[str, Tensor]:
        return {
            f"{feature}.{name}": value
            for feature, statistics in self.statistics.items()
            for name, value in statistics.items()
        }

    def mode(self, key: str) -> NormalizationMode:
        """How the feature `key` is scaled; an action is one without being listed."""
        feature = self.settings.features.get(key)
        kind = ACTION_TYPE if key == ACTION or feature is None else feature.type
        if key not in self.statistics:
            return NormalizationMode.IDENTITY
        return self.settings.norm_map.get(kind, NormalizationMode.IDENTITY)

    def observation_keys(self) -> list[str]:
        chosen = self.settings.normalize_observation_keys
        return [
            key
            for key, feature in self.settings.features.items()
            if feature.type != ACTION_TYPE and (chosen is UNSET or key in chosen)
        ]


@dataclass(frozen=True, eq=False)
class Normalizer(_Scaling):
    """Before the policy."""

    @classmethod
    def read(cls, record: StepRecord, _: Surroundings) -> Normalizer:
        return cls(*_read(record))

    @property
    def registry_name(self) -> str:
        return NORMALIZER

    def __call__(self, transition: Transition) -> Transition:
        scaled = {
            key: self.scale(key, transition.observation[key])
            for key in self.observation_keys()
            if key in transition.observation
        }
        actions = transition.actions
        if actions is not None:
            actions = self.scale(ACTION, actions)
        return replace(transition.with_observation(scaled), actions=actions)

    def scale(self, key: str, values: Tensor) -> Tensor:
        """`values` of the feature `key` in the policy's units."""
        mode = self.mode(key)
        return normalize(mode, values, self.statistics.get(key, {}), self.settings.eps)


@dataclass(frozen=True, eq=False)
class Unnormalizer(_Scaling):
    """After the policy."""

    @classmethod
    def read(cls, record: StepRecord, _: Surroundings) -> Unnormalizer:
        return cls(*_read(record))

    @property
    def registry_name(self) -> str:
        return UNNORMALIZER

    def __call__(self, transition: Transition) -> Transition:
        scaled = {
            key: self.unscale(key, transition.observation[key])
            for key in self.observation_keys()
            if key in transition.observation
        }
        actions = transition.actions
        if actions is not None:
            actions = self.unscale(ACTION, actions)
        return replace(transition.with_observation(scaled), actions=actions)

    def unscale(self, key: str, values: Tensor) -> Tensor:
        """`values` of the feature `key` in the robot's units."""
        mode = self.mode(key)
        return unnormalize(mode, values, self.statistics.get(key, {}), self.settings.eps)


def _read(record: StepRecord) -> tuple[NormalizerSettings, dict[str, Statistics]]:
    settings = record.settings(NormalizerSettings)
    statistics: dict[str, dict[str, Tensor]] = {}
    for flat, value in record.state.items():
        key, _, name = flat.rpartition(".")
        feature = settings.features.get(key)
        values = value.to(torch.float32)
        if feature is not None and feature.type == VISUAL and values.ndim == 1:
            values = values.reshape(-1, 1, 1)
        statistics.setdefault(key, {})[name] = values
    for key, found in statistics.items():
        _check(record, settings, key, found)
    return settings, dict(statistics)


def _check(record: StepRecord, settings: NormalizerSettings, key: str, found: Statistics) -> None:
    """Refuses statistics that lack what the mode needs, or are of another width."""
    feature = settings.features.get(key)
    if feature is None:
        return
    mode = settings.norm_map.get(feature.type, NormalizationMode.IDENTITY)
    for name in mode.statistics:
        if name not in found:
            raise CheckpointError(
                f"{record.where} ({record.registry_name}): {mode} of {key!r} needs "
                f"{' and '.join(mode.statistics)}, and its statistics have {', '.join(found)}"
            )
        if found[name].shape[0] not in (1, feature.shape[0]):
            raise CheckpointError(
                f"{record.where} ({record.registry_name}): {key}.{name} has "
                f"{found[name].shape[0]} numbers for a feature of shape {feature.shape}"
            )
