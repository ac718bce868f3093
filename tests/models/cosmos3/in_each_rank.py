"""What the tests of several ranks run in each of them at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from phalanx import parallel as P
from phalanx.errors import ConfigurationError, PhalanxDistError
from phalanx.models.cosmos3.guidance import Guidance
from phalanx.models.cosmos3.row import RowInputs
from phalanx.parallel.collectives import GroupCollectives
from phalanx.parallel.layout import GROUP_NAMES
from phalanx.parallel.mesh import Mesh
from phalanx.schema.parallel import (
    AttentionParallelConfig,
    DenseParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)
from tests.models.cosmos3.loops import FLOAT32, Drive, Loop, final, model_of
from tests.parallel.rank_pool import mesh_of


def topology(tp: int, cfg: int) -> ParallelConfig:
    return ParallelConfig(
        outer=OuterParallelConfig(cfg_size=cfg),
        dense=DenseParallelConfig(tp),
        attention=AttentionParallelConfig(tp),
    )


class Counted:
    """The collectives of a group, and how often each is called."""

    def __init__(self, inner: GroupCollectives, counts: Counter[str], name: str) -> None:
        self._inner = inner
        self._counts = counts
        self._name = name

    @property
    def device_type(self) -> str:
        return self._inner.device_type

    def all_reduce_(self, x, op) -> None:
        self._counts[f"{self._name}.all_reduce"] += 1
        self._inner.all_reduce_(x, op)

    def all_gather(self, x) -> Tensor:
        self._counts[f"{self._name}.all_gather"] += 1
        return self._inner.all_gather(x)

    def broadcast_(self, x, src) -> None:
        self._counts[f"{self._name}.broadcast"] += 1
        self._inner.broadcast_(x, src)


@contextmanager
def counted(parallel: ParallelConfig) -> Iterator[Counter[str]]:
    """The mesh of all ranks of the pool, whose calls are counted by the members of their group."""
    mesh, counts = mesh_of(parallel), Counter()
    connections = {}
    for family in GROUP_NAMES:
        group = mesh.group(family)
        if group.collectives is not None:
            name = "-".join(map(str, group.members))
            connections[group.members] = Counted(group.collectives, counts, name)
    with P.use_mesh(Mesh("counted", mesh.layout, mesh.rank, mesh.device, connections)):
        yield counts


@dataclass(frozen=True)
class Ran:
    """What a rank has of some requests: each one's last latents and its trace, the number of its
    collectives and of the tokens of text and media that it computed.
    """

    latents: list[dict[str, Tensor]]
    traces: list[list[dict[str, Tensor]]]
    counts: dict[str, int]
    num_read: int
    num_tokens: int
    events: list[str] = field(default_factory=list)


def inputs_of(changes: Mapping[str, object], name: str) -> RowInputs:
    return Loop(name).inputs(**changes)


def run(
    directory: Path,
    tp: int,
    cfg: int,
    asked: Sequence[tuple[str, Mapping[str, object]]],
) -> Ran:
    """Rows of stored loops with changes, all started together."""
    with counted(topology(tp, cfg)) as counts:
        config = replace(FLOAT32, parallel=topology(tp, cfg))
        drive = Drive(model_of(directory, config), config, max_tokens=256)
        counts.clear()
        rows = drive.run(*(inputs_of(changes, name) for name, changes in asked), traced=True)
        return Ran(
            [final(row) for row in rows],
            [row.trace for row in rows],
            dict(counts),
            drive.nodes["text"].num_read,
            drive.nodes["denoise"].num_tokens,
        )


def decoded(directory: Path, tp: int, cfg: int, *, tiled: bool) -> Tensor | None:
    """The pixels that a rank has of a stored loop's video."""
    config = replace(FLOAT32, parallel=topology(tp, cfg))
    mesh_of(config.parallel)
    drive = Drive(model_of(directory, config, vae_tiling=tiled), config)
    (row,) = drive.run(inputs_of({"decodes": True}, "loop_t2v"))
    return row.pixels


def cancelled_and_pushed_back(directory: Path, tp: int, cfg: int) -> Ran:
    """Two requests go on, while others are cancelled, pushed back, and arrive late."""
    config = replace(FLOAT32, parallel=topology(tp, cfg))
    mesh_of(config.parallel)
    drive = Drive(model_of(directory, config), config, max_tokens=64)
    long = tuple(range(40))
    wanted = [
        drive.start("a", Loop("loop_policy").inputs(prompt=long)),
        drive.start("b", Loop("loop_t2v").inputs(negative=long)),
    ]
    drive.start("cut", Loop("loop_i2v_karras").inputs())
    for _ in range(3):
        drive.tick()
    drive.service.cancel("cut")
    drive.service._loop.push_back_all()
    drive.tick()
    free = Loop("loop_policy").inputs(guidance=Guidance(1.0), negative=None)
    # The one finds its prompt in the cache of a rank, the other its negative prompt on another.
    wanted.append(drive.start("c", replace(free, prompt=long)))
    wanted.append(drive.start("d", Loop("loop_t2v").inputs(negative=long)))
    drive.finish()
    latents = [final(row) for row in wanted]
    return Ran(latents, [], {}, 0, 0, [*map(str, drive.batches), *drive.ended])


def refusal_of_other_latents(directory: Path, tp: int, cfg: int) -> str:
    """What every rank raises where the last one begins with other noise."""
    config = replace(FLOAT32, parallel=topology(tp, cfg))
    mesh = mesh_of(config.parallel)
    drive = Drive(model_of(directory, config), config)
    inputs = Loop("loop_policy").inputs()
    if mesh.rank == mesh.world_size - 1:
        noise = replace(inputs.noise, vision=inputs.noise.vision + 1e-7)
        inputs = replace(inputs, noise=noise)
    drive.start("row", inputs)
    try:
        drive.finish()
    except PhalanxDistError as error:
        return str(error)
    return "nothing"


def refusal_of_other_arguments(directory: Path, tp: int, cfg: int) -> str:
    """What every rank raises where each is given another number of requests at once."""
    config = replace(FLOAT32, parallel=topology(tp, cfg))
    mesh = mesh_of(config.parallel)
    try:
        model_of(directory, config, max_batch_size=1 + mesh.rank)
    except ConfigurationError as error:
        return str(error)
    return "nothing"
