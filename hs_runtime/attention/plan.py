"""Everything that is decided once for each forward batch. Built on the CPU, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from hs_kernels.block_format import Side
from hs_kernels.ops import PrefillPlan
from hs_runtime.pool.block_pool import Operation

TILE = 128  # query rows that share a frontier, at absolute multiples


class BatchCompressor(Protocol):
    """The backend's view of compression: it does not know what a policy is."""

    def begin(self, groups: Sequence[Any]) -> None:
        """Once for each extend batch, before its first layer."""

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Compresses the batch's pages of one layer from k, v [T, Hkv, D] and the dense slots."""

    def convert(self, conversions: Sequence[Any]) -> None:
        """Carries out the pool's conversions, in all layers."""


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """Positions [start, end) of one request.

    `pages` is its row of page ids as of this forward, `frontiers` one page index for each tile,
    `tail[side]` the dense slots of the pages from `tail_first` to the one that holds position
    start - 1, `writes` (page of the row, side, slot).
    """

    start: int
    end: int
    pages: tuple[int, ...]
    frontiers: tuple[int, ...]
    tail_first: int
    tail: tuple[tuple[int, ...], tuple[int, ...]]
    writes: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class SideWrites:
    """Rows of the batch's K or V and where they go: dense slot, offset in the page (int64 [N])."""

    rows: Tensor
    slots: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True)
class ExtendTensors:
    """The part of an extend's plan that every layer reads."""

    attention: PrefillPlan
    groups: Sequence[Any]
    writes: tuple[SideWrites, SideWrites]
    sparse: tuple[bool, bool]
    bounds: list[int]  # cu_seqlens on the host
    prefixes: list[int]  # prefix_lens on the host

    @property
    def longest_chunk(self) -> int:
        return max(b - a for a, b in pairwise(self.bounds))


@dataclass(eq=False, slots=True)
class AttnPlan:
    """One forward. `operations` are the pool's and run before the first layer, once.

    Extends have `prefill`, and `sparse` says of each side whether a query may read a sparse block.
    Decodes have `seq_lens` int32 [R], the new token included, and `locations` int64 [R], where it
    goes: page * 64 + offset. Their page table is SGLang's row of token slots.
    """

    operations: list[Operation]
    num_rows: int
    prefill: ExtendTensors | None = None
    seq_lens: Tensor | None = None
    locations: Tensor | None = None
    longest: int = 0
    begun: bool = False


def tile_count(start: int, end: int) -> int:
    """Tiles of [start, end): query rows are tiled at absolute multiples of 128."""
    return -(-end // TILE) - start // TILE


def build_extend_plan(
    rows: Sequence[ExtendRow],
    operations: list[Operation],
    groups: Sequence[Any],
    sparse: tuple[bool, bool],
    page: int,
    device: torch.device,
) -> AttnPlan:
    """Lists into tensors. `groups` are the compressor's, passed through unread."""

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

    def padded(lists: Sequence[Sequence[int]]) -> Tensor:
        width = max(1, max((len(x) for x in lists), default=0))
        return ints([v for x in lists for v in (*x, *[0] * (width - len(x)))]).view(-1, width)

    bounds, tiles = [0], [0]
    for row in rows:
        if len(row.frontiers) != tile_count(row.start, row.end):
            raise ValueError(f"{len(row.frontiers)} frontiers for rows [{row.start}, {row.end})")
        bounds.append(bounds[-1] + row.end - row.start)
        tiles.append(tiles[-1] + len(row.frontiers))
    prefill = PrefillPlan(
        cu_seqlens=ints(bounds),
        prefix_lens=ints([row.start for row in rows]),
        page_table=padded([row.pages for row in rows]),
        tail_first=ints([row.tail_first for row in rows]),
        tail_slots=padded([slots for row in rows for slots in row.tail]).view(len(rows), 2, -1),
        tile_offsets=ints(tiles),
        frontiers=ints([f for row in rows for f in row.frontiers]),
    )
    places: tuple[list[tuple[int, int, int, int]], ...] = ([], [])
    for row, first in zip(rows, bounds, strict=False):
        for p, side, slot in row.writes:
            lo, hi = max(row.start, p * page), min(row.end, (p + 1) * page)
            places[side].append((first + lo - row.start, hi - lo, slot, lo - p * page))
    k, v = (_side_writes(places[side], page, device) for side in Side)
    prefixes = [row.start for row in rows]
    tensors = ExtendTensors(prefill, groups, (k, v), sparse, bounds, prefixes)
    longest = max(row.end for row in rows)
    return AttnPlan(operations, len(rows), prefill=tensors, longest=longest)


def _side_writes(
    places: list[tuple[int, int, int, int]], page: int, device: torch.device
) -> SideWrites:
    """From (first row, rows, slot, first offset) for each page."""
    table = torch.tensor(places, dtype=torch.long).view(-1, 4)
    step = torch.arange(page)
    valid = step < table[:, 1:2]
    rows, offsets = (table[:, i : i + 1] + step for i in (0, 3))
    slots = table[:, 2:3].expand(-1, page)
    chosen = [x[valid].to(device, non_blocking=True) for x in (rows, slots, offsets)]
    return SideWrites(*chosen)


def build_decode_plan(
    rows: Sequence[tuple[int, int]], operations: list[Operation], page: int, device: torch.device
) -> AttnPlan:
    """One query token for each row: (its position, its page id)."""
    table = torch.tensor(rows, dtype=torch.long).view(-1, 2)
    positions, pages = table.unbind(1)
    both = torch.stack([positions + 1, pages * page + positions % page])
    both = both.to(device, non_blocking=True)
    return AttnPlan(
        operations,
        len(rows),
        seq_lens=both[0].to(torch.int32),
        locations=both[1],
        longest=max((position + 1 for position, _ in rows), default=0),
    )
