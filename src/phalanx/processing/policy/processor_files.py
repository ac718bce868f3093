"""Reads and writes LeRobot's `policy_preprocessor.json` and `policy_postprocessor.json`.

A file lists steps by name with their settings; what a step has of tensors is in a safetensors file
beside it, which its entry names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec
from msgspec import UNSET, UnsetType
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.processing.policy.pipeline import Pipeline, Processors
from phalanx.processing.policy.registry import make_step
from phalanx.processing.policy.step import ProcessorStep, StepRecord, Surroundings

PREPROCESSOR_FILE = "policy_preprocessor.json"
POSTPROCESSOR_FILE = "policy_postprocessor.json"


class _Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step: `registry_name`, or the class of one that its author has not registered."""

    registry_name: str | UnsetType = UNSET
    class_: str | UnsetType = msgspec.field(default=UNSET, name="class")
    config: dict[str, object] | UnsetType = UNSET
    state_file: str | UnsetType = UNSET


class _File(msgspec.Struct, frozen=True):
    name: str
    steps: list[_Entry]


def read_processors(surroundings: Surroundings) -> Processors:
    """Both pipelines of the checkpoint. Raises `CheckpointError` naming file and step."""
    before = read_pipeline(PREPROCESSOR_FILE, surroundings)
    surroundings = Surroundings(
        surroundings.directory, surroundings.tokenizer_dir, surroundings.device, before.steps
    )
    return Processors(before, read_pipeline(POSTPROCESSOR_FILE, surroundings))


def read_pipeline(file_name: str, surroundings: Surroundings) -> Pipeline:
    """The pipeline of one file of the checkpoint."""
    path = surroundings.directory / file_name
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; a policy's checkpoint needs {PREPROCESSOR_FILE} and "
            f"{POSTPROCESSOR_FILE}, which LeRobot writes when it saves a policy, or openpi's "
            "assets/<id>/norm_stats.json"
        ) from None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} is not a processor file: {error}") from error
    records = [
        _record(entry, path, f"{file_name}, step {index}") for index, entry in enumerate(file.steps)
    ]
    return Pipeline(file.name, read_steps(records, surroundings))


def read_steps(
    records: Iterable[StepRecord], surroundings: Surroundings
) -> tuple[ProcessorStep, ...]:
    """The steps of one pipeline, each of which may look at those before it."""
    steps: tuple[ProcessorStep, ...] = ()
    for record in records:
        steps += (make_step(record, replace(surroundings, earlier=steps)),)
    return steps


def write_processors(processors: Processors, directory: Path) -> None:
    """Both files, and those of their tensors, as LeRobot reads them."""
    write_pipeline(processors.before, directory, PREPROCESSOR_FILE)
    write_pipeline(processors.after, directory, POSTPROCESSOR_FILE)


def write_pipeline(pipeline: Pipeline, directory: Path, file_name: str) -> None:
    """One of the two."""
    directory.mkdir(parents=True, exist_ok=True)
    entries = []
    for index, step in enumerate(pipeline.steps):
        entry: dict[str, object] = {"registry_name": step.registry_name, "config": step.config}
        if step.state:
            stored = f"{pipeline.name}_step_{index}_{step.registry_name}.safetensors"
            save_file(_contiguous(step.state), directory / stored)
            entry["state_file"] = stored
        entries.append(entry)
    text = json.dumps({"name": pipeline.name, "steps": entries}, indent=2)
    (directory / file_name).write_text(text, encoding="utf-8")


def _record(entry: _Entry, path: Path, where: str) -> StepRecord:
    name = entry.registry_name if entry.registry_name is not UNSET else entry.class_
    if isinstance(name, UnsetType):
        raise CheckpointError(f"{path}: {where} has no registry_name")
    config = {} if isinstance(entry.config, UnsetType) else entry.config
    if isinstance(entry.state_file, UnsetType):
        return StepRecord(name, config, where)
    return StepRecord(name, config, where, _tensors(path.parent, entry.state_file, where))


def _tensors(directory: Path, name: str, where: str) -> Mapping[str, Tensor]:
    if Path(name).name != name:
        raise CheckpointError(f"{where}: state_file={name!r} must be a file of the checkpoint")
    try:
        return load_file(directory / name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{where}: its tensors are in {directory / name}, which cannot be read: {error}"
        ) from error


def _contiguous(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.contiguous().cpu() for name, value in state.items()}
