"""Unpacked pages on the device: the kernel to the bit, and prefill over them as over the pages."""

import pytest
import torch

from hs_kernels import ops
from hs_kernels.block_format import BlockFormat
from hs_runtime.attention.plan import build_expanded_plans
from tests.support.cases import build_cache, build_prefill_case, segment_chunk
from tests.unit.test_expanded_plan import rows_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FORMATS = [BlockFormat(d, t) for d in (64, 128, 256) for t in ("float16", "bfloat16")]


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_blocks_of_both_kinds_are_unpacked_to_the_bit(fmt: BlockFormat, means: bool) -> None:
    heads = 3
    cache = build_cache(fmt, heads, 40, (0.5, 0.5))
    side = torch.randn(1 - int(cache.refs.min()), heads, fmt.head_dim).to(fmt.torch_dtype)
    side[0] = 0
    want = ops.expand_blocks(cache.arena, cache.refs, fmt, side if means else None)
    got = ops.expand_blocks(
        cache.arena.cuda(), cache.refs.cuda(), fmt, side.cuda() if means else None
    ).cpu()
    first = heads * fmt.dense_bytes  # slot 0 is not written
    assert torch.equal(got[first:], want[first:])


@pytest.mark.parametrize("fmt", [f for f in FORMATS if f.head_dim < 256], ids=str)
def test_prefill_over_unpacked_pages_is_prefill_over_the_pages(fmt: BlockFormat) -> None:
    chunks = [
        segment_chunk(0, 700, 256),
        segment_chunk(512, 1400, 256),
        segment_chunk(191, 449, 128),
        segment_chunk(0, 1, 128),
    ]
    case = build_prefill_case(fmt, 2, 4, chunks, (0.6, 0.6))
    cache, device = case.cache, torch.device("cuda")
    q, k, v, arena, refs = (x.cuda() for x in (case.q, case.k, case.v, cache.arena, cache.refs))
    want, want_lse = ops.prefill_attention(
        case.q, case.k, case.v, cache.arena, cache.refs, case.plan, case.scale, fmt
    )
    for at_once in (1, 10_000):
        for plan in build_expanded_plans(rows_of(case), cache.heads, at_once, device):
            own = plan.tokens
            out, lse = ops.prefill_attention(
                *(q[own], k[own], v[own]),
                *(ops.expand_blocks(arena, plan.sources(refs), fmt), plan.refs),
                *(plan.attention, case.scale, fmt),
                sparse_k=False,
                sparse_v=False,
            )
            torch.testing.assert_close(out.cpu(), want[own], rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(lse.cpu(), want_lse[own], rtol=1e-3, atol=1e-3)
