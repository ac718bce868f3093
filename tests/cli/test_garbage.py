"""A process of ours does not look for garbage in what it has imported."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from phalanx import settings


def test_what_is_imported_is_not_looked_through():
    assert gc.isenabled()
    before = gc.get_freeze_count()
    made = []
    with settings.importing():
        assert not gc.isenabled()
        made.append([])
    assert gc.isenabled()
    assert gc.get_freeze_count() > before
    assert not any(one is made[0] for one in gc.get_objects())


def test_collections_go_on_after_an_import_that_failed():
    with pytest.raises(ImportError), settings.importing():
        raise ImportError
    assert gc.isenabled()


def test_who_collects_by_himself_still_does():
    gc.disable()
    try:
        with settings.importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_command_ends_without_looking():
    program = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0));"
        "from phalanx.cli.main import main; main(['version'])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout.splitlines()[1:] == ["True"], ended.stderr
