"""`phalanx plan`: where the roles of a file and its trainer would run, and when."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def plan(
    config: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The file of the job.")],
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Write the picture there, as SVG.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Any key of the file, as placement.mode=split."
        ),
    ] = None,
) -> None:
    """Show which role holds which device in which phase (docs/placement.md), and start nothing.

    Exits with 0, or with 2 where the file is wrong or the roles cannot be placed, and then says why
    and what can be done.
    """
    from phalanx.cli.plan_view import plan_console, plan_json, plan_title, plan_view
    from phalanx.cli.up_plan import check_reach, load_job
    from phalanx.errors import ConfigurationError

    job = load_job(config, set_ or [])
    check_reach(job, str(config))
    made = job.plan
    if made is None:
        raise ConfigurationError(
            f"{config} says nothing of placement, so there is nothing to plan; add placement: split,"
            " placement: defer, or placement with nodes and devices_per_node"
        )
    if svg is not None:
        from phalanx.roles.placement.picture import picture
        from phalanx.roles.placement.svg import svg as drawn

        try:
            svg.write_text(drawn(picture(made, 64), f"{config.name}: {plan_title(made)}"), "utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write {svg}: {error.strerror}") from None
    if as_json:
        print(plan_json(made))
    else:
        plan_console().print(plan_view(made))
