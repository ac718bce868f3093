"""What operators see of a job's phases: in its status, at the command line and on the gateway's page."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from phalanx.cli.phase_view import phase_lines
from phalanx.client import AsyncPhaseClient
from phalanx.errors import RoleOperationFailedError
from phalanx.testing.role_faults import Fault
from phalanx.wire.phases import Holding
from tests.gateway import whole
from tests.gateway.chromium import browser, chromium
from tests.roles.control.jobs import fake_job
from tests.roles.coordination.case import Phases, run
from tests.roles.coordination.test_over_http import FILE

TEXT = "document.body.innerText"


def lines(p: Phases) -> list[str]:
    return list(phase_lines(p.document, 1000.0))


def test_the_lines_say_where_a_job_is_and_who_has_what():
    async def scenario():
        p = Phases()
        assert lines(p) == ["phase: none (defer: rollout, genrm, teacher, train)"]
        p.attach()
        await p.enter("rollout", "7")
        assert lines(p) == [
            "phase: rollout of batch 7 (defer: [rollout], genrm, teacher, train)",
            "  rollout has the lease of n0:0, n0:1",
            "  trainer t holds nothing",
        ]
        entering = await p.amid("deactivate rollout", p.enter("genrm", "7"))
        assert lines(p)[1] == (
            "  to genrm for 0 s: the job waits until roles have finished, and have given their memory"
            " back"
        )
        await entering
        p.faults.next("deactivate genrm", [Fault.UNSENT])
        with pytest.raises(RoleOperationFailedError):
            await p.leave()
        assert lines(p)[1] == (
            "  genrm has the lease of n0:0, n0:1, and nobody is certain what it holds"
        )
        assert lines(p)[-1].startswith("  blocked: role 'genrm' perhaps holds memory")
        assert lines(p)[-1].endswith("`phalanx phase recover` finds out")

    run(scenario)


def test_many_devices_are_counted():
    document = Phases().document
    many = tuple(msgspec.structs.replace(document.leases[0], bundle=f"n:{n}") for n in range(9))
    held = [
        msgspec.structs.replace(lease, holder="rollout", holding=Holding.MEMORY) for lease in many
    ]
    shown = list(phase_lines(msgspec.structs.replace(document, leases=tuple(held)), 0.0))
    assert shown[1] == "  rollout has the lease of n:0, n:1, n:2, n:3, and 5 more"


def test_the_board_of_a_gateway_has_the_phases(tmp_path):
    async def scenario():
        async with fake_job(tmp_path, FILE) as job:
            await job.process.start()
            control = job.process.control_url
            async with AsyncPhaseClient(control) as phases, whole.running(roles=control) as gateway:
                await phases.enter("rollout", "7")
                while True:
                    board = await whole.asked(gateway, "GET", "/v1/roles")
                    if (board["phases"] or {}).get("phase") == "rollout":
                        break
                    await asyncio.sleep(0.01)
                assert board["phases"]["batch"] == "7"
                assert {lease["holder"] for lease in board["phases"]["leases"]} == {"rollout"}

    asyncio.run(scenario())


@pytest.mark.long
def test_the_page_shows_the_phase(tmp_path):
    program = chromium()
    if program is None:
        pytest.skip("there is no Chromium on this machine; apt-get install chromium")

    async def scenario():
        async with fake_job(tmp_path, FILE) as job:
            await job.process.start()
            control = job.process.control_url
            async with (
                AsyncPhaseClient(control) as phases,
                whole.running(roles=control) as gateway,
                browser(program, tmp_path / "profile") as page,
            ):
                await phases.enter("rollout", "7")
                await page.open(f"http://127.0.0.1:{gateway.http_port}/", 375, 812)
                await page.until(f"{TEXT}.includes('Phase rollout of batch 7')")
                await page.until(f"{TEXT}.includes('rollout has the lease of node-0:0, node-0:1')")

    asyncio.run(scenario())
