"""Prefill attention on the device against attention computed row by row, and the fp32 oracle."""

from dataclasses import replace

import pytest
import torch

from hs_kernels import ops, reference
from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import TILE, PrefillPlan, dense_slots
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


def attend(case: PrefillCase) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on the device, after the allocator's next blocks were poisoned."""
    poison = [torch.full_like(case.q, torch.nan, device="cuda") for _ in range(4)]
    poison += [torch.full(case.q.shape[:2], torch.nan, device="cuda") for _ in range(4)]
    del poison
    before = case.cache.arena.cuda()
    arena = before.clone()
    refs = case.cache.refs
    reached = torch.cat(
        [case.plan.page_table[r, : max(c.frontiers)] for r, c in enumerate(case.chunks)]
    ).long()
    sparse = [bool((refs[side][reached] < 0).any()) for side in Side]
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
