"""What the guide's code names without defining it: two plugins, their arguments and a request."""

from __future__ import annotations

import os
from dataclasses import dataclass

from phalanx import Entry, EntryArgs, get_engine_config


@dataclass(frozen=True)
class ModelArgs(EntryArgs):
    """The name of a checkpoint that nobody reads."""

    checkpoint: str = "none"


@dataclass(frozen=True)
class Question:
    """A number."""

    number: int


@dataclass(frozen=True)
class Reply:
    """One more than was asked; `pid` answered, with as many ranks as a collective counted."""

    number: int
    pid: int
    num_ranks: int


class MyModel(Entry):
    """Runs on a single rank."""

    name = "my_model"
    args_cls = ModelArgs
    request_cls = Question
    output_cls = Reply

    def setup(self, args: ModelArgs) -> None:
        assert args == ModelArgs()

    def step(self, request: Question) -> Reply:
        return Reply(request.number + 1, os.getpid(), 1)


class MyParallelModel(MyModel):
    """Every rank adds one to a sum over the group that the guide names."""

    name = "my_parallel_model"
    parallel_domains = frozenset({"dense", "attention"})

    def step(self, request: Question) -> Reply:
        import torch

        from phalanx import parallel as P

        one = torch.ones(1, device=get_engine_config().device.target)
        num_ranks = int(P.all_reduce(one, group="dense_tp"))
        return Reply(request.number + 1, os.getpid(), num_ranks)
