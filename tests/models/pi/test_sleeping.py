"""A policy that gives its memory back by tags and takes it again: what it does in between."""

from __future__ import annotations

import gc
import weakref
from dataclasses import asdict, replace

import pytest
import torch

from phalanx import Engine, EngineArgs
from phalanx.bench.policy_geometry import Geometry, policy_checkpoint
from phalanx.device_ledger import DeviceLedger, SimulatedDevice
from phalanx.engine_config import DeviceConfig, EngineConfig, RuntimeConfig, use_engine_config
from phalanx.errors import (
    DeviceMemoryError,
    EngineAsleepError,
    InvalidRequestError,
    RequestFailedError,
)
from phalanx.layers.shells import parameter_bytes
from phalanx.models.pi0.main_pi0 import PI0Args, PI0Config, PI0Entry
from phalanx.models.pi05.main_pi05 import (
    PI05Args,
    PI05Config,
    PI05Entry,
    PI05Request,
    PI05RolloutRequest,
)
from phalanx.schema.control import (
    ALL_TAGS,
    Continue,
    MemoryTag,
    Pause,
    PauseMode,
    ReplaceWeights,
    Sleep,
    Wake,
)
from phalanx.schema.events import Failed, Final
from tests.models.pi.stored import FLOAT32, HEADS, checkpoint, observation, request

NAME = {"pi05": "pi05_micro_f32", "pi0": "pi0_tiny_f32"}
KV = frozenset({MemoryTag.KV_CACHE})
WEIGHTS = frozenset({MemoryTag.WEIGHTS})
MIB = 2**20
HEAVY = Geometry(
    vision_width=48,
    vision_inner_width=64,
    vision_num_layers=1,
    vision_num_heads=3,
    image_size=28,
    text_width=256,
    text_inner_width=32 * 1024,
    expert_width=32,
    expert_inner_width=32,
    num_layers=2,
    head_dim=32,
    vocab_size=32 * 1024,
    chunk_size=4,
    num_steps=2,
)
"""32 MiB of embeddings and 96 MiB of what is packed, in tensors that are mapped one by one: smaller
ones may stay with the allocator's arena of their thread.
"""


class Driven:
    """An entry, and what became of its requests."""

    def __init__(self, policy: str = "pi05", directory=None, **options) -> None:
        directory = checkpoint(NAME[policy]) if directory is None else directory
        options.setdefault("native_operators", "off")
        kinds = {
            "pi05": (PI05Entry(), PI05Args, PI05Config),
            "pi0": (PI0Entry(), PI0Args, PI0Config),
        }
        self.entry, args, config = kinds[policy]
        config = config(vision_num_heads=HEADS, **options.pop("config", {}))
        with use_engine_config(FLOAT32):
            self.entry.setup(args(directory, config=config, max_batch_size=4, **options))
        self.request = request(NAME[policy])
        self.ended: dict[str, Final | Failed] = {}
        self.num_asked = 0

    def start(self, rid: str, asked=None) -> None:
        self.entry.start(rid, self.request if asked is None else asked)

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            events = self.entry.tick()
            self.ended |= {one.rid: one for one in events if isinstance(one, Final | Failed)}

    def actions(self, rid: str) -> torch.Tensor:
        while self.entry.busy:
            self.tick()
        end = self.ended[rid]
        assert isinstance(end, Final), end
        return end.payload

    def act(self, asked=None) -> torch.Tensor:
        self.num_asked += 1
        self.start(f"act {self.num_asked}", asked)
        return self.actions(f"act {self.num_asked}")

    def do(self, op) -> None:
        assert self.entry.control(op)

    def refused(self) -> str:
        self.start("refused")
        self.tick()
        error = self.ended["refused"].error
        assert isinstance(error, EngineAsleepError)
        assert not self.entry.busy
        return str(error)

    @property
    def model(self):
        return self.entry.weights._model

    def weights(self, but: float = 1.0) -> dict[str, torch.Tensor]:
        """What its checkpoint holds, each times `but`."""
        source = self.entry.weights._source.checkpoint
        return {name: tensor * but for name, tensor in source.tensors()}


@pytest.fixture
def driven():
    made = Driven()
    yield made
    made.entry.close()


@pytest.mark.parametrize("policy", ["pi05", "pi0"])
@pytest.mark.parametrize("operators", ["off", "auto"])
def test_weights_come_back_from_where_they_were_loaded(policy, operators):
    driven = Driven(policy, native_operators=operators)
    before, held = driven.act(), parameter_bytes(driven.model)
    for _ in range(2):
        driven.do(Sleep())
        assert parameter_bytes(driven.model) == 0
        driven.do(Wake())
        assert torch.equal(driven.act(), before)
        assert parameter_bytes(driven.model) == held
    driven.entry.close()


@pytest.mark.parametrize("strict", [True, False])
def test_what_a_checkpoint_lacks_is_drawn_again(strict):
    """A value head, and, where any may be missing, whatever is."""
    dropped = None if strict else _without_a_bias
    config = {"add_value_head": True}
    driven = Driven(config=config, weight_strict=strict, weight_remap=dropped)
    rollout = PI05RolloutRequest(
        **observation(NAME["pi05"]), sigmas=torch.zeros(2, 3), compute_values=True
    )
    before, drawn = driven.act(rollout), driven.model.expert.value_head.enter.dense_weight()
    driven.do(Sleep())
    driven.do(Wake())
    after = driven.act(rollout)
    assert torch.equal(after.chains, before.chains)
    assert torch.equal(driven.model.expert.value_head.enter.dense_weight(), drawn)
    driven.entry.close()


def _without_a_bias(name: str) -> str | None:
    return None if name.endswith("action_out_proj.bias") else name


def test_a_policy_without_a_checkpoint_is_drawn_again():
    sizes = asdict(replace(HEAVY, vocab_size=64, text_inner_width=64))
    entry = PI05Entry()
    with use_engine_config(FLOAT32):
        entry.setup(PI05Args(config=PI05Config(**sizes, num_cameras=1)))
    drawn = {name: one.clone() for name, one in entry.weights._model.named_parameters()}
    assert entry.control(Sleep()) and entry.control(Wake())
    again = dict(entry.weights._model.named_parameters())
    assert drawn.keys() == again.keys()
    assert all(torch.equal(one, again[name]) for name, one in drawn.items() if not one.is_meta)
    entry.close()


def test_nothing_of_the_weights_or_the_cache_stays_behind(driven):
    driven.act()
    cache = driven.entry._service._engine.resource("kv")
    held = [weakref.ref(one) for one in driven.model.parameters()]
    held += [weakref.ref(one) for pair in cache._storage._layers for one in pair]
    driven.do(Sleep())
    gc.collect()
    assert [one() for one in held if one() is not None and not one().is_meta] == []
    assert cache.num_bytes == 0 and not driven.model.expert._conditions


def test_tags_go_and_come_in_any_order_and_twice_is_once(driven):
    before, asleep = driven.act(), frozenset()
    for tags in (KV, KV, WEIGHTS, ALL_TAGS, ALL_TAGS):
        driven.do(Sleep(tags))
        asleep |= tags
        assert driven.entry.statistics().asleep == asleep
        assert ", ".join(sorted(asleep)) in driven.refused()
    for tags in (WEIGHTS, WEIGHTS, ALL_TAGS, ALL_TAGS):
        driven.do(Wake(tags))
        asleep -= tags
        assert driven.entry.statistics().asleep == asleep
    assert torch.equal(driven.act(), before)


def test_it_sleeps_only_when_nothing_runs_or_all_is_paused(driven):
    before = driven.act()
    driven.start("r")
    driven.tick(3)
    assert driven.entry.control(Sleep()) is False
    assert torch.equal(driven.actions("r"), before)
    for rid, mode in (("in place", PauseMode.IN_PLACE), ("retract", PauseMode.RETRACT)):
        driven.start(rid)
        driven.tick(3)
        driven.do(Pause(mode))
        driven.do(Sleep())
        driven.do(Continue())
        assert not driven.entry.busy
        driven.do(Wake())
        assert torch.equal(driven.actions(rid), before)


@pytest.mark.parametrize("operators", ["off", "auto"])
def test_updated_weights_do_not_come_back_and_new_ones_are_awaited(operators):
    """The bias of each matrix first, then the rest in two parts."""
    driven = Driven(native_operators=operators)
    old = driven.act()
    changed = driven.weights(but=1.01)
    driven.do(ReplaceWeights(changed))
    new = driven.act()
    assert not torch.equal(new, old)
    driven.do(Sleep())
    with pytest.raises(InvalidRequestError, match="memory for weights was given back"):
        driven.entry.control(ReplaceWeights(changed))
    driven.do(Wake())
    assert driven.entry.statistics().waiting_for_weights
    biases = {name: one for name, one in changed.items() if name.endswith("bias")}
    rest = {name: one for name, one in changed.items() if name not in biases}
    names = list(rest)
    for part in (biases, {name: rest[name] for name in names[::2]}):
        driven.do(ReplaceWeights(part))
        assert "waits for weights" in driven.refused()
    driven.do(ReplaceWeights({name: rest[name] for name in names[1::2]}))
    assert not driven.entry.statistics().waiting_for_weights
    assert torch.equal(driven.act(), new)
    driven.entry.close()


def test_files_that_have_changed_since_do_not_come_back(tmp_path):
    file = tmp_path / "model.safetensors"
    for name in ("config.json", "model.safetensors"):
        stored = checkpoint(NAME["pi05"]) / name
        if stored.is_file():
            (tmp_path / name).write_bytes(stored.read_bytes())
    driven = Driven(directory=tmp_path)
    driven.do(Sleep())
    file.write_bytes(file.read_bytes())
    driven.do(Wake())
    assert driven.entry.statistics().waiting_for_weights
    driven.entry.close()


def test_a_wake_that_fails_leaves_it_asleep(tmp_path, driven):
    before = driven.act()
    weights = driven.entry.weights
    source, weights._source = weights._source, replace(weights._source, checkpoint=None)
    broken = replace(source, checkpoint=_Broken(source.checkpoint.directory))
    driven.do(Sleep())
    weights._source = broken
    with pytest.raises(RequestFailedError, match="sleeps on: the disk is gone"):
        driven.entry.control(Wake())
    assert driven.entry.statistics().asleep == ALL_TAGS
    assert parameter_bytes(driven.model) == 0
    weights._source = source
    driven.do(Wake())
    assert torch.equal(driven.act(), before)


class _Broken:
    def __init__(self, directory) -> None:
        self.directory = directory

    def tensors(self):
        raise RequestFailedError("the disk is gone")


@pytest.fixture
def devices(tmp_path, monkeypatch) -> DeviceLedger:
    ledger = DeviceLedger.create(tmp_path / "devices", 1, 4 * MIB)
    monkeypatch.setenv("PHALANX_SIMULATED_DEVICES", f"{ledger.path}:0@rollout/policy/0")
    return ledger


def holdings(devices: DeviceLedger) -> dict[str, int]:
    return {one.tag: one.num_bytes for one in devices.held() if one.owner == "rollout/policy/0"}


def test_its_device_is_told_what_it_holds(devices):
    driven = Driven()
    held = holdings(devices)
    assert held["weights"] == parameter_bytes(driven.model)
    assert held["kv_cache"] == driven.entry._service._engine.resource("kv").num_bytes
    driven.do(Sleep())
    assert holdings(devices) == {}
    with SimulatedDevice(devices, 0, "trainer").holding("all", 4 * MIB - held["weights"]):
        with pytest.raises(DeviceMemoryError, match="what was asleep sleeps on"):
            driven.entry.control(Wake())
        assert driven.entry.statistics().asleep == ALL_TAGS
        driven.do(Wake(WEIGHTS))
        with pytest.raises(DeviceMemoryError, match="Nothing has changed"):
            driven.entry.control(ReplaceWeights(driven.weights()))
    driven.do(Wake())
    driven.do(ReplaceWeights(driven.weights()))
    assert {tag: size for tag, size in holdings(devices).items() if size} == held
    driven.entry.close()
    assert holdings(devices) == {}


@pytest.mark.long
def test_memory_falls_by_the_weights_and_comes_back(tmp_path):
    directory = policy_checkpoint(HEAVY, tmp_path)
    config = PI05Config(vision_num_heads=HEAVY.vision_num_heads, image_size=28, num_steps=2)
    args = PI05Args(directory, config=config)
    runtime = RuntimeConfig(num_threads=1)
    with Engine(
        EngineArgs("pi05", args, EngineConfig(DeviceConfig("cpu", "float32"), runtime))
    ) as engine:
        model = engine.entry.weights._model
        held = parameter_bytes(model)
        assert held > 128 * MIB
        asked = PI05Request(
            torch.zeros(1, 3, 3, 28, 28),
            torch.ones(1, HEAVY.tokenizer_max_length, dtype=torch.int64),
            torch.tensor([8]),
            torch.zeros(1, 4, 32),
        )
        before, resident = engine.step(asked), engine.memory.rss_bytes
        assert engine.control(Sleep())
        asleep = engine.memory.rss_bytes
        assert resident - asleep > 0.9 * held
        with pytest.raises(EngineAsleepError):
            engine.submit(asked)
        assert engine.control(Wake())
        assert torch.equal(engine.step(asked), before)
        assert engine.memory.rss_bytes < resident + 0.2 * held
