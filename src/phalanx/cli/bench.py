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

bench_app = typer.Typer(help="Measure, and compare with others.", no_args_is_help=True)
bench_app.command("generate")(generate)
bench_app.command("dispatch")(dispatch)
bench_app.command("policy")(policy)
bench_app.command("cosmos3")(cosmos3)
bench_app.command("step")(step)
bench_app.command("gateway")(gateway)
bench_app.command("discovery")(discovery)
bench_app.command("roles")(roles)
bench_app.command("placement")(placement)
bench_app.command("phases")(phases)
