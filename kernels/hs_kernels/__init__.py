"""Kernels of the HieraSparse runtime: the block format and four operations on it.

Importing this package compiles nothing and needs no GPU.
"""

from hs_kernels.block_format import (
    DUMMY_REF,
    BlockFormat,
    BlockKind,
    Side,
    dense_ref,
    sparse_ref,
)
from hs_kernels.ops import (
    PrefillPlan,
    compress_blocks,
    decode_attention,
    merge_states,
    prefill_attention,
)

__all__ = [
    "DUMMY_REF",
    "BlockFormat",
    "BlockKind",
    "PrefillPlan",
    "Side",
    "compress_blocks",
    "decode_attention",
    "dense_ref",
    "merge_states",
    "prefill_attention",
    "sparse_ref",
]
