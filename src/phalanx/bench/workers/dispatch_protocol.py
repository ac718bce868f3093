"""What every transport of the dispatch benchmark is asked: observations out, actions back."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from command_loop import Message, answer_commands  # type: ignore[import-not-found]

IMAGE_SHAPE = (224, 224, 3)
Observation = dict[str, Any]
Action = npt.NDArray[np.float32]
P = TypeVar("P")


def answer(observation: Observation) -> Action:
    """The trivial work at the other end: an action that begins as the state does."""
    return np.full(observation["reply_elements"], observation["state"][0], np.float32)


class Transport(Protocol[P]):
    """A way to one or several worker processes and back, used by one thread."""

    def submit(self, observation: Observation) -> P:
        """Send; returns by what `result` knows it."""
        ...

    def result(self, pending: P) -> Action:
        """Wait for the action."""
        ...

    def describe(self) -> str: ...
    def close(self) -> None: ...


def serve(open_transport: Callable[[Message], Transport[P]]) -> None:
    """Answer commands from standard input until it ends.

    `start` says how many `workers`, and a `scratch` folder that is cleaned afterwards. The others
    describe an observation by `num_images`, `state_elements` and `reply_elements`.
    """
    answer_commands(open_transport, {"check": _check, "round_trips": _round_trips})


def observe(message: Message) -> Observation:
    """An observation of that size; its images are noise."""
    noise = np.random.default_rng(0)
    return {
        "images": [
            noise.integers(0, 256, IMAGE_SHAPE, np.uint8) for _ in range(message["num_images"])
        ],
        "state": noise.standard_normal(message["state_elements"], np.float32),
        "reply_elements": message["reply_elements"],
    }


def _check(transport: Transport[P], message: Message) -> Message:
    """Different observations get their own answers, with all of them in flight."""
    observation = observe(message)
    pending = []
    for number in range(message["count"]):
        state = observation["state"].copy()
        state[0] = number
        pending.append(transport.submit({**observation, "state": state}))
    for number, each in enumerate(pending):
        action = transport.result(each)
        if action.shape != (message["reply_elements"],) or not bool((action == number).all()):
            raise AssertionError(f"observation {number} was answered with {action!r}")
    return {}


def _round_trips(transport: Transport[P], message: Message) -> Message:
    """A closed loop of one caller: with `in_flight` on their way it waits for the oldest one.

    A time is that from before `submit` to after `result`.
    """
    observation, in_flight = observe(message), message["in_flight"]
    clock = time.perf_counter
    pending: deque[tuple[float, P]] = deque()
    times_s = []

    def take() -> None:
        sent_s, oldest = pending.popleft()
        transport.result(oldest)
        times_s.append(clock() - sent_s)

    began_s = clock()
    for _ in range(message["count"]):
        if len(pending) == in_flight:
            take()
        sent_s = clock()
        pending.append((sent_s, transport.submit(observation)))
    while pending:
        take()
    return {"seconds": clock() - began_s, "times_s": times_s}
