"""The benchmark of Cosmos3: whole runs of a tiny one, its goals, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

from phalanx.bench.cosmos3 import cosmos3
from phalanx.bench.cosmos3_cases import ON_DEVICE, POLICY, VIDEO, Case
from phalanx.bench.cosmos3_device import DeviceWorkload, measure_device
from phalanx.bench.cosmos3_geometry import Geometry, cosmos3_checkpoint, layer_shapes
from phalanx.bench.cosmos3_goals import goals
from phalanx.bench.cosmos3_measuring import Cosmos3Workload, measure_cosmos3
from phalanx.bench.cosmos3_phases import compared, time_key, work_key
from phalanx.bench.cosmos3_systems import PEERS, PHALANX
from phalanx.bench.results import Report, Sample
from phalanx.bench.running_system import RunningSystem
from phalanx.errors import ConfigurationError, MissingDependencyError, RequestFailedError

PEER = Path(__file__).parents[2] / ".venv-diffusers" / "bin" / "python"
TINY = Geometry(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    intermediate_size=48,
    vocab_size=64,
    action_dim=12,
)
SMALL = {"frames": 5, "height": 64, "width": 64, "prompt_tokens": 8, "negative_tokens": 4}
TINY_POLICY = dataclasses.replace(POLICY, **SMALL, action_rows=4)
TINY_VIDEO = dataclasses.replace(VIDEO, **SMALL)


def run_of(tmp_path, *cases: Case, peers=(), two_ranks=False) -> Report:
    workload = Cosmos3Workload(TINY, cases, "float32", 1, repeats=2, two_ranks=two_ranks)
    folder = measure_cosmos3(peers, workload, tmp_path, tmp_path / "cache")
    assert {"report.md", "report.png"} <= {file.name for file in folder.iterdir()}
    return msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)


def test_a_run_measures_each_round_of_a_case(tmp_path, capsys):
    report = run_of(tmp_path, TINY_POLICY)
    for key in (time_key(POLICY), work_key(POLICY)):
        values = report.values(key, "phalanx")
        assert len(values) == 2 and all(value > 0 for value in values)
    assert report.values("policy_memory", "phalanx")[0] > 50
    assert report.goals == ()
    assert "16 actions and 17 frames" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.skipif(
    not PEER.exists(), reason="no diffusers: run `python scripts/peer_env.py diffusers`"
)
def test_diffusers_itself_answers_alike(tmp_path):
    report = run_of(tmp_path, TINY_POLICY, TINY_VIDEO, peers=[(PEERS["diffusers"], PEER)])
    for case in (POLICY, VIDEO):
        assert len(report.values(time_key(case), "diffusers")) == 2
        difference = report.context[f"latents differ from diffusers's by, {case.label}"]
        assert float(difference.partition(" ")[0]) < 1e-3
    assert len(report.goals) == 2


@pytest.mark.long
def test_two_ranks_answer_alike_and_are_held_against_one(tmp_path):
    report = run_of(tmp_path, TINY_VIDEO, two_ranks=True)
    assert [goal.aim for goal in report.goals] == [
        "33 frames on two ranks in at most 0.6 of one rank's time"
    ]
    difference = report.context["latents differ from phalanx-cfg2's by, 33 frames"]
    assert float(difference.partition(" ")[0]) < 1e-5


def test_a_step_on_a_device_is_a_share_of_its_matrix_rate(tmp_path):
    """On a CPU, which can try everything but the size."""
    case = dataclasses.replace(ON_DEVICE, **SMALL, action_rows=4)
    workload = DeviceWorkload(TINY, case, "cpu", repeats=1)
    folder = measure_device(workload, tmp_path, tmp_path / "cache")
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=Report)
    (step,), (rate,), (share,) = (
        report.values(key, "phalanx") for key in ("step", "rate", "share")
    )
    assert rate > 0
    flops = float(report.context["operations of a step"].removesuffix(" TFLOP"))
    assert flops == 0.0 and share * step > 0


def test_the_checkpoint_is_written_once_and_is_the_same_for_the_same_sizes(tmp_path):
    first = cosmos3_checkpoint(TINY, "float32", tmp_path / "a")
    stamp = (first / "transformer" / "config.json").stat().st_mtime_ns
    assert cosmos3_checkpoint(TINY, "float32", tmp_path / "a") == first
    assert (first / "transformer" / "config.json").stat().st_mtime_ns == stamp
    again = cosmos3_checkpoint(TINY, "float32", tmp_path / "b")
    files = [path.relative_to(first) for path in first.rglob("*.safetensors")]
    assert len(files) == 1 + 2 + 1
    for file in files:
        assert (again / file).read_bytes() == (first / file).read_bytes()
    scheduler = json.loads((first / "scheduler" / "scheduler_config.json").read_text())
    assert (scheduler["use_karras_sigmas"], scheduler["flow_shift"]) == (False, 5.0)
    assert cosmos3_checkpoint(TINY, "bfloat16", tmp_path / "a") != first


def test_the_measured_model_has_the_published_proportions():
    geometry = Geometry()
    shapes = dict(layer_shapes("0", geometry))
    assert shapes["0.mlp_moe_gen.up_proj.weight"] == (2304, 768)
    nano = Geometry.nano()
    assert geometry.intermediate_size / geometry.hidden_size == (
        nano.intermediate_size / nano.hidden_size
    )
    assert geometry.head_dim == nano.head_dim


class Says:
    """A worker that answers with these latents."""

    def __init__(self, *values: float) -> None:
        self._values = values

    def ask(self, kind, **message):
        return {"video": list(self._values), "actions": []}


def test_systems_that_answer_otherwise_are_not_compared():
    def running(*values: float):
        return RunningSystem(PHALANX, Says(*values), "")

    first = running(1.0, 2.0)
    (words,) = compared(POLICY, "float32", [first, running(1.0, 2.001)]).values()
    assert words == "1.0e-03 at most, 4.5e-04 of their size"
    for wrong in (2.01, float("nan")):
        with pytest.raises(RequestFailedError, match="they do not compute the same"):
            compared(POLICY, "float32", [first, running(1.0, wrong)])


def report_of(values: dict[tuple[str, str], list[float]]) -> Report:
    samples = [
        Sample(measure=measure, system=system, repeat=repeat, value=value)
        for (measure, system), each in values.items()
        for repeat, value in enumerate(each)
    ]
    return Report(
        name="cosmos3", started="", context={}, systems={}, measures=(), samples=tuple(samples)
    )


TIME = time_key(VIDEO)


@pytest.mark.parametrize(
    ("values", "met"),
    [
        ({(TIME, "phalanx"): [7.5], (TIME, "diffusers"): [10.0]}, [True]),
        ({(TIME, "phalanx"): [7.6], (TIME, "diffusers"): [10.0]}, [False]),
        ({(TIME, "phalanx"): [10.0], (TIME, "phalanx-cfg2"): [6.0]}, [True]),
        ({(TIME, "phalanx"): [10.0], (TIME, "phalanx-cfg2"): [6.1]}, [False]),
        # The median of the rounds' shares counts, not that of the times.
        ({(TIME, "phalanx"): [1, 1, 90], (TIME, "diffusers"): [0.5, 2, 180]}, [True]),
        ({(TIME, "phalanx"): [1.0]}, []),
    ],
)
def test_goals_are_held_against_the_shares(values, met):
    assert [goal.met for goal in goals(report_of(values))] == met


def test_what_is_unknown_or_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDependencyError) as error:
        cosmos3(against="diffusers")
    assert PEERS["diffusers"].install[0] in str(error.value)
    for flags, message in (
        ({"against": "vllm"}, "--against: 'vllm' is not known"),
        ({"dtype": "int8"}, "--dtype 'int8'"),
        ({"only": "audio"}, "--only: 'audio' is not known"),
        ({"device": "tpu"}, "--device 'tpu': give cuda"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            cosmos3(**flags)
    assert list(tmp_path.iterdir()) == []
