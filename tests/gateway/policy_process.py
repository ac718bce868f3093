"""A policy server as a process of its own: `python -m tests.gateway.policy_process`.

Prints its port, then each request's id as it arrives. One whose id begins with `hold` is never
answered.
"""

from __future__ import annotations

import asyncio

from phalanx.wire import robot_inference as wire
from tests.gateway.policy_servers import Context, answer_to, run
from tests.gateway.whole import ProbedServer


async def main() -> None:
    async def behave(data: bytes, context: Context) -> bytes:
        request_id = wire.peek(data).request_id
        print(request_id, flush=True)
        if request_id.startswith("hold"):
            await asyncio.Event().wait()
        return answer_to(data)

    server = ProbedServer(behave)
    print((await server.start()).port, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    run(main())
