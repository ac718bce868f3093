"""Health, readiness and what this server is: all that probes and routers ask."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from phalanx import __version__
from phalanx.engine.engine import Engine
from phalanx.schema.deployment import DeploymentConfig
from phalanx.schema.server_config import ServerConfig
from phalanx.schema.statistics import EngineMemory, LoopStatistics
from phalanx.server.lifecycle import Lifecycle, Phase
from phalanx.server.metrics import ServerMetrics
from phalanx.server.served_models import ServedModels

_MODES = {"both": "null", "prefill": "prefill", "decode": "decode"}
"""SGLang's words for a server's role."""


class HealthRoutes:
    """Answer in every phase; `serving` tells whether the engine can."""

    def __init__(self, lifecycle: Lifecycle, engine: Engine | None = None) -> None:
        self._lifecycle = lifecycle
        self._engine = engine

    async def health(self, request: Request) -> Response:
        phase = self._lifecycle.phase
        if phase is not Phase.READY or self._engine is None:
            return PlainTextResponse(f"{phase}\n", 503)
        failure = self._engine.failure
        if failure is not None:
            return PlainTextResponse(f"{failure}\n", 503)
        return PlainTextResponse("ok\n")

    async def ready(self, request: Request) -> Response:
        """As `health`, and whether requests are taken now: not while the engine sleeps."""
        memory = None if self._engine is None else self._engine.memory
        if memory is not None and not memory.ready:
            why = "asleep: " + ", ".join(sorted(memory.asleep)) if memory.asleep else "no weights"
            return PlainTextResponse(f"{why}\n", 503)
        if self._lifecycle.refusal is not None:
            return PlainTextResponse(f"{self._lifecycle.refusal}\n", 503)
        return await self.health(request)

    async def ping(self, request: Request) -> Response:
        return PlainTextResponse("pong\n")


class InfoRoutes:
    """Facts about model, server and load."""

    def __init__(
        self,
        engine: Engine,
        config: ServerConfig,
        models: ServedModels,
        model_info: dict[str, Any],
        metrics: ServerMetrics,
    ) -> None:
        self._engine = engine
        self._config = config
        self._models = models
        self._model_info = model_info
        self._metrics = metrics

    async def model_info(self, request: Request) -> Response:
        return _json(self._model())

    async def server_info(self, request: Request) -> Response:
        engine, limits = self._engine, self._engine.limits
        topology = engine.config.parallel
        parallel = topology.resolve(topology.infer_replica_world_size())
        facts: dict[str, Any] = {
            **self._model(),
            **self._config.shown(),
            "served_model_name": self._models.name,
            "plugin": engine.plugin.name,
            "device": engine.config.device.target,
            "dtype": engine.config.device.params_dtype,
            "runtime": engine.config.runtime,
            "mode": engine.mode,
            "deployment": _deployment(engine.deployment),
            "parallel": parallel,
            "tp_size": parallel.tp_size("dense"),
            "pp_size": parallel.outer.pipeline_size,
            # A client cannot choose a replica, as it could a data-parallel rank of SGLang.
            "dp_size": 1,
            "max_total_num_tokens": self._of_all(limits.pool_tokens),
            "max_running_requests": self._of_all(limits.max_batch_size),
            "context_length": limits.context_length,
            "internal_states": [engine.statistics()],
            "memory": memory_facts(engine.memory),
            "status": "ready" if engine.memory.ready else "asleep",
            "version": __version__,
        }
        return _json(facts)

    async def weight_version(self, request: Request) -> Response:
        return _json({"weight_version": self._engine.version})

    async def loads(self, request: Request) -> Response:
        return _json({"loads": [self._load()], "version": __version__})

    async def load(self, request: Request) -> Response:
        """The older form that sglang-router asks for."""
        load = self._load()
        return _json(
            [
                {
                    "dp_rank": 0,
                    "num_reqs": load["num_total_reqs"],
                    "num_waiting_reqs": load["num_waiting_reqs"],
                    "num_tokens": load["num_used_tokens"],
                }
            ]
        )

    async def metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(self._metrics.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _model(self) -> dict[str, Any]:
        return {
            "model_path": self._models.checkpoint,
            "tokenizer_path": self._models.checkpoint,
            "is_generation": True,
            "load_format": "auto",
            "disaggregation_mode": _MODES[self._config.role],
            **self._model_info,
            "served_model_name": self._models.name,
            "weight_version": self._engine.version,
        }

    def _load(self) -> dict[str, Any]:
        statistics = self._engine.statistics()
        loop = statistics.loop if statistics.loop is not None else LoopStatistics()
        pool = loop.pool_tokens
        return {
            "dp_rank": 0,
            "num_running_reqs": loop.num_running,
            "num_waiting_reqs": max(loop.num_waiting, statistics.num_in_flight - loop.num_running),
            "num_total_reqs": statistics.num_in_flight,
            "num_used_tokens": loop.pool_used_tokens,
            "max_total_num_tokens": pool,
            "token_usage": loop.pool_used_tokens / pool if pool else 0.0,
            "max_running_requests": self._of_all(self._engine.limits.max_batch_size),
        }

    def _of_all(self, bound: int | None) -> int | None:
        """A bound of one replica, over all of them."""
        return None if bound is None else bound * self._engine.deployment.replica_count


def memory_facts(memory: EngineMemory) -> dict[str, Any]:
    """What of its memory the engine holds."""
    return {
        "resident": sorted(memory.resident),
        "asleep": sorted(memory.asleep),
        "waiting_for_weights": memory.waiting_for_weights,
        "rss_bytes": memory.rss_bytes,
    }


def _deployment(deployment: DeploymentConfig) -> dict[str, Any]:
    """As it is, without the values of environment variables, which may be secret."""
    shown: dict[str, Any] = msgspec.to_builtins(deployment)
    process = deployment.process_config
    if process is not None:
        shown["process_config"]["extra_env"] = {name: "(set)" for name, _ in process.extra_env}
    return shown


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
