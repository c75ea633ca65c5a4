"""Page ids, counted exactly on the CPU. Freeing a page releases its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

from hs_runtime.pool.kv_pool import HieraKVPool


class HieraAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's paged allocator with its free list on the CPU.

    `last_new_pages` are the page ids that the last `alloc_extend` or `alloc_decode` took, one list
    for each request of the batch.
    """

    def __init__(self, size: int, *, kvcache: HieraKVPool, **kwargs: Any) -> None:
        if not isinstance(kvcache, HieraKVPool):
            raise TypeError(f"HieraAllocator needs a HieraKVPool, got {type(kvcache).__name__}")
        self.block_pool = kvcache.block_pool
        super().__init__(size, kvcache=kvcache, **kwargs)

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.num_pages + 1, dtype=torch.int64)
        self.release_pages = torch.empty((0,), dtype=torch.int64)
        self.is_not_in_free_group = True
        self.free_group: list[torch.Tensor] = []
        self.free_page_reps_group: list[torch.Tensor] = []
        self.last_new_pages: list[list[int]] = []
        self.block_pool.clear()

    def take_pages(self, count: int) -> list[int]:
        """Page ids, `count` of them; raises RuntimeError when there are fewer."""
        if count > len(self.free_pages):
            raise RuntimeError(f"{count} page ids wanted, {len(self.free_pages)} free")
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        pages: list[int] = taken.tolist()
        return pages

    def free_page_ids(self, pages: Sequence[int]) -> None:
        """Page ids and their blocks return."""
        if pages:
            self._release_page_ids(torch.tensor(pages, dtype=torch.int64))

    def _release_page_ids(self, *page_ids: torch.Tensor) -> None:
        freed = torch.cat([ids.reshape(-1).cpu() for ids in page_ids])
        self.block_pool.release_pages(freed.tolist())
        self.free_pages = torch.cat((freed, self.free_pages))

    def token_slots(self, pages: Sequence[int]) -> torch.Tensor:
        """int64 [len(pages) * 64] on the CPU: the virtual token slots of whole pages."""
        first = torch.tensor(pages, dtype=torch.int64) * self.page_size
        return (first[:, None] + torch.arange(self.page_size)).reshape(-1)

    def alloc(self, need_size: int) -> torch.Tensor | None:
        pages = need_size // self.page_size
        if pages > len(self.free_pages):
            return None
        return self.token_slots(self.take_pages(pages)).to(self.device, non_blocking=True)

    def alloc_extend(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        starts, ends = prefix_lens_cpu.tolist(), seq_lens_cpu.tolist()
        page = self.page_size
        counts = [-(-b // page) - -(-a // page) for a, b in zip(starts, ends, strict=True)]
        if sum(counts) > len(self.free_pages):
            return None
        self.last_new_pages = [self.take_pages(count) for count in counts]
        out = []
        for i, (a, b, pages) in enumerate(zip(starts, ends, self.last_new_pages, strict=True)):
            begun = min(b, -(-a // page) * page) - a
            if begun:
                out.append(
                    last_loc[i].to(torch.int64) + 1 + torch.arange(begun, device=self.device)
                )
            if b - a > begun:
                out.append(
                    self.token_slots(pages)[: b - a - begun].to(self.device, non_blocking=True)
                )
        return torch.cat(out) if out else torch.empty(0, dtype=torch.int64, device=self.device)

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        opens = [(length - 1) % self.page_size == 0 for length in seq_lens_cpu.tolist()]
        if sum(opens) > len(self.free_pages):
            return None
        self.last_new_pages = [self.take_pages(1) if opened else [] for opened in opens]
        firsts = [pages[0] * self.page_size if pages else -1 for pages in self.last_new_pages]
        first = torch.tensor(firsts, dtype=torch.int64).to(self.device, non_blocking=True)
        return torch.where(first >= 0, first, last_loc.to(torch.int64) + 1)
