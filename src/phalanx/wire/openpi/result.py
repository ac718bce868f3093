"""The frames that an openpi client gets: one of metadata first, then one for each observation."""

from __future__ import annotations

from collections.abc import Mapping

from phalanx.schema.observation import Actions
from phalanx.wire.msgpack_numpy import pack


def encode_metadata(metadata: Mapping[str, object]) -> bytes:
    """The first frame of a connection; a client gives it out as `get_server_metadata()`."""
    return pack(metadata)


def encode_result(
    actions: Actions, *, infer_ms: float, server_ms: float, previous_ms: float | None = None
) -> bytes:
    """The frame for one observation.

    `infer_ms` is the policy's own time, `server_ms` that from the frame's arrival to its answer, and
    `previous_ms` all of the time that the observation before this one took on the connection.
    """
    timing: dict[str, float] = {"infer_ms": server_ms}
    if previous_ms is not None:
        timing["prev_total_ms"] = previous_ms
    return pack(
        {
            **actions.outputs,
            "actions": actions.values,
            "policy_timing": {"infer_ms": infer_ms},
            "server_timing": timing,
        }
    )
