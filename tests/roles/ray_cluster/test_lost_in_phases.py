"""A machine is lost while a job whose roles take turns is in each of its phases, and joins again."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phalanx.client import PhaseClient
from phalanx.device_ledger import DeviceLedger
from phalanx.errors import PhalanxError, RoleOperationFailedError
from phalanx.wire.phases import Holding
from tests.roles.control.whole_job import ENGINE, WholeJob, get, post, whole_job
from tests.roles.launching.specs import write_tiny_llama
from tests.roles.ray_cluster.clusters import Machines
from tests.roles.ray_cluster.running import actors_there, groups_there

pytestmark = pytest.mark.long
KEPT, LOST = "127.0.0.2", "127.0.0.3"
ASK = {"text": "a b", "sampling_params": {"max_new_tokens": 2, "temperature": 0}}


class Job:
    """A running one, its phases, and the machine that comes and goes."""

    def __init__(self, job: WholeJob, machines: Machines, logs: Path) -> None:
        self.whole = job
        self.gateway = job.ready()
        self.control = job.status()["control_url"]
        self.phases = PhaseClient(self.control)
        self._machines = machines
        self._logs = logs
        self._last = 0

    def event(self, *words: str) -> dict[str, Any]:
        """The next event that says all of this."""
        while True:
            answer = get(f"{self.control}/v1/events?after={self._last}&wait_s=20")
            for event in answer["events"]:
                self._last = event["number"]
                told = " ".join(map(str, event.values()))
                if all(each in told for each in words):
                    return event

    def lose_machine(self) -> None:
        self._machines.lose(LOST)

    def add_machine(self) -> None:
        self._machines.add(LOST, 4)

    def stopped(self) -> int:
        """Its exit status, after Ctrl-C."""
        self.whole.process.send_signal(signal.SIGINT)
        return self.whole.ended()

    def enter(self, phase: str, batch: str) -> None:
        """As soon as the cluster has put its devices together again."""
        while True:
            try:
                self.phases.enter(phase, batch)
                return
            except RoleOperationFailedError as error:
                assert "is lost" in str(error), error

    def answers(self, role: str) -> int:
        self.check()
        return post(f"{self.gateway}/{role}/generate", ASK)[0]

    def states(self, role: str) -> list[str]:
        shown = get(f"{self.control}/v1/roles/{role}")
        return [engine["state"] for engine in shown["models"]["m"]["engines"]]

    def trainers_ledger(self) -> Path:
        """That of the machine of the trainer's device."""
        told = self.whole.status()["trainer_environment"]["PHALANX_SIMULATED_DEVICES"]
        return Path(told.rpartition(":")[0])

    def check(self) -> None:
        """Nobody is resident with somebody else."""
        for ledger in self._logs.glob("devices-*"):
            owners: dict[int, set[str]] = {}
            for held in DeviceLedger(ledger).held():
                owners.setdefault(held.device, set()).add(held.owner)
            assert all(len(each) == 1 for each in owners.values()), owners
        holders = Counter(lease.bundle for lease in self.phases.phases().leases)
        assert set(holders.values()) == {1}


@pytest.fixture
def nodes() -> tuple[str, str]:
    """The trainer has the first one's device."""
    return KEPT, LOST


@pytest.fixture
def job(tmp_path, machines, cluster, nodes) -> Iterator[Job]:
    """Of two roles with a replica on each of two machines."""
    model = write_tiny_llama(tmp_path)
    engine_args = ENGINE.replace("device: cpu, ", "")
    role = (
        "{deployment: {health_interval_s: 0.5},"
        f" models: {{m: {{model: {model}, devices: 2, fault_tolerance: true,"
        f" engine_args: {engine_args}}}}}}}"
    )
    file = tmp_path / "job.yaml"
    file.write_text(
        f"placement: {{mode: defer, nodes: [{{name: {nodes[0]}, devices: 1}},"
        f" {{name: {nodes[1]}, devices: 1}}], device_memory_mib: 2, trainer_devices: 1}}\n"
        f"launcher: {{kind: ray, address: '{machines.address}', namespace: turns}}\n"
        "gateway: {http_port: 0}\n"
        "log: {directory: ./logs}\n"
        f"roles: {{rollout: {role}, teacher: {role}}}\n"
    )
    with whole_job(file, tmp_path / "cache") as whole:
        made = Job(whole, machines, tmp_path / "logs")
        try:
            yield made
        finally:
            made.phases.close()
    assert whole.process.returncode == 0, "".join(whole.lines)
    assert not groups_there() and not actors_there()


def test_a_machine_that_is_lost_in_each_phase_takes_what_ran_there_and_the_job_goes_on(job):
    job.phases.attach("t", pid=os.getpid())
    job.enter("rollout", "1")
    assert job.states("rollout") == ["ready", "ready"]

    job.lose_machine()
    job.event("m/1", "dead")
    assert job.states("rollout")[0] == "ready" and job.answers("rollout") == 200
    with pytest.raises(RoleOperationFailedError, match="is lost; have one of that address join"):
        job.phases.enter("teacher", "1")
    document = job.phases.phases()
    assert (document.phase, document.batch, document.blocked) == (None, "1", None)
    assert {lease.holder for lease in document.leases} == {None}
    assert job.answers("rollout") == 503
    job.add_machine()
    job.enter("teacher", "1")
    assert job.states("teacher") == ["ready", "ready"] and job.answers("teacher") == 200

    job.lose_machine()
    job.event("m/1", "dead")
    assert job.states("teacher")[0] == "ready" and job.answers("teacher") == 200
    # The trainer's devices are on the other machine.
    document = job.phases.enter("train", "1")
    assert document.trainer_holding is Holding.MEMORY
    job.add_machine()

    job.lose_machine()
    document = job.phases.phases()
    assert (document.phase, document.trainer_holding) == ("train", Holding.MEMORY)
    assert job.answers("rollout") == job.answers("teacher") == 503
    job.phases.release("t")
    job.add_machine()
    job.enter("rollout", "2")
    assert job.states("rollout") == ["ready", "ready"] and job.answers("rollout") == 200


@pytest.mark.parametrize("nodes", [(LOST, KEPT)])
def test_a_machine_that_is_lost_between_two_phases_leaves_nobody_there(job):
    job.enter("rollout", "1")
    before = job.trainers_ledger()
    answered: list[object] = []

    def enter() -> None:
        try:
            answered.append(job.phases.enter("teacher", "1").phase)
        except PhalanxError as error:
            answered.append(error)

    entering = threading.Thread(target=enter)
    entering.start()
    job.event("teacher", "has the lease")
    job.lose_machine()
    entering.join()
    (answer,) = answered
    assert isinstance(answer, RoleOperationFailedError), answer
    document = job.phases.phases()
    assert (document.phase, document.blocked) == (None, None)
    assert {lease.holder for lease in document.leases} == {None}
    job.add_machine()
    job.enter("teacher", "1")
    assert job.states("teacher") == ["ready", "ready"] and job.answers("teacher") == 200
    now = job.trainers_ledger()
    assert now != before
    assert {held.owner for held in DeviceLedger(now).held()} == {"teacher/m/0"}

    # Also without it the job ends as it should, and leaves nothing behind.
    job.lose_machine()
    assert job.stopped() == 0, "".join(job.whole.lines)
    assert not groups_there() and not actors_there()
    job.add_machine()
