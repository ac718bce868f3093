"""Running servers, and the example plugins installed from their own wheels."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import forked
from tests.forked import Forked

ROOT = Path(__file__).parents[2]
PHALANX = Path(sys.executable).with_name("phalanx")


@contextmanager
def running(arguments: list[str], environment: dict[str, str]) -> Iterator[str]:
    """`phalanx serve` on a free port until the context ends, by Ctrl-C; gives its URL."""
    command = ["serve", *arguments, "--port", "0"]
    process = Forked(forked.PHALANX, command, {"PHALANX_DEVICE": "cpu", **environment}, ROOT)
    try:
        ready = process.stdout.readline()
        if " at http://" not in ready:
            pytest.fail(f"{command} did not start: {process.ended()}")
        yield ready.strip().rpartition(" at ")[2]
    finally:
        process.send_signal(signal.SIGINT)
        ran = process.ended()
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.fixture(scope="session")
def plugins_installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the example plugins, installed from wheels built from their sources."""
    sources, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("installed")
    # Built from a copy: building leaves files beside the sources.
    copies = [
        shutil.copytree(plugin, sources / plugin.name)
        for plugin in sorted((ROOT / "examples").glob("plugin_*"))
    ]
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    options = ["--no-build-isolation", "--target", str(target)]
    subprocess.run([*install, *options, *map(str, copies)], check=True)
    return target


@pytest.fixture(scope="session")
def serve(plugins_installed: Path) -> Iterator[Callable[..., str]]:
    """Starts a server for the given arguments, or gives the URL of the one that is running."""
    urls: dict[tuple[str, ...], str] = {}
    with ExitStack() as servers:

        def start(*arguments: str) -> str:
            if arguments not in urls:
                environment = {"PYTHONPATH": str(plugins_installed), "PHALANX_NUM_THREADS": "1"}
                urls[arguments] = servers.enter_context(running(list(arguments), environment))
            return urls[arguments]

        yield start
