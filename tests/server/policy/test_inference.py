"""A policy server over gRPC: actions, statuses, health while the model is busy."""

from __future__ import annotations

import logging
import queue
import threading

import grpc
import numpy as np
import pytest

from phalanx.testing.policy import FakePolicyArgs, FakePolicyEntry, Gate, fake_actions
from tests.server.policy.running import logged, seen, serving

Code = grpc.StatusCode
ARGS = FakePolicyArgs()


@pytest.fixture(scope="module")
def client():
    with serving() as server, server.client() as client:
        yield client


def test_an_observation_becomes_actions(client):
    observation = seen("pick up the cube")
    answer = client.infer(observation, model="fake", request_id="robot-7/12")
    assert answer.request_id == "robot-7/12"
    assert answer.actions.values.dtype == np.float32
    assert np.array_equal(answer.actions.values, fake_actions(ARGS, observation)[0])
    assert answer.inference_time_us > 0


def test_batches_and_horizons(client):
    observation = seen(
        images={"front": np.zeros((2, 8, 6, 3), np.uint8)},
        state=np.ones((2, 4), np.float32),
        instructions=("a", "b"),
        batched=True,
        horizon=3,
    )
    actions = client.infer(observation).actions.values
    assert actions.shape == (2, 3, 3)
    assert np.array_equal(actions, fake_actions(ARGS, observation))


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("adapter-fail", Code.INTERNAL, "the policy failed; the log of its server tells why"),
        ("fail", Code.INTERNAL, "the policy failed; the log of its server tells why"),
        ("actions-fail", Code.INTERNAL, "the policy failed; the log of its server tells why"),
        ("nan", Code.INTERNAL, "the policy's actions are not finite: nan at index (1, 0)"),
        ("oom", Code.RESOURCE_EXHAUSTED, "ran out of memory"),
        ("actions-rows", Code.DATA_LOSS, "float32 of shape (horizon, action_dim) would answer"),
    ],
)
def test_a_failure_has_its_status_and_tells_nothing_of_the_inside(client, command, code, words):
    found, details = client.refused(seen(command))
    assert found is code
    assert words in details
    assert "secret" not in details
    assert client.healthy()


def test_a_failure_is_in_the_log_with_its_cause(client):
    with logged("phalanx.server.policy.service", logging.ERROR) as told:
        client.refused(seen("adapter-fail"))
        text = told.get().getMessage()
    assert "KeyError: 'secret: the adapter fails as it was told to'" in text


def test_a_refusal_is_in_the_log_in_words(client):
    with logged("phalanx.server.access", logging.INFO) as told:
        client.refused(seen(), model="pi0\n", request_id="a b")
        # An answer may be there before its line is, so that one of a test before may come first.
        messages = iter(lambda: told.get().getMessage(), None)
        line = next(message for message in messages if "id='a b'" in message)
    assert line.startswith("method=Infer id='a b' model='pi0\\n' status=NOT_FOUND duration_ms=")
    assert line.endswith("why=the model 'pi0\\n' is not served here; this server has 'fake'")


def test_another_model_is_not_found(client):
    code, details = client.refused(seen(), model="pi0")
    assert (code, details) == (
        Code.NOT_FOUND,
        "the model 'pi0' is not served here; this server has 'fake'",
    )
    with pytest.raises(grpc.RpcError, match="this server has 'fake'"):
        client.healthy("pi0")
    assert client.healthy("fake")
    assert client.healthy()


def test_r93_a_request_without_an_id_is_refused(client):
    code, details = client.refused(seen(), request_id="")
    assert code is Code.INVALID_ARGUMENT
    assert "request_id is missing" in details


@pytest.mark.parametrize("plugin", [None, FakePolicyEntry])
def test_health_is_told_while_the_model_computes(plugin):
    arrived: queue.Queue[str] = queue.Queue()
    gate = Gate(arrived.put)
    kind = {} if plugin is None else {"plugin": plugin}
    with serving(FakePolicyArgs(gate=gate), **kind) as server, server.client() as client:
        held = client.future(seen("hold"))
        assert arrived.get() == "hold"
        assert client.healthy()
        assert not held.done()
        gate.open()
        held.result()


def test_health_is_told_while_every_thread_of_the_adapter_is_busy():
    arrived: queue.Queue[str] = queue.Queue()
    gate = Gate(arrived.put)
    args = FakePolicyArgs(gate=gate)
    with serving(args, workers=1) as server, server.client() as client:
        held = [client.future(seen("adapter-hold"), request_id=name) for name in ("a", "b")]
        assert arrived.get() == "adapter-hold"
        assert client.healthy()
        gate.open()
        assert all(one.result() for one in held)


def test_health_is_told_while_the_servers_own_loop_does_something_else():
    entered, leave = threading.Event(), threading.Event()

    def be_busy() -> None:
        entered.set()
        leave.wait()

    with serving() as server, server.client() as client:
        server.in_its_loop(be_busy)
        entered.wait()
        try:
            waiting = client.future(seen())
            assert client.healthy()
            assert not waiting.done()
        finally:
            leave.set()
        waiting.result()


def test_requests_that_arrive_together_share_the_engine():
    """Each of them ends only when all are in the model at once."""
    with serving() as server, server.client() as client:
        futures = [client.future(seen("meet 3"), request_id=str(index)) for index in range(3)]
        for future in futures:
            future.result()
        assert server.engine.statistics().num_completed == 4  # the warm-up is one


def test_a_robot_that_cancels_ends_its_request_in_the_engine():
    arrived: queue.Queue[str] = queue.Queue()
    with serving(FakePolicyArgs(gate=Gate(arrived.put))) as server, server.client() as client:
        held = client.future(seen("hold"))
        assert arrived.get() == "hold"
        held.cancel()
        assert arrived.get() == "cancelled hold"
        assert client.infer(seen()).actions.values.shape == (5, 3)


def test_a_deadline_ends_the_request_in_the_engine():
    arrived: queue.Queue[str] = queue.Queue()
    with serving(FakePolicyArgs(gate=Gate(arrived.put))) as server, server.client() as client:
        code, _ = client.refused(seen("hold"), timeout=0.2)
        assert code is Code.DEADLINE_EXCEEDED
        assert arrived.get() == "hold"
        assert arrived.get() == "cancelled hold"


def test_a_broken_engine_is_unhealthy_for_good():
    with serving() as server, server.client() as client:
        assert client.healthy()
        code, details = client.refused(seen("break"))
        assert code is Code.UNAVAILABLE
        assert "secret" not in details
        assert not client.healthy()
        error = client.future(seen()).exception()
        assert error.code() is Code.UNAVAILABLE
        assert ("phalanx-not-started", "1") in error.trailing_metadata()


def test_a_full_server_says_that_the_request_never_started():
    arrived: queue.Queue[str] = queue.Queue()
    args = FakePolicyArgs(gate=Gate(arrived.put))
    with serving(args, runtime={"max_pending_requests": 1}) as server, server.client() as client:
        held = client.future(seen("hold"))
        assert arrived.get() == "hold"
        error = client.future(seen()).exception()
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "max_pending_requests=1" in error.details()
        assert ("phalanx-not-started", "1") in error.trailing_metadata()
        held.cancel()


def test_a_key_is_asked_for():
    with serving(api_key="k1") as server:
        with server.client() as client:
            code, details = client.refused(seen())
            assert code is Code.UNAUTHENTICATED
            assert "authorization: Bearer KEY" in details
            assert client.healthy()
        with server.client({"authorization": "Bearer k1"}) as client:
            client.infer(seen())
