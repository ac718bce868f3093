"""A host that is gone without a word: its network is cut, and no connection to it is closed."""

from __future__ import annotations

import grpc

from phalanx.routing.pool_policy import PoolPolicy
from phalanx.routing.snapshot import ServerState
from tests.gateway.cut_network import network
from tests.gateway.policy_servers import answer_to, failure, infer, request, run
from tests.gateway.whole import ProbedServer, channel, ready, running, until

QUICK = PoolPolicy(probe_interval_s=0.05, down_interval_s=0.02, probe_timeout_s=0.1)


def test_the_requests_of_a_vanished_host_end_and_others_go_elsewhere():
    async def scenario():
        server, other = ProbedServer(), ProbedServer()
        server.behave = server.hold
        async with (
            network(await server.start()) as between,
            running(other, pool=QUICK, keepalive_s=0.2) as gateway,
            channel(gateway) as client,
        ):
            other_id = gateway.pool.snapshot.servers[0].server_id
            await until(gateway, ServerState.READY, other_id)
            gone = gateway.pool.registry.register_managed("pi05", between.endpoint).server_id
            await ready(gateway, 2)
            held = [await infer(client, request(f"r-{number}")) for number in range(2)]
            await server.arrived()
            await other.arrived()
            between.cut()
            [lost] = [call for call in held if (await call.code()) is not grpc.StatusCode.OK]
            assert (await failure(lost)).code() is grpc.StatusCode.UNAVAILABLE
            await until(gateway, ServerState.UNHEALTHY, gone)
            assert gateway.pool.registry.load.count(gone) == 0
            assert await (await infer(client, request("r-3"))) == answer_to(request("r-3"))
        server.release.set()
        await server.stop()

    run(scenario())
