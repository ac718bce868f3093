"""Over how many ranks a replica is cut by its engine's own flags: what they say has to be as many as
its group gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from phalanx.errors import ConfigurationError
from phalanx.schema.file_keys import readable
from phalanx.schema.parallel import ParallelConfig
from phalanx.schema.roles import EngineGroupSpec, EngineKind

TP_NAMES = ("tp", "tp_size", "tensor_parallel_size")
_PP_NAMES = ("pp", "pp_size", "pipeline_parallel_size")
_DP_NAMES = ("dp", "dp_size", "data_parallel_size")
_PARALLEL = "parallel."


def plain_names(options: Mapping[str, object]) -> dict[str, object]:
    """Flags by the names that they have in Python."""
    return {name.replace("-", "_"): value for name, value in options.items()}


def says_ranks(options: Mapping[str, object]) -> bool:
    """Whether flags of `phalanx serve` say over how many ranks it is cut."""
    return any(name == "tp" or name.startswith(_PARALLEL) for name in options)


def sglang_tensor_parallel(options: Mapping[str, object], ranks: int) -> int:
    """What pipeline stages and copies leave of the ranks. Attention that is data-parallel shares
    the ranks of the rest of the model.
    """
    parts = _size(options, _PP_NAMES)
    if not options.get("enable_dp_attention"):
        parts *= _size(options, _DP_NAMES)
    if ranks % parts:
        raise ConfigurationError(
            f"ranks={ranks} cannot be cut into {parts} equal parts, as pp_size and dp_size ask for"
        )
    return ranks // parts


def check_ranks(group: EngineGroupSpec) -> None:
    """Refuse flags that make another number of ranks than the group's. Raises
    `ConfigurationError`.
    """
    if group.engine is EngineKind.SGLANG:
        _check_sglang(plain_names(group.engine_args), group.ranks_per_replica)
    elif group.engine is EngineKind.PHALANX:
        _check_phalanx(group.engine_args, group.ranks_per_replica)


def _check_sglang(options: Mapping[str, object], ranks: int) -> None:
    derived = sglang_tensor_parallel(options, ranks)
    said = any(options.get(name) is not None for name in TP_NAMES)
    tensor = _size(options, TP_NAMES) if said else derived
    if tensor != derived:
        stages, copies = _size(options, _PP_NAMES), _size(options, _DP_NAMES)
        shared = bool(options.get("enable_dp_attention"))
        made = tensor * stages * (1 if shared else copies)
        shown = f"tp_size={tensor} x pp_size={stages}"
        if not shared and copies > 1:
            shown += f" x dp_size={copies}"
        raise ConfigurationError(
            f"engine_args: {shown} = {made} ranks, and ranks={ranks}; set ranks to {made}, set"
            f" tp_size to {derived}, or leave tp_size out, which is then derived"
        )
    copies = _size(options, _DP_NAMES)
    if options.get("enable_dp_attention") and tensor % copies:
        raise ConfigurationError(
            f"engine_args.dp_size={copies} does not divide tp_size={tensor}, as"
            " enable_dp_attention asks for; choose a divisor, or leave enable_dp_attention out"
        )


def _check_phalanx(options: Mapping[str, object], ranks: int) -> None:
    copies, said = _number(options, "replicas"), says_ranks(options)
    world = _parallel(options).infer_replica_world_size() if said else ranks
    if world * copies == ranks:
        return
    made = world * copies
    shown = f"{made} ranks" if copies == 1 else f"replicas={copies} x {world} ranks = {made}"
    way = f"set ranks to {made}" if said else "say tp too"
    raise ConfigurationError(
        f"engine_args make {shown}, and ranks={ranks}; {way}, or leave out"
        " replicas, tp and parallel.*, which are then derived"
    )


def _parallel(options: Mapping[str, object]) -> ParallelConfig:
    """What `tp` and `parallel.*` come to."""
    document: dict[str, Any] = {}
    for name, value in options.items():
        if name == "tp":
            for domain in ("dense", "attention"):
                document.setdefault(domain, {})["tp_size"] = value
        elif name.startswith(_PARALLEL):
            domain, _, key = name.removeprefix(_PARALLEL).partition(".")
            document.setdefault(domain, {})[key] = value
    try:
        return msgspec.convert(document, ParallelConfig)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"engine_args: {_PARALLEL}{readable(error)}") from None


def _size(options: Mapping[str, object], names: tuple[str, ...]) -> int:
    given = next((name for name in names if options.get(name) is not None), names[1])
    return _number(options, given)


def _number(options: Mapping[str, object], name: str) -> int:
    given = options.get(name)
    if given is None:
        return 1
    if isinstance(given, str) and given.isdecimal():
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        raise ConfigurationError(f"engine_args.{name}={given!r} must be a whole number from 1 on")
    return given
