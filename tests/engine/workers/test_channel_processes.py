"""The connection between real processes: large echoes, stopped and killed ends."""

from __future__ import annotations

import multiprocessing as mp
import os
import select
import signal

import numpy as np
import pytest
import torch

from phalanx.engine.workers.messages import Events, Place, Shutdown, Stopped
from tests.engine.workers.descriptors import num_memory_files
from tests.engine.workers.echo_process import add_up, be_killed, double, next_replies, replica


@pytest.fixture(scope="module")
def pair():
    with replica(2) as (link, processes):
        yield link, processes


def ours_in_shared_memory():
    return {name for name in os.listdir("/dev/shm") if name.startswith(("phalanx", "psm_"))}


def answers(channel, count):
    """The first `count` events, in order."""
    events = []
    while len(events) < count:
        for reply, more in next_replies(channel):
            assert isinstance(reply, Events)
            events += more
    return events


@pytest.mark.parametrize(
    ("num_bytes", "place"),
    [
        (1_000, Place.PACKET),
        (600_000, Place.ARENA),
        (8_000_000, Place.ARENA),
        (20_000_000, Place.FILE),
    ],
)
def test_a_spawned_worker_echoes(pair, num_bytes, place):
    link, _ = pair
    array = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    link.sender.submit(1, "a", {"x": array})
    for channel in link.channels:
        ((reply, ((_, arrived),)),) = next_replies(channel)
        assert reply.payload.place == place
        np.testing.assert_array_equal(arrived["x"], array)


def test_many_requests_of_all_sizes_come_back_whole_and_in_order(pair):
    link, _ = pair
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 256, int(10 ** rng.uniform(1, 6.3)), np.uint8) for _ in range(60)]
    for number, array in enumerate(arrays):
        link.sender.submit(number, "a", array)
    for channel in link.channels:
        for (number, arrived), (expected, array) in zip(
            answers(channel, len(arrays)), enumerate(arrays), strict=True
        ):
            assert number == expected
            np.testing.assert_array_equal(arrived, array)


def test_a_stopped_worker_delays_neither_submits_nor_its_sibling(pair):
    link, processes = pair
    stopped, running = link.channels
    os.kill(processes[0].pid, signal.SIGSTOP)
    try:
        for number in range(300):
            link.sender.submit(number, "a", bytes(2_000))
            assert answers(running, 1)[0][0] == number
        assert stopped.wants_write
    finally:
        os.kill(processes[0].pid, signal.SIGCONT)
    numbers = []
    while len(numbers) < 300:
        select.select([stopped], [stopped] if stopped.wants_write else [], [])
        stopped.flush()
        numbers += [number for _, events in stopped.receive_all() for number, _ in events]
    assert numbers == list(range(300))


@pytest.fixture(scope="module")
def doubling():
    """One worker, which loads torch, for all tensors."""
    with replica(1, double) as (link, _):
        yield link


@pytest.mark.parametrize("sharing", [False, True], ids=["copied", "shared"])
def test_r60_tensors_of_the_cpu_travel_through_shared_memory(doubling, sharing):
    tensor = torch.ones(500_000)
    if sharing:
        tensor.share_memory_()
    doubling.sender.submit(1, "a", tensor)
    ((_, ((_, doubled),)),) = next_replies(doubling.channels[0])
    assert doubled.sum() == 1_000_000
    assert tensor.sum() == (1_000_000 if sharing else 500_000)


def test_a_killed_worker_is_noticed_and_nothing_of_it_is_left():
    before = num_memory_files(), ours_in_shared_memory()
    with replica(1) as (link, (process,)):
        channel = link.channels[0]
        link.sender.submit(1, "a", np.zeros(3_000_000))
        answers(channel, 1)
        os.kill(process.pid, signal.SIGSTOP)
        link.sender.submit(2, "b", np.zeros(20_000_000))
        os.kill(process.pid, signal.SIGKILL)
        while not channel.ended:
            next_replies(channel)
        link.sender.submit(3, "c", np.zeros(20_000_000))
        assert not channel.wants_write
    del link, channel
    assert (num_memory_files(), ours_in_shared_memory()) == before


def test_a_worker_notices_that_its_parent_was_killed_and_nothing_is_left():
    before = ours_in_shared_memory()
    ours, theirs = mp.get_context("spawn").Pipe()
    with ours, theirs:
        parent = mp.get_context("spawn").Process(target=be_killed, args=(theirs,))
        parent.start()
        parent_pid, _worker_pid = ours.recv()
        theirs.close()
        os.kill(parent_pid, signal.SIGKILL)
        parent.join()
        used, left = ours.recv()
        parent.close()
    assert used == 3 and left == 0
    assert ours_in_shared_memory() == before


def test_an_orderly_end(pair):
    link, processes = pair
    for rank, channel in enumerate(link.channels):
        link.sender.send(Shutdown("end"), rank)
        assert next_replies(channel)[0][0] == Stopped()
        while not channel.ended:
            next_replies(channel)
        processes[rank].join()
        assert processes[rank].exitcode == 0


needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason=f"needs a CUDA device; there are {torch.cuda.device_count()}",
)


@needs_cuda
def test_r57_r59_tensors_on_a_device_travel_as_views_of_the_same_memory():
    tensor = torch.ones(1_000_000, device="cuda")
    torch.cuda.synchronize()
    with replica(1, double) as (link, _):
        link.sender.submit(1, "a", tensor)
        ((_, ((_, doubled),)),) = next_replies(link.channels[0])
        assert tensor[0] == 2
        assert doubled.device == tensor.device and doubled.sum() == 2_000_000
        del doubled


@needs_cuda
def test_every_rank_sees_a_tensor_on_a_device():
    tensor = torch.ones(1_000_000, device="cuda")
    torch.cuda.synchronize()
    with replica(2, add_up) as (link, _):
        for number in range(20):
            link.sender.submit(number, "a", tensor)
            for channel in link.channels:
                assert answers(channel, 1) == [(number, 1_000_000)]
