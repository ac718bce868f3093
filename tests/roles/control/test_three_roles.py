"""A whole job of all three roles, started where the environment is full of what belongs to others: real
gateway, real control process, real engines.
"""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.roles.control.test_mixed_job import SHIM
from tests.roles.control.whole_job import ENGINE, WholeJob, get, post, whole_job
from tests.roles.launching.specs import write_tiny_llama

pytestmark = pytest.mark.long

POISON = {
    "PHALANX_PARAMS_DTYPE": "float16",
    "PHALANX_SEED": "7",
    "SGLANG_SPECULATIVE_ALGORITHM": "EAGLE",
    "SGLANG_MOE_DENSE_TP_SIZE": "1",
    "HF_TOKEN": "hf_secret",
    "NCCL_CUMEM_ENABLE": "1",
    "RAY_ADDRESS": "auto",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "10.0.0.1",
}
ROLLOUT = """
  rollout:
    deployment: {{health_interval_s: 0.5}}
    models:
      student:
        model: {model}
        weight_source: local
        engine_args: {student}
        env: {{STUDENT_ONLY: 1, PHALANX_SEED: 3}}
"""
FROZEN = """
  genrm:
    models: {{judge: {{model: {model}, engine_args: {engine}, env: {{JUDGE_ONLY: 1}}}}}}
  teacher:
    deployment: {{health_interval_s: 0.2, drain_timeout_s: 5}}
    models: {{big: {{model: tiny, engine: sglang, fault_tolerance: false}}}}
"""
MODELS = {"rollout": "student", "genrm": "judge", "teacher": "big"}
SAMPLING = {"max_new_tokens": 4, "temperature": 0}
GENERATE = {"text": "a b", "sampling_params": SAMPLING}
CHAT = {
    "messages": [{"role": "user", "content": "a b"}],
    "max_tokens": 4,
    "temperature": 0,
    "ignore_eos": True,
}
CHANGING = {"id", "created", "e2e_latency"}
"""Members that are others in each answer."""


@dataclass(frozen=True)
class Started:
    job: WholeJob
    url: str
    control_url: str

    @classmethod
    def when_ready(cls, job: WholeJob) -> Started:
        return cls(job, job.ready(), job.status()["control_url"])

    def operate(self, role: str, what: str, body: Mapping[str, object] | None = None) -> None:
        status, answer = post(f"{self.control_url}/v1/roles/{role}/{what}", body or {})
        assert status == 200, answer

    def engine(self, role: str) -> dict[str, Any]:
        """The only one of a role's only model."""
        (engine,) = self.engines(get(f"{self.url}/{role}/engines"), role)
        return engine

    @staticmethod
    def engines(document: Mapping[str, Any], role: str) -> list[dict[str, Any]]:
        return document["models"][MODELS[role]]["engines"]

    def process(self, role: str) -> Path:
        port = self.engine(role)["base_url"].rpartition(":")[2]
        return Path(f"/proc/{self.job.pid(f'--port {port} ')}")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shim(tmp_path_factory) -> Path:
    """A package that is called as SGLang's is."""
    path = tmp_path_factory.mktemp("path")
    (path / "sglang").mkdir()
    (path / "sglang" / "__init__.py").touch()
    (path / "sglang" / "launch_server.py").write_text(SHIM)
    return path


def starting(folder: Path, model: Path, shim: Path, roles: str, cache: Path) -> Any:
    student = ENGINE.replace("}", ", dtype: float32, max_batch_size: 3}")
    described = roles.format(model=model, engine=ENGINE, student=student)
    file = folder / "roles.yaml"
    file.write_text(f"gateway: {{http_port: 0}}\nroles:\n{described}")
    return whole_job(file, cache, path=shim)


@pytest.fixture(scope="module")
def started(tmp_path_factory, model, shim) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("three")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in POISON.items():
            patch.setenv(name, value)
        whole = starting(folder, model, shim, ROLLOUT + FROZEN, folder / "cache")
        with whole as job:
            yield Started.when_ready(job)
    assert job.process.returncode == 0, "".join(job.lines)
    job.wait_until_gone()


def words(process: Path) -> tuple[list[str], dict[str, str]]:
    """The command line without its port, and the environment without the job's own directory."""
    line = (process / "cmdline").read_bytes().decode().split("\0")
    del line[line.index("--port") + 1]
    pairs = (process / "environ").read_bytes().decode().rstrip("\0").split("\0")
    environment = dict(pair.split("=", 1) for pair in pairs)
    del environment["PHALANX_CACHE_DIR"]
    return line, environment


def test_i19_what_is_set_for_others_reaches_no_judge_or_teacher(
    started, model, shim, tmp_path, monkeypatch
):
    poisoned = {role: words(started.process(role)) for role in MODELS}
    with starting(tmp_path, model, shim, FROZEN, tmp_path / "cache") as job:
        alone = Started.when_ready(job)
        for role in ("genrm", "teacher"):
            assert poisoned[role] == words(alone.process(role))
    for role, (line, environment) in poisoned.items():
        given = set(environment) & set(POISON)
        assert given == ({"PHALANX_SEED"} if role == "rollout" else set())
        assert ("STUDENT_ONLY" in environment) is (role == "rollout")
        assert ("JUDGE_ONLY" in environment) is (role == "genrm")
        assert ("float32" in line) is (role == "rollout")
    assert poisoned["rollout"][1]["PHALANX_SEED"] == "3"


def refused(url: str, body: object) -> tuple[Mapping[str, str], dict[str, Any]]:
    """Fields and body of a 503."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as failed, urllib.request.urlopen(request):
        pass
    with failed.value as answer:
        assert answer.code == 503
        return answer.headers, json.load(answer)


@pytest.mark.parametrize("role", MODELS)
def test_i39_i40_a_role_that_sleeps_is_503_and_whatever_is_asked_wakes_nothing(started, role):
    started.operate(role, "phase", {"phase": "train"})
    started.operate(role, "deactivate")
    mirror = f"{started.url}/{role}/engines"
    inside = get(f"{started.control_url}/v1/roles/{role}")
    document = get(mirror)
    while document["topology_revision"] != inside["topology_revision"]:
        document = get(f"{mirror}?after={document['topology_revision']}&wait_s=60")
    events = started.job.status()["last_event"]
    judged = {"messages": CHAT["messages"]} if role == "genrm" else GENERATE
    for path, body in (
        ("generate", GENERATE),
        ("generate", {**GENERATE, "stream": True}),
        ("generate", judged),
        ("chat/completions", CHAT),
        ("v1/chat/completions", {**CHAT, "stream": True, "model": MODELS[role]}),
    ):
        fields, told = refused(f"{started.url}/{role}/{path}", body)
        assert int(fields["retry-after"]) >= 1
        assert fields["x-inference-model"] == told["model"] == MODELS[role]
        assert (told["role"], told["state"], told["phase"]) == (role, "sleeping", "train")
        assert told["topology_revision"] == document["topology_revision"]
        assert told["error"]["code"] == "not_ready"
    assert get(mirror) == document, "asking has changed what is published"
    assert get(f"{started.control_url}/v1/roles/{role}") == inside
    assert started.job.status()["last_event"] == events, "asking has had the manager do something"
    if role != "teacher":  # SGLang does not say it
        memory = get(f"{inside['models'][MODELS[role]]['engines'][0]['base_url']}/server_info")
        assert memory["memory"]["resident"] == []
    assert get(f"{started.url}/{role}/health")["status"] == "ok"
    started.operate(role, "activate")
    Following(started, role).until(serving)
    assert post(f"{started.url}/{role}/generate", GENERATE)[0] == 200


class Following:
    """Every document of a role that a follower gets, in their order; revisions grow with changes."""

    def __init__(self, started: Started, role: str) -> None:
        self._url = f"{started.url}/{role}/engines"
        self._role = role
        self.documents: list[dict[str, Any]] = [get(self._url)]

    @property
    def engines(self) -> list[dict[str, Any]]:
        """Of the last one."""
        return Started.engines(self.documents[-1], self._role)

    def until(self, condition: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
        while not condition(self.engines):
            self.next()
        return self.engines

    def next(self) -> None:
        seen = self.documents[-1]
        revision, epoch = seen["topology_revision"], seen["registry_epoch"]
        after = get(f"{self._url}?after={revision}&epoch={epoch}&wait_s=60")
        assert after["registry_epoch"] == epoch
        assert after["topology_revision"] >= revision
        assert (after["topology_revision"] > revision) is (after != seen)
        self.documents.append(after)

    def assert_unchanged_by_reading(self) -> None:
        assert get(self._url) == self.documents[-1]


def ready(*generations: int) -> Callable[[list[dict[str, Any]]], bool]:
    """These engines, and no others, all of them ready."""
    return lambda engines: (
        [(each["state"], each["generation"]) for each in engines]
        == [("ready", generation) for generation in generations]
    )


def serving(engines: list[dict[str, Any]]) -> bool:
    return all(each["direct_eligible"] for each in engines)


def dead(engines: list[dict[str, Any]]) -> bool:
    return [(each["state"], each["direct_eligible"]) for each in engines] == [("dead", False)]


def killed(started: Started, role: str, follower: Following, generation: int) -> None:
    """Kill its only engine, and have another one take its place."""
    (before,) = follower.engines
    os.kill(int(started.process(role).name), signal.SIGKILL)
    follower.until(dead)
    if role == "teacher":  # it does not come again by itself
        started.operate(role, "recover", {"engine_id": before["engine_id"]})
    (after,) = follower.until(ready(generation))
    assert after["engine_id"] == before["engine_id"]
    assert after["base_url"] != before["base_url"]


def test_i51_the_revision_grows_with_each_change_of_what_is_where(started):
    """Scale-out, scale-in, recovery, restart, and with the new processes other addresses."""
    teacher, rollout = Following(started, "teacher"), Following(started, "rollout")
    teacher.until(ready(1))
    started.operate("teacher", "models/big/scale", {"replicas": 2})
    engines = teacher.until(ready(1, 1))
    assert [each["engine_id"] for each in engines] == ["big/0", "big/1"]
    started.operate("teacher", "models/big/scale", {"replicas": 1})
    teacher.until(ready(1))
    killed(started, "teacher", teacher, generation=2)
    rollout.until(ready(1))
    killed(started, "rollout", rollout, generation=2)
    teacher.assert_unchanged_by_reading()
    rollout.assert_unchanged_by_reading()


def plain(value: object) -> object:
    """Without what is another in each answer."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if name not in CHANGING}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value


def events(url: str, body: object) -> list[str]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = answer.read().decode()
    assert text.endswith("\n\n")
    return [line.removeprefix("data: ") for line in text.split("\n\n")[:-1]]


def test_i58_a_rollouts_chat_is_the_json_and_the_events_that_its_engine_gives(started):
    Following(started, "rollout").until(serving)
    direct = f"{started.engine('rollout')['base_url']}/v1/chat/completions"
    through = f"{started.url}/rollout/v1/chat/completions"
    post(direct, {**CHAT, "model": "student"})  # what it has cached is told too
    expected = post(direct, {**CHAT, "model": "student"})
    assert expected[0] == 200
    for name in ({}, {"model": "student"}):
        status, answer = post(through, {**CHAT, **name})
        assert (status, plain(answer)) == (200, plain(expected[1]))

    streamed = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    theirs = events(direct, {**streamed, "model": "student"})
    ours = events(through, streamed)
    assert ours[-1] == theirs[-1] == "[DONE]"

    def spoken(lines: list[str]) -> tuple[str, object]:
        """The whole text, and the usage at the end; how tokens fall into events may differ."""
        told = [json.loads(line) for line in lines[:-1]]
        deltas = [each["delta"] for chunk in told for each in chunk["choices"]]
        return "".join(delta.get("content") or "" for delta in deltas), told[-1]["usage"]

    assert spoken(ours) == spoken(theirs)
    assert spoken(ours)[0] == expected[1]["choices"][0]["message"]["content"]
    assert set(json.loads(ours[0])) == set(json.loads(theirs[0]))
