"""The models of the loop: a student made of a teacher's lower layers, or tiny ones for tests.

A directory is made beside its place and renamed when it is whole, so that what is there is complete.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from phalanx.cli.checkpoint_progress import prepared_checkpoint
from phalanx.settings import cache_dir

WHOLE = "smollm2-135m"
SEPARATE = "smollm2-135m-separate"
"""The same weights under the names that transformers reads."""
STUDENT_LAYERS = 12
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Models:
    """What each role loads: a directory, or a name that `phalanx up` knows."""

    student: str
    judge: str
    teacher: str


def smollm_models(num_layers: int = STUDENT_LAYERS) -> Models:
    """SmolLM2-135M as judge and teacher, its lower layers as the student; made once."""
    place = cache_dir() / "checkpoints" / f"{WHOLE}-lower-{num_layers}"
    if not place.exists():
        source = prepared_checkpoint(SEPARATE)
        _make(place, lambda made: keep_lower_layers(source, made, num_layers))
    prepared_checkpoint(WHOLE)
    return Models(str(place), WHOLE, WHOLE)


def tiny_models(folder: Path) -> Models:
    """Llamas of two layers with random weights, which load in an instant."""
    from phalanx.testing.tiny_llama import write_tiny_llama

    places = []
    for seed, name in enumerate(("student", "judge", "teacher")):
        place = folder / name
        if not place.exists():
            _make(place, lambda made, seed=seed: write_tiny_llama(made, seed))
        places.append(str(place))
    return Models(*places)


def keep_lower_layers(source: Path, target: Path, num_layers: int) -> None:
    """The checkpoint without the layers above, and everything else of it."""
    # They load torch, which a program that only asks for its --help need not.
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if not 1 <= num_layers <= config["num_hidden_layers"]:
        raise ValueError(
            f"num_layers={num_layers} must be from 1 to {config['num_hidden_layers']}, which {source}"
            " has"
        )
    config["num_hidden_layers"] = num_layers
    with safe_open(source / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if _is_kept(name, num_layers)]  # noqa: SIM118
        kept = {name: file.get_tensor(name) for name in names}
        save_file(kept, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for path in source.glob("*.json"):
        if path.name.startswith(("tokenizer", "generation")):
            shutil.copy(path, target)


def _is_kept(name: str, num_layers: int) -> bool:
    layer = _LAYER.match(name)
    return layer is None or int(layer[1]) < num_layers


def _make(place: Path, fill: Callable[[Path], object]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{place.name}-", dir=place.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        fill(made)
        if not place.exists():
            made.rename(place)
