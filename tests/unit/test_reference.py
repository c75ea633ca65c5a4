from dataclasses import replace

import pytest
import torch

from hs_kernels import ops
from hs_kernels.block_format import DUMMY_REF, BlockFormat, Side
from hs_kernels.reference import (
    block_losses,
    compensate,
    dense_slots,
    keep_2_4,
    keep_n_m,
    load_pages,
    merge_states,
    pack_blocks,
    select_blocks,
    sparse_slots,
    unpack_blocks,
    write_dummy,
)
from tests.support.cases import (
    ALL_FORMATS,
    ALL_SHARES,
    EDGE_LENGTHS,
    Chunk,
    anchored_chunk,
    build_cache,
    build_decode_case,
    build_prefill_case,
    naive_decode,
    naive_prefill,
    segment_chunk,
    with_means,
)
from tests.support.compare import assert_close

F32 = BlockFormat(64, "float32")


def block_of(group: list[float], side: Side) -> torch.Tensor:
    """One block [1, 64, 64] whose every group of four is `group`."""
    x = torch.tensor(group).repeat(16).expand(1, 64, 64)
    return (x if side == Side.K else x.transpose(1, 2)).contiguous()


# --- pruning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize(
    ("group", "kept"),
    [
        ([1.0, 2.0, 3.0, 4.0], [2, 3]),
        ([-4.0, 1.0, 3.0, -2.0], [0, 2]),
        ([1.0, 1.0, 1.0, 1.0], [0, 1]),
        ([0.0, -0.0, 0.0, 0.0], [0, 1]),
        ([1.0, -2.0, 2.0, 2.0], [1, 2]),
        ([2.0, 1.0, -1.0, 1.0], [0, 1]),
        ([1.0, torch.inf, 2.0, torch.nan], [1, 3]),
    ],
)
def test_the_two_largest_are_kept_and_the_lower_index_wins_a_tie(group, kept, side):
    want = block_of([float(p in kept) for p in range(4)], side).bool()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(keep_2_4(block_of(group, side).to(dtype), side), want)


def test_k_groups_run_along_channels_and_v_groups_along_tokens():
    x = torch.zeros(64, 64)
    x[0, :4] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert keep_2_4(x, Side.K)[0, :4].tolist() == [False, False, True, True]
    assert keep_2_4(x, Side.V)[:4, 3].tolist() == [True, True, False, False]


def test_other_patterns_than_2_4_give_masks():
    x = block_of([4.0, -1.0, 3.0, 2.0], Side.K)
    assert keep_n_m(x, Side.K, 1, 4)[0, 0, :4].tolist() == [True, False, False, False]
    assert keep_n_m(x, Side.K, 3, 4)[0, 0, :4].tolist() == [True, False, True, True]
    assert keep_n_m(x, Side.K, 4, 8).sum() == 64 * 32
    with pytest.raises(ValueError, match="5:4"):
        keep_n_m(x, Side.K, 5, 4)
    with pytest.raises(ValueError, match="groups of 3"):
        keep_n_m(x, Side.K, 1, 3)


@pytest.mark.parametrize("side", Side)
def test_the_loss_is_the_magnitude_that_the_mask_drops(side):
    x = torch.cat([block_of([1.0, -5.0, 0.5, 4.0], side), block_of([0.0, 1.0, 0.0, 1.0], side)])
    assert block_losses(x, side).tolist() == [1.5 * 1024, 0.0]
    assert block_losses(x[:0], side).shape == (0,)


def test_blocks_of_lowest_loss_are_selected_and_the_lower_index_wins_a_tie():
    losses = torch.tensor([[3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert select_blocks(losses, 2).tolist() == [
        [False, True, False, True],
        [True, True, False, False],
    ]
    assert not select_blocks(losses, 0).any()
    assert select_blocks(losses, 4).all()
    with pytest.raises(ValueError, match="count is 5 of 4"):
        select_blocks(losses, 5)


# --- compensation -------------------------------------------------------------------------------


def typical_queries(heads: int, channels: int = 64, seed: int = 0) -> torch.Tensor:
    """H = E[q q'] f32 [heads, channels, channels] of correlated queries, with a ridge."""
    rng = torch.Generator().manual_seed(seed)
    mix = torch.randn((heads, channels, channels), generator=rng)
    mix *= torch.rand((heads, 1, channels), generator=rng)
    second = mix @ mix.mT / channels
    ridge = 0.02 * second.diagonal(dim1=1, dim2=2).mean(-1)
    return second + ridge[:, None, None] * torch.eye(channels)


def factor_of(second: torch.Tensor) -> torch.Tensor:
    inverse = torch.linalg.inv(second.double())
    return torch.linalg.cholesky(inverse, upper=True).float()


def score_error(x: torch.Tensor, stored: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[N, H, 64]: expected squared error of q x' for q of that second moment."""
    lost = (x - stored).double()
    return torch.einsum("nhtc,hcd,nhtd->nht", lost, second.double(), lost)


def test_compensation_lowers_the_error_of_scores():
    second = typical_queries(2)
    weights = second.diagonal(dim1=1, dim2=2).sqrt()
    x = torch.randn(3, 2, 64, 64)
    keep, values = compensate(x, weights, factor_of(second))
    assert torch.equal(keep.unflatten(-1, (16, 4)).sum(-1), torch.full((3, 2, 64, 16), 2))
    plain = keep_2_4(x.abs() * weights[:, None], Side.K)
    without = score_error(x, torch.where(plain, x, 0), second)
    with_it = score_error(x, torch.where(keep, values, 0), second)
    assert with_it.mean() < 0.7 * without.mean()


def test_compensated_values_are_the_best_for_the_last_group():
    """Nothing follows the last group: its kept pair takes on what is best given all before it."""
    second = typical_queries(1)
    x = torch.randn(1, 1, 64, 64)
    keep, values = compensate(x, torch.ones(1, 64), factor_of(second))
    stored = torch.where(keep, values, 0)
    base = score_error(x, stored, second)
    for step in (-0.01, 0.01):
        for channel in range(60, 64):
            moved = torch.where(keep, values + step * (torch.arange(64) == channel), 0)
            worse = score_error(x, moved, second) - base
            assert (worse[keep[..., channel]] > 0).all()


def test_without_correlation_nothing_is_moved():
    x, weights = torch.randn(2, 2, 64, 128), torch.rand(2, 128)
    keep, values = compensate(x, weights, torch.eye(128).repeat(2, 1, 1))
    assert torch.equal(keep, keep_2_4(x.abs() * weights[:, None], Side.K))
    assert torch.equal(values[keep], x[keep])


def test_a_block_is_compensated_alike_in_any_company():
    second = typical_queries(3)
    weights, factor = second.diagonal(dim1=1, dim2=2).sqrt(), factor_of(second)
    x = torch.randn(7, 3, 64, 64)
    keep, values = compensate(x, weights, factor)
    for part in ((0, 1), (1, 3), (3, 7)):
        some_keep, some_values = compensate(x[slice(*part)], weights, factor)
        assert torch.equal(some_keep, keep[slice(*part)])
        assert torch.equal(some_values, values[slice(*part)])
    alone = compensate(x[:, 1:2], weights[1:2], factor[1:2])
    assert torch.equal(alone[1], values[:, 1:2])
    scaled = compensate(x, weights, 4 * factor)
    assert torch.equal(scaled[1], values)


def test_compensating_no_block_gives_none():
    keep, values = compensate(torch.zeros(0, 2, 64, 64), torch.ones(2, 64), torch.eye(64)[None])
    assert keep.shape == values.shape == (0, 2, 64, 64)


# --- packing and the arena ----------------------------------------------------------------------


def test_a_mask_of_three_in_a_group_is_refused():
    x = torch.ones(1, 64, 64)
    keep = block_of([1.0, 1.0, 1.0, 0.0], Side.K).bool()
    with pytest.raises(ValueError, match="more than two"):
        pack_blocks(x, Side.K, F32, keep)


def test_wrong_shapes_are_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"\[1, 64, 32\], not \[N, 64, 64\]"):
        pack_blocks(torch.ones(1, 64, 32), Side.K, F32)
    with pytest.raises(ValueError, match="8704"):
        unpack_blocks(torch.zeros(1, 100, dtype=torch.uint8), Side.K, F32)


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_pages_are_loaded_in_the_order_of_their_refs(fmt, side, share):
    cache = build_cache(fmt, heads=3, num_pages=6, share=(share, share))
    pages = torch.tensor([4, 0, 2, 2, 5])
    got = load_pages(cache.arena, cache.refs[side][pages], side, fmt)
    want = cache.contents[side][pages].transpose(0, 1).reshape(3, 5 * 64, fmt.head_dim)
    assert got.dtype == fmt.torch_dtype
    assert torch.equal(got, want)


def test_loading_no_page_gives_no_token():
    cache = build_cache(F32, heads=2, num_pages=2)
    got = load_pages(cache.arena, cache.refs[Side.K][:0], Side.K, F32)
    assert got.shape == (2, 0, 64)


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_the_dummy_reads_as_zeros(fmt):
    arena = torch.full((fmt.superblock_bytes * 2,), 0xFF, dtype=torch.uint8)
    write_dummy(arena, fmt, heads=2)
    refs = torch.full((1, 2), DUMMY_REF, dtype=torch.int32)
    for side in Side:
        assert not load_pages(arena, refs, side, fmt).any()
    slots = sparse_slots(arena, fmt, 2)
    assert (slots[0, :, : fmt.metadata_bytes] == 0x44).all(), "undefined metadata"
    assert (slots[1] == 0xFF).all(), "wrote past slot 0"


def test_dense_and_sparse_slots_are_two_strides_over_one_base():
    fmt, heads = BlockFormat(64, "bfloat16"), 3
    arena = torch.zeros(2 * heads * fmt.superblock_bytes, dtype=torch.uint8)
    dense, sparse = dense_slots(arena, fmt, heads), sparse_slots(arena, fmt, heads)
    assert dense.shape == (18, 3, 64, 64)
    assert sparse.shape == (32, 3, fmt.sparse_bytes)
    dense[9, 0, 0, 0] = 1.0  # the first dense slot of superblock 1 is where
    assert sparse[16, 0, :2].view(torch.bfloat16).item() == 1.0  # its first sparse slot is
    sparse[5, 2, -1] = 7
    assert arena[(5 * heads + 3) * fmt.sparse_bytes - 1] == 7


@pytest.mark.parametrize("side", Side)
def test_compressed_blocks_land_in_their_slots_and_nowhere_else(side):
    fmt, heads = BlockFormat(64, "float16"), 2
    arena = torch.full((heads * fmt.superblock_bytes * 2,), 0xFF, dtype=torch.uint8)
    blocks = torch.randn(3, heads, 64, 64).half()
    slots = torch.tensor([[17, 20], [18, 18], [31, 16]], dtype=torch.int32)
    ops.compress_blocks(blocks, side, arena, slots, fmt)
    got = sparse_slots(arena, fmt, heads)
    untouched = torch.ones(got.shape[:2], dtype=torch.bool)
    for n in range(3):
        for h in range(heads):
            slot = slots[n, h]
            assert torch.equal(got[slot, h], pack_blocks(blocks[n, h][None], side, fmt)[0])
            untouched[slot, h] = False
    assert (got[untouched] == 0xFF).all()


@pytest.mark.parametrize("side", Side)
def test_a_mask_and_other_values_replace_the_choice_by_magnitude(side):
    arena = torch.full((2 * F32.superblock_bytes,), 0xFF, dtype=torch.uint8)
    blocks, values = torch.randn(1, 2, 64, 64), torch.randn(1, 2, 64, 64)
    keep = keep_2_4(torch.randn(1, 2, 64, 64), side)
    slots = torch.tensor([[3, 4]], dtype=torch.int32)
    ops.compress_blocks(blocks, side, arena, slots, F32, keep, values)
    got = load_pages(arena, -slots, side, F32)
    assert torch.equal(got, torch.where(keep, values, 0.0)[0])


def test_compressing_no_block_changes_nothing():
    arena = torch.full((2 * F32.superblock_bytes,), 0xFF, dtype=torch.uint8)
    none = torch.zeros(0, 2, dtype=torch.int32)
    ops.compress_blocks(torch.zeros(0, 2, 64, 64), Side.V, arena, none, F32)
    assert (arena == 0xFF).all()


# --- decode -------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", ALL_SHARES, ids=str)
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_decode_reads_every_kind_of_page(fmt, share):
    case = build_decode_case(fmt, 2, 3, [130, 0, 64, 257], share)
    out, lse = run_decode(case)
    want_out, want_lse = naive_decode(case)
    assert out.dtype == fmt.torch_dtype
    assert_close("out", out, want_out)
    assert_close("lse", lse, want_lse)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("share", [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_decode_adds_the_means_of_sparse_v_blocks(fmt, share, splits):
    case = build_decode_case(fmt, 2, 3, [130, 0, 64, 257], share)
    case = replace(case, cache=with_means(case.cache))
    out, lse = run_decode(case, splits)
    want_out, want_lse = naive_decode(case)
    assert_close("out", out, want_out)
    assert_close("lse", lse, want_lse)


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 40])
def test_decode_of_edge_lengths_in_one_batch(splits):
    case = build_decode_case(F32, 3, 3, EDGE_LENGTHS)
    out, lse = run_decode(case, splits)
    want_out, want_lse = naive_decode(case)
    assert_close("out", out, want_out)
    assert_close("lse", lse, want_lse)
    assert not out[0].any()
    assert (lse[0] == -torch.inf).all()


@pytest.mark.parametrize("length", [1, 63, 65, 100])
def test_decode_does_not_read_past_the_end_of_a_begun_page(length):
    case = build_decode_case(F32, 2, 2, [length], (0.0, 0.0))
    last = case.page_table[0, (length - 1) // 64]
    for slot in case.cache.refs[:, last].flatten().tolist():
        dense_slots(case.cache.arena, F32, 2)[slot, :, length % 64 :] = torch.nan
    out, lse = run_decode(case)
    want_out, want_lse = naive_decode(case)
    assert_close("out", out, want_out)
    assert_close("lse", lse, want_lse)


def test_decode_of_an_empty_batch():
    case = build_decode_case(F32, 2, 2, [])
    out, lse = run_decode(case)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def run_decode(case, splits=1):
    cache = case.cache
    return ops.decode_attention(
        case.q,
        cache.arena,
        cache.refs,
        case.page_table,
        case.seq_lens,
        case.scale,
        cache.fmt,
        splits,
        means=cache.means,
    )


# --- prefill ------------------------------------------------------------------------------------

PREFILLS = {
    "from nothing": [segment_chunk(0, 200, 128)],
    "one token": [segment_chunk(0, 1, 128)],
    "one token after a prefix": [segment_chunk(257, 258, 256)],
    "aligned chunk on an aligned prefix": [segment_chunk(256, 512, 256)],
    "chunk that ends one segment and begins another": [segment_chunk(192, 600, 256)],
    "chunk that begins inside a page": [segment_chunk(100, 230, 128)],
    "dense namespace: nothing through refs": [Chunk(192, 330, (0, 0))],
    "replay under the decode rule": [Chunk(510, 576, (3, 3, 4)[:2])],
    "pages under the diagonal": [anchored_chunk(0, 384, 64)],
    "pages under the diagonal of a later chunk": [anchored_chunk(128, 448, 0)],
    "ragged": [
        segment_chunk(0, 130, 128),
        segment_chunk(64, 64, 128),
        anchored_chunk(0, 320, 64),
        segment_chunk(300, 301, 256),
        Chunk(70, 140, (1, 0)),
    ],
}


@pytest.mark.parametrize("name", PREFILLS)
def test_prefill_of(name):
    case = build_prefill_case(F32, 2, 3, PREFILLS[name])
    check_prefill(case)


@pytest.mark.parametrize("share", ALL_SHARES, ids=str)
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_prefill_reads_every_kind_of_page(fmt, share):
    check_prefill(build_prefill_case(fmt, 2, 2, [segment_chunk(130, 290, 128)], share))


@pytest.mark.parametrize("share", [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0)])
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_prefill_adds_the_means_of_sparse_v_blocks(fmt, share):
    chunks = [segment_chunk(130, 290, 128), anchored_chunk(0, 320, 64)]
    case = build_prefill_case(fmt, 2, 2, chunks, share)
    check_prefill(replace(case, cache=with_means(case.cache)))


def test_prefill_ignores_tail_slots_before_the_frontier():
    check_prefill(build_prefill_case(F32, 2, 2, [segment_chunk(600, 640, 256)], early_tail=2))


def test_prefill_of_an_empty_batch():
    case = build_prefill_case(F32, 2, 2, [])
    out, lse = run_prefill(case)
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_a_plan_with_a_frontier_missing_is_refused():
    case = build_prefill_case(F32, 1, 1, [Chunk(0, 200, (0,))])
    with pytest.raises(ValueError, match=r"1 frontiers for rows \[0, 200\)"):
        run_prefill(case)


def test_a_plan_without_all_pages_before_a_frontier_is_refused():
    case = build_prefill_case(F32, 1, 1, [segment_chunk(256, 258, 256)])
    short = replace(case.plan, page_table=case.plan.page_table[:, :3])
    with pytest.raises(ValueError, match="the plan covers 194 of 258 positions"):
        run_prefill(replace(case, plan=short))


@pytest.mark.parametrize("side", Side)
def test_a_promise_that_a_side_is_dense_is_checked(side):
    """The kernels trap on it, which no CPU test would notice."""
    case = build_prefill_case(F32, 1, 1, [Chunk(0, 64, (0,)), segment_chunk(256, 258, 256)])
    refs = case.cache.refs
    pages = case.plan.page_table[1, :4].long()
    refs[:, pages] = 1
    promise = {"sparse_k": side != Side.K, "sparse_v": side != Side.V}
    run_prefill(case, **promise)
    refs[1 - side, pages[1]] = -1
    run_prefill(case, **promise)
    refs[side, pages[1]] = -1
    with pytest.raises(ValueError, match=f"request 1 reads sparse blocks of {side.name}"):
        run_prefill(case, **promise)
    run_prefill(case)


def run_prefill(case, **promise):
    cache = case.cache
    return ops.prefill_attention(
        *(case.q, case.k, case.v, cache.arena, cache.refs, case.plan, case.scale, cache.fmt),
        means=cache.means,
        **promise,
    )


def check_prefill(case):
    out, lse = run_prefill(case)
    want_out, want_lse = naive_prefill(case)
    assert out.dtype == case.q.dtype
    assert_close("out", out, want_out)
    assert_close("lse", lse, want_lse)


# --- partials and the door ----------------------------------------------------------------------


def test_partials_of_nothing_count_nothing_even_when_they_hold_nan():
    outs = torch.tensor([[[1.0, 2.0]], [[torch.nan, torch.inf]]])
    lses = torch.tensor([[0.3], [-torch.inf]])
    out, lse = merge_states(outs, lses)
    assert_close("out", out, outs[0])
    assert_close("lse", lse, lses[0])


def test_partials_that_are_all_empty_merge_to_the_empty_state():
    out, lse = merge_states(torch.full((3, 2, 4), torch.nan), torch.full((3, 2), -torch.inf))
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_the_door_names_what_is_wrong():
    case = build_decode_case(F32, 2, 2, [64])
    cache = case.cache
    good = {
        "q": case.q,
        "arena": cache.arena,
        "refs": cache.refs,
        "page_table": case.page_table,
        "seq_lens": case.seq_lens,
        "scale": 1.0,
        "fmt": F32,
    }
    wrong = {
        "3 query heads do not share 2 kv heads": {"q": case.q[:, :3]},
        r"q is \[1, 4, 32\]": {"q": case.q[:, :, :32]},
        "refs are torch.int64": {"refs": cache.refs.long()},
        r"page_table is \[2, ": {"page_table": case.page_table.repeat(2, 1)},
        r"seq_lens is \[2\]": {"seq_lens": case.seq_lens.repeat(2)},
        "num_splits is 0": {"num_splits": 0},
        "the arena is torch.int8": {"arena": cache.arena.view(torch.int8)},
        "refs is on meta, not on cpu": {"refs": cache.refs.to("meta")},
        r"means are torch.float32 \[9, 1, 64\]": {"means": torch.zeros(9, 1, 64)},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            ops.decode_attention(**(good | change))


def test_a_device_without_kernels_is_an_error():
    with pytest.raises(RuntimeError, match="merge_states has no kernel for meta tensors"):
        ops.merge_states(torch.zeros(2, 3, 4, device="meta"), torch.zeros(2, 3, device="meta"))
