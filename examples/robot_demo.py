"""A robot moves by a policy that is served twice, and one of its servers is killed: `make demo-robot`.

LeRobot's own client, unchanged and in an environment of its own, drives a robot that is not there
(examples/robot) at 30 Hz for 10 seconds through `phalanx gateway`. The exit status is 0 if the robot
kept moving.
"""

from __future__ import annotations

import itertools
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from phalanx.settings import child_environment

ROOT = Path(__file__).resolve().parents[1]
PHALANX = str(Path(sys.executable).with_name("phalanx"))
HOST = "127.0.0.1"
PEERS = ("lerobot06", "lerobot04")
FPS = 30
SECONDS = 10.0
STOP_S = 5.0
LONGEST_STOP_S = 1.0
"""A robot that does nothing for longer did not keep moving."""


def lerobots_python() -> str:
    """The interpreter of an environment with LeRobot, which is made where it is missing."""
    for peer in PEERS:
        start = time.monotonic()
        with subprocess.Popen(
            [sys.executable, ROOT / "scripts" / "peer_env.py", peer],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            while process.poll() is None:
                try:
                    process.wait(timeout=5.0)
                except subprocess.TimeoutExpired:
                    waited = time.monotonic() - start
                    print(f"making .venv-{peer} (minutes, once): {waited:.0f} s", flush=True)
            output, errors = process.communicate()
        if process.returncode == 0:
            print(f"LeRobot's client: .venv-{peer}")
            return output.strip()
        print(f"no .venv-{peer}: {errors.strip().splitlines()[-1]}")
    sys.exit("there is no environment with LeRobot's client; see above")


@contextmanager
def phalanx(*arguments: str, log: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running command of Phalanx and its first line, which says where it listens."""
    print("$ phalanx", " ".join(arguments), flush=True)
    environment = child_environment({"PHALANX_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"})
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [PHALANX, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        ) as process,
    ):
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                sys.exit(f"it did not start (status {process.wait()}); see {log}")
            yield process, line
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def found(pattern: str, line: str) -> str:
    match = re.search(pattern, line)
    assert match is not None, line
    return match[1]


def answer(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url) as response:
        return dict(json.load(response))


def wait_until_ready(url: str, count: int) -> None:
    """Until the gateway has found so many servers healthy."""
    pool = answer(f"{url}/v1/pool")
    while sum(server["healthy"] for server in pool["servers"]) < count:
        pool = answer(f"{url}/v1/pool?after={pool['revision']}&wait_s=10")


@dataclass
class Robot:
    """LeRobot's client and what the robot in it reported. `moves` are times."""

    process: subprocess.Popen[str]
    moves: list[float]
    num_observations: int = 0
    begun: threading.Event = field(default_factory=threading.Event)
    """Set by the first move, or by the client's end."""

    def read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            if event["event"] == "moved":
                self.moves.append(event["at_s"])
                self.begun.set()
            elif event["event"] == "observed":
                self.num_observations += 1
        self.begun.set()


@contextmanager
def client(python: str, address: str, folder: Path) -> Iterator[Robot]:
    """LeRobot's client as its documentation starts it; stopped as Ctrl-C would."""
    command = [python, "-m", "lerobot.async_inference.robot_client"]
    command += ["--config_path", str(ROOT / "examples" / "robot" / "client.yml")]
    command += [f"--server_address={address}", f"--robot.calibration_dir={folder}"]
    print("$ python", " ".join(command[1:]), flush=True)
    environment = child_environment({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    with (
        (folder / "client.log").open("w") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=folder,
            env=environment,
        ) as process,
    ):
        robot = Robot(process, [])
        reader = threading.Thread(target=robot.read)
        reader.start()
        try:
            yield robot
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                # It hangs where Ctrl-C comes while it is inside of gRPC.
                process.kill()
                process.wait()
            reader.join()


def wait_for_first_move(robot: Robot, log: Path) -> None:
    robot.begun.wait()
    if not robot.moves:
        sys.exit(f"LeRobot's client ended (status {robot.process.wait()}); see {log}")


def let_move(robot: Robot, seconds: float, log: Path) -> None:
    """Go on after so long, unless the client ends before."""
    try:
        status = robot.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return
    sys.exit(f"LeRobot's client ended (status {status}); see {log}")


def report(robot: Robot, view: dict[str, Any], killed_s: float) -> bool:
    """Print the table; whether the robot kept moving."""
    moves = [at for at in robot.moves if at <= robot.moves[0] + SECONDS]
    pauses = [later - earlier for earlier, later in itertools.pairwise(moves)]
    since_kill = [at for at in moves if at >= killed_s]
    latency = view["latency_ms"]
    dropped = view["num_replaced"] + view["num_outdated"] + view["num_failed"]
    table = Table(
        title=f"{SECONDS:g} s at {FPS} Hz, one of two servers killed in the middle",
        show_header=False,
        min_width=64,
    )
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("actions", str(len(moves)))
    table.add_row("achieved rate", f"{(len(moves) - 1) / (moves[-1] - moves[0]):.1f} Hz")
    table.add_row("longest pause between actions", f"{1000 * max(pauses):.0f} ms")
    table.add_row("actions after the kill", str(len(since_kill)))
    table.add_row("action latency (observation to actions) p50", f"{latency['p50']:.1f} ms")
    table.add_row("action latency p99", f"{latency['p99']:.1f} ms")
    table.add_row("observations sent", str(view["num_observations"]))
    table.add_row("  answered with a chunk", str(view["num_answered"]))
    table.add_row("  dropped", str(dropped))
    table.add_row("    made way for a newer one", str(view["num_replaced"]))
    table.add_row("    sent before the last chunk came", str(view["num_outdated"]))
    table.add_row("    failed", str(view["num_failed"]))
    Console().print(table)
    to_the_end = moves[-1] >= moves[0] + SECONDS - LONGEST_STOP_S
    return to_the_end and max(pauses) < LONGEST_STOP_S


def main() -> int:
    """Set up, move, kill, report."""
    python = lerobots_python()
    folder = Path(tempfile.mkdtemp(prefix="phalanx-robot-"))
    serve = ("serve", str(ROOT / "examples" / "pi05.yaml"), "--port", "0", "--http-port", "0")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(phalanx(*serve, log=folder / f"server-{number}.log"))
            for number in (1, 2)
        ]
        backends = []
        for _, line in servers:
            backends += ["--backend", "pi05", found(r"grpc://([^\s,;]+)", line)]
        listen = ("--gateway", f"{HOST}:0", "--http-port", "0", "--lerobot")
        _, line = stack.enter_context(
            phalanx("gateway", *listen, *backends, log=folder / "gateway.log")
        )
        url, address = found(r"(http://[^\s,]+)", line), found(r"gRPC at ([^\s,]+)", line)
        wait_until_ready(url, len(servers))
        print(f"The dashboard is at {url}", flush=True)
        with client(python, address, folder) as robot:
            log = folder / "client.log"
            wait_for_first_move(robot, log)
            let_move(robot, SECONDS / 2, log)
            print("Killing one of the two servers", flush=True)
            servers[0][0].kill()
            killed_s = time.monotonic()
            let_move(robot, SECONDS / 2, log)
            (view,) = answer(f"{url}/v1/robots")["robots"]
    kept_moving = report(robot, view, killed_s)
    print("The robot kept moving." if kept_moving else "The robot stopped.", f"Logs: {folder}")
    return 0 if kept_moving else 1


if __name__ == "__main__":
    sys.exit(main())
