"""A student, a judge and a teacher behind one gateway: `make demo-roles`.

Starts examples/roles.yaml with `phalanx up`, asks each role, puts the judge to sleep and wakes it,
scales the student, gives it new weights, and stops everything. The exit status is 0 if all of it
went as it should.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
PHALANX = str(Path(sys.executable).with_name("phalanx"))
NAME = "demo"
NOT_NOW = 503
JUDGED = [
    {
        "role": "user",
        "content": "Is this answer right? Question: what is 2+2? Answer: 4. Say yes or no.",
    }
]


@contextmanager
def job() -> Iterator[str]:
    """The running roles; gives the gateway's address, and stops all of it at the end."""
    command = ["up", "examples/roles.yaml", "--name", NAME, "--set", "gateway.http_port=0"]
    print("$ phalanx", " ".join(command), flush=True)
    with subprocess.Popen(
        [PHALANX, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        url = ""
        try:
            for line in process.stdout:
                print(" ", line, end="", flush=True)
                if f"{NAME} is up" in line:
                    url = line.partition("status page ")[2].partition("/,")[0]
                    break
            if not url:
                sys.exit(f"it did not start (status {process.wait()})")
            yield url
        finally:
            if process.poll() is None and command_about_the_job("down").returncode != 0:
                process.send_signal(signal.SIGINT)
            print("".join(f"  {line}" for line in process.stdout), end="")
            status = process.wait()
    if status != 0:
        sys.exit(f"phalanx up ended with status {status}")


def command_about_the_job(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    print("\n$ phalanx", " ".join([*arguments, "--name", NAME]), flush=True)
    return subprocess.run([PHALANX, *arguments, "--name", NAME], cwd=ROOT, check=False)


def phalanx(*arguments: str) -> float:
    """Run a command about the job; how long it took, in seconds."""
    start_s = time.perf_counter()
    done = command_about_the_job(*arguments)
    if done.returncode != 0:
        sys.exit(f"it ended with status {done.returncode}")
    return time.perf_counter() - start_s


def get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url) as answer:
        return dict(json.load(answer))


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return dict(json.load(answer))


def engines(url: str, role: str) -> list[dict[str, Any]]:
    """What discovery says of a role's replicas."""
    models = get(f"{url}/{role}/engines")["models"]
    return [engine for model in models.values() for engine in model["engines"]]


def resident_mb(url: str, role: str) -> float:
    """How much memory the role's processes hold, as their servers say."""
    return sum(
        get(f"{engine['base_url']}/server_info")["memory"]["rss_bytes"] / 1e6
        for engine in engines(url, role)
    )


def chat(url: str) -> None:
    question = "What is the capital of France?"
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}
    answer = post(f"{url}/rollout/v1/chat/completions", body)
    print(f"\n/rollout  {question} -> {answer['choices'][0]['message']['content']}")


def judge(url: str) -> str:
    verdict = str(post(f"{url}/genrm/generate", {"messages": JUDGED})["response"])
    print(f"/genrm    messages -> {verdict!r}")
    return verdict


def teach(url: str) -> None:
    body = {
        "text": "The capital of France is Paris.",
        "route_key": "math",
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
    }
    scored = post(f"{url}/teacher/generate", body)["meta_info"]["input_token_logprobs"]
    shown = ", ".join(f"{text!r} {value:.2f}" for value, _, text in scored if value is not None)
    print(f"/teacher  logprobs -> {shown}")


def refused(url: str) -> None:
    """Ask the judge, who sleeps: nothing wakes it."""
    try:
        post(f"{url}/genrm/generate", {"messages": JUDGED})
    except urllib.error.HTTPError as error:
        with error:
            told = json.load(error)
            print(f"/genrm    {error.code}, Retry-After {error.headers['Retry-After']}:", end=" ")
            print(told["error"]["message"])
            if error.code == NOT_NOW and told["state"] == "sleeping":
                return
    sys.exit("the judge sleeps, and should have said so")


def sleep_and_wake(url: str) -> Table:
    """The judge's memory before, asleep and after."""
    before_mb, verdict = resident_mb(url, "genrm"), judge(url)
    sleep_s = phalanx("sleep", "genrm")
    asleep_mb = resident_mb(url, "genrm")
    refused(url)
    wake_s = phalanx("wake", "genrm")
    after_mb = resident_mb(url, "genrm")
    if judge(url) != verdict:
        sys.exit("the judge says something else than before it slept")
    if asleep_mb > before_mb / 2:
        sys.exit(f"the judge holds {asleep_mb:.0f} MB asleep, of {before_mb:.0f}")
    table = Table(title="the judge's process", title_justify="left", title_style="bold")
    for column in ("", "before", "asleep", "after"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("memory", *(f"{mb:.0f} MB" for mb in (before_mb, asleep_mb, after_mb)))
    table.add_row("took", "", f"{sleep_s:.1f} s", f"{wake_s:.1f} s")
    return table


def scale(url: str) -> None:
    """Two students share eight requests; then one is enough again."""
    phalanx("scale", "rollout/student", "2")
    body = {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 16}}
    with ThreadPoolExecutor(8) as callers:
        answers = list(callers.map(lambda _: post(f"{url}/rollout/generate", body), range(8)))
    ready = [engine["engine_id"] for engine in engines(url, "rollout")]
    print(f"/rollout  {len(answers)} requests at once, by {' and '.join(ready)}")
    phalanx("scale", "rollout/student", "1")


def renew(url: str) -> None:
    """New weights while the student serves."""
    phalanx("weights", "rollout/student", "smollm2-135m", "--version", "2")
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 1}}
    version = post(f"{url}/rollout/generate", body)["meta_info"]["weight_version"]
    print(f"/rollout  answers with weights {version}")
    if version != "2":
        sys.exit("that is not the version that it was given")


def main() -> None:
    """Start, ask, sleep, wake, scale, renew, stop."""
    start_s = time.perf_counter()
    with job() as url:
        chat(url)
        teach(url)
        table = sleep_and_wake(url)
        scale(url)
        renew(url)
        phalanx("status")
    print()
    Console().print(table)
    print(f"All of it took {time.perf_counter() - start_s:.0f} s.")


if __name__ == "__main__":
    main()
