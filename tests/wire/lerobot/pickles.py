"""Pickles as LeRobot's clients write them: recorded ones, and made ones of stand-in classes."""

from __future__ import annotations

import io
import lzma
import pickle
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures" / "lerobot"
CURRENT = "lerobot.async_inference.helpers"
EARLIER = "lerobot.scripts.server.helpers"


@dataclass
class RemotePolicyConfig:
    policy_type: str
    pretrained_name_or_path: str
    lerobot_features: dict
    actions_per_chunk: int
    device: str = "cpu"
    rename_map: dict = field(default_factory=dict)


@dataclass
class TimedObservation:
    timestamp: float
    timestep: int
    observation: dict
    must_go: bool = False


@dataclass
class TimedAction:
    timestamp: float
    timestep: int
    action: object


CLASSES = (RemotePolicyConfig, TimedObservation, TimedAction)


def recorded(name: str) -> bytes:
    return lzma.decompress((FIXTURES / f"{name}.pkl.xz").read_bytes())


def trusted(data: bytes) -> object:
    """What Python's unpickler makes of it: for pickles of our own and recorded ones alone."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module, name):
            stand_ins = {cls.__name__: cls for cls in CLASSES}
            if module in (CURRENT, EARLIER):
                return stand_ins[name]
            return super().find_class(module, name)

    return Unpickler(io.BytesIO(data)).load()


@contextmanager
def lerobot(module: str) -> Iterator[types.ModuleType]:
    """LeRobot's classes where `module` says; nothing of LeRobot's is loaded."""
    assert module not in sys.modules
    names = [module.rsplit(".", depth)[0] for depth in range(module.count("."), -1, -1)]
    added = [name for name in names if name not in sys.modules]
    for name in added:
        sys.modules[name] = types.ModuleType(name)
    made = sys.modules[module]
    for cls in CLASSES:
        namespace = {"__module__": module, "__init__": cls.__init__}
        made.__dict__[cls.__name__] = type(cls.__name__, (), namespace)
    try:
        yield made
    finally:
        for name in added:
            del sys.modules[name]


def dumped(
    make: Callable[[types.ModuleType], object], *, module: str = CURRENT, protocol: int = 4
) -> bytes:
    """The pickle of what `make` makes of LeRobot's classes."""
    with lerobot(module) as classes:
        return pickle.dumps(make(classes), protocol)


def features(*cameras: tuple[str, tuple[int, ...]], joints: int = 2) -> dict:
    images = {
        f"observation.images.{name}": {
            "dtype": "image",
            "shape": shape,
            "names": ["height", "width", "channels"],
            "info": {"is_depth_map": False},
        }
        for name, shape in cameras
    }
    names = [f"j{index}.pos" for index in range(joints)]
    state = {"dtype": "float32", "shape": (joints,), "names": names}
    return {"observation.state": state, **images}


def config(**changed: object) -> bytes:
    """A `RemotePolicyConfig` of one camera, `front` of 4 x 6, and two joints."""
    fields = {
        "policy_type": "pi05",
        "pretrained_name_or_path": "pi05",
        "lerobot_features": features(("front", (4, 6, 3))),
        "actions_per_chunk": 8,
        **changed,
    }
    module = str(fields.pop("module", CURRENT))
    return dumped(lambda classes: classes.RemotePolicyConfig(**fields), module=module)


def observation(sensors: dict, *, protocol: int = 4, module: str = CURRENT, **changed) -> bytes:
    """A `TimedObservation` at 100 s, step 0."""
    fields = {"timestamp": 100.0, "timestep": 0, **changed}
    return dumped(
        lambda classes: classes.TimedObservation(observation=sensors, **fields),
        module=module,
        protocol=protocol,
    )
