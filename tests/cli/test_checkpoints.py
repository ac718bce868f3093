"""Names of models: found by entry point, prepared in the cache, told apart from directories."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from phalanx.checkpoints import check_checkpoint, checkpoint_dir, checkpoint_names
from phalanx.cli.checkpoint_progress import prepared_checkpoint
from phalanx.errors import ConfigurationError

SOURCE = """
def make(cache_dir, progress):
    target = cache_dir / "tiny"
    if not target.is_dir():
        progress(0, 2_000_000)
        target.mkdir(parents=True)
        progress(2_000_000, 2_000_000)
    return target
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> Path:
    """An installed package with the model `tiny-model`; gives the cache that it fills."""
    installed, cache = tmp_path / "installed", tmp_path / "cache"
    facts = installed / "tiny_source-1.0.dist-info"
    facts.mkdir(parents=True)
    (installed / "tiny_source.py").write_text(SOURCE)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-source\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        "[phalanx.checkpoints]\ntiny-model = tiny_source:make\n"
    )
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(cache))
    monkeypatch.chdir(tmp_path)
    importlib.invalidate_caches()
    return cache


def test_a_name_of_another_package_is_prepared_once(tiny):
    assert "tiny-model" in checkpoint_names()
    seen: list[tuple[int, int]] = []
    check_checkpoint("tiny-model")
    assert not tiny.exists()
    for _ in range(2):
        assert checkpoint_dir("tiny-model", lambda *step: seen.append(step)) == tiny / "tiny"
    assert seen == [(0, 2_000_000), (2_000_000, 2_000_000)]


def test_an_existing_directory_wins_over_a_name(tiny, tmp_path):
    (tmp_path / "tiny-model").mkdir()
    assert checkpoint_dir("tiny-model") == Path("tiny-model")
    assert not tiny.exists()


@pytest.mark.parametrize("model", [".", "inner/..", "inner/../."])
def test_the_current_directory_has_its_name(tiny, tmp_path, model):
    (tmp_path / "inner").mkdir()
    assert checkpoint_dir(model).name == tmp_path.name


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("tiny-modle", "did you mean 'tiny-model'?"),
        ("pi05", "A directory beside the configuration file is ./pi05 there"),
        ("./tiny-model", "model directory './tiny-model' does not exist"),
        ("Some/Model-0.6B", "`hf download Some/Model-0.6B --local-dir Model-0.6B` makes"),
        ("installed/tiny_source.py", "is a file; give the directory that holds it"),
    ],
)
def test_what_is_neither_is_refused(tiny, model, message):
    with pytest.raises(ConfigurationError) as caught:
        checkpoint_dir(model)
    assert message in str(caught.value)


def test_a_bar_shows_only_while_there_is_work(tiny, capsys):
    prepared_checkpoint("tiny-model")
    out, err = capsys.readouterr()
    assert out == ""
    assert "Preparing tiny-model (once)" in err
    assert "2.0/2.0 MB" in err
    prepared_checkpoint("tiny-model")
    assert capsys.readouterr() == ("", "")
