"""An engine over the published fakes, closed after each test."""

from __future__ import annotations

import signal
import threading

import pytest

from phalanx import DeviceConfig, Engine, EngineArgs, EngineConfig, RuntimeConfig
from phalanx.testing import Counting, CountingArgs, Echo, EchoArgs, ManualClock

Engine.register(Counting)
Engine.register(Echo)


class Gate:
    """Holds the loop at the start of each tick, until the test lets it pass."""

    def __init__(self) -> None:
        self._entered = threading.Semaphore(0)
        self._passes = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self) -> None:
        self._entered.release()
        if not self._open.is_set():
            self._passes.acquire()

    def await_tick(self) -> None:
        """Wait until the loop stands at the start of a tick."""
        self._entered.acquire()

    def let_pass(self) -> None:
        self._passes.release()

    def open(self) -> None:
        """Stop holding."""
        self._open.set()
        self._passes.release()


def cpu_config(**runtime):
    return EngineConfig(device=DeviceConfig("cpu", "float32"), runtime=RuntimeConfig(**runtime))


def executor_of(engine):
    """The one replica of an engine in this process."""
    return engine._startup.current._replicas[0]


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.open()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def build(gate, clock):
    """Builds engines that are closed at the end, whatever the test does."""
    engines = []

    def build(plugin="counting", plugin_args=None, *, before_tick=None, **runtime):
        if plugin_args is None:
            plugin_args = EchoArgs() if plugin == "echo" else CountingArgs(before_tick=before_tick)
        engine = Engine(EngineArgs(plugin, plugin_args, cpu_config(**runtime)), clock=clock)
        engines.append(engine)
        return engine

    yield build
    gate.open()
    for engine in engines:
        engine.close()


@pytest.fixture
def counting(build):
    return build()


@pytest.fixture
def gated(build, gate):
    """A counting engine whose ticks wait at the gate."""
    return build(before_tick=gate)


@pytest.fixture
def echo(build):
    return build("echo")


@pytest.fixture
def interrupt_when():
    """Interrupts the main thread as Ctrl-C does, as soon as the given wait returns."""
    handled = threading.Event()
    threads = []

    def handler(number, frame):
        if not handled.is_set():
            handled.set()
            raise KeyboardInterrupt

    def interrupt_when(wait):
        def interrupt():
            wait()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            # A signal just before a thread blocks is noticed only when it is sent again.
            while not handled.wait(0.05):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threads.append(threading.Thread(target=interrupt))
        threads[-1].start()

    before = signal.signal(signal.SIGINT, handler)
    yield interrupt_when
    for thread in threads:
        thread.join()
    signal.signal(signal.SIGINT, before)
