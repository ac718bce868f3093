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
PROMPT_TOKENS = 48
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
class Figures:
    """What one way gave: tokens by row, and microseconds a decode step, by number of rows."""

    tokens: dict[int, list[tuple[int, ...]]]
    step_us: dict[int, float]


def measured(way: Way, device: str, dtype: str, model: str, new_tokens: int) -> Figures:
    """Run every number of rows twice, and time the second."""
    plugin_args = CausalLMArgs(
        checkpoint_dir=model,
        context_length=512,
        max_batch_size=max(ROWS),
        prefix_cache=False,
        speculate=way.speculate,
    )
    config = EngineConfig(
        DeviceConfig(device, dtype), RuntimeConfig(use_cuda_graph=way.use_cuda_graph)
    )
    tokens: dict[int, list[tuple[int, ...]]] = {}
    step_us: dict[int, float] = {}
    with Engine(EngineArgs("causal_lm", plugin_args, config)) as engine:
        for rows in ROWS:
            run(engine, rows, new_tokens)
            prefill_s, _ = run(engine, rows, 1)
            whole_s, tokens[rows] = run(engine, rows, new_tokens)
            step_us[rows] = (whole_s - prefill_s) / (new_tokens - 1) * 1e6
    return Figures(tokens, step_us)


def run(engine: Engine, rows: int, new_tokens: int) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds until all rows have their tokens, and those."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
    requests = [
        GenerateRequest(
            input_ids=tuple(range(100 + row, 100 + row + PROMPT_TOKENS)),
            sampling=sampling,
            detokenize=False,
        )
        for row in range(rows)
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
    for rows in ROWS:
        table.add_column(f"{rows} rows [us]", justify="right")
    all_equal = True
    for way, found in figures.items():
        equal = found.tokens == reference.tokens
        all_equal = all_equal and equal
        times = [
            f"{found.step_us[rows]:.0f} ({reference.step_us[rows] / found.step_us[rows]:.2f})"
            for rows in ROWS
        ]
        table.add_row(way.name, "yes" if equal else "NO", *times)
    console.print(table)
    console.print("in brackets: how many times as fast as eager")
    return 0 if all_equal else 1


if __name__ == "__main__":
    sys.exit(main())
