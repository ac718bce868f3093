"""The processing steps of an openpi checkpoint: its statistics in the steps of LeRobot's files.

openpi keeps `assets/<id>/norm_stats.json` beside the weights and the rest in its own code: three
cameras of fixed names, quantiles (pi0.5) or mean and deviation (pi0) with 1e-6 added to what is
divided by, and the cleaned instruction as prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigurationError
from phalanx.processing.policy import clean_prompt, newline_prompt, state_prompt, tokenization
from phalanx.processing.policy.adapter_settings import AdapterSettings
from phalanx.processing.policy.features import PolicyFeatures
from phalanx.processing.policy.normalization import NormalizationMode
from phalanx.processing.policy.normalizer import ACTION_TYPE, NORMALIZER, UNNORMALIZER
from phalanx.processing.policy.pipeline import Pipeline, Processors
from phalanx.processing.policy.processor_files import PREPROCESSOR_FILE, read_steps
from phalanx.processing.policy.step import StepRecord, Surroundings
from phalanx.processing.policy.transition import ACTION, IMAGE_PREFIX, STATE

STATISTICS = "norm_stats.json"
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
_ADDED = 1e-6


class _Statistics(msgspec.Struct, frozen=True):
    mean: list[float]
    std: list[float]
    q01: list[float] | None = None
    q99: list[float] | None = None


class _File(msgspec.Struct, frozen=True):
    norm_stats: dict[str, _Statistics]


@dataclass(frozen=True)
class OpenpiKind:
    """What is openpi's own way with one policy."""

    policy: str
    mode: NormalizationMode
    prompt: str

    @classmethod
    def pi05(cls) -> OpenpiKind:
        return cls("pi05", NormalizationMode.QUANTILES, state_prompt.NAME)

    @classmethod
    def pi0(cls) -> OpenpiKind:
        return cls("pi0", NormalizationMode.MEAN_STD, newline_prompt.NAMES[0])


@dataclass(frozen=True)
class OpenpiSizes:
    """Of the policy itself, which its files do not name."""

    image_size: int
    num_cameras: int
    chunk_size: int
    prompt_length: int


def is_openpi(directory: Path) -> bool:
    """Whether the checkpoint has openpi's statistics, and no files of LeRobot's steps."""
    return not (directory / PREPROCESSOR_FILE).exists() and bool(_found(directory))


def read_openpi(
    directory: Path, settings: AdapterSettings, kind: OpenpiKind, sizes: OpenpiSizes
) -> tuple[PolicyFeatures, Processors]:
    """Raises `CheckpointError` naming the file and what it lacks, `ConfigurationError` where one of
    several statistics has to be chosen.
    """
    path = _chosen(directory, settings.asset_id)
    statistics = _read(path)
    state = _tensors(statistics, "state", kind, path, settings.state_dim)
    action = _tensors(statistics, "actions", kind, path, settings.action_dim)
    cameras = {
        IMAGE_PREFIX + name: (3, sizes.image_size, sizes.image_size)
        for name in CAMERAS[: sizes.num_cameras]
    }
    features = PolicyFeatures(kind.policy, cameras, _width(state), _width(action), sizes.chunk_size)
    return features, _processors(directory, settings, kind, sizes, (state, action))


def _processors(
    directory: Path,
    settings: AdapterSettings,
    kind: OpenpiKind,
    sizes: OpenpiSizes,
    statistics: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
) -> Processors:
    state, action = statistics
    scaling: dict[str, object] = {
        # What is added is in the statistics already.
        "eps": 0.0,
        "features": {
            STATE: {"type": "STATE", "shape": [_width(state)]},
            ACTION: {"type": ACTION_TYPE, "shape": [_width(action)]},
        },
        "norm_map": {"STATE": str(kind.mode), ACTION_TYPE: str(kind.mode)},
    }
    tensors = {f"{STATE}.{name}": value for name, value in state.items()}
    tensors |= {f"{ACTION}.{name}": value for name, value in action.items()}
    prompt: dict[str, object] = {"max_length": sizes.prompt_length, "padding": "max_length"}
    before = (
        StepRecord(NORMALIZER, scaling, STATISTICS, tensors),
        StepRecord(clean_prompt.NAME, {}, STATISTICS),
        StepRecord(kind.prompt, {}, STATISTICS),
        StepRecord(tokenization.NAME, prompt, STATISTICS),
    )
    after = (StepRecord(UNNORMALIZER, scaling, STATISTICS, tensors),)
    tokenizer = None if settings.tokenizer_dir is None else Path(settings.tokenizer_dir)
    around = Surroundings(directory, tokenizer, device="cpu")
    return Processors(
        Pipeline("policy_preprocessor", read_steps(before, around)),
        Pipeline("policy_postprocessor", read_steps(after, around)),
    )


def _found(directory: Path) -> dict[str, Path]:
    """The statistics by their asset's id, which may have slashes."""
    assets = directory / "assets"
    return {
        path.parent.relative_to(assets).as_posix(): path
        for path in sorted(assets.rglob(STATISTICS))
    }


def _chosen(directory: Path, asset_id: str | None) -> Path:
    found = _found(directory)
    if asset_id is None and len(found) == 1:
        return next(iter(found.values()))
    known = ", ".join(map(repr, found))
    if asset_id is None:
        raise ConfigurationError(
            f"{directory} has statistics of several robots; say whose by asset_id in adapter.args: "
            f"{known}"
        )
    if asset_id not in found:
        raise ConfigurationError(
            f"asset_id={asset_id!r}: {directory}/assets has no such {STATISTICS}; it has {known}"
        )
    return found[asset_id]


def _read(path: Path) -> Mapping[str, _Statistics]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).norm_stats
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} has no statistics as openpi writes them: {error}") from error


def _tensors(
    statistics: Mapping[str, _Statistics],
    key: str,
    kind: OpenpiKind,
    path: Path,
    width: int | None,
) -> Mapping[str, Tensor]:
    """Those that the policy needs, of `width` numbers where the robot has fewer than were kept."""
    found = statistics.get(key)
    if found is None:
        raise CheckpointError(
            f"{path} has no {key!r}; it has {', '.join(map(repr, statistics)) or 'nothing'}"
        )
    if kind.mode is NormalizationMode.QUANTILES:
        lists, second = {"q01": found.q01, "q99": found.q99}, "q99"
    else:
        lists, second = {"mean": found.mean, "std": found.std}, "std"
    tensors = {}
    for name, values in lists.items():
        if values is None:
            raise CheckpointError(
                f"{path}: {key!r} has no {name}, which {kind.policy} is normalized by; compute the "
                "statistics with openpi again"
            )
        exact = torch.tensor(values, dtype=torch.float64)
        tensors[name] = (exact + _ADDED if name == second else exact).to(torch.float32)
    sizes = {len(values) for values in tensors.values()}
    if len(sizes) != 1 or sizes == {0}:
        raise CheckpointError(f"{path}: the statistics of {key!r} differ in length, or are empty")
    if width is not None and width > _width(tensors):
        raise ConfigurationError(
            f"{width} numbers are more than the {_width(tensors)} of {key!r} in {path}"
        )
    return {name: values[:width] for name, values in tensors.items()}


def _width(statistics: Mapping[str, Tensor]) -> int:
    return len(next(iter(statistics.values())))
