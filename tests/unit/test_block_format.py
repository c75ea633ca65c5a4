import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from hs_kernels.block_format import (
    DUMMY_METADATA_BYTE,
    DUMMY_REF,
    HEAD_DIMS,
    BlockFormat,
    BlockKind,
    Side,
    dense_ref,
    metadata_place,
    nibble,
    nonzero_place,
    pair_of_keeps,
    render_header,
    sparse_ref,
)
from tests.support.cases import ALL_FORMATS

HEADER = Path(__file__).parents[2] / "csrc/include/hs/block_format.h"
ORDERED_NIBBLES = {0x4, 0x8, 0x9, 0xC, 0xD, 0xE}


@pytest.mark.parametrize(
    ("head_dim", "dtype", "dense", "sparse", "per_superblock"),
    [
        (64, "float16", 8192, 4608, (9, 16)),
        (128, "bfloat16", 16384, 9216, (9, 16)),
        (256, "bfloat16", 32768, 18432, (9, 16)),
        (64, "float32", 16384, 8704, (17, 32)),
        (128, "float32", 32768, 17408, (17, 32)),
    ],
)
def test_sizes_of_known_blocks(head_dim, dtype, dense, sparse, per_superblock):
    fmt = BlockFormat(head_dim, dtype)
    assert (fmt.dense_bytes, fmt.sparse_bytes) == (dense, sparse)
    assert (fmt.dense_per_superblock, fmt.sparse_per_superblock) == per_superblock


@pytest.mark.parametrize("fmt", ALL_FORMATS, ids=str)
def test_slots_can_be_copied_in_bulk(fmt):
    # One cp.async.bulk per slot wants 16 bytes; metadata vectors are read 512 bytes at a time.
    assert fmt.metadata_bytes % 512 == 0
    assert fmt.sparse_bytes % 512 == 0
    assert fmt.block_bytes(BlockKind.SPARSE_2_4) == fmt.metadata_bytes + fmt.nonzero_bytes
    assert fmt.block_bytes(BlockKind.DENSE) == fmt.dense_bytes


def test_the_operand_of_k_has_rows_of_tokens_and_that_of_v_rows_of_channels():
    fmt = BlockFormat(128)
    assert (fmt.rows(Side.K), fmt.depth(Side.K)) == (64, 128)
    assert (fmt.rows(Side.V), fmt.depth(Side.V)) == (128, 64)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"head_dim": 80}, "head_dim is 80"),
        ({"head_dim": 64, "dtype": "float8"}, "dtype is 'float8'"),
        ({"head_dim": 64, "block_size": 32}, "block_size is 32"),
    ],
)
def test_an_unknown_geometry_is_refused_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        BlockFormat(**arguments)


def test_refs_carry_the_kind_in_their_sign():
    assert dense_ref(7) > 0 > sparse_ref(7)
    assert dense_ref(7) == -sparse_ref(7) == 7
    assert DUMMY_REF == 0


def test_every_stored_pair_is_ordered_and_keeps_what_the_mask_keeps():
    table = pair_of_keeps()
    for bits in range(16):
        kept = {p for p in range(4) if bits >> p & 1}
        if len(kept) > 2:
            assert (table[bits] == -1).all()
            continue
        first, second = table[bits]
        assert nibble(first, second) in ORDERED_NIBBLES
        assert kept <= {first, second}
    assert nibble(*table[0]) * 0x11 == DUMMY_METADATA_BYTE


def positions_by_loops(rows, depth):
    """The two maps written as the loops of a packer, without the module's arithmetic."""
    steps = depth // 32
    words = max(1, (rows // 64) * (steps // 2))
    nonzero = np.empty((rows, depth // 2), np.int64)
    metadata = np.empty((rows, depth // 4), np.int64)
    for strip in range(rows // 16):
        for step in range(steps):
            for lane in range(32):
                g, q = divmod(lane, 4)
                for r in range(8):
                    row = 16 * strip + g + (8 if r in (2, 3, 6, 7) else 0)
                    column = 16 * step + 2 * q + r % 2 + (8 if r >= 4 else 0)
                    nonzero[row, column] = ((strip * steps + step) * 32 + lane) * 8 + r
            lin = strip % 4 * words + strip // 4 * (steps // 2) + step // 2
            for row in range(16):
                for j in range(8):
                    lane = 4 * (row % 8) + 2 * (step % 2) + j // 4
                    bit = 16 * (row // 8) + 4 * (j % 4)
                    word = lin // 4 * 128 + lane * 4 + lin % 4
                    metadata[16 * strip + row, 8 * step + j] = 8 * word + bit // 4
    return nonzero, metadata


@pytest.mark.parametrize("side", Side)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_maps_are_those_of_the_fragment_loops(head_dim, side):
    fmt = BlockFormat(head_dim)
    rows, depth = fmt.rows(side), fmt.depth(side)
    nonzero, metadata = positions_by_loops(rows, depth)
    assert np.array_equal(nonzero_place(rows, depth), nonzero.reshape(-1))
    assert np.array_equal(metadata_place(rows, depth), metadata.reshape(-1))
    assert np.array_equal(np.sort(nonzero.reshape(-1)), np.arange(fmt.elements // 2))
    assert np.array_equal(np.sort(metadata.reshape(-1)), np.arange(2 * fmt.metadata_bytes))


def test_the_header_is_current():
    assert HEADER.read_text() == render_header()


def test_the_header_computes_the_same_places(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    source = tmp_path / "places.cc"
    source.write_text(
        """
        #include <cstdio>
        #include "hs/block_format.h"
        template <int D, hs::Side S> void print() {
          using O = hs::Operand<D, S>;
          for (int row = 0; row < O::kRows; row++)
            for (int cc = 0; cc < O::kDepth / 2; cc++) std::printf("%d ", O::nonzero(row, cc));
          for (int row = 0; row < O::kRows; row++)
            for (int c = 0; c < O::kDepth / 4; c++)
              std::printf("%d ", 8 * O::group_word(row, c) + O::group_shift(row, c) / 4);
          std::printf("\\n");
        }
        int main() {
          static_assert(hs::is_dense(3) && !hs::is_dense(-3) && !hs::is_dense(hs::kDummyRef));
          static_assert(hs::slot_of(3) == 3 && hs::slot_of(-3) == 3 && hs::slot_of(0) == 0);
        """
        + "".join(f"print<{d}, hs::Side::{s.name}>();" for d in HEAD_DIMS for s in Side)
        + "}"
    )
    include = HEADER.parents[1]
    program = tmp_path / "places"
    subprocess.run(
        [compiler, "-std=c++17", "-Wall", "-Werror", f"-I{include}", source, "-o", program],
        check=True,
    )
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split("\n")
    cases = [(d, side) for d in HEAD_DIMS for side in Side]
    for (head_dim, side), line in zip(cases, lines, strict=False):
        fmt = BlockFormat(head_dim)
        rows, depth = fmt.rows(side), fmt.depth(side)
        want = np.concatenate([nonzero_place(rows, depth), metadata_place(rows, depth)])
        assert np.array_equal(np.array(line.split(), np.int64), want), (head_dim, side)


def test_formats_are_values():
    assert BlockFormat(64, "float32") == BlockFormat(64, "float32")
    assert len({BlockFormat(64, "float32"), BlockFormat(64, "float32")}) == 1
    assert BlockFormat(64, "float32").torch_dtype is torch.float32
