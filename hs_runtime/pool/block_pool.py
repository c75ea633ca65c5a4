"""Slots, superblocks, refs and the bytes behind them.

A *slot* holds one side of one page for all layers and heads of this rank. Slots are assigned and
counted here, on the CPU; what the device has to do about it is queued as operations and carried
out in order on the forward stream (`take_operations`, `apply`).
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hs_kernels import ops
from hs_kernels.block_format import BlockFormat, BlockKind, Side, dense_ref, sparse_ref
from hs_kernels.reference import dense_slots, sparse_slots, write_dummy

DENSE, SPARSE = BlockKind.DENSE, BlockKind.SPARSE_2_4
SIDES = (0, 1)


class CompressionError(Exception):
    """Blocks of a batch did not get their form. Its requests cannot be answered; others can."""


@dataclass(eq=False, slots=True)
class Slot:
    """`references` are spans that hold it; `idle`: a prefix-cache node without a lock does."""

    kind: BlockKind
    index: int
    references: int = 1
    idle: bool = False

    @property
    def ref(self) -> int:
        return dense_ref(self.index) if self.kind == DENSE else sparse_ref(self.index)


@dataclass(eq=False, slots=True)
class Span:
    """The storage of one side of some pages: one page on one slot, or a segment's candidates on a
    set of slots, slot r holding for every (layer, head) the page of rank r."""

    pages: list[int]
    slots: list[Slot]
    live: int = 0


@dataclass(slots=True)
class _Superblock:
    kind: BlockKind
    holes: list[int]
    slots: dict[int, Slot] = field(default_factory=dict)


class Arena:
    """Superblocks of dense or sparse slots; superblock 0 belongs to the dummy.

    A pair of counts fits if and only if `ceil(dense/per_dense) + ceil(sparse/per_sparse)` is at
    most `superblocks`: when a kind needs one and none is free, the emptiest superblock of the other
    kind is emptied into that kind's holes, and `on_move(kind, old, new)` is told of every slot.
    """

    def __init__(
        self,
        superblocks: int,
        dense_per: int,
        sparse_per: int,
        on_move: Callable[[BlockKind, int, int], None],
    ) -> None:
        if superblocks < 1:
            raise ValueError(f"an arena needs at least one superblock, got {superblocks}")
        self.superblocks = superblocks
        self.per = {DENSE: dense_per, SPARSE: sparse_per}
        self.on_move = on_move
        self.moves = 0
        self.clear()

    def clear(self) -> None:
        self.used: dict[BlockKind, int] = {DENSE: 0, SPARSE: 0}
        self._blocks: dict[int, _Superblock] = {}
        self._free = list(range(1, self.superblocks + 1))
        self._partial: dict[BlockKind, list[int]] = {DENSE: [], SPARSE: []}

    def fits(self, dense: int, sparse: int) -> bool:
        return -(-dense // self.per[DENSE]) + -(-sparse // self.per[SPARSE]) <= self.superblocks

    def slots(self) -> Iterable[Slot]:
        for block in self._blocks.values():
            yield from block.slots.values()

    def _block_with_hole(self, kind: BlockKind, skip: int | None = None) -> int | None:
        heap, put_back, found = self._partial[kind], [], None
        while heap:
            index = heap[0]
            block = self._blocks.get(index)
            if block is None or block.kind != kind or not block.holes:
                heapq.heappop(heap)  # stale: full, emptied or handed over since it was listed
            elif index == skip:
                put_back.append(heapq.heappop(heap))
            else:
                found = index
                break
        for index in put_back:
            heapq.heappush(heap, index)
        return found

    def _place(self, slot: Slot, block_index: int) -> None:
        block = self._blocks[block_index]
        slot.index = block_index * self.per[slot.kind] + heapq.heappop(block.holes)
        block.slots[slot.index] = slot

    def allocate(self, kind: BlockKind) -> Slot:
        """A slot with one reference; RuntimeError if the ledger let through what does not fit."""
        index = self._block_with_hole(kind)
        if index is None:
            if not self._free:
                self._compact(SPARSE if kind == DENSE else DENSE)
            index = heapq.heappop(self._free)
            self._blocks[index] = _Superblock(kind, list(range(self.per[kind])))
            heapq.heappush(self._partial[kind], index)
        slot = Slot(kind, 0)
        self._place(slot, index)
        self.used[kind] += 1
        return slot

    def _compact(self, kind: BlockKind) -> None:
        candidates = [i for i, block in self._blocks.items() if block.kind == kind]
        index = min(candidates, key=lambda i: (len(self._blocks[i].slots), i), default=None)
        if index is None:
            raise RuntimeError(f"out of KV bytes: {self.used} in {self.superblocks} superblocks")
        emptied = self._blocks[index]
        for old, slot in sorted(emptied.slots.items()):
            target = self._block_with_hole(kind, skip=index)
            if target is None:
                raise RuntimeError(
                    f"out of KV bytes: {self.used} in {self.superblocks} superblocks"
                )
            self._place(slot, target)
            self.on_move(kind, old, slot.index)
            self.moves += 1
        del self._blocks[index]
        heapq.heappush(self._free, index)

    def release(self, slot: Slot) -> None:
        index = slot.index // self.per[slot.kind]
        block = self._blocks[index]
        if block.slots.pop(slot.index, None) is not slot:
            raise RuntimeError(f"slot {slot.kind.name} {slot.index} released twice")
        self.used[slot.kind] -= 1
        if not block.slots:
            del self._blocks[index]
            heapq.heappush(self._free, index)
        else:
            if not block.holes:
                heapq.heappush(self._partial[slot.kind], index)
            heapq.heappush(block.holes, slot.index - index * self.per[slot.kind])


@dataclass(frozen=True, slots=True)
class Bind:
    """refs[:, side, page, :] = ref"""

    side: int
    page: int
    ref: int


@dataclass(frozen=True, slots=True)
class Share:
    """refs[:, :, new, :] = refs[:, :, old, :]"""

    old: int
    new: int


@dataclass(frozen=True, slots=True)
class Drop:
    """refs[:, :, page, :] = 0"""

    page: int


@dataclass(frozen=True, slots=True)
class Move:
    """A slot's bytes change place in every layer, and every ref to it follows."""

    kind: BlockKind
    old: int
    new: int


@dataclass(frozen=True, slots=True)
class Convert:
    """Pages of one side go from old slots (refs) to new ones (refs, in rank order).

    `sparse_keys`: V's pages, of which some K block is sparse already.
    """

    side: int
    pages: tuple[int, ...]
    old: tuple[int, ...]
    new: tuple[int, ...]
    sparse_keys: bool = False


Operation = Bind | Share | Drop | Move | Convert


def _independent_moves(operations: Sequence[Operation], start: int) -> int:
    """Where the moves from `start` on end that are of its kind and touch none of each other's
    slots."""
    first, touched, stop = operations[start], set[int](), start
    assert isinstance(first, Move)
    for op in itertools.islice(operations, start, None):
        if not isinstance(op, Move) or op.kind != first.kind or touched & {op.old, op.new}:
            break
        touched |= {op.old, op.new}
        stop += 1
    return stop


class BlockPool:
    """All KV bytes of one rank.

    `arena[layer]` is uint8 `[(superblocks + 1) * heads * superblock_bytes]`; `refs` is int32
    `[layers, 2, pages + 1, heads]`, indexed by page id; page 0 is the dummy. `means[layer]`, where
    the pruner centers V, is `[sparse slots, heads, D]`: a mean beside every sparse slot, which
    those of K leave unused. All live on `device` and are only written on the forward stream.

    The layers' arenas lie end to end in `whole_arena`, and their means in `whole_means`, so that
    slot s of layer l is slot `l * slots_per_layer[kind] + s` there.
    """

    def __init__(
        self,
        fmt: BlockFormat,
        *,
        layers: int,
        heads: int,
        superblocks: int,
        pages: int,
        device: str | torch.device = "cpu",
        centered: bool = False,
    ) -> None:
        self.format, self.layers, self.heads, self.pages = fmt, layers, heads, pages
        self.device = torch.device(device)
        self.ledger = Arena(
            superblocks,
            fmt.dense_per_superblock,
            fmt.sparse_per_superblock,
            lambda kind, old, new: self._operations.append(Move(kind, old, new)),
        )
        self.slots_per_layer = {
            DENSE: (superblocks + 1) * fmt.dense_per_superblock,
            SPARSE: (superblocks + 1) * fmt.sparse_per_superblock,
        }
        size = (superblocks + 1) * heads * fmt.superblock_bytes
        self.whole_arena = torch.zeros(layers * size, dtype=torch.uint8, device=device)
        self.arena = list(self.whole_arena.view(layers, size))
        self.refs = torch.zeros((layers, 2, pages + 1, heads), dtype=torch.int32, device=device)
        for arena in self.arena:  # ref 0 reads sparse slot 0: zeros under valid metadata
            write_dummy(arena, fmt, heads)
        self.whole_means: torch.Tensor | None = None
        self.means: list[torch.Tensor] | None = None
        if centered:
            slots = self.slots_per_layer[SPARSE]
            shape = (layers * slots, heads, fmt.head_dim)
            self.whole_means = torch.zeros(shape, dtype=fmt.torch_dtype, device=device)
            self.means = list(self.whole_means.split(slots))
        self.clear()

    def clear(self) -> None:
        """Forgets every slot, span and pending operation (bytes stay, unreachable)."""
        self.ledger.clear()
        self.spans: dict[tuple[int, int], Span] = {}
        self.evictable: dict[BlockKind, int] = {DENSE: 0, SPARSE: 0}
        self._operations: list[Operation] = []

    # bytes

    @property
    def slot_bytes(self) -> dict[BlockKind, int]:
        """Bytes of one slot: a block of every layer and head of this rank, and the mean beside a
        sparse one."""
        blocks, fmt = self.layers * self.heads, self.format
        sparse = fmt.sparse_bytes + self.mean_bytes
        return {DENSE: blocks * fmt.dense_bytes, SPARSE: blocks * sparse}

    @property
    def mean_bytes(self) -> int:
        """Of one block; 0 without means."""
        return self.format.mean_bytes if self.means is not None else 0

    def bytes_of(self, dense: int, sparse: int) -> int:
        """Bytes of so many slots."""
        size = self.slot_bytes
        return dense * size[DENSE] + sparse * size[SPARSE]

    @property
    def used_bytes(self) -> int:
        return sum(self.ledger.used[kind] * size for kind, size in self.slot_bytes.items())

    @property
    def evictable_bytes(self) -> int:
        """Bytes of slots that only the unlocked part of the prefix tree holds."""
        return sum(self.evictable[kind] * size for kind, size in self.slot_bytes.items())

    @property
    def total_bytes(self) -> int:
        return self.ledger.superblocks * self.superblock_bytes

    @property
    def superblock_bytes(self) -> int:
        """Of all layers and heads, and the means beside its sparse slots."""
        fmt = self.format
        size = fmt.superblock_bytes + fmt.sparse_per_superblock * self.mean_bytes
        return self.heads * self.layers * size

    def dense_view(self, layer: int | None = None) -> torch.Tensor:
        """[slots, heads, 64, D] in the element type; without `layer` those of `whole_arena`."""
        arena = self.whole_arena if layer is None else self.arena[layer]
        return dense_slots(arena, self.format, self.heads)

    def sparse_view(self, layer: int | None = None) -> torch.Tensor:
        """uint8 [slots, heads, sparse_bytes]; without `layer` those of `whole_arena`."""
        arena = self.whole_arena if layer is None else self.arena[layer]
        return sparse_slots(arena, self.format, self.heads)

    def means_of(self, layer: int, side: int) -> torch.Tensor | None:
        """[sparse slots, heads, D]; None for K, and where V blocks are stored as they are."""
        return self.means[layer] if self.means is not None and side == Side.V else None

    # slots

    def allocate(self, kind: BlockKind) -> Slot:
        return self.ledger.allocate(kind)

    def _count(self, slot: Slot, sign: int) -> None:
        if slot.idle and slot.references == 1:
            self.evictable[slot.kind] += sign

    def acquire(self, slot: Slot) -> None:
        self._count(slot, -1)
        slot.references += 1

    def release(self, slot: Slot) -> None:
        self._count(slot, -1)
        slot.references -= 1
        if slot.references:
            self._count(slot, 1)
        else:
            self.ledger.release(slot)

    def set_idle(self, pages: Iterable[int], idle: bool) -> None:
        """Slots of these pages belong to an unlocked (evictable) prefix-cache node, or not."""
        seen: set[int] = set()
        for page in pages:
            for side in SIDES:
                span = self.spans[page, side]
                if id(span) in seen:
                    continue
                seen.add(id(span))
                for slot in span.slots:
                    self._count(slot, -1)
                    slot.idle = idle
                    self._count(slot, 1)

    # spans

    def bind(self, side: int, pages: Sequence[int], slots: list[Slot]) -> Span:
        """Gives pages their storage on the CPU's books; whoever fills the slots writes the refs."""
        span = Span(list(pages), slots, len(pages))
        for page in pages:
            if (page, side) in self.spans:
                raise RuntimeError(f"page {page} side {side} is bound already")
            self.spans[page, side] = span
        return span

    def bind_dense(self, side: int, page: int, slot: Slot) -> None:
        """A dense page on one slot: books and refs."""
        self.bind(side, [page], [slot])
        self._operations.append(Bind(side, page, slot.ref))

    def unbind(self, page: int, side: int) -> None:
        span = self.spans.pop((page, side))
        span.live -= 1
        if span.live == 0:
            for slot in span.slots:
                self.release(slot)

    def share(self, old: Sequence[int], new: Sequence[int]) -> None:
        """New pages on the slots of old ones; whole segments stay together."""
        copies: dict[int, Span] = {}
        for old_page, new_page in zip(old, new, strict=True):
            for side in SIDES:
                span = self.spans[old_page, side]
                copy = copies.get(id(span))
                if copy is None:
                    copy = copies[id(span)] = Span([], list(span.slots), 0)
                    for slot in span.slots:
                        self.acquire(slot)
                copy.pages.append(new_page)
                copy.live += 1
                self.spans[new_page, side] = copy
            self._operations.append(Share(old_page, new_page))

    def release_pages(self, pages: Iterable[int]) -> None:
        """Storage of these pages returns; pages without storage are fine."""
        for page in pages:
            for side in SIDES:
                if (page, side) in self.spans:
                    self.unbind(page, side)
            self._operations.append(Drop(page))

    def queue(self, operation: Operation) -> None:
        self._operations.append(operation)

    def take_operations(self) -> list[Operation]:
        operations, self._operations = self._operations, []
        return operations

    # device

    def apply(
        self, operations: Sequence[Operation], convert: Callable[[list[Convert]], None]
    ) -> None:
        """Carries out operations in order, runs of one kind at once. On the forward stream only.

        A CompressionError of `convert` is raised when all are done: conversions are of the batch,
        the others may not.
        """
        start, failed = 0, None
        while start < len(operations):
            kind = type(operations[start])
            stop = start + 1
            if kind is Move:
                stop = _independent_moves(operations, start)
            while kind is not Move and stop < len(operations) and type(operations[stop]) is kind:
                stop += 1
            run: list[Any] = list(operations[start:stop])
            if kind is Bind:
                self._apply_binds(run)
            elif kind is Drop:
                self.refs[:, :, self._index([op.page for op in run])] = 0
            elif kind is Share:
                old, new = (
                    self._index([getattr(op, name) for op in run]) for name in ("old", "new")
                )
                self.refs[:, :, new] = self.refs[:, :, old]
            elif kind is Move:
                self._apply_moves(run)
            else:
                try:
                    convert(run)
                except CompressionError as error:
                    failed = error
            start = stop
        if failed is not None:
            raise failed

    def _index(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long).to(self.device, non_blocking=True)

    def _apply_binds(self, run: Sequence[Bind]) -> None:
        last = {
            (op.side, op.page): op.ref for op in run
        }  # a page may be bound, freed and bound again
        sides, pages = (self._index([key[i] for key in last]) for i in (0, 1))
        values = self._index(list(last.values())).to(torch.int32)
        self.refs[:, sides, pages] = values[None, :, None]

    def _apply_moves(self, run: Sequence[Move]) -> None:
        """Moves of one kind that do not touch each other's slots, in two passes over a layer."""
        kind, sign = run[0].kind, 1 if run[0].kind == DENSE else -1
        block = self.format.dense_bytes if kind == DENSE else self.format.sparse_bytes
        old, new = (self._index([getattr(op, name) for op in run]) for name in ("old", "new"))
        source, target = old.to(torch.int32), new.to(torch.int32)
        ops.copy_slots(self.arena, source, target, self.heads * block)
        moved = torch.arange(self.slots_per_layer[kind], dtype=torch.int32, device=self.device)
        moved[old] = target
        for layer in range(self.layers):
            if kind == SPARSE and self.means is not None:
                self.means[layer][new] = self.means[layer][old]
            of_kind = (self.refs[layer] * sign).clamp_(min=0)  # slot 0 of either kind stays
            follow = moved[of_kind.long()] * sign
            torch.where(of_kind > 0, follow, self.refs[layer], out=self.refs[layer])

    # integrity

    def check_integrity(self, tails: Iterable[Slot], free_pages: Iterable[int] = ()) -> None:
        """Raises AssertionError with the numbers that disagree: a leak, a slot in two uses, bytes.

        `tails` are the slots that running prefills hold besides spans.
        """
        held: Counter[int] = Counter()
        slots: dict[int, Slot] = {}
        for span in {id(span): span for span in self.spans.values()}.values():
            for slot in span.slots:
                held[id(slot)] += 1
                slots[id(slot)] = slot
        for slot in tails:
            held[id(slot)] += 1
            slots[id(slot)] = slot
        in_arena = {id(slot): slot for slot in self.ledger.slots()}
        leaked = [s for key, s in in_arena.items() if key not in held]
        unknown = [s for key, s in slots.items() if key not in in_arena]
        assert not leaked and not unknown, (
            f"slots leak: {leaked[:4]}, not in the arena: {unknown[:4]}"
        )
        wrong = [(s, held[k]) for k, s in slots.items() if s.references != held[k]]
        assert not wrong, f"references disagree with holders: {wrong[:4]}"
        places = Counter((s.kind, s.index) for s in in_arena.values())
        assert all(count == 1 for count in places.values()), "one slot in two uses"
        counts = Counter(s.kind for s in in_arena.values())
        assert all(counts[k] == self.ledger.used[k] for k in (DENSE, SPARSE)), (
            f"counted {dict(counts)}, booked {self.ledger.used}"
        )
        assert self.ledger.fits(counts[DENSE], counts[SPARSE]), "more slots than superblocks"
        idle = Counter(s.kind for s in in_arena.values() if s.idle and s.references == 1)
        assert all(idle[k] == self.evictable[k] for k in (DENSE, SPARSE)), (
            f"evictable slots counted {dict(idle)}, booked {self.evictable}"
        )
        mapped = {page for page, _ in self.spans}
        lost = mapped.intersection(free_pages)
        assert not lost, f"free pages with storage: {sorted(lost)[:8]}"
