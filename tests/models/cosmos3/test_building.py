"""What is built for a service, and what is refused before any request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx.errors import CheckpointError, ConfigurationError
from phalanx.layers.unipc import FlowSchedule
from phalanx.models.cosmos3.building import PAGE_SIZE, LoadedCosmos3, read_scheduler, specs_of
from phalanx.models.cosmos3.guidance import BranchRanks, Guidance
from phalanx.parallel.mesh import Group
from phalanx.schema.control import Continue, Flush, LoadWeights, Pause, PauseMode
from phalanx.step.resources.kv_cache import KVSpec
from tests.models.cosmos3.loops import Drive, Loop, args_of, model_of, same
from tests.models.cosmos3.stored import checkpoint, tensors

POLICY = Loop("loop_policy")


@pytest.fixture(scope="module")
def model(folders):
    return model_of(folders["silu"])


def on_the_ranks_of_guidance(model: LoadedCosmos3) -> LoadedCosmos3:
    group = Group("cfg", (0, 1), 0, torch.device("cpu"), None)
    return replace(model, branches=BranchRanks(group))


def num_pages(model: LoadedCosmos3, **options) -> int:
    specs = specs_of(model, args_of("unused", **options))
    return next(one.config.num_pages for one in specs if isinstance(one, KVSpec))


def test_one_rank_has_the_pages_that_it_is_given(model):
    given = {"max_text_tokens": 40, "max_batch_size": 2}
    assert num_pages(model, **given) == 3 * 2 * 40 / PAGE_SIZE
    assert num_pages(model, **given, pool_tokens=800) == 50
    # Fewer than all running texts may need, but those of one request.
    assert num_pages(model, **given, pool_tokens=80) == 6


def test_ranks_of_guidance_have_room_for_all_that_can_run(model):
    ranks = on_the_ranks_of_guidance(model)
    given = {"max_text_tokens": 40, "max_batch_size": 2}
    texts = 2 * 3
    assert num_pages(ranks, **given, pool_tokens=160) == texts
    assert num_pages(ranks, **given, pool_tokens=160 + 2 * 32) == texts + 2
    with pytest.raises(
        ConfigurationError, match=r"pool_tokens=159 with cfg_size=2: .*at least 160"
    ):
        num_pages(ranks, **given, pool_tokens=159)


def test_a_small_pool_has_requests_wait_for_each_other(model):
    """Of two that need 5 pages each and have 6: one after the other, and both right."""
    long = tuple(range(40))
    inputs = POLICY.inputs(prompt=long, negative=long[8:])
    drive = Drive(model, max_text_tokens=40, pool_tokens=80, max_batch_size=2)
    rows = drive.run(inputs, replace(inputs, prompt=long[::-1], negative=long[1::-1]))
    assert drive.batches == [1] * 10
    for row in rows:
        (alone,) = Drive(model).run(row.inputs)
        same(row, alone)


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ({"solver_order": 3}, "scheduler_config.json cannot be used: .*solver_order=3"),
        ("not json", "scheduler_config.json is not a JSON object"),
        (None, "scheduler_config.json does not exist"),
    ],
)
def test_a_scheduler_that_cannot_be_used_is_refused(tmp_path, stored, named):
    path = checkpoint(tmp_path) / "scheduler" / "scheduler_config.json"
    if stored is None:
        path.unlink()
    else:
        path.write_text(stored if isinstance(stored, str) else json.dumps(stored))
    with pytest.raises(CheckpointError, match=named):
        model_of(tmp_path)


def test_a_pipeline_of_the_edge_family_begins_below_the_highest_level(tmp_path):
    """What `model_index.json` asks for, unless the scheduler's own file asks for Karras' levels."""
    folder = checkpoint(tmp_path)
    index = folder / "model_index.json"
    index.write_text(json.dumps({"use_native_flow_schedule": True}))
    scheduler = folder / "scheduler" / "scheduler_config.json"
    stored = json.loads(scheduler.read_text())
    assert torch.equal(sigmas_of(folder), tensors("schedules")["karras.4.sigmas"])
    scheduler.write_text(json.dumps({**stored, "use_karras_sigmas": False, "flow_shift": 5.0}))
    assert torch.equal(sigmas_of(folder), tensors("schedules")["native5.4.sigmas"])
    index.unlink()
    assert torch.equal(sigmas_of(folder), tensors("schedules")["shift5.4.sigmas"])


def sigmas_of(folder: Path) -> Tensor:
    return FlowSchedule.of(read_scheduler(folder), 4).sigmas


def test_operations_hold_everything_and_let_it_go_on(model):
    drive = Drive(model)
    row = drive.start("row", POLICY.inputs())
    service = drive.service
    drive.tick()
    assert service.control(Pause(PauseMode.IN_PLACE)) and not service.control(Flush())
    assert not service.busy and service.statistics().paused
    assert service.control(Continue())
    drive.tick()
    statistics = service.statistics()
    assert (statistics.num_running, statistics.num_prompt_tokens) == (1, 14)
    assert statistics.pool_used_tokens == 2 * PAGE_SIZE
    assert service.control(Pause(PauseMode.ABORT)) and service.control(Continue())
    drive.finish()
    assert drive.ended["row"].cancelled and row.trace == []
    assert service.control(Flush())
    with pytest.raises(NotImplementedError, match="does not do LoadWeights; load another"):
        service.control(LoadWeights("anywhere"))


@pytest.mark.parametrize("ranks", [False, True])
def test_ranks_with_nothing_to_do_are_warned_of_once(model, caplog, ranks):
    """Only where there are such ranks."""
    drive = Drive(on_the_ranks_of_guidance(model) if ranks else model)
    for rid in ("a", "b"):
        drive.start(rid, POLICY.inputs(guidance=Guidance(1.0), negative=None))
    assert [record.getMessage()[:11] for record in caplog.records] == ["request 'a'"] * ranks
    drive.service.close()
