"""What the tests of operations run in every rank at once; nothing here loads transformers."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from safetensors.torch import load_file

from phalanx.device.cpu import CpuBackend
from phalanx.errors import InvalidRequestError, RequestFailedError
from phalanx.schema.control import (
    CheckWeights,
    LoadWeights,
    ReadWeight,
    ReplaceWeights,
    Sleep,
    Wake,
    WeightCheck,
)
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.sampling import SamplingParams
from tests.models.driver import Drive, load
from tests.models.in_each_rank import join_all_ranks

WANTED = GenerateRequest(
    input_ids=tuple(range(5, 30)),
    sampling=SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True),
    detokenize=False,
)


class ShortOfMemory(CpuBackend):
    """Has no room while it is `short`."""

    short = False

    def zeros(self, shape, dtype):
        if self.short:
            raise MemoryError("rank 1 has no room")
        return super().zeros(shape, dtype)


class GivesBackLast(CpuBackend):
    """Gives memory back once another rank has, and leaves a note of it."""

    def __init__(self, other: Path | None, note: Path) -> None:
        super().__init__()
        self._other, self._note = other, note

    def release_cached_memory(self) -> None:
        while self._other is not None and not self._other.exists():
            os.sched_yield()
        super().release_cached_memory()
        self._note.touch()


def said(driven: Drive) -> tuple[int, ...]:
    return driven.run(WANTED)[0].completions[0].token_ids


def every_way(first, second):
    """What is said after each way in and out, what is read of every weight, and how it compares."""
    join_all_ranks()
    driven = Drive(load(first), page_size=4)
    service = driven.service
    tokens = [said(driven)]
    service.ask(CheckWeights(WeightCheck.SNAPSHOT))
    service.control(LoadWeights(str(second)))
    tokens.append(said(driven))
    different = service.ask(CheckWeights(WeightCheck.COMPARE))
    tensors = load_file(Path(first) / "model.safetensors")
    service.control(ReplaceWeights(tensors, "first"))
    tokens.append(said(driven))
    same = service.ask(CheckWeights(WeightCheck.COMPARE))
    service.control(Sleep())
    service.control(Wake())
    assert service.statistics().waiting_for_weights
    for name, tensor in tensors.items():
        service.control(ReplaceWeights({name: tensor}, "first"))
    tokens.append(said(driven))
    read = {name: service.ask(ReadWeight(name, 200)) for name in tensors}
    service.ask(CheckWeights(WeightCheck.RESET_TENSORS))
    tokens.append(said(driven))
    service.control(LoadWeights(str(first)))
    service.control(Sleep())
    service.control(Wake())
    tokens.append(said(driven))
    return tokens, read, different.differing, same.differing, same.checksum


def refusal_of_one_rank(first, seconds):
    """Each rank is told to load from another directory, one of which does not exist."""
    rank = join_all_ranks().rank
    driven = Drive(load(first), page_size=4)
    before = said(driven)
    try:
        driven.service.control(LoadWeights(str(seconds[rank]), "bad"))
    except InvalidRequestError as error:
        assert said(driven) == before
        return str(error)
    return "nothing"


def no_room_on_one_rank(first):
    rank = join_all_ranks().rank
    backend = ShortOfMemory()
    driven = Drive(replace(load(first), backend=backend), page_size=4)
    before = said(driven)
    driven.service.control(Sleep())
    backend.short = rank == 1
    try:
        driven.service.control(Wake())
    except RequestFailedError as error:
        message = str(error)
    asleep = sorted(driven.service.statistics().asleep)
    backend.short = False
    driven.service.control(Wake())
    assert said(driven) == before
    return message, asleep


def memory_of_the_slower_rank(first, directory):
    """Who has given memory back when a sleep is over on this rank."""
    rank = join_all_ranks().rank
    notes = [Path(directory) / str(one) for one in range(2)]
    backend = GivesBackLast(notes[0] if rank == 1 else None, notes[rank])
    driven = Drive(replace(load(first), backend=backend), page_size=4)
    driven.service.control(Sleep())
    return [note.exists() for note in notes]


def changed_on_one_rank(firsts, other):
    """The checkpoint of one rank is written anew while all sleep."""
    rank = join_all_ranks().rank
    driven = Drive(load(firsts[rank]), page_size=4)
    driven.service.control(Sleep())
    if rank == 1:
        weights = Path(firsts[rank]) / "model.safetensors"
        weights.write_bytes((Path(other) / "model.safetensors").read_bytes())
    driven.service.control(Wake())
    return driven.service.statistics().waiting_for_weights
