"""One rank of a Cosmos3 that a launcher has made: asks what a stored loop was asked, from pixels to
pixels, and saves what `step` returns here.

    torchrun --nproc-per-node 2 -m tests.models.cosmos3.external_rank CHECKPOINT FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from phalanx import DeploymentConfig, DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.models.cosmos3.args import Cosmos3PolicyArgs
from phalanx.models.cosmos3.entry import Cosmos3Policy
from tests.models.cosmos3.in_each_rank import topology
from tests.models.cosmos3.test_entries import policy_request

OUTPUT_RANK = 1


def main(checkpoint: str, folder: str) -> None:
    Engine.register(Cosmos3Policy)
    args = Cosmos3PolicyArgs(checkpoint, max_tokens=64, decode_video=True)
    config = EngineConfig(
        DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1), topology(1, 2)
    )
    deployment = DeploymentConfig.external(output_rank=OUTPUT_RANK)
    with Engine(EngineArgs(Cosmos3Policy.name, args, config), deployment=deployment) as engine:
        answer = engine.step(policy_request())
    found = None if answer is None else (answer.action, answer.pixels)
    torch.save(found, Path(folder) / os.environ["RANK"])


if __name__ == "__main__":
    main(*sys.argv[1:])
