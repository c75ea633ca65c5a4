"""How much an arena holds, from bytes alone: pure, so that it can be asked without a device."""

from __future__ import annotations

from dataclasses import dataclass

from hs_kernels.block_format import BlockFormat


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How SGLang's memory profile is spent: superblocks of the arena, and page ids (cheap).

    `centered`: every sparse slot has a mean beside it, for V blocks that are stored without.
    `packed`: as in the block format.
    """

    superblocks: int
    pages: int
    centered: bool = False
    packed: bool = True


def size_pool(
    fmt: BlockFormat,
    dense_tokens: int,
    *,
    spare_pages: int,
    page: int = 64,
    centered: bool = False,
) -> PoolSize:
    """An arena that holds `dense_tokens` tokens when all are dense, and page ids for twice the
    all-sparse pages that fit it, plus `spare_pages` for windows and tails."""
    superblocks = max(2, 2 * (dense_tokens // page) // fmt.dense_per_superblock)
    sparse_pages = superblocks * fmt.sparse_per_superblock // 2
    return PoolSize(superblocks, 2 * sparse_pages + spare_pages, centered, fmt.packed)


def dense_tokens_of(
    fmt: BlockFormat,
    kv_bytes: int,
    *,
    layers: int,
    heads: int,
    page: int = 64,
    centered: bool = False,
) -> int:
    """Tokens that `kv_bytes` of all layers and kv heads of one rank hold when all are dense.

    The means of `centered` take their share of the bytes, whether blocks are sparse or not.
    """
    means = fmt.sparse_per_superblock * fmt.mean_bytes if centered else 0
    superblock = (fmt.superblock_bytes + means) * heads * layers
    return kv_bytes * fmt.dense_per_superblock // (2 * superblock) * page
