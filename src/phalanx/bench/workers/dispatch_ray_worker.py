"""Ray: one actor a worker, on a cluster of this process alone."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from dispatch_protocol import Action, Observation, answer, serve  # type: ignore[import-not-found]

OBJECT_STORE_BYTES = 2 * 1024**3


class RayTransport:
    def __init__(self, message: dict[str, Any]) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # One of our own, so that none is written into the user's home.
        os.environ["RAY_AUTH_TOKEN"] = uuid.uuid4().hex
        # Actors import what this script imports.
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)
        import ray

        self._ray: Any = ray
        ray.init(
            address="local",
            num_cpus=message["workers"],
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            _temp_dir=message["scratch"],
        )
        actor = ray.remote(num_cpus=1)(Actor)
        self._actors = [actor.remote() for _ in range(message["workers"])]
        self._in_flight = [0] * len(self._actors)

    def describe(self) -> str:
        return f"ray {self._ray.__version__}, actor calls"

    def submit(self, observation: Observation) -> tuple[Any, int]:
        worker = min(range(len(self._actors)), key=self._in_flight.__getitem__)
        self._in_flight[worker] += 1
        return self._actors[worker].answer.remote(observation), worker

    def result(self, pending: tuple[Any, int]) -> Action:
        reference, worker = pending
        action = self._ray.get(reference)
        self._in_flight[worker] -= 1
        return action

    def close(self) -> None:
        self._ray.shutdown()


class Actor:
    def answer(self, observation: Observation) -> Action:
        return answer(observation)


if __name__ == "__main__":
    serve(RayTransport)
