"""The sizes that are captured, as (rows, tokens), and which of them a batch fits into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import ConfigurationError

DEFAULT_ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Shapes:
    """Batched (no `token_buckets`): every row has exactly `row_tokens` tokens. Packed: rows of any
    lengths share one of the `token_buckets`.
    """

    rows: tuple[int, ...] = DEFAULT_ROWS
    row_tokens: int = 1
    token_buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, sizes in (("rows", self.rows), ("token_buckets", self.token_buckets)):
            if any(size < 1 for size in sizes) or len(set(sizes)) != len(sizes):
                raise ConfigurationError(
                    f"{name}={sizes} of a capture; give distinct sizes of at least 1"
                )
        if not self.rows or self.row_tokens < 1:
            raise ConfigurationError(
                f"rows={self.rows} and row_tokens={self.row_tokens} of a capture; "
                "give at least one number of rows, and at least one token a row"
            )

    @property
    def packed(self) -> bool:
        return bool(self.token_buckets)

    @property
    def max_rows(self) -> int:
        return max(self.rows)

    @property
    def max_tokens(self) -> int:
        return max(self.token_buckets, default=self.max_rows * self.row_tokens)

    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Every (rows, tokens), largest first, so that the first one needs the largest buffers."""
        if self.packed:
            pairs = [(rows, tokens) for rows in self.rows for tokens in self.token_buckets]
        else:
            pairs = [(rows, rows * self.row_tokens) for rows in self.rows]
        return tuple(sorted(pairs, reverse=True))

    def takes(self, spans: Sequence[int]) -> bool:
        """Whether rows of these lengths may be laid out in a shape that is large enough."""
        return self.packed or all(span == self.row_tokens for span in spans)
