"""The stored loops over several ranks, real processes over gloo: what one rank computes, on all."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from phalanx.models.cosmos3.guidance import Guidance
from phalanx.models.cosmos3.row import MediaRequest
from tests.models.cosmos3.in_each_rank import (
    cancelled_and_pushed_back,
    decoded,
    inputs_of,
    refusal_of_other_arguments,
    refusal_of_other_latents,
    run,
)
from tests.models.cosmos3.loops import LOOPS, TOLERANCE, Loop, errors, largest, model_of
from tests.models.cosmos3.plain import plain_loop
from tests.parallel.rank_pool import RankPool

INTERVAL = {"guidance": Guidance(3.0, (960, 1001))}
UNGUIDED = {"guidance": Guidance(1.0), "negative": None}
LAYERS = 3


@pytest.fixture(scope="module")
def pools():
    """Ranks by their number, started when they are asked for."""
    made: dict[int, RankPool] = {}

    def pool(size: int) -> RankPool:
        if size not in made:
            made[size] = RankPool(size)
        return made[size]

    yield pool
    for one in made.values():
        one.close()


def in_all(pools, directory, tp, cfg, asked):
    """What the ranks computed, which is the same to the bit."""
    ran = pools(tp * cfg).run(run, directory, tp, cfg, asked)
    for other in ran[1:]:
        for ours, theirs in zip(ran[0].latents, other.latents, strict=True):
            assert ours.keys() == theirs.keys()
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    return ran


def errors_of(name, trace):
    loop = Loop(name)
    row = MediaRequest(loop.inputs())
    row.trace = trace
    return max(errors(loop, row).values())


def group_of(rank, tp, cfg, kind):
    """The members of a rank's group, as the counts name it."""
    scope, local = divmod(rank, tp)
    members = {
        "tp": range(scope * tp, (scope + 1) * tp),
        "cfg": range(local, tp * cfg, tp),
        "world": range(tp * cfg),
    }[kind]
    return "-".join(map(str, members))


def check_counts(ran, tp, cfg, num_steps):
    """Two reductions a layer and forward; one exchange a step between branches; one before the first.

    `spec/cosmos3.md` counts 6 for each forward of 3 layers: 60 with both branches on one rank, and
    30 with one. Here both branches of a rank are one forward, and the last layer of text, which
    ends with its keys and values, has none.
    """
    expected = 2 * (LAYERS - 1) + num_steps * 2 * LAYERS
    if num_steps == 4:
        assert expected == 30 - 2
    for rank, one in enumerate(ran):
        counts: dict[str, int] = {}
        if tp > 1:
            counts[f"{group_of(rank, tp, cfg, 'tp')}.all_reduce"] = expected
        gathers = [("world", 1)] + ([("cfg", num_steps)] if cfg > 1 else [])
        for kind, count in gathers:
            name = f"{group_of(rank, tp, cfg, kind)}.all_gather"
            counts[name] = counts.get(name, 0) + count
        assert one.counts == counts


@pytest.mark.parametrize(("tp", "cfg"), [(2, 1), (1, 2)])
def test_r19_r91_two_ranks_compute_what_diffusers_did(pools, folders, tp, cfg):
    ran = in_all(pools, folders["silu"], tp, cfg, [("loop_policy", {})])
    assert errors_of("loop_policy", ran[0].traces[0]) < TOLERANCE
    check_counts(ran, tp, cfg, 4)


@pytest.mark.long
@pytest.mark.parametrize(("tp", "cfg"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", LOOPS)
def test_r19_r91_e2_every_stored_loop_over_ranks(pools, folders, name, tp, cfg):
    ran = in_all(pools, folders["silu"], tp, cfg, [(name, {})])
    assert errors_of(name, ran[0].traces[0]) < TOLERANCE
    if name != "loop_forward_dynamics":
        check_counts(ran, tp, cfg, Loop(name).num_steps)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_interval_over_the_ranks_of_guidance(pools, folders, tp):
    """Outside it, the second branch's ranks compute nothing, and come to the same."""
    ran = in_all(pools, folders["silu"], tp, 2, [("loop_policy", INTERVAL)])
    tokens = Loop("loop_policy").inputs().shape.num_tokens
    assert [one.num_tokens // tokens for one in ran] == [4] * tp + [1] * tp
    expected = _plain(folders["silu"], "loop_policy", INTERVAL)
    for name, part in ran[0].latents[0].items():
        assert largest(part - expected[name]) < TOLERANCE
    assert [
        one.counts.get(f"{group_of(at, tp, 2, 'cfg')}.all_gather", 0) for at, one in enumerate(ran)
    ] == [4 + (tp == 1)] * 2 * tp


def test_without_guidance_the_second_branch_computes_nothing(pools, folders):
    ran = in_all(pools, folders["silu"], 1, 2, [("loop_forward_dynamics", {})])
    assert errors_of("loop_forward_dynamics", ran[0].traces[0]) < TOLERANCE
    assert [one.num_read for one in ran] == [9, 0]
    assert ran[1].num_tokens == 0


@pytest.mark.parametrize(("tp", "cfg"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.long)])
def test_requests_of_all_kinds_share_steps_over_ranks(pools, folders, tp, cfg):
    asked = [(name, {}) for name in LOOPS[:4]]
    asked += [("loop_policy", INTERVAL), ("loop_policy", UNGUIDED)]
    ran = in_all(pools, folders["silu"], tp, cfg, asked)
    for (name, changes), trace, latents in zip(asked, ran[0].traces, ran[0].latents, strict=True):
        if not changes:
            assert errors_of(name, trace) < TOLERANCE
            continue
        expected = _plain(folders["silu"], name, changes)
        for modality, part in latents.items():
            assert largest(part - expected[modality]) < TOLERANCE


def test_the_rank_that_answers_decodes_alone_and_tiles_are_shared(pools, folders):
    alone = pools(2).run(partial(decoded, tiled=False), folders["silu"], 1, 2)
    assert [pixels is not None for pixels in alone] == [True, False]
    shared = pools(2).run(partial(decoded, tiled=True), folders["silu"], 1, 2)
    for pixels in (alone[0], *shared):
        assert largest(pixels - Loop("loop_t2v").io["out.video"].transpose(0, 1)) < TOLERANCE


@pytest.mark.parametrize(("tp", "cfg"), [(1, 2), pytest.param(2, 2, marks=pytest.mark.long)])
def test_ranks_take_the_same_steps_whatever_each_finds_in_its_cache(pools, folders, tp, cfg):
    ran = pools(tp * cfg).run(cancelled_and_pushed_back, folders["silu"], tp, cfg)
    for other in ran[1:]:
        assert other.events == ran[0].events
        for ours, theirs in zip(ran[0].latents, other.latents, strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    long = {"prompt": tuple(range(40))}
    expected = _plain(folders["silu"], "loop_policy", long)
    for modality, part in ran[0].latents[0].items():
        assert largest(part - expected[modality]) < TOLERANCE


@pytest.mark.parametrize(
    ("tp", "cfg"), [(2, 1), (1, 2), pytest.param(2, 2, marks=pytest.mark.long)]
)
def test_ranks_that_begin_otherwise_refuse_together(pools, folders, tp, cfg):
    said = pools(tp * cfg).run(refusal_of_other_latents, folders["silu"], tp, cfg)
    last = tp * cfg - 1
    for one in said:
        assert one.startswith("request 'row' begins")
        assert f"'row' begins with other latents on rank {last} than on rank 0" in one
        assert "Restart the replica" in one


@pytest.mark.parametrize(("tp", "cfg"), [(2, 1), (1, 2)])
def test_ranks_that_are_given_other_arguments_are_refused(pools, folders, tp, cfg):
    said = pools(tp * cfg).run(refusal_of_other_arguments, folders["silu"], tp, cfg)
    assert all("max_batch_size=" in one and "differs from rank" in one for one in said)


def _plain(directory, name, changes):
    return plain_loop(model_of(directory).transformer, inputs_of(changes, name))
