"""The command `phalanx`: its subcommands, and how errors end it.

Starting up loads neither torch nor HTTP; each command imports what it runs. Exit codes: 2 for what
the user can put right (arguments, files, an absent package), 1 for a failure.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

try:
    import typer

    from phalanx import __version__, settings
    from phalanx.cli.bench import bench_app
    from phalanx.cli.command_help import HelpfulCommand, HelpfulGroup, examples
    from phalanx.cli.doctor import doctor
    from phalanx.cli.env import env
    from phalanx.cli.gateway import GatewayCommand, gateway
    from phalanx.cli.generate import generate
    from phalanx.cli.phase import phase_app
    from phalanx.cli.plan import plan
    from phalanx.cli.roles import down, drain, recover, scale, sleep, status, unblock, wake, weights
    from phalanx.cli.serve import serve
    from phalanx.cli.top import top
    from phalanx.cli.up import up
    from phalanx.errors import InvalidInputError, MissingDependencyError, PhalanxError
except KeyboardInterrupt:  # Ctrl-C right after the start, while all this is loaded
    sys.exit(130)


def _empty() -> typer.Typer:
    """`phalanx` without commands."""
    return typer.Typer(
        name="phalanx",
        cls=HelpfulGroup,
        help="Phalanx serves language models and robot policies from one engine.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


app = _empty()
app.command("serve", cls=HelpfulCommand, epilog=examples("serve"))(serve)
app.command("gateway", cls=GatewayCommand, epilog=examples("gateway"))(gateway)
_ROLES = "Roles of a job"
for command in (up, plan, status, drain, sleep, wake, scale, recover, unblock, weights, down):
    app.command(
        command.__name__,
        cls=HelpfulCommand,
        epilog=examples(command.__name__),
        rich_help_panel=_ROLES,
    )(command)
app.add_typer(phase_app, name="phase", rich_help_panel=_ROLES)
app.command("generate", cls=HelpfulCommand, epilog=examples("generate"))(generate)
app.command("top", cls=HelpfulCommand, epilog=examples("top"))(top)
app.command("doctor", cls=HelpfulCommand, epilog=examples("doctor"))(doctor)
app.command("env", cls=HelpfulCommand, epilog=examples("env"))(env)
app.add_typer(bench_app, name="bench")


@app.command("version", cls=HelpfulCommand)
def version() -> None:
    """Print the version."""
    print(__version__)


def called(arguments: Sequence[str]) -> typer.Typer:
    """`app`, of its commands only the one that `arguments` begin with: it takes long to build all.

    Where they begin with none of them, it is the whole `app`, which knows what to say.
    """
    name = next(iter(arguments), None)
    one = _empty()
    one.callback()(lambda: None)  # so that a single command has its name before it, as among many
    one.registered_commands = [each for each in app.registered_commands if each.name == name]
    one.registered_groups = [each for each in app.registered_groups if each.name == name]
    return one if one.registered_commands or one.registered_groups else app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `arguments` (the process's own by default) and exit."""
    settings.limit_thread_spinning()
    settings.end_without_collecting()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        called(given)(args=given, prog_name="phalanx")
    except PhalanxError as error:
        print(f"phalanx: {error}", file=sys.stderr)
        fixable = isinstance(error, (InvalidInputError, MissingDependencyError))
        sys.exit(2 if fixable else 1)
    except KeyboardInterrupt:
        sys.exit(130)
