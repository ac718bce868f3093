"""What a loaded plugin can take, reported when it is ready and used to refuse requests early."""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one replica; None where a bound does not apply.

    `context_length`: tokens of prompt and output of one request. `pool_tokens`: tokens that the
    cache holds over all requests. `vocab_size`: number of token ids. `max_batch_size`: requests
    in one step. `payload_bytes`: largest request payload. `row_shapes`: for a plugin that takes
    tensors, the shape of one row of each by its field's name.
    """

    context_length: int | None = None
    pool_tokens: int | None = None
    vocab_size: int | None = None
    max_batch_size: int | None = None
    payload_bytes: int | None = None
    row_shapes: dict[str, tuple[int, ...]] | None = None
