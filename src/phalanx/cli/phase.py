"""`phalanx phase`: where a running job is in its batch, and the way to the next phase by hand."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated

import typer

from phalanx.cli.command_help import HelpfulCommand, HelpfulGroup, examples
from phalanx.cli.roles import Control, JobAddress, Key, Name
from phalanx.errors import ConfigurationError

phase_app = typer.Typer(
    help="Show the phase of a running job, or go to another one.\n\n"
    "A batch goes through the phases of the job in their order. With `placement: defer` the roles of"
    " a phase, or the trainer, have the devices to themselves in it; in other placements the same"
    " commands move nothing.",
    cls=HelpfulGroup,
    invoke_without_command=True,
    no_args_is_help=False,
)


@phase_app.callback()
def show(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it anew with each change, until Ctrl-C.")
    ] = False,
    name: Name = None,
    control: Control = None,
    key: Key = None,
) -> None:
    """Show where the job is, who has which devices, and what it waits for."""
    address = JobAddress(name, control, key)
    if context.invoked_subcommand is not None:
        if address != JobAddress(None, None, None) or as_json or watch:
            raise ConfigurationError(
                f"give the options after the command: phalanx phase {context.invoked_subcommand}"
                " ... --name NAME"
            )
        return
    from phalanx.cli.control_client import find_job
    from phalanx.cli.job_view import print_phases, watch_phases

    if watch and as_json:
        raise ConfigurationError(
            "--watch and --json are both given; programs wait at GET /v1/phases?after=NUMBER of the"
            " control_url"
        )
    client = find_job(address)
    if watch:
        watch_phases(client)
    else:
        print_phases(client.phases(), as_json=as_json)


@phase_app.command(cls=HelpfulCommand, epilog=examples("phase enter"))
def enter(
    phase: Annotated[
        str, typer.Argument(help="One of the job's phases; `phalanx phase` shows them.")
    ],
    batch: Annotated[
        str, typer.Option(help="What the batch is called, as a step's number.", show_default=False)
    ] = "",
    name: Name = None,
    control: Control = None,
    key: Key = None,
) -> None:
    """Go to a phase: whoever has had his turn finishes and sleeps, then the phase's roles wake.

    The phase after the one before of the same batch, an earlier one of it again, or the first of a
    new batch once the last one has come to its end.
    """
    if not batch:
        raise ConfigurationError("say which batch with --batch, as --batch 7")
    body = {"phase": phase, "batch": batch}
    _ask("enter", body, JobAddress(name, control, key))


@phase_app.command(cls=HelpfulCommand, epilog=examples("phase leave"))
def leave(
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Give the batch up, so that another one may begin.")
    ] = False,
    name: Name = None,
    control: Control = None,
    key: Key = None,
) -> None:
    """Go to no phase: every role that takes turns gives its memory back."""
    _ask("leave", {"abandon": abandon}, JobAddress(name, control, key))


@phase_app.command(cls=HelpfulCommand, epilog=examples("phase recover"))
def recover(
    holds_nothing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A role, or `trainer`, that holds nothing on devices, on your word. Again for more.",
        ),
    ] = None,
    name: Name = None,
    control: Control = None,
    key: Key = None,
) -> None:
    """Find out what those hold in memory of whom nobody is certain, so that the job can go on."""
    _ask("recover", {"holds_nothing": holds_nothing or []}, JobAddress(name, control, key))


def _ask(operation: str, body: Mapping[str, object], address: JobAddress) -> None:
    """Ask for an operation, wait for its end, and say where the job is then."""
    from phalanx.cli.control_client import find_job
    from phalanx.cli.job_view import print_phases
    from phalanx.cli.operation_progress import goes_on_without_us

    client = find_job(address)
    with goes_on_without_us("it goes on, see `phalanx phase`"):
        document = client.move(operation, {**body, "operation_id": secrets.token_hex(8)})
    print_phases(document, as_json=False)
