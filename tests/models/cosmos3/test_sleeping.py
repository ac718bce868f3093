"""A Cosmos3 that gives its memory back by tags and takes it again: what it does in between."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from phalanx import Engine, EngineArgs
from phalanx.device_ledger import DeviceLedger
from phalanx.engine_config import DeviceConfig, EngineConfig, RuntimeConfig
from phalanx.errors import EngineAsleepError, RequestFailedError
from phalanx.layers.shells import parameter_bytes
from phalanx.models.cosmos3.args import Cosmos3Args
from phalanx.models.cosmos3.building import LoadedCosmos3
from phalanx.schema.control import ALL_TAGS, Continue, MemoryTag, Pause, PauseMode, Sleep, Wake
from phalanx.schema.events import Failed, Final
from phalanx.testing.tiny_cosmos3 import Cosmos3Sizes, write_tiny_cosmos3
from tests.models.cosmos3.loops import Drive, Loop, model_of, same
from tests.models.cosmos3.requests import video_request
from tests.models.cosmos3.stored import checkpoint

POLICY = Loop("loop_policy")
KV = frozenset({MemoryTag.KV_CACHE})
WEIGHTS = frozenset({MemoryTag.WEIGHTS})
MIB = 2**20
EXACT = 0.0


@pytest.fixture
def model(tmp_path):
    return model_of(checkpoint(tmp_path))


def pixels(model: LoadedCosmos3) -> torch.Tensor:
    """What the autoencoder makes of something, encoded again."""
    clip = torch.linspace(-1, 1, 3 * 5 * 32 * 32).view(3, 5, 32, 32)
    return model.vae.decode(model.vae.encode(clip))


def held(model: LoadedCosmos3) -> int:
    return parameter_bytes(model.transformer) + parameter_bytes(model.vae)


def refused(drive: Drive) -> str:
    drive.start("refused", POLICY.inputs())
    drive.tick()
    end = drive.ended.pop("refused")
    assert isinstance(end, Failed) and isinstance(end.error, EngineAsleepError)
    assert not drive.service.busy
    return str(end.error)


@pytest.mark.parametrize("operators", ["off", "auto"])
def test_weights_come_back_from_where_they_were_loaded(tmp_path, operators):
    model = model_of(checkpoint(tmp_path), native_operators=operators)
    drive, before = Drive(model), held(model)
    (row,), seen = drive.run(POLICY.inputs()), pixels(model)
    for _ in range(2):
        assert drive.service.control(Sleep())
        assert held(model) == 0
        assert drive.service._engine.resource("kv").num_bytes == 0
        assert drive.service.control(Wake())
        assert held(model) == before
        (again,) = drive.run(POLICY.inputs())
        same(again, row, EXACT)
        assert torch.equal(pixels(model), seen)


def test_tags_go_and_come_in_any_order_and_twice_is_once(model):
    drive, asleep = Drive(model), frozenset()
    for tags in (WEIGHTS, WEIGHTS, KV, ALL_TAGS, ALL_TAGS):
        assert drive.service.control(Sleep(tags))
        asleep |= tags
        assert drive.service.statistics().asleep == asleep
        assert ", ".join(sorted(asleep)) in refused(drive)
    for tags in (KV, KV, ALL_TAGS, ALL_TAGS):
        assert drive.service.control(Wake(tags))
        asleep -= tags
        assert drive.service.statistics().asleep == asleep
    drive.deltas.clear()
    drive.run(POLICY.inputs())


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_it_sleeps_only_when_nothing_runs_or_all_is_paused(model, mode):
    (alone,) = Drive(model).run(POLICY.inputs())
    drive = Drive(model)
    row = drive.start("row", POLICY.inputs())
    for _ in range(3):
        drive.tick()
    assert drive.service.control(Sleep()) is False
    assert drive.service.control(Pause(mode))
    assert drive.service.control(Sleep())
    assert drive.service.control(Continue())
    assert not drive.service.busy
    assert drive.service.control(Wake())
    drive.finish()
    assert isinstance(drive.ended["row"], Final)
    same(row, alone, EXACT)


@pytest.mark.parametrize("folder", ["transformer", "vae"])
def test_other_weights_than_those_that_were_loaded_do_not_come_back(tmp_path, folder):
    """Nor half of them: what was asleep sleeps on, and wakes when the old files are there again."""
    model = model_of(checkpoint(tmp_path / "it"))
    drive = Drive(model)
    assert drive.service.control(Sleep())
    file = tmp_path / "it" / folder / "diffusion_pytorch_model.safetensors"
    shutil.move(file, tmp_path / "kept")
    file.write_bytes((tmp_path / "kept").read_bytes())
    with pytest.raises(RequestFailedError, match="not those any more that were loaded"):
        drive.service.control(Wake())
    assert drive.service.statistics().asleep == ALL_TAGS and held(model) == 0
    shutil.move(tmp_path / "kept", file)
    assert drive.service.control(Wake())
    drive.run(POLICY.inputs())


def test_its_device_is_told_what_it_holds(tmp_path, monkeypatch):
    devices = DeviceLedger.create(tmp_path / "devices", 1, 64 * MIB)
    monkeypatch.setenv("PHALANX_SIMULATED_DEVICES", f"{devices.path}:0@policy")
    drive = Drive(model_of(checkpoint(tmp_path / "it")))
    found = {one.tag: one.num_bytes for one in devices.held()}
    assert found["kv_cache"] == drive.service._engine.resource("kv").num_bytes
    assert found["weights"] > MIB / 2
    assert drive.service.control(Sleep()) and devices.held() == ()
    assert drive.service.control(Wake())
    assert {one.tag: one.num_bytes for one in devices.held() if one.num_bytes} == found
    drive.service.close()
    assert devices.held() == ()


@pytest.mark.long
def test_memory_falls_by_the_weights_and_comes_back(tmp_path):
    sizes = Cosmos3Sizes(vocab_size=64 * 1024, hidden_size=256)
    directory = write_tiny_cosmos3(Path(tmp_path) / "it", sizes)
    args = Cosmos3Args(directory)
    config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
    with Engine(EngineArgs("cosmos3", args, config)) as engine:
        num_bytes = engine.entry._service._memory._weights.num_bytes
        assert num_bytes > 60 * MIB
        asked = video_request()
        before, resident = engine.step(asked), engine.memory.rss_bytes
        assert engine.control(Sleep())
        assert resident - engine.memory.rss_bytes > 0.9 * num_bytes
        with pytest.raises(EngineAsleepError):
            engine.submit(asked)
        assert engine.control(Wake())
        assert torch.equal(engine.step(asked).video, before.video)
        assert engine.memory.rss_bytes < resident + 0.2 * num_bytes
