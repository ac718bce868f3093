"""`phalanx up` as it is typed: what it shows of a file, and what it refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.cli.up_detached import up_detached
from phalanx.roles.run_file import RunDirectory, RunRecord
from tests.certificates import needs_openssl, write_certificate
from tests.cli.interpreter import write_interpreter
from tests.roles.launching.specs import write_tiny_llama

JOB = """
gateway: {http_port: 30000}
launcher: {router_python: ./python}
roles:
  rollout:
    deployment: {start_asleep: true}
    models:
      student: {model: ./tiny, replicas: 2, weight_source: dcs, engine_args: {pool_tokens: 64}}
  scorer:
    workload: genrm
    expose_engine_urls: false
    routing: {default_model: judge, route_keys: {math: other}, aliases: {j: judge}}
    models:
      judge: {model: ./tiny, ranks: 2}
      other: {engine: external, urls: ["http://127.0.0.1:1"], route_mode: sglang_router}
"""
SHOWN = """\
/rollout, /scorer at http://127.0.0.1:30000
role     model    replicas      engine    weights  of
rollout  student  2             phalanx   dcs      ./tiny              starts asleep
scorer   judge    1 of 2 ranks  phalanx   static   ./tiny              default, alias j, addresses hidden
         other    1             external  static   http://127.0.0.1:1  key math, router started here, addresses hidden
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    (folder / "tiny").mkdir()
    write_tiny_llama(folder / "tiny")
    write_interpreter(folder / "python")
    return folder


@pytest.fixture
def check(folder, run, monkeypatch):
    """Checks the text of a file; gives exit code, stdout and stderr."""
    # Into a pipe its lines are whole, however narrow the terminal is.
    monkeypatch.setenv("COLUMNS", "40")

    def call(text: str, *arguments: str) -> tuple[int, str, str]:
        (folder / "roles.yaml").write_text(text)
        return run("up", str(folder / "roles.yaml"), "--check", *arguments)

    return call


def test_the_check_is_a_table_of_the_plan(check, folder):
    code, out, err = check(JOB)
    assert (code, err) == (0, "")
    lines = [" ".join(line.split()) for line in out.replace(str(folder), ".").splitlines()]
    assert lines == [" ".join(line.split()) for line in SHOWN.splitlines()]


def test_flags_win_over_the_file(check):
    _, out, _ = check(
        JOB, "--set", "gateway.http_port=0", "--set", "roles.rollout.models.student.replicas=5"
    )
    assert "http://127.0.0.1:(a free port)" in out
    assert "student  5 " in out


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("http_port: 30000", "http_port: 70000", "gateway: --http-port 70000 must be from 0"),
        ("http_port: 30000", "api_key: ä", "gateway: --api-key must be printable ASCII"),
        ("http_port: 30000", "tls_cert: ./x.pem", "gateway: --tls-cert needs --tls-key"),
        ("./tiny, replicas", "./tini, replicas", "roles.rollout.models.student: model directory"),
        ("./tiny, replicas", "smollm3, replicas", "did you mean 'smollm2-135m'"),
        ("pool_tokens: 64", "pol_tokens: 64", "engine_args has 'pol_tokens'"),
        ("pool_tokens: 64", "pool_tokens: -1", "roles.rollout.models.student: flags: plugin_args"),
        ("pool_tokens: 64", "pool_tokens: x", "engine_args: Invalid value for '--pool-tokens'"),
        ("pool_tokens: 64", "server.prt: 1", "did you mean server.port"),
        ("pool_tokens: 64", "port: 1", "engine_args has 'port'; the launcher chooses it"),
        ("router_python: ./python", "sglang_python: /no/python", "is no program"),
        ("router_python: ./python", "router_python: /bin/false", "='/bin/false' is no Python"),
        (
            "launcher: {router_python: ./python}",
            "",
            "route_mode: sglang_router needs sglang-router, which",
        ),
        (
            "judge: {model: ./tiny, ranks: 2}",
            "judge: {model: ./tiny, engine: sglang}",
            "set launcher.sglang_python to the interpreter of an environment with it",
        ),
    ],
)
def test_what_could_not_start_is_refused_with_its_place(check, folder, before, after, says):
    assert before in JOB
    code, out, err = check(JOB.replace(before, after, 1))
    assert (code, out) == (2, "")
    assert err.startswith(f"phalanx: {folder / 'roles.yaml'}: ")
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("http_port: 30000", "http_host: 192.0.2.1", "gateway: http_host='192.0.2.1': nothing can"),
        ("router_python: ./python", "host: 192.0.2.1", "launcher: host='192.0.2.1': nothing"),
        ("pool_tokens: 64", "host: 192.0.2.1", "engine_args has 'host'; the launcher chooses it"),
    ],
)
def test_a_host_where_nothing_can_listen_is_refused(check, folder, before, after, says):
    code, _, err = check(JOB.replace(before, after, 1))
    assert (code, says in err) == (2, True), err


@needs_openssl
def test_a_key_of_another_certificate_is_refused_before_anything_starts(check, folder):
    for name in ("one", "two"):
        (folder / name).mkdir()
        write_certificate(folder / name)
    pair = "tls_cert: ./one/cert.pem, tls_key: ./two/key.pem"
    code, _, err = check(JOB.replace("http_port: 30000", pair))
    assert (code, "key values mismatch; give a PEM certificate" in err) == (2, True), err
    pair = "tls_cert: ./one/cert.pem, tls_key: ./one/key.pem"
    assert check(JOB.replace("http_port: 30000", pair))[0] == 0


def test_a_file_that_is_not_there_is_named(run):
    code, out, err = run("up", "nowhere.yaml")
    assert (code, out) == (2, "")
    assert err == "phalanx: cannot read nowhere.yaml: No such file or directory\n"


def test_a_check_refuses_a_name_that_a_start_would(folder, run):
    file = folder / "right.yaml"
    file.write_text(JOB)
    code, out, err = run("up", str(file), "--check", "--name", "a b")
    assert (code, out) == (2, "")
    assert "job name 'a b' must begin with a letter or digit" in err


def test_a_start_checks_what_costs_little(folder, run):
    file = folder / "wrong.yaml"
    file.write_text(JOB.replace("pool_tokens", "pol_tokens"))
    code, out, err = run("up", str(file))
    assert (code, out) == (2, "")
    assert "did you mean 'pool_tokens'?" in err


def test_help_says_what_it_does_and_how_it_ends(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run("up", "--help")
    assert code == 0
    for words in ("--check", "--detach", "--name", "--set", "Exits with 0", "ROLES.yaml"):
        assert words in out
    assert "--detached" not in out


def test_a_detached_start_is_not_taken_for_the_job_that_runs_already(folder, tmp_path, monkeypatch):
    """Its own status is that of the process which it has started, and which was refused."""
    monkeypatch.setenv("PHALANX_CACHE_DIR", str(tmp_path))
    (folder / "roles.yaml").write_text(
        "gateway: {http_port: 0}\n"
        'roles: {rollout: {models: {m: {engine: external, urls: ["http://127.0.0.1:1"]}}}}\n'
    )
    with RunDirectory().claim("default") as file:
        file.write(
            RunRecord(
                name="default",
                pid=1,
                control_url="http://c",
                gateway_url="http://g",
                config="r.yaml",
                log_directory="logs",
                started_wall_s=0.0,
            )
        )
        assert up_detached(folder / "roles.yaml", "default", ()) == 2
