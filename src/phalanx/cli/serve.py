"""`phalanx serve`: a configuration becomes a running model server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phalanx import log, settings
from phalanx.checkpoints import checkpoint_names
from phalanx.cli.placement import device_list, meeting
from phalanx.cli.words import unreadable
from phalanx.errors import ConfigurationError
from phalanx.schema.serve_config import ServeConfig, parse_serve_config
from phalanx.schema.yaml_text import parse_yaml

if TYPE_CHECKING:
    from phalanx.cli.serve_plan import ServePlan

_LISTEN, _MODEL, _ENGINE, _LOG = "Where it listens", "Language model", "Engine", "Log"
_DEPLOYMENT = "Replicas and ranks"


def serve(
    config: Annotated[
        Path | None, typer.Argument(help="A YAML file: plugin, plugin_args, engine, server, ...")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Serve this language model: a Hugging Face directory, or a known name"
            " such as smollm2-135m. Short for plugin causal_lm with that checkpoint_dir."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on. [127.0.0.1]", rich_help_panel=_LISTEN)
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            help="Port; 0 takes a free one. [30000; robot policies: 50063, for gRPC]",
            rich_help_panel=_LISTEN,
        ),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            help="Port of a robot policy's HTTP routes and openpi protocol. [none]",
            rich_help_panel=_LISTEN,
        ),
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(
            help="Register a robot policy at this gateway, HOST:PORT.", rich_help_panel=_LISTEN
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Bearer token to ask for.", rich_help_panel=_LISTEN)
    ] = None,
    tls_cert: Annotated[
        str | None,
        typer.Option(help="PEM file: speak TLS with this certificate.", rich_help_panel=_LISTEN),
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(help="PEM file: its private key.", rich_help_panel=_LISTEN)
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name on /v1.", rich_help_panel=_LISTEN)
    ] = None,
    weight_source: Annotated[
        str | None,
        typer.Option(
            help="static refuses weights from trainers. [dynamic]", rich_help_panel=_LISTEN
        ),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help="prefill or decode, where a router pairs two servers. [both]",
            rich_help_panel=_LISTEN,
        ),
    ] = None,
    bootstrap_port: Annotated[
        int | None,
        typer.Option(
            help="Where decode servers ask a prefill server. [8998]", rich_help_panel=_LISTEN
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda or cuda:N. [cuda if there is one]", rich_help_panel=_ENGINE),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, bfloat16 or float16. [float32 on cpu, else bfloat16]",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="Threads that compute.", rich_help_panel=_ENGINE)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random generators.", rich_help_panel=_ENGINE)
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(help="Copies of the whole model. [1]", rich_help_panel=_DEPLOYMENT),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(help="Ranks that one copy is cut over. [1]", rich_help_panel=_DEPLOYMENT),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Indices of visible devices, as 0,1: the first ones are replica 0's. [all]",
            rich_help_panel=_DEPLOYMENT,
        ),
    ] = None,
    base_port: Annotated[
        int | None,
        typer.Option(
            help="The ranks of replica R meet at this port + R. [free ones]",
            rich_help_panel=_DEPLOYMENT,
        ),
    ] = None,
    nnodes: Annotated[
        int | None,
        typer.Option(
            help="Machines that one copy is cut over, each with this command. [1]",
            rich_help_panel=_DEPLOYMENT,
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            help="Which of them this is; the first one, 0, answers requests. [0]",
            rich_help_panel=_DEPLOYMENT,
        ),
    ] = None,
    dist_init_addr: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of the first machine, where they meet.", rich_help_panel=_DEPLOYMENT
        ),
    ] = None,
    context_length: Annotated[
        int | None,
        typer.Option(help="Tokens of one request. [the model's]", rich_help_panel=_MODEL),
    ] = None,
    pool_tokens: Annotated[
        int | None, typer.Option(help="Tokens that the KV cache holds.", rich_help_panel=_MODEL)
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Requests in one step.", rich_help_panel=_MODEL)
    ] = None,
    max_step_tokens: Annotated[
        int | None, typer.Option(help="Tokens in one step.", rich_help_panel=_MODEL)
    ] = None,
    quantization: Annotated[
        str | None, typer.Option(help="int8 for weights of 8 bits.", rich_help_panel=_MODEL)
    ] = None,
    native_operators: Annotated[
        str | None, typer.Option(help="auto, off or required.", rich_help_panel=_MODEL)
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR. [INFO]", rich_help_panel=_LOG)
    ] = None,
    log_file: Annotated[
        str | None, typer.Option(help="Append to this file. [stderr]", rich_help_panel=_LOG)
    ] = None,
    log_json: Annotated[
        bool | None,
        typer.Option("--log-json", help="One JSON object a line.", rich_help_panel=_LOG),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key, as server.drain_timeout_s=5."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Validate, print what would run, load nothing.")
    ] = False,
) -> None:
    """Serve a model: text over HTTP (SGLang's /generate and the OpenAI routes), videos over HTTP, a
    robot policy over gRPC and, with --http-port, over HTTP and openpi's WebSocket protocol.

    Flags win over the file, the file over PHALANX_* variables, those over the defaults. Ctrl-C
    stops taking requests, lets the running ones end, and closes.
    """
    from phalanx.cli.serve_plan import describe, plan

    flags = {
        "server.host": host,
        "server.port": port,
        "server.http_port": http_port,
        "server.gateway": gateway,
        "server.api_key": api_key,
        "server.tls_cert": tls_cert,
        "server.tls_key": tls_key,
        "server.served_model_name": served_model_name,
        "server.weight_source": weight_source,
        "server.role": role,
        "server.bootstrap_port": bootstrap_port,
        "server.log_json": log_json,
        "log.level": log_level,
        "log.file": log_file,
        "engine.device": device,
        "engine.dtype": dtype,
        "engine.num_threads": num_threads,
        "engine.seed": seed,
        "deployment.replica_count": replicas,
        "deployment.devices": None if devices is None else device_list(devices),
        "deployment.process_config.base_port": base_port,
        "deployment.process_config.num_nodes": nnodes,
        "deployment.process_config.node_rank": node_rank,
        **meeting(dist_init_addr),
        "parallel.dense.tp_size": tp,
        "parallel.attention.tp_size": tp,
        "plugin_args.checkpoint_dir": model,
        "plugin_args.context_length": context_length,
        "plugin_args.pool_tokens": pool_tokens,
        "plugin_args.max_batch_size": max_batch_size,
        "plugin_args.max_step_tokens": max_step_tokens,
        "plugin_args.quantization": quantization,
        "plugin_args.native_operators": native_operators,
    }
    if config is None and model is None:
        raise ConfigurationError("give a configuration file or --model; see phalanx serve --help")
    given = {key: value for key, value in flags.items() if value is not None}
    loaded, source = load_config(config, {**given, **assignments(set_ or [])})
    if check:
        print(describe(plan(loaded, source, prepare=False)), end="")
        return
    with settings.importing():
        planned = plan(loaded, source, prepare=True)
    raise typer.Exit(_run(planned))


def load_config(path: Path | None, overrides: dict[str, object]) -> tuple[ServeConfig, str]:
    """The configuration of a file (None: of the flags alone), and how errors call it."""
    if path is None:
        return parse_serve_config("plugin: causal_lm", "flags", overrides), "flags"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        is_model = path.is_dir() or str(path) in checkpoint_names()
        hint = f"; did you mean `--model {path}`?" if is_model else ""
        raise ConfigurationError(f"{unreadable(path, error)}{hint}") from None
    return parse_serve_config(text, str(path), overrides, path.parent.absolute()), str(path)


def assignments(pairs: Sequence[str]) -> dict[str, object]:
    """What `--set KEY=VALUE` pairs say, by key; values are YAML."""
    assigned: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigurationError(f"--set {pair!r} must be KEY=VALUE")
        assigned[key] = parse_yaml(value, f"--set {key}")
    return assigned


def _run(plan: ServePlan) -> int:
    from phalanx.engine.engine import Engine

    file = plan.log.file
    try:
        log.configure(
            plan.log.effective_level,
            json=plan.server.log_json,
            file=None if file is None else Path(file),
        )
    except OSError as error:
        raise ConfigurationError(f"cannot write the log file {file}: {error.strerror}") from None
    name, deployment = plan.engine.plugin, plan.placement.with_ports()
    if deployment.supervision.node_rank > 0:
        from phalanx.cli.serve_follower import run_follower

        return run_follower(plan.engine, deployment)

    def load() -> Engine:
        engine = Engine(plan.engine, deployment=deployment)
        # Without auto_start too: a server tells the limits that workers report.
        engine.setup()
        return engine

    if plan.policy is not None:
        from phalanx.server.policy.main import run_policy_server

        return run_policy_server(
            load,
            plan.policy,
            plan.server,
            on_ready=lambda served: print(f"phalanx: {served}", flush=True),
        )
    from phalanx.server.main import run_server

    return run_server(
        load,
        plan.serving,
        plan.server,
        videos=plan.videos,
        on_ready=lambda url: print(f"phalanx: serving {name} at {url}", flush=True),
    )
