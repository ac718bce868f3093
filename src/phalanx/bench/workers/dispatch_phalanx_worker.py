"""Phalanx's whole Engine, with replicas in local workers."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from dispatch_protocol import Action, Observation, serve  # type: ignore[import-not-found]

from phalanx import DeploymentConfig, DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.bench.dispatch_plugin import Dispatch, DispatchArgs, DispatchOutput, DispatchRequest

Engine.register(Dispatch)


def open_engine(num_replicas: int) -> Engine:
    """Replicas of one rank each, ready."""
    config = EngineConfig(DeviceConfig("cpu", "float32"), RuntimeConfig(num_threads=1))
    args = EngineArgs(Dispatch.name, DispatchArgs(), config)
    return Engine(args, deployment=DeploymentConfig.local(replica_count=num_replicas))


class PhalanxTransport:
    def __init__(self, message: dict[str, Any]) -> None:
        self._engine = open_engine(message["workers"])

    def describe(self) -> str:
        import phalanx

        return f"phalanx {phalanx.__version__}, engine.submit(...).result()"

    def submit(self, observation: Observation) -> Future[DispatchOutput]:
        future: Future[DispatchOutput] = self._engine.submit(DispatchRequest(observation))
        return future

    def result(self, pending: Future[DispatchOutput]) -> Action:
        return pending.result().action

    def close(self) -> None:
        self._engine.close()


if __name__ == "__main__":
    serve(PhalanxTransport)
