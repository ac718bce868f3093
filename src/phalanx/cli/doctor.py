"""`phalanx doctor`: looks for what keeps models from being served here, and says what to do."""

from __future__ import annotations

import enum
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from phalanx import settings
from phalanx.cli.env import extras
from phalanx.errors import ConfigurationError
from phalanx.schema.server_config import HTTP_PORT, POLICY_PORT

SHARED_MEMORY = Path("/dev/shm")
MIN_SHARED_BYTES = 64 * 1024 * 1024


class Verdict(enum.StrEnum):
    """`note`: something does not work that is not always needed."""

    OK = "ok"
    NOTE = "note"
    FAULT = "fault"


class Finding(NamedTuple):
    """What was looked at, and what to do where it is not in order."""

    verdict: Verdict
    subject: str
    words: str


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(help="A server's file, or a job's, which is checked as by --check."),
    ] = None,
) -> None:
    """Check this machine, this installation and, where one is given, the file of a server or a job.

    Exits with 1 where something is at fault.
    """
    findings = [*examined()]
    if config is not None:
        findings += _configuration(config)
    for finding in findings:
        print(f"{finding.verdict:<5} {finding.subject}: {finding.words}")
    if any(finding.verdict is Verdict.FAULT for finding in findings):
        raise typer.Exit(1)


def examined() -> Iterable[Finding]:
    """The findings about machine and installation."""
    checks: tuple[Callable[[], Iterable[Finding]], ...] = (
        _packages,
        _devices,
        _compiler,
        _cache,
        _shared_memory,
        _variables,
        _ports,
    )
    for check in checks:
        yield from check()


def _packages() -> Iterable[Finding]:
    for extra, group in extras().items():
        absent = [name for name, installed in group if installed is None]
        subject = f"extra {extra}" if extra else "packages"
        if not absent:
            yield Finding(Verdict.OK, subject, f"{len(group)} packages are installed")
            continue
        verdict = Verdict.NOTE if extra else Verdict.FAULT
        target = f"'phalanx[{extra}]'" if extra else "phalanx"
        yield Finding(
            verdict, subject, f"{', '.join(absent)} not installed; run pip install {target}"
        )


def _devices() -> Iterable[Finding]:
    import torch

    from phalanx.device import device_names

    names = device_names()
    if names:
        yield Finding(Verdict.OK, "devices", ", ".join(names))
    elif torch.version.cuda is None:
        yield Finding(Verdict.NOTE, "devices", "the CPU; this build of torch has no CUDA")
    else:
        words = "the CPU; no CUDA device is visible: look at nvidia-smi and CUDA_VISIBLE_DEVICES"
        yield Finding(Verdict.NOTE, "devices", words)


def _compiler() -> Iterable[Finding]:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    if found is None:
        words = "none found; the native operators of a CPU are left out: install g++"
        yield Finding(Verdict.NOTE, "C++ compiler", words)
    else:
        yield Finding(Verdict.OK, "C++ compiler", found)


def _cache() -> Iterable[Finding]:
    directory = settings.cache_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        words = f"{directory} cannot be written ({error.strerror}); set PHALANX_CACHE_DIR"
        yield Finding(Verdict.FAULT, "cache", words)
    else:
        free = shutil.disk_usage(directory).free / 1e9
        yield Finding(Verdict.OK, "cache", f"{directory}, {free:.1f} GB free")


def _shared_memory() -> Iterable[Finding]:
    """Workers' tensors pass through it."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        yield Finding(Verdict.NOTE, "shared memory", f"{SHARED_MEMORY} is not there")
        return
    if free < MIN_SHARED_BYTES:
        words = (
            f"{free / 1e6:.0f} MB are free in {SHARED_MEMORY}, which replicas in workers need; "
            "give a container more, as with docker run --shm-size 1g"
        )
        yield Finding(Verdict.NOTE, "shared memory", words)
    else:
        yield Finding(Verdict.OK, "shared memory", f"{free / 1e9:.1f} GB free")


def _variables() -> Iterable[Finding]:
    from phalanx.engine_config import EngineConfig

    try:
        EngineConfig.from_env()
        settings.log_level()
    except ConfigurationError as error:
        yield Finding(Verdict.FAULT, "environment", str(error))
    else:
        given = ", ".join(settings.given()) or "no PHALANX_* variables"
        yield Finding(Verdict.OK, "environment", given)
    yield from _simulated_devices()


def _simulated_devices() -> Iterable[Finding]:
    """Nothing where none are set."""
    from phalanx.device_ledger import MIB, DeviceLedger

    subject = "simulated devices"
    try:
        devices = DeviceLedger.from_environment()
        memory = devices[0].ledger.devices() if devices else ()
    except ConfigurationError as error:
        yield Finding(Verdict.FAULT, subject, str(error))
        return
    if devices:
        told = ", ".join(
            f"{one.number} ({memory[one.number].held_bytes / MIB:.0f} of"
            f" {one.ledger.budget_bytes / MIB:.0f} MiB held)"
            for one in devices
        )
        words = f"{told} of {devices[0].ledger.path}, by PHALANX_SIMULATED_DEVICES"
        yield Finding(Verdict.NOTE, subject, words)


def _ports() -> Iterable[Finding]:
    for port, owner in ((HTTP_PORT, "language models"), (POLICY_PORT, "robot policies")):
        subject = f"port {port}"
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                words = f"{os.strerror(error.errno or 0)}; {owner} need --port with another one"
                yield Finding(Verdict.NOTE, subject, words)
            else:
                yield Finding(Verdict.OK, subject, f"free for {owner}")


def _configuration(path: Path) -> Iterable[Finding]:
    from phalanx.errors import InvalidInputError

    try:
        if _is_job(path):
            yield from _peers(path)
            words = _roles(path)
        else:
            words = f"serves {_plugin(path)}"
    except InvalidInputError as error:
        yield Finding(Verdict.FAULT, str(path), str(error))
    else:
        yield Finding(Verdict.OK, str(path), words)


def _is_job(path: Path) -> bool:
    """Whether it is a file of roles. One that cannot be read is told of by whoever reads it."""
    from phalanx.schema.yaml_text import parse_yaml

    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError):
        return False
    return isinstance(document, dict) and "roles" in document


def _peers(path: Path) -> Iterable[Finding]:
    """What a job starts of others' packages; one that it needs and has not is a fault of its file."""
    from phalanx.cli.peer_packages import peer_packages
    from phalanx.cli.up_plan import load_job

    for package in peer_packages(load_job(path)):
        version = package.version()
        if version is not None:
            yield Finding(Verdict.OK, package.name, f"{version}, in {package.where}")
        elif not package.needed:
            words = f"not in {package.where} (launcher.{package.key}); the job does not need it"
            yield Finding(Verdict.NOTE, package.name, words)


def _roles(path: Path) -> str:
    from phalanx.cli.up_plan import check_job, load_job

    job = load_job(path)
    check_job(job, str(path), deeply=True)
    return f"runs the roles {', '.join(role.role for role in job.roles)}"


def _plugin(path: Path) -> str:
    from phalanx.cli.serve import load_config
    from phalanx.cli.serve_plan import plan

    loaded, source = load_config(path, {})
    return plan(loaded, source, prepare=False).engine.plugin
