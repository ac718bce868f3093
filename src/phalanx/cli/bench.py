"""`phalanx bench`: one subcommand a benchmark."""

from __future__ import annotations

import typer

from phalanx.bench.cosmos3 import cosmos3
from phalanx.bench.discovery import discovery
from phalanx.bench.dispatch import dispatch
from phalanx.bench.gateway import gateway
from phalanx.bench.generate import generate
from phalanx.bench.phases_change import phases
from phalanx.bench.placement import placement
from phalanx.bench.policy import policy
from phalanx.bench.roles import roles
from phalanx.bench.step import step
from phalanx.cli.command_help import HelpfulCommand, HelpfulGroup

bench_app = typer.Typer(
    help="Measure, and compare with others.", cls=HelpfulGroup, no_args_is_help=True
)
bench_app.command("generate", cls=HelpfulCommand)(generate)
bench_app.command("dispatch", cls=HelpfulCommand)(dispatch)
bench_app.command("policy", cls=HelpfulCommand)(policy)
bench_app.command("cosmos3", cls=HelpfulCommand)(cosmos3)
bench_app.command("step", cls=HelpfulCommand)(step)
bench_app.command("gateway", cls=HelpfulCommand)(gateway)
bench_app.command("discovery", cls=HelpfulCommand)(discovery)
bench_app.command("roles", cls=HelpfulCommand)(roles)
bench_app.command("placement", cls=HelpfulCommand)(placement)
bench_app.command("phases", cls=HelpfulCommand)(phases)
