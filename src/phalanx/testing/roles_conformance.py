"""What a manager of roles relies on, checked for any launcher, engine and router, real or fake.

Each check raises `ConformanceError` where a contract of `phalanx.roles.contracts` does not hold.
"""

from __future__ import annotations

import asyncio

from phalanx.roles.contracts import (
    ALL_TAGS,
    EngineControl,
    Launcher,
    ModelRouter,
    ReplicaLaunch,
    Tag,
)
from phalanx.schema.roles import EngineGroupSpec
from phalanx.testing.conformance import require

_LATER = ALL_TAGS - {Tag.WEIGHTS}


async def check_engine_control(engine: EngineControl) -> None:
    """A whole turn of an engine that is healthy and idle and whose weights come back by themselves:
    it is asked for its memory, all of it at once, and given it back tag by tag.
    """
    require(await engine.healthy(), "an engine that runs is not healthy")
    require(await engine.ready(), "an engine that holds everything is not ready")
    version = await engine.weight_version()
    require(bool(version), "the weights have no version")
    says = await _check_memory(engine, ALL_TAGS)
    await engine.abort_all()
    await engine.pause()
    require(await engine.is_idle(), "it is not idle though nothing was asked of it")
    await engine.release(ALL_TAGS)
    await _check_memory(engine, frozenset())
    if says:
        await engine.release(ALL_TAGS)
        await _check_memory(engine, frozenset())
    require(await engine.healthy(), "it is not healthy without memory")
    await engine.resume(frozenset({Tag.WEIGHTS}))
    await _check_memory(engine, frozenset({Tag.WEIGHTS}))
    await engine.resume(_LATER)
    if says:
        await engine.resume(ALL_TAGS)
    await _check_memory(engine, ALL_TAGS)
    await engine.go_on()
    require(await engine.ready(), "it is not ready though it has everything again")
    require(await engine.weight_version() == version, "its weights have another version now")


async def _check_memory(engine: EngineControl, expected: frozenset[Tag]) -> bool:
    """Whether it says what it holds; where it does, that has to be what is expected."""
    resident, waits = await engine.resident(), await engine.waits_for_weights()
    require(
        (resident is None) == (waits is None),
        f"it says {resident} of its memory and {waits} of its weights; it says both or neither",
    )
    if resident is None:
        return False
    require(resident == expected, f"it holds {set(resident)} instead of {set(expected)}")
    require(waits is False, "it waits for weights though they come back by themselves")
    return True


async def check_launcher(launcher: Launcher, launch: ReplicaLaunch) -> None:
    """A replica is known by its address at once, stays until it is stopped, and is stopped twice."""
    replica = await launcher.launch(launch)
    require(replica.url.startswith("http"), f"its url is {replica.url!r}")
    exited = asyncio.ensure_future(replica.exited())
    try:
        await replica.stop(60.0)
        await replica.stop(60.0)
        await asyncio.sleep(0)
        require(not exited.done(), "a stop is told as an end by itself")
    finally:
        exited.cancel()
        await asyncio.gather(exited, return_exceptions=True)
        await launcher.close()
    await launcher.close()


async def check_model_router(router: ModelRouter, url: str, worker: EngineGroupSpec) -> None:
    """A replica that runs at `url` is added and removed, each of it twice."""
    require(router.url.startswith("http"), f"its url is {router.url!r}")
    await router.remove(url)
    await router.add(url, worker, None)
    await router.add(url, worker, None)
    await router.remove(url)
    await router.remove(url)
    await router.add(url, worker, None)
    await router.remove(url)
