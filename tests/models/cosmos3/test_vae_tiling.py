"""Tiles of a decoded video: the whole's pixels away from seams, and the same on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from phalanx import parallel as P
from phalanx.errors import ConfigurationError
from phalanx.models.cosmos3.vae.checkpoint import load_vae
from phalanx.models.cosmos3.vae.codec import WanVae
from phalanx.models.cosmos3.vae.tiling import TiledDecoder, Tiling
from phalanx.schema.parallel import ParallelConfig
from tests.models.cosmos3.standing_in import CPU
from tests.models.in_each_rank import join_all_ranks
from tests.parallel.rank_pool import RankPool

SMALL = Tiling(64, 48)


@pytest.fixture(scope="module")
def vae(folders) -> WanVae:
    return load_vae(folders["silu"], CPU, torch.float32)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


def test_tiles_cover_a_side():
    assert Tiling().spans(30, 16) == ((0, 16), (12, 28), (24, 30))
    # What is in the tile before already gets none of its own.
    assert Tiling().spans(52, 16) == ((0, 16), (12, 28), (24, 40), (36, 52))
    assert Tiling().spans(9, 16) == ((0, 9),)


def test_one_tile_is_the_whole(vae):
    latents = drawn(6, 2, 3, 4)
    assert largest(TiledDecoder(vae, Tiling()).decode(latents) - vae.decode(latents)) < 1e-6


def test_a_tile_ends_in_a_ramp_to_the_next(vae):
    """Two tiles of one row each, decoded alone and mixed by hand."""
    latents = drawn(6, 1, 2, 7)
    tiled = TiledDecoder(vae, SMALL).decode(latents)
    left, right = vae.decode(latents[..., :4]), vae.decode(latents[..., 3:])
    share = torch.arange(16) // 2 / 8  # patches of 2 pixels are mixed alike
    mixed = left[..., 48:] * (1 - share) + right[..., :16] * share
    unclamped = (left[..., 48:].abs() < 1) & (right[..., :16].abs() < 1)
    assert torch.equal(tiled[..., :48], left[..., :48])
    assert torch.equal(tiled[..., 64:], right[..., 16:])
    assert largest((tiled[..., 48:64] - mixed)[unclamped]) < 1e-6
    assert unclamped.float().mean() > 0.5


def test_tiles_are_the_whole_away_from_their_seams(folders):
    """But for attention, which looks over all of a tile and is switched off here."""
    vae = load_vae(folders["silu"], CPU, torch.float32)
    attention = vae.decoder.mid_block.attentions[0]
    for part in (attention.proj.weight, attention.proj.bias):
        part.zero_()
    latents = drawn(6, 1, 2, 31)
    tiled, whole = TiledDecoder(vae, Tiling(352, 192)).decode(latents), vae.decode(latents)
    # The tiles have the latents 12 to 22 in common. An edge is felt some ten latents into a tile.
    assert largest((tiled - whole)[..., : 11 * 16]) < 1e-5
    assert largest((tiled - whole)[..., 23 * 16 :]) < 1e-5
    assert largest(tiled - whole) > 1e-2


@pytest.mark.parametrize(
    ("size", "stride", "said"),
    [
        (256, 256, "the stride must be less than the size"),
        (256, 96, "at least half of it"),
        (264, 192, "multiples"),
    ],
)
def test_tiles_that_cannot_be_blended_are_refused(vae, size, stride, said):
    with pytest.raises(ConfigurationError, match=said):
        TiledDecoder(vae, Tiling(size, stride))


def tiled_in_each_rank(directory: Path, latents: Tensor) -> tuple[Tensor, int]:
    """The pixels, and how many tiles this rank has made."""
    group = join_all_ranks().group("world")
    vae = load_vae(directory, CPU, torch.float32)
    counted = CountedTiles(vae, SMALL, group)
    return counted.decode(latents), counted.num_made


class CountedTiles(TiledDecoder):
    num_made = 0

    def _patches(self, latents, tile):
        self.num_made += 1
        return super()._patches(latents, tile)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_share_the_tiles_and_change_nothing(folders, vae, num_ranks):
    latents = drawn(6, 2, 6, 7)
    alone = TiledDecoder(vae, SMALL).decode(latents)
    pool = RankPool(num_ranks)
    try:
        made = pool.run(tiled_in_each_rank, folders["silu"], latents)
    finally:
        pool.close()
    assert all(torch.equal(pixels, alone) for pixels, _ in made)
    assert [count for _, count in made] == [4 // num_ranks] * num_ranks


def test_a_group_of_one_sends_nothing(vae):
    latents = drawn(6, 1, 4, 5)
    with P.use_mesh(P.create_mesh(ParallelConfig(), device="cpu")) as mesh:
        shared = TiledDecoder(vae, SMALL, mesh.group("world")).decode(latents)
    assert torch.equal(shared, TiledDecoder(vae, SMALL).decode(latents))
