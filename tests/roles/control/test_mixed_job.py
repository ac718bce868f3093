"""`phalanx up` with engines of other makes: one that it starts as SGLang, one that somebody else runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.roles.control.whole_job import WholeJob, get, post, whole_job

pytestmark = pytest.mark.long

CONFORMANCE = [sys.executable, "-m", "phalanx.testing.sglang_server"]
SHIM = "from phalanx.testing.sglang_server import main\nmain()\n"
ASK = {"text": "a b", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
KEY = {"authorization": "Bearer user"}
FILE = """
gateway: {{http_port: 0, api_key: user, admin_key: boss}}
control: {{key: secret}}
roles:
  genrm:
    expose_engine_urls: false
    deployment: {{drain_timeout_s: 5}}
    models:
      judge: {{model: tiny, engine: sglang, sampling: {{max_new_tokens: 3}}}}
  teacher:
    routing: {{route_keys: {{math: big}}, aliases: {{b: big}}}}
    models:
      big: {{engine: external, urls: ["{url}"], served_model_name: tiny}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """A server that somebody else runs."""
    with subprocess.Popen(
        [*CONFORMANCE, "--model-path", "tiny", "--port", "0", "--enable-memory-saver"],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield f"http://{process.stdout.readline().rpartition('http://')[2].strip()}"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def job(tmp_path_factory, server) -> Iterator[tuple[WholeJob, str]]:
    folder = tmp_path_factory.mktemp("mixed")
    package = folder / "path" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SHIM)
    (folder / "roles.yaml").write_text(FILE.format(url=server))
    with whole_job(folder / "roles.yaml", folder / "cache", path=folder / "path") as job:
        yield job, job.ready()
    assert job.process.returncode == 0, "".join(job.lines)
    job.wait_until_gone()
    assert get(f"{server}/model_info"), "it is not ours to stop"


def test_sglang_is_started_asked_put_to_sleep_and_woken(job):
    job, url = job
    status, answer = post(f"{url}/genrm/generate", ASK, KEY)
    assert (status, answer["meta_info"]["completion_tokens"]) == (200, 4)
    done = job.command("sleep", "genrm")
    assert "genrm/judge: 1 sleeping" in done.stdout, done.stderr
    assert post(f"{url}/genrm/generate", ASK, KEY)[0] == 503
    done = job.command("wake", "genrm")
    assert "genrm/judge: 1 ready" in done.stdout, done.stderr
    assert post(f"{url}/genrm/generate", ASK, KEY)[1]["text"] == answer["text"]


def test_somebody_elses_server_is_asked_by_every_name(job):
    job, url = job
    for selector in ({}, {"model": "big"}, {"model": "b"}, {"route_key": "math"}):
        status, _ = post(f"{url}/teacher/generate", {**ASK, **selector}, KEY)
        assert status == 200, selector
    assert post(f"{url}/teacher/generate", {**ASK, "route_key": "maths"}, KEY)[0] == 400
    done = job.command("scale", "teacher/big", "2")
    assert done.returncode == 2
    assert "external" in done.stderr


def test_i18_the_keys_are_asked_for_and_hidden_addresses_are_not_told(job, server):
    job, url = job
    assert post(f"{url}/genrm/generate", ASK)[0] == 401
    (judge,) = get(f"{url}/genrm/engines", KEY)["models"]["judge"]["engines"]
    assert (judge["base_url"], judge["direct_eligible"]) == (None, False)
    (big,) = get(f"{url}/teacher/engines", KEY)["models"]["big"]["engines"]
    assert (big["base_url"], big["direct_eligible"]) == (server, True)
    (role, _) = job.status()["roles"]
    inside = role["document"]["models"]["judge"]["engines"][0]
    assert inside["base_url"].startswith("http://127.0.0.1:")
