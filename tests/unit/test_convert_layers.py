"""Conversions of all layers at once are those of each layer by itself, for every pruner."""

from __future__ import annotations

import pytest
import torch

from hs_kernels import ops
from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import dense_slots
from hs_runtime.compression import Compressor, compressor
from hs_runtime.policies.pruner import PRUNERS, Pruner, build_pruner
from hs_runtime.pool.block_pool import BlockPool, Convert
from tests.support.calibrations import random_calibration

LAYERS, HEADS, CHANNELS = 5, 2, 64
PAGES = (3, 9, 4)


def empty_pool(pruner: Pruner, layers: int) -> BlockPool:
    fmt = BlockFormat(CHANNELS, "float32", packed=pruner.is_stored)
    superblocks = 6 if fmt.packed else 70  # of one slot
    return BlockPool(
        fmt,
        layers=layers,
        heads=HEADS,
        superblocks=superblocks,
        pages=16,
        centered=pruner.centers_values,
    )


def filled_pool(name: str) -> BlockPool:
    """Pages 3, 9 and 4 on dense slots of both sides; K of page 4 is sparse already."""
    pool = empty_pool(build_pruner(name), LAYERS)
    fmt = pool.format
    torch.manual_seed(3)
    for layer in range(LAYERS):
        dense = dense_slots(pool.arena[layer], fmt, HEADS)
        dense[9:21] = torch.randn(dense[9:21].shape)
        for side in Side:
            for i, page in enumerate(PAGES):
                pool.refs[layer, side, page] = 10 + 5 * side + i
        blocks = torch.randn(1, HEADS, 64, CHANNELS)
        refs = torch.full((1, HEADS), -60, dtype=torch.int32)
        ops.store_blocks(blocks, Side.K, pool.arena[layer], refs, fmt)
        pool.refs[layer, Side.K, 4] = -60
    return pool


CONVERSIONS = [
    Convert(Side.V, (3,), (15,), (-40,)),
    Convert(Side.V, (9,), (16,), (-61,)),
    Convert(Side.V, (4,), (17,), (-44,), sparse_keys=True),
    Convert(Side.K, (3,), (10,), (-41,)),
    Convert(Side.K, (9,), (11,), (-62,)),
]


@pytest.mark.parametrize("at_once", [1, 12, 10_000])
@pytest.mark.parametrize("name", PRUNERS)
def test_layers_together_are_layers_alone(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration = random_calibration(LAYERS, HEADS, CHANNELS, seed=1)
    together = filled_pool(name)
    monkeypatch.setattr(compressor, "BLOCKS_AT_ONCE", at_once)
    Compressor(together, build_pruner(name), calibration.layers).convert(CONVERSIONS)

    alone, of_alone = filled_pool(name), build_pruner(name)
    before = [pool_layer.clone() for pool_layer in alone.arena]
    for layer in range(LAYERS):
        one = empty_pool(of_alone, 1)
        one.arena[0].copy_(alone.arena[layer])
        one.refs.copy_(alone.refs[layer : layer + 1])
        Compressor(one, of_alone, calibration.layers[layer : layer + 1]).convert(CONVERSIONS)
        assert not torch.equal(one.arena[0], before[layer])
        assert torch.equal(together.arena[layer], one.arena[0])
        assert torch.equal(together.refs[layer], one.refs[0])
        if one.means is not None and together.means is not None:
            assert torch.equal(together.means[layer], one.means[0])
            assert bool(one.means[0][[40, 44, 61]].any())
    assert (
        together.refs[:, Side.V, list(PAGES)].tolist()
        == [[[-40] * HEADS, [-61] * HEADS, [-44] * HEADS]] * LAYERS
    )
