"""What holds for every test."""

from __future__ import annotations

import gc
import signal

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is no fault of a test: nothing here fails for having taken long.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Every file ends with a collection: to look for cycles after each 700 objects too only takes long.
gc.set_threshold(50_000, 20, 20)

TOGETHER = ("tests/examples_rl/", "tests/parallel/", "tests/project/", "tests/roles/ray_cluster/")
"""Folders whose files share processes that are slow to start: one worker runs them all."""

USES_TRANSFORMERS = (
    "tests/models",
    "tests/server/rl",
    "tests/distill",
    "tests/examples_rl",
    "tests/layers",
)
"""Folders of quick tests that load it, which takes seconds: one worker runs them all."""

ONLY_LONG = "pytestmark = pytest.mark.long"
"""What a file says of all its tests at once."""


def pytest_configure() -> None:
    # A shell that runs the tests in its background ignores Ctrl-C for them, which the commands that
    # they start would inherit: those could not be interrupted, as tests of them do.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    _keep_what_stays()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item, nextitem):
    result = yield
    if nextitem is None or nextitem.path != item.path:
        _keep_what_stays()
    return result


def _keep_what_stays() -> None:
    """What has come by the end of a file stays: no later collection need go through all of it.

    There are hundreds during the tests, since memory is collected when a model goes to sleep.
    """
    gc.collect()
    gc.freeze()


LONGEST = (
    "tests/roles/ray_cluster/",
    "tests/examples_rl/",
    "tests/project/",
    "tests/roles/control/",
    "tests/gateway/lerobot/",
    "tests/engine/test_local_faults.py",
    "tests/models/cosmos3/",
    "tests/roles/model_check/",
    "tests/roles/launching/test_manager_on_engines.py",
    "tests/distill/",
    "tests/roles/manager/",
    "tests/roles/test_soak.py",
)
"""What takes longest of `make test-long`. It begins with these: no worker is left alone with one."""

LARGEST = (
    "tests/models/",
    "tests/project/",
    "tests/server/",
    "tests/engine/",
    "tests/roles/",
    "tests/cli/",
    "tests/distill/",
    "tests/bench/",
    "tests/loop/",
)
"""What takes longest of `make check`, which begins with these for the same reason."""

ORDERS = {"long": LONGEST, "not long": LARGEST}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items) -> None:
    order = ORDERS.get(config.option.markexpr, ())
    # Within one place all stays as it is.
    items.sort(key=lambda item: _place(item.nodeid, order))


def _place(nodeid: str, order: tuple[str, ...]) -> int:
    return next((at for at, path in enumerate(order) if nodeid.startswith(path)), len(order))


def pytest_ignore_collect(collection_path, config):
    # A file of long tests alone is not imported where none of them is run.
    if config.option.markexpr == "not long" and collection_path.suffix == ".py":
        return True if ONLY_LONG in collection_path.read_text("utf-8").splitlines() else None
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder = file.rpartition("/")[0]
            if config.option.markexpr == "not long":
                # Quick tests are short beside the models that the files of a folder load once.
                return "transformers" if folder in USES_TRANSFORMERS else folder
            return next((one for one in TOGETHER if nodeid.startswith(one)), file)

    return Scheduling(config, log)
