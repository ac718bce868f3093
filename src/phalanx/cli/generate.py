"""`phalanx generate`: one prompt through the engine in this process, to the terminal or to a file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phalanx import log, settings
from phalanx.checkpoints import check_checkpoint
from phalanx.cli.placement import Placement, device_list, place
from phalanx.engine_config import EngineArgs, EngineConfig, EntryArgs
from phalanx.errors import ConfigurationError
from phalanx.schema.deployment_section import DeploymentSection
from phalanx.schema.parallel import (
    AttentionParallelConfig,
    DenseParallelConfig,
    OuterParallelConfig,
    ParallelConfig,
)
from phalanx.schema.plugin_args import build_plugin_args
from phalanx.schema.sampling import SamplingParams
from phalanx.schema.serve_config import EngineSection

if TYPE_CHECKING:
    from phalanx.cli.generate_text import TextFlags
    from phalanx.cli.generate_video import VideoTarget
    from phalanx.plugin import VideoAdapter
    from phalanx.schema.videos import VideoPrompt

TEXT_PLUGIN, VIDEO_PLUGIN = "causal_lm", "cosmos3"
_TEXT, _VIDEO, _ENGINE = "Text", "Video", "Engine"


def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; - reads it from standard input.")
    ] = None,
    prompt_flag: Annotated[
        str | None, typer.Option("--prompt", help="The same, as a flag.", show_default=False)
    ] = None,
    model: Annotated[
        str, typer.Option(help="A directory of Hugging Face or diffusers, or a known name.")
    ] = "smollm2-135m",
    plugin: Annotated[
        str | None,
        typer.Option(
            help="What runs it. Without: cosmos3 where it has a transformer/ folder, else causal_lm."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling reproducible.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Longest answer in tokens. [256]", rich_help_panel=_TEXT)
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token. [0]", rich_help_panel=_TEXT)
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Wrap the prompt in the chat template, or not.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    stream: Annotated[
        bool | None,
        typer.Option(
            "--stream/--no-stream", help="Print the text as it comes.", rich_help_panel=_TEXT
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The file to write: .mp4, .png or .npz.", rich_help_panel=_VIDEO),
    ] = None,
    negative_prompt: Annotated[
        str | None, typer.Option(help="What is not to be seen.", rich_help_panel=_VIDEO)
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="WIDTHxHEIGHT in pixels.", rich_help_panel=_VIDEO)
    ] = None,
    frames: Annotated[
        int | None, typer.Option(help="How many; 1 is a picture.", rich_help_panel=_VIDEO)
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="How long, instead of --frames.", rich_help_panel=_VIDEO)
    ] = None,
    fps: Annotated[
        float | None, typer.Option(help="Frames per second.", rich_help_panel=_VIDEO)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Denoise steps.", rich_help_panel=_VIDEO)
    ] = None,
    guidance: Annotated[
        float | None,
        typer.Option(
            help="How strongly the prompt counts; 1: no guidance.", rich_help_panel=_VIDEO
        ),
    ] = None,
    guidance_interval: Annotated[
        str | None,
        typer.Option(help="LOW,HIGH: guide timesteps of these only.", rich_help_panel=_VIDEO),
    ] = None,
    flow_shift: Annotated[
        float | None,
        typer.Option(help="Shift of the noise schedule.", rich_help_panel=_VIDEO),
    ] = None,
    image: Annotated[
        Path | None, typer.Option(help="JPEG or PNG: its first frame.", rich_help_panel=_VIDEO)
    ] = None,
    video: Annotated[
        Path | None, typer.Option(help="A clip to go on from.", rich_help_panel=_VIDEO)
    ] = None,
    sound: Annotated[
        bool | None,
        typer.Option("--sound", help="With .npz: latents of sound.", rich_help_panel=_VIDEO),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder of tokenizer.json. [the model's]", rich_help_panel=_VIDEO),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N.", rich_help_panel=_ENGINE)
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16.", rich_help_panel=_ENGINE),
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="Threads that compute.", rich_help_panel=_ENGINE)
    ] = None,
    tp: Annotated[
        int,
        typer.Option(
            help="Ranks, one process each, to cut the model over.", rich_help_panel=_ENGINE
        ),
    ] = 1,
    cfg: Annotated[
        int, typer.Option(help="2: ranks for each branch of guidance.", rich_help_panel=_ENGINE)
    ] = 1,
    devices: Annotated[
        str | None,
        typer.Option(
            help="Indices of visible devices for the ranks, as 0,1.", rich_help_panel=_ENGINE
        ),
    ] = None,
) -> None:
    """Answer one prompt and say how fast that was: text to the terminal, a video to --out.

    A prompt for text is wrapped in the checkpoint's chat template if it has one, unless --raw.
    """
    from phalanx.cli.generate_text import TextFlags
    from phalanx.cli.generate_video import VideoFlags

    log.configure(settings.log_level() or "WARNING")
    text_flags = TextFlags(max_new_tokens, temperature, chat, stream)
    video_flags = VideoFlags(
        out=out,
        negative_prompt=negative_prompt,
        size=size,
        frames=frames,
        seconds=seconds,
        fps=fps,
        steps=steps,
        guidance=guidance,
        guidance_interval=guidance_interval,
        flow_shift=flow_shift,
        image=image,
        video=video,
        sound=sound,
        tokenizer=tokenizer,
    )
    text, sampling = _prompt(prompt, prompt_flag), text_flags.sampling(seed)
    config = EngineSection(device=device, dtype=dtype, num_threads=num_threads).engine_config(
        ParallelConfig(
            OuterParallelConfig(cfg_size=cfg),
            dense=DenseParallelConfig(tp_size=tp),
            attention=AttentionParallelConfig(tp_size=tp),
        )
    )
    deployment = DeploymentSection(devices=tuple(device_list(devices or "")))
    loading = _Loading.of(model, plugin, config, deployment)
    adapter = loading.videos(video_flags.settings)
    if adapter is None:
        _refuse(video_flags.given, "makes text, not videos")
        _answer(loading, text, sampling, text_flags)
    else:
        _refuse(text_flags.given, "makes videos, not text")
        target = video_flags.target()
        wish = video_flags.prompt(text, seed, adapter.num_clip_frames)
        _film(loading, adapter, wish, target)


@dataclass(frozen=True)
class _Loading:
    """What is to be loaded, checked."""

    plugin: str
    args: EntryArgs
    config: EngineConfig
    placement: Placement

    @classmethod
    def of(
        cls, model: str, plugin: str | None, config: EngineConfig, deployment: DeploymentSection
    ) -> _Loading:
        from phalanx.cli.checkpoint_progress import prepared_checkpoint
        from phalanx.engine.registry import plugin_class

        check_checkpoint(model)
        directory = prepared_checkpoint(model)
        is_pipeline = (directory / "transformer" / "config.json").is_file()
        name = plugin or (VIDEO_PLUGIN if is_pipeline else TEXT_PLUGIN)
        chosen = plugin_class(name)
        chosen.validate_parallel(config.parallel)
        placement = place(deployment, config)
        args = build_plugin_args(chosen.args_cls, {"checkpoint_dir": str(directory)}, "flags")
        return cls(name, args, config, placement)

    def videos(self, adapter_settings: dict[str, Any]) -> VideoAdapter | None:
        from phalanx.engine.registry import plugin_class

        return plugin_class(self.plugin).videos(self.args, adapter_settings)

    @property
    def engine_args(self) -> EngineArgs:
        return EngineArgs(self.plugin, self.args, self.config)


def _prompt(argument: str | None, flag: str | None) -> str:
    given = [one for one in (argument, flag) if one is not None]
    if len(given) != 1:
        raise ConfigurationError(
            "give the prompt once: as an argument, or with --prompt"
            + ("" if given else "; - reads it from standard input")
        )
    return sys.stdin.read() if given[0] == "-" else given[0]


def _refuse(flags: list[str], does: str) -> None:
    if flags:
        raise ConfigurationError(f"{flags[0]} is not for this model, which {does}; leave it out")


def _answer(loading: _Loading, text: str, sampling: SamplingParams, flags: TextFlags) -> None:
    from phalanx.cli.generate_text import print_answer
    from phalanx.engine.engine import Engine
    from phalanx.engine.registry import plugin_class

    request = flags.request(text, sampling, plugin_class(loading.plugin).serving(loading.args))
    with Engine(loading.engine_args, deployment=loading.placement.with_ports()) as engine:
        print_answer(engine.stream(request), show=flags.stream is not False)


def _film(loading: _Loading, adapter: VideoAdapter, wish: VideoPrompt, target: VideoTarget) -> None:
    from phalanx.cli.generate_video import write_video
    from phalanx.engine.engine import Engine

    adapter.check_format(wish, target.format)
    request = adapter.request(wish)
    with (
        Engine(loading.engine_args, deployment=loading.placement.with_ports()) as engine,
        engine.stream(request) as items,
    ):
        write_video(items, adapter, wish, target)
