"""Everything that is decided once for each forward batch. Built on the CPU, read by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hs_kernels.block_format import Side
from hs_kernels.ops import PrefillPlan
from hs_runtime.pool.block_pool import Operation
from hs_runtime.pool.plain_layers import slot_of

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
class TokenWrites:
    """Where a batch's K and V go that stay dense, as `ops.store_tokens` takes it: refs int32
    [2, N, Hkv] of the N pages that are written, by number, 0 where a side is not, and locations
    int64 [T], page number * 64 + offset, -1 for tokens of other pages."""

    refs: Tensor
    locations: Tensor


@dataclass(frozen=True, slots=True)
class ExtendTensors:
    """The part of an extend's plan that every layer reads."""

    attention: PrefillPlan
    groups: Sequence[Any]
    writes: TokenWrites
    sparse: tuple[bool, bool]
    rows: Sequence[ExtendRow]
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
    heads: int,
) -> AttnPlan:
    """Lists into tensors. `groups` are the compressor's, passed through unread; `heads` are the kv
    heads of this rank."""

    bounds = [0]
    for row in rows:
        if len(row.frontiers) != tile_count(row.start, row.end):
            raise ValueError(f"{len(row.frontiers)} frontiers for rows [{row.start}, {row.end})")
        bounds.append(bounds[-1] + row.end - row.start)
    prefill = _prefill_plan(
        rows, [row.pages for row in rows], [slots for row in rows for slots in row.tail], device
    )
    writes = _token_writes(rows, bounds, page, heads, device)
    prefixes = [row.start for row in rows]
    tensors = ExtendTensors(prefill, groups, writes, sparse, rows, bounds, prefixes)
    longest = max(row.end for row in rows)
    return AttnPlan(operations, len(rows), prefill=tensors, longest=longest)


def _ints(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)


def _table(lists: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """int32 [len(lists), longest], padded with 0."""
    width = max(1, max((len(x) for x in lists), default=0))
    flat = [v for x in lists for v in (*x, *[0] * (width - len(x)))]
    return _ints(flat, device).view(-1, width)


def _prefill_plan(
    rows: Sequence[ExtendRow],
    pages: Sequence[Sequence[int]],
    tails: Sequence[Sequence[int]],
    device: torch.device,
) -> PrefillPlan:
    """`pages` of each row; `tails`, K's slots and V's, of each row."""
    lengths = [row.end - row.start for row in rows]
    return PrefillPlan(
        cu_seqlens=_ints([0, *accumulate(lengths)], device),
        prefix_lens=_ints([row.start for row in rows], device),
        page_table=_table(pages, device),
        tail_first=_ints([row.tail_first for row in rows], device),
        tail_slots=_table(tails, device).view(len(rows), 2, -1),
        tile_offsets=_ints([0, *accumulate(len(row.frontiers) for row in rows)], device),
        frontiers=_ints([f for row in rows for f in row.frontiers], device),
    )


@dataclass(frozen=True, slots=True)
class PlainExtend:
    """An extend for the layers that stay dense (`PlainLayers`): where each of its tokens goes,
    int64 [T], page id * 64 + offset, and rows and plan whose tails are the slots of page ids."""

    rows: Sequence[ExtendRow]
    attention: PrefillPlan
    locations: Tensor


def build_plain_extend(plan: ExtendTensors, page: int, device: torch.device) -> PlainExtend:
    rows, places = [], []
    for row in plan.rows:
        begun = row.pages[row.tail_first : -(-row.start // page)]
        k, v = (tuple(slot_of(each, side) for each in begun) for side in Side)
        rows.append(replace(row, tail=(k, v)))
        position = np.arange(row.start, row.end)
        places.append(np.array(row.pages)[position // page] * page + position % page)
    tails = _table([slots for row in rows for slots in row.tail], device)
    return PlainExtend(
        rows,
        replace(plan.attention, tail_slots=tails.view(len(rows), 2, -1)),
        torch.from_numpy(np.concatenate(places)).to(device, non_blocking=True),
    )


@dataclass(frozen=True, slots=True)
class ExpandedRow:
    """A request of an `ExpandedPlan`, on the host: its first row of the plan's Q, and the first of
    its pages and of its tail pages among the scratch blocks of a side."""

    row: ExtendRow
    first: int
    page: int
    tail: int

    def runs(self) -> list[tuple[int, int, int]]:
        """(begin, end, frontier): positions whose tiles follow each other and share a frontier."""
        row = self.row
        found: list[tuple[int, int, int]] = []
        for j, frontier in enumerate(row.frontiers):
            tile = (row.start // TILE + j) * TILE
            begin, end = max(row.start, tile), min(row.end, tile + TILE)
            if found and found[-1][2] == frontier:
                begin = found.pop()[0]
            found.append((begin, end, frontier))
        return found


@dataclass(frozen=True, slots=True)
class ExpandedPlan:
    """Rows of a batch whose pages are unpacked into a scratch arena, where all is dense.

    `tokens` are their rows of Q. The scratch blocks of each side are those of `pages` int64 [N] and
    then the dense slots `tails` int32 [2, T]; `attention` and `refs` int32 [2, N + T, Hkv] speak of
    the scratch arena (`ops.expand_blocks`).
    """

    tokens: slice
    pages: Tensor
    tails: Tensor
    attention: PrefillPlan
    refs: Tensor
    rows: tuple[ExpandedRow, ...]

    def sources(self, refs: Tensor) -> Tensor:
        """int32 [2, N + T, Hkv]: where the blocks lie now, by refs int32 [2, P, Hkv] of a layer."""
        tails = self.tails[:, :, None].expand(-1, -1, refs.shape[2])
        return torch.cat([refs[:, self.pages], tails], dim=1)


def is_crowded(prefixes: Sequence[int], page: int, pages_at_once: int) -> bool:
    """Whether the pages of several prefixes, of so many tokens, exceed what is copied at once. One
    request always fits: memory is kept free for the longest."""
    return len(prefixes) > 1 and sum(-(-n // page) for n in prefixes) > pages_at_once


def build_expanded_plans(
    rows: Sequence[ExtendRow], heads: int, at_once: int, device: torch.device
) -> list[ExpandedPlan]:
    """In row order, with at most `at_once` pages or one row in each, which bounds the scratch."""
    plans: list[ExpandedPlan] = []
    chosen: list[ExtendRow] = []
    begin = count = 0

    def close() -> None:
        nonlocal begin, count
        if chosen:
            plans.append(_expanded_plan(chosen, begin, heads, device))
            begin = plans[-1].tokens.stop
        chosen.clear()
        count = 0

    for row in rows:
        size = max(row.frontiers) + len(row.tail[0])
        if count + size > at_once:
            close()
        chosen.append(row)
        count += size
    close()
    return plans


def _expanded_plan(
    rows: Sequence[ExtendRow], begin: int, heads: int, device: torch.device
) -> ExpandedPlan:
    visible = [row.pages[: max(row.frontiers)] for row in rows]  # by any query of the row
    pages = [page for each in visible for page in each]
    tails = [[slot for row in rows for slot in row.tail[side]] for side in Side]
    blocks = len(pages) + len(tails[0])
    first_page = [0, *accumulate(map(len, visible))]
    first_tail = [*accumulate((len(row.tail[0]) for row in rows), initial=len(pages))]
    tables = [
        range(first, first + len(each)) for first, each in zip(first_page, visible, strict=False)
    ]
    tail_slots = [
        range(1 + side * blocks + first, 1 + side * blocks + first + len(row.tail[side]))
        for row, first in zip(rows, first_tail, strict=False)
        for side in Side
    ]
    first_row = [0, *accumulate(row.end - row.start for row in rows)]
    slots = torch.arange(1, 1 + 2 * blocks, dtype=torch.int32, device=device)
    return ExpandedPlan(
        tokens=slice(begin, begin + sum(row.end - row.start for row in rows)),
        pages=torch.tensor(pages, dtype=torch.long).to(device, non_blocking=True),
        tails=_ints([*tails[Side.K], *tails[Side.V]], device).view(2, -1),
        attention=_prefill_plan(rows, tables, tail_slots, device),
        refs=slots.view(2, blocks, 1).expand(-1, -1, heads).contiguous(),
        rows=tuple(map(ExpandedRow, rows, first_row, first_page, first_tail)),
    )


def _token_writes(
    rows: Sequence[ExtendRow], bounds: Sequence[int], page: int, heads: int, device: torch.device
) -> TokenWrites:
    """`bounds[r]` is the first row of request r in the batch's K and V."""
    slots: list[list[int]] = [[0, 0]]  # page number 0 is nobody's
    places: list[tuple[int, int, int]] = []  # first row, rows, location of the first
    for row, first in zip(rows, bounds, strict=False):
        numbers: dict[int, int] = {}
        for p, side, slot in row.writes:
            if p not in numbers:
                numbers[p] = len(slots)
                slots.append([0, 0])
                lo, hi = max(row.start, p * page), min(row.end, (p + 1) * page)
                place = numbers[p] * page + lo - p * page
                places.append((first + lo - row.start, hi - lo, place))
            slots[numbers[p]][side] = slot
    # By numpy: torch indexes with all threads, and waits milliseconds for one whose core is taken.
    table = np.array(places, dtype=np.int64).reshape(-1, 3)
    step = np.arange(page)
    valid = step < table[:, 1:2]
    locations = np.full(bounds[-1], -1, dtype=np.int64)
    locations[(table[:, :1] + step)[valid]] = (table[:, 2:] + step)[valid]
    refs = torch.tensor(slots, dtype=torch.int32).T[:, :, None].to(device, non_blocking=True)
    return TokenWrites(
        refs.expand(-1, -1, heads).contiguous(),
        torch.from_numpy(locations).to(device, non_blocking=True),
    )


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
