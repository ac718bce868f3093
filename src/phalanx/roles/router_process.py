"""Starts sglang-router for a model, as a process of this machine that does not outlive this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx import settings
from phalanx.roles.child_process import ChildProcess, Command, ProcessHost
from phalanx.roles.contracts import EngineCallError
from phalanx.roles.engine_command import ListenAddress
from phalanx.roles.ports import ReservedPort
from phalanx.roles.sglang_router import DROPPED_FIELDS, SGLangRouter
from phalanx.schema.roles import InferenceModelSpec, RoutingPolicy

logger = logging.getLogger(__name__)
_PAUSE_S = 0.05
_STOP_GRACE_S = 5.0
POLICIES = {RoutingPolicy.LEAST_IN_FLIGHT: "round_robin", RoutingPolicy.AFFINITY: "manual"}
"""The router's policy that comes nearest to a role's; `manual` keeps a key at its replica."""


@dataclass(frozen=True)
class RouterSettings:
    """How routers are started: `python` is an interpreter that has sglang-router.

    It must answer `startup_timeout_s` after its start, and have done a registration after
    `register_timeout_s`. Without other `extra_args` it sends no request a second time, and does not
    believe for long in replicas that are gone.
    """

    log_dir: Path
    python: str = sys.executable
    host: str = "127.0.0.1"
    policy: RoutingPolicy = RoutingPolicy.LEAST_IN_FLIGHT
    startup_timeout_s: float = 60.0
    register_timeout_s: float = 60.0
    extra_args: Sequence[str] = (
        "--disable-retries",
        "--log-level",
        "warn",
        "--health-check-interval-secs",
        "5",
    )


class RouterStarter:
    """Opens a model's router: the one that its specification names, or one of its own."""

    def __init__(self, router_settings: RouterSettings) -> None:
        self._settings = router_settings

    async def open(self, role: str, model: InferenceModelSpec) -> SGLangRouter:
        """Returns when it answers. Raises `EngineCallError` where it does not, or
        `ConfigurationError` where it cannot be started, and then leaves nothing behind.
        """
        logger.warning(
            "requests to model %r of role %r go through sglang-router, which passes on only the "
            "fields that it knows: not %s, for example; with route_mode direct all of them arrive",
            model.name,
            role,
            ", ".join(DROPPED_FIELDS["/generate"][:3]),
        )
        if model.router_url is not None:
            router = SGLangRouter(
                model.router_url, register_timeout_s=self._settings.register_timeout_s
            )
            async with contextlib.AsyncExitStack() as undo:
                undo.push_async_callback(router.close)
                await self._answering(router, model, None)
                undo.pop_all()
            return router
        return await self._started(role, model)

    async def _started(self, role: str, model: InferenceModelSpec) -> SGLangRouter:
        given = self._settings
        host = ProcessHost()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(host.close, 0.0)
            with contextlib.ExitStack() as reserved:
                port = reserved.enter_context(ReservedPort(given.host)).number
                metrics = reserved.enter_context(ReservedPort(given.host)).number
                command = self._command(model, port, metrics)
                log_file = given.log_dir / role / model.name / "router.log"
                child = host.start(command, log_file, holds=reserved.pop_all())
            router = SGLangRouter(
                ListenAddress(given.host, port).url,
                register_timeout_s=given.register_timeout_s,
                host=host,
            )
            undo.push_async_callback(router.close)
            await self._answering(router, model, child)
            undo.pop_all()
        return router

    def _command(self, model: InferenceModelSpec, port: int, metrics_port: int) -> Command:
        given = self._settings
        arguments = [given.python, "-m", "sglang_router.launch_router", "--host", given.host]
        arguments += ["--port", str(port), "--policy", POLICIES[given.policy]]
        arguments += ["--prometheus-host", given.host, "--prometheus-port", str(metrics_port)]
        arguments += ["--worker-startup-timeout-secs", str(max(1, int(given.register_timeout_s)))]
        if model.is_disaggregated:
            arguments += ["--pd-disaggregation"]
        same_python = given.python == sys.executable
        environment = settings.machine_environment(
            {"PYTHONUNBUFFERED": "1"}, same_python=same_python
        )
        return Command((*arguments, *given.extra_args), environment)

    async def _answering(
        self, router: SGLangRouter, model: InferenceModelSpec, child: ChildProcess | None
    ) -> None:
        """Wait until it answers; raises where it has ended, or does not in time."""
        timeout_s = self._settings.startup_timeout_s
        ended = None if child is None else asyncio.create_task(child.exited())
        try:
            async with asyncio.timeout(timeout_s):
                while not await router.answers():
                    if ended is not None and ended.done():
                        raise self._did_not_start(model, ended.result())
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            raise EngineCallError(
                f"the router of model {model.name!r} at {router.url} does not answer after"
                f" {timeout_s} s",
                uncertain=False,
            ) from None
        finally:
            if ended is not None:
                ended.cancel()

    def _did_not_start(self, model: InferenceModelSpec, how: str) -> EngineCallError:
        hint = ""
        if "No module named" in how:
            hint = f"\nInstall it: `{self._settings.python} -m pip install sglang-router`"
        return EngineCallError(
            f"the router of model {model.name!r} did not start: {how}{hint}", uncertain=False
        )
