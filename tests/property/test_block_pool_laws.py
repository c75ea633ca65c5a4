"""Slots, superblocks, refs and bytes: no slot in two uses, none lost, and every page reads as what
it should hold, whatever was shared, converted, freed and moved in between.

RUNS=1000 runs more examples.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import load_pages
from hs_runtime.compression import Compressor
from hs_runtime.compression.compressor import PageGroup, PageSource
from hs_runtime.policies.pruner import MagnitudePruner
from hs_runtime.pool import block_pool
from hs_runtime.pool.block_pool import DENSE, SIDES, SPARSE, Arena, BlockPool, Convert, Slot
from tests.support.breaking import break_law
from tests.support.cases import PAGE

RUNS = int(os.environ.get("RUNS", 30))
F16 = BlockFormat(64, "float16")
LAYERS, HEADS, PAGES, SUPERBLOCKS = 2, 2, 64, 4


# ---- the ledger ---------------------------------------------------------------------------------


@settings(max_examples=4 * RUNS)
@given(
    st.integers(1, 5),
    st.sampled_from([(9, 16), (17, 32), (2, 3), (1, 2)]),
    st.lists(st.tuples(st.sampled_from([DENSE, SPARSE, None]), st.integers(0, 99)), max_size=120),
)
def test_a_slot_is_there_if_and_only_if_the_counts_fit(
    superblocks: int, per: tuple[int, int], wishes: list[tuple[Any, int]]
) -> None:
    """A wish is a kind to allocate, or None to free a slot."""
    moved: list[tuple[Any, int, int]] = []
    arena = Arena(superblocks, *per, lambda *move: moved.append(move))
    held: list[Slot] = []
    places: dict[int, int] = {}  # id of a slot -> its index
    for kind, choice in wishes:
        moved.clear()
        if kind is None:
            if held:
                slot = held.pop(choice % len(held))
                arena.release(slot)
                del places[id(slot)]
        else:
            counts = Counter(slot.kind for slot in held)
            counts[kind] += 1
            if arena.fits(counts[DENSE], counts[SPARSE]):
                held.append(arena.allocate(kind))
            else:
                with pytest.raises(RuntimeError, match="out of KV bytes"):
                    arena.allocate(kind)
                return  # nothing is promised after that: the ledger is asked first
        for slot in held:
            was = places.get(id(slot), slot.index)
            assert was == slot.index or (slot.kind, was, slot.index) in moved, "moved in silence"
            places[id(slot)] = slot.index
        assert arena.used == {k: sum(s.kind == k for s in held) for k in (DENSE, SPARSE)}
        assert {id(slot) for slot in arena.slots()} == {id(slot) for slot in held}
        used_by = {(slot.index // arena.per[slot.kind], slot.kind) for slot in held}
        blocks = [block for block, _ in used_by]
        assert len(blocks) == len(set(blocks)), "a superblock of two kinds"
        assert all(1 <= block <= superblocks for block in blocks), "superblock 0 is the dummy's"
        assert len({(slot.kind, slot.index) for slot in held}) == len(held)


def test_a_slot_that_is_released_twice_is_an_error() -> None:
    arena = Arena(2, 9, 16, lambda *_: None)
    slot, other = arena.allocate(DENSE), arena.allocate(DENSE)
    arena.release(slot)
    with pytest.raises(RuntimeError, match="released twice"):
        arena.release(slot)
    arena.release(other)
    with pytest.raises(ValueError, match="at least one superblock"):
        Arena(0, 9, 16, lambda *_: None)


# ---- pages and their bytes ----------------------------------------------------------------------


def pruned(blocks: Tensor, side: int) -> Tensor:
    """The two largest of four, the lower index first: by sorting, for blocks [..., 64, D]."""
    lines = blocks if side == Side.K else blocks.transpose(-1, -2)
    fours = lines.reshape(*lines.shape[:-1], -1, 4)
    order = fours.abs().float().argsort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(fours).scatter(-1, order[..., :2], 1.0)
    out = (fours * kept).reshape(lines.shape)
    return out if side == Side.K else out.transpose(-1, -2)


@dataclass(eq=False)
class Unit:
    """Pages that are stored together, and what they hold: plain [sides, pages, L, H, 64, D], of
    which the `sparse[side]` pages of least loss are pruned, for every (layer, head) on its own."""

    pages: list[int]
    plain: Tensor
    sparse: list[int]
    cached: bool = False
    idle: bool = False
    written: bool = False
    copy: bool = False

    @cached_property
    def pruned(self) -> list[Tensor]:
        return [pruned(self.plain[side], side) for side in SIDES]

    @cached_property
    def ranks(self) -> list[Tensor]:
        losses = [
            (x - y).abs().double().sum((-2, -1))
            for x, y in zip(self.plain, self.pruned, strict=True)
        ]
        return [x.argsort(dim=0, stable=True).argsort(dim=0) for x in losses]

    def expected(self, side: int) -> Tensor:
        """[pages, L, H, 64, D] as a reader of refs must see it."""
        is_sparse = (self.ranks[side] < self.sparse[side])[..., None, None]
        return torch.where(is_sparse, self.pruned[side], self.plain[side])


@dataclass
class Forward:
    """A plan: operations, then writes of dense slots and groups to compress."""

    operations: Sequence[Any]
    writes: list[tuple[int, Tensor]] = field(default_factory=list)  # slot, [L, H, 64, D]
    groups: list[PageGroup] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)  # [sides, L, H, 64, D], in batch order


class PagesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(F16, layers=LAYERS, heads=HEADS, superblocks=SUPERBLOCKS, pages=PAGES)
        self.compressor = Compressor(self.pool, MagnitudePruner())
        for arena in self.pool.arena:  # what nobody wrote is NaN
            arena[HEADS * F16.superblock_bytes :] = 0xFF
        self.free = list(range(PAGES, 0, -1))
        self.units: list[Unit] = []
        self.queue: list[Forward] = []
        self.random = torch.Generator().manual_seed(0)

    # choices

    def _fits(self, dense: int, sparse: int) -> bool:
        used = self.pool.ledger.used
        return self.pool.ledger.fits(used[DENSE] + dense, used[SPARSE] + sparse)

    def _unit(self, choice: int, **wanted: bool) -> Unit | None:
        found = [
            unit
            for unit in self.units
            if all(getattr(unit, name) == value for name, value in wanted.items())
        ]
        return found[choice % len(found)] if found else None

    def _slots(self, unit: Unit, side: int) -> list[Slot]:
        spans = {id(s): s for s in (self.pool.spans[page, side] for page in unit.pages)}
        return [slot for span in spans.values() for slot in span.slots]

    def _take(self, count: int) -> list[int]:
        return [self.free.pop() for _ in range(count)]

    # rules

    @rule(sizes=st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=6))
    def open(self, sizes: list[tuple[int, int, int]]) -> None:
        for count, k, v in sizes:
            self._open(max(count, 1), k, v)

    def _open(self, count: int, k: int, v: int) -> None:
        """New pages: one dense page, or a segment of which `k` and `v` pages are sparse."""
        sparse = [min(k, count), min(v, count)]
        needed = sum(sparse)
        if len(self.free) < count or not self._fits(2 * count - needed, needed):
            return
        if count > 1:  # a segment of a fractional share has a sparse page
            sparse = [max(1, each) for each in sparse]
            if not self._fits(2 * count - sum(sparse), sum(sparse)):
                return
        shape = (2, count, LAYERS, HEADS, PAGE, F16.head_dim)
        plain = torch.randn(shape, generator=self.random).half()
        unit = Unit(self._take(count), plain, sparse)
        for side in SIDES:
            if not sparse[side]:
                self.pool.bind_dense(side, unit.pages[0], self.pool.allocate(DENSE))
                continue
            kinds = [SPARSE] * sparse[side] + [DENSE] * (count - sparse[side])
            self.pool.bind(side, unit.pages, [self.pool.allocate(kind) for kind in kinds])
        self.units.append(unit)

    @rule(sparse=st.integers(0, 1), keep=st.integers(2, 5))
    def fill_and_thin_out(self, sparse: int, keep: int) -> None:
        """Pages of one kind until no more fit, of which every `keep`-th stays: the next pages of
        the other kind need superblocks that are not empty."""
        first = len(self.units)
        while self.free and self._fits(2 - 2 * sparse, 2 * sparse):
            self._open(1, sparse, sparse)
        self.plan()
        for unit in [u for i, u in enumerate(self.units[first:]) if i % keep]:
            self._release(unit)

    @rule()
    def plan(self) -> None:
        """Slots are where they will be for this forward; contents are written by it."""
        forward = Forward(())
        for unit in self.units:
            if unit.written:
                continue
            first, unit.written = len(forward.rows), True
            forward.rows += list(unit.plain.unbind(1))
            for side in SIDES:
                slots = self._slots(unit, side)
                if not unit.sparse[side]:
                    forward.writes.append((slots[0].index, unit.plain[side, 0]))
                    continue
                sources = [PageSource((first + i) * PAGE, 0) for i in range(len(unit.pages))]
                refs = tuple(slot.ref for slot in slots)
                forward.groups.append(
                    PageGroup(side, tuple(unit.pages), tuple(sources), refs, unit.sparse[side])
                )
        forward.operations = self.pool.take_operations()
        self.queue.append(forward)

    @precondition(lambda self: self.queue)
    @rule()
    def run(self) -> None:
        """The device carries out the oldest plan."""
        forward = self.queue.pop(0)
        self.pool.apply(forward.operations, self.compressor.convert)
        self.compressor.begin(forward.groups)
        for layer in range(LAYERS):
            for slot, content in forward.writes:
                self.pool.dense_view(layer)[slot] = content[layer]
            if forward.rows:
                # [sides, pages, H, 64, D] -> K and V as [T, H, D]
                batch = torch.stack([rows[:, layer] for rows in forward.rows], dim=1)
                k, v = batch.transpose(2, 3).flatten(1, 2)
                self.compressor.apply(layer, k, v)

    @rule(choice=st.integers(0, 99))
    def share(self, choice: int) -> None:
        """New pages on the slots of cached ones, as at the transition to decode."""
        unit = self._unit(choice, copy=False, written=True)
        if unit is not None and len(self.free) >= len(unit.pages):
            unit.cached, pages = True, self._take(len(unit.pages))
            self.pool.share(unit.pages, pages)
            self.units.append(Unit(pages, unit.plain, list(unit.sparse), written=True, copy=True))

    @rule(choice=st.integers(0, 99))
    def lock_or_unlock(self, choice: int) -> None:
        unit = self._unit(choice, copy=False, written=True)
        if unit is not None:
            unit.cached, unit.idle = True, not unit.idle
            self.pool.set_idle(unit.pages, unit.idle)

    @rule(choice=st.integers(0, 99), side=st.sampled_from(SIDES), more=st.integers(1, 3),
          afresh=st.booleans())  # fmt: skip
    def convert(self, choice: int, side: int, more: int, afresh: bool) -> None:
        """More pages of a unit become sparse; slots whose kind stays are kept, or none is."""
        unit = self._unit(choice, cached=False, written=True)
        if unit is None:
            return
        total, before = len(unit.pages), unit.sparse[side]
        count = min(before + more, total)
        if count == before:
            return
        old = self._slots(unit, side)
        keep: list[Slot | None] = [None] * total
        if not afresh:
            keep = [
                slot if rank >= count or rank < before else None for rank, slot in enumerate(old)
            ]
        kinds = [SPARSE] * count + [DENSE] * (total - count)
        new = Counter(kind for kind, slot in zip(kinds, keep, strict=True) if slot is None)
        if not self._fits(new[DENSE], new[SPARSE]):
            return
        pairs = zip(keep, kinds, strict=True)
        slots = [slot or self.pool.allocate(kind) for slot, kind in pairs]
        refs = (tuple(slot.ref for slot in each) for each in (old, slots))
        self.pool.queue(Convert(side, tuple(unit.pages), *refs))
        for page in unit.pages:
            self.pool.spans.pop((page, side))
        for slot in old:
            if not any(slot is kept for kept in keep):
                self.pool.release(slot)
        self.pool.bind(side, unit.pages, slots)
        unit.sparse[side] = count

    @rule(choice=st.integers(0, 99), copy=st.booleans())
    def release(self, choice: int, copy: bool) -> None:
        unit = self._unit(choice, written=True, copy=copy)
        if unit is not None:
            self._release(unit)

    def _release(self, unit: Unit) -> None:
        if unit.idle:
            self.pool.set_idle(unit.pages, False)
        self.pool.release_pages(unit.pages)
        self.free += unit.pages
        self.units.remove(unit)

    @rule()
    def everything_reads_as_it_should(self) -> None:
        self.plan()
        while self.queue:
            self.run()
        pages = [page for unit in self.units for page in unit.pages]
        for side in SIDES if pages else ():
            want = torch.cat([unit.expected(side) for unit in self.units])
            for layer in range(LAYERS):
                refs = self.pool.refs[layer, side, torch.tensor(pages)]
                got = load_pages(self.pool.arena[layer], refs, Side(side), F16)
                got = got.view(HEADS, len(pages), PAGE, -1).transpose(0, 1)
                same = (got == want[:, layer]).flatten(1).all(1).tolist()
                wrong = [page for page, right in zip(pages, same, strict=True) if not right]
                assert not wrong, f"pages {wrong} of side {side}, layer {layer}"
        if self.free:
            assert not self.pool.refs[:, :, torch.tensor(self.free)].any(), "a free page has refs"

    def teardown(self) -> None:
        self.everything_reads_as_it_should()
        while self.units:
            self._release(self.units[0])
        self.books_are_right()
        assert not any(self.pool.ledger.used.values()) and self.pool.used_bytes == 0

    # invariants

    @invariant()
    def books_are_right(self) -> None:
        self.pool.check_integrity([], self.free)
        idle = {
            id(slot): slot
            for unit in self.units
            if unit.idle
            for side in SIDES
            for slot in self._slots(unit, side)
        }
        counted = Counter(slot.kind for slot in idle.values() if slot.references == 1)
        assert {kind: counted[kind] for kind in (DENSE, SPARSE)} == self.pool.evictable

    @invariant()
    def no_two_slots_share_a_byte(self) -> None:
        size = {DENSE: F16.dense_bytes * HEADS, SPARSE: F16.sparse_bytes * HEADS}
        ranges = sorted(
            (slot.index * size[slot.kind], (slot.index + 1) * size[slot.kind])
            for slot in self.pool.ledger.slots()
        )
        end = F16.superblock_bytes * HEADS
        for start, stop in ranges:
            assert start >= end
            end = stop
        assert end <= self.pool.arena[0].numel()


machine_settings = settings(max_examples=RUNS, stateful_step_count=40)
TestPages = PagesMachine.TestCase
TestPages.settings = machine_settings


# ---- integrity is noticed ------------------------------------------------------------------------


def small_pool() -> BlockPool:
    pool = BlockPool(F16, layers=1, heads=1, superblocks=2, pages=8)
    for page in (1, 2):
        for side in SIDES:
            pool.bind_dense(side, page, pool.allocate(DENSE))
    pool.check_integrity([])
    return pool


def test_integrity_names_what_disagrees() -> None:
    pool = small_pool()
    pool.allocate(SPARSE)
    with pytest.raises(AssertionError, match="slots leak"):
        pool.check_integrity([])

    pool = small_pool()
    pool.spans[1, 0].slots[0].references += 1
    with pytest.raises(AssertionError, match="references disagree"):
        pool.check_integrity([])

    pool = small_pool()
    pool.ledger.used[DENSE] += 1
    with pytest.raises(AssertionError, match="booked"):
        pool.check_integrity([])

    pool = small_pool()
    pool.spans[1, 0].slots[0].idle = True
    with pytest.raises(AssertionError, match="evictable slots counted"):
        pool.check_integrity([])

    pool = small_pool()
    with pytest.raises(AssertionError, match="free pages with storage"):
        pool.check_integrity([], [2, 3])
    with pytest.raises(RuntimeError, match="bound already"):
        pool.bind_dense(0, 1, pool.allocate(DENSE))


def test_sizes_are_those_of_the_format() -> None:
    pool = small_pool()
    assert pool.slot_bytes == {DENSE: F16.dense_bytes, SPARSE: F16.sparse_bytes}
    assert pool.used_bytes == 4 * F16.dense_bytes
    assert pool.total_bytes == 2 * F16.superblock_bytes
    pool.clear()
    assert pool.used_bytes == 0 and not pool.take_operations() and not pool.spans


# ---- the laws notice -----------------------------------------------------------------------------

BROKEN = {
    "refs do not follow a moved slot":
        ("BlockPool._apply_moves", "moved[of_kind.long()] * sign", "of_kind * sign"),
    "the bytes of a moved slot stay behind":
        ("BlockPool._apply_moves", "ops.copy_slots(self.arena, source, target, self.heads * block)",
         "pass"),
    "refs of freed pages stay":
        ("BlockPool.release_pages", "self._operations.append(Drop(page))", "pass"),
    "the emptied superblock keeps its slots' places":
        ("Arena._compact", "self._place(slot, target)", "pass"),
    "a superblock that is full is listed no more when it gets a hole":
        ("Arena.release", "heapq.heappush(self._partial[slot.kind], index)", "pass"),
    "releasing does not change what is evictable":
        ("BlockPool.release", "self._count(slot, 1)", "pass"),
    "superblock 0 is handed out":
        ("Arena.clear", "range(1, self.superblocks + 1)", "range(self.superblocks)"),
    "a copy is never released":
        ("BlockPool.share", "copy.live += 1", "copy.live += 2"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_laws_notice(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_law(monkeypatch, block_pool, *BROKEN[name])
    quick = settings(machine_settings, max_examples=100, phases=[Phase.generate])
    with pytest.raises((AssertionError, RuntimeError, KeyError, IndexError)):
        run_state_machine_as_test(PagesMachine, settings=quick)
