"""What a report says about the machine that it was made on."""

from __future__ import annotations

import platform
from pathlib import Path


def machine() -> str:
    """Number and model of its processors."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return model
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else model
