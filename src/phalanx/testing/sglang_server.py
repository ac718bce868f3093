"""A server that behaves as SGLang 0.5.23 does on its wire, crashes included, and computes nothing:
tokens are pseudo-random numbers of the weights and the prompt.

```sh
python -m phalanx.testing.sglang_server --model-path tiny --port 30000 --enable-memory-saver
```

takes the flags of `python -m sglang.launch_server` that a launcher gives it. Its process ends, as
SGLang's does, on a release while requests run, on a resume of what was not released, and on a step
while memory is released, or for want of room on the devices that `PHALANX_SIMULATED_DEVICES` names.
After a release of the weights without `--enable-weights-cpu-backup` they
are garbage until they are updated. `sglang_app` is the same without a process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from phalanx.device_ledger import DeviceLedger, SimulatedDevice
from phalanx.errors import PhalanxError
from phalanx.testing.sglang_control import SGLangControl
from phalanx.testing.sglang_scheduler import SchedulerOptions, SGLangScheduler
from phalanx.testing.sglang_text import SGLangText


def sglang_app(
    options: SchedulerOptions,
    on_crash: Callable[[str], None],
    server_args: dict[str, object] | None = None,
    devices: Sequence[SimulatedDevice] = (),
) -> Starlette:
    """The application; `on_crash` is told what ended it, and may end the process for real.

    Where it returns, this and every later request raise `SchedulerCrashedError`.
    """
    scheduler = SGLangScheduler(options, on_crash, devices)
    args = {"model_path": options.model, "served_model_name": options.model, **(server_args or {})}
    routes = [*SGLangText(scheduler, args).routes(), *SGLangControl(scheduler, args).routes()]
    return Starlette(routes=routes, exception_handlers={HTTPException: _not_routed})


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


def main(arguments: list[str] | None = None) -> None:
    given = _parser().parse_args(arguments)
    args = {name: value for name, value in vars(given).items() if name != "step_interval_s"}
    args["served_model_name"] = given.served_model_name or given.model_path
    options = SchedulerOptions(
        model=given.model_path,
        memory_saver=given.enable_memory_saver,
        weights_backup=given.enable_weights_cpu_backup,
        step_s=given.step_interval_s,
        context_length=given.context_length,
    )
    try:
        app = sglang_app(options, _die, args, DeviceLedger.from_environment())
    except PhalanxError as error:
        sys.exit(f"torch.OutOfMemoryError: {error}")
    config = uvicorn.Config(
        app,
        log_level=given.log_level,
        timeout_graceful_shutdown=5,
    )
    listener = _listen(given.host, given.port)
    host, port = listener.getsockname()[:2]
    sys.stdout.write(f"The server is fired up and ready to roll at http://{host}:{port}\n")
    sys.stdout.flush()
    with contextlib.ExitStack() as bootstrap:
        if given.disaggregation_mode == "prefill":
            bootstrap.enter_context(_listen(given.host, given.disaggregation_bootstrap_port))
        uvicorn.Server(config).run([listener])


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        sys.exit(f"cannot listen at {host}:{port}: {error.strerror}")
    listener.listen(2048)
    return listener


def _die(reason: str) -> NoReturn:
    """As SGLang's main process, which kills its tree when a scheduler has ended."""
    sys.stderr.write(f"Scheduler hit an exception: {reason}\n")
    sys.stderr.write("Received sigquit from a child process. It usually means the child failed.\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process goes on")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="phalanx.testing.sglang_server",
        description="Behaves as SGLang on its wire, crashes included; tokens are random.",
        allow_abbrev=False,
    )
    parser.add_argument("--model-path", "--model", default="tiny")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free one, and prints it")
    parser.add_argument("--served-model-name")
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-weights-cpu-backup", action="store_true")
    parser.add_argument("--disaggregation-mode", choices=["null", "prefill", "decode"])
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)
    parser.add_argument("--context-length", type=int, default=1 << 20)
    parser.add_argument("--stream-output", action="store_true", help="chunks hold what is new")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--tp-size", "--tp", type=int, default=1)
    for name in ("dtype", "mem-fraction-static", "random-seed", "max-running-requests", "api-key"):
        parser.add_argument(f"--{name}")
    for name in ("trust-remote-code", "disable-cuda-graph", "skip-server-warmup"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument(
        "--step-interval-s", type=float, default=0.0, help="how long a token takes; not SGLang's"
    )
    return parser


if __name__ == "__main__":
    main()
