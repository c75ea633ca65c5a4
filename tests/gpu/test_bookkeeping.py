"""Small kernels on the device: refs, slots, tokens, permutation, merging."""

import pytest
import torch

from hs_kernels import ops, reference
from hs_kernels.block_format import HEAD_DIMS, BlockFormat
from tests.support.compare import assert_close

pytestmark = pytest.mark.gpu

FORMATS = [BlockFormat(d, t) for d in HEAD_DIMS for t in ("bfloat16", "float16")]


def test_ref_updates_touch_what_they_name() -> None:
    refs = torch.arange(2 * 40 * 4, dtype=torch.int32).view(2, 40, 4)
    index = torch.randperm(refs.numel())[:100]
    value = -torch.arange(100, dtype=torch.int32)
    got = refs.cuda()
    ops.update_refs(got, index.cuda(), value.cuda())
    ops.update_refs(refs, index, value)
    assert torch.equal(got.cpu(), refs)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("fmt", FORMATS[::2], ids=str)
def test_slots_move_in_every_layer(fmt: BlockFormat, sparse: bool) -> None:
    heads = 3
    size = heads * (fmt.sparse_bytes if sparse else fmt.dense_bytes)
    arenas = [torch.randint(0, 256, (20 * size + 64,), dtype=torch.uint8) for _ in range(3)]
    source = torch.tensor([3, 17, 9], dtype=torch.int32)
    target = torch.tensor([4, 0, 19], dtype=torch.int32)
    moved = [a.cuda() for a in arenas]
    ops.copy_slots(moved, source.cuda(), target.cuda(), size)
    ops.copy_slots(arenas, source, target, size)
    for got, want in zip(moved, arenas, strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_tokens_go_to_the_dense_block_of_their_page(fmt: BlockFormat, permuted: bool) -> None:
    heads, tokens, dim = 2, 40, fmt.head_dim
    arena = torch.full((3 * heads * fmt.superblock_bytes,), 0xFF, dtype=torch.uint8)
    keys = [[0, 0], [3, 4], [-2, 9], [12, 13]]
    values = [[0, 0], [5, 6], [7, -3], [14, 15]]
    refs = torch.tensor([keys, values], dtype=torch.int32)
    locations = torch.randperm(4 * 64)[:tokens]
    locations[::7] = -1
    k, v = torch.randn(2, tokens, heads, 2 * dim).to(fmt.torch_dtype)[..., :dim]
    q = torch.randn(tokens, 3 * heads, 2 * dim).to(fmt.torch_dtype)[..., :dim]
    order = torch.stack([torch.randperm(dim) for _ in range(heads)]).int() if permuted else None
    got = arena.cuda()
    on_device = [x.cuda() for x in (k, v, q)]
    queries = ops.store_tokens(
        *on_device, got, refs.cuda(), locations.cuda(), fmt, None if order is None else order.cuda()
    )
    want = ops.store_tokens(k, v, q, arena, refs, locations, fmt, order)
    assert torch.equal(got.cpu(), arena)
    assert torch.equal(queries.cpu(), want)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_query_heads_take_the_permutation_of_their_kv_head(fmt: BlockFormat) -> None:
    x = torch.randn(33, 8, fmt.head_dim).to(fmt.torch_dtype)
    permutation = torch.stack([torch.randperm(fmt.head_dim) for _ in range(2)]).int()
    got = ops.permute_channels(x.cuda(), permutation.cuda())
    assert torch.equal(got.cpu(), ops.permute_channels(x, permutation))
    for head in range(8):
        assert torch.equal(got[:, head].cpu(), x[:, head][:, permutation[head // 4].long()])


def test_merging_ignores_empty_partials() -> None:
    outs, lses = torch.randn(5, 7, 3, 128), torch.randn(5, 7, 3) * 20
    lses[1, 2] = lses[:, 3] = -torch.inf
    outs[1, 2] = torch.nan
    got = ops.merge_states(outs.cuda(), lses.cuda())
    want = reference.merge_states(outs, lses)
    for name, x, y in zip(("out", "lse"), got, want, strict=True):
        assert_close(name, x, y, 2e-5)
