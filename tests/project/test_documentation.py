"""What the documentation shows exists and works: commands, code, configurations, links, files."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer

from phalanx import errors
from phalanx.cli.main import app, main
from phalanx.roles.config import parse_job
from phalanx.schema.serve_config import parse_serve_config
from tests.forked import run_forked
from tests.project.markdown import PAGES, ROOT, Block, blocks, commands

SHELL = [
    pytest.param(command, id=f"{block}-{command[0]}-{number}")
    for block in blocks("sh")
    for number, command in enumerate(commands(block))
]
RUN_BY_TESTS = {"examples/distill_torch.py": "tests/distill/test_examples.py"}
"""Programs that take a while, and whose shown command is what a test runs and reads."""
PORTS = {
    "30000": ("--model", "smollm2-135m", "--dtype", "float32"),
    "30010": ("examples/plugin_reach/serve.yaml",),
    "30020": ("examples/plugin_pointing/serve.yaml",),
    "30030": ("examples/cosmos3.yaml",),
}
"""What the documentation serves at each port that it names."""


def test_there_is_something_to_check():
    assert len(SHELL) > 8
    assert len(blocks("python")) > 2


@pytest.mark.parametrize("command", SHELL)
def test_a_shown_command_works(command, plugins_installed, monkeypatch, serve):
    if command[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert command[1] in targets
    elif command[0] == "phalanx":
        monkeypatch.setenv("PHALANX_DEVICE", "cpu")
        monkeypatch.syspath_prepend(plugins_installed)
        monkeypatch.chdir(ROOT)
        check_phalanx(command[1:])
    elif command[:2] == ["pip", "install"]:
        assert all(Path(ROOT, path).exists() for path in command[2:] if path.startswith("./"))
    elif command[0] == "curl":
        check_curl(command, serve)
    elif command[0] == "python":
        assert "shown_command" in (ROOT / RUN_BY_TESTS[command[1]]).read_text()
    else:
        pytest.fail(f"nothing checks {command}")


def check_phalanx(arguments: list[str]) -> None:
    """`serve` and `up` are validated as a whole; of the others, the flags are parsed."""
    if arguments[0] in ("serve", "up"):
        with pytest.raises(SystemExit) as ended:
            main([*arguments, *([] if "--check" in arguments else ["--check"])])
        assert ended.value.code in (0, None)
        return
    group = typer.main.get_command(app)
    context = group.make_context("phalanx", list(arguments))
    while hasattr(group, "resolve_command"):
        name, group, arguments = group.resolve_command(context, list(arguments))
        context = group.make_context(name, list(arguments), parent=context)


def check_curl(command: list[str], serve) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    done = subprocess.run(
        [*live(command, serve), "--silent", "--fail-with-body"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def live(words: list[str], serve) -> list[str]:
    """`words` with the documented addresses replaced by those of running servers."""
    for port, arguments in PORTS.items():
        address = f"http://127.0.0.1:{port}"
        if any(address in word for word in words):
            words = [word.replace(address, serve(*arguments)) for word in words]
    return words


def programs() -> list[object]:
    """Those that load a whole model, which takes seconds, run with the long tests."""
    return [
        pytest.param(block, marks=pytest.mark.long) if "checkpoint_dir(" in block.text else block
        for block in blocks("python")
    ]


@pytest.mark.parametrize("block", programs(), ids=str)
def test_shown_python_runs(block, serve, monkeypatch):
    monkeypatch.setenv("PHALANX_DEVICE", "cpu")
    (program,) = live([block.text], serve)
    done = run_forked(program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_shown_configurations_parse(block):
    if "\nroles:" in f"\n{block.text}":
        parse_job(block.text, str(block))
    else:
        parse_serve_config(block.text, str(block))


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_shown_toml_parses(block: Block):
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_paths_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:src|tests|examples|docs|scripts)/[^`*<]+)`", text):
        assert (ROOT / path.partition("::")[0]).exists(), path


def test_the_error_tree_is_the_one_in_the_code():
    assert errors.__doc__ is not None
    tree = errors.__doc__.partition("\n\n")[2].strip()
    assert tree in (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\w*Error\b(?= |$)", tree, re.MULTILINE)) >= {
        name for name in errors.__all__ if name not in ("ValueError", "RuntimeError")
    }
