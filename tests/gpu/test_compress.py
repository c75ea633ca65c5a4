"""Packing, losses and ranking on the device, byte for byte against the reference."""

import pytest
import torch
from torch import Tensor

from hs_kernels import ops, reference
from hs_kernels.block_format import HEAD_DIMS, BlockFormat, Side

pytestmark = pytest.mark.gpu

FORMATS = [BlockFormat(d, t) for d in HEAD_DIMS for t in ("bfloat16", "float16")]
SIDES = list(Side)


def empty_arena(fmt: BlockFormat, heads: int, superblocks: int = 6) -> Tensor:
    return torch.full((superblocks * heads * fmt.superblock_bytes,), 0xFF, dtype=torch.uint8)


def random_blocks(fmt: BlockFormat, n: int, heads: int, values: int = 0) -> Tensor:
    """[n, heads, 64, D]; with `values`, small integers, so that most groups have ties."""
    shape = (n, heads, fmt.block_size, fmt.head_dim)
    if values:
        return torch.randint(-values, values + 1, shape).to(fmt.torch_dtype)
    return torch.randn(shape).to(fmt.torch_dtype)


def compare_store(
    blocks: Tensor, side: Side, fmt: BlockFormat, refs: Tensor, **rule: Tensor
) -> None:
    """Stores on both devices; every byte of the arena must agree, written or not."""
    want = empty_arena(fmt, blocks.shape[1])
    got = want.cuda()
    ops.store_blocks(blocks, side, want, refs, fmt, **rule)
    ops.store_blocks(
        blocks.cuda(), side, got, refs.cuda(), fmt, **{k: v.cuda() for k, v in rule.items()}
    )
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_one_block_is_packed_as_the_reference_does(fmt: BlockFormat, side: Side) -> None:
    compare_store(random_blocks(fmt, 1, 1), side, fmt, torch.tensor([[-1]], dtype=torch.int32))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_ties_go_to_the_lower_index(fmt: BlockFormat, side: Side) -> None:
    refs = -torch.arange(1, 7, dtype=torch.int32).view(3, 2)
    compare_store(random_blocks(fmt, 3, 2, values=2), side, fmt, refs)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_each_block_is_stored_as_its_ref_says(fmt: BlockFormat, side: Side) -> None:
    refs = torch.tensor([[-1, -9], [9, -20], [0, 12], [-21, 0], [30, 31]], dtype=torch.int32)
    compare_store(random_blocks(fmt, 5, 2), side, fmt, refs)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_both_sides_are_stored_at_once(fmt: BlockFormat) -> None:
    k, v = random_blocks(fmt, 5, 3, values=3), random_blocks(fmt, 5, 3, values=3)
    refs = -torch.arange(1, 31, dtype=torch.int32).view(2, 5, 3)
    refs[0, 1, 1], refs[1, 2, 0], refs[1, 4] = 22, 0, torch.tensor([23, 24, 25])
    want = empty_arena(fmt, 3)
    got = want.cuda()
    ops.store_pages(k, v, want, refs, fmt)
    ops.store_pages(k.cuda(), v.cuda(), got, refs.cuda(), fmt)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_given_masks_and_values_are_stored(fmt: BlockFormat, side: Side) -> None:
    blocks, values = random_blocks(fmt, 3, 2), random_blocks(fmt, 3, 2)
    keep = reference.keep_2_4(random_blocks(fmt, 3, 2), side)
    keep &= torch.rand(keep.shape) < 0.9  # some groups keep one or none
    slots = torch.tensor([[3, 4], [7, 1], [2, 2]], dtype=torch.int32)
    want = empty_arena(fmt, 2)
    for mask, stored in ((keep, values), (keep, None), (None, values), (None, None)):
        got = want.cuda()
        on_device = [None if x is None else x.cuda() for x in (mask, stored)]
        ops.compress_blocks(blocks.cuda(), side, got, slots.cuda(), fmt, *on_device)
        ops.compress_blocks(blocks, side, want, slots, fmt, mask, stored)
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_channel_weights_change_the_choice(fmt: BlockFormat, side: Side) -> None:
    refs = -torch.arange(1, 7, dtype=torch.int32).view(3, 2)
    weights = torch.rand(2, fmt.head_dim) + 0.1
    compare_store(random_blocks(fmt, 3, 2), side, fmt, refs, weights=weights)


def random_factor(heads: int, channels: int) -> Tensor:
    """f32 [heads, D, D] upper, U with U' U the inverse of a covariance with correlated channels."""
    mix = torch.randn((heads, channels, channels), dtype=torch.float64)
    covariance = mix @ mix.mT / channels + 0.1 * torch.eye(channels, dtype=torch.float64)
    return torch.linalg.cholesky(torch.linalg.inv(covariance), upper=True).float()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_kept_keys_take_over_what_is_pruned(fmt: BlockFormat) -> None:
    """Rounding may turn a near tie, and with it what follows in that row; so rows are compared."""
    n, heads, channels = 7, 3, fmt.head_dim
    blocks = random_blocks(fmt, n, heads)
    refs = -torch.arange(1, n * heads + 1, dtype=torch.int32).view(n, heads)
    refs[2, 1], refs[4] = 30, torch.tensor([0, 31, 32])
    weights, factor = torch.rand(heads, channels) + 0.5, random_factor(heads, channels)
    want = empty_arena(fmt, heads)
    got = want.cuda()
    rule = {"weights": weights, "factor": factor}
    ops.store_blocks(blocks, Side.K, want, refs, fmt, **rule)
    on_device = {name: x.cuda() for name, x in rule.items()}
    ops.store_blocks(blocks.cuda(), Side.K, got, refs.cuda(), fmt, **on_device)
    sparse = torch.zeros(want.shape, dtype=torch.bool)
    for i, h in (refs < 0).nonzero().tolist():
        reference.sparse_slots(sparse, fmt, heads)[-refs[i, h], h] = True
    assert torch.equal(got.cpu()[~sparse], want[~sparse])
    slot, head = -refs[refs < 0].long(), (refs < 0).nonzero()[:, 1]
    x, y = (
        reference.unpack_blocks(
            reference.sparse_slots(a, fmt, heads)[slot, head], Side.K, fmt
        ).float()
        for a in (got.cpu(), want)
    )
    same = ((x != 0) == (y != 0)).all(-1)
    assert same.float().mean() > 0.99, "other channels are kept"
    torch.testing.assert_close(x[same], y[same], rtol=2**-7, atol=1e-3)
    assert (x[same] == y[same]).float().mean() > 0.98


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_blocks_of_layers_take_the_constants_of_their_layer(fmt: BlockFormat) -> None:
    layers, each, heads, channels = 5, 3, 2, fmt.head_dim
    blocks = random_blocks(fmt, layers * each, heads).cuda()
    weights = (torch.rand(layers, heads, channels) + 0.5).cuda()
    query = (torch.randn(layers, heads, channels) * channels**-0.5).cuda()
    factor = torch.stack([random_factor(heads, channels) for _ in range(layers)]).cuda()
    refs = -torch.arange(1, layers * each + 1, dtype=torch.int32, device="cuda")
    refs = refs[:, None].expand(-1, heads)
    of_tokens = ops.token_weights(blocks, query)
    for rule in ({"weights": weights}, {"weights": weights, "factor": factor}):
        whole, alone = empty_arena(fmt, heads).cuda(), empty_arena(fmt, heads).cuda()
        ops.store_blocks(blocks, Side.K, whole, refs, fmt, **rule)
        for layer in range(layers):
            own = slice(layer * each, (layer + 1) * each)
            its = {name: x[layer] for name, x in rule.items()}
            ops.store_blocks(blocks[own], Side.K, alone, refs[own], fmt, **its)
            assert torch.equal(ops.token_weights(blocks[own], query[layer]), of_tokens[own])
        assert torch.equal(whole, alone)
        assert not torch.equal(whole, empty_arena(fmt, heads).cuda())


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_token_weights_change_the_choice(fmt: BlockFormat, centered: bool) -> None:
    blocks = random_blocks(fmt, 3, 2, values=7)  # sums of integers are exact in any order
    refs = torch.tensor([[-1, -2], [-5, 12], [0, -7]], dtype=torch.int32)
    weights = torch.rand(3, 2, 64) + 0.1
    want = empty_arena(fmt, 2)
    got = want.cuda()
    for device, arena in (("cpu", want), ("cuda", got)):
        x, r, w = blocks.to(device), refs.to(device), weights.to(device)
        means = torch.zeros((8, 2, fmt.head_dim), dtype=fmt.torch_dtype, device=device)
        ops.store_blocks(
            x, Side.V, arena, r, fmt, token_weights=w, means=means if centered else None
        )
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)
    losses = [
        ops.block_losses(x, Side.V, fmt, centered=centered, token_weights=w).cpu()
        for x, w in ((blocks, weights), (blocks.cuda(), weights.cuda()))
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_tokens_are_weighed_by_an_average_query(fmt: BlockFormat) -> None:
    chunk = torch.randn(5 * 64 + 8, 3, fmt.head_dim).to(fmt.torch_dtype)
    keys = chunk[8:].view(5, 64, 3, fmt.head_dim).transpose(1, 2)
    query = torch.randn(3, fmt.head_dim) * fmt.head_dim**-0.5
    got = ops.token_weights(keys.cuda(), query.cuda())
    torch.testing.assert_close(got.cpu(), ops.token_weights(keys, query), rtol=1e-5, atol=0)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_block_means_are_subtracted_and_kept(fmt: BlockFormat) -> None:
    blocks = random_blocks(fmt, 3, 2, values=7)  # sums of integers are exact in any order
    refs = torch.tensor([[-1, -2], [-5, 3], [0, -7]], dtype=torch.int32)
    want_means = torch.full((8, 2, fmt.head_dim), 99.0).to(fmt.torch_dtype)
    got_means, want = want_means.cuda(), empty_arena(fmt, 2)
    got = want.cuda()
    ops.store_blocks(blocks, Side.V, want, refs, fmt, means=want_means)
    ops.store_blocks(blocks.cuda(), Side.V, got, refs.cuda(), fmt, means=got_means)
    torch.testing.assert_close(got_means.cpu(), want_means, rtol=0, atol=0)
    losses = ops.block_losses(blocks.cuda(), Side.V, fmt, centered=True)
    wanted = ops.block_losses(blocks, Side.V, fmt, centered=True)
    torch.testing.assert_close(losses.cpu(), wanted, rtol=0, atol=0)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_a_view_of_the_chunk_needs_no_copy(fmt: BlockFormat, side: Side) -> None:
    heads, pages = 3, 4
    chunk = torch.randn(heads * 8 + pages * 64, heads, fmt.head_dim).to(fmt.torch_dtype)
    view = chunk[24 : 24 + pages * 64].view(pages, 64, heads, fmt.head_dim).transpose(1, 2)
    on_device = chunk.cuda()[24 : 24 + pages * 64]
    on_device = on_device.view(pages, 64, heads, fmt.head_dim).transpose(1, 2)
    refs = -torch.arange(1, 1 + pages * heads, dtype=torch.int32).view(pages, heads)
    want = empty_arena(fmt, heads)
    got = want.cuda()
    ops.store_blocks(view, side, want, refs, fmt)
    ops.store_blocks(on_device, side, got, refs.cuda(), fmt)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_losses_agree_to_the_bit(fmt: BlockFormat, side: Side) -> None:
    blocks = random_blocks(fmt, 7, 3)
    keep = reference.keep_2_4(random_blocks(fmt, 7, 3), side)
    weights = torch.rand(3, fmt.head_dim)
    for rule in ({}, {"keep": keep}, {"weights": weights}):
        got = ops.block_losses(
            blocks.cuda(), side, fmt, **{name: x.cuda() for name, x in rule.items()}
        )
        want = ops.block_losses(blocks, side, fmt, **rule)
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("candidates", [1, 2, 15, 16, 33, 512, 2049])
def test_ranks_are_a_stable_sort(candidates: int) -> None:
    losses = torch.randint(0, max(2, candidates // 3), (5, 2, candidates)).float()
    losses[0, 0, 0] = torch.inf
    ranks = ops.rank_blocks(losses.cuda())
    torch.testing.assert_close(ranks.cpu(), ops.rank_blocks(losses), rtol=0, atol=0)
    for count in {0, 1, candidates // 2, candidates}:
        chosen = reference.select_blocks(losses, count)
        assert torch.equal(ranks.cpu() < count, chosen)


@pytest.mark.parametrize("ranked", [False, True])
@pytest.mark.parametrize("fmt", FORMATS[2:4], ids=str)
def test_a_segment_is_compressed_without_the_host_looking(fmt: BlockFormat, ranked: bool) -> None:
    heads, segments, candidates = 2, 2, 5
    blocks = random_blocks(fmt, segments * candidates, heads)
    pages = 1 + torch.randperm(segments * candidates).view(segments, candidates).int()
    slots = (1 + torch.randperm(segments * candidates)).view(segments, candidates).int()
    counts = torch.tensor([3, 5], dtype=torch.int32)
    results = []
    for device in ("cpu", "cuda"):
        arena = empty_arena(fmt, heads).to(device)
        refs = torch.zeros((12, heads), dtype=torch.int32, device=device)
        x = blocks.to(device)
        ranks = None
        if ranked:
            losses = ops.block_losses(x, Side.V, fmt).view(segments, candidates, heads)
            ranks = ops.rank_blocks(losses.transpose(1, 2).contiguous())
        on_device = [t.to(device) for t in (pages, slots, counts)]
        assigned = ops.assign_refs(refs, *on_device, ranks)
        ops.store_blocks(x, Side.V, arena, assigned.flatten(0, 1), fmt)
        results.append((refs.cpu(), arena.cpu()))
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
