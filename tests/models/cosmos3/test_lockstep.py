"""A rank whose step broke computes nothing more, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from phalanx.errors import EngineAsleepError, InvalidRequestError, PhalanxDistError
from phalanx.models.cosmos3.lockstep import Lockstep
from phalanx.models.cosmos3.row import MediaRequest
from phalanx.parallel.mesh import Group
from tests.models.cosmos3.loops import Drive, Loop, model_of


class OfTwo:
    """The second of two ranks, whose first one begins with `sums`."""

    device_type = "cpu"

    def __init__(self, *sums: int) -> None:
        self._sums = list(sums)
        self.num_calls = 0

    def all_gather(self, x):
        self.num_calls += 1
        return torch.stack((torch.tensor([self._sums]), x))


def lockstep(*sums: int) -> tuple[Lockstep, OfTwo]:
    collectives = OfTwo(*sums)
    group = Group("world", (0, 1), 1, torch.device("cpu"), collectives)
    return Lockstep(group), collectives


def broken():
    raise RuntimeError("no memory")


def test_after_a_failure_nothing_is_computed():
    ranks, _ = lockstep()
    with pytest.raises(RuntimeError, match="no memory"):
        ranks.run(broken)
    with pytest.raises(RuntimeError, match="no memory"):
        ranks.run(lambda: pytest.fail("computed"))
    with pytest.raises(PhalanxDistError, match="a step failed on this rank.*: no memory"):
        ranks.check()


def test_what_is_wrong_with_a_request_is_so_on_every_rank():
    def wrong():
        raise InvalidRequestError("wrong", field="noise")

    ranks, _ = lockstep()
    with pytest.raises(InvalidRequestError):
        ranks.run(wrong)
    ranks.check()
    assert ranks.run(lambda: 3) == 3


def test_a_request_that_comes_while_all_ranks_sleep_is_refused_by_each():
    ranks, _ = lockstep()
    ranks.note(EngineAsleepError("asleep"))
    ranks.check()


class Unprepared(MediaRequest):
    """Breaks before its step."""

    def turn(self):
        raise RuntimeError("no memory")


class Unaccounted(MediaRequest):
    """Breaks behind its step."""

    def take(self, outputs):
        raise RuntimeError("no memory")


@pytest.mark.parametrize("make", [Unprepared, Unaccounted])
def test_a_request_that_breaks_around_a_step_ends_the_replica(folders, make):
    model = model_of(folders["silu"])
    alone, inputs = Drive(model), Loop("loop_policy").inputs()
    alone.start("row", inputs, make)
    alone.finish()
    assert str(alone.ended["row"].error) == "no memory"
    ranks, _ = lockstep(0)
    drive = Drive(replace(model, lockstep=ranks))
    drive.start("row", inputs, make)
    with pytest.raises(PhalanxDistError, match="leaves the others waiting for it: no memory"):
        drive.finish()


def test_nobody_is_computed_beside_a_request_that_broke(folders):
    """The other ranks compute both, and would exchange more with this one than it has."""
    ranks, collectives = lockstep(0)
    drive = Drive(replace(model_of(folders["silu"]), lockstep=ranks))
    drive.start("broken", Loop("loop_policy").inputs(), Unprepared)
    drive.start("other", Loop("loop_policy").inputs())
    with pytest.raises(PhalanxDistError, match="no memory"):
        drive.finish()
    assert collectives.num_calls == drive.nodes["denoise"].num_forwards == 0


def test_one_rank_alone_goes_on():
    ranks = Lockstep(None)
    with pytest.raises(RuntimeError):
        ranks.run(broken)
    ranks.check()
    ranks.require_same(["a"], [[torch.ones(2)]])


def test_requests_begin_where_their_latents_are_the_same():
    one, two = torch.tensor([1.0, -2.0]), torch.tensor([[0.5]])
    bits = [x.view(torch.int32).sum(dtype=torch.int64).item() for x in (one, two)]
    ranks, collectives = lockstep(sum(bits), bits[1])
    ranks.require_same(["a", "b"], [[one, two], [two]])
    ranks.require_same([], [])
    assert collectives.num_calls == 1  # of both; and none of nothing
    with pytest.raises(PhalanxDistError, match="request 'b' begins with other latents on rank 1"):
        ranks.require_same(["a", "b"], [[one, two], [two + 1e-6]])
