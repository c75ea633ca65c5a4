"""Laws of the packed bytes: what is stored comes back, and the instructions see it."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hs_kernels.block_format import BlockFormat, BlockKind, Side
from hs_kernels.reference import keep_2_4, pack_blocks, unpack_blocks
from tests.support.cases import ALL_FORMATS

formats = st.sampled_from(ALL_FORMATS)
sides = st.sampled_from(list(Side))
seeds = st.integers(0, 2**31 - 1)


def random_blocks(fmt: BlockFormat, n: int, seed: int) -> torch.Tensor:
    """Coarse values, so that ties and zeros of both signs are common, with some infinities."""
    rng = torch.Generator().manual_seed(seed)
    shape = (n, fmt.block_size, fmt.head_dim)
    x = torch.randn(shape, generator=rng)
    coarse = torch.rand(shape, generator=rng) < 0.5
    x = torch.where(coarse, (2 * x).round() / 2, x)
    x = torch.where(torch.rand(shape, generator=rng) < 0.1, -torch.zeros(()), x)
    x = torch.where(torch.rand(shape, generator=rng) < 0.01, torch.inf, x)
    return x.to(fmt.torch_dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    """Equality of bits tells -0 from 0 and NaN from NaN."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


@settings(max_examples=40)
@given(formats, sides, st.integers(0, 3), seeds)
def test_what_is_kept_comes_back_bit_for_bit(fmt, side, n, seed):
    x = random_blocks(fmt, n, seed)
    raw = pack_blocks(x, side, fmt)
    assert raw.shape == (n, fmt.sparse_bytes)
    pruned = torch.where(keep_2_4(x, side), x, torch.zeros_like(x))
    assert torch.equal(bits(unpack_blocks(raw, side, fmt)), bits(pruned))


@settings(max_examples=30)
@given(formats, sides, seeds)
def test_compressing_twice_changes_nothing(fmt, side, seed):
    once = unpack_blocks(pack_blocks(random_blocks(fmt, 2, seed), side, fmt), side, fmt)
    twice = unpack_blocks(pack_blocks(once, side, fmt), side, fmt)
    assert torch.equal(twice, once)


@settings(max_examples=30)
@given(formats, sides, seeds)
def test_any_mask_of_at_most_two_is_stored_exactly(fmt, side, seed):
    rng = torch.Generator().manual_seed(seed)
    x, values = random_blocks(fmt, 2, seed), random_blocks(fmt, 2, seed ^ 1)
    noise = torch.randn(x.shape, generator=rng)
    keep = keep_2_4(noise, side) & (torch.rand(x.shape, generator=rng) < 0.7)
    for given_values in (None, values):
        stored = x if given_values is None else given_values
        raw = pack_blocks(x, side, fmt, keep, given_values)
        want = torch.where(keep, stored, torch.zeros_like(stored))
        assert torch.equal(unpack_blocks(raw, side, fmt), want)
        assert ordered_pairs(raw, fmt)


@settings(max_examples=30)
@given(formats, sides, seeds)
def test_every_nibble_names_an_ordered_pair(fmt, side, seed):
    assert ordered_pairs(pack_blocks(random_blocks(fmt, 2, seed), side, fmt), fmt)
    zeros = torch.zeros((1, fmt.block_size, fmt.head_dim), dtype=fmt.torch_dtype)
    assert ordered_pairs(pack_blocks(zeros, side, fmt), fmt)


def ordered_pairs(raw: torch.Tensor, fmt: BlockFormat) -> bool:
    metadata = raw[:, : fmt.metadata_bytes]
    nibbles = torch.stack([metadata & 15, metadata >> 4])
    return bool(((nibbles & 3) < (nibbles >> 2)).all())


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_a_block_packs_alike_alone_and_in_a_batch(fmt, side):
    x = random_blocks(fmt, 5, 1)
    raw = pack_blocks(x, side, fmt)
    for i in range(5):
        assert torch.equal(pack_blocks(x[i : i + 1], side, fmt)[0], raw[i])


# --- the instructions ---------------------------------------------------------------------------


def mma_sp(a: torch.Tensor, e: torch.Tensor, selector: int, b: torch.Tensor) -> torch.Tensor:
    """fp64 [16, 8]: `mma.sp::ordered_metadata.m16n8k32` of one warp, from its registers.

    a [32, 8] holds the eight 16-bit elements of each lane, e [32] the metadata word of each lane,
    b [32, 8] the dense operand. Registers a0 .. a3 are (row g, columns 2q, 2q + 1), (row g + 8,
    same), (row g, columns 8 + 2q ..), (row g + 8, same) of the compressed tile. The words that
    count are those of lanes 4 g + 2 selector + h, h for the half of the depth: rows g in the low
    and g + 8 in the high 16 bits, four groups each.
    """
    compressed = torch.zeros((16, 16), dtype=torch.float64)
    for lane in range(32):
        g, q = divmod(lane, 4)
        a0, a1, a2, a3 = a[lane].double().view(4, 2)
        compressed[g, 2 * q : 2 * q + 2] = a0
        compressed[g + 8, 2 * q : 2 * q + 2] = a1
        compressed[g, 8 + 2 * q : 10 + 2 * q] = a2
        compressed[g + 8, 8 + 2 * q : 10 + 2 * q] = a3
    words = e.tolist()
    full = torch.zeros((16, 32), dtype=torch.float64)
    for g in range(8):
        for half in range(2):
            word = words[4 * g + 2 * selector + half]
            for high in range(2):
                for j in range(4):
                    pair = word >> (16 * high + 4 * j) & 15
                    first, second = pair & 3, pair >> 2
                    assert first < second, f"undefined metadata {pair:#x}"
                    row, group = g + 8 * high, 4 * half + j
                    full[row, 4 * group + first] = compressed[row, 2 * group]
                    full[row, 4 * group + second] = compressed[row, 2 * group + 1]
    return full @ b.double()


def gemm_of_packed(raw: torch.Tensor, side: Side, fmt: BlockFormat, b: torch.Tensor):
    """fp64 [rows, 8]: the packed block times b [depth, 8], strip by strip as a warp runs it.

    A warp loads 16 bytes of 16-bit elements a lane for each strip and step, and the E words of
    its metadata as vectors of up to four; it uses each word for two steps.
    """
    rows, depth = fmt.rows(side), fmt.depth(side)
    steps, lane_words = depth // 32, fmt.head_dim // 64
    vectors = raw[: fmt.metadata_bytes].view(torch.int32).view(-1, 32, 4) & 0xFFFFFFFF
    fragments = raw[fmt.metadata_bytes :].view(fmt.torch_dtype).view(rows // 16, steps, 32, 8)
    out = torch.zeros((rows, 8), dtype=torch.float64)
    for strip in range(rows // 16):
        warp, half = strip % 4, strip // 4
        for step in range(steps):
            word = warp * lane_words + half * (steps // 2) + step // 2
            e = vectors[word // 4, :, word % 4]
            part = b[32 * step : 32 * step + 32]
            out[16 * strip : 16 * strip + 16] += mma_sp(fragments[strip, step], e, step % 2, part)
    return out


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_sparse_mma_on_the_packed_bytes_is_the_dense_product(fmt, side):
    x = torch.randn(1, fmt.block_size, fmt.head_dim).to(fmt.torch_dtype)
    b = torch.randn(fmt.depth(side), 8)
    pruned = torch.where(keep_2_4(x, side), x, torch.zeros_like(x))[0].double()
    operand = pruned if side == Side.K else pruned.T
    got = gemm_of_packed(pack_blocks(x, side, fmt)[0], side, fmt, b)
    assert torch.allclose(got, operand @ b.double(), rtol=0, atol=1e-12)


# --- sizes --------------------------------------------------------------------------------------


@given(
    st.sampled_from([f for f in ALL_FORMATS if f.itemsize == 2]),
    st.integers(1, 4096),
    st.data(),
)
def test_sizes_are_those_of_the_paper(fmt, blocks, data):
    """Equations 4, 5 and 6 in elements of 16 bits, with refs of one element as the paper has."""
    sparse = {side: data.draw(st.integers(0, blocks), label=side.name) for side in Side}
    s_k, s_v = (Fraction(sparse[side], blocks) for side in Side)
    length, d = blocks * fmt.block_size, fmt.head_dim
    baseline = 2 * length * d
    index = 2 * Fraction(length, fmt.block_size)
    dense = length * d * (1 - s_k) + length * d * (1 - s_v)
    nonzeros = Fraction(length * d, 2) * (s_k + s_v)
    metadata = Fraction(length * d, 16) * (s_k + s_v)

    stored = sum(
        sparse[side] * fmt.sparse_bytes + (blocks - sparse[side]) * fmt.dense_bytes for side in Side
    )
    assert stored == fmt.itemsize * (dense + nonzeros + metadata)
    assert sum(sparse.values()) * fmt.metadata_bytes == fmt.itemsize * metadata
    assert sum(sparse.values()) * fmt.nonzero_bytes == fmt.itemsize * nonzeros

    ratio = Fraction(2 * blocks * fmt.dense_bytes, stored + fmt.itemsize * index)
    assert ratio == baseline / (index + dense + nonzeros + metadata)
    predicted = 1 / (1 - Fraction(21875, 100000) * (s_k + s_v) + Fraction(1, fmt.block_size * d))
    assert ratio == predicted


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_a_superblock_is_the_least_whole_number_of_either_kind(fmt):
    dense, sparse = fmt.block_bytes(BlockKind.DENSE), fmt.block_bytes(BlockKind.SPARSE_2_4)
    assert fmt.superblock_bytes == dense * fmt.dense_per_superblock
    assert fmt.superblock_bytes == sparse * fmt.sparse_per_superblock
    smaller = range(1, fmt.dense_per_superblock)
    assert all((n * dense) % sparse for n in smaller)
