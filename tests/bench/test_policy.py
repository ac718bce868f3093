"""The policy benchmark: a whole run of a tiny policy, its goals, and what it refuses."""

from __future__ import annotations

import msgspec
import pytest

from phalanx.bench.policy import policy
from phalanx.bench.policy_geometry import Geometry, policy_checkpoint, tensor_shapes
from phalanx.bench.policy_goals import FULL, MASKED, goals
from phalanx.bench.policy_measuring import PolicyWorkload, measure_policies
from phalanx.bench.policy_phases import ALONE, TOGETHER, several_key
from phalanx.bench.policy_systems import PEERS
from phalanx.bench.results import Report, Sample
from phalanx.errors import ConfigurationError, MissingDependencyError

TINY = Geometry(
    vision_width=48,
    vision_inner_width=64,
    vision_num_layers=1,
    vision_num_heads=3,
    image_size=28,
    text_width=32,
    text_inner_width=48,
    expert_width=16,
    expert_inner_width=24,
    num_layers=2,
    head_dim=8,
    vocab_size=100,
    chunk_size=4,
    num_steps=2,
)


def test_a_run_measures_each_case_and_requests_together(tmp_path, capsys):
    workload = PolicyWorkload(TINY, "float32", 1, repeats=2, together=3, count=1)
    folder = measure_policies([], workload, tmp_path, tmp_path / "cache")
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    keys = (MASKED.key, FULL.key, several_key(ALONE), several_key(TOGETHER))
    for key in keys:
        values = report.values(key, "phalanx")
        assert len(values) == 2 and all(value > 0 for value in values)
    assert [goal.aim[:17] for goal in report.goals] == ["requests together"]
    assert {"report.md", "report.png"} <= {file.name for file in folder.iterdir()}
    assert "3 requests together" in capsys.readouterr().out


def test_the_checkpoint_is_written_once_and_is_the_same_for_the_same_sizes(tmp_path):
    first = policy_checkpoint(TINY, tmp_path / "a")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    assert policy_checkpoint(TINY, tmp_path / "a") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    again = policy_checkpoint(TINY, tmp_path / "b")
    assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()


def test_the_measured_model_has_the_sizes_that_it_is_said_to_have():
    shapes = dict(tensor_shapes(Geometry()))
    text = [name for name in shapes if "language_model.layers" in name and "gate_proj" in name]
    assert {shapes[name] for name in text} == {(4096, 1024)} and len(text) == 12
    expert = [name for name in shapes if "gemma_expert" in name and "gate_proj" in name]
    assert {shapes[name] for name in expert} == {(2048, 512)} and len(expert) == 12
    assert sum("mlp.fc1.weight" in name for name in shapes) == 12
    embedding = next(shape for name, shape in shapes.items() if "embed_tokens" in name)
    assert embedding == (32000, 1024)


def report_of(values: dict[tuple[str, str], list[float]]) -> Report:
    samples = [
        Sample(measure=measure, system=system, repeat=repeat, value=value)
        for (measure, system), each in values.items()
        for repeat, value in enumerate(each)
    ]
    return Report(
        name="policy", started="", context={}, systems={}, measures=(), samples=tuple(samples)
    )


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ({(MASKED.key, "phalanx"): [6.0], (MASKED.key, "lerobot"): [10.0]}, [True]),
        ({(MASKED.key, "phalanx"): [6.1], (MASKED.key, "lerobot"): [10.0]}, [False]),
        ({(FULL.key, "phalanx"): [9.5], (FULL.key, "lerobot"): [10.0]}, [True]),
        ({(FULL.key, "phalanx"): [9.6], (FULL.key, "lerobot"): [10.0]}, [False]),
        # The median of the rounds' shares counts, not that of the times.
        ({(FULL.key, "phalanx"): [1, 1, 90], (FULL.key, "lerobot"): [0.5, 2, 100]}, [True]),
        (
            {(several_key(TOGETHER), "phalanx"): [9.0], (several_key(ALONE), "phalanx"): [10.0]},
            [True],
        ),
        (
            {(several_key(TOGETHER), "phalanx"): [9.1], (several_key(ALONE), "phalanx"): [10.0]},
            [False],
        ),
        ({(MASKED.key, "phalanx"): [6.0]}, []),
    ],
)
def test_goals_are_held_against_the_shares(values, met):
    assert [goal.met for goal in goals(report_of(values))] == met


def test_what_is_unknown_or_not_installed_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDependencyError) as error:
        policy(against="lerobot")
    assert PEERS["lerobot"].install[0] in str(error.value)
    with pytest.raises(ConfigurationError, match="--against: 'openpi' is not known"):
        policy(against="openpi")
    with pytest.raises(ConfigurationError, match="--dtype 'int8'"):
        policy(dtype="int8")
    assert list(tmp_path.iterdir()) == []
