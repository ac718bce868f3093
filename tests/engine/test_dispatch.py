"""Which replica a request goes to: the rule against a simple model, and its atomicity."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phalanx import DeploymentConfig, Engine, EngineArgs, EngineUnavailableError, RuntimeConfig
from phalanx.engine.dispatcher import RequestDispatcher
from phalanx.engine.replicas import ReplicaAccount, ReplicaChooser
from phalanx.engine.requests import RequestTable
from phalanx.engine.sinks import FutureSink
from phalanx.schema.events import Final
from phalanx.testing import Counting, ManualClock
from phalanx.testing.faulty import Action, Faulty, FaultyArgs, FaultyRequest

from .local_plugins import cpu

Engine.register(Faulty)
Engine.register(Counting)


class Recording:
    """A replica that notes what it is given and answers when told to."""

    entry = None
    limits = None
    loop_statistics = None

    def __init__(self, requests):
        self.requests = requests
        self.given = []

    def submit(self, live, request):
        self.requests.claim(live)
        self.given.append((live, request))

    def answer(self):
        live, request = self.given.pop(0)
        self.requests.end(live, Final(live.rid, request))

    def close(self):
        pass


@given(
    st.integers(1, 5),
    st.lists(st.one_of(st.just("submit"), st.integers(0, 4)), max_size=40),
    st.sets(st.integers(0, 4)),
)
def test_r4_r40_r41_the_least_loaded_healthy_replica_is_next_and_equals_take_turns(
    count, steps, unhealthy
):
    accounts = [ReplicaAccount(index, 0.0) for index in range(count)]
    for index in unhealthy:
        if index < count:
            accounts[index].healthy = False
    chooser = ReplicaChooser(accounts)
    loads, cursor = [0] * count, 0
    healthy = [index for index in range(count) if accounts[index].healthy]
    for step in steps:
        if step == "submit":
            chosen = chooser.choose()
            if not healthy:
                assert chosen is None
                continue
            least = min(loads[index] for index in healthy)
            # The first at or after the cursor, going around.
            expected = next(
                index
                for index in [*range(cursor, count), *range(cursor)]
                if index in healthy and loads[index] == least
            )
            assert chosen is accounts[expected]
            chosen.enter(0.0)
            loads[expected] += 1
            cursor = (expected + 1) % count
        elif step < count and loads[step]:
            accounts[step].leave(0.0)
            loads[step] -= 1


def test_r3_r4_a_request_goes_to_the_chosen_replica_and_only_there():
    requests = RequestTable(ManualClock(), RuntimeConfig(), 3)
    replicas = [Recording(requests) for _ in range(3)]
    dispatcher = RequestDispatcher(replicas, requests)
    sinks = [FutureSink() for _ in range(4)]
    for number, sink in enumerate(sinks):
        dispatcher.submit(f"r{number}", number, sink)
    assert [[request for _, request in replica.given] for replica in replicas] == [[0, 3], [1], [2]]
    replicas[1].answer()
    dispatcher.submit("r4", 4, FutureSink())
    assert [request for _, request in replicas[1].given] == [4]
    assert sinks[1].future.result() == 1


def test_choice_and_count_are_one_step_whoever_submits_at_once():
    requests = RequestTable(ManualClock(), RuntimeConfig(max_pending_requests=4000), 4)
    start = threading.Barrier(8)

    def submit(thread):
        start.wait()
        for number in range(250):
            requests.accept(f"{thread}-{number}", FutureSink())

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spread = Counter(live.account.replica for live in requests.live_requests())
    assert spread == {0: 500, 1: 500, 2: 500, 3: 500}


def test_all_replicas_get_operations_in_the_same_order():
    class Ordered(Recording):
        def __init__(self):
            self.order = []

        def control(self, op):
            self.order.append(op)
            answer = Future()
            answer.set_result(True)
            return answer

    replicas = [Ordered(), Ordered()]
    dispatcher = RequestDispatcher(replicas, RequestTable(ManualClock(), RuntimeConfig(), 2))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(
                target=lambda first=first: [
                    dispatcher.control(number) for number in range(first, first + 200)
                ]
            )
            for first in range(0, 1600, 200)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert replicas[0].order == replicas[1].order
    assert len(replicas[0].order) == 1600


def test_nothing_is_accepted_where_no_replica_is_healthy():
    requests = RequestTable(ManualClock(), RuntimeConfig(), 2)
    for account in requests._accounts:
        account.healthy = False
    with pytest.raises(EngineUnavailableError, match="no replica is healthy"):
        requests.accept("one", FutureSink())


def test_the_queue_is_bounded_over_all_replicas():
    requests = RequestTable(ManualClock(), RuntimeConfig(max_pending_requests=3), 2)
    for number in range(3):
        requests.accept(f"r{number}", FutureSink())
    with pytest.raises(EngineUnavailableError, match="max_pending_requests=3"):
        requests.accept("r3", FutureSink())


def test_busy_time_counts_while_something_is_in_flight():
    clock = ManualClock()
    requests = RequestTable(clock, RuntimeConfig(), 2)
    first = requests.accept("first", FutureSink())
    clock.advance(2.0)
    second = requests.accept("second", FutureSink())
    requests.claim(first)
    requests.end(first, Final("first", None))
    clock.advance(3.0)
    requests.claim(second)
    requests.end(second, Final("second", None))
    clock.advance(5.0)
    one, two = requests.statistics([None, None]).replicas
    assert (one.busy_s, two.busy_s) == (2.0, 3.0)
    assert (one.uptime_s, two.uptime_s) == (10.0, 10.0)


@pytest.mark.long
def test_r85_a_long_lived_engine_is_fed_continuously():
    with Engine(
        EngineArgs("faulty", FaultyArgs(), cpu()), deployment=DeploymentConfig.local()
    ) as engine:
        waiting = [engine.submit(FaultyRequest(number)) for number in range(4)]
        answers = []
        for number in range(4, 400):
            answers.append(waiting.pop(0).result().payload)
            waiting.append(engine.submit(FaultyRequest(number)))
        answers += [future.result().payload for future in waiting]
    assert answers == list(range(400))


MAIN = """
from phalanx import DeploymentConfig, DeviceConfig, Engine, EngineArgs, EngineConfig
from phalanx.testing.faulty import Faulty, FaultyArgs, FaultyRequest


@Engine.register
class InMain(Faulty):
    name = "in_main"


def main():
    args = EngineArgs("in_main", FaultyArgs(), EngineConfig(DeviceConfig("cpu", "float32")))
    with Engine(args, deployment=DeploymentConfig.local()) as engine:
        print(engine.step(FaultyRequest("from main")).payload)


"""


@pytest.mark.parametrize("guarded", [pytest.param(True, marks=pytest.mark.long), False])
def test_r34_workers_import_the_main_module_anew(guarded, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        MAIN + ('if __name__ == "__main__":\n    main()\n' if guarded else "main()\n")
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    if guarded:
        assert (ended.returncode, ended.stdout) == (0, "from main\n"), ended.stderr
    else:
        assert ended.returncode != 0
        assert '__name__ == "__main__"' in ended.stderr


def needs_cuda(count):
    return pytest.mark.skipif(
        torch.accelerator.device_count() < count,
        reason=f"needs {count} CUDA devices; torch sees {torch.accelerator.device_count()}",
    )


@needs_cuda(1)
def test_r57_r58_r59_tensors_on_a_device_travel_as_views_of_it():
    config = cpu().replace(device=cpu().device.__class__("cuda", "float32"))
    deployment = DeploymentConfig.local(devices=(0,))
    with Engine(EngineArgs("faulty", FaultyArgs(), config), deployment=deployment) as engine:
        sent = torch.arange(8.0, device="cuda:0")
        back = engine.step(FaultyRequest(sent)).payload
        assert back.device == sent.device and torch.equal(back.cpu(), sent.cpu())


@needs_cuda(2)
def test_r32_r54_each_worker_has_its_own_device():
    config = cpu().replace(device=cpu().device.__class__("cuda", "float32"))
    deployment = DeploymentConfig.local(devices=(0, 1), replica_count=2)
    with Engine(EngineArgs("faulty", FaultyArgs(), config), deployment=deployment) as engine:
        outputs = [
            engine.step(FaultyRequest(action=Action.BIG_TENSOR, num_elements=4)) for _ in range(2)
        ]
    assert len({output.pid for output in outputs}) == 2


@pytest.mark.long
def test_a_consumer_that_never_reads_holds_nobody_up():
    with Engine(
        EngineArgs("faulty", FaultyArgs(), cpu(max_pending_requests=5000)),
        deployment=DeploymentConfig.local(),
    ) as engine:
        unread = [engine.submit(FaultyRequest(bytes(5000))) for _ in range(2000)]
        assert engine.step(FaultyRequest("last")).payload == "last"
    assert all(len(future.result().payload) == 5000 for future in unread)


def test_a_claimed_request_that_is_withdrawn_fails_since_other_ranks_may_compute_it():
    requests = RequestTable(ManualClock(), RuntimeConfig())
    sinks = [FutureSink(), FutureSink()]
    lives = [requests.accept(name, sink) for name, sink in zip("ab", sinks, strict=True)]
    requests.claim(lives[0])
    for live in lives:
        requests.withdraw(live, EngineUnavailableError("closed"))
    assert isinstance(sinks[0].future.exception(), EngineUnavailableError)
    assert sinks[1].future.cancelled()
    statistics = requests.statistics([None])
    assert (statistics.num_failed, statistics.num_cancelled) == (1, 1)
