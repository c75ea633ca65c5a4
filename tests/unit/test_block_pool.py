"""Moves: bytes and refs arrive where a slot ends up, however the moves follow each other."""

from __future__ import annotations

import torch

from hs_kernels.block_format import BlockFormat, BlockKind
from hs_runtime.pool.block_pool import Bind, BlockPool, Move, Operation

DENSE, SPARSE = BlockKind.DENSE, BlockKind.SPARSE_2_4


def moved(operations: list[Operation]) -> tuple[BlockPool, torch.Tensor, torch.Tensor]:
    """A pool of random bytes after `operations`, and its slots of layer 0 by kind before them."""
    pool = BlockPool(BlockFormat(64), layers=2, heads=2, superblocks=3, pages=16)
    for arena in pool.arena:
        arena.copy_(torch.randint(0, 256, arena.shape, dtype=torch.uint8))
    before = pool.arena[0].clone()
    dense = before.view(-1, 2 * pool.format.dense_bytes)
    sparse = before.view(-1, 2 * pool.format.sparse_bytes)
    pool.apply(operations, lambda _: None)
    return pool, dense, sparse


def slot(pool: BlockPool, kind: BlockKind, index: int) -> torch.Tensor:
    size = 2 * (pool.format.dense_bytes if kind == DENSE else pool.format.sparse_bytes)
    return pool.arena[0].view(-1, size)[index]


def test_neighbouring_moves_of_one_kind_go_together_and_leave_the_other_kind_alone() -> None:
    binds = [Bind(0, 1, 10), Bind(1, 1, -20), Bind(0, 2, 11), Bind(1, 2, -10), Bind(0, 3, -11)]
    pool, dense, _ = moved([*binds, Move(DENSE, 10, 28), Move(DENSE, 11, 29)])
    assert torch.equal(slot(pool, DENSE, 28), dense[10])
    assert torch.equal(slot(pool, DENSE, 29), dense[11])
    refs = [[pool.refs[0, side, page, 0].item() for side in (0, 1)] for page in (1, 2, 3)]
    assert refs == [[28, -20], [29, -10], [-11, 0]]
    assert (pool.refs[..., :1] == pool.refs).all()


def test_a_slot_that_moves_twice_arrives() -> None:
    operations = [Bind(0, 1, -17), Bind(0, 2, -18), Move(SPARSE, 17, 40), Move(SPARSE, 40, 41)]
    pool, _, sparse = moved([*operations, Move(SPARSE, 18, 17)])
    assert torch.equal(slot(pool, SPARSE, 41), sparse[17])
    assert torch.equal(slot(pool, SPARSE, 17), sparse[18])
    assert pool.refs[1, 0, 1:3, 1].tolist() == [-41, -17]


def test_a_slot_of_one_kind_may_take_the_bytes_that_the_other_gave_up() -> None:
    """Superblock 1 is emptied of sparse slots, then filled with a dense one, in this order."""
    operations = [Bind(0, 1, -16), Bind(0, 2, 20), Move(SPARSE, 16, 40), Move(DENSE, 20, 9)]
    pool, dense, sparse = moved(operations)
    assert torch.equal(slot(pool, SPARSE, 40), sparse[16])
    assert torch.equal(slot(pool, DENSE, 9), dense[20])
    assert pool.refs[0, 0, 1:3, 0].tolist() == [-40, 9]
