"""`phalanx up`: the roles of a file become a running job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

INTERRUPTED = 130


def up(
    config: Annotated[Path, typer.Argument(metavar="ROLES.yaml", help="The file of the job.")],
    check: Annotated[
        bool, typer.Option("--check", help="Validate, print what would run, start nothing.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return once it is up, and let it run on.")
    ] = False,
    name: Annotated[
        str, typer.Option(help="What to call the job, where several run on this machine.")
    ] = "default",
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any key of the file, as gateway.http_port=0."
        ),
    ] = None,
    detached: Annotated[bool, typer.Option("--detached", hidden=True)] = False,
) -> None:
    """Start the roles of a file (docs/roles.md): their engines, one gateway in front of them, and
    this control process.

    Each role is then at the gateway under its name. Ctrl-C drains and stops all of it, a second one
    does not wait for running requests. `phalanx status`, `drain`, `sleep`, `wake`, `scale`,
    `recover`, `unblock`, `weights` and `down` ask the running job.

    Exits with 0 once it has been stopped, 130 where that came before everything was up, 1 where
    something did not start, 2 where the file is wrong or the job runs already.
    """
    from phalanx.cli.checkpoint_progress import prepared_checkpoint
    from phalanx.cli.up_plan import check_job, checkpoints, load_job, plan_table
    from phalanx.roles.run_file import check_job_name

    check_job_name(name)
    assigned = set_ or []
    job = load_job(config, assigned)
    check_job(job, str(config), deeply=check)
    if check:
        from phalanx.cli.whole_lines import table_console

        table_console().print(plan_table(job))
        if job.plan is not None:
            from phalanx.cli.plan_view import plan_console, plan_view

            plan_console().print("", plan_view(job.plan), sep="\n")
        return
    for model in checkpoints(job):
        prepared_checkpoint(model)
    if detach:
        from phalanx.cli.up_detached import up_detached

        raise typer.Exit(up_detached(config, name, assigned))
    from phalanx.cli.up_run import run_job

    raise typer.Exit(run_job(job, str(config.absolute()), name, detached=detached))
