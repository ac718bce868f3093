"""Serves a small language model on this machine and talks to it over HTTP: `make demo`.

Needs nothing beyond Phalanx itself; a client needs no more than the standard library.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

MODEL = "smollm2-135m"
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits.",
)


@contextmanager
def server(log_file: Path) -> Iterator[str]:
    """A running `phalanx serve` on a free port; gives its URL, stops it as Ctrl-C would."""
    command = [str(Path(sys.executable).with_name("phalanx")), "serve", "--model", MODEL]
    command += ["--port", "0", "--log-file", str(log_file)]
    print("$", " ".join(["phalanx", *command[1:]]), flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline().strip()
            if " at http" not in ready:
                sys.exit(f"the server did not start (status {process.wait()}); see {log_file}")
            print(ready)
            yield ready.rpartition(" at ")[2]
        finally:
            process.send_signal(signal.SIGINT)
            status = process.wait()
    print(f"\nThe server has drained and stopped (status {status}).")
    if status != 0:
        sys.exit(f"that is not 0; see {log_file}")


@contextmanager
def post(url: str, path: str, body: dict[str, Any]) -> Iterator[http.client.HTTPResponse]:
    """The answer to one POST of JSON, to be read while it comes."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            sys.exit(f"{path} answered {response.status}: {response.read().decode()}")
        yield response
    finally:
        connection.close()


def server_sent_events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each event until the stream says that it is done."""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)


def chat(url: str, question: str) -> None:
    """Stream one answer to the terminal, then say how fast it came."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": 96,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    print(f"\nuser: {question}\nassistant: ", end="", flush=True)
    start_s = time.perf_counter()
    first_s = 0.0
    num_tokens = 0
    with post(url, "/v1/chat/completions", body) as response:
        for event in server_sent_events(response):
            first_s = first_s or time.perf_counter() - start_s
            for choice in event["choices"]:
                print(choice["delta"].get("content") or "", end="", flush=True)
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    total_s = time.perf_counter() - start_s
    speed = (num_tokens - 1) / (total_s - first_s) if num_tokens > 1 else 0.0
    print(f"\n[{num_tokens} tokens, first after {first_s:.2f} s, then {speed:.0f} tokens/s]")


def score(url: str, text: str) -> None:
    """Continue `text` by SGLang's own route, with the probability of every token."""
    body = {
        "text": text,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8},
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
    }
    with post(url, "/generate", body) as response:
        answer = json.loads(response.read())
    meta = answer["meta_info"]
    print(f"\n/generate {text!r} -> {answer['text']!r}")
    for kind in ("input", "output"):
        scored = [
            f"{token!r} {logprob:.2f}"
            for logprob, _, token in meta[f"{kind}_token_logprobs"]
            if logprob is not None
        ]
        print(f"  {kind} logprobs: {', '.join(scored)}")


def main() -> None:
    """Start the server, ask, stop it."""
    log_file = Path(tempfile.mkdtemp(prefix="phalanx-demo-")) / "server.log"
    with server(log_file) as url:
        for question in QUESTIONS:
            chat(url, question)
        score(url, "The capital of France is")
    print(f"Its log: {log_file}")


if __name__ == "__main__":
    main()
