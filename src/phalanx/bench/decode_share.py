"""How much of a language model's decode step is not its forward."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from phalanx.engine.engine import Engine
from phalanx.engine.registry import plugin_class
from phalanx.engine_config import DeviceConfig, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.schema.generate import GenerateRequest
from phalanx.schema.plugin_args import build_plugin_args
from phalanx.schema.sampling import SamplingParams

PLUGIN = "causal_lm"
PROMPT = tuple(range(100, 164))
NEW_TOKENS = 64


def decode_shares(model: Path, repeats: int) -> Iterator[float]:
    """One value a round: 1 row of bf16 decoding, on one thread."""
    plugin_args = build_plugin_args(
        plugin_class(PLUGIN).args_cls,
        {"checkpoint_dir": str(model), "context_length": 512, "prefix_cache": False},
        "benchmark",
    )
    config = EngineConfig(
        DeviceConfig("cpu", "bfloat16"), RuntimeConfig(num_threads=1, step_timings=True)
    )
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    request = GenerateRequest(input_ids=PROMPT, sampling=sampling, detokenize=False)
    with Engine(EngineArgs(PLUGIN, plugin_args, config)) as engine:
        engine.step(request)
        for _ in range(repeats):
            before = _stages(engine)
            engine.step(request)
            taken = {name: value - before[name] for name, value in _stages(engine).items()}
            yield 1 - taken["step.forward"] / sum(taken.values())


def _stages(engine: Engine) -> dict[str, float]:
    loop = engine.statistics().loop
    assert loop is not None
    return loop.stage_s
