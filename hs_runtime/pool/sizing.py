"""How much an arena holds, from bytes alone: pure, so that it can be asked without a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hs_kernels.block_format import BlockFormat

SPARE_SHARE: Final = 16  # beside dense layers, spare page ids are at most one for so many


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How SGLang's memory profile is spent: superblocks of the arena, and page ids (cheap, unless
    `dense_layers` keep their blocks by page id).

    `centered`: every sparse slot has a mean beside it, for V blocks that are stored without.
    `packed`: as in the block format.
    """

    superblocks: int
    pages: int
    centered: bool = False
    packed: bool = True
    dense_layers: tuple[int, ...] = ()


def size_pool(
    fmt: BlockFormat,
    dense_tokens: int,
    *,
    spare_pages: int,
    page: int = 64,
    centered: bool = False,
    dense_layers: tuple[int, ...] = (),
) -> PoolSize:
    """An arena that holds `dense_tokens` tokens when all are dense, and page ids for twice the
    all-sparse pages that fit it, plus `spare_pages` for windows and tails.

    With `dense_layers` a page id costs their blocks. Then there are ids for the all-sparse pages
    once, and fewer spare ones.
    """
    superblocks = max(2, 2 * (dense_tokens // page) // fmt.dense_per_superblock)
    sparse_pages = superblocks * fmt.sparse_per_superblock // 2
    pages = 2 * sparse_pages + spare_pages
    if dense_layers:
        pages = sparse_pages + min(spare_pages, sparse_pages // SPARE_SHARE)
    return PoolSize(superblocks, pages, centered, fmt.packed, dense_layers)


def dense_tokens_of(
    fmt: BlockFormat,
    kv_bytes: int,
    *,
    layers: int,
    heads: int,
    page: int = 64,
    centered: bool = False,
    dense_layers: int = 0,
    spare_pages: int = 0,
) -> int:
    """Tokens that `kv_bytes` of all layers and kv heads of one rank hold when all are dense.

    The means of `centered` take their share of the bytes, whether blocks are sparse or not. Of
    `layers`, `dense_layers` (a count) keep their blocks by page id: their share is that of the page
    ids that `size_pool` makes for the answer and `spare_pages`.
    """
    means = fmt.sparse_per_superblock * fmt.mean_bytes if centered else 0
    superblock = (fmt.superblock_bytes + means) * heads * (layers - dense_layers)
    if not dense_layers:
        return kv_bytes * fmt.dense_per_superblock // (2 * superblock) * page
    of_page = 2 * heads * fmt.dense_bytes * dense_layers
    # With more superblocks there are more spare ids, until there are `spare_pages`. The lesser
    # number of them binds, so the larger answer is right. `scale` keeps the numbers whole.
    scale = 2 * SPARE_SHARE
    sparse_pages = fmt.sparse_per_superblock * SPARE_SHARE  # of one superblock, scaled
    capped = superblock * scale + (sparse_pages + sparse_pages // SPARE_SHARE) * of_page
    spared = superblock * scale + sparse_pages * of_page
    left = kv_bytes - spare_pages * of_page
    all_spare = left * scale * fmt.dense_per_superblock // (2 * spared)
    some_spare = kv_bytes * scale * fmt.dense_per_superblock // (2 * capped)
    return max(all_spare, some_spare, 0) * page
