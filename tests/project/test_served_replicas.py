"""`phalanx serve` over several replicas and ranks, as processes: concurrency, load, and a death."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.project.conftest import PHALANX, ROOT

pytestmark = pytest.mark.long

MODEL = ("--model", "smollm2-135m", "--dtype", "float32", "--port", "0")
ENDLESS = {
    "text": "Once upon a time",
    "sampling_params": {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True},
    "stream": True,
}


@contextmanager
def serving(*flags: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server until the context ends, by Ctrl-C; gives its address and its process."""
    environment = {**os.environ, "PHALANX_DEVICE": "cpu", "PHALANX_NUM_THREADS": "1"}
    with subprocess.Popen(
        [PHALANX, "serve", *MODEL, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().strip()
            assert " at http://" in ready, process.communicate()
            yield ready.rpartition(" at ")[2], process
        finally:
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate()
    assert process.returncode == 0, errors


def ask(url: str, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request(method, path, None if body is None else json.dumps(body))
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, text


def replicas(url: str) -> list[dict]:
    _, text = ask(url, "GET", "/server_info")
    return json.loads(text)["internal_states"][0]["replicas"]


def worker_pids(parent: int) -> list[int]:
    """Children of any thread of a process, but for Python's tracker of resources."""
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for pid in (task / "children").read_text().split():
            if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
    return found


class Stream:
    """A request whose first event has come."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc)
        self._connection.request("POST", "/generate", json.dumps(ENDLESS))
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        assert self._answer.readline().startswith(b"data: ")

    def rest(self) -> list[bytes]:
        lines = [line for line in self._answer.read().splitlines() if line]
        self._connection.close()
        return lines


@pytest.fixture(scope="module")
def two_replicas() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its workers are there when it says that it is ready, whatever `auto_start` says."""
    with serving("--replicas", "2", "--set", "deployment.auto_start=false") as server:
        assert len(worker_pids(server[1].pid)) == 2
        yield server


def test_r75_r114_a_server_over_two_replicas_answers_concurrently(two_replicas):
    """Both streams have begun, neither has ended, and each is on a replica of its own."""
    url, _ = two_replicas
    streams = [Stream(url), Stream(url)]
    assert [one["num_in_flight"] for one in replicas(url)] == [1, 1]
    assert ask(url, "POST", "/abort_request", {"abort_all": True})[0] == 200
    for stream in streams:
        assert stream.rest()[-1] == b"data: [DONE]"
    after = replicas(url)
    assert [one["num_in_flight"] for one in after] == [0, 0]
    assert [sum(one["queue_time_counts"]) for one in after] == [1, 1]
    for one in after:
        assert one["busy_s"] > 0
        assert one["execution_time_s"] > 0
        assert one["request_bytes"] == one["max_request_bytes"] > 0
        assert one["response_bytes"] > 0


def test_what_a_server_can_take_is_that_of_all_replicas(two_replicas):
    url, _ = two_replicas
    info = json.loads(ask(url, "GET", "/server_info")[1])
    (load,) = json.loads(ask(url, "GET", "/v1/loads")[1])["loads"]
    assert (info["mode"], info["deployment"]["replica_count"]) == ("local", 2)
    assert info["max_running_requests"] == load["max_running_requests"] == 2 * 64
    assert info["max_total_num_tokens"] == load["max_total_num_tokens"] == 2 * 32768


def test_r114_top_shows_a_row_a_replica(two_replicas):
    url, _ = two_replicas
    done = subprocess.run([PHALANX, "top", url, "--once"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == ["0", "1", "all"]


def test_generate_over_two_ranks_says_the_same():
    done = subprocess.run(
        [PHALANX, "generate", "What is the capital of France?", "--dtype", "float32", "--tp", "2"],
        capture_output=True,
        text=True,
        env={**os.environ, "PHALANX_DEVICE": "cpu"},
    )
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n"), done.stderr


def test_r61_r64_a_killed_worker_makes_the_server_unhealthy_and_it_still_stops(two_replicas):
    """The last one that asks this server anything."""
    url, process = two_replicas
    workers = worker_pids(process.pid)
    assert len(workers) == 2
    stream = Stream(url)
    os.kill(workers[0], signal.SIGKILL)
    stream.rest()
    assert ask(url, "GET", "/health")[0] == 503
    status, text = ask(url, "POST", "/generate", {"text": "a"})
    assert status == 503, text
