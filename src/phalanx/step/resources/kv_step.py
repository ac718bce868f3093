"""What a node declares about the paged cache: its geometry once, and each step's use of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from phalanx.step.declaration import DEFAULT_LABEL, Fork, ResourceStep, Segment
from phalanx.step.resources.base import ResourceConfig


@dataclass(frozen=True)
class KVConfig:
    """Geometry of the cache. `num_pages` does not count the sink page.

    `host_pages` pages of host memory take what is offloaded; with 0 nothing can be. With
    `prefix_cache` requests that give a `KVRequestConfig` share the pages of equal beginnings.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_pages: int
    page_size: int
    max_seq_len: int
    dtype: torch.dtype
    host_pages: int = 0
    prefix_cache: bool = True

    def pages_for(self, tokens: int) -> int:
        """How many pages so many tokens of one stream take."""
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class KVRequestConfig(ResourceConfig):
    """Lets a request take over cached tokens, and others take over what it leaves in its pages.

    Of state that is imported, it needs the streams `labels`.

    `token_ids` are all tokens of its default stream, in order, as far as they are known; the owner
    may append to them while the request lives. The first `reusable` of those at the start need not
    be computed (None: all but the last, whose output is wanted). Requests with another `salt` share
    nothing with this one.

    `others` are the tokens of further streams by label, all of them known; all but the last of each
    need not be computed.

    Only for models in which a token's keys and values depend on no more than the tokens before it.
    """

    token_ids: Sequence[int]
    reusable: int | None = None
    salt: str = ""
    labels: tuple[str, ...] = (DEFAULT_LABEL,)
    others: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def num_reusable(self) -> int:
        """`reusable`, and at most all but the last."""
        most = len(self.token_ids) - 1
        return most if self.reusable is None else min(self.reusable, most)


@dataclass(frozen=True)
class KVStep(ResourceStep):
    """What a step does to the cache.

    `commit=False` reserves, plans and writes, but lengths do not move (a denoising step reads its
    own tokens and leaves none behind). `combined_labels` names plans over several streams of a
    request, one after another: `{"guided": ("prompt", "image")}`. `pre_forks` are copied before
    the forward, `post_forks` after it with the step's tokens in; whole pages are copied, not shared.

    Each new token sees those before it, or, if not `causal`, all new ones of its row too.
    Captured, a step has a plan of each of the `labels`, also without rows, and attention looks at
    `max_context` tokens a row (None: at as many as a sequence may have), masked by what there is.
    """

    segments: tuple[Segment, ...]
    commit: bool = True
    combined_labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pre_forks: tuple[Fork, ...] = ()
    post_forks: tuple[Fork, ...] = ()
    labels: tuple[str, ...] = (DEFAULT_LABEL,)
    max_context: int | None = None
    causal: bool = True
