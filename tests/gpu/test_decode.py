"""Decode attention on the device against attention computed key by key."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hs_kernels import ops
from hs_kernels.block_format import HEAD_DIMS, BlockFormat, Side
from hs_kernels.reference import dense_slots
from tests.support.cases import (
    ALL_SHARES,
    EDGE_LENGTHS,
    DecodeCase,
    build_decode_case,
    naive_decode,
    with_means,
)
from tests.support.compare import assert_close

pytestmark = pytest.mark.gpu

FORMATS = [BlockFormat(d, t) for d in HEAD_DIMS for t in ("bfloat16", "float16")]
GROUPS = [1, 2, 3, 4, 8, 12, 24]
LSE_TOLERANCE = 2e-3  # scores are fp32 sums of exact products; lse sums over them


def attend(case: DecodeCase) -> tuple[torch.Tensor, torch.Tensor]:
    """The op on the device. The allocator's next blocks are poisoned first, so that an element
    that no kernel wrote is NaN."""
    poison = [torch.full_like(case.q, torch.nan, device="cuda") for _ in range(4)]
    poison += [torch.full(case.q.shape[:2], torch.nan, device="cuda") for _ in range(4)]
    del poison
    before = case.cache.arena.cuda()
    arena = before.clone()
    inputs = (case.cache.refs, case.page_table, case.seq_lens)
    means = case.cache.means
    out, lse = ops.decode_attention(
        *(case.q.cuda(), arena, *(x.cuda() for x in inputs), case.scale, case.cache.fmt),
        means=None if means is None else means.cuda(),
    )
    assert torch.equal(arena, before), "decode wrote into the arena"
    return out, lse


def check(case: DecodeCase) -> None:
    out, lse = attend(case)
    want, want_lse = naive_decode(case)
    assert_close("out", out, want)
    assert_close("lse", lse, want_lse, LSE_TOLERANCE)


@pytest.mark.parametrize("share", [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)], ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_one_block(fmt: BlockFormat, share: tuple[float, float]) -> None:
    check(build_decode_case(fmt, heads=1, group=1, lengths=[64], share=share))


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_group_size_at_every_edge(fmt: BlockFormat, group: int) -> None:
    check(build_decode_case(fmt, heads=2, group=group, lengths=EDGE_LENGTHS, seed=group))


@pytest.mark.parametrize("share", ALL_SHARES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_every_mix_of_dense_and_sparse(fmt: BlockFormat, share: tuple[float, float]) -> None:
    check(build_decode_case(fmt, heads=3, group=4, lengths=[700, 64, 1, 1025], share=share))


@pytest.mark.parametrize("share", [(0.0, 1.0), (1.0, 1.0), (0.5, 0.5)], ids=str)
@pytest.mark.parametrize("group", [4, 12, 24])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_block_means_are_added_back(
    fmt: BlockFormat, group: int, share: tuple[float, float]
) -> None:
    case = build_decode_case(fmt, heads=2, group=group, lengths=[700, 64, 0, 1025, 20], share=share)
    check(replace(case, cache=with_means(case.cache)))


@pytest.mark.parametrize("lengths", [[20000], [9000, 3, 0, 0, 4097], [1] * 300, [65] * 70, [0, 0]])
def test_shares_end_anywhere(lengths: Sequence[int]) -> None:
    check(build_decode_case(BlockFormat(128), heads=2, group=4, lengths=lengths))


def test_an_empty_batch() -> None:
    case = build_decode_case(BlockFormat(128), heads=2, group=4, lengths=[64])
    out, lse = ops.decode_attention(
        case.q[:0].cuda(),
        case.cache.arena.cuda(),
        case.cache.refs.cuda(),
        case.page_table[:0].cuda(),
        case.seq_lens[:0].cuda(),
        case.scale,
        case.cache.fmt,
    )
    assert out.shape == (0, 8, 128) and lse.shape == (0, 8)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_scores_that_keep_rising(fmt: BlockFormat) -> None:
    """Large scores move the running maximum and leave one key that counts."""
    case = build_decode_case(fmt, heads=2, group=4, lengths=[2000, 300])
    case.q.mul_(20)
    check(case)


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_what_lies_behind_the_end_is_not_read(fmt: BlockFormat, side: Side) -> None:
    """A begun page may hold NaN after its last token."""
    length = 3 * 64 + 17
    case = build_decode_case(fmt, heads=2, group=4, lengths=[length], share=(0.0, 0.0))
    page = int(case.page_table[0, 3])
    for head in range(2):
        slot = int(case.cache.refs[side, page, head])
        dense_slots(case.cache.arena, fmt, 2)[slot, head, 17:] = torch.nan
    check(case)


def test_padded_rows_read_the_dummy_page() -> None:
    """Rows that pad a captured batch have one token of page 0, or none."""
    case = build_decode_case(BlockFormat(128), heads=2, group=4, lengths=[500, 64, 64])
    case.page_table[1:] = 0
    case.seq_lens[1], case.seq_lens[2] = 1, 0
    out, lse = attend(case)
    want, want_lse = naive_decode(case)
    assert_close("out", out, want)
    assert_close("lse", lse, want_lse, LSE_TOLERANCE)
    assert torch.equal(out[1:].cpu(), torch.zeros_like(case.q[1:]))


def test_a_result_does_not_depend_on_the_order_of_arrival() -> None:
    for lengths in ([20000, 77, 5000], [3000] * 9, [64, 128, 700] * 30, [200] * 140):
        case = build_decode_case(BlockFormat(128), heads=2, group=4, lengths=lengths)
        first = attend(case)
        for _ in range(20):
            again = attend(case)
            assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


def test_a_captured_step_serves_other_lengths() -> None:
    fmt, device = BlockFormat(128), torch.device("cuda")
    lengths = [[4000, 65, 1, 640], [1, 0, 6000, 64], [0, 0, 0, 0], [129, 4000, 63, 6000]]
    case = build_decode_case(fmt, 2, 4, [6000] * 4)
    arena, refs = case.cache.arena.cuda(), case.cache.refs.cuda()
    q, table, lens = case.q.cuda(), case.page_table.cuda(), case.seq_lens.cuda()
    workspace = ops.decode_workspace(4, 8, 2, fmt, device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        ops.plan_decode(workspace, refs, table, lens)
        return ops.decode_attention(
            q, arena, refs, table, lens, case.scale, fmt, workspace=workspace
        )

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for chosen in lengths:
        case.seq_lens.copy_(torch.tensor(chosen, dtype=torch.int32))
        case.q.copy_(torch.randn(case.q.shape))
        lens.copy_(case.seq_lens)
        q.copy_(case.q)
        out.fill_(torch.nan)
        graph.replay()
        want, want_lse = naive_decode(case)
        assert_close(f"out at {chosen}", out, want)
        assert_close(f"lse at {chosen}", lse, want_lse, LSE_TOLERANCE)
        for buffer in (workspace.partials, workspace.states):
            assert bool((buffer.view(torch.int32) == -1).all()), "a partial was left behind"


@pytest.mark.parametrize("pages", [[1] * 40, [1, 60, 2, 1, 11, 30], [100]], ids=len)
@pytest.mark.parametrize("permuted", [False, True])
def test_attention_sees_the_tokens_stored_in_front_of_it(pages: list[int], permuted: bool) -> None:
    """Layers of a captured step, where a store and the attention behind it overlap, against the
    same kernels one by one. No page is shared."""
    fmt, heads, group, layers, device = BlockFormat(128), 2, 4, 6, torch.device("cuda")
    rows = len(pages)
    whole = build_decode_case(fmt, heads, group, [64 * sum(pages)], share=(0.3, 0.3))
    table = torch.zeros((rows, max(pages)), dtype=torch.int32)
    left = whole.page_table[0].tolist()
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor(left[:count], dtype=torch.int32)
        del left[:count]
    lens = torch.tensor([64 * n - 9 * i % 64 for i, n in enumerate(pages)], dtype=torch.int32)
    last = table.gather(1, (lens[:, None].long() - 1) // 64).long()[:, 0]
    locations = (last * 64 + (lens.long() - 1) % 64).to(device)
    table, lens = table.to(device), lens.to(device)
    refs = whole.cache.refs.contiguous().to(device)
    order = torch.rand((heads, 128), device=device).argsort(-1).int() if permuted else None
    k, v = torch.zeros((2, layers, rows, heads, 128), dtype=fmt.torch_dtype, device=device)
    q = torch.zeros((layers, rows, heads * group, 128), dtype=fmt.torch_dtype, device=device)
    workspace = ops.decode_workspace(rows, heads * group, heads, fmt, device)
    ops.plan_decode(workspace, refs, table, lens)

    def step(arenas: list[torch.Tensor], alone: bool) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for layer, arena in enumerate(arenas):
            queries = ops.store_tokens(
                *(k[layer], v[layer], q[layer], arena, refs, locations, fmt, order)
            )
            if alone:
                torch.cuda.synchronize()
            results += ops.decode_attention(
                *(queries, arena, refs, table, lens, whole.scale, fmt), workspace=workspace
            )
            if alone:
                torch.cuda.synchronize()
        return results

    overlapped, one_by_one = (
        [whole.cache.arena.to(device).clone() for _ in range(layers)] for _ in range(2)
    )
    step(one_by_one, alone=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step(overlapped, alone=False)
    for _ in range(30):
        for x in (q, k, v):
            x.normal_().mul_(2)
        want = step(one_by_one, alone=True)
        graph.replay()
        for i, (mine, theirs) in enumerate(zip(got, want, strict=True)):
            assert torch.equal(mine, theirs), f"result {i}"
