"""The process that runs a system under measurement, with a real child."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from phalanx.errors import RequestFailedError

START = {
    "model": "/models/tiny",
    "dtype": "float32",
    "threads": 1,
    "kv_tokens": 64,
    "max_length": 32,
    "max_concurrency": 2,
}
WORK = {"prompts": [[1, 2], [3, 4]], "max_new_tokens": 3, "concurrency": 2}


def test_commands_are_answered_whatever_the_system_prints(worker):
    assert worker.ask("start", **START, options={})["description"] == "fake of tiny"
    answer = worker.ask("generate", **WORK)
    assert answer["output_tokens"] == 6
    assert len(answer["first_s"]) == 2 and len(answer["gaps_s"]) == 4
    assert worker.ask("score", prompts=[[1, 2, 3]])["mean_logprob"] == -2.5
    assert worker.cpu_s() > 0


def test_a_failure_is_told_with_its_reason_and_the_next_command_runs(worker):
    worker.ask("start", **START, options={"fail": 1})
    with pytest.raises(RequestFailedError, match="ValueError: as asked"):
        worker.ask("generate", **WORK)
    assert worker.ask("score", prompts=[[1]])["tokens"] == 1


def test_a_command_before_the_start_is_refused(worker):
    with pytest.raises(RequestFailedError, match="before 'start'"):
        worker.ask("generate", **WORK)


def test_the_end_of_the_process_is_told(worker):
    worker.ask("start", **START, options={"die": 1})
    with pytest.raises(RequestFailedError, match="fake ended in 'generate'"):
        worker.ask("generate", **WORK)
    with pytest.raises(RequestFailedError, match="fake ended"):
        worker.ask("generate", **WORK)


@pytest.fixture
def child_pipe(tmp_path):
    """A named pipe that the worker's child keeps open as long as it lives, and its reading end."""
    path = tmp_path / "child"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, descriptor
    os.close(descriptor)


def wait_for_its_end(descriptor: int) -> None:
    os.set_blocking(descriptor, True)
    assert os.read(descriptor, 1) == b""


def test_closing_ends_the_children_too(worker, child_pipe):
    path, descriptor = child_pipe
    worker.ask("start", **START, options={"child": str(path)})
    with pytest.raises(BlockingIOError):
        os.read(descriptor, 1)
    worker.close()
    wait_for_its_end(descriptor)
    worker.close()


def test_ctrl_c_in_the_middle_of_a_command_ends_it_and_its_children(worker, tmp_path, child_pipe):
    """The command below never ends by itself."""
    fifo = tmp_path / "hanging"
    os.mkfifo(fifo)
    path, descriptor = child_pipe
    worker.ask("start", **START, options={"child": str(path), "hang": str(fifo)})

    def interrupt_once_it_hangs() -> None:
        fifo.read_text()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt_once_it_hangs)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        worker.ask("generate", **WORK)
    thread.join()
    worker.close()
    assert not fifo.exists()  # it could clean up
    wait_for_its_end(descriptor)
