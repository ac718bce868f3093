"""Replicas that somebody else runs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from phalanx.errors import ConfigurationError
from phalanx.roles.contracts import ReplicaLaunch
from phalanx.roles.external_pool import ExternalPool, ExternalReplica, LauncherByKind
from phalanx.schema.roles import EngineGroupSpec, EngineKind, WorkerType
from tests.roles.launching.specs import launch_of, model_of


def external(*urls: str, **fields: object) -> EngineGroupSpec:
    return EngineGroupSpec(engine=EngineKind.EXTERNAL, urls=urls, num_replicas=len(urls), **fields)


def launched(launch: ReplicaLaunch) -> ExternalReplica:
    return asyncio.run(ExternalPool().launch(launch))


def test_each_replica_has_its_url():
    model = model_of(external("http://a:1"), external("http://b:1/", "https://c/engine"))
    launches = [launch_of(model), *(launch_of(model, at, group=1) for at in (1, 2))]
    assert [launched(one).url for one in launches] == [
        *["http://a:1", "http://b:1", "https://c/engine"]
    ]


def test_more_replicas_need_more_urls():
    model = model_of(external("http://a:1"))
    with pytest.raises(ConfigurationError, match=r"student/1: .* has 1 urls; more .* more urls"):
        launched(launch_of(model, 1))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("a:1", "must be a url as http://HOST:PORT"),
        ("ftp://a", "must be a url as http://HOST:PORT"),
        ("http://", "must be a url as http://HOST:PORT"),
        ("http://a:port", "is no url"),
        ("http://user:secret@a:1", "with a user, a query or a fragment"),
        ("http://a:1?x=1", "with a user, a query or a fragment"),
    ],
)
def test_an_address_that_cannot_be_called_is_refused(url, why):
    with pytest.raises(ConfigurationError, match=why) as caught:
        launched(launch_of(model_of(external(url))))
    assert "secret" not in str(caught.value)


def test_prefill_workers_tell_their_bootstrap_ports():
    both = external(
        "http://a:1",
        "http://b:1",
        worker_type=WorkerType.PREFILL,
        engine_args={"bootstrap_port": [7, 8]},
    )
    one = external("http://c:1", worker_type=WorkerType.PREFILL, engine_args={"bootstrap_port": 9})
    model = model_of(both, one, external("http://d:1", worker_type=WorkerType.DECODE))
    launches = [launch_of(model, at) for at in range(2)]
    launches += [launch_of(model, 2, group=1), launch_of(model, 3, group=2)]
    assert [launched(launch).bootstrap_port for launch in launches] == [7, 8, 9, None]
    bad = external(
        "http://a:1", worker_type=WorkerType.PREFILL, engine_args={"bootstrap_port": "x"}
    )
    decode = external("http://d:1", worker_type=WorkerType.DECODE)
    with pytest.raises(ConfigurationError, match="bootstrap_port='x' must be a port"):
        launched(launch_of(model_of(bad, decode)))


def test_it_is_let_go_of_and_never_ends_by_itself():
    async def main() -> None:
        replica = await ExternalPool().launch(launch_of(model_of(external("http://a:1"))))
        exited = asyncio.ensure_future(replica.exited())
        await replica.stop(0)
        await replica.stop(0)
        assert not exited.done()
        exited.cancel()
        await asyncio.gather(exited, return_exceptions=True)

    asyncio.run(main())


@dataclass
class Remembering:
    launched: list[str] = field(default_factory=list)
    closed: bool = False

    async def launch(self, launch: ReplicaLaunch) -> ExternalReplica:
        self.launched.append(launch.engine_id)
        return ExternalReplica("http://x:1")

    async def close(self) -> None:
        self.closed = True


def test_launches_go_where_their_kind_is_launched():
    started, elsewhere = Remembering(), Remembering()
    model = model_of(external("http://a:1"), EngineGroupSpec())

    async def main() -> None:
        launcher = LauncherByKind(started, elsewhere)
        await launcher.launch(launch_of(model))
        await launcher.launch(launch_of(model, 1, group=1))
        await launcher.close()

    asyncio.run(main())
    assert (started.launched, elsewhere.launched) == (["student/1"], ["student/0"])
    assert started.closed and elsewhere.closed
