"""Refuses tensors that a policy cannot take, by the shapes that it reports as its limits."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from phalanx.errors import InvalidRequestError
from phalanx.schema.limits import Limits


def check_tensors(given: Mapping[str, Tensor], limits: Limits) -> None:
    """Float tensors with a row for each observation, named and shaped as `limits.row_shapes`.

    Raises `InvalidRequestError` naming what is missing, unknown, misshapen or not finite.
    """
    shapes, most = limits.row_shapes or {}, limits.max_batch_size or 1
    if given.keys() != shapes.keys():
        raise InvalidRequestError(
            f"there is {', '.join(given) or 'nothing'}; this policy takes {', '.join(shapes)}"
        )
    rows = max(value.shape[0] if value.ndim else 0 for value in given.values())
    if not 1 <= rows <= most:
        raise InvalidRequestError(
            f"there are {rows} rows; this policy takes 1 to max_batch_size={most} in one request"
        )
    for name, value in given.items():
        wanted = (rows, *shapes[name])
        if tuple(value.shape) != wanted or not value.is_floating_point():
            raise InvalidRequestError(
                f"{name} is {value.dtype} of shape {tuple(value.shape)}; give floats of shape "
                f"{wanted}",
                field=name,
            )
        if not bool(value.isfinite().all()):
            raise InvalidRequestError(f"{name} is not finite; send finite numbers", field=name)
