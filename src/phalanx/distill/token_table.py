"""Tables of tokens with their log-probabilities, a row for each token of a response, held as bytes
so that stores write them as they are.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from phalanx.errors import InvalidRequestError

IdArray = NDArray[np.int32]
ScoreArray = NDArray[np.float32]
_ID, _SCORE = np.dtype("<i4"), np.dtype("<f4")


class TokenTable(msgspec.Struct, frozen=True):
    """`width` tokens at each of `num_rows` positions: `ids` as int32 and `log_probs` as float32,
    both little endian, row after row.
    """

    num_rows: int
    width: int
    ids: bytes
    log_probs: bytes

    def __post_init__(self) -> None:
        if self.num_rows < 0 or self.width < 1:
            raise InvalidRequestError(
                f"a table of {self.num_rows} rows of {self.width} tokens; give at least one token a"
                " row"
            )
        for name, size in (("ids", len(self.ids)), ("log_probs", len(self.log_probs))):
            if size != 4 * self.num_rows * self.width:
                raise InvalidRequestError(
                    f"{name} has {size} bytes; {self.num_rows} rows of {self.width} have"
                    f" {4 * self.num_rows * self.width}",
                    field=name,
                )

    @classmethod
    def of(cls, ids: object, log_probs: object, width: int) -> TokenTable:
        """Of anything that numpy makes an array [rows, width] of."""
        return cls.of_arrays(
            np.asarray(ids, dtype=_ID).reshape(-1, width),
            np.asarray(log_probs, dtype=_SCORE).reshape(-1, width),
        )

    @classmethod
    def of_arrays(cls, ids: IdArray, log_probs: ScoreArray) -> TokenTable:
        """Of two arrays [rows, width]."""
        return cls(
            ids.shape[0],
            ids.shape[1],
            _bytes(ids, _ID),
            _bytes(log_probs, _SCORE),
        )

    @property
    def id_array(self) -> IdArray:
        """int32 [num_rows, width], read-only."""
        return np.frombuffer(self.ids, _ID).reshape(self.num_rows, self.width)

    @property
    def score_array(self) -> ScoreArray:
        """float32 [num_rows, width], read-only."""
        return np.frombuffer(self.log_probs, _SCORE).reshape(self.num_rows, self.width)


class SupportTable(msgspec.Struct, frozen=True):
    """The tokens over which a loss is summed at each position: the first `sizes[row]` of `width`;
    the others are padding (id 0, log-probability 0). `student` is empty where nobody has scored the
    student at them.
    """

    num_rows: int
    width: int
    ids: bytes
    student: bytes
    teacher: bytes
    sizes: bytes

    def __post_init__(self) -> None:
        cells = 4 * self.num_rows * self.width
        wanted = (("ids", cells), ("teacher", cells), ("sizes", 4 * self.num_rows))
        for name, size in wanted:
            if len(getattr(self, name)) != size:
                raise InvalidRequestError(
                    f"{name} has {len(getattr(self, name))} bytes instead of {size}", field=name
                )
        if len(self.student) not in (0, cells):
            raise InvalidRequestError(
                f"student has {len(self.student)} bytes instead of {cells}, or none",
                field="student",
            )

    @classmethod
    def of_arrays(
        cls, ids: IdArray, student: ScoreArray | None, teacher: ScoreArray, sizes: IdArray
    ) -> SupportTable:
        """Of arrays [rows, width], and the sizes [rows]."""
        return cls(
            ids.shape[0],
            ids.shape[1],
            _bytes(ids, _ID),
            b"" if student is None else _bytes(student, _SCORE),
            _bytes(teacher, _SCORE),
            _bytes(sizes, _ID),
        )

    @property
    def id_array(self) -> IdArray:
        """int32 [num_rows, width], read-only."""
        return np.frombuffer(self.ids, _ID).reshape(self.num_rows, self.width)

    @property
    def teacher_array(self) -> ScoreArray:
        """float32 [num_rows, width], read-only."""
        return np.frombuffer(self.teacher, _SCORE).reshape(self.num_rows, self.width)

    @property
    def student_array(self) -> ScoreArray | None:
        """float32 [num_rows, width], read-only."""
        if not self.student:
            return None
        return np.frombuffer(self.student, _SCORE).reshape(self.num_rows, self.width)

    @property
    def size_array(self) -> IdArray:
        """int32 [num_rows], read-only."""
        return np.frombuffer(self.sizes, _ID)


def _bytes(values: NDArray[np.generic], kind: np.dtype[Any]) -> bytes:
    return np.ascontiguousarray(values, dtype=kind).tobytes()
