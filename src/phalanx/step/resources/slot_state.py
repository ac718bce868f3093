"""Named tensors of fixed size for every request, such as a latent that many steps refine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from phalanx.device.base import DeviceBackend
from phalanx.errors import ConfigurationError
from phalanx.step.declaration import DEFAULT_LABEL, StepContext
from phalanx.step.resources.base import BuildInfo, ResourceConfig, ResourceSpec
from phalanx.step.resources.slot_storage import Contents, SlotStorage, StateBlock
from phalanx.step.resources.slot_table import SlotStream
from phalanx.step.resources.slotted_state import SlottedState, StateStep

__all__ = ["SlotState", "SlotStateConfig", "SlotStateSpec", "StateBlock", "StateStep"]


@dataclass(frozen=True)
class SlotStateSpec(ResourceSpec):
    """Declares tensors by name for `max_slots` streams, one stream a (request, label).

    `num_host_slots` is the room on the host for state that makes way for others'.
    """

    tensors: Mapping[str, StateBlock]
    max_slots: int
    num_host_slots: int = 0

    def __post_init__(self) -> None:
        if not self.tensors or self.max_slots < 1:
            raise ConfigurationError(
                f"slot state {self.key!r} has {len(self.tensors)} tensors and {self.max_slots} "
                "slots; each must be at least 1"
            )

    def build(self, info: BuildInfo) -> SlotState:
        storage = SlotStorage(self.tensors, self.max_slots, None, info.backend)
        return SlotState(self, storage, info.backend)


@dataclass(frozen=True, eq=False)
class SlotStateConfig(ResourceConfig):
    """What a request's default stream holds before its first step, by name; zeros for those left
    out.
    """

    initial: Mapping[str, Tensor]


class SlotState(SlottedState):
    """See the module. The label cursor is reset when a step begins."""

    def __init__(self, spec: SlotStateSpec, storage: SlotStorage, backend: DeviceBackend) -> None:
        super().__init__(spec.key, storage, spec.max_slots, spec.num_host_slots, backend)
        self._spec = spec
        self._initial: dict[str, Contents] = {}

    def tensor(self, name: str) -> Tensor:
        """The whole tensor, `[max_slots + 1, *shape]`, for kernels that work in place by slot."""
        return self._storage.tensors[name]

    def read(self, name: str) -> Tensor:
        """A copy of the rows' tensors, `[rows, *shape]`."""
        return self.tensor(name).index_select(0, self.rows.slots)

    def write(self, name: str, values: Tensor) -> None:
        """Replace the rows' tensors."""
        self.tensor(name).index_copy_(0, self.rows.slots, values)

    def ingest_request(self, rid: str, config: ResourceConfig | None) -> None:
        super().ingest_request(rid, config)
        if config is None:
            return
        assert isinstance(config, SlotStateConfig)
        for name, values in config.initial.items():
            block = self._spec.tensors.get(name)
            if block is None or values.shape != block.shape:
                shapes = {known: one.shape for known, one in self._spec.tensors.items()}
                raise ConfigurationError(
                    f"initial {name!r} of shape {tuple(values.shape)} for slot state {self.key!r}; "
                    f"it has {shapes}"
                )
        self._initial.setdefault(rid, config.initial)

    def remove_request(self, rid: str) -> None:
        super().remove_request(rid)
        self._initial.pop(rid, None)

    def _start(self, fresh: Sequence[SlotStream], ctx: StepContext) -> None:
        super()._start(fresh, ctx)
        for rid in ctx.request_ids:
            stream = self._table.of(rid).get(DEFAULT_LABEL)
            if stream is not None and stream in fresh:
                for name, values in self._initial.get(rid, {}).items():
                    self.tensor(name)[stream.slot].copy_(values)
