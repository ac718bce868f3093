"""The proxies that the gateway benchmark knows, and how each is installed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.bench.systems import BenchmarkedSystem
from phalanx.errors import ConfigurationError, MissingDependencyError

_OURS = "phalanx"
_OF_ROUTERS = ("json", "sse")
LOAD = BenchmarkedSystem("load", "gateway_load_worker.py", _OURS)
PHALANX = BenchmarkedSystem("phalanx", "gateway_phalanx_worker.py", _OURS)


@dataclass(frozen=True)
class Proxy:
    """`worker` runs in our interpreter and starts `program`, a name on PATH or a path. `traffic` is
    what it takes: routers of language models refuse binary bodies and know no other protocol.
    """

    system: BenchmarkedSystem
    program: str
    install: tuple[str, ...]
    traffic: tuple[str, ...] = (
        "json",
        "binary",
        "sse",
        "role-json",
        "role-sse",
        "websocket",
        "grpc",
    )

    @property
    def name(self) -> str:
        return self.system.name


PEERS = {
    proxy.name: proxy
    for proxy in (
        Proxy(
            BenchmarkedSystem("nginx", "gateway_nginx_worker.py", _OURS),
            "nginx",
            ("apt-get install -y nginx-light",),
        ),
        Proxy(
            BenchmarkedSystem("haproxy", "gateway_haproxy_worker.py", _OURS),
            "haproxy",
            ("apt-get install -y haproxy",),
        ),
        Proxy(
            BenchmarkedSystem("sglang-router", "gateway_router_worker.py", _OURS),
            ".venv-router/bin/python",
            ("python scripts/peer_env.py router",),
            traffic=_OF_ROUTERS,
        ),
        Proxy(
            BenchmarkedSystem("vllm-router", "gateway_vllm_router_worker.py", _OURS),
            ".venv-proxies/bin/python",
            ("python scripts/peer_env.py proxies",),
            traffic=_OF_ROUTERS,
        ),
        Proxy(
            BenchmarkedSystem("envoy", "gateway_envoy_worker.py", _OURS),
            ".venv-proxies/bin/envoy",
            ("python scripts/peer_env.py proxies",),
        ),
    )
}


def find_programs(proxies: Sequence[Proxy], given: Mapping[str, Path]) -> dict[str, str]:
    """The program of each proxy, by its name.

    Raises `MissingDependencyError` with the commands that install one that is absent.
    """
    found = {}
    for proxy in proxies:
        path = given.get(proxy.name)
        if path is not None and not path.is_file():
            raise ConfigurationError(
                f"--program {proxy.name}={path}: there is no such file; give the path of its program"
            )
        # Programs of the system's administration are often not on a user's PATH.
        places = None if "/" in proxy.program else "/usr/sbin:/usr/local/sbin"
        program = str(path) if path else shutil.which(proxy.program)
        program = program or shutil.which(proxy.program, path=places)
        if program is None:
            commands = "\n  ".join(proxy.install)
            raise MissingDependencyError(
                f"{proxy.name} is not installed. Install it with\n  {commands}\n"
                f"or say where it is: --program {proxy.name}=/path/to/{Path(proxy.program).name}"
            )
        found[proxy.name] = program
    return found
