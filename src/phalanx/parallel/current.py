"""Which mesh a call without a mesh means: the only state of this package that is not passed on.

It belongs to the thread (or task) that set it. An engine sets its own mesh around each call into
its plugin, so engines in one process do not see each other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType

from phalanx.errors import PhalanxDistError
from phalanx.parallel.mesh import Group, Mesh


@dataclass(frozen=True)
class _Meshes:
    """The meshes that are known here by name, and the one that is meant where none is named."""

    default: Mesh | None = None
    known: Mapping[str, Mesh] = field(default_factory=lambda: MappingProxyType({}))


_current: ContextVar[_Meshes] = ContextVar("phalanx_mesh")
_NONE = _Meshes()


def default_mesh() -> Mesh:
    """The mesh that is current here. Raises `PhalanxDistError` where none is."""
    mesh = _current.get(_NONE).default
    if mesh is None:
        raise PhalanxDistError(
            "no mesh is current here; call this from a plugin's methods, after `init(parallel)` in "
            "the same thread, or inside `use_mesh(mesh)`"
        )
    return mesh


def current_mesh() -> Mesh | None:
    """The mesh that is current here, or None."""
    return _current.get(_NONE).default


@contextmanager
def use_mesh(mesh: Mesh | str) -> Iterator[Mesh]:
    """Make a mesh, given as such or by the name of one that is known here, the current one."""
    found = named_mesh(mesh) if isinstance(mesh, str) else mesh
    token = _current.set(_with(found))
    try:
        yield found
    finally:
        _current.reset(token)


def set_mesh(mesh: Mesh) -> None:
    """Make `mesh` the current one from here on."""
    _current.set(_with(mesh))


def forget_mesh(mesh: Mesh) -> None:
    """Undo `set_mesh`."""
    meshes = _current.get(_NONE)
    known = {name: other for name, other in meshes.known.items() if other is not mesh}
    default = None if meshes.default is mesh else meshes.default
    _current.set(_Meshes(default, MappingProxyType(known)))


def named_mesh(name: str) -> Mesh:
    """The mesh of this name. Raises `PhalanxDistError`."""
    known = _current.get(_NONE).known
    mesh = known.get(name)
    if mesh is None:
        raise PhalanxDistError(
            f"no mesh is named {name!r} here; known are: {', '.join(known) or 'none'}"
        )
    return mesh


def find_group(group: Group | str, mesh: Mesh | str | None) -> Group:
    """The group that a call means. Raises `PhalanxDistError`."""
    if isinstance(group, Group):
        return group
    if mesh is None:
        mesh = default_mesh()
    elif isinstance(mesh, str):
        mesh = named_mesh(mesh)
    return mesh.group(group)


def _with(mesh: Mesh) -> _Meshes:
    known = {**_current.get(_NONE).known, mesh.name: mesh}
    return _Meshes(mesh, MappingProxyType(known))
