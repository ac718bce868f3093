"""A teacher that behaves as SGLang does on its wire: it knows no ids by position."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import msgspec
import uvicorn

from phalanx.client import AsyncRoleClient
from phalanx.distill import (
    DeferredBatch,
    MemoryStore,
    Prompt,
    RolloutSettings,
    RolloutWorkload,
    TeacherRequest,
    TeacherScorer,
    TokenSelection,
)
from phalanx.testing.sglang_scheduler import SchedulerOptions
from phalanx.testing.sglang_server import sglang_app


@asynccontextmanager
async def served(weights: str):
    """The URL of such a server."""
    crashes: list[str] = []
    app = sglang_app(SchedulerOptions(model=weights), crashes.append)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        running = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running
    assert not crashes


def test_a_batch_is_rolled_out_and_scored_by_servers_like_sglang():
    """Every selection; student's tokens by the union, which is found out by asking."""

    async def run():
        async with served("student") as one, served("teacher") as other:
            async with AsyncRoleClient(one) as student, AsyncRoleClient(other) as teacher:
                settings = RolloutSettings(num_samples=2, max_new_tokens=5, top_logprobs=3)
                workload, scorer = RolloutWorkload(student, settings), TeacherScorer(teacher)
                made = await workload.generate([Prompt("g", (5, 6, 7))], "b")
                for selection in TokenSelection:
                    k = 0 if selection is TokenSelection.STUDENT_SAMPLED else 3
                    asked = TeacherRequest(selection=selection, top_k=k)
                    batch = await DeferredBatch.open(MemoryStore(), "b")
                    await batch.stage_samples(
                        [msgspec.structs.replace(sample, teacher=asked) for sample in made]
                    )
                    await batch.score_teacher(scorer)
                    await batch.validate()
                    assert await batch.publish()
                    for sample in batch.samples:
                        assert len(sample.scores.teacher_log_probs) == 5

    asyncio.run(run())
