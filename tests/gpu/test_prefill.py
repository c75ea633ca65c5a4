"""Prefill attention on the device against attention computed row by row, and the fp32 oracle."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from hs_kernels import ops, reference
from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import TILE, PrefillPlan, dense_slots, load_pages
from tests.support.cases import (
    ALL_SHARES,
    PAGE,
    Chunk,
    PrefillCase,
    anchored_chunk,
    build_prefill_case,
    naive_prefill,
    segment_chunk,
)
from tests.support.compare import assert_close

pytestmark = pytest.mark.gpu

FORMATS = [BlockFormat(d, t) for d in (64, 128) for t in ("bfloat16", "float16")]
LSE_TOLERANCE = 2e-3
# Root mean square error of FlashAttention-3 against fp64 on dense random bf16 data, relative to
# that of the rows: bench_prefill.py measures 2.25e-3.
FA3_ERROR = 2.25e-3
LONG, CHUNK, LONG_SEGMENT = 131072, 32768, 1024
# Whole tiles, begun pages and tiles, tails, nothing before, frontiers inside and past the chunk.
EDGES = [
    Chunk(0, 1, (0,)),
    segment_chunk(0, 200, 128),
    segment_chunk(384, 514, 256),
    segment_chunk(100, 331, 128),
    segment_chunk(191, 192, 1024),
    segment_chunk(321, 330, 1024),
    anchored_chunk(256, 640, 128),
    anchored_chunk(0, 257, 64),
]


def attend(
    case: PrefillCase, sparse: tuple[bool, bool] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on the device, after the allocator's next blocks were poisoned.

    `sparse` names the kernel; by default it is what the refs that are read ask for.
    """
    poison = [torch.full_like(case.q, torch.nan, device="cuda") for _ in range(4)]
    poison += [torch.full(case.q.shape[:2], torch.nan, device="cuda") for _ in range(4)]
    del poison
    before = case.cache.arena.cuda()
    arena = before.clone()
    refs = case.cache.refs
    reached = torch.cat(
        [case.plan.page_table[r, : max(c.frontiers)] for r, c in enumerate(case.chunks)]
    ).long()
    if sparse is None:
        sparse = tuple(bool((refs[side][reached] < 0).any()) for side in Side)
    out, lse = ops.prefill_attention(
        *(x.cuda() for x in (case.q, case.k, case.v)),
        *(arena, refs.cuda(), on_device(case.plan), case.scale, case.cache.fmt),
        sparse_k=sparse[Side.K],
        sparse_v=sparse[Side.V],
    )
    torch.cuda.synchronize()
    assert torch.equal(arena, before), "prefill wrote into the arena"
    return out, lse


def on_device(plan: PrefillPlan) -> PrefillPlan:
    return PrefillPlan(*(getattr(plan, name).cuda() for name in PrefillPlan.__dataclass_fields__))


def oracle(case: PrefillCase) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.prefill_attention` in fp32 on the device, of the same bytes."""
    out, lse = reference.prefill_attention(
        *(x.cuda() for x in (case.q, case.k, case.v)),
        *(case.cache.arena.cuda(), case.cache.refs.cuda(), on_device(case.plan)),
        *(case.scale, case.cache.fmt),
    )
    return out, lse


@pytest.mark.parametrize("share", ALL_SHARES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_ragged_chunks_at_every_edge(fmt: BlockFormat, share: tuple[float, float]) -> None:
    case = build_prefill_case(fmt, heads=2, group=2, chunks=EDGES, share=share, early_tail=1)
    out, lse = attend(case)
    want, want_lse = naive_prefill(case)
    assert_close("out", out, want)
    assert_close("lse", lse, want_lse, LSE_TOLERANCE)


@pytest.mark.parametrize("share", ALL_SHARES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_long_chunks(fmt: BlockFormat, share: tuple[float, float]) -> None:
    chunks = [segment_chunk(2048, 3500, 512), segment_chunk(0, 1000, 256)]
    case = build_prefill_case(fmt, heads=2, group=4, chunks=chunks, share=share)
    out, lse = attend(case)
    want, want_lse = oracle(case)
    assert_close("out", out, want)
    assert_close("lse", lse, want_lse, LSE_TOLERANCE)


@pytest.mark.parametrize("factor", [6.0, 80.0])
@pytest.mark.parametrize("share", [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0), (0.5, 0.5)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scores_that_outgrow_the_first_step(
    fmt: BlockFormat, share: tuple[float, float], factor: float
) -> None:
    """Maxima far above those of the diagonal move the reference of the exponents."""
    case = build_prefill_case(fmt, 2, 2, [segment_chunk(1024, 1400, 256)], share)
    case = replace(case, q=case.q * factor)
    out, lse = attend(case)
    want, want_lse = oracle(case)
    # Scores of hundreds: the fp32 sums of either side are exact to about 1e-7 of them.
    assert_close("out", out, want, 3 * (2e-3 if fmt.dtype == "float16" else 1.6e-2))
    assert_close("lse", lse, want_lse, LSE_TOLERANCE)


@pytest.mark.parametrize("sparse", [(False, True), (True, True)], ids=str)
def test_general_kernels_read_dense_pages(sparse: tuple[bool, bool]) -> None:
    case = build_prefill_case(FORMATS[2], 2, 2, EDGES[1:], (0.0, 0.0))
    out, lse = ops.prefill_attention(
        *(x.cuda() for x in (case.q, case.k, case.v)),
        *(case.cache.arena.cuda(), case.cache.refs.cuda(), on_device(case.plan)),
        *(case.scale, case.cache.fmt),
        sparse_k=sparse[0],
        sparse_v=sparse[1],
    )
    want, want_lse = oracle(case)
    assert_close("out", out, want)
    assert_close("lse", lse, want_lse, LSE_TOLERANCE)


def test_block_means_count_where_values_are_sparse_and_are_then_refused() -> None:
    case = build_prefill_case(FORMATS[2], 2, 2, EDGES[1:], (0.0, 0.0))
    slots = case.cache.arena.numel() // (2 * case.cache.fmt.sparse_bytes)
    means = torch.ones((slots, 2, 128), dtype=torch.bfloat16, device="cuda")
    given = (
        *(x.cuda() for x in (case.q, case.k, case.v)),
        *(case.cache.arena.cuda(), case.cache.refs.cuda(), on_device(case.plan)),
        *(case.scale, case.cache.fmt),
    )
    out, _ = ops.prefill_attention(*given, sparse_k=False, sparse_v=False, means=means)
    assert_close("out", out, oracle(case)[0])
    with pytest.raises(NotImplementedError, match="block means"):
        ops.prefill_attention(*given, sparse_k=False, sparse_v=True, means=means)


def test_rows_of_any_stride() -> None:
    case = build_prefill_case(FORMATS[2], 2, 2, EDGES, (0.5, 0.5))
    heads, d = 2, 128
    fused = torch.cat([case.q, case.k, case.v], dim=1).cuda()
    q, k, v = fused.split([case.q.shape[1], heads, heads], dim=1)
    assert not q.is_contiguous() and q.shape[2] == d
    out, _ = ops.prefill_attention(
        *(q, k, v, case.cache.arena.cuda(), case.cache.refs.cuda(), on_device(case.plan)),
        *(case.scale, case.cache.fmt),
    )
    assert torch.equal(out, attend(case)[0])


@pytest.mark.parametrize("share", [(0.0, 1.0), (1.0, 1.0), (0.0, 0.0)], ids=str)
@pytest.mark.parametrize("cuts", [(1024,), (448, 1100), (64, 640, 1664)], ids=str)
def test_chunks_equal_one_shot(share: tuple[float, float], cuts: tuple[int, ...]) -> None:
    """A context in pieces: pages of unfinished segments come from tail slots."""
    length, segment, heads, group = 2048, 512, 2, 4
    fmt = BlockFormat(128, "bfloat16")
    whole = build_prefill_case(fmt, heads, group, [segment_chunk(0, length, segment)], share)
    want, want_lse = attend(whole)

    pages = length // PAGE
    spare = build_prefill_case(
        fmt, heads, group, [Chunk(length, length + 1, (0,))], share
    )  # an arena with a free dense slot for each page and side
    slots = spare.plan.tail_slots[0]
    assert slots.shape == (2, pages)
    parts = []
    for a, b in zip((0, *cuts), (*cuts, length), strict=True):
        chunk = segment_chunk(a, b, segment)
        arena = torch.cat([whole.cache.arena, spare.cache.arena])
        # The second arena begins at a whole number of superblocks of the first.
        shift = whole.cache.arena.numel() // (heads * fmt.dense_bytes)
        dense = dense_slots(arena, fmt, heads)
        first = min(chunk.frontiers)
        tail = torch.zeros((1, 2, pages), dtype=torch.int32)
        for side, x in ((Side.K, whole.k), (Side.V, whole.v)):
            for i, page in enumerate(range(first, -(-a // PAGE))):
                tail[0, side, i] = slot = int(slots[side, page]) + shift
                rows = x[page * PAGE : min((page + 1) * PAGE, a)]
                dense[slot, :, : len(rows)] = rows.transpose(0, 1)
                dense[slot, :, len(rows) :] = torch.nan
        plan = PrefillPlan(
            cu_seqlens=torch.tensor([0, b - a], dtype=torch.int32),
            prefix_lens=torch.tensor([a], dtype=torch.int32),
            page_table=whole.plan.page_table,
            tail_first=torch.tensor([first], dtype=torch.int32),
            tail_slots=tail,
            tile_offsets=torch.tensor([0, -(-b // TILE) - a // TILE], dtype=torch.int32),
            frontiers=torch.tensor(chunk.frontiers, dtype=torch.int32),
        )
        parts.append(
            ops.prefill_attention(
                *(x[a:b].cuda() for x in (whole.q, whole.k, whole.v)),
                *(arena.cuda(), whole.cache.refs.cuda(), on_device(plan), whole.scale, fmt),
            )
        )
    assert_close("out", torch.cat([o for o, _ in parts]), want)
    assert_close("lse", torch.cat([z for _, z in parts]), want_lse, LSE_TOLERANCE)


@cache
def long_case(share: tuple[float, float]) -> PrefillCase:
    whole = [segment_chunk(0, LONG, LONG_SEGMENT)]
    return build_prefill_case(FORMATS[2], 1, 2, whole, share)


def sampled_error(case: PrefillCase, out: torch.Tensor, rows: torch.Tensor) -> float:
    """Of one whole context: relative to the rows' own root mean square, against fp64."""
    cache, (chunk,) = case.cache, case.chunks
    pages = [
        load_pages(
            cache.arena.cuda(),
            cache.refs[side][case.plan.page_table[0].long()].cuda(),
            side,
            cache.fmt,
        )
        for side in Side
    ]
    own = [x.cuda().transpose(0, 1) for x in (case.k, case.v)]
    error = norm = 0.0
    for t in rows.tolist():
        split = min(chunk.frontiers[t // TILE] * PAGE, t + 1)
        k, v = (
            torch.cat([stored[:, :split], x[:, split : t + 1]], dim=1).double()
            for stored, x in zip(pages, own, strict=True)
        )
        q = case.q[t].cuda().double().view(k.shape[0], -1, k.shape[2])
        weights = (q @ k.transpose(1, 2) * case.scale).softmax(dim=-1)
        want = (weights @ v).view(-1, k.shape[2])
        error += float((out[t].double() - want).square().sum())
        norm += float(want.square().sum())
    return float((error / norm) ** 0.5)


@pytest.mark.parametrize("share", [(0.0, 1.0), (1.0, 1.0)], ids=str)
def test_128k_in_chunks_of_32k_equal_one_shot(share: tuple[float, float]) -> None:
    """Chunks end where segments do, so both visit the same blocks in the same order."""
    case = long_case(share)
    want, want_lse = attend(case)
    arena, refs = case.cache.arena.cuda(), case.cache.refs.cuda()
    for a in range(0, LONG, CHUNK):
        tiles = slice(a // TILE, (a + CHUNK) // TILE)
        plan = replace(
            case.plan,
            cu_seqlens=torch.tensor([0, CHUNK], dtype=torch.int32),
            prefix_lens=torch.tensor([a], dtype=torch.int32),
            tail_first=torch.tensor([a // PAGE], dtype=torch.int32),
            tile_offsets=torch.tensor([0, CHUNK // TILE], dtype=torch.int32),
            frontiers=case.plan.frontiers[tiles],
        )
        out, lse = ops.prefill_attention(
            *(x[a : a + CHUNK].cuda() for x in (case.q, case.k, case.v)),
            *(arena, refs, on_device(plan), case.scale, case.cache.fmt),
            sparse_k=share[Side.K] > 0,
            sparse_v=share[Side.V] > 0,
        )
        assert_close("out", out, want[a : a + CHUNK], 1e-6)
        assert_close("lse", lse, want_lse[a : a + CHUNK], 1e-6)


@pytest.mark.parametrize("share", [(0.0, 1.0), (1.0, 1.0)], ids=str)
def test_errors_are_within_half_more_of_those_of_dense_attention(
    share: tuple[float, float],
) -> None:
    """On the pruned data at 128K, and at every length on the way there."""
    case, sparse = long_case(share), (share[Side.K] > 0, share[Side.V] > 0)
    out, _ = attend(case, sparse)
    rows = torch.randint(LONG, (48,), generator=torch.Generator().manual_seed(5))
    assert sampled_error(case, out, torch.cat([rows, torch.tensor([LONG - 1])])) < 1.5 * FA3_ERROR
    for length in (1, 63, 65, 127, 1023, 1025, 4097, 33000, 100001, LONG - 1):
        chunk = segment_chunk(0, length, LONG_SEGMENT)
        part = replace(
            case,
            chunks=(chunk,),
            q=case.q[:length],
            k=case.k[:length],
            v=case.v[:length],
            plan=replace(
                case.plan,
                cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
                tile_offsets=torch.tensor([0, len(chunk.frontiers)], dtype=torch.int32),
                frontiers=torch.tensor(chunk.frontiers, dtype=torch.int32),
            ),
        )
        got, _ = attend(part, sparse)
        # A row reads nothing after itself, and the same blocks in the same order.
        whole_tiles = length // TILE * TILE
        assert torch.equal(got[:whole_tiles], out[:whole_tiles]), f"length {length}"
        last = torch.arange(max(0, length - 3), length)
        assert sampled_error(part, got, last) < 2 * FA3_ERROR, f"length {length}"


def test_no_tokens() -> None:
    case = build_prefill_case(FORMATS[2], 2, 2, [Chunk(0, 0, ()), Chunk(64, 64, ())])
    out, lse = ops.prefill_attention(
        *(x.cuda() for x in (case.q, case.k, case.v)),
        *(case.cache.arena.cuda(), case.cache.refs.cuda(), on_device(case.plan)),
        *(case.scale, case.cache.fmt),
    )
    assert out.shape == case.q.shape and lse.shape == case.q.shape[:2]


def test_a_head_dimension_without_a_kernel_is_refused() -> None:
    case = build_prefill_case(BlockFormat(256, "bfloat16"), 1, 1, [Chunk(0, 64, (0,))])
    with pytest.raises(ValueError, match="head_dim is 256"):
        ops.prefill_attention(
            *(x.cuda() for x in (case.q, case.k, case.v)),
            *(case.cache.arena.cuda(), case.cache.refs.cuda(), on_device(case.plan)),
            *(case.scale, case.cache.fmt),
        )
