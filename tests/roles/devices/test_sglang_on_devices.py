"""SGLang's conformance server on a simulated device: it crashes for want of memory, as SGLang does."""

from __future__ import annotations

import pytest

from phalanx.device_ledger import DeviceLedger, SimulatedDevice
from phalanx.errors import SimulatedOutOfMemoryError
from phalanx.testing.sglang_scheduler import (
    SchedulerCrashedError,
    SchedulerOptions,
    SGLangScheduler,
)

OPTIONS = SchedulerOptions(weights_bytes=60, kv_cache_bytes=30)


@pytest.fixture
def devices(tmp_path):
    ledger = DeviceLedger.create(tmp_path / "devices", 1, 100)
    return [SimulatedDevice(ledger, 0, name) for name in ("rollout", "teacher")]


def held(device: SimulatedDevice) -> dict[str, int]:
    return {one.tag: one.num_bytes for one in device.ledger.held() if one.owner == device.owner}


def test_it_holds_what_it_has_not_released(devices):
    scheduler = SGLangScheduler(OPTIONS, list().append, devices[:1])
    assert held(devices[0]) == {"weights": 60, "kv_cache": 30}
    scheduler.release(["weights"])
    assert held(devices[0]) == {"kv_cache": 30}
    with pytest.raises(SimulatedOutOfMemoryError):
        SGLangScheduler(OPTIONS, list().append, devices[1:])
    devices[1].give("kv_cache")  # its process would have ended
    scheduler.resume(["weights"])
    assert held(devices[0]) == {"weights": 60, "kv_cache": 30}


def test_without_memory_saver_a_release_frees_nothing(devices):
    options = SchedulerOptions(memory_saver=False, weights_bytes=60, kv_cache_bytes=30)
    SGLangScheduler(options, list().append, devices[:1]).release(["weights", "kv_cache"])
    assert held(devices[0]) == {"weights": 60, "kv_cache": 30}


def test_a_resume_without_room_ends_its_process(devices):
    ended: list[str] = []
    scheduler = SGLangScheduler(OPTIONS, ended.append, devices[:1])
    scheduler.release(["weights"])
    with devices[1].holding("weights", 50), pytest.raises(SchedulerCrashedError):
        scheduler.resume(["weights"])
    assert "OutOfMemoryError" in ended[0] and "teacher" in ended[0]
