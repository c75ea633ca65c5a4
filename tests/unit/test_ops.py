"""What the bookkeeping operators do, stated on the CPU; tests/gpu holds the device to the same."""

import pytest
import torch

from hs_kernels import ops
from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import (
    block_losses,
    dense_slots,
    keep_2_4,
    load_pages,
    select_blocks,
    sparse_slots,
)

FMT = BlockFormat(64, "float32")
HEADS = 2


def new_arena(superblocks: int = 3) -> torch.Tensor:
    return torch.full((superblocks * HEADS * FMT.superblock_bytes,), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize("side", Side)
def test_blocks_are_stored_as_the_sign_of_their_ref_says(side):
    arena, blocks = new_arena(), torch.randn(3, HEADS, 64, 64)
    refs = torch.tensor([[20, -70], [-71, 0], [0, 21]], dtype=torch.int32)
    before = arena.clone()
    ops.store_blocks(blocks, side, arena, refs, FMT)
    pruned = torch.where(keep_2_4(blocks, side), blocks, 0.0)
    for n, head in [(0, 0), (2, 1)]:
        slot = int(refs[n, head])
        assert torch.equal(dense_slots(arena, FMT, HEADS)[slot, head], blocks[n, head])
    for n, head in [(0, 1), (1, 0)]:
        loaded = load_pages(arena, refs[n].clamp(max=-1)[None], side, FMT)
        assert torch.equal(loaded[head], pruned[n, head])
    written = 2 * FMT.dense_bytes + 2 * FMT.sparse_bytes
    assert int((arena != before).sum()) <= written, "a block of ref 0 was written"


def test_both_sides_of_pages_are_stored_at_once():
    arena, alone = new_arena(), new_arena()
    k, v = torch.randn(2, 2, HEADS, 64, 64)
    refs = torch.tensor([[[17, 18], [-64, -65]], [[-66, -67], [19, 20]]], dtype=torch.int32)
    ops.store_pages(k, v, arena, refs, FMT)
    ops.store_blocks(k, Side.K, alone, refs[0], FMT)
    ops.store_blocks(v, Side.V, alone, refs[1], FMT)
    assert torch.equal(arena, alone)


@pytest.mark.parametrize("side", Side)
def test_channel_weights_scale_magnitudes_in_the_choice_and_in_the_loss(side):
    arena, blocks = new_arena(), torch.randn(2, HEADS, 64, 64)
    weights = torch.rand(HEADS, 64)
    refs = torch.tensor([[-64, -65], [-66, -67]], dtype=torch.int32)
    ops.store_blocks(blocks, side, arena, refs, FMT, weights=weights)
    scaled = blocks.abs() * weights[:, None]
    want = torch.where(keep_2_4(scaled, side), blocks, 0.0)
    got = load_pages(arena, refs, side, FMT).view(HEADS, 2, 64, 64).transpose(0, 1)
    assert torch.equal(got, want)
    losses = ops.block_losses(blocks, side, FMT, weights=weights)
    assert torch.equal(losses, block_losses(scaled, side))


def test_the_mean_of_a_sparse_v_block_is_set_aside():
    arena, blocks = new_arena(), 3.0 + torch.randn(1, HEADS, 64, 64)
    means = torch.zeros(96, HEADS, 64)
    refs = torch.tensor([[-64, 20]], dtype=torch.int32)
    ops.store_blocks(blocks, Side.V, arena, refs, FMT, means=means)
    mean = blocks.mean(2)[0]
    assert torch.allclose(means[64, 0], mean[0])
    assert not means[:, 1].any(), "a dense block keeps its mean"
    centred = blocks[0, 0] - means[64, 0]
    stored = load_pages(arena, torch.tensor([[-64, -64]], dtype=torch.int32), Side.V, FMT)[0]
    assert torch.equal(stored, torch.where(keep_2_4(centred, Side.V), centred, 0.0))


def test_two_rules_for_one_block_are_refused():
    arena, blocks = new_arena(), torch.zeros(1, HEADS, 64, 64)
    refs = torch.tensor([[-64, -65]], dtype=torch.int32)
    keep, weights = torch.zeros_like(blocks, dtype=torch.bool), torch.ones(HEADS, 64)
    with pytest.raises(ValueError, match="two rules"):
        ops.store_blocks(blocks, Side.K, arena, refs, FMT, keep=keep, weights=weights)
    with pytest.raises(ValueError, match="only V"):
        ops.store_blocks(blocks, Side.K, arena, refs, FMT, means=torch.zeros(96, HEADS, 64))


def test_ranks_order_blocks_as_selection_does():
    losses = torch.tensor([[2.0, 0.5, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0]])
    ranks = ops.rank_blocks(losses)
    assert ranks.tolist() == [[2, 0, 3, 1], [0, 1, 2, 3]]
    for count in range(5):
        assert torch.equal(ranks < count, select_blocks(losses, count))


def test_refs_of_a_segment_follow_the_ranks_of_each_head():
    refs = torch.zeros(6, HEADS, dtype=torch.int32)
    pages = torch.tensor([[4, 2, 5]], dtype=torch.int32)
    slots = torch.tensor([[11, 12, 13]], dtype=torch.int32)
    ranks = torch.tensor([[[2, 0, 1], [0, 1, 2]]], dtype=torch.int32)
    counts = torch.tensor([2], dtype=torch.int32)
    assigned = ops.assign_refs(refs, pages, slots, counts, ranks)
    assert assigned[0].tolist() == [[13, -11], [-11, -12], [-12, 13]]
    assert refs[[4, 2, 5]].tolist() == assigned[0].tolist()
    assert not refs[[0, 1, 3]].any()

    ops.assign_refs(refs, pages, slots, torch.tensor([0], dtype=torch.int32))
    assert refs[[4, 2, 5]].tolist() == [[11, 11], [12, 12], [13, 13]]


def test_refs_are_updated_where_the_index_says():
    refs = torch.zeros(2, 3, HEADS, dtype=torch.int32)
    ops.update_refs(refs, torch.tensor([11, 0]), torch.tensor([-5, 7], dtype=torch.int32))
    assert refs.view(-1).tolist() == [7, *[0] * 10, -5]


def test_slots_are_copied_in_every_arena():
    arenas = [torch.randint(0, 256, (new_arena().numel(),), dtype=torch.uint8) for _ in range(2)]
    before = [sparse_slots(arena, FMT, HEADS).clone() for arena in arenas]
    source = torch.tensor([40, 41], dtype=torch.int32)
    target = torch.tensor([70, 33], dtype=torch.int32)
    ops.copy_slots(arenas, source, target, HEADS * FMT.sparse_bytes)
    for arena, old in zip(arenas, before, strict=True):
        want = old.clone()
        want[[70, 33]] = old[[40, 41]]
        assert torch.equal(sparse_slots(arena, FMT, HEADS), want)


def test_tokens_land_in_the_dense_blocks_of_their_pages_and_others_are_dropped():
    arena, tokens = new_arena(), torch.randn(4, HEADS, 64)
    refs = torch.tensor([[0, 0], [18, 19], [-64, 20]], dtype=torch.int32)
    before = arena.clone()
    locations = torch.tensor([64 + 5, 2 * 64, 7, 64 + 63])
    ops.store_tokens(tokens, arena, refs, locations, FMT)
    dense = dense_slots(arena, FMT, HEADS)
    for head, slot in enumerate([18, 19]):
        assert torch.equal(dense[slot, head, 5], tokens[0, head])
        assert torch.equal(dense[slot, head, 63], tokens[3, head])
    assert torch.equal(dense[20, 1, 0], tokens[1, 1])
    changed = (arena != before).view(-1, FMT.itemsize).any(-1)
    assert int(changed.sum()) <= 5 * 64, "a token without a dense block was written"


def test_channels_are_permuted_for_the_query_heads_of_each_kv_head():
    x = torch.randn(3, 4, 64)
    permutation = torch.stack([torch.randperm(64), torch.randperm(64)]).to(torch.int32)
    got = ops.permute_channels(x, permutation)
    for head in range(4):
        assert torch.equal(got[:, head], x[:, head, permutation[head // 2].long()])
    with pytest.raises(ValueError, match="does not fit"):
        ops.permute_channels(x[:, :3], permutation)
