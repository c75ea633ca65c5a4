"""The storage format of one K or V block: sizes, kinds, refs, and where every 2:4 value lies.

This module is the one source of truth. `reference.py` packs by its tables, and the device code
includes the header that `render_header` writes.

Legend of one-letter dimensions, used in every shape of this package: `R` requests, `T` query
tokens, `P` page ids, `Hq`/`Hkv` query and kv heads, `D` channels of a head, `N` blocks.

A block is `block_size` = 64 tokens of one (layer, side, kv head). Stored dense it is row-major
[64][D]. Stored sparse it is the left operand of its own GEMM, a matrix of `rows` x `depth` that is
2:4 along `depth`:

    K   S^T = K Q^T      rows = 64 tokens     depth = D channels
    V   O^T = V^T P^T    rows = D channels    depth = 64 tokens

The bytes are metadata first, then nonzeros, both in the order in which an MMA fragment wants them:
`mma.sp.m16n8k32` and `wgmma.sp.m64nNk32` agree on it, so one set of bytes serves decode and
prefill without a re-layout. With strip i = row / 16, k-step s = depth index / 32, g = lane / 4,
q = lane % 4 and `cc` the column in the compressed row (two values for each group of four):

    nonzero element   ((i * S + s) * 32 + lane) * 8 + r     S = depth / 32, r = 0..7
        holds row 16 i + g + 8 ((r / 2) % 2), cc = 16 s + 2 q + r % 2 + 8 (r / 4)
    metadata word     (lin / 4) * 128 + lane * 4 + lin % 4
        lin = (i % 4) * E + (i / 4) * (S / 2) + s / 2       E = D / 64 words for each lane and warp
    nibble of group j (0..7) of k-step s in row: lane = 4 (row % 8) + 2 (s % 2) + j / 4, bits
        16 ((row / 8) % 2) + 4 (j % 4), low two bits the first kept index, high two the second

Lanes 4g and 4g + 1 carry even k-steps (sparsity selector 0), 4g + 2 and 4g + 3 odd ones
(selector 1), so no word is wasted. Elements of 32 bits keep the same order with 4-byte elements.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
import torch

HEAD_DIMS = (64, 128, 256)
BLOCK_SIZE = 64
GROUP = 4  # elements of a 2:4 group
KEPT = 2  # of them stored
STRIP = 16  # rows of one MMA instruction
STEP = 32  # depth of one sparse MMA instruction, 16-bit elements
LANES = 32
DUMMY_METADATA_BYTE = 0x44  # two nibbles (0, 1): metadata of zeros would be an undefined pair
DUMMY_REF = 0

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


class Side(IntEnum):
    """The two halves of a cache; also the first index of `refs` [2, P, Hkv]."""

    K = 0
    V = 1


class BlockKind(IntEnum):
    """How one block is stored.

    A kind with 8-bit nonzeros would be number 2: half the nonzero bytes, the same metadata size,
    and the nibble order of the k64 instructions.
    """

    DENSE = 0
    SPARSE_2_4 = 1


def dense_ref(slot: int) -> int:
    """The ref of a dense slot. The sign carries the kind, so slots start at 1."""
    return slot


def sparse_ref(slot: int) -> int:
    """The ref of a sparse slot. 0 is left over: the dummy, read as sparse slot 0."""
    return -slot


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One K or V block of one kv head: `block_size` tokens by `head_dim` channels of `dtype`.

    K is 2:4 along channels, V along tokens: each is the sparse operand of its own GEMM, and
    2:4 must run along that GEMM's reduction axis.

    `packed=False` is for experiments with masks that are not 2:4: a "sparse" block then holds all
    its elements, zeros included, and saves nothing. The reference reads it, no kernel does.
    """

    head_dim: int
    dtype: str = "bfloat16"
    block_size: int = BLOCK_SIZE
    packed: bool = True

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim is {self.head_dim}; the block layout knows {HEAD_DIMS}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; the block layout knows {sorted(_DTYPES)}")
        if self.block_size != BLOCK_SIZE:
            raise ValueError(f"block_size is {self.block_size}; the block layout is {BLOCK_SIZE}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return _DTYPES[self.dtype]

    @property
    def itemsize(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def elements(self) -> int:
        return self.block_size * self.head_dim

    @property
    def dense_bytes(self) -> int:
        return self.elements * self.itemsize

    @property
    def metadata_bytes(self) -> int:
        """4 bits for each group of 4."""
        return self.elements // GROUP // 2 if self.packed else 0

    @property
    def nonzero_bytes(self) -> int:
        return self.dense_bytes * KEPT // GROUP if self.packed else self.dense_bytes

    @property
    def sparse_bytes(self) -> int:
        return self.metadata_bytes + self.nonzero_bytes

    @property
    def mean_bytes(self) -> int:
        """One mean for each channel, beside a V block that is stored without it."""
        return self.head_dim * self.itemsize

    @property
    def superblock_bytes(self) -> int:
        """For one kv head: the least size that is a whole number of blocks of either kind."""
        return math.lcm(self.dense_bytes, self.sparse_bytes)

    @property
    def dense_per_superblock(self) -> int:
        return self.superblock_bytes // self.dense_bytes

    @property
    def sparse_per_superblock(self) -> int:
        return self.superblock_bytes // self.sparse_bytes

    def block_bytes(self, kind: BlockKind) -> int:
        return {BlockKind.DENSE: self.dense_bytes, BlockKind.SPARSE_2_4: self.sparse_bytes}[kind]

    def rows(self, side: Side) -> int:
        """Rows of the sparse operand: tokens of K, channels of V."""
        return self.block_size if side == Side.K else self.head_dim

    def depth(self, side: Side) -> int:
        """Its reduction axis, which the groups of four run along: channels of K, tokens of V."""
        return self.head_dim if side == Side.K else self.block_size


@cache
def nonzero_place(rows: int, depth: int) -> np.ndarray:
    """int64 [rows * depth / 2]: value row * (depth / 2) + cc -> its stored element."""
    row, column = np.unravel_index(np.arange(rows * depth // 2), (rows, depth // 2))
    r, c = row % STRIP, column % (STEP // 2)
    lane = 4 * (r % 8) + c % 8 // 2
    fragment = (row // STRIP * (depth // STEP) + column // (STEP // 2)) * LANES + lane
    return _constant(8 * fragment + c % 2 + 2 * (r // 8) + 4 * (c // 8))


@cache
def metadata_place(rows: int, depth: int) -> np.ndarray:
    """int64 [rows * depth / 4]: group row * (depth / 4) + c -> its nibble in the metadata bytes.

    Nibble 2 n is the low half of byte n, nibble 2 n + 1 the high half (words are little-endian).
    """
    row, group = np.unravel_index(np.arange(rows * depth // GROUP), (rows, depth // GROUP))
    step, j = group // 8, group % 8
    strip = row // STRIP
    words = rows * depth // (BLOCK_SIZE * BLOCK_SIZE)
    lane = 4 * (row % 8) + 2 * (step % 2) + j // 4
    lin = (strip % 4) * words + (strip // 4) * (depth // STEP // 2) + step // 2
    word = (lin // 4) * 128 + lane * 4 + lin % 4
    return _constant(8 * word + 4 * ((row // 8) % 2) + j % 4)


@cache
def pair_of_keeps() -> np.ndarray:
    """int64 [16, 2]: bits of the kept positions of a group -> the ordered pair of indices stored.

    A group with fewer than two kept positions is filled up with the lowest free one, because
    every nibble must name an ordered pair. Groups with more than two have no entry (-1).
    """
    table = np.full((1 << GROUP, KEPT), -1)
    for bits in range(1 << GROUP):
        kept = [p for p in range(GROUP) if bits >> p & 1]
        free = [p for p in range(GROUP) if not bits >> p & 1]
        if len(kept) <= KEPT:
            table[bits] = sorted((kept + free)[:KEPT])
    return _constant(table)


def nibble(first: int, second: int) -> int:
    """The metadata of a group that keeps positions `first` < `second`."""
    return first | second << 2


def _constant(table: np.ndarray) -> np.ndarray:
    table = np.ascontiguousarray(table, dtype=np.int64)
    table.setflags(write=False)
    return table


_HEADER = """\
// Generated from kernels/hs_kernels/block_format.py, which explains it; do not edit.
// To write it anew, from the root of the repository (PYTHONPATH=kernels):
//   python -c "import hs_kernels.block_format as f; print(f.render_header(), end='')" > THIS
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HS_HOST_DEVICE __host__ __device__
#else
#define HS_HOST_DEVICE
#endif

namespace hs {

enum class Side : int { @sides@ };
enum class BlockKind : int { @kinds@ };

inline constexpr int kBlockSize = @BLOCK_SIZE@;
inline constexpr int kGroup = @GROUP@;  // elements of a 2:4 group
inline constexpr int kKept = @KEPT@;
inline constexpr int kStrip = @STRIP@;  // rows of one MMA instruction
inline constexpr int kStep = @STEP@;   // depth of one sparse MMA instruction
inline constexpr int kLanes = @LANES@;
inline constexpr std::uint32_t kDummyMetadata = @dummy@u;  // what ref 0 reads
inline constexpr std::int32_t kDummyRef = @DUMMY_REF@;

// The sign of a ref carries the kind; 0, the dummy, is read as sparse slot 0.
HS_HOST_DEVICE constexpr bool is_dense(std::int32_t ref) { return ref > 0; }
HS_HOST_DEVICE constexpr std::int32_t slot_of(std::int32_t ref) { return ref > 0 ? ref : -ref; }

HS_HOST_DEVICE constexpr std::int64_t gcd(std::int64_t a, std::int64_t b) {
  return b == 0 ? a : gcd(b, a % b);
}

// One K or V block of one kv head, of elements of ItemSize bytes.
template <int HeadDim, int ItemSize>
struct BlockFormat {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kItemSize = ItemSize;
  static constexpr int kElements = kBlockSize * HeadDim;
  static constexpr int kDenseBytes = kElements * ItemSize;
  static constexpr int kMetadataBytes = kElements / kGroup / 2;
  static constexpr int kNonzeroBytes = kElements * kKept / kGroup * ItemSize;
  static constexpr int kSparseBytes = kMetadataBytes + kNonzeroBytes;
  static constexpr std::int64_t kSuperblockBytes =
      std::int64_t{kDenseBytes} / gcd(kDenseBytes, kSparseBytes) * kSparseBytes;
  static constexpr int kDensePerSuperblock = static_cast<int>(kSuperblockBytes / kDenseBytes);
  static constexpr int kSparsePerSuperblock = static_cast<int>(kSuperblockBytes / kSparseBytes);
};

// The sparse operand of a block: Rows x Depth, 2:4 along Depth.
template <int HeadDim, Side S>
struct Operand {
  static constexpr int kRows = S == Side::K ? kBlockSize : HeadDim;
  static constexpr int kDepth = S == Side::K ? HeadDim : kBlockSize;
  static constexpr int kStrips = kRows / kStrip;
  static constexpr int kSteps = kDepth / kStep;
  static constexpr int kLaneWords = HeadDim / kBlockSize;  // metadata words of a lane and warp

  // Nonzero elements of one strip and step: 8 for each lane, consecutive.
  HS_HOST_DEVICE static constexpr int fragment(int strip, int step, int lane) {
    return ((strip * kSteps + step) * kLanes + lane) * 8;
  }
  // Nonzero element of compressed column cc (0 .. kDepth / 2) of a row.
  HS_HOST_DEVICE static constexpr int nonzero(int row, int cc) {
    const int r = row % kStrip, c = cc % (kStep / 2);
    const int lane = 4 * (r % 8) + c % 8 / 2;
    return fragment(row / kStrip, cc / (kStep / 2), lane) + c % 2 + 2 * (r / 8) + 4 * (c / 8);
  }
  // Metadata word of a lane, for steps 2 * (step / 2) and 2 * (step / 2) + 1 of a strip; the
  // sparsity selector of the instruction is step % 2.
  HS_HOST_DEVICE static constexpr int word(int strip, int step, int lane) {
    const int lin = strip % 4 * kLaneWords + strip / 4 * (kSteps / 2) + step / 2;
    return lin / 4 * 128 + lane * 4 + lin % 4;
  }
  // Metadata word and lowest bit of a group (0 .. kDepth / 4) of a row.
  HS_HOST_DEVICE static constexpr int group_word(int row, int group) {
    const int step = group / 8, j = group % 8;
    return word(row / kStrip, step, 4 * (row % 8) + 2 * (step % 2) + j / 4);
  }
  HS_HOST_DEVICE static constexpr int group_shift(int row, int group) {
    return 16 * (row / 8 % 2) + 4 * (group % 4);
  }
};

@asserts@

}  // namespace hs
"""


def render_header() -> str:
    """The text of csrc/include/hs/block_format.h; a test compares the two."""
    asserts = []
    for head_dim in HEAD_DIMS:
        for dtype in ("bfloat16", "float32"):
            fmt = BlockFormat(head_dim, dtype)
            name = f"BlockFormat<{head_dim}, {fmt.itemsize}>"
            asserts += [
                f"static_assert({name}::kDenseBytes == {fmt.dense_bytes});",
                f"static_assert({name}::kSparseBytes == {fmt.sparse_bytes});",
                f"static_assert({name}::kSuperblockBytes == {fmt.superblock_bytes});",
            ]
    values = {
        "sides": ", ".join(f"{side.name} = {side.value}" for side in Side),
        "kinds": ", ".join(f"{kind.name} = {kind.value}" for kind in BlockKind),
        "dummy": f"0x{DUMMY_METADATA_BYTE:02X}" + 3 * f"{DUMMY_METADATA_BYTE:02X}",
        "asserts": "\n".join(asserts),
    }
    for name in ("BLOCK_SIZE", "GROUP", "KEPT", "STRIP", "STEP", "LANES", "DUMMY_REF"):
        values[name] = str(globals()[name])
    text = _HEADER
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text
