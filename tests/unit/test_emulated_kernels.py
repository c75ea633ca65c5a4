"""Kernels against the reference without a device: their source, run thread by thread on the CPU."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hs_kernels import build, ops, reference
from hs_kernels.block_format import BlockFormat, Side
from tests.support import emulated
from tests.support.cases import build_decode_case, naive_decode, with_means
from tests.support.compare import assert_close

FORMATS = list(emulated.FORMATS.values())
REFS = torch.tensor([[-1, -2], [-5, 12], [0, -7]], dtype=torch.int32)


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))


# (head dim, columns of an MMA), query heads for each kv head, lengths, CTAs
DECODE = [
    ((128, 8), 4, [700, 64, 0, 1025, 20], 5),
    ((128, 8), 4, [2500], 6),  # shares that end with pairs do not divide this evenly
    ((128, 8), 4, [1000], 16),  # few pairs
    ((128, 8), 1, [65, 1, 0, 130, 64, 64, 3], 3),
    ((64, 16), 12, [900, 130], 5),
    ((256, 8), 3, [700, 200], 4),
    ((128, 24), 24, [1300], 4),
]


def check_decode(
    kind: tuple[int, int],
    group: int,
    lengths: Sequence[int],
    ctas: int,
    means: bool,
    bulk: bool = True,
) -> None:
    fmt, columns = emulated.FORMATS[kind[0]], kind[1]
    case = build_decode_case(fmt, heads=2, group=group, lengths=lengths, share=(0.5, 0.7))
    if means:
        case = replace(case, cache=with_means(case.cache))
    want, want_lse = naive_decode(case)
    results = [emulated.decode_attention(case, columns, ctas, seed, bulk=bulk) for seed in (1, 2)]
    for out, lse in results:
        assert_close("out", out, want)
        assert_close("lse", lse, want_lse, 2e-3)
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("kind, group, lengths, ctas", DECODE, ids=str)
def test_decode_agrees_whatever_the_order_of_warps(
    kind: tuple[int, int], group: int, lengths: Sequence[int], ctas: int, means: bool
) -> None:
    check_decode(kind, group, lengths, ctas, means)


@pytest.mark.parametrize("kind, group", [((128, 8), 4), ((64, 16), 12), ((256, 8), 3)], ids=str)
def test_decode_agrees_with_the_copies_of_ampere(kind: tuple[int, int], group: int) -> None:
    check_decode(kind, group, [330, 64, 200], ctas=3, means=True, bulk=False)


@pytest.mark.parametrize("share", [(0.0, 0.0), (1.0, 1.0), (0.3, 0.8)], ids=str)
def test_decode_needs_no_plan_of_its_own_layer(share: tuple[float, float]) -> None:
    """One plan serves all layers of a step, whatever is sparse in them: of layers that stay dense
    too."""
    fmt = emulated.FORMATS[128]
    case = build_decode_case(fmt, heads=2, group=4, lengths=[700, 64, 1025], share=share)
    want, want_lse = naive_decode(case)
    refs = case.cache.refs
    for planned in (refs.abs(), -refs.abs()):
        out, lse = emulated.decode_attention(case, 8, ctas=5, seed=1, planned=planned)
        assert_close("out", out, want)
        assert_close("lse", lse, want_lse, 2e-3)


@pytest.mark.parametrize(
    "kind, group, pages, ctas",
    [
        ((128, 8), 4, [11, 1, 0, 17, 1], 5),
        ((128, 8), 4, [40], 6),
        ((128, 8), 4, [2] * 12, 7),
        ((128, 8), 1, [1] * 9, 16),
        ((64, 16), 12, [15, 3], 5),
        ((256, 8), 3, [11, 4], 4),
    ],
    ids=str,
)
def test_decode_waits_for_the_last_tokens(
    kind: tuple[int, int], group: int, pages: Sequence[int], ctas: int
) -> None:
    """Requests of so many pages, none of them shared, whose last one and Q come late."""
    fmt, columns = emulated.FORMATS[kind[0]], kind[1]
    whole = build_decode_case(fmt, heads=2, group=group, lengths=[64 * sum(pages)])
    table = torch.zeros((len(pages), max(pages) + 1), dtype=torch.int32)
    left = whole.page_table[0].tolist()
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor(left[:count], dtype=torch.int32)
        del left[:count]
    case = replace(
        whole,
        q=torch.randn((len(pages), 2 * group, fmt.head_dim)).to(fmt.torch_dtype),
        page_table=table,
        seq_lens=torch.tensor([64 * n - 7 * (n > 0) for n in pages], dtype=torch.int32),
    )
    want, want_lse = naive_decode(case)
    for seed in (1, 2, 3):
        out, lse = emulated.decode_attention(case, columns, ctas, seed, behind_store=True)
        assert_close("out", out, want)
        assert_close("lse", lse, want_lse, 2e-3)


def random_blocks(fmt: BlockFormat, n: int, heads: int) -> Tensor:
    """Integers, so that groups have ties and sums are exact in any order."""
    return torch.randint(-7, 8, (n, heads, fmt.block_size, fmt.head_dim)).to(fmt.torch_dtype)


def empty_arena(fmt: BlockFormat, heads: int) -> Tensor:
    return torch.full((6 * heads * fmt.superblock_bytes,), 0xFF, dtype=torch.uint8)


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_blocks_are_packed_to_the_byte(fmt: BlockFormat, side: Side) -> None:
    blocks = random_blocks(fmt, 3, 2)
    keep = reference.keep_2_4(random_blocks(fmt, 3, 2), side)
    for rule, mask in ((emulated.MAGNITUDE, None), (emulated.GIVEN, keep)):
        want = empty_arena(fmt, 2)
        got, losses = want.clone(), torch.full((3, 2), torch.nan)
        ops.store_blocks(blocks, side, want, REFS, fmt, keep=mask)
        emulated.store_blocks(blocks, side, got, REFS, rule, keep=mask)
        assert torch.equal(got, want)
        emulated.store_blocks(blocks, side, None, None, rule, keep=mask, losses=losses)
        assert torch.equal(losses, ops.block_losses(blocks, side, fmt, keep=mask))


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_values_are_chosen_by_token(fmt: BlockFormat, centered: bool) -> None:
    blocks, weights = random_blocks(fmt, 3, 2), torch.rand(3, 2, 64) + 0.1
    want = empty_arena(fmt, 2)
    got, losses = want.clone(), torch.full((3, 2), torch.nan)
    want_means = torch.zeros((8, 2, fmt.head_dim), dtype=fmt.torch_dtype) if centered else None
    means = None if want_means is None else want_means.clone()
    ops.store_blocks(blocks, Side.V, want, REFS, fmt, means=want_means, token_weights=weights)
    rule = emulated.BY_TOKEN
    emulated.store_blocks(blocks, Side.V, got, REFS, rule, weights=weights, means=means)
    assert torch.equal(got, want)
    if means is not None and want_means is not None:
        assert torch.equal(means, want_means)
    emulated.store_blocks(
        *(blocks, Side.V, None, None, rule), weights=weights, centered=centered, losses=losses
    )
    wanted = ops.block_losses(blocks, Side.V, fmt, centered=centered, token_weights=weights)
    assert torch.equal(losses, wanted)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_tokens_are_weighed_by_an_average_query(fmt: BlockFormat) -> None:
    chunk = torch.randn(3 * 64 + 8, 2, fmt.head_dim).to(fmt.torch_dtype)
    keys = chunk[8:].view(3, 64, 2, fmt.head_dim).transpose(1, 2)
    query = torch.randn(2, fmt.head_dim) * fmt.head_dim**-0.5
    got = emulated.token_weights(keys, query)
    torch.testing.assert_close(got, ops.token_weights(keys, query), rtol=1e-5, atol=0)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_kept_keys_take_over_what_is_pruned(fmt: BlockFormat) -> None:
    """Rounding may turn a near tie, and with it what follows in that row; so rows are compared."""
    blocks = torch.randn(3, 2, fmt.block_size, fmt.head_dim).to(fmt.torch_dtype)
    mix = torch.randn((2, fmt.head_dim, fmt.head_dim), dtype=torch.float64)
    covariance = mix @ mix.mT / fmt.head_dim + 0.1 * torch.eye(fmt.head_dim)
    factor = torch.linalg.cholesky(torch.linalg.inv(covariance), upper=True).float()
    weights = torch.rand(2, fmt.head_dim) + 0.5
    want = empty_arena(fmt, 2)
    got = want.clone()
    ops.store_blocks(blocks, Side.K, want, REFS, fmt, weights=weights, factor=factor)
    emulated.store_compensated(blocks, got, REFS, weights, factor)
    slot, head = -REFS[REFS < 0].long(), (REFS < 0).nonzero()[:, 1]
    x, y = (
        reference.unpack_blocks(reference.sparse_slots(a, fmt, 2)[slot, head], Side.K, fmt).float()
        for a in (got, want)
    )
    same = ((x != 0) == (y != 0)).all(-1)
    assert same.float().mean() > 0.99
    torch.testing.assert_close(x[same], y[same], rtol=2**-7, atol=1e-3)
    dense = torch.full(want.shape, True)
    reference.sparse_slots(dense, fmt, 2)[slot, head] = False
    assert torch.equal(got[dense], want[dense])


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_tokens_go_to_the_dense_block_of_their_page(fmt: BlockFormat, permuted: bool) -> None:
    heads, tokens, dim = 2, 20, fmt.head_dim
    keys = [[0, 0], [3, 4], [-2, 9], [12, 13]]
    values = [[0, 0], [5, 6], [7, -3], [14, 15]]
    refs = torch.tensor([keys, values], dtype=torch.int32)
    locations = torch.randperm(4 * 64)[:tokens]
    locations[::7] = -1
    k, v = torch.randn(2, tokens, heads, 2 * dim).to(fmt.torch_dtype)[..., :dim]
    q = torch.randn(tokens, 3 * heads, 2 * dim).to(fmt.torch_dtype)[..., :dim]
    order = torch.stack([torch.randperm(dim) for _ in range(heads)]).int() if permuted else None
    want = torch.full((3 * heads * fmt.superblock_bytes,), 0xFF, dtype=torch.uint8)
    got = want.clone()
    queries = emulated.store_tokens(k, v, q, got, refs, locations, order)
    assert torch.equal(queries, ops.store_tokens(k, v, q, want, refs, locations, fmt, order))
    assert torch.equal(got, want)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_blocks_of_layers_take_the_constants_of_their_layer(fmt: BlockFormat) -> None:
    """Three layers end to end, each with weights, a factor and a query of its own."""
    layers, each, channels = 3, 2, fmt.head_dim
    blocks = torch.randn(layers * each, 2, fmt.block_size, channels).to(fmt.torch_dtype)
    weights = torch.rand(layers, 2, channels) + 0.5
    query = torch.randn(layers, 2, channels) * channels**-0.5
    upper = torch.randn(layers, 2, channels, channels).triu(1) / channels
    factor = upper + torch.diag_embed(0.5 + torch.rand(layers, 2, channels))
    refs = -torch.arange(1, layers * each + 1, dtype=torch.int32)[:, None].expand(-1, 2)
    refs = refs.contiguous()
    whole, compensated = empty_arena(fmt, 2), empty_arena(fmt, 2)
    emulated.store_blocks(blocks, Side.K, whole, refs, emulated.WEIGHTED, weights=weights)
    emulated.store_compensated(blocks, compensated, refs, weights, factor)
    of_tokens = emulated.token_weights(blocks, query)
    alone, compensated_alone = empty_arena(fmt, 2), empty_arena(fmt, 2)
    for layer in range(layers):
        own = slice(layer * each, (layer + 1) * each)
        part, its_refs = blocks[own], refs[own].contiguous()
        emulated.store_blocks(
            part, Side.K, alone, its_refs, emulated.WEIGHTED, weights=weights[layer]
        )
        emulated.store_compensated(part, compensated_alone, its_refs, weights[layer], factor[layer])
        assert torch.equal(emulated.token_weights(part, query[layer]), of_tokens[own])
    assert torch.equal(whole, alone) and torch.equal(compensated, compensated_alone)
    assert not torch.equal(whole, empty_arena(fmt, 2))
