"""The command `phalanx`: flags, what it prints, and one-line errors with their exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import Engine, __version__
from phalanx.checkpoints import checkpoint_names
from phalanx.cli.main import app, called
from phalanx.schema.yaml_text import parse_yaml
from phalanx.testing.echo import Echo


@pytest.fixture(scope="module", autouse=True)
def echo_plugin() -> None:
    Engine.register(Echo)


@pytest.mark.parametrize(
    "arguments",
    [("--help",), ("serve", "--help"), ("generate", "--help"), ("bench", "--help")],
)
def test_help(run, arguments):
    code, out, _ = run(*arguments)
    assert code == 0
    assert "Usage: phalanx" in out


def test_only_the_command_that_is_called_is_built():
    (status,) = called(["status", "--json"]).registered_commands
    assert status.name == "status"
    (bench,) = called(["bench", "generate"]).registered_groups
    assert bench.name == "bench"
    for none in ([], ["--help"], ["stauts"]):
        assert called(none) is app


@pytest.mark.parametrize("name", ["gateway", "status", "bench"])
def test_the_help_of_a_command_is_that_of_it_among_all(run, name, capsys):
    with pytest.raises(SystemExit):
        app([name, "--help"], prog_name="phalanx")
    among_all = capsys.readouterr().out
    assert f"Usage: phalanx {name}" in among_all
    assert run(name, "--help") == (0, among_all, "")


def test_a_wrong_name_is_told_the_nearest(run):
    code, _, err = run("stauts")
    assert code == 2
    assert "Did you mean 'status'" in err


def test_version(run):
    assert run("version") == (0, f"{__version__}\n", "")


def test_the_package_runs_as_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "phalanx", "version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


def test_ctrl_c_while_the_command_loads_is_quiet():
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'phalanx.cli.doctor': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from phalanx.cli.main import main\nmain(['version'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_help_loads_no_torch_and_no_http():
    program = (
        "import sys\nfrom phalanx.cli.main import main\n"
        "try: main(['serve', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'httpx', 'matplotlib'}\n"
        "sys.exit(f'loaded {heavy & set(sys.modules)}' if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_check_prints_the_file_that_would_give_the_same(run, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("plugin: echo\nplugin_args: {max_length: 5}\nserver: {port: 0}\n")
    code, out, err = run("serve", str(file), "--check", "--host", "127.0.0.2", "--seed", "3")
    assert (code, err) == (0, "")
    printed = parse_yaml(out, "out")
    assert printed["plugin_args"] == {"max_length": 5}
    assert (printed["server"]["host"], printed["server"]["port"]) == ("127.0.0.2", 0)
    assert (printed["engine"]["device"], printed["engine"]["seed"]) == ("cpu", 3)
    file.write_text(out)
    assert run("serve", str(file), "--check") == (0, out, "")


def test_check_does_not_show_the_key(run, tmp_path):
    file = tmp_path / "serve.yaml"
    file.write_text("plugin: echo\n")
    code, out, _ = run("serve", str(file), "--check", "--api-key", "secret-1")
    assert code == 0
    assert "secret-1" not in out
    assert "(set)" in out


def test_model_flag_goes_to_the_language_model_plugin(run):
    name = checkpoint_names()[0]
    code, out, _ = run("serve", "--model", name, "--check", "--pool-tokens", "640")
    assert code == 0
    printed = parse_yaml(out, "out")
    assert printed["plugin"] == "causal_lm"
    assert printed["plugin_args"]["checkpoint_dir"] == name
    assert printed["plugin_args"]["pool_tokens"] == 640


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve",), "give a configuration file or --model"),
        (("serve", "nowhere.yaml"), "cannot read nowhere.yaml"),
        (("serve", "smollm2-135m"), "; did you mean `--model smollm2-135m`?"),
        (("serve", "/"), "; did you mean `--model /`?"),
        (("serve", "--model", "smollm2-135"), "did you mean 'smollm2-135m'?"),
        (("serve", "--model", "/no/such/dir"), "model directory '/no/such/dir' does not exist"),
        (("serve", "--model", __file__), "is a file; give the directory"),
        (("serve", "--model", "smollm2-135m", "--dtype", "float8"), "params_dtype 'float8'"),
        (("serve", "--model", "smollm2-135m", "--device", "tpu"), "device target 'tpu'"),
        (("serve", "--model", "smollm2-135m", "--port", "70000"), "port=70000 must be from 0"),
        (("serve", "--model", "smollm2-135m", "--pool-tokens", "0"), "pool_tokens=0"),
        (("serve", "--model", "smollm2-135m", "--quantization", "int3"), "quantization='int3'"),
        (("serve", "--model", "smollm2-135m", "--set", "server.prt=1"), "did you mean server.port"),
        (("serve", "--model", "smollm2-135m", "--set", "port"), "--set 'port' must be KEY=VALUE"),
        (("serve", "--model", "smollm2-135m", "--set", "plugin=ecoh"), "did you mean 'echo'?"),
        (("serve", "--model", "smollm2-135m", "--log-level", "LOUD"), "level='LOUD' is not known"),
        (("generate", "hello", "--model", "nosuch"), "model 'nosuch' is neither a directory"),
        (("generate", "hello", "--max-new-tokens", "-1"), "max_new_tokens=-1 must be at least 0"),
        (("generate", "hello", "--temperature", "nan"), "temperature=nan must be a finite"),
        (("generate", "hello", "--dtype", "float8"), "params_dtype 'float8'"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("phalanx: ")
    assert err.count("\n") == 1


def test_a_mistyped_flag_is_refused(run):
    code, out, err = run("serve", "--modle", "x")
    assert (code, out) == (2, "")
    assert "No such option" in err
    assert "--model" in err


def test_an_empty_directory_is_refused(run, tmp_path):
    code, out, err = run("serve", "--model", str(tmp_path))
    assert (code, out) == (2, "")
    assert str(tmp_path) in err
    assert err.count("\n") == 1


def test_an_unwritable_log_is_refused(run, tmp_path):
    (tmp_path / "serve.yaml").write_text("plugin: echo\n")
    beneath_a_file = str(tmp_path / "serve.yaml" / "x.log")
    code, out, err = run("serve", str(tmp_path / "serve.yaml"), "--log-file", beneath_a_file)
    assert (code, out) == (2, "")
    assert err.startswith(f"phalanx: cannot write the log file {beneath_a_file}")


def test_the_installed_command_exists():
    command = Path(sys.executable).with_name("phalanx")
    done = subprocess.run([command, "version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{__version__}\n")
