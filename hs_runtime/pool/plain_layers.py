"""Layers whose KV stays dense whatever a policy says: no slots and no ledger, only page ids.

Page p of such a layer lies in its dense slots 2 p (K) and 2 p + 1 (V), so SGLang's exact count of
page ids is the count of these bytes too. Page 0 is the dummy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import torch
from torch import Tensor

from hs_kernels import ops
from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import write_dummy
from hs_runtime.pool.block_pool import Operation, Share

COPIES_AT_ONCE: Final = 32768  # below what one dimension of a CUDA grid takes
Pages = TypeVar("Pages", int, Tensor)


def slot_of(page: Pages, side: int) -> Pages:
    """The dense slot of one side of a page, in every such layer."""
    return 2 * page + side


class PlainLayers:
    """The blocks of `layers` layers of one rank.

    `arena[i]` is uint8 `[(pages + 1) * 2 * heads * dense_bytes]`. One `refs` int32
    `[2, pages + 1, heads]`, indexed by page id, serves all of them and never changes; that of the
    dummy page is 0, which is read as zeros and never written.
    """

    def __init__(
        self,
        fmt: BlockFormat,
        *,
        layers: int,
        heads: int,
        pages: int,
        device: str | torch.device = "cpu",
    ) -> None:
        self.format, self.layers, self.heads, self.pages = fmt, layers, heads, pages
        self.device = torch.device(device)
        shape = (layers, (pages + 1) * self._page_bytes)
        self.arena = list(torch.zeros(shape, dtype=torch.uint8, device=device))
        for arena in self.arena:
            write_dummy(arena, fmt, heads)
        page = torch.arange(pages + 1, dtype=torch.int32, device=device)
        by_side = torch.stack([slot_of(page, side) for side in Side])
        by_side[:, 0] = 0
        self.refs = by_side[:, :, None].expand(-1, -1, heads).contiguous()

    @property
    def _page_bytes(self) -> int:
        return 2 * self.heads * self.format.dense_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page id: K and V blocks of all these layers and all heads of this rank."""
        return self.layers * self._page_bytes

    def apply(self, operations: Sequence[Operation]) -> None:
        """New page ids on the storage of old ones get their blocks copied. On the forward stream,
        before the forward whose plan has these operations, like the pool's own."""
        for run in _independent_shares(operations):
            old, new = (
                torch.tensor([getattr(op, name) for op in run], dtype=torch.int32).to(
                    self.device, non_blocking=True
                )
                for name in ("old", "new")
            )
            ops.copy_slots(self.arena, old, new, self._page_bytes)


def _independent_shares(operations: Sequence[Operation]) -> Iterator[list[Share]]:
    """The shares among the operations, in order, in runs that read no page which they write, of at
    most `COPIES_AT_ONCE`."""
    run: list[Share] = []
    read, written = set[int](), set[int]()
    for op in operations:
        if not isinstance(op, Share):
            continue
        touched = op.old in written or op.new in read or op.new in written
        if touched or len(run) == COPIES_AT_ONCE:
            yield run
            run, read, written = [], set(), set()
        run.append(op)
        read.add(op.old)
        written.add(op.new)
    if run:
        yield run
