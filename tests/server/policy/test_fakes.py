"""The fake policies keep the contracts that real ones have."""

from __future__ import annotations

import numpy as np

from phalanx.plugin import PolicyAdapter
from phalanx.testing import check_batching_entry
from phalanx.testing.policy import FakePolicy, FakePolicyArgs, FakePolicyRequest, fake_actions
from tests.server.policy.running import seen


def test_the_fake_policy_keeps_the_contract_of_a_batching_entry():
    def loaded() -> FakePolicy:
        entry = FakePolicy()
        entry.setup(FakePolicyArgs())
        return entry

    requests = [FakePolicyRequest(np.zeros(1), f"ticks {number}") for number in (4, 2, 1)]
    check_batching_entry(loaded, requests)


def test_its_adapter_is_what_a_server_takes_and_its_actions_are_known():
    args = FakePolicyArgs()
    adapter: PolicyAdapter = FakePolicy.policy(args, {})
    observation = seen(horizon=2)
    request = adapter.request(observation)
    entry = FakePolicy()
    entry.setup(args)
    entry.start("a", request)
    final = entry.tick()[-1]
    actions = adapter.actions(final.payload, observation)
    assert np.array_equal(actions.values, fake_actions(args, observation)[0])
    assert actions.values.shape == (2, 3)
