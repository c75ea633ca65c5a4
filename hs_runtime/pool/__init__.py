"""The owner of all KV bytes. `BlockPool` knows slots, refs and superblocks, not SGLang."""

from hs_runtime.pool.block_pool import Arena, BlockPool, Slot, Span

__all__ = ["Arena", "BlockPool", "Slot", "Span"]
