"""Published fakes of launchers, engines and routers hold the contracts that the real ones hold."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from phalanx.roles.contracts import ReplicaLaunch, Tag
from phalanx.roles.external_pool import ExternalPool
from phalanx.schema.roles import EngineGroupSpec, EngineKind, RouteMode
from phalanx.testing.conformance import ConformanceError
from phalanx.testing.role_fakes import FakeRoleWorld
from phalanx.testing.roles_conformance import (
    check_engine_control,
    check_launcher,
    check_model_router,
)
from phalanx.testing.virtual_time import run_virtual
from tests.roles.launching.engines import launching
from tests.roles.launching.specs import launch_of, model_of, sglang_group

MODEL = model_of(EngineGroupSpec())
LAUNCH: ReplicaLaunch = launch_of(MODEL)


@pytest.mark.parametrize("says", [True, False])
def test_the_fake_engine_is_an_engine(says):
    async def main() -> None:
        world = FakeRoleWorld(says=says, keeps_weights=True, load_s=1.0)
        engine = await world.launch(LAUNCH)
        await asyncio.sleep(2.0)
        await check_engine_control(engine)
        assert engine.misused == ""
        await world.close()

    run_virtual(main())


def test_the_fake_world_is_a_launcher():
    async def main() -> None:
        await check_launcher(FakeRoleWorld(), LAUNCH)

    run_virtual(main())


def test_the_fake_router_is_a_router():
    async def main() -> None:
        world = FakeRoleWorld()
        engine = await world.launch(LAUNCH)
        await asyncio.sleep(10.0)
        router = await world.open_router("r", model_of(route_mode=RouteMode.SGLANG_ROUTER))
        await check_model_router(router, engine.url, LAUNCH.group)
        await world.close()

    run_virtual(main())


def test_local_processes_and_external_servers_come_of_launchers(tmp_path):
    external = EngineGroupSpec(engine=EngineKind.EXTERNAL, urls=("http://10.0.0.1:1",))

    async def main() -> None:
        await check_launcher(ExternalPool(), launch_of(model_of(external)))
        async with launching(tmp_path) as launcher:
            await check_launcher(launcher, launch_of(model_of(sglang_group())))

    asyncio.run(main())


def test_the_checks_find_what_is_wrong():
    class Forgetful:
        """Gives back nothing."""

        def __init__(self, engine) -> None:
            self.engine = engine

        def __getattr__(self, name: str):
            return getattr(self.engine, name)

        async def release(self, tags: frozenset[Tag]) -> None:
            return None

    async def main() -> None:
        world = FakeRoleWorld(keeps_weights=True, load_s=0.0)
        engine = await world.launch(replace(LAUNCH, generation=3))
        await asyncio.sleep(1.0)
        with pytest.raises(ConformanceError, match="instead of"):
            await check_engine_control(Forgetful(engine))
        await world.close()

    run_virtual(main())
