"""Builds the C++ operators once for this torch and this CPU, and keeps them in the cache folder.

One process builds while others wait for it and then use its file, which appears under its final name
whole (an atomic rename). Where files cannot be locked, each builds and the first one wins.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from phalanx import settings
from phalanx.errors import MissingDependencyError

logger = logging.getLogger(__name__)

MODULE = "phalanx_native"
SOURCES = Path(__file__).parent / "cpp"
FLAGS = (
    "-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno",
    "-fno-trapping-math", "-Wno-psabi", f"-DPHALANX_MODULE={MODULE}",
)  # fmt: skip
LIBRARIES = ("-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10")
_MACHINE_FLAGS = {
    "x86_64": ("-march=native", "-mprefer-vector-width=512"),
    "aarch64": ("-mcpu=native",),
}
_lock = threading.Lock()


def load_native_module() -> ModuleType:
    """The compiled operators, built first where no earlier run did.

    Raises `MissingDependencyError` where there is no compiler or it fails.
    """
    with _lock:
        return _load()


@cache
def _load() -> ModuleType:
    folder = settings.cache_dir() / "operators" / _key()
    library = folder / f"{MODULE}.so"
    if not library.exists():
        _build(folder)
    try:
        loader = importlib.machinery.ExtensionFileLoader(MODULE, str(library))
        spec = importlib.util.spec_from_loader(MODULE, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"the native operators in {library} cannot be loaded ({error}); delete the folder to "
            "build them again, or set native_operators='off'"
        ) from error
    return module


def _key() -> str:
    """Changes with whatever the machine code depends on."""
    digest = hashlib.sha256()
    for part in (torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"), *_flags(), _cpu()):
        digest.update(f"{part}\n".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _flags() -> tuple[str, ...]:
    return FLAGS + _MACHINE_FLAGS.get(platform.machine(), ())


def _cpu() -> str:
    """The CPU's features: code for this one may not run on another that shares the cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return features[0] if features else platform.machine()


def _build(folder: Path) -> None:
    try:
        # Imports setuptools, which an installation need not have; not needed once built.
        from torch.utils import cpp_extension
    except ImportError as error:
        raise MissingDependencyError(
            f"building the native operators needs setuptools ({error}); install it or set "
            "native_operators='off'"
        ) from error
    name = str(cpp_extension.get_cxx_compiler())  # type: ignore[no-untyped-call]
    compiler = shutil.which(name)
    if compiler is None:
        raise MissingDependencyError(
            f"no C++ compiler {name!r} was found to build the native operators; install one (for "
            "example g++) or set native_operators='off'"
        )
    includes = [f"-I{path}" for path in cpp_extension.include_paths("cpu")]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths("cpu")]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder.parent.with_suffix(".lock")):
        if (folder / f"{MODULE}.so").exists():
            return  # another process has built it meanwhile
        logger.info(
            "building the native operators with %s, once; this takes up to a minute", compiler
        )
        _build_with(compiler, includes, libraries, folder)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """No other process of this machine is inside; one that is killed is so no longer."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that builds the native operators")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # a file system without locks
            logger.info("%s cannot be locked (%s); others may build at the same time", path, error)
        yield
    finally:
        os.close(descriptor)


def _build_with(compiler: str, includes: list[str], libraries: list[str], folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as scratch:
        finished = Path(scratch) / "finished"
        finished.mkdir()
        objects = _compile([compiler, *_flags(), *includes], Path(scratch))
        _link([compiler, *libraries], objects, finished / f"{MODULE}.so")
        try:
            finished.rename(folder)
        except OSError:
            # Another process was faster, and what it built is the same.
            if not (folder / f"{MODULE}.so").exists():
                raise


def _compile(command: list[str], scratch: Path) -> list[Path]:
    """All sources at once; returns the object files."""
    command = [*command, f"-I{sysconfig.get_paths()['include']}", "-c"]
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [scratch / f"{source.stem}.o" for source in sources]
    compilations = [
        subprocess.Popen(
            [*command, str(source), "-o", str(target)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for source, target in zip(sources, objects, strict=True)
    ]
    outputs = [process.communicate()[0] for process in compilations]
    for process, output in zip(compilations, outputs, strict=True):
        _check(process.returncode, output)
    return objects


def _link(command: list[str], objects: list[Path], library: Path) -> None:
    linked = subprocess.run(
        [*command, "-shared", "-fopenmp", *map(str, objects), "-o", str(library), *LIBRARIES],
        capture_output=True,
        text=True,
    )
    _check(linked.returncode, linked.stdout + linked.stderr)


def _check(returncode: int, output: str) -> None:
    if returncode:
        raise MissingDependencyError(
            "the native operators could not be built; set native_operators='off' to do without "
            f"them. The compiler said:\n{output[-2000:]}"
        )
