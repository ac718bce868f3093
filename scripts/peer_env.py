"""Makes the environments of real peers that the long tests run against, beside the project's own.

python scripts/peer_env.py router      makes .venv-router with sglang-router
python scripts/peer_env.py openpi      makes .venv-openpi with openpi-client
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS = {"router": ["sglang-router==0.3.2"], "openpi": ["openpi-client==0.1.2"]}


def make(name: str) -> Path:
    """The interpreter of the peer's environment, which is made where it is missing."""
    directory = ROOT / f".venv-{name}"
    python = directory / "bin" / "python"
    stamp = directory / ".installed"
    wanted = "\n".join(PEERS[name])
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    venv.create(directory, with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *PEERS[name]], check=True)
    stamp.write_text(wanted)
    return python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=sorted(PEERS))
    sys.stdout.write(f"{make(parser.parse_args().peer)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
