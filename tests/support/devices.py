"""Two devices that carry out the same plans, and tell what every query read.

`SymbolicDevice` keeps contents as hashes under its own refs; its pages may be tiny, so that every
boundary is crossed often. `TensorDevice` keeps small integers in the pool's arena and leaves refs
and bytes to the pool and the compressor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from hs_kernels import ops
from hs_kernels.block_format import Side
from hs_kernels.reference import load_pages
from hs_runtime.attention.plan import AttnPlan, TokenWrites
from hs_runtime.compression import Compressor
from hs_runtime.pool.block_pool import (
    DENSE,
    SPARSE,
    Bind,
    BlockPool,
    Convert,
    Drop,
    Move,
    Share,
)
from hs_runtime.scheduler.lifecycle import SIDES, Lifecycle
from tests.support.contents import HEADS, LAYERS, VOCAB, Content, Hashes, Vectors, mix
from tests.support.key_checking import KeyChecking


def written(writes: TokenWrites, side: int, page: int = 64) -> list[tuple[int, int, int]]:
    """(row of the batch, dense slot, offset in its page) of every token that a side keeps."""
    found = []
    for row, location in enumerate(writes.locations.tolist()):
        slots = set(writes.refs[side, location // page].tolist()) if location >= 0 else {0}
        assert len(slots) == 1  # a page is dense for all heads or for none
        if slot := slots.pop():
            found.append((row, slot, location % page))
    return found


@dataclass(frozen=True)
class Row:
    """One row of a forward: what the model runner is told besides the plan. `tokens` is empty where
    the token is still on the device, as the last state of request `rid`."""

    rid: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]


class Device(Protocol):
    def forward(self, plan: AttnPlan, rows: Sequence[Row]) -> list[int]:
        """Carries out a plan; gives the last state of every row."""


class _Forward:
    """The part that both devices share: a query's reads, as the plan describes them."""

    content: Content
    page: int
    tile: int

    def __init__(self) -> None:
        self.last: dict[int, int] = {}

    # what a device must know

    def begin(self, plan: AttnPlan) -> None:
        raise NotImplementedError

    def store(self, layer: int, xs: Sequence[int], plan: AttnPlan) -> None:
        """Contents of the batch's tokens, in one layer: writes, then compression."""
        raise NotImplementedError

    def own(self, side: int, head: int, first: int, last: int) -> Any:
        """Contents of rows [first, last) of this forward, in the layer that was stored last."""
        raise NotImplementedError

    def views(self, layer: int, side: int, pages: Sequence[int]) -> list[list[int]]:
        """[head][page]: what refs lead to."""
        raise NotImplementedError

    def part(self, layer: int, side: int, head: int, page: int, tokens: int) -> int:
        """What is learnt through refs from the first tokens of a page."""
        raise NotImplementedError

    def is_sparse(self, layer: int, side: int, page: int) -> bool:
        raise NotImplementedError

    def is_dense(self, layer: int, side: int, page: int) -> bool:
        raise NotImplementedError

    def slot(self, layer: int, head: int, index: int, tokens: int) -> Any:
        """Contents of the first `tokens` tokens of a dense slot."""
        raise NotImplementedError

    def page_of(self, layer: int, side: int, head: int, page: int, tokens: int) -> Any:
        """Contents of the first tokens of a page that refs say is dense."""
        raise NotImplementedError

    def join(self, parts: Sequence[Any]) -> Any:
        raise NotImplementedError

    def prefixes(self, tokens: Any) -> list[int]:
        """What is learnt from the first 1, 2, ... of a page's tokens."""
        raise NotImplementedError

    # forwards

    def forward(self, plan: AttnPlan, rows: Sequence[Row]) -> list[int]:
        assert plan.num_rows == len(rows) and not plan.begun
        self.begin(plan)
        plan.begun = True
        xs = [
            mix(3, token, row.start + i)
            for row in rows
            for i, token in enumerate(row.tokens or (self.last[row.rid],))
        ]
        for layer in range(LAYERS):
            self.store(layer, xs, plan)
            xs = (self._decode if plan.prefill is None else self._extend)(layer, xs, plan, rows)
        ends = []
        for i, row in enumerate(rows):
            bounds = plan.prefill.bounds if plan.prefill is not None else range(len(rows) + 1)
            ends.append(xs[bounds[i + 1] - 1])
            self.last[row.rid] = ends[-1] % VOCAB
        return ends

    def _decode(
        self, layer: int, xs: Sequence[int], plan: AttnPlan, rows: Sequence[Row]
    ) -> list[int]:
        assert plan.seq_lens is not None and plan.locations is not None
        page, out = self.page, []
        locations = plan.locations.tolist()
        for i, length in enumerate(plan.seq_lens.tolist()):
            t, reads = length - 1, []
            assert rows[i].start == t and len(rows[i].pages) == t // page + 1
            assert locations[i] == rows[i].pages[t // page] * page + t % page
            before = [self.views(layer, side, rows[i].pages[: t // page]) for side in SIDES]
            for head in range(HEADS):
                for side in SIDES:
                    reads.append(mix(6, *before[side][head]))
                    begun = self.page_of(layer, side, head, rows[i].pages[t // page], t % page + 1)
                    reads.append(self.content.dense(begun))
            out.append(mix(5, xs[i], *reads))
        return out

    def _extend(
        self, layer: int, xs: Sequence[int], plan: AttnPlan, rows: Sequence[Row]
    ) -> list[int]:
        assert plan.prefill is not None
        table, page, out = plan.prefill.attention, self.page, []
        bounds, tiles = table.cu_seqlens.tolist(), table.tile_offsets.tolist()
        frontiers, page_table = table.frontiers.tolist(), table.page_table.tolist()
        tail_first, tail_slots = table.tail_first.tolist(), table.tail_slots.tolist()
        assert bounds == plan.prefill.bounds
        for r, a in enumerate(table.prefix_lens.tolist()):
            first, b = bounds[r], a + bounds[r + 1] - bounds[r]
            mine = frontiers[tiles[r] : tiles[r + 1]]
            assert a == rows[r].start and len(mine) == -(-b // self.tile) - a // self.tile
            assert page_table[r][: len(rows[r].pages)] == list(rows[r].pages)
            lowest, highest = min(mine), max(mine)
            stored = [self.views(layer, side, page_table[r][:highest]) for side in SIDES]
            for side in SIDES:  # what the plan promises to the kernel
                assert plan.prefill.sparse[side] or not any(
                    self.is_sparse(layer, side, p) for p in page_table[r][:highest]
                ), f"a sparse page of side {side} where the plan says there is none"
            if not any(plan.prefill.sparse):  # a dense kernel reads all that came before by refs
                for p in page_table[r][: -(-a // page)]:
                    assert all(self.is_dense(layer, side, p) for side in SIDES)
            plain: dict[tuple[int, int, int], list[int]] = {}
            for p in range(lowest, -(-b // page)):
                for side in SIDES:
                    for head in range(HEADS):
                        parts = []
                        if p * page < a:
                            index = tail_slots[r][side][p - tail_first[r]]
                            parts.append(self.slot(layer, head, index, min(a - p * page, page)))
                        lo, hi = max(a, p * page), min(b, (p + 1) * page)
                        if lo < hi:
                            parts.append(self.own(side, head, first + lo - a, first + hi - a))
                        plain[side, head, p] = self.prefixes(self.join(parts))
            before: dict[tuple[int, int, int, int], int] = {}
            for t in range(a, b):
                f, p, reads = mine[t // self.tile - a // self.tile], t // page, []
                for head in range(HEADS):
                    for side in SIDES:
                        if (side, head, f, p) not in before:
                            dense = [plain[side, head, q][page - 1] for q in range(f, p)]
                            before[side, head, f, p] = mix(
                                6, *stored[side][head][: min(f, p)], *dense
                            )
                        reads.append(before[side, head, f, p])
                        if p < f:  # the chunk anchor: pages of the chunk itself are compressed
                            reads.append(
                                self.part(layer, side, head, page_table[r][p], t % page + 1)
                            )
                        else:
                            reads.append(plain[side, head, p][t % page])
                out.append(mix(5, xs[first + t - a], *reads))
        return out


class SymbolicDevice(_Forward):
    """Refs and slot contents in dictionaries. Operations are carried out one by one, in order; a
    superblock that changes hands loses its bytes."""

    content: Hashes

    def __init__(self, rules: Lifecycle, tile: int, pool: BlockPool) -> None:
        super().__init__()
        self.content, self.page, self.tile = Hashes(), rules.page, tile
        self.pool, self.per = pool, pool.ledger.per
        self.refs: dict[tuple[int, int, int, int], int] = {}  # (layer, side, head, page)
        self.memory: dict[int, dict[tuple[int, int], Any]] = {}  # ref -> (layer, head) -> content
        self.kinds: dict[int, bool] = {}  # superblock -> is sparse

    def _write(self, ref: int, where: tuple[int, int], value: Any) -> None:
        sparse = ref < 0
        block = abs(ref) // self.per[SPARSE if sparse else DENSE]
        assert block, "superblock 0 is the dummy's"
        if self.kinds.get(block) != sparse:
            per = self.per[DENSE if sparse else SPARSE]
            for index in range(block * per, (block + 1) * per):
                self.memory.pop(index if sparse else -index, None)
            self.kinds[block] = sparse
        self.memory.setdefault(ref, {})[where] = value

    def begin(self, plan: AttnPlan) -> None:
        for operation in plan.operations:
            self._apply(operation)
        self._plan = plan

    def fail(self, plan: AttnPlan) -> None:
        """Carries out a forward that fails at once: what others rely on, and no conversion."""
        for operation in plan.operations:
            if not isinstance(operation, Convert):
                self._apply(operation)
        plan.begun = True

    def _apply(self, operation: Any) -> None:
        everywhere = [(layer, head) for layer in range(LAYERS) for head in range(HEADS)]
        match operation:
            case Bind(side, page, ref):
                for layer, head in everywhere:
                    self.refs[layer, side, head, page] = ref
            case Drop(page):
                for layer, head in everywhere:
                    for side in SIDES:
                        self.refs.pop((layer, side, head, page), None)
            case Share(old, new):
                for layer, head in everywhere:
                    for side in SIDES:
                        self.refs[layer, side, head, new] = self.refs[layer, side, head, old]
            case Move(kind, old, new):
                sign = 1 if kind == DENSE else -1
                for where, value in self.memory.pop(sign * old, {}).items():
                    self._write(sign * new, where, value)
                for key, ref in self.refs.items():
                    if ref == sign * old:
                        self.refs[key] = sign * new
            case Convert(side, pages, old, new):
                for layer, head in everywhere:
                    refs = [self.refs[layer, side, head, page] for page in pages]
                    blocks = [(ref, self.memory[ref][layer, head]) for ref in refs]
                    self._place(layer, side, head, pages, blocks, old, new)

    def _place(
        self,
        layer: int,
        side: int,
        head: int,
        pages: Sequence[int],
        blocks: Sequence[tuple[int, Any]],
        old: Sequence[int],
        new: Sequence[int],
    ) -> None:
        """Sparse pages first, in the order of their slots; then dense ones by ascending loss."""
        dense = [i for i, (ref, _) in enumerate(blocks) if ref > 0]
        sparse = [i for i, (ref, _) in enumerate(blocks) if ref < 0]
        sparse.sort(key=lambda i: old.index(blocks[i][0]))
        ranked = self.content.ranked(side, [blocks[i][1] for i in dense])
        order = sparse + [dense[i] for i in ranked]
        for i, ref in zip(order, new, strict=True):
            was, value = blocks[i]
            if ref < 0 < was:
                value = self.content.sparse(side, value)
            assert (ref < 0) == (was < 0) or ref < 0, "a sparse page cannot become dense"
            self._write(ref, (layer, head), value)
            self.refs[layer, side, head, pages[i]] = ref

    def store(self, layer: int, xs: Sequence[int], plan: AttnPlan) -> None:
        self._own = [
            [[self.content.token(layer, side, head, x) for x in xs] for head in range(HEADS)]
            for side in SIDES
        ]
        if plan.prefill is None:
            assert plan.locations is not None
            for i, location in enumerate(plan.locations.tolist()):
                page, offset = divmod(location, self.page)
                for side in SIDES:
                    for head in range(HEADS):
                        self._append(self.refs[layer, side, head, page], layer, head, offset,
                                     self._own[side][head][i : i + 1])  # fmt: skip
            return
        # A page that is written and compressed by one forward is compressed from the chunk.
        for group in plan.prefill.groups:
            for head in range(HEADS):
                blocks = [
                    (1, self._own[group.side][head][s.token : s.token + self.page])
                    if s.token >= 0
                    else (1, self.slot(layer, head, s.slot, self.page))
                    for s in group.sources
                ]
                assert sum(ref < 0 for ref in group.refs) == group.sparse
                self._place(layer, group.side, head, group.pages, blocks, (), group.refs)
        for side in SIDES:
            for row, slot, offset in written(plan.prefill.writes, side, self.page):
                for head in range(HEADS):
                    self._append(slot, layer, head, offset, self._own[side][head][row : row + 1])

    def _append(self, ref: int, layer: int, head: int, offset: int, values: list[int]) -> None:
        assert ref > 0, "a token is written to a sparse block"
        begun = self.memory.get(ref, {}).get((layer, head), []) if offset else []
        assert len(begun) >= offset, "a token is written after a gap"
        self._write(ref, (layer, head), [*begun[:offset], *values])

    def own(self, side: int, head: int, first: int, last: int) -> Any:
        return self._own[side][head][first:last]

    def _view(self, ref: int, where: tuple[int, int]) -> int:
        value = self.memory[ref][where]
        if ref < 0:
            return int(value)
        assert len(value) == self.page
        return self.content.dense(value)

    def views(self, layer: int, side: int, pages: Sequence[int]) -> list[list[int]]:
        return [
            [self._view(self.refs[layer, side, head, p], (layer, head)) for p in pages]
            for head in range(HEADS)
        ]

    def part(self, layer: int, side: int, head: int, page: int, tokens: int) -> int:
        ref = self.refs[layer, side, head, page]
        value = self.memory[ref][layer, head]
        if ref < 0:
            return self.content.part_of(value, tokens)
        return self.content.dense(value[:tokens])

    def is_sparse(self, layer: int, side: int, page: int) -> bool:
        return self.refs[layer, side, 0, page] < 0

    def is_dense(self, layer: int, side: int, page: int) -> bool:
        return all(self.refs[layer, side, head, page] > 0 for head in range(HEADS))

    def slot(self, layer: int, head: int, index: int, tokens: int) -> Any:
        value = self.memory[index][layer, head]
        assert len(value) >= tokens
        return value[:tokens]

    def page_of(self, layer: int, side: int, head: int, page: int, tokens: int) -> Any:
        return self.slot(layer, head, self.refs[layer, side, head, page], tokens)

    def join(self, parts: Sequence[Any]) -> Any:
        return [value for part in parts for value in part]

    def prefixes(self, tokens: Any) -> list[int]:
        return [self.content.dense(tokens[: i + 1]) for i in range(len(tokens))]


class TensorDevice(_Forward):
    """The pool's own arena, refs and operations, and the compressor."""

    def __init__(
        self, rules: Lifecycle, tile: int, pool: BlockPool, compressor: Compressor
    ) -> None:
        super().__init__()
        self.page, self.tile, self.pool, self.compressor = rules.page, tile, pool, compressor
        self.vectors = Vectors(rules.page, pool.format.head_dim)
        self.content = self.vectors
        self.weights = torch.from_numpy(self.vectors.weights).reshape(-1)
        self.known_views: dict[tuple[int, int, int], list[int]] = {}
        for arena in pool.arena:  # what nobody wrote is NaN
            arena[pool.heads * pool.format.superblock_bytes :] = 0xFF

    def begin(self, plan: AttnPlan) -> None:
        if plan.operations or plan.prefill is not None:
            self.known_views.clear()
        self.pool.apply(plan.operations, self.compressor.convert)
        if plan.prefill is not None:
            self.compressor.begin(plan.prefill.groups)

    def store(self, layer: int, xs: Sequence[int], plan: AttnPlan) -> None:
        pool = self.pool
        self._own = self.vectors.rows(layer, xs)
        if isinstance(self.compressor, KeyChecking):
            self.compressor.watch(self.vectors, layer, self._own)
        k, v = torch.from_numpy(self._own).to(pool.format.torch_dtype).unbind(1)
        if plan.prefill is None:
            assert plan.locations is not None
            arena, refs = pool.arena[layer], pool.refs[layer]
            ops.store_tokens(k, v, k, arena, refs, plan.locations, pool.format)
            return
        writes = plan.prefill.writes
        ops.store_tokens(k, v, k, pool.arena[layer], writes.refs, writes.locations, pool.format)
        self.compressor.apply(layer, k, v)

    def own(self, side: int, head: int, first: int, last: int) -> Any:
        return self._own[first:last, side, head]

    def views(self, layer: int, side: int, pages: Sequence[int]) -> list[list[int]]:
        """Read from the arena again after everything but a decode step without operations."""
        unread = [p for p in pages if (layer, side, p) not in self.known_views]
        if unread:
            self._read(layer, side, unread)
        found = [self.known_views[layer, side, p] for p in pages]
        return [[page[head] for page in found] for head in range(HEADS)]

    def _read(self, layer: int, side: int, pages: list[int]) -> None:
        refs = self.pool.refs[layer, side, torch.tensor(pages)]
        assert bool((refs != 0).all()), "a page is read through the dummy ref"
        loaded = load_pages(self.pool.arena[layer], refs, Side(side), self.pool.format)
        sums = loaded.view(HEADS, len(pages), -1).to(torch.float64) @ self.weights
        assert not bool(sums.isnan().any()), "bytes are read that nobody wrote"
        for page, values in zip(pages, sums.T.tolist(), strict=True):
            self.known_views[layer, side, page] = [int(value) for value in values]

    def part(self, layer: int, side: int, head: int, page: int, tokens: int) -> int:
        refs = self.pool.refs[layer, side, page : page + 1]
        block = load_pages(self.pool.arena[layer], refs, Side(side), self.pool.format)[head]
        return self.content.dense(block[:tokens].to(torch.float64).numpy())

    def is_sparse(self, layer: int, side: int, page: int) -> bool:
        return bool((self.pool.refs[layer, side, page] < 0).any())

    def is_dense(self, layer: int, side: int, page: int) -> bool:
        return bool((self.pool.refs[layer, side, page] > 0).all())

    def slot(self, layer: int, head: int, index: int, tokens: int) -> Any:
        return self.pool.dense_view(layer)[index, head, :tokens].to(torch.float64).numpy()

    def page_of(self, layer: int, side: int, head: int, page: int, tokens: int) -> Any:
        ref = int(self.pool.refs[layer, side, page, head])
        assert ref > 0
        return self.slot(layer, head, ref, tokens)

    def join(self, parts: Sequence[Any]) -> Any:
        return np.concatenate(parts)

    def prefixes(self, tokens: Any) -> list[int]:
        sums = (tokens * self.vectors.weights[: len(tokens)]).sum(1).cumsum()
        assert not np.isnan(sums).any(), "bytes are read that nobody wrote"
        return [int(value) for value in sums]
