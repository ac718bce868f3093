"""Starts sglang-router for a model, as a process of this machine that does not outlive this one, and
starts it anew, at the same address and with the same replicas, where it ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx import settings
from phalanx.errors import ConfigurationError
from phalanx.roles.child_process import ChildProcess, Command, ProcessHost
from phalanx.roles.contracts import EngineCallError
from phalanx.roles.engine_command import ListenAddress
from phalanx.roles.ports import ReservedPort
from phalanx.roles.sglang_router import DROPPED_FIELDS, SGLangRouter
from phalanx.schema.roles import InferenceModelSpec, RoutingPolicy

logger = logging.getLogger(__name__)
_PAUSE_S = 0.05
_AGAIN_S = 5.0
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
        if model.router_url is None:
            return await self._started(role, model)
        router = SGLangRouter(
            model.router_url, register_timeout_s=self._settings.register_timeout_s
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(router.close)
            await _answering(router, model.name, self._settings.startup_timeout_s, None)
            undo.pop_all()
        return router

    async def _started(self, role: str, model: InferenceModelSpec) -> SGLangRouter:
        given = self._settings
        with contextlib.ExitStack() as reserved:
            port = reserved.enter_context(ReservedPort(given.host)).number
            metrics = reserved.enter_context(ReservedPort(given.host)).number
            command = self._command(model, port, metrics)
            log_file = given.log_dir / role / model.name / "router.log"
            process = RouterProcess(command, log_file, reserved.pop_all())
        router = SGLangRouter(
            ListenAddress(given.host, port).url,
            register_timeout_s=given.register_timeout_s,
            on_close=process.close,
        )
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(router.close)
            await process.start(router, model.name, given.startup_timeout_s)
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
        environment = settings.machine_environment(
            {"PYTHONUNBUFFERED": "1"}, same_python=given.python == sys.executable
        )
        return Command((*arguments, *given.extra_args), environment)


class RouterProcess:
    """One router's process, and its successors at the same address."""

    def __init__(self, command: Command, log_file: Path, ports: contextlib.ExitStack) -> None:
        """`ports` stay reserved until `close`."""
        self._command = command
        self._log_file = log_file
        self._ports = ports
        self._host = ProcessHost()
        self._keeping: asyncio.Task[None] | None = None

    async def start(self, router: SGLangRouter, name: str, timeout_s: float) -> None:
        """Start it, return when it answers, and keep it running from then on."""
        child = self._host.start(self._command, self._log_file)
        await _answering(router, name, timeout_s, child)
        self._keeping = asyncio.create_task(self._keep(child, router, name, timeout_s))

    async def close(self) -> None:
        """Any number of times."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._host.close(_STOP_GRACE_S)
        self._ports.close()

    async def _keep(
        self, child: ChildProcess, router: SGLangRouter, name: str, timeout_s: float
    ) -> None:
        while True:
            how = await child.exited()
            logger.error("the router of model %r is started anew: %s", name, how)
            await child.gone()
            child = await self._successor(router, name, timeout_s)
            await router.add_all_again()

    async def _successor(self, router: SGLangRouter, name: str, timeout_s: float) -> ChildProcess:
        while True:
            child = None
            try:
                child = self._host.start(self._command, self._log_file)
                await _answering(router, name, timeout_s, child)
            except (EngineCallError, ConfigurationError, OSError) as error:
                logger.error("%s", error)
                if child is not None:
                    await child.stop(0.0)
                await asyncio.sleep(_AGAIN_S)
            else:
                return child


async def _answering(
    router: SGLangRouter, name: str, timeout_s: float, child: ChildProcess | None
) -> None:
    """Wait until it answers; raises where it has ended, or does not in time."""
    ended = None if child is None else asyncio.create_task(child.exited())
    try:
        async with asyncio.timeout(timeout_s):
            while not await router.answers():
                if ended is not None and ended.done():
                    raise _did_not_start(name, ended.result())
                await asyncio.sleep(_PAUSE_S)
    except TimeoutError:
        raise EngineCallError(
            f"the router of model {name!r} at {router.url} does not answer after {timeout_s} s",
            uncertain=False,
        ) from None
    finally:
        if ended is not None:
            ended.cancel()


def _did_not_start(name: str, how: str) -> EngineCallError:
    hint = ""
    if "No module named" in how:
        hint = "\nInstall it there with `python -m pip install sglang-router`"
    return EngineCallError(
        f"the router of model {name!r} did not start: {how}{hint}", uncertain=False
    )
