"""Fills a model from a checkpoint, and says by name what does not fit."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.layers.weight_files import WeightOrigin
from phalanx.models.pi.checkpoint import PiCheckpoint
from phalanx.models.pi.model import PiModel
from phalanx.models.pi.targets import Target
from phalanx.models.pi.weights import randomize

logger = logging.getLogger(__name__)

Targets = Mapping[str, tuple[Target, ...]]


@dataclass(frozen=True)
class LoadReport:
    """Names of tensors that the model has and the checkpoint lacks, or the other way round, and of
    those whose shapes differ.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    misshapen: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return not (self.missing or self.unexpected or self.misshapen)

    def without(self, names: frozenset[str]) -> LoadReport:
        """The same where these may be missing."""
        return replace(self, missing=tuple(name for name in self.missing if name not in names))

    def __str__(self) -> str:
        parts = ("missing", self.missing), ("unexpected", self.unexpected)
        shown = (*parts, ("misshapen", self.misshapen))
        return "; ".join(f"{kind} {_listed(names)}" for kind, names in shown)


@dataclass(frozen=True)
class WeightSource:
    """Where a policy's weights come from: a checkpoint, or chance, of which there is always the same."""

    checkpoint: PiCheckpoint | None
    strict: bool
    seed: int

    @property
    def origin(self) -> WeightOrigin:
        """The files that there are now."""
        return WeightOrigin.of(*([self.checkpoint.directory] if self.checkpoint else []))

    def fill(self, model: PiModel, targets: Targets, unused: frozenset[str]) -> None:
        """Give all networks their weights, in the fastest form that this device has.

        Raises `CheckpointError` for a checkpoint that does not fit.
        """
        if self.checkpoint is None or not self.strict:
            randomize(model, self.seed)
        if self.checkpoint is not None:
            report = load_weights(targets, unused, self.checkpoint.tensors())
            report = report.without(model.expert.trained_later)
            check_report(report, self.checkpoint.directory, strict=self.strict)
        model.pack()


def load_weights(
    targets: Targets, unused: frozenset[str], tensors: Iterable[tuple[str, Tensor]]
) -> LoadReport:
    """Put every tensor into its place; those that do not fit are left out, and reported."""
    found: set[str] = set()
    unexpected: list[str] = []
    misshapen: list[str] = []
    for name, tensor in tensors:
        if name in unused:
            continue
        places = targets.get(name)
        if places is None:
            unexpected.append(name)
            continue
        found.add(name)
        if tuple(tensor.shape) != places[0].shape:
            misshapen.append(f"{name} of {tuple(tensor.shape)} instead of {places[0].shape}")
            continue
        for place in places:
            place.place(tensor)
    missing = tuple(name for name in targets if name not in found)
    return LoadReport(missing, tuple(unexpected), tuple(misshapen))


def check_report(report: LoadReport, source: object, *, strict: bool) -> None:
    """Refuse a checkpoint that does not fit, or, where not `strict`, say so in the log."""
    if report.clean:
        return
    message = f"the weights in {source} do not fit: {report}"
    if strict:
        raise CheckpointError(
            f"{message}; rename or drop tensors by weight_remap, or load with weight_strict=False"
        )
    logger.warning("%s; what is missing stays random", message)


def _listed(names: tuple[str, ...]) -> str:
    shown = ", ".join(names[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
