"""Runtimes with one peculiarity each, found by workers under this module's name."""

from __future__ import annotations

import os
import sys

from phalanx.engine.workers.messages import Finished
from phalanx.engine.workers.runtime import DuringRequestError, WorkerFactorySpec
from phalanx.schema.limits import Limits


def factory(name, config=None):
    """What a supervisor takes, to run `name` of this module in every worker."""
    return lambda placement: WorkerFactorySpec(f"{__name__}:{name}", config)


class Idle:
    """Serves nothing. `config` are facts for its metadata."""

    limits = Limits()
    statistics = None

    def __init__(self, config):
        self._config = config

    def metadata(self):
        return self._config or {}

    def serve(self, channel):
        while channel.receive() is not None:
            return

    def close(self):
        pass


class Printing(Idle):
    """Prints in each phase."""

    def __init__(self, config):
        super().__init__(config)
        print("out while loading")
        print("err while loading", file=sys.stderr)

    def close(self):
        print("out while stopping")


class Talkative(Idle):
    """Says much of each request before it fails."""

    def serve(self, channel):
        command, _ = channel.receive()
        for _ in range(200):
            channel.send(Finished(command.number))
        raise ValueError("these were my last words")


class FailingInRequests(Idle):
    """Says which request it failed in."""

    def serve(self, channel):
        command, _ = channel.receive()
        raise DuringRequestError(command.number, ValueError("as asked"))


def observing(config):
    """Tells what the process is like."""
    return Idle(
        {
            "has_torch": int("torch" in sys.modules),
            "stdin": os.readlink("/proc/self/fd/0"),
            "main": sys.modules["__main__"].__name__,
            "argv": " ".join(sys.argv),
            "cwd": os.getcwd(),
        }
    )


def environment_of_birth(config):
    """Tells what the kernel gave the process, and a flag that the interpreter took from it."""
    with open("/proc/self/environ") as file:
        pairs = dict(pair.split("=", 1) for pair in file.read().split("\0") if pair)
    return Idle(
        {
            "hash_randomization": sys.flags.hash_randomization,
            **{name: pairs.get(name, "") for name in config},
        }
    )


def long_error(config):
    raise ValueError("x" * 1_000_000 + "\udc80 the end")


def leaving(config):
    sys.exit("plugins may try this")


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def unprintable(config):
    raise Unprintable


def config_size(config):
    return Idle({"size": len(config)})


def threaded(config):
    """Leaves a thread behind that does not end with its runtime, nor with the interpreter."""
    import threading

    threading.Thread(target=threading.Event().wait).start()
    return Idle(config)
