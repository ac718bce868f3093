"""`phalanx gateway` as it is typed: what it takes, what it refuses, and how it ends."""

from __future__ import annotations

import http.server
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from phalanx.cli.gateway import joined_backends
from phalanx.cli.gateway import main as gateway_main
from phalanx.cli.main import main
from phalanx.gateway.config import GatewayConfig
from tests.certificates import needs_openssl, write_certificate

ROOT = Path(__file__).parents[2]
DOCUMENT = r"""
phalanx-gateway \
  --backend pi05 10.0.0.11:50063 \
  --backend pi05 10.0.0.11:50064 \
  --backend pi05 10.0.0.12:50063 \
  --backend pi05 10.0.0.12:50064
"""
"""As the data-parallel document shows it, but for the name of the program."""


def checked(capsys: pytest.CaptureFixture, *arguments: str) -> list[str]:
    """The lines of a command line that is fine."""
    with pytest.raises(SystemExit) as ended:
        main(["gateway", *arguments, "--check"])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out.splitlines()


def refused(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["gateway", *arguments, "--check"])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_r99_the_documents_command_line_is_taken_as_it_stands(capsys):
    program, *words = shlex.split(DOCUMENT.replace("\\\n", " "))
    assert program == "phalanx-gateway"
    with pytest.raises(SystemExit) as ended:
        gateway_main([*words, "--check"])
    assert ended.value.code in (0, None)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("pi05")] == [
        "pi05 at 10.0.0.11:50063",
        "pi05 at 10.0.0.11:50064",
        "pi05 at 10.0.0.12:50063",
        "pi05 at 10.0.0.12:50064",
    ]


def test_r99_the_program_is_installed_under_both_names():
    text = (ROOT / "pyproject.toml").read_text()
    assert 'phalanx-gateway = "phalanx.cli.gateway:main"' in text


@needs_openssl
def test_every_flag_reaches_the_configuration(capsys, tmp_path):
    write_certificate(tmp_path)
    words = (
        "--gateway 0.0.0.0:50111 --threads 32 --http-host 0.0.0.0 --http-port 30000"
        " --backend a http://[::1]:1 --http-model a --robot-model b --lerobot --lerobot-fps 50"
        " --lerobot-port 8080 --lerobot-port 8081@15 --lerobot-timeout-s 2 --api-key k --admin-key a --backend-key b"
        " --tls-cert cert.pem --tls-key key.pem --state-file pool.json --request-timeout-s 5"
        " --drain-timeout-s 1 --max-message-mib 10 --relay /x --http-health-path /alive"
        " --probe-interval-s 1 --probe-timeout-s 1 --lease-s 3 --log-level debug --log-json"
        " --access-log"
    ).split()
    words = [str(tmp_path / word) if word.endswith(".pem") else word for word in words]
    lines = checked(capsys, *words)
    assert lines == [
        "gRPC on 0.0.0.0:50111",
        "HTTP on 0.0.0.0:30000",
        "a at http://[::1]:1",
        "LeRobot at 50 actions a second, 8080, 8081 at 15",
        "servers kept in pool.json",
        "API and admin key",
    ]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--lerobot --backend pi05", "--backend pi05 --check' must be --backend MODEL ENDPOINT"),
        ("--backend pi05 --lerobot", "must be --backend MODEL ENDPOINT"),
        ("--backend=pi05", "give two values"),
        ("--backend pi05 nowhere", "--backend pi05 nowhere: endpoint 'nowhere' has no port"),
        ("--backend pi05 h:70000", "from 1 to 65535"),
        ("--gateway 50111", "--gateway '50111' must be HOST:PORT"),
        ("--http-port 70000", "--http-port 70000 must be from 0"),
        ("--threads 0", "--threads 0 must be from 1"),
        ("--lerobot-port 1", "--lerobot-port needs --lerobot"),
        ("--lerobot --lerobot-port 1 --lerobot-port 1", "give each port once"),
        ("--lerobot --lerobot-port 1@", "--lerobot-port '1@' must be PORT or PORT@FPS"),
        ("--lerobot --lerobot-port x", "--lerobot-port 'x' must be PORT or PORT@FPS"),
        ("--lerobot --lerobot-port 1@0", "--lerobot-port 1@FPS: FPS 0 must be from 0.001"),
        ("--lerobot-fps nan", "--lerobot-fps nan"),
        ("--lerobot-timeout-s 0", "--lerobot-timeout-s 0"),
        ("--request-timeout-s 0", "--request-timeout-s 0"),
        ("--tls-cert x.pem", "--tls-cert needs --tls-key"),
        ("--tls-cert no.pem --tls-key no.pem", "--tls-cert no.pem is not a file"),
        ("--follow http://h:1 --backend a h:1", "give --backend to that one"),
        ("--follow h", "--follow 'h' must be http://HOST:PORT"),
        ("--lease-s 0", "lease_s=0"),
        ("--probe-timeout-s -1", "probe_timeout_s=-1"),
        ("--http-model \n", "--http-model: model name"),
        ("--http-health-path alive", "--http-health-path 'alive' must be a path"),
        ("--relay v1", "--relay 'v1' must be a path"),
        ("--http-host 192.0.2.1", "--http-host='192.0.2.1': nothing can listen there"),
        ("--gateway 192.0.2.1:1", "--gateway='192.0.2.1': nothing can listen there"),
        ("--log-level loud", "--log-level 'loud'; allowed: DEBUG"),
        ("--api-key ä", "--api-key must be printable ASCII"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_flag(capsys, words, says):
    assert says in refused(capsys, *words.split(" "))


def test_keys_come_from_a_file_and_flags_win(capsys, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("api_key: k\n")
    assert checked(capsys, "--key-file", str(file))[-1] == checked(capsys, "--api-key", "k")[-1]
    file.write_text("api_key: ä\n")
    assert "printable ASCII" in refused(capsys, "--key-file", str(file))
    assert "API" in checked(capsys, "--key-file", str(file), "--api-key", "k")[-1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("api_kye: secret", "did you mean api_key?"),
        ("api_key: [secret]", "api_key: expected `str | null`"),
        ("secret", "must hold keys, as api_key: KEY"),
    ],
)
def test_a_wrong_file_of_keys_is_refused_without_telling_one(capsys, tmp_path, text, says):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    message = refused(capsys, "--key-file", str(file))
    assert says in message
    assert "secret" not in message
    assert "cannot read" in refused(capsys, "--key-file", str(tmp_path / "none.yaml"))


def test_help_names_every_flag(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        main(["gateway", "--help"])
    assert ended.value.code in (0, None)
    text = capsys.readouterr().out
    for flag in ("--backend", "--state-file", "--follow", "--lerobot-port", "--admin-key"):
        assert flag in text
    assert "MODEL ENDPOINT" in text


def test_words_after_two_dashes_are_left_alone():
    assert joined_backends(["--backend", "a", "b", "--", "--backend"])[-2:] == ["--", "--backend"]


@pytest.mark.parametrize(
    ("host", "open_"),
    [("127.0.0.1", ()), ("localhost", ()), ("::1", ()), ("0.0.0.0", ("0.0.0.0",))],
)
def test_listeners_of_this_machine_alone_are_told_from_others(host, open_):
    assert GatewayConfig(http_host=host).open_listeners == open_


class Running:
    """A gateway's process, which has said where it listens."""

    def __init__(self, *arguments: str) -> None:
        program = "from phalanx.cli.gateway import main; main()"
        ports = ("--gateway", "127.0.0.1:0", "--http-port", "0")
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *ports, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.url = re.search(r"http://[\d.:]+", self.line)[0]

    def ended(self) -> tuple[int, str]:
        _, error = self.process.communicate()
        return self.process.returncode, error


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_signal_ends_it_in_good_order(number, tmp_path):
    state = tmp_path / "pool.json"
    running = Running("--state-file", str(state), "--backend", "pi05", "127.0.0.1:1")
    try:
        with urllib.request.urlopen(f"{running.url}/health") as answer:
            assert json.load(answer) == {"status": "ok"}
        running.process.send_signal(number)
        status, error = running.ended()
    finally:
        running.process.kill()
    assert status == 0, error
    assert "Traceback" not in error
    assert json.loads(state.read_text())["servers"][0]["model_name"] == "pi05"


def test_an_open_listener_without_a_key_is_warned_of_and_a_port_in_use_is_named():
    first = Running("--http-host", "0.0.0.0")
    try:
        port = first.url.rpartition(":")[2]
        done = subprocess.run(
            [sys.executable, "-c", "from phalanx.cli.gateway import main; main()"]
            + ["--gateway", "127.0.0.1:0", "--http-port", port],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port} for HTTP" in done.stderr
        assert "Traceback" not in done.stderr
        first.process.terminate()
        _, error = first.ended()
    finally:
        first.process.kill()
    assert error.count("without a key") == 1


class HeldBackend:
    """An HTTP server whose answers to POST wait for `release`."""

    def __init__(self) -> None:
        self.arrived, self.release = threading.Event(), threading.Event()
        backend = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(204)
                self.end_headers()

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["content-length"]))
                backend.arrived.set()
                backend.release.wait()
                self.send_response(200)
                self.send_header("content-length", "4")
                self.end_headers()
                self.wfile.write(b"done")

            def log_message(self, *words: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def wait_until_ready(url: str) -> None:
    revision = 0
    while True:
        target = f"{url}/v1/pool?detail=0&after={revision}&wait_s=30"
        with urllib.request.urlopen(target) as answer:
            pool = json.load(answer)
        if all(server["state"] == "ready" for server in pool["servers"]):
            return
        revision = pool["revision"]


@pytest.mark.parametrize("patient", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_running_request_ends_before_the_gateway_does_unless_it_is_told_twice(patient):
    backend = HeldBackend()
    running = Running("--backend", "llm", backend.endpoint, "--drain-timeout-s", "600")
    try:
        wait_until_ready(running.url)
        with ThreadPoolExecutor(1) as caller:
            asked = caller.submit(urllib.request.urlopen, f"{running.url}/v1/x", b"{}")
            backend.arrived.wait()
            running.process.terminate()
            line = next(line for line in running.process.stderr if "stopping" in line)
            assert "600 s to end" in line
            with pytest.raises(OSError):
                while True:  # until it takes no more
                    urllib.request.urlopen(f"{running.url}/health").close()
            if patient:
                backend.release.set()
                with asked.result() as answer:
                    assert answer.read() == b"done"
            else:
                running.process.terminate()
                with pytest.raises(OSError):
                    asked.result()
        status, error = running.ended()
    finally:
        backend.close()
        running.process.kill()
    assert status == 0, error


LOADED = """
import asyncio, sys
import uvloop
from phalanx.gateway.config import GatewayConfig
from tests.certificates import needs_openssl, write_certificate
from phalanx.gateway.gateway import Gateway
from tests.certificates import needs_openssl, write_certificate
import phalanx.cli.gateway, phalanx.gateway.main

async def main():
    gateway = Gateway(GatewayConfig(grpc_address="127.0.0.1:0", http_port=0, lerobot=True))
    await gateway.start()
    await gateway.close(0.0)

uvloop.run(main())
heavy = {"torch", "transformers", "starlette", "uvicorn", "phalanx.engine", "phalanx.models", "lerobot"}
print(*(heavy & set(sys.modules)))
"""


def test_the_gateways_process_loads_no_torch():
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
