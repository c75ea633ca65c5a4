"""What every request holds, and how it changes: prefill, prefill to decode, decode, replay.

All of it happens on the CPU when a batch is scheduled, in counts and lists; the device follows
through the pool's operations. The rules are `scheduler.lifecycle`, the costs `scheduler.admission`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hs_kernels.block_format import BlockKind
from hs_runtime.policies import SparsityPolicy
from hs_runtime.pool.block_pool import DENSE, SPARSE, BlockPool, Convert, Slot
from hs_runtime.scheduler.admission import (
    BlockSizes,
    Slots,
    changing_slots,
    decode_growth,
    fits_while_changing,
    page_ids_need,
    prefill_need,
    private_pages,
    request_need,
)
from hs_runtime.scheduler.lifecycle import SIDES, Lifecycle, is_fractional, sparse_count


class PrefixCache(Protocol):
    """What storage needs of the radix tree and of the page ids."""

    def evict_one(self) -> bool:
        """Evicts the least useful unlocked leaf; False when there is none."""

    def evictable_pages(self) -> int:
        """Page ids in unlocked nodes."""

    def free_page_count(self) -> int:
        """Page ids that nobody holds."""

    def make_private(self, state: RequestState) -> list[int]:
        """Takes fresh page ids for the row's first `state.protected` pages, writes them into
        SGLang's row and unlocks the tree's path. Returns the ids."""


@dataclass(eq=False, slots=True)
class RequestState:
    """One admitted request. Pages and positions count from the start of the prompt.

    `pages` is its row of page ids, the first `protected` of which belong to the tree. `tail` holds
    dense slots of pages whose refs are not set (yet). `budget` is what admission promised its
    prefill and it has not taken. `front[side]` is the first page that decode has not visited.
    `serial` is the order of admission, in which steps take bytes; `replay_tokens` is how far one
    replay extend of a dense request may go.
    """

    rid: str
    policy: SparsityPolicy
    n: int
    known: int
    max_new: int
    owner: Any
    hit: int = 0
    position: int = 0
    pages: list[int] = field(default_factory=list)
    protected: int = 0
    tail: dict[tuple[int, int], Slot] = field(default_factory=dict)
    budget: list[int] = field(default_factory=lambda: [0, 0])
    front: list[int] = field(default_factory=lambda: [0, 0])
    private: bool = False
    decoding: bool = False
    serial: int = 0
    replay_tokens: int = 64
    prompt_form: Slots | None = None

    @property
    def replaying(self) -> bool:
        """Its prompt is done, and tokens generated before a retraction are still to be computed."""
        return self.decoding and self.position < self.known


@dataclass(frozen=True, slots=True)
class ChunkWork:
    """One row of an extend batch, positions [start, end).

    `compress` lists (side, pages of the row, slots in rank order, how many of them are sparse),
    `writes` (page of the row, side, dense slot), `returned` the tail entries that are free after
    the forward.
    """

    state: RequestState
    start: int
    end: int
    compress: tuple[tuple[int, tuple[int, ...], tuple[Slot, ...], int], ...]
    writes: tuple[tuple[int, int, Slot], ...]
    returned: tuple[tuple[int, int], ...]
    replay: bool


def in_order(states: Iterable[RequestState]) -> list[RequestState]:
    return sorted(states, key=lambda state: state.serial)


class RequestStorage:
    """Every admitted request's pages and slots, and the byte ledger over them.

    `page_bytes` are what a page id costs besides its slots: bytes in the layers that stay dense.
    Where there are some, page ids are as scarce as slots and are asked for as slots are.
    """

    def __init__(
        self,
        rules: Lifecycle,
        pool: BlockPool,
        prefix_cache: PrefixCache,
        *,
        page_bytes: int = 0,
    ) -> None:
        self.rules, self.pool, self.prefix_cache = rules, pool, prefix_cache
        self.page_bytes = page_bytes
        fmt = pool.format
        self.sizes = BlockSizes(fmt.dense_bytes, fmt.sparse_bytes, fmt.superblock_bytes)
        self.active: dict[str, RequestState] = {}
        self.careful = False  # after a retraction admit only what surely completes
        self.formed: Counter[tuple[str, str]] = Counter()  # (phase, kind) -> blocks
        self.retractions = 0
        self._serial = 0
        self._refused_at: tuple[int, int] | None = None  # bytes and page ids committed then

    # ledger

    @property
    def _used(self) -> Slots:
        return Slots(self.pool.ledger.used[DENSE], self.pool.ledger.used[SPARSE])

    def reserved(self) -> tuple[Slots, int]:
        """Slots and page ids promised to running prefills and not taken yet."""
        dense = sparse = pages = 0
        for state in self.active.values():
            if not state.decoding:
                dense, sparse = dense + state.budget[0], sparse + state.budget[1]
                pages += self.rules.pages(state.n) - len(state.pages)
        return Slots(dense, sparse), pages

    def never_fits(self, policy: SparsityPolicy, n: int, max_new: int) -> bool:
        need = request_need(self.rules, self.sizes, policy, n, max_new)
        pages = 2 * (self.rules.pages(n + max_new) + 1)
        if self.page_bytes:
            pages = page_ids_need(self.rules, policy, n, max_new)
        return need > self.pool.ledger.superblocks or pages > self.pool.pages

    @property
    def total_bytes(self) -> int:
        """Of the whole KV cache."""
        return self.pool.total_bytes + self.pool.pages * self.page_bytes

    def need_bytes(self, policy: SparsityPolicy, n: int, max_new: int) -> int:
        """Bytes of all layers and heads with which the request always completes alone: the share of
        `total_bytes` that it takes of what it needs most of, superblocks or page ids."""
        blocks = request_need(self.rules, self.sizes, policy, n, max_new)
        if not self.page_bytes:
            return blocks * self.pool.superblock_bytes
        pages, total = page_ids_need(self.rules, policy, n, max_new), self.total_bytes
        return max(
            -(-blocks * total // self.pool.ledger.superblocks), -(-pages * total // self.pool.pages)
        )

    def longest_prompt(self, policy: SparsityPolicy) -> int:
        """The longest prompt that fits an empty arena with one new token."""
        low, high = 0, self.pool.pages * self.rules.page
        while high - low > 1:
            middle = (low + high) // 2
            fits = not self.never_fits(policy, middle, 1)
            low, high = (middle, high) if fits else (low, middle)
        return low

    def admits(
        self, policy: SparsityPolicy, n: int, hit: int, *, max_new: int, counted: int, ratio: float
    ) -> bool:
        """Whether a prompt of n tokens, of which `hit` are cached (and locked), can start now.

        `counted` of its `max_new` new tokens are reserved; `ratio` is SGLang's new_token_ratio, at
        which the remaining tokens of running requests are counted. Growth counts only beside
        running requests: alone, whatever `never_fits` passed completes.
        """
        self._refused_at = self.committed(), self._awaited_page_ids()  # until it is admitted
        rules = self.rules
        if self.careful and self.active:
            wishes = [
                (policy, n, max_new),
                *((s.policy, s.n, s.max_new) for s in self.active.values()),
            ]
            needs = [request_need(rules, self.sizes, *wish) for wish in wishes]
            if sum(needs) > self.pool.ledger.superblocks:
                return False
            ids = sum(page_ids_need(rules, *wish) for wish in wishes) if self.page_bytes else 0
            if ids > self.pool.pages:
                return False
        reserved, reserved_pages = self.reserved()
        need = self._used.plus(reserved).plus(prefill_need(rules, policy, n, hit))
        if self.active:
            need = need.plus(decode_growth(rules, policy, n, counted))
        for state in self.active.values():
            left = min(max(state.max_new - (max(state.position, state.known) - state.n), 0), 4096)
            position = max(state.position, state.n)
            need = need.plus(decode_growth(rules, state.policy, position, int(left * ratio)))
        evictable, fits = self.pool.evictable, self.pool.ledger.fits
        need = Slots(need.dense - evictable[DENSE], need.sparse - evictable[SPARSE])
        if not fits(*need):
            return False
        if self.active:
            changing = changing_slots(rules, policy, n)
            for state in self.active.values():
                if state.position <= state.n:
                    changing += changing_slots(rules, state.policy, state.n)
            if not fits_while_changing(fits, self.sizes, need, changing):
                return False
        pages = reserved_pages + rules.pages(n) - hit // rules.page
        if self.page_bytes:
            pages += private_pages(rules, policy, n) + self._awaited_page_ids()
        if self.prefix_cache.free_page_count() + self.prefix_cache.evictable_pages() < pages:
            return False
        self._refused_at = None
        return True

    def committed(self) -> int:
        """Bytes of a layer and head that are held and cannot be evicted, or that running prefills
        were promised."""
        dense, sparse = self._used.plus(self.reserved()[0])
        evictable = self.pool.evictable
        return self.sizes.bytes_of((dense - evictable[DENSE], sparse - evictable[SPARSE]))

    def _awaited_page_ids(self) -> int:
        """Page ids that admitted requests take at their first decode step, where ids are scarce."""
        if not self.page_bytes:
            return 0
        waiting = (state for state in self.active.values() if not state.private)
        return sum(private_pages(self.rules, state.policy, state.n) for state in waiting)

    def has_more_room(self) -> bool:
        """Whether bytes came back since a request was refused: a prefill gave up its tail, or a
        prompt took its decode form; or page ids: its row has its own now. Requests that end are
        SGLang's to notice."""
        if self._refused_at is None:
            return False
        held, awaited = self._refused_at
        return self.committed() < held or self._awaited_page_ids() < awaited

    def _take(self, state: RequestState, kind: BlockKind) -> Slot:
        """One slot for a prefill: promised at admission, so eviction always makes room."""
        dense, sparse, ledger = kind == DENSE, kind == SPARSE, self.pool.ledger
        while not ledger.fits(ledger.used[DENSE] + dense, ledger.used[SPARSE] + sparse):
            if not self.prefix_cache.evict_one():
                raise RuntimeError(
                    f"a forward ran out of KV bytes: {self._used}, request {state.rid}"
                )
        state.budget[sparse] -= 1
        if state.budget[sparse] < 0:
            raise RuntimeError(f"request {state.rid} holds more than was charged: {state.budget}")
        return self.pool.allocate(kind)

    # admission and prefill

    def open(self, state: RequestState) -> None:
        """Admits a request whose first `state.hit` tokens are cached in `state.pages`."""
        self._serial += 1
        state.serial = self._serial
        need = prefill_need(self.rules, state.policy, state.n, state.hit)
        state.budget = [need.dense, need.sparse]
        state.front = [self.rules.sink_pages] * 2
        state.position = state.hit
        self.active[state.rid] = state

    def allocate_chunk(self, state: RequestState, end: int, new_pages: Sequence[int]) -> ChunkWork:
        """Slots of prompt positions [state.position, end), whose new page ids are `new_pages`."""
        rules, start, first = self.rules, state.position, len(state.pages)
        compress: list[tuple[int, tuple[int, ...], tuple[Slot, ...], int]] = []
        writes: list[tuple[int, int, Slot]] = []
        returned: list[tuple[int, int]] = []
        state.pages.extend(new_pages)
        for side in SIDES:
            share = state.policy.prefill.of(side)
            kept = rules.kept_copies(state.policy, state.n, side)
            edge = rules.compressed_pages(end)
            for p in range(first, len(state.pages)):
                if p < rules.sink_pages or not share:
                    slot = self._take(state, DENSE)
                    self.pool.bind_dense(side, state.pages[p], slot)
                    writes.append((p, side, slot))
                elif p >= edge or p in kept:
                    slot = state.tail[p, side] = self._take(state, DENSE)
                    writes.append((p, side, slot))
            for pages in rules.compress_groups(start, end, state.hit) if share else ():
                count = sparse_count(share, len(pages))
                whole = is_fractional(share)
                for group in [tuple(pages)] if whole else [(p,) for p in pages]:
                    sparse = count if whole else 1
                    kinds = [SPARSE] * sparse + [DENSE] * (len(group) - sparse)
                    slots = [self._take(state, kind) for kind in kinds]
                    self.pool.bind(side, [state.pages[p] for p in group], slots)
                    compress.append((side, group, tuple(slots), sparse))
                    self._count_formed("prefill", sparse, len(group) - sparse)
                returned += [(p, side) for p in pages if p < first and p not in kept]
        return ChunkWork(
            state, start, end, tuple(compress), tuple(writes), tuple(returned), replay=False
        )

    def finish_chunk(self, work: ChunkWork) -> None:
        """After the forward is planned: tail slots of completed segments return."""
        state = work.state
        for key in work.returned:
            self.pool.release(state.tail.pop(key))
            state.budget[0] += 1
        state.position = work.end

    def end_of_prompt(self, state: RequestState) -> None:
        """The dense copies of unfinished and window pages become their pages' storage."""
        for (p, side), slot in state.tail.items():
            page = state.pages[p]
            if (page, side) in self.pool.spans:
                self.pool.unbind(page, side)
            self.pool.bind_dense(side, page, slot)
        state.tail, state.budget, state.decoding = {}, [0, 0], True
        self._skip_settled(state)
        state.prompt_form = self.form(state, state.n)

    def _skip_settled(self, state: RequestState) -> None:
        """Moves the fronts past pages that prefill stored as decode wants them."""
        for side in SIDES:
            share = state.policy.decode.of(side)
            if share and not is_fractional(share) and share == state.policy.prefill.of(side):
                for page in state.pages[state.front[side] :]:
                    slots = self.pool.spans[page, side].slots
                    if len(slots) > 1 or slots[0].kind == DENSE:
                        break
                    state.front[side] += 1

    # prefill to decode, decode, replay

    def needs_private_pages(self, state: RequestState) -> bool:
        return (
            state.decoding
            and not state.private
            and self.rules.changes_at_decode(state.policy, state.protected)
        )

    def make_private(self, state: RequestState) -> bool:
        """New page ids on the slots of the tree's pages, whose path is unlocked.

        False when the ids are not there; nothing has changed then.
        """
        need = state.protected + self.reserved()[1]
        while self.prefix_cache.free_page_count() < need:
            if not self.prefix_cache.evict_one():
                return False
        old = state.pages[: state.protected]
        new = self.prefix_cache.make_private(state)
        self.pool.share(old, new)
        state.pages[: state.protected] = new
        state.protected, state.private = 0, True
        return True

    def _units(self, state: RequestState) -> Iterable[tuple[int, tuple[int, ...], int]]:
        """(side, pages, sparse count) that take their decode form before position is computed.

        V before K, so that a pruner of V finds the K of the same pages as it was.
        """
        rules, window = self.rules, self.rules.window_page(state.position)
        for side in reversed(SIDES):
            share, p = state.policy.decode.of(side), state.front[side]
            while share and p < window:
                held = self.pool.spans[state.pages[p], side].pages
                pages: tuple[int, ...] = (p,)
                if len(held) > 1 or is_fractional(share):
                    segment = p // rules.segment_pages
                    if (segment + 1) * rules.segment_pages > window:
                        break
                    pages = tuple(rules.candidates(segment))
                yield side, pages, sparse_count(share, len(pages))
                p = pages[-1] + 1

    def _change(
        self, state: RequestState, side: int, pages: tuple[int, ...], count: int
    ) -> tuple[list[Slot], list[Slot | None], list[BlockKind]]:
        """Old slots; for every rank the old slot that may stay (None: a new one), and its kind."""
        if len(pages) == 1:
            (slot,) = self.pool.spans[state.pages[pages[0]], side].slots
            kind = SPARSE if count else DENSE
            return [slot], [slot if slot.kind == kind else None], [kind]
        spans = {id(s): s for s in (self.pool.spans[state.pages[p], side] for p in pages)}.values()
        old = [slot for span in spans for slot in span.slots]
        kinds = [SPARSE] * count + [DENSE] * (len(pages) - count)
        if len(spans) == 1:
            same = zip(old, kinds, strict=True)
            return old, [slot if slot.kind == kind else None for slot, kind in same], kinds
        mine = [s for s in old if s.references == 1 and s.kind == DENSE][: len(pages) - count]
        fresh: list[Slot | None] = [None] * (len(pages) - len(mine))
        return old, fresh + mine, kinds

    def step_end(self, state: RequestState) -> int:
        """Where the next step of a decoding request ends: a replay extend, or one token."""
        if not state.replaying:
            return state.position + 1
        if state.policy.is_dense:  # nothing changes form, so a replay need not stop at pages
            whole = (state.position + state.replay_tokens) // self.rules.page * self.rules.page
            return min(state.known, max(whole, state.position + 1))
        return self.rules.next_replay_end(state.position, state.known)

    def step_fits(self, states: Iterable[RequestState]) -> bool:
        """Whether the next step of these requests fits, taken in this order. Counts only."""
        reserved, page_ids = self.reserved()
        dense, sparse = self._used.plus(reserved)
        fits = self.pool.ledger.fits
        for state in states:
            for side, pages, count in self._units(state):
                old, keep, kinds = self._change(state, side, pages, count)
                new = [kind for slot, kind in zip(keep, kinds, strict=True) if slot is None]
                dense, sparse = dense + new.count(DENSE), sparse + new.count(SPARSE)
                if not fits(dense, sparse):
                    return False
                kept = {id(slot) for slot in keep if slot}
                gone = [s.kind for s in old if id(s) not in kept and s.references == 1]
                dense, sparse = dense - gone.count(DENSE), sparse - gone.count(SPARSE)
            pages_opened = self.rules.pages(self.step_end(state)) - len(state.pages)
            dense, page_ids = dense + 2 * pages_opened, page_ids + pages_opened
            if not fits(dense, sparse):
                return False
        return page_ids <= self.prefix_cache.free_page_count()

    def make_room(self, states: Sequence[RequestState]) -> bool:
        """Private pages where due, then evicts until the next step of `states` fits; False if it
        cannot. Steps take their bytes in the order of admission, here and when they are planned."""
        states = in_order(states)
        for state in states:
            if self.needs_private_pages(state) and not self.make_private(state):
                return False
        while not self.step_fits(states):
            if not self.prefix_cache.evict_one():
                return False
        return True

    def convert_due(self, state: RequestState) -> None:
        """Queues the pages that take their decode form before `state.position` is computed."""
        for side, pages, count in list(self._units(state)):
            self._convert(state, side, pages, count)
            state.front[side] = pages[-1] + 1

    def _convert(self, state: RequestState, side: int, pages: tuple[int, ...], count: int) -> None:
        pool = self.pool
        old, keep, kinds = self._change(state, side, pages, count)
        if None not in keep:
            return
        ids = tuple([state.pages[p] for p in pages])
        phase = "transition" if state.position == state.n else "decode"
        if len(ids) == 1:
            new = [pool.allocate(kinds[0])]
            keys = pool.spans[ids[0], 0].slots
            sparse_keys = side == 1 and (keys[0].kind == SPARSE or len(keys) > 1)
            pool.queue(Convert(side, ids, (old[0].ref,), (new[0].ref,), sparse_keys))
            self._count_formed(phase, count - (old[0].kind == SPARSE), 0)
            self._forget(ids[0], side)
            pool.release(old[0])
            pool.bind(side, ids, new)
            return
        before = sum(slot.kind == SPARSE for slot in old)
        new = [slot or pool.allocate(kind) for slot, kind in zip(keep, kinds, strict=True)]
        old_refs, new_refs = (tuple(slot.ref for slot in slots) for slots in (old, new))
        spans = (pool.spans[page, 0] for page in ids)
        sparse_keys = side == 1 and any(s.kind == SPARSE for span in spans for s in span.slots)
        pool.queue(Convert(side, ids, old_refs, new_refs, sparse_keys))
        self._count_formed(phase, count - before, 0)
        for page in ids:
            self._forget(page, side)
        kept = {id(slot) for slot in keep if slot}
        for slot in old:
            if id(slot) not in kept:
                pool.release(slot)
        pool.bind(side, ids, new)

    def _forget(self, page: int, side: int) -> None:
        """Takes a page out of its span without releasing the slots, which the caller reuses."""
        span = self.pool.spans.pop((page, side))
        span.live -= 1

    def open_pages(self, state: RequestState, new_pages: Sequence[int]) -> None:
        """Dense slots, K and V, of pages that decode or replay opens."""
        for page in new_pages:
            state.pages.append(page)
            for side in SIDES:
                self.pool.bind_dense(side, page, self.pool.allocate(DENSE))

    def replay_chunk(self, state: RequestState, end: int, new_pages: Sequence[int]) -> ChunkWork:
        """A replay extend [state.position, end); its conversions have been queued."""
        self.open_pages(state, new_pages)
        pages = range(state.position // self.rules.page, self.rules.pages(end))
        writes = tuple((p, side, self.dense_slot(state, p, side)) for p in pages for side in SIDES)
        return ChunkWork(state, state.position, end, (), writes, (), replay=True)

    def dense_slot(self, state: RequestState, p: int, side: int) -> Slot:
        """The dense slot of a page that is read or written in plain form."""
        slot = state.tail.get((p, side))
        if slot is None:
            span = self.pool.spans[state.pages[p], side]
            slot = span.slots[0]
            if len(span.slots) != 1 or slot.kind != DENSE:
                raise RuntimeError(f"request {state.rid}: page {p} side {side} is not dense")
        return slot

    # the end of a request, and reports

    def close(self, state: RequestState) -> None:
        """Gives back the tail slots; the caller gives back the pages."""
        for slot in state.tail.values():
            self.pool.release(slot)
        state.tail = {}
        del self.active[state.rid]
        if not self.active:
            self.careful = False

    def note_retraction(self) -> None:
        """Until the server has drained, only what surely completes beside the rest is admitted."""
        self.careful, self.retractions = True, self.retractions + 1

    def clear(self) -> None:
        self.active.clear()
        self.careful = False
        self._refused_at = None

    @property
    def compressed_blocks(self) -> int:
        """Blocks made sparse since the start, of all layers and heads."""
        return sum(count for (_, kind), count in self.formed.items() if kind == "sparse")

    def _count_formed(self, phase: str, sparse: int, dense: int) -> None:
        blocks = self.pool.layers * self.pool.heads
        self.formed[phase, "sparse"] += sparse * blocks
        self.formed[phase, "dense"] += dense * blocks

    def form(self, state: RequestState, tokens: int) -> Slots:
        """Dense and sparse slots of the pages that hold the first `tokens` tokens (of a segment,
        counted once). A step that ran ahead may have opened one page more."""
        pages = state.pages[: self.rules.pages(tokens)]
        spans = {
            id(span): span
            for span in (self.pool.spans[page, side] for page in pages for side in SIDES)
        }
        kinds = [slot.kind for span in spans.values() for slot in span.slots]
        return Slots(kinds.count(DENSE), kinds.count(SPARSE))

    def tails(self) -> Iterable[Slot]:
        for state in self.active.values():
            yield from state.tail.values()
