"""Networks whose weights are given up and come back: empty shells on `meta` in between."""

from __future__ import annotations

import torch
from torch import nn

from phalanx.device.memory_account import tensor_bytes
from phalanx.layers.linear import Linear


def drop_parameters(network: nn.Module) -> None:
    """Give up every weight, in every form."""
    for module in network.modules():
        if isinstance(module, Linear):
            module.drop_weight()
    _renew(network, torch.device("meta"), emptied=False)


def take_parameters(network: nn.Module, device: torch.device) -> None:
    """Take memory for those that were given up, laid out as they were, with anything in it."""
    _renew(network, device, emptied=True)


def parameter_bytes(network: nn.Module) -> int:
    """Memory that the weights hold, in every form."""
    packed = (one.packed_bytes for one in network.modules() if isinstance(one, Linear))
    return tensor_bytes(network.parameters()) + sum(packed)


def take_parameter(owner: nn.Module, name: str, device: torch.device) -> None:
    """The same for one of them."""
    old = owner.get_parameter(name)
    # Not `empty_like`: see `shell_of`.
    fresh = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
    owner.register_parameter(name, nn.Parameter(fresh, requires_grad=False))


def _renew(network: nn.Module, device: torch.device, *, emptied: bool) -> None:
    """Put the parameters that are shells, or those that are not, on `device`."""
    for module in network.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta is emptied:
                take_parameter(module, name, device)
