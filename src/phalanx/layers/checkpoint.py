"""The open weights files of a directory: which tensors fit a model's places, by name, before any is
read; and each one mapped as it is asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.layers.weight_slots import Slot, Target

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""The dtypes, by their names in safetensors, that are weights as they are."""

Given = tuple[Target, Callable[[], Tensor]]
"""Where a tensor goes, and how to have it."""


def _never(name: str) -> bool:
    return False


@dataclass(frozen=True)
class TensorNames:
    """What a model knows of its tensors' names: those of a checkpoint in `directory` of `family`.

    `unused` are there and not needed; `fused` are several others, which also have names of their own.
    """

    directory: Path
    family: str
    unused: Callable[[str], bool] = _never
    fused: Callable[[str], bool] = _never


class Checkpoint:
    """See the module. Raises `CheckpointError` where a file is damaged."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._open = ExitStack()
        self._files: list[tuple[str, safe_open]] = []
        with self._open as undo:
            for path in paths:
                with _readable(path):
                    file = undo.enter_context(safe_open(path, framework="pt"))
                    self._files += [(name, file) for name in file.keys()]  # noqa: SIM118
            self._open = undo.pop_all()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def fitting(
        self, targets: Mapping[str, Target], names: TensorNames, *, once: bool = False
    ) -> list[Given]:
        """Where each tensor goes, and how to read it.

        With `once` each is read once, in order: a file is closed behind its last one, so that it does
        not stay mapped while others are read.

        Raises `CheckpointError` naming missing, unexpected and misshapen tensors before anything is
        read.
        """
        filled: Counter[Slot] = Counter()
        fitting: list[tuple[str, safe_open]] = []
        unexpected: list[str] = []
        misshapen: list[str] = []
        for name, file in self._files:
            if names.unused(name):
                continue
            target = targets.get(name)
            if target is None or filled[target.slot] >= target.slot.shape[0]:
                unexpected.append(name)
                continue
            filled[target.slot] += target.rows
            fitting.append((name, file))
            part = file.get_slice(name)  # type: ignore[no-untyped-call]
            shape = tuple(part.get_shape())
            if shape != target.shape:
                misshapen.append(f"{name} of {shape} instead of {target.shape}")
            elif part.get_dtype() not in _FLOATS:
                misshapen.append(
                    f"{name} in {part.get_dtype()} instead of floats of 16 bits or more"
                )
        incomplete = {one.slot for one in targets.values() if filled[one.slot] < one.slot.shape[0]}
        missing = _missing(targets, names, {name for name, _ in fitting}, incomplete)
        if missing or unexpected or misshapen:
            raise CheckpointError(
                f"the weights in {names.directory} do not fit its config.json "
                f"({names.family}): missing {_listed(missing)}; "
                f"unexpected {_listed(unexpected)}; misshapen {_listed(misshapen)}"
            )
        last = {id(file): at for at, (_, file) in enumerate(fitting)} if once else {}
        return [
            (
                targets[name],
                partial(_read_last if last.get(id(file)) == at else _read, file, name),
            )
            for at, (name, file) in enumerate(fitting)
        ]


def _read(file: safe_open, name: str) -> Tensor:
    tensor: Tensor = file.get_tensor(name)  # type: ignore[no-untyped-call]
    return tensor


def _read_last(file: safe_open, name: str) -> Tensor:
    with file:
        return _read(file, name)


def _missing(
    targets: Mapping[str, Target], names: TensorNames, found: set[str], incomplete: set[Slot]
) -> list[str]:
    """Tensors that the incomplete parameters lack; a fused one is named by its parts."""
    return [
        name
        for name, target in targets.items()
        if target.slot in incomplete and name not in found and not names.fused(name)
    ]


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:8]) or "none"
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is damaged or incomplete: {error}; download or convert it again"
        ) from error
