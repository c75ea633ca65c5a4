"""The byte ledger: what a request costs under its policy, as counts of dense and sparse slots.

Counts follow from (policy, length) alone, never from data, so every tensor-parallel rank and the
scheduler on the CPU agree without asking the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hs_runtime.policies import SparsityPolicy
from hs_runtime.scheduler.lifecycle import SIDES, Lifecycle, is_fractional, sparse_count


class Slots(NamedTuple):
    """A pair of counts. One slot holds one side of one page, for all layers and heads."""

    dense: int
    sparse: int

    def plus(self, other: tuple[int, int]) -> Slots:
        return Slots(self.dense + other[0], self.sparse + other[1])


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Bytes of one block of one kv head, and how many fit into a superblock."""

    dense_bytes: int
    sparse_bytes: int
    superblock_bytes: int

    @property
    def dense_per_superblock(self) -> int:
        return self.superblock_bytes // self.dense_bytes

    @property
    def sparse_per_superblock(self) -> int:
        return self.superblock_bytes // self.sparse_bytes

    def superblocks(self, slots: tuple[int, int]) -> int:
        """A pair of counts fits an arena if and only if this is at most its superblocks."""
        return -(-slots[0] // self.dense_per_superblock) + -(
            -slots[1] // self.sparse_per_superblock
        )

    def bytes_of(self, slots: tuple[int, int]) -> int:
        return slots[0] * self.dense_bytes + slots[1] * self.sparse_bytes


def prefill_need(rules: Lifecycle, policy: SparsityPolicy, n: int, hit: int) -> Slots:
    """Slots that prefilling [hit, n) may hold at once, whatever the chunk cuts.

    When a chunk completes a segment, the tail slots of that segment and those of the next,
    unfinished one are both held until its last layer.
    """
    per_segment = rules.segment_pages
    dense = sparse = 0
    for side in SIDES:
        share, first, last = policy.prefill.of(side), hit // rules.segment, n // rules.segment
        if not share:
            dense += rules.pages(n) - hit // rules.page
            continue
        if rules.chunk_anchor:  # the windows of two chunks, and the sink
            edge, window = rules.compressed_pages(n), rules.window // rules.page + 1
            dense += min(rules.pages(n) - hit // rules.page, rules.sink_pages + 2 * window)
            sparse += max(0, edge - max(rules.sink_pages, hit // rules.page))
            continue
        kept, form, peak = len(rules.kept_copies(policy, n, side)), 0, 0
        for segment in range(first, last + 1):  # segments [first, segment) are complete
            unfinished = per_segment - 1
            if segment == last:
                unfinished = rules.pages(n) - last * per_segment + kept
            returned = per_segment - 1
            if segment == first:
                returned = 0
            elif segment == last == first + 1:
                returned = min(per_segment - 1, per_segment - kept)
            peak = max(peak, form + unfinished + returned)
            if segment < last:
                count = sparse_count(share, len(rules.candidates(segment)))
                form, sparse = form + per_segment - count, sparse + count
        dense += peak
    return Slots(dense, sparse)


def prefill_form(rules: Lifecycle, policy: SparsityPolicy, n: int) -> Slots:
    """Slots of a prompt of n tokens at the end of its prefill, before decode changes anything."""
    sparse = 0
    for side in SIDES:
        share = policy.prefill.of(side)
        if share and rules.chunk_anchor:
            sparse += max(0, rules.compressed_pages(n) - rules.sink_pages)
            continue
        for segment in range(rules.reuse_limit(policy, n) // rules.segment if share else 0):
            sparse += sparse_count(share, len(rules.candidates(segment)))
    return Slots(2 * rules.pages(n) - sparse, sparse)


def decode_form(rules: Lifecycle, policy: SparsityPolicy, t: int) -> Slots:
    """Slots of a request that is about to compute position t."""
    dense = sparse = 0
    window, pages = rules.window_page(t), t // rules.page + 1
    for side in SIDES:
        share, count = policy.decode.of(side), 0
        if is_fractional(share):
            for segment in range(max(window, 0) // rules.segment_pages):
                count += sparse_count(share, len(rules.candidates(segment)))
        elif share:
            count = max(0, window - rules.sink_pages)
        dense, sparse = dense + pages - count, sparse + count
    return Slots(dense, sparse)


def changing_slots(rules: Lifecycle, policy: SparsityPolicy, n: int) -> int:
    """Slots of a prompt of n tokens that are dense after prefill and sparse in decode."""
    after, before = decode_form(rules, policy, n), prefill_form(rules, policy, n)
    return max(0, after.sparse - before.sparse)


def fits_while_changing(
    fits: Callable[[int, int], bool], sizes: BlockSizes, slots: Slots, changing: int
) -> bool:
    """Whether `changing` dense slots can turn sparse one by one: each sparse one is taken before
    its dense one returns, and either kind may need a superblock for a single slot.

    With D dense and S > D sparse slots a superblock, D S slots that turn free S superblocks and
    take D, so what fits for the first D S fits for all.
    """
    period = sizes.dense_per_superblock * sizes.sparse_per_superblock
    steps = range(min(changing, period))
    return all(fits(slots.dense - k, slots.sparse + k + 1) for k in steps)


def private_pages(rules: Lifecycle, policy: SparsityPolicy, n: int) -> int:
    """Page ids that a prompt of n tokens takes once more at its first decode step, while it still
    holds those that it shares with the prefix cache."""
    shared = rules.reuse_limit(policy, n) // rules.page
    return shared if rules.changes_at_decode(policy, shared) else 0


def page_ids_need(rules: Lifecycle, policy: SparsityPolicy, n: int, max_new: int) -> int:
    """Page ids with which a request always completes alone, one for a step that runs ahead."""
    return rules.pages(n + max_new) + 1 + private_pages(rules, policy, n)


def decode_growth(
    rules: Lifecycle, policy: SparsityPolicy, position: int, new_tokens: int
) -> Slots:
    """Slots by which a request grows while it decodes `new_tokens` tokens from `position` on."""
    before, after = (decode_form(rules, policy, t) for t in (position, position + new_tokens))
    return Slots(max(0, after.dense - before.dense), max(0, after.sparse - before.sparse))


def requests_at_once(
    rules: Lifecycle,
    sizes: BlockSizes,
    superblocks: int,
    policy: SparsityPolicy,
    n: int,
    max_new: int,
) -> int:
    """Requests with prompts of n tokens that an empty arena serves at once, one after the other:
    all but the last decode their `max_new` tokens, while the last prefills and is charged for its.

    Nothing is shared between their prompts.
    """
    if request_need(rules, sizes, policy, n, max_new) > superblocks:
        return 0
    grown = decode_form(rules, policy, n).plus(decode_growth(rules, policy, n, max_new))
    last = prefill_need(rules, policy, n, 0).plus(decode_growth(rules, policy, n, max_new))
    changing = changing_slots(rules, policy, n)
    low, high = 1, 2 + superblocks * sizes.sparse_per_superblock
    while high - low > 1:
        count = (low + high) // 2
        others = Slots(grown.dense * (count - 1), grown.sparse * (count - 1))
        whole = others.plus(last)
        fits = sizes.superblocks(whole) <= superblocks and fits_while_changing(
            lambda dense, sparse: sizes.superblocks(Slots(dense, sparse)) <= superblocks,
            sizes,
            whole,
            changing,
        )
        low, high = (count, high) if fits else (low, count)
    return low


def requests_by_page_ids(
    rules: Lifecycle, page_ids: int, policy: SparsityPolicy, n: int, max_new: int
) -> int:
    """The same, by page ids alone: what bounds it where these are as scarce as bytes."""
    last = page_ids_need(rules, policy, n, max_new)
    if last > page_ids:
        return 0
    return 1 + (page_ids - last) // rules.pages(n + max_new)


def request_need(
    rules: Lifecycle, sizes: BlockSizes, policy: SparsityPolicy, n: int, max_new: int
) -> int:
    """Superblocks with which a request always completes alone.

    Its larger form and the segment being converted, rounded up, plus one because either kind may
    leave a superblock partly filled.
    """
    step = rules.segment_pages * sizes.sparse_bytes
    positions = {
        n,
        n + max_new,
        *range((n // rules.page + 1) * rules.page, n + max_new, rules.page),
    }
    forms: Iterable[int] = (sizes.bytes_of(decode_form(rules, policy, t)) for t in positions)
    larger = max(*forms, sizes.bytes_of(prefill_form(rules, policy, n)))
    alone = -(-(larger + step) // sizes.superblock_bytes) + 1
    return max(sizes.superblocks(prefill_need(rules, policy, n, 0)), alone)
