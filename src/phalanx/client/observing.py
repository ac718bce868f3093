"""An `Observation` of what is at hand in a robot's program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from phalanx.errors import InvalidRequestError
from phalanx.schema.observation import Observation


def observe(
    images: Mapping[str, NDArray[np.uint8]] | None = None,
    state: ArrayLike | None = None,
    instruction: str | Sequence[str] = "",
    *,
    horizon: int | None = None,
    parameters: Mapping[str, object] | None = None,
) -> Observation:
    """A batch where `instruction` is a list, the state has two dimensions, or an image four; one
    text is then for all rows. Raises `InvalidRequestError` for what no policy could be sent.
    """
    images = images or {}
    for name, image in images.items():
        if not isinstance(image, np.ndarray):
            raise InvalidRequestError(
                f"image {name!r} is {type(image).__name__}; give a numpy array", field=name
            )
    numbers = None if state is None else _numbers(state)
    rows = _num_rows(images, numbers)
    single = isinstance(instruction, str)
    return Observation(
        images=images,
        state=numbers,
        instructions=(instruction,) * (rows or 1)
        if isinstance(instruction, str)
        else tuple(instruction),
        batched=not single or rows is not None,
        horizon=horizon,
        parameters=parameters or {},
    )


def _numbers(state: ArrayLike) -> NDArray[np.float32]:
    try:
        # What does not fit becomes infinite, which the observation refuses.
        with np.errstate(over="ignore"):
            return np.asarray(state, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the state is not numbers: {error}", field="state") from error


def _num_rows(
    images: Mapping[str, NDArray[np.uint8]], state: NDArray[np.float32] | None
) -> int | None:
    for image in images.values():
        if image.ndim == 4:
            return len(image)
    return len(state) if state is not None and state.ndim == 2 else None
