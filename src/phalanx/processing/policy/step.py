"""What a processing step is, and what it is made of: one entry of LeRobot's processor files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, Protocol, Self, TypeVar, cast

import msgspec
from torch import Tensor

from phalanx.errors import CheckpointError
from phalanx.processing.policy.transition import Transition

C = TypeVar("C")


class ProcessorStep(Protocol):
    """One step; it keeps nothing between calls, so any thread may call it at any time."""

    @property
    def registry_name(self) -> str:
        """How the files call it."""
        ...

    @property
    def config(self) -> dict[str, object]:
        """What the files say of it, in their order."""
        ...

    @property
    def state(self) -> Mapping[str, Tensor]:
        """What is stored beside the file; empty for most."""
        ...

    def __call__(self, transition: Transition) -> Transition: ...


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What a step takes from where it runs rather than from its file.

    `directory`: the checkpoint's. `tokenizer_dir`: where its tokenizer is, if not there. `device`:
    instead of the device that the file names. `before`: the steps of the pipeline that runs before
    the one that is read (a post-processor's pre-processor). `earlier`: those of the same pipeline.
    """

    directory: Path
    tokenizer_dir: Path | None = None
    device: str | None = None
    before: tuple[ProcessorStep, ...] = ()
    earlier: tuple[ProcessorStep, ...] = ()


@dataclass(frozen=True, eq=False)
class StepRecord:
    """One entry of a file: `where` names file and place, for errors."""

    registry_name: str
    config: dict[str, object]
    where: str
    state: Mapping[str, Tensor] = field(default_factory=dict)

    def settings(self, kind: type[C]) -> C:
        """The configuration as `kind`. Raises `CheckpointError` naming the key that is wrong."""
        try:
            return msgspec.convert(self.config, kind)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                f"{self.where} ({self.registry_name}): {error}; its settings are "
                f"{', '.join(field.name for field in msgspec.structs.fields(kind)) or 'none'}"  # type: ignore[arg-type]
            ) from error


MakeStep = Callable[[StepRecord, Surroundings], ProcessorStep]


def as_config(settings: msgspec.Struct) -> dict[str, object]:
    """Settings as the files have them; fields that are unset are left out."""
    config: dict[str, object] = msgspec.to_builtins(settings)
    return config


S = TypeVar("S", bound=msgspec.Struct)


@dataclass(frozen=True)
class SettingsStep(Generic[S]):
    """What steps have in common that are their settings and nothing else. A step names itself and
    the class of its settings.
    """

    settings: S

    name: ClassVar[str]
    settings_cls: ClassVar[type[msgspec.Struct]]

    @classmethod
    def read(cls, record: StepRecord, _: Surroundings) -> Self:
        return cls(cast(S, record.settings(cls.settings_cls)))

    @property
    def registry_name(self) -> str:
        return self.name

    @property
    def config(self) -> dict[str, object]:
        return as_config(self.settings)

    @property
    def state(self) -> Mapping[str, Tensor]:
        return {}
