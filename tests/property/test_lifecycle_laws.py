"""Which pages are compressed when, and what a query reads: functions of positions, against what a
reader of the rules would write down page by page."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from math import ceil

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hs_runtime.policies import PRESETS, ServerConstants, SparsityPolicy
from hs_runtime.policies.policy import Sparsity
from hs_runtime.scheduler.lifecycle import SIDES, Lifecycle, is_fractional, sparse_count
from tests.support.strategies import lifecycles, policies, shares

lengths = st.integers(0, 6000)

# Rules, a policy, where its chunks end from the hit on, and its length.
Prompt = tuple[Lifecycle, SparsityPolicy, list[int], int]


def test_the_server_s_constants_are_the_rules() -> None:
    constants = ServerConstants(sink=128, window=512, segment=2048)
    assert Lifecycle.of(constants) == Lifecycle(64, 128, 512, 2048)
    assert Lifecycle.of(ServerConstants()) == Lifecycle()


@given(shares, st.integers(0, 100))
def test_counts_are_exact_ceilings(share: int, candidates: int) -> None:
    assert sparse_count(share, candidates) == ceil(Fraction(share, 1000) * candidates)
    assert is_fractional(share) == (share not in (0, 1000))


@given(lifecycles(), st.integers(1, 8))
def test_every_page_after_the_sink_is_the_candidate_of_one_segment(
    rules: Lifecycle, segments: int
) -> None:
    found = [p for segment in range(segments) for p in rules.candidates(segment)]
    assert found == list(range(rules.sink // 64, segments * rules.segment // 64))


@given(lifecycles(), lengths, lengths)
def test_a_prefill_query_reads_its_own_segment_dense(rules: Lifecycle, t: int, end: int) -> None:
    """Wherever its chunk ends, and as all rows of its tile do."""
    first = rules.frontier(t, end) * rules.page
    assert first % rules.segment == 0 and first <= t < first + rules.segment
    assert rules.frontier(t // 128 * 128, t + 1) == rules.frontier(t, end)


@given(lifecycles(), lengths)
def test_a_decode_query_reads_its_window_dense(rules: Lifecycle, t: int) -> None:
    """At least `window` tokens before it, and the set changes only when a page opens."""
    first = rules.window_page(t) * rules.page
    assert t - rules.window - rules.page < first <= t - rules.window
    if (t + 1) % rules.page:
        assert rules.window_page(t + 1) == rules.window_page(t)
    else:
        assert rules.window_page(t + 1) == rules.window_page(t) + 1


@given(lifecycles(), policies(), lengths)
def test_what_a_prompt_inserts_is_what_its_repeat_hits(
    rules: Lifecycle, chosen: SparsityPolicy, n: int
) -> None:
    unit, limit = rules.granularity(chosen), rules.reuse_limit(chosen, n)
    assert limit % unit == 0 and 0 <= limit <= n
    if chosen.prefill == Sparsity(0, 0):
        assert unit == rules.page and n - limit < unit
        return
    assert unit == rules.segment
    usable = n - rules.window
    assert limit == max([end for end in range(0, n + 1, unit) if end <= usable], default=0)
    for segment in range(limit // unit):  # nothing of it is read dense by decode only
        assert max(rules.candidates(segment), default=-1) < rules.window_page(n)


@given(lifecycles(), policies(), lengths)
def test_copies_are_kept_of_what_decode_reads_dense_and_prefill_made_sparse(
    rules: Lifecycle, chosen: SparsityPolicy, n: int
) -> None:
    """The first decode query, at n: page by page, or by whole segments for fractions."""
    window = rules.window_page(n)
    for side in SIDES:
        want = []
        for segment in range(n // rules.segment if chosen.prefill.of(side) else 0):
            pages = rules.candidates(segment)
            whole = is_fractional(chosen.prefill.of(side)) or is_fractional(chosen.decode.of(side))
            last = (segment + 1) * rules.segment_pages - 1
            want += [p for p in pages if (last if whole else p) >= window]
        assert list(rules.kept_copies(chosen, n, side)) == want


@given(lifecycles(), policies(), st.integers(0, 60))
def test_a_transition_is_due_if_and_only_if_a_count_changes(
    rules: Lifecycle, chosen: SparsityPolicy, protected: int
) -> None:
    """Of a segment of which the tree holds at least one candidate."""
    segments = {p // rules.segment_pages for p in range(rules.sink_pages, protected)}
    changed = any(
        ceil(Fraction(chosen.prefill.of(side) * len(rules.candidates(segment)), 1000))
        != ceil(Fraction(chosen.decode.of(side) * len(rules.candidates(segment)), 1000))
        for segment in segments
        for side in SIDES
    )
    assert rules.changes_at_decode(chosen, protected) == changed


@pytest.mark.parametrize("name", ["dense", "balanced", "max"])
def test_presets_with_equal_phases_copy_nothing(name: str) -> None:
    assert not Lifecycle().changes_at_decode(PRESETS[name], 1000)


@given(lifecycles(), st.integers(0, 4000), st.integers(1, 700))
def test_replays_stop_where_the_window_moves(rules: Lifecycle, n: int, generated: int) -> None:
    position, known = n, n + generated
    while position < known:
        end = rules.next_replay_end(position, known)
        assert position < end <= known
        assert end == known or end % rules.page == 0
        assert rules.window_page(position) == rules.window_page(end - 1)
        position = end


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Rules of either anchor, a policy, and the ends of a prompt's chunks from its hit on."""
    rules, chosen = draw(lifecycles()), draw(policies())
    if draw(st.booleans()):
        rules = replace(rules, chunk_anchor=True, segment=rules.segment + rules.window)
    n = draw(st.integers(1, 6000))
    unit = rules.granularity(chosen)
    hit = draw(st.integers(0, min(rules.reuse_limit(chosen, n), n - 1) // unit)) * unit
    cuts = [hit]
    while cuts[-1] < n:
        tokens = draw(st.integers(64, 2000)) + (rules.segment if rules.chunk_anchor else 0)
        cuts.append(rules.chunk_end(cuts[-1], n, tokens))
        assert 0 < cuts[-1] - cuts[-2] <= tokens
    return rules, chosen, cuts, n


@given(prompts())
def test_chunks_end_where_pages_do(prompt: Prompt) -> None:
    rules, _, cuts, n = prompt
    unit = rules.segment if rules.chunk_anchor else rules.page
    assert all(end % unit == 0 for end in cuts[:-1] if end != cuts[0])
    assert cuts[-1] == n


def test_a_chunk_that_does_not_fit_is_not_begun() -> None:
    assert Lifecycle().chunk_end(64, 1000, 63) == 64
    by_chunk = Lifecycle(segment=512, chunk_anchor=True)
    assert by_chunk.chunk_end(512, 2000, 511) == 512
    assert by_chunk.chunk_end(512, 2000, 4000) == 1024
    assert by_chunk.chunk_end(512, 700, 188) == 700


@given(prompts())
def test_every_page_is_compressed_once(prompt: Prompt) -> None:
    """All but the sink, up to the last complete segment, or to the last window."""
    rules, _, cuts, n = prompt
    found = [
        p
        for start, end in pairwise(cuts)
        for group in rules.compress_groups(start, end, cuts[0])
        for p in group
    ]
    edge = max(0, n - rules.window) if rules.chunk_anchor else n // rules.segment * rules.segment
    first = max(cuts[0], rules.sink) // rules.page
    assert found == list(range(first, max(first, edge // rules.page)))
    assert rules.compressed_pages(n) == edge // rules.page


@given(prompts())
def test_only_pages_in_their_final_form_enter_the_tree(prompt: Prompt) -> None:
    rules, chosen, cuts, n = prompt
    if rules.chunk_anchor:
        assume(chosen.prefill in (Sparsity(0, 0), Sparsity(1000, 1000)))
    limits = [rules.insert_limit(chosen, end, n) for end in cuts[1:]]
    assert limits == sorted(limits) and limits[-1] == rules.reuse_limit(chosen, n)
    for end, limit in zip(cuts[1:], limits, strict=True):
        assert limit <= end and limit % rules.granularity(chosen) == 0
        if not chosen.prefill.is_dense:
            assert limit <= rules.compressed_pages(end) * rules.page
