"""What the tests of tensor parallelism run in every rank at once; nothing here loads transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import torch

from phalanx import parallel as P
from phalanx.engine_config import EngineConfig, use_engine_config
from phalanx.errors import ConfigurationError, PhalanxDistError
from phalanx.models.causal_lm.loading import LoadedModel
from phalanx.parallel.layout import build_layout
from phalanx.parallel.mesh import Mesh
from phalanx.schema.events import Failed, Final
from phalanx.schema.generate import GenerateOutput, GenerateRequest
from phalanx.schema.parallel import AttentionParallelConfig, DenseParallelConfig, ParallelConfig
from tests.models.driver import FLOAT32, Drive, load
from tests.models.logged_causal_lm import LoggedCausalLM, LoggedCausalLMArgs
from tests.parallel.rank_pool import mesh_of


@dataclass(frozen=True)
class Run:
    """Requests that start together in a service of its own, made with `options`."""

    requests: Sequence[GenerateRequest]
    options: dict[str, Any] = field(default_factory=dict)


def tensor_parallel(size: int) -> ParallelConfig:
    return ParallelConfig(dense=DenseParallelConfig(size), attention=AttentionParallelConfig(size))


def join_all_ranks() -> Mesh:
    """The mesh of a model over all ranks of the pool."""
    group = P.default_group()
    assert group is not None
    return mesh_of(tensor_parallel(group.size))


def outputs_of(model: LoadedModel, runs: Sequence[Run], config) -> list[list[GenerateOutput]]:
    return [Drive(model, config, **run.options).run(*run.requests) for run in runs]


def serve(directory, runs: Sequence[Run], config: EngineConfig = FLOAT32, **loading):
    """The outputs of every run of the model over all ranks."""
    join_all_ranks()
    return outputs_of(load(directory, config, **loading), runs, config)


def kv_heads(directory) -> int:
    join_all_ranks()
    return load(directory).decoder.num_kv_heads


def logged(directory, log_dir, requests: Sequence[GenerateRequest], **options):
    """The outputs of one run of the logged plugin, in the mesh that is current here."""
    entry = LoggedCausalLM()
    with use_engine_config(FLOAT32):
        entry.setup(LoggedCausalLMArgs(directory, log_dir=str(log_dir), **options))
        for index, request in enumerate(requests):
            entry.start(f"request {index}", request)
        ended = dict(finished(entry))
        entry.close()
    return [ended[f"request {index}"].payload for index in range(len(requests))]


def logged_in_each_rank(directory, log_dir, requests, **options):
    join_all_ranks()
    return logged(directory, log_dir, requests, **options)


def finished(entry: LoggedCausalLM) -> Iterator[tuple[str, Final]]:
    """Tick until nothing is left; every request's end."""
    while entry.busy:
        for event in entry.tick():
            assert not isinstance(event, Failed), event
            if isinstance(event, Final):
                yield event.rid, event


def with_a_slow_compiler(directory, log_dir, plain, structured, slow_ranks, num_ticks) -> list[str]:
    """Who ended in which order, where the grammar is there at once or after `num_ticks` ticks."""
    slow = join_all_ranks().rank in slow_ranks
    entry = LoggedCausalLM()
    with use_engine_config(FLOAT32):
        entry.setup(LoggedCausalLMArgs(directory, log_dir=str(log_dir), pool_tokens=1024))
        grammars, held = entry._service._grammars, Event()
        blocker = grammars._executor.submit(held.wait)
        entry.start("plain", plain)
        entry.start("structured", structured)
        if not slow:
            held.set()
            wait([blocker, *grammars._compiling.values()])
        ended = []
        for _ in range(num_ticks):
            ended += [event.rid for event in entry.tick() if isinstance(event, Final)]
        held.set()
        ended += [rid for rid, _ in finished(entry)]
        entry.close()
    return ended


def refusal_of_unequal_ranks(directory, configs, options) -> str:
    """What loading raises where each rank is given its own configuration and arguments."""
    rank = join_all_ranks().rank
    try:
        load(directory, configs[rank], **options[rank])
    except ConfigurationError as error:
        return str(error)
    return "nothing"


class Silent:
    """Collectives of a group whose other ranks add nothing, or whose first one says `first_rank`.

    The call after `broken_after` others fails.
    """

    device_type = "cpu"

    def __init__(self, size: int, broken_after: int | None, first_rank: int | None) -> None:
        self.num_calls = 0
        self._size = size
        self._broken_after = broken_after
        self._first_rank = first_rank

    def _call(self) -> None:
        self.num_calls += 1
        if self.num_calls - 1 == self._broken_after:
            raise PhalanxDistError("a rank has ended")

    def all_reduce_(self, x, op) -> None:
        self._call()

    def all_gather(self, x):
        self._call()
        return torch.stack([x] * self._size)

    def broadcast_(self, x, src) -> None:
        self._call()
        if self._first_rank is not None:
            x.fill_(self._first_rank)


@contextmanager
def pretended(
    size: int, rank: int, broken_after: int | None = None, first_rank: int | None = None
) -> Iterator[Silent]:
    """A mesh in this process of which only `rank` exists."""
    silent = Silent(size, broken_after, first_rank)
    layout = build_layout(tensor_parallel(size).resolve(size))
    mesh = Mesh("model", layout, rank, torch.device("cpu"), {tuple(range(size)): silent})
    with P.use_mesh(mesh):
        yield silent
