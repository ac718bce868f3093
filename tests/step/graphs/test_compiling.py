"""A forward that cannot be compiled is computed as it is, which shows only in a call."""

from __future__ import annotations

import logging

import pytest

from phalanx.step.graphs.compiling import CompiledForward


class Unsupported(RuntimeError):
    """Stands for what a compiler raises."""


def test_a_forward_that_cannot_be_compiled_is_computed_as_it_is(caplog):
    tries = []

    def made(prepared):
        tries.append(prepared)
        raise Unsupported("no compiler")

    forward = CompiledForward(lambda prepared: prepared + 1, made, Unsupported)
    with caplog.at_level(logging.WARNING):
        assert [forward(1), forward(2)] == [2, 3]
    assert tries == [1]
    assert [record.getMessage() for record in caplog.records] == [
        "a forward is not compiled: no compiler"
    ]


def test_errors_of_a_compiled_forward_pass_through():
    fail = True

    def made(prepared):
        if fail:
            raise KeyError("of the model")
        return prepared * 2

    forward = CompiledForward(lambda prepared: prepared + 1, made, Unsupported)
    with pytest.raises(KeyError, match="of the model"):
        forward(1)
    fail = False
    assert forward(4) == 8, "as compiled"
