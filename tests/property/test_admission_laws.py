"""Costs in slots and superblocks: never less than what is held, and little more than that."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from hs_kernels.block_format import BlockFormat
from hs_runtime.compression import RequestStorage
from hs_runtime.policies import SparsityPolicy
from hs_runtime.policies.policy import Sparsity
from hs_runtime.pool.block_pool import Arena, BlockPool
from hs_runtime.scheduler.admission import (
    BlockSizes,
    Slots,
    decode_form,
    decode_growth,
    fits_while_changing,
    prefill_form,
    prefill_need,
    request_need,
)
from hs_runtime.scheduler.lifecycle import SIDES, Lifecycle, sparse_count
from tests.support.strategies import policies, small_rules
from tests.support.tiny_engine import PrefixTree

FORMATS = [BlockFormat(64, "float16"), BlockFormat(128, "float32")]
formats = st.sampled_from(FORMATS)
lengths = st.integers(1, 120)


def sizes_of(fmt: BlockFormat) -> BlockSizes:
    return BlockSizes(fmt.dense_bytes, fmt.sparse_bytes, fmt.superblock_bytes)


@given(formats, st.integers(0, 300), st.integers(0, 300), st.integers(1, 40))
def test_sizes_count_superblocks_as_the_arena_does(
    fmt: BlockFormat, dense: int, sparse: int, superblocks: int
) -> None:
    sizes = sizes_of(fmt)
    arena = Arena(superblocks, fmt.dense_per_superblock, fmt.sparse_per_superblock, lambda *_: None)
    fits = sizes.superblocks((dense, sparse)) <= superblocks
    assert fits == arena.fits(dense, sparse)
    assert sizes.bytes_of((dense, sparse)) == dense * fmt.dense_bytes + sparse * fmt.sparse_bytes
    assert not fits or sizes.bytes_of((dense, sparse)) <= superblocks * fmt.superblock_bytes


def held(rules: Lifecycle, policy: SparsityPolicy, n: int, cuts: list[int]) -> tuple[Slots, Slots]:
    """The most slots, and the last, that a prefill of the chunks [cuts[i], cuts[i + 1]) holds: from
    the rules, page by page. What was cached before the first cut is not its own."""
    tail: set[tuple[int, int]] = set()
    form, most = Slots(0, 0), Slots(0, 0)
    for start, end in pairwise(cuts):
        opened, returned = range(-(-start // rules.page), -(-end // rules.page)), set()
        for side in SIDES:
            share = policy.prefill.of(side)
            kept = rules.kept_copies(policy, n, side)
            complete = end // rules.segment * rules.segment // rules.page
            for p in opened:
                if not share or p * rules.page < rules.sink:
                    form = form.plus((1, 0))
                elif p >= complete or p in kept:
                    tail.add((p, side))
            for segment in range(start // rules.segment, end // rules.segment if share else 0):
                pages = rules.candidates(segment)
                sparse = sparse_count(share, len(pages))
                form = form.plus((len(pages) - sparse, sparse))
                returned |= {(p, side) for p in pages if p not in kept}
        now = form.plus((len(tail), 0))
        most = Slots(max(most.dense, now.dense), max(most.sparse, now.sparse))
        tail -= returned
    return most, form.plus((len(tail), 0))


def whole(policy: SparsityPolicy) -> SparsityPolicy:
    """The same without fractions, which the paper's rule does not know."""
    shares = [[1000 * (phase.of(side) > 0) for side in SIDES] for phase in
              (policy.prefill, policy.decode)]  # fmt: skip
    return SparsityPolicy(Sparsity(*shares[0]), Sparsity(*shares[1]))


def hits(rules: Lifecycle, policy: SparsityPolicy, n: int) -> list[int]:
    limit = min(rules.reuse_limit(policy, n), n - 1)
    unit = rules.granularity(policy)
    return list(range(0, limit // unit * unit + 1, unit))


@given(small_rules, policies(), lengths, st.data())
def test_a_prefill_never_holds_more_than_it_was_charged(
    rules: Lifecycle, policy: SparsityPolicy, n: int, data: st.DataObject
) -> None:
    hit = data.draw(st.sampled_from(hits(rules, policy, n)))
    inner = data.draw(st.sets(st.integers(hit // 4 + 1, max(hit // 4 + 1, (n - 1) // 4))))
    cuts = sorted({hit, n, *(4 * p for p in inner if hit < 4 * p < n)})
    most, _ = held(rules, policy, n, cuts)
    need = prefill_need(rules, policy, n, hit)
    assert most.dense <= need.dense and most.sparse <= need.sparse, (cuts, most, need)


@given(small_rules, policies(), lengths, st.data())
def test_a_prefill_by_the_paper_s_rule_never_holds_more_than_it_was_charged(
    rules: Lifecycle, policy: SparsityPolicy, n: int, data: st.DataObject
) -> None:
    """Chunks end at multiples of the chunk; each leaves all but its last window compressed."""
    rules = replace(rules, chunk_anchor=True, segment=24 + rules.segment)
    policy = whole(policy)
    hit = data.draw(st.sampled_from(hits(rules, policy, n)))
    dense = sparse = 0
    need = prefill_need(rules, policy, n, hit)
    for side in SIDES:
        form, tail, peak = Slots(0, 0), 0, 0
        for start, end in pairwise([hit, *range(hit + rules.segment, n, rules.segment), n]):
            opened = -(-end // 4) - -(-start // 4)
            if not policy.prefill.of(side):
                form = form.plus((opened, 0))
                continue
            edges = [max(0, at - rules.window) // 4 for at in (start, end)]
            if start == hit:
                edges[0] = hit // 4
            sink = sum(p * 4 < rules.sink for p in range(-(-start // 4), -(-end // 4)))
            became = len(range(max(edges[0], rules.sink // 4), edges[1]))
            was_tail = tail
            tail = len(range(max(edges[1], rules.sink // 4), -(-end // 4)))
            form = form.plus((sink, became))
            peak = max(peak, form.dense + tail + was_tail)
        dense, sparse = dense + max(peak, form.dense), sparse + form.sparse
    assert dense <= need.dense and sparse <= need.sparse, (dense, sparse, need)


@settings(max_examples=40)
@given(small_rules, policies(), lengths, st.data())
def test_some_cut_takes_nearly_all_that_was_charged(
    rules: Lifecycle, policy: SparsityPolicy, n: int, data: st.DataObject
) -> None:
    """All sparse slots, and of the dense ones all but less than a segment of each side."""
    hit = data.draw(st.sampled_from(hits(rules, policy, n)))
    pages = (hit, *range(hit + 4, n, 4))
    need = prefill_need(rules, policy, n, hit)
    most = [held(rules, policy, n, sorted({hit, x, y, n}))[0] for x in pages for y in pages]
    assert all(each.sparse == need.sparse for each in most)
    assert need.dense - max(each.dense for each in most) < 2 * rules.segment_pages


@given(small_rules, policies(), lengths, st.data())
def test_a_hit_never_makes_a_prompt_dearer(
    rules: Lifecycle, policy: SparsityPolicy, n: int, data: st.DataObject
) -> None:
    """With the slots of the cached path, which it locks; so an idle server admits all that fits."""
    hit = data.draw(st.sampled_from(hits(rules, policy, n)))
    cached = Slots(0, 0)
    for side in SIDES:
        share, sparse = policy.prefill.of(side), 0
        for segment in range(hit // rules.segment if share else 0):
            sparse += sparse_count(share, len(rules.candidates(segment)))
        cached = cached.plus((hit // rules.page - sparse, sparse))
    warm = prefill_need(rules, policy, n, hit).plus(cached)
    cold = prefill_need(rules, policy, n, 0)
    assert warm.dense <= cold.dense and warm.sparse <= cold.sparse


@given(
    formats,
    st.integers(0, 3000),
    st.integers(0, 3000),
    st.integers(0, 1500),
    st.integers(-1, 2),
)
def test_the_first_slots_to_turn_sparse_speak_for_all(
    fmt: BlockFormat, dense: int, sparse: int, changing: int, spare: int
) -> None:
    sizes = sizes_of(fmt)
    superblocks = sizes.superblocks((dense, sparse)) + spare

    def fits(dense: int, sparse: int) -> bool:
        return sizes.superblocks((dense, sparse)) <= superblocks

    one_by_one = all(fits(dense - k, sparse + k + 1) for k in range(changing))
    assert fits_while_changing(fits, sizes, Slots(dense, sparse), changing) == one_by_one


def test_the_need_of_a_small_case_by_hand() -> None:
    """Segments of 4 pages, 1 of sink, V all sparse: 9 pages and a half, K dense."""
    rules = Lifecycle(page=4, sink=4, window=8, segment=16)
    policy = SparsityPolicy(Sparsity(0, 1000), Sparsity(0, 1000))
    # K: 10 pages. V, when one chunk completes the second segment and the prompt: the sink, three
    # tail pages of that segment, two pages of the third, and the copy of page 7, which the window
    # covers. Pages 1 to 7 have their sparse form.
    need = prefill_need(rules, policy, 38, 0)
    assert need.sparse == 7
    assert need.dense == 10 + 7
    assert prefill_form(rules, policy, 38) == Slots(2 * 10 - 3, 3)
    assert decode_form(rules, policy, 38) == Slots(2 * 10 - 6, 6)


def brute_decode_form(rules: Lifecycle, policy: SparsityPolicy, t: int) -> Slots:
    """Page by page: a page is sparse where the rules let the query at t read it so."""
    pages, window, sparse = t // rules.page + 1, t // rules.page - rules.window // rules.page, 0
    for side in SIDES:
        share = policy.decode.of(side)
        if share == 1000:
            sparse += sum(rules.sink <= p * rules.page and p < window for p in range(pages))
        elif share:
            for segment in range(pages // rules.segment_pages + 1):
                if (segment + 1) * rules.segment_pages <= window:
                    sparse += sparse_count(share, len(rules.candidates(segment)))
    return Slots(2 * pages - sparse, sparse)


@given(small_rules, policies(), st.integers(0, 200))
def test_the_decode_form_is_what_the_query_may_read_sparse(
    rules: Lifecycle, policy: SparsityPolicy, t: int
) -> None:
    assert decode_form(rules, policy, t) == brute_decode_form(rules, policy, t)


@given(small_rules, policies(), st.integers(0, 200), st.integers(0, 100))
def test_growth_covers_the_form_at_its_end(
    rules: Lifecycle, policy: SparsityPolicy, position: int, new: int
) -> None:
    growth = decode_growth(rules, policy, position, new)
    now, then = (decode_form(rules, policy, t) for t in (position, position + new))
    assert min(growth) >= 0
    assert now.dense + growth.dense >= then.dense and now.sparse + growth.sparse >= then.sparse
    assert decode_growth(rules, policy, position, 0) == Slots(0, 0)


@given(formats, small_rules, policies(), lengths, st.integers(1, 60))
def test_the_need_alone_is_its_larger_form_and_a_superblock_more(
    fmt: BlockFormat, rules: Lifecycle, policy: SparsityPolicy, n: int, new: int
) -> None:
    """At every position; and never less than any hit would need."""
    sizes = sizes_of(fmt)
    need = request_need(rules, sizes, policy, n, new)
    forms = [decode_form(rules, policy, t) for t in range(n, n + new + 1)]
    converted = rules.segment_pages * fmt.sparse_bytes
    larger = max(sizes.bytes_of(form) for form in [*forms, prefill_form(rules, policy, n)])
    alone = -(-(larger + converted) // fmt.superblock_bytes) + 1
    assert need == max(alone, sizes.superblocks(prefill_need(rules, policy, n, 0)))
    for hit in hits(rules, policy, n):
        assert sizes.superblocks(prefill_need(rules, policy, n, hit)) <= need


@settings(max_examples=30)
@given(small_rules, policies(), st.integers(2, 12), st.integers(20, 80))
def test_the_longest_prompt_fits_and_one_token_more_does_not(
    rules: Lifecycle, policy: SparsityPolicy, superblocks: int, pages: int
) -> None:
    pool = BlockPool(FORMATS[0], layers=1, heads=1, superblocks=superblocks, pages=pages)
    storage = RequestStorage(rules, pool, PrefixTree(rules, pool))
    longest = storage.longest_prompt(policy)
    assert not storage.never_fits(policy, longest, 1) or longest == 0
    assert storage.never_fits(policy, longest + 1, 1)
    need = storage.need_bytes(policy, longest, 1)
    assert need % FORMATS[0].superblock_bytes == 0
    assert longest == 0 or need <= pool.total_bytes
