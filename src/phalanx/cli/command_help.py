"""`--help` of a command: paragraphs as wide as the terminal, flags without a type, and examples."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping

from typer.core import TyperCommand, TyperGroup, TyperOption

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "serve": (
        "phalanx serve --model smollm2-135m --port 30000",
        "phalanx serve serve.yaml --set server.drain_timeout_s=5",
    ),
    "gateway": (
        "phalanx gateway --backend pi05 127.0.0.1:50063 --lerobot",
        "phalanx gateway --backend chat http://127.0.0.1:30001 --http-port 30000",
    ),
    "generate": (
        'phalanx generate "What is the capital of France?" --max-new-tokens 40',
        'phalanx generate "A hand." --model cosmos3-tiny --out clip.mp4 --size 128x96 --frames 9',
    ),
    "top": ("phalanx top 127.0.0.1:30000 --once",),
    "doctor": ("phalanx doctor roles.yaml",),
    "env": ("phalanx env --json",),
    "up": (
        "phalanx up roles.yaml --check",
        "phalanx up roles.yaml --detach --name mine --set gateway.http_port=0",
    ),
    "plan": ("phalanx plan job.yaml --set placement.mode=split --svg plan.svg",),
    "status": ("phalanx status --watch", "phalanx status --name mine --json"),
    "drain": ("phalanx drain rollout",),
    "sleep": ("phalanx sleep rollout",),
    "wake": ("phalanx wake rollout", "phalanx wake rollout --tags weights"),
    "scale": ("phalanx scale rollout/student 3",),
    "recover": ("phalanx recover rollout/student/0",),
    "unblock": ("phalanx unblock rollout/student/0 --holds weights",),
    "weights": (
        "phalanx weights rollout/student ./step-7 --version 7",
        "phalanx weights rollout/student --version 7",
    ),
    "down": ("phalanx down", "phalanx down --name mine --now"),
    "phase enter": ("phalanx phase enter rollout --batch 7",),
    "phase leave": ("phalanx phase leave --abandon",),
    "phase recover": ("phalanx phase recover --holds-nothing trainer",),
}
"""By the command's words after `phalanx`."""


_LIKE_A_STYLE = re.compile(r"(?<!\\)\[(?=[a-z#/@])")


class HelpfulCommand(TyperCommand):
    """A command. Typer's own breaks lines where the source does, shows `<bool>` as if a flag had a
    value, and takes a word in brackets for a style, which it hides.
    """

    def format_help(self, ctx: object, formatter: object) -> None:
        self.help = _unbroken(self.help or "")
        _tidy(self.get_params(ctx))  # type: ignore[arg-type]
        super().format_help(ctx, formatter)  # type: ignore[arg-type]


class HelpfulGroup(TyperGroup):
    """The same of a command that has commands."""

    def format_help(self, ctx: object, formatter: object) -> None:
        for command in self.commands.values():
            command.help = _unbroken(command.help or "")
        _tidy(self.get_params(ctx))  # type: ignore[arg-type]
        super().format_help(ctx, formatter)  # type: ignore[arg-type]


def _tidy(parameters: Iterable[object]) -> None:
    for option in parameters:
        if isinstance(option, TyperOption):
            option.metavar = "" if option.is_flag else option.metavar
            option.help = _LIKE_A_STYLE.sub(r"\\[", option.help or "")


def examples(words: str) -> str | None:
    """Those of a command, to stand below its options."""
    found = EXAMPLES.get(words)
    return None if found is None else "\n".join(("For example:", *(f"  {each}" for each in found)))


def _unbroken(text: str) -> str:
    """A line a paragraph."""
    return "\n\n".join(part.replace("\n", " ") for part in inspect.cleandoc(text).split("\n\n"))
