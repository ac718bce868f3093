"""A linear layer whose weight can be swapped for a packed form that a CPU reads faster."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from phalanx.device.operators.base import Operators, PackedWeight
from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.parallel.local import LinearFactory


class Linear(nn.Module):
    """`x @ weight.T + bias` of `x` [T, in], without gradients.

    Made with an uninitialized `weight` [out, in] (on `meta` where it will be assigned). `pack` makes
    a packed copy and, unless `keep_dense`, drops the plain matrix: `weight` is then an empty shell
    on `meta`, and `dense_weight()` or `unpack()` bring it back. A weight that others share (a tied
    embedding) lives on with them. Packed layers take new weights through `replace_weight`.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.weight = _parameter(weight)
        if bias:
            self.bias = _parameter(torch.empty(out_features, dtype=dtype, device=device))
        else:
            self.register_parameter("bias", None)
        self._packed: PackedWeight | None = None
        self._operators: Operators = TorchOperators()
        self._quantization: str | None = None

    def tie(self, weight: nn.Parameter) -> None:
        """Use `weight`, which another module owns, as this layer's."""
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None:
            return functional.linear(x, self.weight, self.bias)
        return self._packed.apply(x, self.bias)

    def pack(
        self,
        quantization: str | None = None,
        *,
        operators: Operators | None = None,
        keep_dense: bool = False,
    ) -> None:
        """Swap in the fastest form that `operators` (plain torch's, if None) have for this weight.

        Without `quantization` a layer for which nothing faster exists stays as it is; `int8`
        rounds the weight, and raises `MissingDependencyError` where it cannot run.
        """
        if self._packed is not None:
            self.unpack()
        self._operators = operators if operators is not None else TorchOperators()
        self._quantization = quantization
        weight = self.weight.detach()
        self._packed = self._operators.pack_weight(weight, quantization)
        if self._packed is not None and not keep_dense:
            self.weight = _parameter(shell_of(weight))

    def drop_weight(self) -> None:
        """Give up the weight, in every form; a new one is assigned, then packed, later."""
        self._packed = None
        self.weight = _parameter(shell_of(self.weight))

    def unpack(self) -> None:
        """Bring the plain matrix back and drop the packed form."""
        self.weight = _parameter(self.dense_weight())
        self._packed = None

    def dense_weight(self) -> Tensor:
        """The plain matrix [out, in], rebuilt from the packed form where it was dropped."""
        if self._packed is not None and self.weight.is_meta:
            return self._packed.dense()
        return self.weight.detach()

    def replace_weight(self, weight: Tensor) -> None:
        """Take a new weight [out, in]; a packed layer is packed again, in the same way."""
        was_packed, keep_dense = self._packed is not None, not self.weight.is_meta
        self._packed = None
        self.weight = _parameter(weight.to(self.weight.dtype))
        if was_packed:
            self.pack(self._quantization, operators=self._operators, keep_dense=keep_dense)

    @property
    def packed_bytes(self) -> int:
        """Memory that the packed copy holds; 0 where the layer is not packed."""
        return 0 if self._packed is None else self._packed.num_bytes


def shell_of(tensor: Tensor, device: torch.device | str = "meta") -> Tensor:
    """As `empty_like`, which of a tensor on `meta` has torch import its symbolic shapes: seconds, and
    tens of megabytes.
    """
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def meta_linear(dtype: torch.dtype) -> LinearFactory:
    """Makes linear layers on the meta device, whose weights are assigned later."""

    def make(in_features: int, out_features: int, *, bias: bool) -> Linear:
        return Linear(in_features, out_features, bias=bias, dtype=dtype, device="meta")

    return make


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
