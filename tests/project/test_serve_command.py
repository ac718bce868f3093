"""`phalanx serve` and `phalanx generate` as processes: how they start, are refused, and stop."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from phalanx.checkpoints import checkpoint_dir
from tests import forked
from tests.forked import Forked, Ran
from tests.project.conftest import PHALANX, ROOT, running

REACH = "examples/plugin_reach/serve.yaml"


def refused(*arguments: str) -> str:
    done = subprocess.run(
        [PHALANX, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PHALANX_DEVICE": "cpu"},
    )
    return the_line(Ran(done.returncode, done.stdout, done.stderr))


def the_line(ran: Ran) -> str:
    """What a command that ends with code 2 says on stderr, log lines left out."""
    assert ran.returncode == 2, ran.stderr
    assert ran.stdout == ""
    (line,) = [line for line in ran.stderr.splitlines() if " INFO " not in line]
    return line


@pytest.fixture
def truncated(tmp_path: Path) -> Path:
    """The packaged model with the end of its weights missing."""
    whole = checkpoint_dir("smollm2-135m")
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    with (whole / "model.safetensors").open("rb") as file:
        (tmp_path / "model.safetensors").write_bytes(file.read(100_000))
    return tmp_path


def test_a_port_in_use_is_one_line(plugins_installed):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = {"PYTHONPATH": str(plugins_installed), "PHALANX_DEVICE": "cpu"}
        ran = Forked(forked.PHALANX, ["serve", REACH, "--port", port], environment, ROOT).ended()
    line = the_line(ran)
    assert port in line
    assert "in use" in line


@pytest.mark.long
def test_a_truncated_checkpoint_is_one_line(truncated):
    line = refused("serve", "--model", str(truncated), "--port", "0")
    assert f"{truncated}/model.safetensors is damaged or incomplete" in line


def test_flags_reach_the_server_and_its_log(plugins_installed, tmp_path):
    log_file = tmp_path / "server.log"
    flags = ["--api-key", "secret-1", "--log-json", "--log-file", str(log_file)]
    with running([REACH, *flags], {"PYTHONPATH": str(plugins_installed)}) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        statuses = {}
        for key in ("wrong", "secret-1"):
            headers = {"Authorization": f"Bearer {key}"}
            connection.request("GET", "/server_info", headers=headers)
            answer = connection.getresponse()
            statuses[key] = (answer.status, answer.read().decode())
        connection.close()
    assert statuses["wrong"][0] == 401
    assert statuses["secret-1"][0] == 200
    assert "secret-1" not in statuses["secret-1"][1]
    text = log_file.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert {"time", "level", "logger", "message"} <= set(lines[0])
    assert any("/server_info" in line["message"] for line in lines)
    assert "secret-1" not in text


@pytest.mark.long
def test_ctrl_c_lets_a_running_request_end():
    """The answer is asked for, its stream has begun, and then the server is told to stop."""
    arguments = ["--model", "smollm2-135m", "--dtype", "float32"]
    body = {
        "text": "Once upon a time",
        "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True},
        "stream": True,
    }
    command = [PHALANX, "serve", *arguments, "--port", "0"]
    environment = {**os.environ, "PHALANX_DEVICE": "cpu"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip().rpartition(" at ")[2]
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        connection.request("POST", "/generate", json.dumps(body))
        answer = connection.getresponse()
        first = answer.readline()
        assert first.startswith(b"data: ")
        process.send_signal(signal.SIGINT)
        events = [line for line in answer.read().splitlines() if line]
        connection.close()
        process.communicate()
    assert process.returncode == 0
    assert events[-1] == b"data: [DONE]"
    last = json.loads(events[-2].removeprefix(b"data: "))
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 24}


def test_generate_streams_the_answer_and_says_how_fast():
    done = subprocess.run(
        [PHALANX, "generate", "What is the capital of France?", "--dtype", "float32"],
        capture_output=True,
        text=True,
        env={**os.environ, "PHALANX_DEVICE": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
    assert "37 prompt tokens, 8 generated" in done.stderr
    assert "tokens/s" in done.stderr


@pytest.mark.long
def test_generate_raw_from_standard_input():
    done = subprocess.run(
        [PHALANX, "generate", "-", "--raw", "--no-stream", "--max-new-tokens", "2"],
        input="The capital of France is",
        capture_output=True,
        text=True,
        env={**os.environ, "PHALANX_DEVICE": "cpu"},
    )
    assert (done.returncode, done.stdout) == (0, " Paris.\n"), done.stderr
