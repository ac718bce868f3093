"""Which operators the factory gives."""

from __future__ import annotations

import pytest
import torch

from phalanx.device.operators import create_operators
from phalanx.errors import ConfigurationError


@pytest.mark.parametrize(
    ("choice", "device_type", "dtype", "name"),
    [
        ("off", "cpu", torch.float32, "torch"),
        ("auto", "cpu", torch.bfloat16, "native"),
        ("required", "cpu", torch.float32, "native"),
        ("auto", "cpu", torch.float16, "torch"),
        ("auto", "cuda", torch.bfloat16, "torch"),
    ],
)
def test_choice(choice, device_type, dtype, name):
    assert create_operators(choice, device_type, dtype).name == name


@pytest.mark.parametrize(
    ("choice", "device_type", "dtype", "named"),
    [
        ("sometimes", "cpu", torch.float32, "auto, off, required"),
        ("required", "cuda", torch.float32, "'cuda'"),
        ("required", "cpu", torch.float16, "torch.float16"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(choice, device_type, dtype, named):
    with pytest.raises(ConfigurationError, match=named):
        create_operators(choice, device_type, dtype)
