"""The operations beside attention, on the CPU: what the device tests take as their oracle."""

import pytest
import torch

from hs_kernels import ops, reference
from hs_kernels.block_format import BlockFormat, Side

FMT = BlockFormat(64, "bfloat16")
HEADS = 2


def empty_arena() -> torch.Tensor:
    return torch.full((4 * HEADS * FMT.superblock_bytes,), 0xFF, dtype=torch.uint8)


def read(arena: torch.Tensor, refs: torch.Tensor, side: Side) -> torch.Tensor:
    """[n, heads, 64, D] behind refs [n, heads]."""
    pages = reference.load_pages(arena, refs, side, FMT)
    return pages.view(HEADS, -1, 64, FMT.head_dim).transpose(0, 1)


@pytest.mark.parametrize("side", list(Side))
def test_blocks_are_stored_as_their_refs_say(side: Side) -> None:
    blocks = torch.randn(3, HEADS, 64, FMT.head_dim).to(torch.bfloat16)
    refs = torch.tensor([[-1, 5], [6, -2], [-3, -4]], dtype=torch.int32)
    arena = empty_arena()
    ops.store_blocks(blocks, side, arena, refs, FMT)
    pruned = torch.where(reference.keep_2_4(blocks, side), blocks, 0)
    want = torch.where((refs < 0)[..., None, None], pruned, blocks)
    assert torch.equal(read(arena, refs, side), want)


def test_a_block_without_a_ref_is_left_out() -> None:
    blocks = torch.randn(2, HEADS, 64, FMT.head_dim).to(torch.bfloat16)
    arena = empty_arena()
    ops.store_blocks(blocks, Side.K, arena, torch.zeros(2, HEADS, dtype=torch.int32), FMT)
    assert torch.equal(arena, empty_arena())


def test_both_sides_at_once_are_each_side_alone() -> None:
    k, v = torch.randn(2, 2, HEADS, 64, FMT.head_dim).to(torch.bfloat16)
    refs = torch.tensor([[[-1, -2], [9, -4]], [[-5, 10], [-7, -8]]], dtype=torch.int32)
    together, apart = empty_arena(), empty_arena()
    ops.store_pages(k, v, together, refs, FMT)
    ops.store_blocks(k, Side.K, apart, refs[0], FMT)
    ops.store_blocks(v, Side.V, apart, refs[1], FMT)
    assert torch.equal(together, apart)


def test_means_and_the_stored_rest_give_the_block_back() -> None:
    blocks = torch.randint(-4, 5, (1, HEADS, 64, FMT.head_dim)).to(torch.bfloat16) + 100
    refs = torch.tensor([[-3, -3]], dtype=torch.int32)
    means = torch.zeros(4, HEADS, FMT.head_dim, dtype=torch.bfloat16)
    arena = empty_arena()
    ops.store_blocks(blocks, Side.V, arena, refs, FMT, means=means)
    assert torch.equal(means[:3], torch.zeros_like(means[:3]))
    centered = (blocks.float() - means[3][None, :, None].float()).to(torch.bfloat16)
    kept = torch.where(reference.keep_2_4(centered, Side.V), centered, 0)
    assert torch.equal(read(arena, refs, Side.V), kept)
    losses = ops.block_losses(blocks, Side.V, FMT, centered=True)
    assert torch.equal(losses, reference.block_losses(centered, Side.V))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_factor_changes_what_is_kept_and_stored(dtype: str) -> None:
    fmt = BlockFormat(64, dtype)
    blocks = torch.randn(3, HEADS, 64, 64).to(fmt.torch_dtype)
    weights = 0.5 + torch.rand(HEADS, 64)
    factor = torch.eye(64) + torch.randn(HEADS, 64, 64).triu(1) / 8
    refs = torch.tensor([[-1, -5], [2, -2], [-3, 0]], dtype=torch.int32)
    arena = torch.zeros(4 * HEADS * fmt.superblock_bytes, dtype=torch.uint8)
    ops.store_blocks(blocks, Side.K, arena, refs, fmt, weights=weights, factor=factor)
    keep, values = reference.compensate(blocks, weights, factor)
    want = torch.where(keep, values.to(fmt.torch_dtype), 0)
    want[1, 0], want[2, 1] = blocks[1, 0], 0
    got = reference.load_pages(arena, refs, Side.K, fmt).view(HEADS, 3, 64, 64).transpose(0, 1)
    assert torch.equal(got, want)


def test_tokens_of_more_weight_are_kept_in_centered_values() -> None:
    blocks = torch.randn(3, HEADS, 64, FMT.head_dim).to(torch.bfloat16)
    weights = torch.rand(3, HEADS, 64)
    refs = torch.tensor([[-1, -5], [2, -2], [-3, 0]], dtype=torch.int32)
    means = torch.zeros(8, HEADS, FMT.head_dim, dtype=torch.bfloat16)
    arena = empty_arena()
    ops.store_blocks(blocks, Side.V, arena, refs, FMT, means=means, token_weights=weights)
    mean = blocks.float().mean(2).to(torch.bfloat16)
    centered = (blocks.float() - mean[:, :, None].float()).to(torch.bfloat16)
    keep = reference.keep_2_4(centered.abs().float() * weights[..., None], Side.V)
    want = torch.where(keep, centered, 0)
    want[1, 0] = blocks[1, 0]
    written = torch.where(refs == 0, -8, refs)  # what has no ref is left out
    assert torch.equal(read(arena, written, Side.V)[:2], want[:2])
    assert torch.equal(read(arena, written, Side.V)[2, 0], want[2, 0])
    assert torch.equal(means[[5, 2], 1], mean[[0, 1], 1])
    assert not means[0].any() and not means[[2, 5], 0].any()
    with pytest.raises(ValueError, match="of V"):
        ops.store_blocks(blocks, Side.K, arena, refs, FMT, token_weights=weights)
    with pytest.raises(ValueError, match="a block has one"):
        ops.store_blocks(blocks, Side.V, arena, refs, FMT, keep=keep, token_weights=weights)


def test_values_of_dense_blocks_are_not_theirs() -> None:
    blocks, values = torch.randn(2, 2, HEADS, 64, FMT.head_dim).to(torch.bfloat16)
    keep = reference.keep_2_4(values, Side.V)
    refs = torch.tensor([[-1, 5], [6, -2]], dtype=torch.int32)
    arena = empty_arena()
    ops.store_blocks(blocks, Side.V, arena, refs, FMT, keep, values=values)
    want = torch.where((refs < 0)[..., None, None], torch.where(keep, values, 0), blocks)
    assert torch.equal(read(arena, refs, Side.V), want)


def test_a_factor_of_another_shape_or_side_is_refused() -> None:
    blocks = torch.zeros(1, HEADS, 64, FMT.head_dim, dtype=torch.bfloat16)
    refs, weights = torch.zeros(1, HEADS, dtype=torch.int32), torch.ones(HEADS, FMT.head_dim)
    factor = torch.eye(FMT.head_dim).repeat(HEADS, 1, 1)
    for side, change, message in (
        (Side.V, {}, "of K"),
        (Side.K, {"weights": None}, "takes weights"),
        (Side.K, {"factor": factor[:1]}, r"\[1, 64, 64\], not f32 \[2, 64, 64\]"),
        (Side.K, {"factor": factor.half()}, "torch.float16"),
    ):
        rule = {"weights": weights, "factor": factor} | change
        with pytest.raises(ValueError, match=message):
            ops.store_blocks(blocks, side, empty_arena(), refs, FMT, **rule)


def test_two_rules_for_one_block_are_refused() -> None:
    blocks = torch.zeros(1, HEADS, 64, FMT.head_dim, dtype=torch.bfloat16)
    keep, weights = torch.ones(blocks.shape, dtype=torch.bool), torch.ones(HEADS, FMT.head_dim)
    with pytest.raises(ValueError, match="a block has one"):
        ops.block_losses(blocks, Side.K, FMT, keep=keep, weights=weights)
    with pytest.raises(ValueError, match="means are of V"):
        ops.block_losses(blocks, Side.K, FMT, centered=True)


def test_losses_are_of_the_rule_that_stores() -> None:
    blocks, keys = torch.randn(2, 3, HEADS, 64, FMT.head_dim).to(torch.bfloat16)
    weights = ops.token_weights(keys, torch.randn(HEADS, FMT.head_dim) / 8)
    losses = ops.block_losses(blocks, Side.V, FMT, centered=True, token_weights=weights)
    mean = blocks.float().mean(2, keepdim=True).to(torch.bfloat16)
    rest = (blocks.float() - mean.float()).to(torch.bfloat16)
    scaled = rest.abs().float() * weights[..., None]
    assert torch.equal(losses, reference.block_losses(scaled, Side.V))


def test_token_weights_are_exponentials_of_products_row_by_row() -> None:
    keys, query = torch.randn(5, 64, HEADS, 64).transpose(1, 2), torch.randn(HEADS, 64) / 8
    weights = ops.token_weights(keys, query)
    torch.testing.assert_close(weights, torch.einsum("nhtd,hd->nht", keys, query).exp())
    alone = [ops.token_weights(keys[i : i + 1, h : h + 1], query[h : h + 1])
             for i in range(5) for h in range(HEADS)]  # fmt: skip
    assert torch.equal(torch.stack(alone).view(weights.shape), weights)
    with pytest.raises(ValueError, match="do not fit"):
        ops.token_weights(keys, query[:1])


@pytest.mark.parametrize("count", [0, 1, 7, 16])
def test_blocks_of_low_rank_are_the_selected_ones(count: int) -> None:
    losses = torch.randint(0, 5, (3, 2, 16)).float()
    assert torch.equal(ops.rank_blocks(losses) < count, reference.select_blocks(losses, count))


def test_a_segments_slots_go_by_rank() -> None:
    refs = torch.zeros(5, HEADS, dtype=torch.int32)
    pages = torch.tensor([[4, 2, 1]], dtype=torch.int32)
    slots = torch.tensor([[11, 12, 21]], dtype=torch.int32)
    ranks = torch.tensor([[[2, 0, 1], [0, 1, 2]]], dtype=torch.int32)
    assigned = ops.assign_refs(refs, pages, slots, torch.tensor([2], dtype=torch.int32), ranks)
    assert assigned.tolist() == [[[21, -11], [-11, -12], [-12, 21]]]
    assert refs.tolist() == [[0, 0], [-12, 21], [-11, -12], [0, 0], [21, -11]]


def test_tokens_without_a_place_or_of_pages_that_are_not_dense_are_dropped() -> None:
    refs = torch.tensor([[[9, 9], [3, -1]], [[9, 9], [-1, 4]]], dtype=torch.int32)
    k, v = (torch.full((2, HEADS, FMT.head_dim), x, dtype=torch.bfloat16) for x in (1.0, 2.0))
    arena = empty_arena()
    q = torch.randn(2, 2 * HEADS, FMT.head_dim).bfloat16()
    assert ops.store_tokens(k, v, q, arena, refs, torch.tensor([-1, 64 + 7]), FMT) is q
    dense = reference.dense_slots(arena, FMT, HEADS)
    assert (dense == 1).all(-1).nonzero().tolist() == [[3, 0, 7]]
    assert (dense == 2).all(-1).nonzero().tolist() == [[4, 1, 7]]


def test_tokens_are_stored_and_queries_returned_in_the_order_of_a_permutation() -> None:
    refs = torch.tensor([[[1, 2]], [[3, 4]]], dtype=torch.int32)
    k, v = torch.randn(2, 3, HEADS, FMT.head_dim).bfloat16()
    q = torch.randn(3, 2 * HEADS, FMT.head_dim).bfloat16()
    order = torch.stack([torch.randperm(FMT.head_dim) for _ in range(HEADS)]).int()
    arena = empty_arena()
    moved = ops.store_tokens(k, v, q, arena, refs, torch.arange(3), FMT, order)
    assert torch.equal(moved, ops.permute_channels(q, order))
    dense = reference.dense_slots(arena, FMT, HEADS)
    for head in range(HEADS):
        assert torch.equal(dense[1 + head, head, :3], k[:, head][:, order[head].long()])
        assert torch.equal(dense[3 + head, head, :3], v[:, head])


def test_slots_are_copied_in_every_arena() -> None:
    arenas = [torch.randint(0, 256, (10 * 64,), dtype=torch.uint8) for _ in range(2)]
    before = [a.clone().view(10, 64) for a in arenas]
    moves = [torch.tensor(x, dtype=torch.int32) for x in ([1, 5], [7, 0])]
    ops.copy_slots(arenas, *moves, 64)
    for arena, old in zip(arenas, before, strict=True):
        new = arena.view(10, 64)
        assert torch.equal(new[[7, 0]], old[[1, 5]])
        rest = [i for i in range(10) if i not in (7, 0)]
        assert torch.equal(new[rest], old[rest])


def test_query_heads_take_the_permutation_of_their_kv_head() -> None:
    x = torch.randn(3, 4, 64)
    permutation = torch.stack([torch.randperm(64) for _ in range(2)]).int()
    y = ops.permute_channels(x, permutation)
    for head in range(4):
        assert torch.equal(y[:, head], x[:, head, permutation[head // 2].long()])


def test_updating_refs_names_flat_places() -> None:
    refs = torch.zeros(2, 3, 2, dtype=torch.int32)
    ops.update_refs(refs, torch.tensor([1, 11]), torch.tensor([-4, 9], dtype=torch.int32))
    assert refs.flatten().tolist() == [0, -4, *[0] * 9, 9]
