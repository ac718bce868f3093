"""What `import phalanx.distill` gives, and what it does not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

import phalanx.distill


def test_every_public_name_is_there():
    for name in phalanx.distill.__all__:
        assert getattr(phalanx.distill, name).__doc__ or name == "LoopEvent"


@pytest.mark.parametrize(
    "module", ["phalanx.distill", "phalanx.distill.stores.transfer_queue_store"]
)
def test_no_torch_is_loaded(module):
    code = f"import sys, {module}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]
