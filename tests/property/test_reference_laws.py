"""Laws of the reference operators, against definitions in fp64 and against themselves."""

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import (
    TILE,
    PrefillPlan,
    _attend,
    attend_by_definition,
    block_losses,
    decode_attention,
    dense_slots,
    keep_2_4,
    keep_n_m,
    merge_states,
    prefill_attention,
    select_blocks,
)
from tests.support.cases import (
    PAGE,
    Chunk,
    anchored_chunk,
    build_decode_case,
    build_prefill_case,
    naive_decode,
    naive_prefill,
    num_tiles,
    segment_chunk,
)
from tests.support.compare import assert_close

F32 = BlockFormat(64, "float32")
sides = st.sampled_from(list(Side))
seeds = st.integers(0, 2**31 - 1)
shares = st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * 2)
groups = st.integers(1, 8)
finite = st.floats(-8, 8, width=16)


# --- pruning ------------------------------------------------------------------------------------


def kept_by_definition(group: list[float], n: int) -> set[int]:
    ranked = sorted(range(len(group)), key=lambda i: (-abs(group[i]), i))
    return set(ranked[:n])


@settings(max_examples=60)
@given(sides, st.lists(finite, min_size=4, max_size=4), st.integers(0, 15), st.integers(0, 63))
def test_the_mask_keeps_the_two_largest_of_each_group(side, group, at, line):
    x = torch.zeros(64, 64, dtype=torch.float16)
    operand = x if side == Side.K else x.T
    operand[line, 4 * at : 4 * at + 4] = torch.tensor(group, dtype=torch.float16)
    keep = keep_2_4(x, side)
    keep = keep if side == Side.K else keep.T
    got = set(keep[line, 4 * at : 4 * at + 4].nonzero()[:, 0].tolist())
    assert got == kept_by_definition(group, 2)
    assert (keep.reshape(64, 16, 4).sum(-1) == 2).all()


@settings(max_examples=40)
@given(sides, st.sampled_from([2, 4, 8, 16]), st.data(), seeds)
def test_any_pattern_keeps_n_of_every_m(side, m, data, seed):
    n = data.draw(st.integers(0, m))
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(seed)).mul(2).round()
    keep = keep_n_m(x, side, n, m)
    if (n, m) == (2, 4):
        assert torch.equal(keep, keep_2_4(x, side))
    axis = (lambda t: t) if side == Side.K else (lambda t: t.transpose(1, 2))
    lines, kept = (axis(t)[0, 0].view(-1, m).tolist() for t in (x, keep))
    for line, mask in zip(lines, kept, strict=True):
        assert {i for i, k in enumerate(mask) if k} == kept_by_definition(line, n)


@settings(max_examples=20)
@given(sides, seeds)
def test_losses_are_the_dropped_magnitudes_and_do_not_depend_on_batch_mates(side, seed):
    x = torch.randn(5, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    losses = block_losses(x, side)
    dropped = torch.where(keep_2_4(x, side), 0.0, x.abs().double())
    assert_close("losses", losses, dropped.sum((-2, -1)), tol=1e-6)
    assert torch.equal(torch.stack([block_losses(page, side) for page in x]), losses)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=24), st.data())
def test_selection_takes_exactly_count_and_never_skips_a_lower_loss(losses, data):
    count = data.draw(st.integers(0, len(losses)))
    chosen = select_blocks(torch.tensor(losses, dtype=torch.float32), count).tolist()
    ranked = sorted(range(len(losses)), key=lambda i: (losses[i], i))
    assert {i for i, c in enumerate(chosen) if c} == set(ranked[:count])


# --- partials -----------------------------------------------------------------------------------


@settings(max_examples=40)
@given(st.integers(1, 6), st.lists(st.integers(0, 63), max_size=4), seeds)
def test_partials_of_any_split_merge_to_the_whole(rows, cuts, seed):
    rng = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(rows, 64, generator=rng)
    v = torch.randn(64, 8, generator=rng)
    bounds = [0, *sorted(cuts), 64]
    outs, lses = [], []
    for lo, hi in itertools.pairwise(bounds):
        part = scores[:, lo:hi]
        lse = part.logsumexp(-1) if hi > lo else torch.full((rows,), -torch.inf)
        outs.append(part.softmax(-1) @ v[lo:hi] if hi > lo else torch.full((rows, 8), torch.nan))
        lses.append(lse)
    out, lse = merge_states(torch.stack(outs), torch.stack(lses))
    assert_close("out", out, scores.double().softmax(-1) @ v.double())
    assert_close("lse", lse, scores.double().logsumexp(-1))

    first = merge_states(torch.stack(outs[:2]), torch.stack(lses[:2]))
    rest = [torch.stack([a, *b]) for a, b in zip(first, (outs[2:], lses[2:]), strict=True)]
    nested_out, nested_lse = merge_states(*rest)
    assert_close("nested out", nested_out, out)
    assert_close("nested lse", nested_lse, lse)


# --- decode -------------------------------------------------------------------------------------


def run_decode(case, splits=1, rows=slice(None)):
    cache = case.cache
    return decode_attention(
        case.q[rows],
        cache.arena,
        cache.refs,
        case.page_table[rows],
        case.seq_lens[rows],
        case.scale,
        cache.fmt,
        splits,
    )


lengths = st.lists(
    st.one_of(st.integers(0, 400), st.integers(0, 6).map(lambda n: n * PAGE)), max_size=4
)


@settings(max_examples=40)
@given(
    st.sampled_from([F32, BlockFormat(128, "bfloat16"), BlockFormat(64, "float16")]),
    st.integers(1, 3),
    groups,
    lengths,
    shares,
    st.integers(1, 9),
    seeds,
)
def test_decode_is_attention_over_the_decompressed_pages(
    fmt, heads, group, lengths, share, splits, seed
):
    if fmt.dtype != "float32":
        group = min(group, 2)
    case = build_decode_case(fmt, heads, group, lengths, share, seed=seed)
    out, lse = run_decode(case, splits)
    if not lengths:
        assert out.shape == case.q.shape
        return
    want_out, want_lse = naive_decode(case)
    assert_close("out", out, want_out)
    assert_close("lse", lse, want_lse)


@settings(max_examples=20)
@given(lengths.filter(bool), shares, seeds)
def test_a_request_decodes_alike_alone_and_in_a_batch(lengths, share, seed):
    case = build_decode_case(F32, 3, 3, lengths, share, seed=seed)
    out, lse = run_decode(case)
    for r in range(len(lengths)):
        alone_out, alone_lse = run_decode(case, rows=slice(r, r + 1))
        assert torch.equal(alone_out[0], out[r])
        assert torch.equal(alone_lse[0], lse[r])


# --- prefill ------------------------------------------------------------------------------------


def run_prefill(case):
    cache = case.cache
    return prefill_attention(
        case.q, case.k, case.v, cache.arena, cache.refs, case.plan, case.scale, cache.fmt
    )


@st.composite
def chunks(draw) -> Chunk:
    a = draw(st.one_of(st.integers(0, 320), st.integers(0, 5).map(lambda n: n * PAGE)))
    b = a + draw(st.integers(0, 300))
    rule = draw(st.sampled_from(["segment", "anchor", "replay", "any"]))
    if rule == "segment":
        return segment_chunk(a, b, draw(st.sampled_from([128, 256])))
    if rule == "anchor":
        return anchored_chunk(a, b, draw(st.sampled_from([0, 64, 128])))
    tiles = num_tiles(a, b)
    if rule == "replay":
        window = draw(st.sampled_from([0, 64, 128]))
        starts = [max(a, (a // TILE + j) * TILE) for j in range(tiles)]
        return Chunk(a, b, tuple(max(0, (t - window) // PAGE) for t in starts))
    return Chunk(a, b, tuple(draw(st.integers(0, b // PAGE)) for _ in range(tiles)))


@settings(max_examples=60)
@given(
    st.integers(1, 3),
    groups,
    st.lists(chunks(), min_size=1, max_size=3),
    shares,
    st.integers(0, 2),
    seeds,
)
def test_prefill_is_attention_over_what_each_row_may_read(
    heads, group, chunks, share, early_tail, seed
):
    case = build_prefill_case(F32, heads, group, chunks, share, early_tail=early_tail, seed=seed)
    out, lse = run_prefill(case)
    want_out, want_lse = naive_prefill(case)
    assert_close("out", out, want_out)
    assert_close("lse", lse, want_lse)


@settings(max_examples=15)
@given(chunks().filter(lambda c: c.b > c.a), shares, seeds)
def test_a_key_in_the_future_changes_nothing(chunk, share, seed):
    case = build_prefill_case(F32, 2, 2, [chunk], share, seed=seed)
    out, lse = run_prefill(case)
    half = (chunk.b - chunk.a) // 2
    case.k[half:] *= -50.0
    case.v[half:] *= 1000.0
    changed_out, changed_lse = run_prefill(case)
    assert_close("out", changed_out[:half], out[:half])
    assert_close("lse", changed_lse[:half], lse[:half])


@settings(max_examples=25)
@given(
    st.integers(1, 500),
    st.lists(st.integers(1, 499), max_size=4, unique=True),
    st.sampled_from([128, 256]),
    shares,
    seeds,
)
def test_chunk_cuts_change_nothing(length, cuts, segment, share, seed):
    """Under the segment rule. What a cut leaves behind of an unfinished segment is in its tail."""
    heads, group = 2, 2
    whole = segment_chunk(0, length, segment)
    pages = -(-length // PAGE)
    case = build_prefill_case(F32, heads, group, [whole], share, extra=2 * pages, seed=seed)
    want_out, want_lse = run_prefill(case)

    cache = case.cache
    tail_slots = torch.tensor(cache.spare[: 2 * pages], dtype=torch.int32).view(1, 2, pages)
    dense = dense_slots(cache.arena, F32, heads)
    for side, x in zip(Side, (case.k, case.v), strict=True):
        for position in range(length):
            dense[tail_slots[0, side, position // PAGE], :, position % PAGE] = x[position]
    bounds = [0, *sorted(c for c in cuts if c < length), length]
    for a, b in itertools.pairwise(bounds):
        chunk = segment_chunk(a, b, segment)
        first = min(chunk.frontiers)
        plan = PrefillPlan(
            cu_seqlens=torch.tensor([0, b - a], dtype=torch.int32),
            prefix_lens=torch.tensor([a], dtype=torch.int32),
            page_table=case.plan.page_table,
            tail_first=torch.tensor([first], dtype=torch.int32),
            tail_slots=tail_slots[:, :, first:],
            tile_offsets=torch.tensor([0, len(chunk.frontiers)], dtype=torch.int32),
            frontiers=torch.tensor(chunk.frontiers, dtype=torch.int32),
        )
        q, k, v = (x[a:b] for x in (case.q, case.k, case.v))
        out, lse = prefill_attention(q, k, v, cache.arena, cache.refs, plan, case.scale, F32)
        assert_close(f"out of [{a}, {b})", out, want_out[a:b])
        assert_close(f"lse of [{a}, {b})", lse, want_lse[a:b])


@settings(max_examples=20)
@given(st.integers(1, 3), groups, st.sampled_from([1, 77, 1100]), st.booleans(), st.data(), seeds)
def test_plain_attention_is_the_blocked_one(heads, group, rows, causal, data, seed):
    keys = rows if causal else data.draw(st.integers(1, 300))
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, group, rows, 64, generator=rng) / 8
    k, v = (torch.randn(heads, 1, keys, 64, generator=rng) for _ in range(2))
    k, v = (x.expand(-1, group, -1, -1) for x in (k, v))
    out, lse = attend_by_definition(q, k, v, causal)
    want_out, want_lse = _attend(q, k, v, causal)
    assert_close("out", out, want_out)
    assert_close("lse", lse, want_lse)
