"""Replicas as processes of this machine: real servers, and programs that tell what they were given."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import httpx
import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles import lifeline
from phalanx.roles.contracts import EngineCallError
from phalanx.roles.engine_command import EnginePrograms
from phalanx.roles.local_launcher import LocalLauncher, LocalLauncherSettings
from phalanx.roles.sglang_engine import SGLangEngine
from phalanx.schema.roles import EngineGroupSpec, EngineKind, WeightSource, WorkerType
from tests.roles.launching.engines import (
    launching,
    our_model,
    sglang_model,
    started,
)
from tests.roles.launching.processes import has_ended, watched
from tests.roles.launching.specs import launch_of, model_of, sglang_group

TELLING = (sys.executable, "-P", "-c")
TELLS_WHAT_IT_GOT = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"


def telling(logs: Path, **fields: object) -> LocalLauncher:
    program = (*TELLING, TELLS_WHAT_IT_GOT)
    programs = EnginePrograms(phalanx=program, sglang=program)
    return LocalLauncher(LocalLauncherSettings(logs, programs=programs, **fields))


async def told(launcher: LocalLauncher, launch) -> tuple[list[str], dict[str, str]]:
    """What the started process saw of itself, without the port, which is another one each time."""
    replica = await launcher.launch(launch)
    await replica.exited()
    arguments, environment = json.loads(replica.log_file.read_text().splitlines()[-1])
    at = arguments.index("--port") + 1
    assert replica.url == f"http://127.0.0.1:{arguments[at]}"
    del arguments[at]
    return arguments, environment


@pytest.mark.parametrize("kind", [EngineKind.PHALANX, EngineKind.SGLANG])
def test_i19_the_started_process_sees_its_own_specification_alone(tmp_path, monkeypatch, kind):
    judge = model_of(EngineGroupSpec(engine=kind), name="judge", env_vars={"JUDGE": "1"})
    student = model_of(
        EngineGroupSpec(engine=kind, engine_args={"dtype": "float16"}),
        weight_source=WeightSource.DCS,
        env_vars={"STUDENT": "1", "PHALANX_SEED": "3"},
    )

    async def main() -> None:
        launcher = telling(tmp_path)
        before = await told(launcher, launch_of(judge, role="genrm"))
        monkeypatch.setenv("PHALANX_DTYPE", "float16")
        monkeypatch.setenv("SGLANG_SPECULATIVE", "1")
        monkeypatch.setenv("HF_TOKEN", "secret")
        monkeypatch.setenv("RANK", "1")
        theirs = await told(launcher, launch_of(student))
        after = await told(launcher, launch_of(judge, role="genrm"))
        await launcher.close()
        assert before == after
        assert after[1]["JUDGE"] == "1" and "STUDENT" not in after[1]
        assert theirs[1]["PHALANX_SEED"] == "3" and "JUDGE" not in theirs[1]

    asyncio.run(main())


def test_each_start_has_a_log_of_its_own(tmp_path):
    async def main() -> list[Path]:
        launcher = telling(tmp_path)
        model = model_of()
        launches = [launch_of(model, 0), launch_of(model, 1), launch_of(model, 1, generation=1)]
        replicas = [await launcher.launch(launch) for launch in launches]
        for replica in replicas:
            await replica.exited()
        await launcher.close()
        return [replica.log_file.relative_to(tmp_path) for replica in replicas]

    logs = asyncio.run(main())
    assert list(map(str, logs)) == [f"rollout/student/{name}.log" for name in ("0.0", "1.0", "1.1")]


def test_a_prefill_worker_gets_a_port_more(tmp_path):
    prefill = sglang_group(worker_type=WorkerType.PREFILL)
    model = model_of(prefill, sglang_group(worker_type=WorkerType.DECODE))

    async def main() -> None:
        launcher = telling(tmp_path)
        one = await launcher.launch(launch_of(model))
        other = await launcher.launch(launch_of(model, 1, group=1))
        assert one.bootstrap_port and str(one.bootstrap_port) not in one.url
        assert other.bootstrap_port is None
        await launcher.close()

    asyncio.run(main())


def test_replicas_take_the_first_free_ports_where_one_is_given(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        first = taken.getsockname()[1]

        async def main() -> list[int]:
            launcher = telling(tmp_path, first_port=first)
            model = model_of(weight_source=WeightSource.DCS)
            replicas = [await launcher.launch(launch_of(model, at)) for at in range(2)]
            ports = [int(replica.url.rpartition(":")[2]) for replica in replicas]
            await launcher.close()
            return ports

        ports = asyncio.run(main())
    assert first < ports[0] < ports[1]


def test_what_can_never_start_leaves_nothing_behind(tmp_path):
    async def main() -> None:
        settings = LocalLauncherSettings(
            tmp_path / "logs", programs=EnginePrograms(phalanx=("/nowhere/phalanx",))
        )
        launcher = LocalLauncher(settings)
        with pytest.raises(ConfigurationError, match="no program '/nowhere/phalanx'"):
            await launcher.launch(launch_of(model_of()))
        with pytest.raises(ConfigurationError, match="nodes_per_replica=2"):
            await launcher.launch(launch_of(model_of(EngineGroupSpec(nodes_per_replica=2))))
        await launcher.close()

    asyncio.run(main())
    assert not (tmp_path / "logs").exists()


def test_a_startup_crash_tells_the_end_of_the_log(tmp_path):
    async def main() -> str:
        async with launching(tmp_path) as launcher:
            group = sglang_group(engine_args={"no_such_flag": 1})
            replica = await launcher.launch(launch_of(model_of(group)))
            return await replica.exited()

    how = asyncio.run(main())
    assert how.startswith("it ended with status 2; ")
    assert "unrecognized arguments: --no-such-flag 1" in how


@pytest.mark.long
def test_a_server_of_ours_serves_and_ends_when_it_is_told(tmp_path, tiny_llama):
    async def main() -> None:
        async with started(tmp_path, our_model(tiny_llama)) as (replica, engine):
            assert await engine.ready()
            assert await engine.weight_version() == "default"
            async with httpx.AsyncClient(base_url=replica.url) as http:
                models = (await http.get("/v1/models")).json()["data"]
                assert models[0]["id"] == "student"
            with watched(replica.pid) as (end,):
                await replica.stop(60)
                assert has_ended(end)
            assert not await engine.healthy()
            with pytest.raises(EngineCallError) as failure:
                await engine.pause()
            assert failure.value.gone and not failure.value.uncertain

    asyncio.run(main())


@pytest.mark.long
def test_two_replicas_in_one_server_die_with_it(tmp_path, tiny_llama):
    group = EngineGroupSpec(
        engine_args={"device": "cpu", "pool_tokens": 4096, "num_threads": 1, "replicas": 2}
    )
    model = model_of(group, path=str(tiny_llama), weight_source=WeightSource.LOCAL)

    async def main() -> None:
        async with started(tmp_path, model) as (replica, engine):
            assert await engine.ready()
            members = lifeline.members(replica.pid)
            assert len(members) == 3
            with watched(*members) as ends:
                os.kill(replica.pid, signal.SIGKILL)
                assert re.match("it was killed by SIGKILL", await replica.exited())
                await replica.stop(60)
                assert all(map(has_ended, ends))

    asyncio.run(main())


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_loaded_is_told(tmp_path):
    (tmp_path / "empty").mkdir()

    async def main() -> str:
        async with launching(tmp_path) as launcher:
            replica = await launcher.launch(launch_of(our_model(tmp_path / "empty")))
            return await replica.exited()

    how = asyncio.run(main())
    assert how.startswith("it ended with status 2; ")
    assert "config.json" in how or "tokenizer.json" in how


@pytest.mark.long
def test_a_port_that_was_stolen_is_told(tmp_path, tiny_llama):
    """Somebody who forces its way in beside the reservation, as nothing orderly does."""

    async def main() -> str:
        async with launching(tmp_path) as launcher:
            replica = await launcher.launch(launch_of(our_model(tiny_llama)))
            with socket.socket() as thief:
                thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                thief.bind(("127.0.0.1", int(replica.url.rpartition(":")[2])))
                thief.listen()
                return await replica.exited()

    how = asyncio.run(main())
    assert how.startswith("it ended with status ") and "in use" in how


@pytest.mark.long
def test_one_that_was_stopped_by_a_signal_is_ended_by_force(tmp_path, tiny_llama):
    async def main() -> None:
        async with started(tmp_path, our_model(tiny_llama)) as (replica, engine):
            os.kill(replica.pid, signal.SIGSTOP)
            with watched(replica.pid) as (end,):
                await replica.stop(0.05)
                assert has_ended(end)
            assert not await engine.healthy()

    asyncio.run(main())


def test_sglang_is_launched_and_dies_as_sglang_does(tmp_path, tiny_llama):
    async def main() -> str:
        async with started(tmp_path, sglang_model(tiny_llama)) as (replica, engine):
            assert await engine.ready()
            async with httpx.AsyncClient(base_url=replica.url) as http:
                await http.post("/resume_memory_occupation", json={"tags": ["weights"]})
        return ""

    with pytest.raises(httpx.RemoteProtocolError):
        asyncio.run(main())
    log = (tmp_path / "rollout" / "student" / "0.0.log").read_text()
    assert "KeyError: 'weights'" in log


def test_an_engine_that_never_listens_is_stopped_all_the_same(tmp_path):
    settings = LocalLauncherSettings(
        tmp_path,
        programs=EnginePrograms(phalanx=(*TELLING, "import signal; signal.pause()")),
    )

    async def main() -> None:
        launcher = LocalLauncher(settings)
        replica = await launcher.launch(launch_of(model_of()))
        async with SGLangEngine(replica.url) as engine:
            assert not await engine.healthy()
        with watched(replica.pid) as (end,):
            await launcher.close()
            assert has_ended(end)
        await launcher.close()

    asyncio.run(main())
