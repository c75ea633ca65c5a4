"""Pages unpacked into a scratch arena, and a plan that speaks of it: attention is what it was."""

from __future__ import annotations

import pytest
import torch

from hs_kernels import ops
from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import dense_slots, load_pages
from hs_runtime.attention import unpacked
from hs_runtime.attention.plan import ExtendRow, build_expanded_plans, is_crowded
from tests.support.cases import (
    PAGE,
    PrefillCase,
    anchored_chunk,
    build_prefill_case,
    segment_chunk,
)

CPU = torch.device("cpu")
FORMATS = [BlockFormat(64, "float32"), BlockFormat(128, "bfloat16")]
CHUNKS = {
    "first": [segment_chunk(0, 700, 256)],
    "in a segment": [segment_chunk(300, 560, 256)],
    "replay": [segment_chunk(200, 201, 128), segment_chunk(65, 200, 128)],
    "ragged": [
        segment_chunk(0, 100, 128),
        segment_chunk(512, 900, 256),
        segment_chunk(0, 1, 128),
        segment_chunk(191, 449, 128),
    ],
    "anchored": [anchored_chunk(256, 512, 64), anchored_chunk(0, 256, 64)],
}


def rows_of(case: PrefillCase) -> list[ExtendRow]:
    plan, rows = case.plan, []
    for r, chunk in enumerate(case.chunks):
        first, reach = int(plan.tail_first[r]), max(chunk.frontiers)
        count = max(0, -(-chunk.a // PAGE) - first)
        tail = [tuple(plan.tail_slots[r, side, :count].tolist()) for side in Side]
        pages = tuple(plan.page_table[r, :reach].tolist())
        rows.append(
            ExtendRow(chunk.a, chunk.b, pages, chunk.frontiers, first, (tail[0], tail[1]), ())
        )
    return rows


def attend(
    case: PrefillCase, at_once: int, means: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Through scratch arenas: out, lse, and how many it took."""
    cache, fmt = case.cache, case.cache.fmt
    plans = build_expanded_plans(rows_of(case), cache.heads, at_once, CPU)
    outs, lses = [], []
    for plan in plans:
        scratch = ops.expand_blocks(cache.arena, plan.sources(cache.refs), fmt, means)
        assert bool((plan.refs > 0).all())  # a dense kernel reads it
        own = plan.tokens
        out, lse = ops.prefill_attention(
            *(case.q[own], case.k[own], case.v[own]),
            *(scratch, plan.refs, plan.attention, case.scale, fmt),
            sparse_k=False,
            sparse_v=False,
        )
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses), len(plans)


@pytest.mark.parametrize("at_once", [1, 12, 10_000])
@pytest.mark.parametrize("name", CHUNKS)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_attention_over_unpacked_pages_is_attention_over_the_pages(
    fmt: BlockFormat, name: str, at_once: int
) -> None:
    case = build_prefill_case(fmt, 2, 3, CHUNKS[name], (0.5, 0.75))
    cache = case.cache
    assert (cache.refs < 0).any() and (cache.refs > 0).any()
    want, want_lse = ops.prefill_attention(
        case.q, case.k, case.v, cache.arena, cache.refs, case.plan, case.scale, fmt
    )
    out, lse, count = attend(case, at_once)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert count == (len(case.chunks) if at_once == 1 else 1) or at_once == 12


@pytest.mark.parametrize("at_once", [1, 10_000])
@pytest.mark.parametrize("name", CHUNKS)
def test_torch_s_attention_over_unpacked_pages_is_the_same(name: str, at_once: int) -> None:
    fmt = FORMATS[0]
    case = build_prefill_case(fmt, 2, 3, CHUNKS[name], (0.5, 0.75))
    cache = case.cache
    want, _ = ops.prefill_attention(
        case.q, case.k, case.v, cache.arena, cache.refs, case.plan, case.scale, fmt
    )
    for plan in build_expanded_plans(rows_of(case), cache.heads, at_once, CPU):
        scratch = ops.expand_blocks(cache.arena, plan.sources(cache.refs), fmt)
        own = plan.tokens
        q, k, v = case.q[own], case.k[own], case.v[own]
        out = unpacked.attend(q, k, v, scratch, plan, case.scale, fmt)
        torch.testing.assert_close(out, want[own], rtol=1e-5, atol=1e-5)


def test_means_are_added_when_values_are_unpacked() -> None:
    fmt = FORMATS[0]
    case = build_prefill_case(fmt, 2, 2, CHUNKS["ragged"], (0.5, 0.5))
    cache = case.cache
    means = torch.randn(1 - int(cache.refs.min()), 2, fmt.head_dim)
    means[0] = 0
    want, _ = ops.prefill_attention(
        case.q, case.k, case.v, cache.arena, cache.refs, case.plan, case.scale, fmt, means=means
    )
    out, _, _ = attend(case, 10_000, means)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    plain, _, _ = attend(case, 10_000)
    assert (plain - want).abs().max() > 0.1


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_blocks_land_side_by_side(fmt: BlockFormat) -> None:
    cache = build_prefill_case(fmt, 2, 1, CHUNKS["first"], (0.5, 0.5)).cache
    refs = cache.refs[:, 1:6].contiguous()
    slots = dense_slots(ops.expand_blocks(cache.arena, refs, fmt), fmt, 2)
    assert slots.shape[0] == 11
    for side in Side:
        pages = load_pages(cache.arena, refs[side], side, fmt).view(2, 5, PAGE, fmt.head_dim)
        assert torch.equal(slots[1 + 5 * side : 6 + 5 * side], pages.transpose(0, 1))


@pytest.mark.parametrize(
    ("prefixes", "crowded"),
    [([], False), ([100_000], False), ([512, 512], False), ([512, 513], True), ([0, 1025], True)],
)
def test_several_long_prefixes_are_not_copied_at_once(prefixes: list[int], crowded: bool) -> None:
    assert is_crowded(prefixes, 64, 16) == crowded
