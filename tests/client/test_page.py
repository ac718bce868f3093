"""The programs of `docs/policy-client.md` run as they are shown."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.gateway.policy_servers import FakePolicyServer, run

PAGE = Path(__file__).parents[2] / "docs" / "policy-client.md"
PROGRAMS = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def test_the_page_shows_both_clients():
    assert len(PROGRAMS) == 2


@pytest.mark.long
@pytest.mark.parametrize("program", PROGRAMS, ids=("synchronous", "asynchronous"))
def test_a_shown_program_runs(program):
    async def scenario():
        server = FakePolicyServer()
        address = str(await server.start())
        shown = program.replace("127.0.0.1:50111", address)
        assert shown != program
        done = await asyncio.create_subprocess_exec(
            sys.executable, "-c", shown, stdout=-1, stderr=-1
        )
        output, errors = await done.communicate()
        assert done.returncode == 0, errors.decode()
        assert output.startswith(b"(3, 2)")
        await server.stop()

    run(scenario())
