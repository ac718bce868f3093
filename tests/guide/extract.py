"""The code blocks of the guide's copy, with nothing replaced but the package's name and, on a
machine without enough GPUs, the device."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).with_name("parallel_serving.md")
SECTION = re.compile(r"^## ([^\n]+)\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUM_DEVICES = 4
"""As many as the guide's local deployment names."""


def guide_blocks(num_gpus: int) -> dict[str, str]:
    """The code of each section by its title."""
    text = GUIDE.read_text(encoding="utf-8").replace("phyai", "phalanx")
    if num_gpus < NUM_DEVICES:
        # Its devices are CPU ordinals then.
        text = text.replace('target="cuda"', 'target="cpu"')
    return dict(SECTION.findall(text))
