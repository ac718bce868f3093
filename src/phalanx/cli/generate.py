"""`phalanx generate`: one prompt through the engine in this process, streamed to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from phalanx import log, settings
from phalanx.checkpoints import check_checkpoint
from phalanx.cli.checkpoint_progress import prepared_checkpoint
from phalanx.cli.placement import device_list, place
from phalanx.clock import SystemClock
from phalanx.engine_config import EngineArgs
from phalanx.errors import ConfigurationError
from phalanx.plugin import ServingAdapter
from phalanx.schema.deployment_section import DeploymentSection
from phalanx.schema.generate import GenerateDelta, GenerateOutput, GenerateRequest
from phalanx.schema.parallel import (
    AttentionParallelConfig,
    DenseParallelConfig,
    ParallelConfig,
)
from phalanx.schema.plugin_args import build_plugin_args
from phalanx.schema.sampling import SamplingParams
from phalanx.schema.serve_config import EngineSection

PLUGIN = "causal_lm"


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    model: Annotated[
        str, typer.Option(help="A Hugging Face directory or a known name.")
    ] = "smollm2-135m",
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Wrap the prompt in the chat template, or not."),
    ] = None,
    stream: Annotated[bool, typer.Option(help="Print the text as it comes.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    num_threads: Annotated[int | None, typer.Option(help="Threads that compute.")] = None,
    tp: Annotated[int, typer.Option(help="Ranks, one process each, to cut the model over.")] = 1,
    devices: Annotated[
        str | None, typer.Option(help="Indices of visible devices for the ranks, as 0,1.")
    ] = None,
) -> None:
    """Answer one prompt and say how fast that was.

    The prompt is wrapped in the checkpoint's chat template if it has one, unless --raw.
    """
    from phalanx.engine.engine import Engine
    from phalanx.engine.registry import plugin_class

    log.configure(settings.log_level() or "WARNING")
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens, temperature=temperature, sampling_seed=seed
    )
    config = EngineSection(device=device, dtype=dtype, num_threads=num_threads).engine_config(
        ParallelConfig(
            dense=DenseParallelConfig(tp_size=tp), attention=AttentionParallelConfig(tp_size=tp)
        )
    )
    plugin = plugin_class(PLUGIN)
    plugin.validate_parallel(config.parallel)
    placement = place(DeploymentSection(devices=tuple(device_list(devices or ""))), config)
    check_checkpoint(model)
    values = {"checkpoint_dir": str(prepared_checkpoint(model))}
    args = build_plugin_args(plugin.args_cls, values, "flags")
    request = _request(text, sampling, plugin.serving(args), chat)
    engine_args = EngineArgs(PLUGIN, args, config)
    with Engine(engine_args, deployment=placement.with_ports()) as engine:
        _answer(engine.stream(request), show=stream)


def _request(
    text: str, sampling: SamplingParams, serving: ServingAdapter | None, chat: bool | None
) -> GenerateRequest:
    tokenizer = None if serving is None else serving.tokenizer
    template = None if tokenizer is None else tokenizer.chat_template
    if chat is False or (chat is None and template is None):
        return GenerateRequest(prompt=text, sampling=sampling)
    if tokenizer is None or template is None:
        raise ConfigurationError("this checkpoint has no chat template; use --raw")
    rendered = template.render([{"role": "user", "content": text}])
    return GenerateRequest(input_ids=tuple(tokenizer.encode_chat(rendered)), sampling=sampling)


def _answer(items: Iterable[GenerateDelta | GenerateOutput], *, show: bool) -> None:
    """Print the text of one completion to stdout, and its speed to stderr."""
    clock = SystemClock()
    start_s = clock.monotonic_s()
    first_s: float | None = None
    output: GenerateOutput | None = None
    for item in items:
        first_s = clock.monotonic_s() if first_s is None else first_s
        if isinstance(item, GenerateOutput):
            output = item
        elif show:
            print(item.text or "", end="", flush=True)
    assert output is not None and first_s is not None
    if not show:
        print(output.completions[0].text or "", end="")
    print(flush=True)
    print(_speed(output, first_s - start_s, clock.monotonic_s() - start_s), file=sys.stderr)


def _speed(output: GenerateOutput, first_s: float, total_s: float) -> str:
    """Decoding speed counts the tokens after the first, over the time after the first."""
    num_tokens = len(output.completions[0].token_ids)
    decoding = f"{(num_tokens - 1) / (total_s - first_s):.1f} tokens/s" if num_tokens > 1 else "-"
    return (
        f"[{output.prompt_tokens} prompt tokens, {num_tokens} generated; first after"
        f" {first_s:.2f} s, then {decoding}]"
    )
