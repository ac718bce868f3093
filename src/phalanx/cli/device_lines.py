"""Devices on a line each: how full they are, the most that they were, and whose it is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.text import Text

from phalanx.roles.control_messages import DeviceStatus

_MIB = 1 << 20


def device_lines(devices: Sequence[DeviceStatus]) -> Iterator[Text]:
    """None where there are no devices to tell of."""
    if not devices:
        return
    names = [_name(one) for one in devices]
    budget = next((one.budget_bytes for one in devices if one.budget_bytes is not None), None)
    title = "devices" if budget is None else f"devices of {_mib(budget)} (simulated)"
    yield Text(title, style="bold")
    width = max(map(len, names))
    for name, device in zip(names, devices, strict=True):
        held = sum(one.num_bytes for one in device.held)
        told = device.unknown or f"{_mib(held)} held, {_mib(device.peak_bytes or 0)} at most"
        style = "green" if held else ""
        line = Text(f"{name:<{width}}  ").append(told, style=style)
        yield line.append("".join(f"  {owner} {words}" for owner, words in _by_owner(device)))


def _name(device: DeviceStatus) -> str:
    """By the plan, and where it is on a cluster."""
    where = "" if device.place is None else f" at {device.place}"
    return f"{device.node}:{device.device}{where}"


def _by_owner(device: DeviceStatus) -> Iterator[tuple[str, str]]:
    tags: dict[str, list[str]] = {}
    for one in device.held:
        tags.setdefault(one.owner, []).append(f"{one.tag} {_mib(one.num_bytes)}")
    for owner, each in tags.items():
        yield owner, f"({', '.join(each)})"


def _mib(num_bytes: int) -> str:
    return (
        f"{num_bytes / _MIB:.0f} MiB" if num_bytes >= 10 * _MIB else f"{num_bytes / _MIB:.2g} MiB"
    )
