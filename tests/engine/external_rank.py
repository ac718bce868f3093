"""What each process of `test_external.py` runs: prints one JSON line about its rank."""

from __future__ import annotations

import json
import sys

from phalanx import (
    AttentionParallelConfig,
    DenseParallelConfig,
    DeploymentConfig,
    DeviceConfig,
    Engine,
    EngineArgs,
    EngineConfig,
    ParallelConfig,
    RuntimeConfig,
)
from phalanx import parallel as P
from phalanx.testing import Counting, CountingArgs, CountRequest
from phalanx.testing.faulty import Action, Faulty, FaultyArgs, FaultyError, FaultyRequest


class RankSum(Faulty):
    """Answers with the sum of its request over all ranks."""

    name = "rank_sum"

    def step(self, request):
        import torch

        if request.action is Action.RAISE:
            raise FaultyError("refused on every rank")
        return float(P.all_reduce(torch.tensor([float(request.payload)]), group="dense_tp"))


class RankedCounting(Counting):
    name = "ranked_counting"
    parallel_domains = frozenset({"dense", "attention"})


def config(world):
    return EngineConfig(
        DeviceConfig("cpu", "float32"),
        RuntimeConfig(num_threads=1, dist_timeout_s=60.0),
        ParallelConfig(
            dense=DenseParallelConfig(tp_size=world),
            attention=AttentionParallelConfig(tp_size=world),
        ),
    )


def main() -> None:
    world, output_rank = int(sys.argv[1]), int(sys.argv[2])
    Engine.register(RankSum)
    Engine.register(RankedCounting)
    deployment = DeploymentConfig.external(output_rank=output_rank)
    said: dict[str, object] = {}
    with Engine(
        EngineArgs("rank_sum", FaultyArgs(), config(world)), deployment=deployment
    ) as engine:
        said["mode"] = engine.mode
        said["world"] = engine.entry._world.rank
        said["steps"] = [engine.step(FaultyRequest(payload)) for payload in (1, 10)]
        try:
            engine.step(FaultyRequest(action=Action.RAISE))
        except FaultyError as error:
            said["raised"] = str(error)
        said["submitted"] = engine.submit(FaultyRequest(100)).result()
    args = EngineArgs("ranked_counting", CountingArgs(max_batch_size=2), config(world))
    with Engine(args, deployment=deployment) as engine:
        futures = [engine.submit(CountRequest(count=count)) for count in (3, 1, 4)]
        said["counted"] = [
            None if (output := future.result()) is None else list(output.numbers)
            for future in futures
        ]
        said["cancel"] = futures[0].cancel()
        said["streamed"] = len(list(engine.stream(CountRequest(count=2))))
    sys.stdout.write(json.dumps(said) + "\n")  # in one piece, as the other rank writes there too
    sys.stdout.flush()


if __name__ == "__main__":
    main()
