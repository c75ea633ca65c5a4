"""The owner of all KV bytes. `BlockPool` knows slots, refs and superblocks, and nothing of SGLang."""

from hs_runtime.pool.block_pool import Arena, BlockPool, Slot, Span

__all__ = ["Arena", "BlockPool", "Slot", "Span"]
