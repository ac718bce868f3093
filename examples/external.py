"""One model over the processes that a launcher made; only the output rank prints.

    torchrun --nproc-per-node 2 examples/external.py
    torchrun --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --nproc-per-node 1 examples/external.py

Every process makes the same calls in the same order, because all of them take part in each step.
"""

from __future__ import annotations

import argparse

from phalanx import (
    AttentionParallelConfig,
    DenseParallelConfig,
    DeploymentConfig,
    DeviceConfig,
    Engine,
    EngineArgs,
    EngineConfig,
    GenerateRequest,
    ParallelConfig,
    RuntimeConfig,
    SamplingParams,
)
from phalanx.checkpoints import checkpoint_dir
from phalanx.models.causal_lm.args import CausalLMArgs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="a directory or a known name")
    parser.add_argument("--tp", type=int, default=2, help="ranks, as many as processes")
    parser.add_argument("--prompt", default="The capital of France is")
    flags = parser.parse_args()
    parallel = ParallelConfig(
        dense=DenseParallelConfig(tp_size=flags.tp),
        attention=AttentionParallelConfig(tp_size=flags.tp),
    )
    config = EngineConfig(
        device=DeviceConfig("cpu", "float32"),
        runtime=RuntimeConfig(num_threads=1),
        parallel=parallel,
    )
    args = EngineArgs(
        "causal_lm", CausalLMArgs(checkpoint_dir=str(checkpoint_dir(flags.model))), config
    )
    request = GenerateRequest(
        prompt=flags.prompt, sampling=SamplingParams(temperature=0.0, max_new_tokens=16)
    )
    with Engine(args, deployment=DeploymentConfig.external()) as engine:
        output = engine.step(request)
        if output is not None:
            print(flags.prompt + output.completions[0].text)


if __name__ == "__main__":
    main()
