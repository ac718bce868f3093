"""A CPU's graph: the operations that torch dispatched while a computation ran, to be run again.

Only what goes through torch's dispatcher is seen. Replay calls those operations with the recorded
tensors and copies what they return into the recorded results, so addresses never change. It has the
semantics of a device graph, not its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from phalanx.device.graph import CaptureScope, Computation
from phalanx.errors import ConfigurationError, PhalanxError

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_READS = frozenset({"numpy", "tolist", "item", "__array__", "data_ptr", "cpu_data_ptr"})
"""Methods of a tensor that hand values to the host without the dispatcher's knowledge, or with it."""


@dataclass(frozen=True)
class _Recorded:
    """One operation; `results` are the tensors that its outputs are copied into, None for those
    that lie in its arguments' memory.
    """

    operation: OpOverload[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Tensor | None, ...]


class DispatchTape:
    """See the module. It keeps every tensor it saw alive."""

    def __init__(self, scope: CaptureScope) -> None:
        self._scope = scope
        self._recorded: tuple[_Recorded, ...] | None = None
        self._outputs: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """Operations that a replay runs."""
        return len(self._recorded or ())

    def capture(self, compute: Computation) -> Mapping[str, Tensor]:
        self._scope.enter()
        recorder = _Recorder()
        try:
            with torch.inference_mode(), _NoHostReads(), recorder:
                self._outputs = dict(compute())
        finally:
            self._scope.leave()
        self._recorded = tuple(recorder.recorded)
        return self._outputs

    def replay(self) -> None:
        if self._recorded is None:
            raise PhalanxError("a graph was replayed before it was captured")
        with torch.inference_mode():
            for one in self._recorded:
                computed = one.operation(*one.args, **one.kwargs)
                for kept, new in zip(one.results, _tensors(computed), strict=True):
                    if kept is not None:
                        kept.copy_(new)


def _refusal(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} inside a capture waits for a value of the device, which a replay would not see "
        "again; compute it on the device, or move it into preprocess"
    )


class _NoHostReads(TorchFunctionMode):
    """Refuses what reads a tensor's memory from the host, which the dispatcher does not see."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        name = func.__name__
        if name in _READS:
            raise _refusal(f"Tensor.{name}()")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Lets operations run and notes those that a replay must run again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorded: list[_Recorded] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # A capture is not compiled; to keep the compiler away torch would load it first.
        return False

    def __torch_dispatch__(
        self,
        func: OpOverload[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if _reads_host(func, args):
            raise _refusal(str(func))
        if func.has_kernel_for_dispatch_key(_COMPOSITE):
            # Its parts come here one by one: views among them need not run again. The kernel that
            # ran without a tape runs, not torch's rewriting of it in Python.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)
        computed = func(*args, **kwargs)
        self._note(_Recorded(func, args, kwargs, _results((args, kwargs), computed)))
        return computed

    def _note(self, one: _Recorded) -> None:
        if one.operation._schema.is_mutable or any(kept is not None for kept in one.results):
            self.recorded.append(one)


def _results(given: object, computed: object) -> tuple[Tensor | None, ...]:
    """The tensors that an operation made; None for those in the memory of what it was given."""
    known = {_memory(tensor) for tensor in _tensors(given)}
    made = _tensors(computed)
    return tuple(None if _memory(tensor) in known else tensor for tensor in made)


def _reads_host(func: OpOverload[..., Any], args: Sequence[Any]) -> bool:
    """Whether a value decides what comes out, or how large it is."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1]))


def _memory(tensor: Tensor) -> int:
    """What tells whether tensors share memory; empty ones share nothing."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    address = tensor.untyped_storage().data_ptr()
    return address or id(tensor)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
