"""What one engine leaves alone: other engines, the process, the network, the caller's thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import dataclass

import pytest
import torch

from phalanx import (
    DeviceConfig,
    Engine,
    EngineArgs,
    EngineConfig,
    Entry,
    EntryArgs,
    RuntimeConfig,
    get_engine_config,
    init_engine_config,
    set_engine_config,
)
from phalanx.engine_config import use_engine_config
from phalanx.errors import ConfigurationError
from phalanx.testing import Counting, CountRequest

from .conftest import cpu_config


@dataclass(frozen=True)
class Seen:
    seed: int | None
    threads: int
    grad: bool


def look():
    return Seen(get_engine_config().runtime.seed, torch.get_num_threads(), torch.is_grad_enabled())


@Engine.register
class Looking(Entry):
    """Answers with what surrounds its calls."""

    name = "looking"
    args_cls = EntryArgs
    request_cls = str
    output_cls = Seen

    @staticmethod
    def validate(request, limits):
        get_engine_config()

    def setup(self, args):
        self.at_setup = look()
        self.at_close = None

    def step(self, request):
        return look()

    def close(self):
        self.at_close = look()


@Engine.register
class LookingLoop(Counting):
    """Notes what surrounds its calls."""

    name = "looking_loop"

    def setup(self, args):
        super().setup(args)
        self.seen = [look()]

    def tick(self):
        self.seen.append(look())
        return super().tick()

    def close(self):
        self.seen.append(look())


def plain(**runtime):
    return Engine(EngineArgs("looking", EntryArgs(), cpu_config(**runtime)))


def test_two_plain_engines_see_their_own_configuration_only():
    before = torch.get_num_threads()
    with plain(seed=1, num_threads=before + 1) as one, plain(seed=2) as two:
        mine, other = Seen(1, before + 1, False), Seen(2, before, False)
        assert one.entry.at_setup == one.step("x") == one.submit("x").result() == mine
        assert two.entry.at_setup == two.step("x") == other
        assert one.step("x") == mine
    assert (one.entry.at_close, two.entry.at_close) == (mine, other)
    assert torch.get_num_threads() == before
    assert torch.is_grad_enabled()
    with pytest.raises(ConfigurationError, match="no engine configuration is current here"):
        get_engine_config()


def test_two_batching_engines_see_their_own_configuration_only(build):
    before = torch.get_num_threads()
    one = build("looking_loop", seed=1, num_threads=before + 1)
    two = build("looking_loop", seed=2)
    for engine in (one, two, one):
        engine.step(CountRequest(count=1))
    one.close()
    two.close()
    assert set(one.entry.seen) == {Seen(1, before + 1, False)}
    assert {(seen.seed, seen.grad) for seen in two.entry.seen} == {(2, False)}
    assert torch.get_num_threads() == before


def test_seed_is_applied_before_setup():
    draws = []

    class Drawing(Looking):
        name = "drawing"

        def setup(self, args):
            draws.append(torch.rand(()).item())

        def close(self):
            pass

    Engine.register(Drawing)
    for seed in (7, 7, 8):
        Engine(EngineArgs("drawing", EntryArgs(), cpu_config(seed=seed))).close()
    assert draws[0] == draws[1] != draws[2]


def run_python(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


SERVE = """
from phalanx import DeviceConfig, Engine, EngineArgs, EngineConfig
from phalanx.testing import Counting, CountingArgs, CountRequest
class Loud(Counting):
    def close(self):
        print("closed")
Engine.register(Loud)
config = EngineConfig(device=DeviceConfig("cpu", "float32"))
engine = Engine(EngineArgs("counting", CountingArgs(), config))
assert engine.step(CountRequest(count=2)).numbers == (0, 1)
"""


def test_the_engine_is_imported_without_torch():
    program = "import sys, phalanx.engine.engine, phalanx.testing; print('torch' in sys.modules)"
    assert run_python(program).strip() == "False"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_r8_inline_starts_no_process_and_opens_no_port_and_may_be_forgotten():
    program = SERVE + (
        "import os, pathlib\n"
        "task = pathlib.Path('/proc/self/task')\n"
        "children = [(t / 'children').read_text() for t in task.iterdir()]\n"
        "links = [os.readlink(f) for f in pathlib.Path('/proc/self/fd').iterdir() if f.is_symlink()"
        " and f.exists()]\n"
        "print(''.join(children).split(), [link for link in links if link.startswith('socket')])\n"
        "future = engine.submit(CountRequest(count=1000))\n"
    )
    assert run_python(program).splitlines() == ["[] []", "closed"]


def test_a_process_may_set_a_configuration_of_its_own():
    config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(seed=5))
    try:
        set_engine_config(config)
        assert get_engine_config() is init_engine_config() is config
        seen = []
        thread = threading.Thread(target=lambda: seen.append(get_engine_config()))
        thread.start()
        thread.join()
        assert seen == [config]
        with use_engine_config(config.replace(runtime=RuntimeConfig(seed=6))):
            assert get_engine_config().runtime.seed == 6
        set_engine_config(None)
        assert init_engine_config(config) is config
        with pytest.raises(TypeError, match="EngineConfig or None"):
            set_engine_config(5)
    finally:
        set_engine_config(None)
