"""The programs of `docs/role-client.md` run as they are shown."""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from phalanx.client import RoleClientSettings
from tests.client.roles.servers import FakeEngine, FakeGateway, Request, model

PAGE = (Path(__file__).parents[3] / "docs" / "role-client.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"^```py\n(.*?)^```$", PAGE, re.M | re.S)


async def answer(request: Request) -> None:
    if request.json.get("stream"):
        request.begin_stream()
        request.event({"text": "streamed"})
        request.end_stream()
    else:
        request.answer({"text": "whole", "choices": ["chosen"]})


def test_the_page_shows_both_clients_and_every_setting():
    assert len(PROGRAMS) == 3  # of which test_role_tls runs the last
    for field in fields(RoleClientSettings):
        assert f"`{field.name}`" in PAGE


@pytest.mark.parametrize(
    ("number", "role", "name", "printed"),
    [(0, "genrm", "judge", "['chosen']"), (1, "rollout", "student", "8\n{'text': 'streamed'}")],
    ids=("synchronous", "asynchronous"),
)
def test_a_shown_program_runs(number, role, name, printed):
    async def scenario():
        gateway, engine = FakeGateway(role=role), FakeEngine(behave=answer)
        await gateway.start()
        await engine.start()
        gateway.show(model(name, engine.replica()))
        shown = PROGRAMS[number].replace(f"http://127.0.0.1:30000/{role}", gateway.role_url)
        assert shown != PROGRAMS[number]
        done = await asyncio.create_subprocess_exec(
            sys.executable, "-c", shown, stdout=-1, stderr=-1
        )
        output, errors = await done.communicate()
        assert done.returncode == 0, errors.decode()
        assert output.decode().strip() == printed
        await gateway.stop()
        await engine.stop()

    asyncio.run(scenario())
