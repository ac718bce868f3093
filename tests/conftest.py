"""What holds for every test."""

from __future__ import annotations

import gc
import signal

from hypothesis import HealthCheck, settings

# A busy machine is no fault of a test: nothing here fails for having taken long.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_configure() -> None:
    # A shell that runs the tests in its background ignores Ctrl-C for them, which the commands that
    # they start would inherit: those could not be interrupted, as tests of them do.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    # What is imported by now stays: a collection during a test need not go through all of it.
    gc.collect()
    gc.freeze()
