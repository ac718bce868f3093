"""Who owns what in a job: one class of gateway and one of manager for all roles, and neither does the
other's work.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path

from phalanx.gateway import gateway as gateway_module
from phalanx.gateway.roles.inference_gateway import InferenceGateway
from phalanx.roles import sglang_engine
from phalanx.roles.manager import InferenceManager
from phalanx.routing.roles.snapshot import ReplicaState
from phalanx.schema.roles import WorkloadType
from tests.gateway import whole
from tests.gateway.roles.control import hearing
from tests.roles.control.jobs import fake_job
from tests.roles.manager.case import case, run

GATEWAY = Path(gateway_module.__file__).parent
PRODUCT = GATEWAY.parent
ALL_ROLES = """
gateway: {http_port: 0, drain_timeout_s: 0.1}
roles:
  rollout: {models: {student: {model: m, replicas: 2, weight_source: local}}}
  genrm: {models: {judge: {model: m}}}
  teacher: {models: {big: {model: m}}}
"""


def constants(tree: ast.AST) -> set[str]:
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_i1_i4_a_running_job_has_one_class_of_gateway_and_one_of_manager_for_all_roles(tmp_path):
    async def scenario():
        async with fake_job(tmp_path, ALL_ROLES) as job:
            await job.process.start()
            control = job.process.control_url
            async with hearing() as heard, whole.running(roles=control) as gateway:
                for _ in WorkloadType:
                    await heard.of("following role")
                gateways = {each.role: each for each in gateway.roles}
                managers = {name: job.process.manager(name) for name in gateways}
                assert sorted(gateways) == sorted(WorkloadType)
                assert {type(each) for each in gateways.values()} == {InferenceGateway}
                assert {type(each) for each in managers.values()} == {InferenceManager}
                for name, manager in managers.items():
                    assert manager.spec.role == manager.spec.workload == name
                    told = await whole.asked(gateway, "GET", f"/{name}/engines")
                    assert told["topology_revision"] == manager.registry.snapshot.revision

    asyncio.run(scenario())
    assert InferenceGateway.__subclasses__() == []
    assert InferenceManager.__subclasses__() == []


def test_i8_the_gateway_has_no_lifecycle_code():
    """It starts no process, and asks no engine for anything that a manager asks of it."""
    control_paths = {
        text
        for text in constants(ast.parse(inspect.getsource(sglang_engine)))
        if text.startswith("/") and text[1:].isidentifier() and "health" not in text
    }
    assert {"/pause_generation", "/release_memory_occupation"} <= control_paths
    for path in GATEWAY.rglob("*.py"):
        tree = ast.parse(path.read_text())
        assert not {"subprocess", "multiprocessing"} & imported(tree), path
        assert not any(name.startswith("phalanx.roles") for name in imported(tree)), path
        assert not control_paths & constants(tree), path


def test_i8_a_manager_knows_its_own_role_alone_and_gives_phases_no_order():
    async def scenario():
        c = case()
        await c.manager.start()
        done = list(c.engine().log)
        for phase in ("train", "score", "no phase that anybody knows", None):
            c.manager.set_phase(phase)
            assert c.registry.snapshot.content.phase == phase
            assert c.state() is ReplicaState.READY
        assert c.engine().log == done, "a phase has made it ask an engine for something"
        await c.manager.shutdown()

    run(scenario)
    parameters = list(inspect.signature(InferenceManager).parameters)
    assert parameters == ["spec", "backends", "registry", "clock", "events"]


def test_i94_phases_and_operators_who_are_refused_in_them_are_all_who_move_a_role():
    """Nothing else calls these of a manager, and no actor of a cluster is asked for by a name."""
    callers, asked = set(), set()
    for path in sorted(PRODUCT.rglob("*.py")):
        where = path.relative_to(PRODUCT)
        if where.parts[0] not in ("bench", "testing"):
            text = path.read_text()
            calls = re.findall(r"(?:^|[ ._])manager\.(activate|drain|deactivate)\(", text)
            callers |= {(where.as_posix(), act) for act in calls}
            asked |= set(re.findall(r"\.(get_placement_group|get_actor|list_named_actors)\(", text))
    by_phases = {("roles/coordination/tenants.py", act) for act in ("activate", "deactivate")}
    by_operators = {("roles/control_app.py", act) for act in ("activate", "drain", "deactivate")}
    assert callers == by_phases | by_operators
    assert asked == {"get_placement_group"}
