"""Checks the step engine on a CUDA device: outputs first, then the time of a decode step.

A language model answers eagerly, with captured steps, and with captured steps that are planned ahead;
all three must give the same greedy tokens. `--device cpu` tries the check itself, without captures.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from phalanx import Engine, EngineArgs, EngineConfig, GenerateRequest, SamplingParams
from phalanx.checkpoints import checkpoint_dir
from phalanx.engine_config import DeviceConfig, RuntimeConfig
from phalanx.models.causal_lm import CausalLMArgs

ROWS = (1, 8, 32)
PROMPT_TOKENS = (48, 1500)
"""Short ones, and ones that attention looks at more than the smallest captured context for."""
NO_DEVICE = 3
"""Exit status where there is no such device."""


@dataclass(frozen=True)
class Way:
    """How the model computes."""

    name: str
    use_cuda_graph: bool
    speculate: bool


WAYS = (
    Way("eager", use_cuda_graph=False, speculate=False),
    Way("captured", use_cuda_graph=True, speculate=False),
    Way("captured, planned ahead", use_cuda_graph=True, speculate=True),
)


@dataclass(frozen=True)
class Case:
    """How many requests of which length compute together."""

    prompt_tokens: int
    rows: int


CASES = tuple(Case(prompt_tokens, rows) for prompt_tokens in PROMPT_TOKENS for rows in ROWS)


@dataclass(frozen=True)
class Figures:
    """What one way gave: tokens by row, and microseconds a decode step, by case."""

    tokens: dict[Case, list[tuple[int, ...]]]
    step_us: dict[Case, float]


def measured(way: Way, device: str, dtype: str, model: str, new_tokens: int) -> Figures:
    """Run every case twice, and time the second."""
    plugin_args = CausalLMArgs(
        checkpoint_dir=model,
        context_length=2 * max(PROMPT_TOKENS),
        pool_tokens=2 * max(ROWS) * max(PROMPT_TOKENS),
        max_batch_size=max(ROWS),
        prefix_cache=False,
        speculate=way.speculate,
    )
    config = EngineConfig(
        DeviceConfig(device, dtype), RuntimeConfig(use_cuda_graph=way.use_cuda_graph)
    )
    tokens: dict[Case, list[tuple[int, ...]]] = {}
    step_us: dict[Case, float] = {}
    with Engine(EngineArgs("causal_lm", plugin_args, config)) as engine:
        for case in CASES:
            run(engine, case, new_tokens)
            prefill_s, _ = run(engine, case, 1)
            whole_s, tokens[case] = run(engine, case, new_tokens)
            step_us[case] = (whole_s - prefill_s) / (new_tokens - 1) * 1e6
    return Figures(tokens, step_us)


def run(engine: Engine, case: Case, new_tokens: int) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds until all rows have their tokens, and those."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    requests = [
        GenerateRequest(
            input_ids=tuple(range(100 + row, 100 + row + case.prompt_tokens)),
            sampling=sampling,
            detokenize=False,
        )
        for row in range(case.rows)
    ]
    began_s = time.perf_counter()
    outputs = [future.result() for future in [engine.submit(request) for request in requests]]
    seconds = time.perf_counter() - began_s
    return seconds, [output.completions[0].token_ids for output in outputs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda[:N], or cpu to try the check itself")
    parser.add_argument("--dtype", default="float32", help="float32 (equal tokens) or bfloat16")
    parser.add_argument("--model", default="smollm2-135m", help="a directory or a known name")
    parser.add_argument("--new-tokens", type=int, default=64)
    chosen = parser.parse_args()
    console = Console()
    if chosen.device.startswith("cuda") and not torch.cuda.is_available():
        console.print("no CUDA device is visible to torch: nothing was checked")
        return NO_DEVICE
    model = str(checkpoint_dir(chosen.model))
    figures = {
        way: measured(way, chosen.device, chosen.dtype, model, chosen.new_tokens) for way in WAYS
    }
    reference = figures[WAYS[0]]
    table = Table(title=f"decode steps of {chosen.model}, {chosen.device}, {chosen.dtype}")
    table.add_column("")
    table.add_column("tokens as eager")
    for case in CASES:
        table.add_column(f"{case.rows} x {case.prompt_tokens} tokens [us]", justify="right")
    all_equal = True
    for way, found in figures.items():
        equal = found.tokens == reference.tokens
        all_equal = all_equal and equal
        times = [
            f"{found.step_us[case]:.0f} ({reference.step_us[case] / found.step_us[case]:.2f})"
            for case in CASES
        ]
        table.add_row(way.name, "yes" if equal else "NO", *times)
    console.print(table)
    console.print("in brackets: how many times as fast as eager")
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
