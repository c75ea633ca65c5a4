"""Means beside sparse slots: their bytes, and that they go where their blocks go. And blocks that
are not packed, which experiments read."""

from __future__ import annotations

import pytest
import torch

from hs_kernels import ops
from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import load_pages
from hs_runtime.compression import Compressor
from hs_runtime.policies.pruner import build_pruner
from hs_runtime.pool.block_pool import DENSE, SPARSE, Bind, BlockPool, Convert, Move
from hs_runtime.pool.sizing import dense_tokens_of, size_pool
from tests.support.calibrations import random_calibration

F16 = BlockFormat(128, "float16")
F32 = BlockFormat(64, "float32")


def pool(*, centered: bool) -> BlockPool:
    return BlockPool(F16, layers=3, heads=2, superblocks=4, pages=16, centered=centered)


def test_a_sparse_slot_costs_its_mean_and_a_dense_one_does_not() -> None:
    with_means, without = pool(centered=True), pool(centered=False)
    assert with_means.slot_bytes[DENSE] == without.slot_bytes[DENSE] == 6 * 16384
    assert without.slot_bytes[SPARSE] == 6 * 9216
    assert with_means.slot_bytes[SPARSE] == 6 * (9216 + 256)
    assert without.total_bytes == 4 * 6 * 147456
    assert with_means.total_bytes == 4 * 6 * (147456 + 16 * 256)
    assert with_means.bytes_of(2, 3) == 2 * 6 * 16384 + 3 * 6 * 9472
    assert without.means is None
    assert without.means_of(0, Side.V) is None and with_means.means_of(0, Side.K) is None
    held = sum(mean.numel() * mean.itemsize for mean in with_means.means or ())
    assert held == 5 * 16 * 6 * 256, "the dummy's superblock has means, too"


@pytest.mark.parametrize("fmt", [F16, F32], ids=str)
@pytest.mark.parametrize("kv_bytes", [10**7, 123_456_789])
def test_an_arena_with_its_means_fits_the_bytes_given(fmt: BlockFormat, kv_bytes: int) -> None:
    sizes = {"layers": 3, "heads": 2}
    plain, centered = (dense_tokens_of(fmt, kv_bytes, **sizes, centered=c) for c in (False, True))
    assert plain == kv_bytes // (12 * fmt.dense_bytes) * 64
    per = fmt.sparse_per_superblock * fmt.mean_bytes / fmt.superblock_bytes
    assert abs(plain / (1 + per) - centered) < 128
    size = size_pool(fmt, centered, spare_pages=0, centered=True)
    superblock = fmt.superblock_bytes + fmt.sparse_per_superblock * fmt.mean_bytes
    assert size.superblocks * superblock * 6 <= kv_bytes
    assert size.centered and not size_pool(fmt, plain, spare_pages=0).centered


def test_a_mean_moves_with_its_block() -> None:
    storage = pool(centered=True)
    assert storage.means is not None
    for layer, means in enumerate(storage.means):
        means[17] = 1 + layer
    storage.apply([Bind(Side.V, 3, -17), Move(SPARSE, 17, 20), Move(DENSE, 10, 20)], lambda _: None)
    assert (storage.refs[:, Side.V, 3] == -20).all()
    for layer, means in enumerate(storage.means):
        assert (means[20] == 1 + layer).all()


def test_pages_converted_again_keep_their_means() -> None:
    """Half of a segment's V is sparse, then all of it: blocks that were packed are moved as they
    are, their means with them."""
    storage = BlockPool(F32, layers=2, heads=2, superblocks=4, pages=8, centered=True)
    compressor = Compressor(storage, build_pruner("calibrated"), random_calibration().layers)
    values = torch.randn(2, 2, 2, 64, 64)  # [layer, page, head, 64, D]
    pages = (1, 2)
    for page in pages:
        storage.refs[:, Side.K, page], storage.refs[:, Side.V, page] = 13 + page, 9 + page
        for layer in range(2):
            storage.dense_view(layer)[13 + page] = torch.randn(2, 64, 64)
            storage.dense_view(layer)[9 + page] = values[layer, page - 1]

    def read(layer: int) -> torch.Tensor:
        refs = storage.refs[layer, Side.V, list(pages)]
        means = storage.means_of(layer, Side.V)
        assert means is not None
        flat = load_pages(storage.arena[layer], refs, Side.V, F32, means)
        return flat.view(2, 2, 64, 64).transpose(0, 1)

    assert all(torch.equal(read(layer), values[layer]) for layer in range(2))
    compressor.convert([Convert(Side.V, pages, (10, 11), (-31, 12))])
    half = [read(layer) for layer in range(2)]
    compressor.convert([Convert(Side.V, pages, (-31, 12), (-40, -41))])
    for layer in range(2):
        sparse = (storage.refs[layer, Side.V, list(pages)] == -40)[..., None, None]
        assert sparse.sum() == 2, "one of the two pages for each head"
        full = read(layer)
        assert torch.equal(torch.where(sparse, full, 0), torch.where(sparse, half[layer], 0))
        lost = (full - values[layer]).abs()
        centered = values[layer] - values[layer].mean(2, keepdim=True)
        kept = lost < 1e-6
        assert (kept.unflatten(2, (16, 4)).sum(3) >= 2).all()
        torch.testing.assert_close(
            torch.where(kept, 0, full), torch.where(kept, 0, values[layer] - centered)
        )


@pytest.mark.parametrize("side", Side)
def test_a_block_that_is_not_packed_holds_any_mask(side: Side) -> None:
    fmt = BlockFormat(64, "float32", packed=False)
    assert fmt.sparse_bytes == fmt.dense_bytes == fmt.superblock_bytes
    storage = BlockPool(fmt, layers=1, heads=2, superblocks=8, pages=8)
    blocks = torch.randn(1, 2, 64, 64)
    keep = torch.rand(blocks.shape) < 0.5
    refs = torch.tensor([[-3, -3]], dtype=torch.int32)
    ops.store_blocks(blocks, side, storage.arena[0], refs, fmt, keep=keep)
    got = load_pages(storage.arena[0], refs, side, fmt)
    assert torch.equal(got, torch.where(keep, blocks, 0)[0])
    dummy = load_pages(storage.arena[0], torch.zeros(1, 2, dtype=torch.int32), side, fmt)
    assert not dummy.any()
