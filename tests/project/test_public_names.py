"""What `import phalanx` offers, and what it must not cost."""

from __future__ import annotations

import subprocess
import sys

import pytest

import phalanx

HEAVY = {
    "torch",
    "numpy",
    "transformers",
    "starlette",
    "uvicorn",
    "httpx",
    "requests",
    "http.client",
}


@pytest.mark.parametrize("name", phalanx.__all__)
def test_a_public_name_resolves(name):
    assert getattr(phalanx, name) is not None
    assert name in dir(phalanx)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        phalanx.Engin  # noqa: B018


def test_importing_loads_neither_torch_nor_http():
    program = f"import sys, phalanx; print(*({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
