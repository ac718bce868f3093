"""`--help` of every command: all that is told of an option is shown, and every example is one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import pytest
from typer.core import TyperGroup, TyperOption
from typer.main import get_command

from phalanx.cli.command_help import EXAMPLES
from phalanx.cli.main import app

ROOT = get_command(app)


def commands(group: TyperGroup, *words: str) -> Iterator[tuple[str, ...]]:
    """The words of every command that has none below it."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, *words, name)
        else:
            yield (*words, name)


def command_at(words: tuple[str, ...]) -> object:
    command = ROOT
    for word in words:
        command = command.commands[word]
    return command


COMMANDS = [*commands(ROOT), ("phase",), ("bench",), ()]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_all_that_is_told_of_an_option_is_shown(run, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "400")
    parameters = command_at(words).params
    options = [each for each in parameters if isinstance(each, TyperOption) and not each.hidden]
    code, out, _ = run(*words, "--help")
    assert code == 0
    assert "<bool>" not in out
    for option in options:
        assert option.help, option.name
        assert option.help in out


def test_a_paragraph_is_as_wide_as_the_terminal(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    _, out, _ = run("serve", "--help")
    assert "those over the defaults. Ctrl-C stops taking requests, lets the running" in out
    _, out, _ = run("--help")
    assert "a robot policy over gRPC" in out


@pytest.mark.parametrize("words", EXAMPLES)
def test_an_example_is_a_command_of_that_name(run, words):
    for example in EXAMPLES[words]:
        program, *rest = shlex.split(example)
        assert (program, *rest[: len(words.split())]) == ("phalanx", *words.split())
        command = command_at(tuple(words.split()))
        command.make_context(words, rest[len(words.split()) :])  # raises where a flag is unknown
    _, out, _ = run(*words.split(), "--help")
    assert "For example:" in out
