"""What the trainer kept of its steps, and whether two runs are the same to the last bit."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from phalanx.distill import Sample


class Record(msgspec.Struct, frozen=True):
    """One step: what was trained on, and the numbers of it."""

    step: int
    metrics: dict[str, float]
    samples: tuple[Sample, ...]


def records(folder: Path) -> list[Record]:
    """Those of a run, step after step."""
    files = sorted((folder / "records").glob("step-*.json"))
    return [msgspec.json.decode(file.read_bytes(), type=Record) for file in files]


def differences(one: list[Record], other: list[Record]) -> list[str]:
    """What is not the same, in words; nothing where all of it is."""
    if len(one) != len(other):
        return [f"{len(one)} steps and {len(other)}"]
    found = []
    for left, right in zip(one, other, strict=True):
        pairs = list(zip(left.samples, right.samples, strict=False))
        same = {
            "answers": all(a.response_ids == b.response_ids for a, b in pairs),
            "rewards": all((a.verdict, a.reward) == (b.verdict, b.reward) for a, b in pairs),
            "the student's log-probabilities": all(
                a.rollout_log_probs == b.rollout_log_probs for a, b in pairs
            ),
            "the teacher's log-probabilities": all(a.scores == b.scores for a, b in pairs),
            "samples": left.samples == right.samples,
            "losses": left.metrics == right.metrics,
        }
        found += [
            f"{name} of step {left.step + 1}" for name, is_same in same.items() if not is_same
        ]
    return found


def final_digest(folder: Path) -> str:
    """SHA-256 of the weights after the last step."""
    last = max((folder / "checkpoints").glob("step-*"))
    with (last / "model.safetensors").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
