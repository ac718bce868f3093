"""What `phalanx serve` needs for a robot policy, or for videos, beside the engine: the adapter, and
checked settings."""

from __future__ import annotations

from phalanx.engine.registry import PluginClass
from phalanx.engine_config import EntryArgs
from phalanx.errors import ConfigurationError
from phalanx.plugin import PolicyAdapter, VideoAdapter
from phalanx.routing.endpoint import Endpoint, Scheme
from phalanx.schema.serve_config import AdapterSection
from phalanx.schema.server_config import ServerConfig


def create_policy(
    plugin: PluginClass, args: EntryArgs, section: AdapterSection, source: str
) -> PolicyAdapter | None:
    """The adapter of a robot policy, None for a plugin that is none.

    Raises `ConfigurationError` for an adapter that cannot be made.
    """
    try:
        if section.factory is None:
            return plugin.policy(args, section.args)
        return _made(section, args)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: adapter: {error}") from error


def create_videos(
    plugin: PluginClass, args: EntryArgs, section: AdapterSection, source: str
) -> VideoAdapter | None:
    """The adapter of a plugin that makes videos, None for one that makes none."""
    if section.factory is not None:
        return None
    try:
        return plugin.videos(args, section.args)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: adapter: {error}") from error


def _made(section: AdapterSection, args: EntryArgs) -> PolicyAdapter:
    from phalanx.server.backends.importing import imported

    assert section.factory is not None
    factory = imported(section.factory, "factory")
    try:
        adapter: PolicyAdapter = factory(args, **section.args)
    except TypeError as error:
        # An argument that it does not know, or lacks.
        raise ConfigurationError(f"factory={section.factory!r}: {error}") from error
    return adapter


def check_policy_server(server: ServerConfig, source: str) -> None:
    """Refuse addresses that cannot be listened on together, or that a gateway could not use."""
    if server.port not in (None, 0) and server.port == server.http_port:
        raise ConfigurationError(
            f"{source}: server.port={server.port} and server.http_port are the same port; gRPC and "
            "HTTP need one each"
        )
    if server.gateway is None:
        return
    _check_address("gateway", server.gateway, source)
    if server.advertise is not None:
        _check_address("advertise", server.advertise, source)


def _check_address(key: str, text: str, source: str) -> None:
    try:
        endpoint = Endpoint.parse(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"{source}: server.{key}: {error}") from error
    if endpoint.scheme is not Scheme.GRPC:
        raise ConfigurationError(f"{source}: server.{key}={text!r} must be HOST:PORT, without http")


def refuse_policy_keys(
    server: ServerConfig, section: AdapterSection, plugin: str, source: str
) -> None:
    """What only a robot policy has, given for a plugin that is none."""
    given = [
        key
        for key, value in (
            ("server.http_port", server.http_port),
            ("server.gateway", server.gateway),
            ("adapter", section.args),
        )
        if value
    ]
    if given:
        raise ConfigurationError(
            f"{source}: {given[0]} is for robot policies, and plugin {plugin!r} is none; leave it "
            "out, or name adapter.factory"
        )
