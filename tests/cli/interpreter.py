"""An interpreter of another environment, as far as its packages are asked for."""

from pathlib import Path


def write_interpreter(path: Path) -> None:
    """One that has every package, in version 0.3.2."""
    path.write_text("#!/bin/sh\necho 0.3.2\n")
    path.chmod(0o755)
