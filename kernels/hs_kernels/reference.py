"""The method in plain torch: prune, compress, decompress and attend over mixed blocks.

It is the oracle of the device kernels and the backend of machines without a GPU. Everything
accumulates in fp32. Shapes use the legend of `block_format`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from hs_kernels.block_format import (
    DUMMY_METADATA_BYTE,
    GROUP,
    KEPT,
    BlockFormat,
    Side,
    metadata_place,
    nonzero_place,
    pair_of_keeps,
)

TILE = 128  # query rows that share a frontier, at absolute multiples
BATCH = 96  # blocks expanded at a time, so that their intermediate values stay in the cache
ROWS = 1024  # query rows whose scores are in memory at once, off the CPU
STEP = 16  # channels whose errors `compensate` collects before the later channels take them
TOP_BITS = -1 << 30  # of an int32


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Where each query row of a prefill batch finds its keys. All tensors int32.

    cu_seqlens    [R + 1]          rows of request r are cu_seqlens[r] .. cu_seqlens[r + 1]
    prefix_lens   [R]              tokens before the chunk, `a`; it may lie inside a page
    page_table    [R, max_pages]   page ids in sequence order
    tail_first    [R]              page index of tail_slots[:, :, 0]
    tail_slots    [R, 2, max_tail] dense slot of page tail_first + i, for each side; covers the
                                   pages from the lowest frontier to the one that holds a - 1
    tile_offsets  [R + 1]          tiles of request r are tile_offsets[r] .. tile_offsets[r + 1]
    frontiers     [num_tiles]      tile j of request r is the rows at absolute positions
                                   [128 (a / 128 + j), + 128) of the chunk [a, b)

    A row reads pages before its tile's frontier through refs, later positions before `a` from
    the tail slots and positions from `a` on from the chunk's own k and v; always causally.
    """

    cu_seqlens: Tensor
    prefix_lens: Tensor
    page_table: Tensor
    tail_first: Tensor
    tail_slots: Tensor
    tile_offsets: Tensor
    frontiers: Tensor


# --- pruning (paper, equations 2a to 2d) ---------------------------------------------------------


def keep_2_4(x: Tensor, side: Side) -> Tensor:
    """bool [..., 64, D]: the two largest |x| of every group of four, lower index first in a tie."""
    grouped = _grouped_magnitudes(x, side, GROUP)
    axis = _group_axis(side)
    a = grouped.unbind(axis)
    beaten = [torch.zeros_like(a[0], dtype=torch.uint8) for _ in range(GROUP)]
    for i in range(GROUP):
        for j in range(i + 1, GROUP):
            later_wins = a[j] > a[i]
            beaten[i] += later_wins
            beaten[j] += ~later_wins
    return torch.stack([b < KEPT for b in beaten], dim=axis).reshape(x.shape)


def keep_n_m(x: Tensor, side: Side, n: int, m: int) -> Tensor:
    """bool [..., 64, D]: the n largest |x| of every m, lower index first in a tie."""
    if not 0 <= n <= m or m < 1:
        raise ValueError(f"{n}:{m} is no sparsity pattern; 0 <= n <= m and m >= 1")
    grouped = _grouped_magnitudes(x, side, m)
    axis = _group_axis(side)
    order = torch.sort(grouped, dim=axis, descending=True, stable=True).indices
    keep = torch.zeros_like(grouped, dtype=torch.bool)
    keep.scatter_(axis, order.narrow(axis, 0, n), True)
    return keep.reshape(x.shape)


def block_losses(x: Tensor, side: Side, keep: Tensor | None = None) -> Tensor:
    """f32 [...]: the magnitude that each block of x [..., 64, D] loses under its element mask.

    `keep` is the mask, by default `keep_2_4`. Summed in fp64, so that a loss does not depend on
    the order in which blocks are batched.
    """
    mask = keep_2_4(x, side) if keep is None else keep
    dropped = x.abs().to(torch.float64).masked_fill(mask, 0.0)
    return dropped.sum(dim=(-2, -1)).to(torch.float32)


def select_blocks(losses: Tensor, count: int) -> Tensor:
    """bool [..., C]: the `count` blocks of lowest loss, ties to the lower index."""
    if not 0 <= count <= losses.shape[-1]:
        raise ValueError(f"count is {count} of {losses.shape[-1]} candidates")
    order = torch.sort(losses, dim=-1, stable=True).indices
    chosen = torch.zeros_like(losses, dtype=torch.bool)
    return chosen.scatter_(-1, order[..., :count], True)


def compensate(x: Tensor, weights: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Prunes K blocks x [N, H, 64, D] so that the products with typical queries change least.

    Gives keep (bool, as x) and values f32 (as x), where kept channels have taken over what pruned
    ones contributed. `weights` f32 [H, D] scale magnitudes in the choice. `factor` f32 [H, D, D] is
    upper triangular, U with U' U = inverse of E[q q']; the identity changes no value, and a scaled
    factor is the same. Rows (tokens) are independent and equal rows get equal answers.

    Groups of four channels go from first to last. In each, the two of largest |x| * weight among
    the values *as updated so far* are kept, the lower index winning a tie. With p the pruned pair,
    U_g the group's 4 x 4 diagonal block of U and S = U_g' U_g, the group's error is the row

        e = U_g[:, p] S[p, p]^-1 x[p]                                      (4 numbers)

    and x[c] -= e U[g, c] for every channel c from the group's first on. That makes the pruned pair
    zero, and is the exact minimum over what is still free: kept channels of the group and all
    later ones. Within `STEP` channels this happens group by group; later ones take the errors of
    the whole step at once, E [64, 16] times U[step, later], a product for tensor cores.
    """
    n, heads, tokens, channels = x.shape
    work = x.to(torch.float32, copy=True)
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
    solve = _pair_solutions(factor)  # [H, D / 4, 6, 4, 4]
    head = torch.arange(heads, device=x.device)[:, None]
    pairs = _pruned_pair(x.device)
    errors = work.new_empty((n, heads, tokens, STEP))
    for begin in range(0, channels, STEP):
        end = begin + STEP
        for first in range(begin, end, GROUP):
            own = slice(first, first + GROUP)
            kept = keep_2_4((work[..., own].abs() * weights[:, None, own]), Side.K)
            keep[..., own] = kept
            pair = pairs[_bits(kept)]
            error = errors[..., first - begin : first - begin + GROUP]
            chosen = solve[:, first // GROUP][head, pair]  # [N, H, 64, 4, 4]
            torch.sum(chosen * work[..., None, own], -1, out=error)
            for i in range(GROUP):
                row = factor[:, None, first + i, first:end]
                work[..., first:end] -= error[..., i : i + 1] * row
        if end < channels:
            # As a product for each block, so that a block's bits do not depend on its company.
            work[..., end:] -= torch.matmul(errors, factor[:, begin:end, end:])
    return keep, work


def _pair_solutions(factor: Tensor) -> Tensor:
    """f32 [H, D / 4, 6, 4, 4]: for each group and pruned pair, the matrix M with e = M x[group]."""
    heads, channels, _ = factor.shape
    groups = channels // GROUP
    blocks = factor.view(heads, groups, GROUP, groups, GROUP).diagonal(dim1=1, dim2=3)
    own = blocks.permute(0, 3, 1, 2).to(torch.float64)  # U_g, [H, D / 4, 4, 4]
    result = own.new_zeros((heads, groups, 6, GROUP, GROUP))
    for index, pair in enumerate(combinations(range(GROUP), KEPT)):
        columns = own[..., pair]  # [.., 4, 2]
        a, b = columns.unbind(-1)
        aa, ab, bb = ((x * y).sum(-1, keepdim=True) for x, y in ((a, a), (a, b), (b, b)))
        determinant = aa * bb - ab * ab  # of columns' columns
        first, second = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        result[:, :, index, :, pair[0]], result[:, :, index, :, pair[1]] = first, second
    return result.to(torch.float32)


def _bits(mask: Tensor) -> Tensor:
    """int64 [...]: bit c of each is mask[..., c]; mask is bool [..., 4]."""
    a, b, c, d = mask.to(torch.int64).unbind(-1)
    return a | b << 1 | c << 2 | d << 3


@cache
def _pruned_pair(device: torch.device) -> Tensor:
    """int64 [16]: bits of the kept positions -> number of the pruned pair in `combinations`."""
    table = torch.zeros(1 << GROUP, dtype=torch.int64, device=device)
    for index, pair in enumerate(combinations(range(GROUP), KEPT)):
        table[15 - sum(1 << c for c in pair)] = index
    return table


def _group_axis(side: Side) -> int:
    return -1 if side == Side.K else -2


def _grouped_magnitudes(x: Tensor, side: Side, group: int) -> Tensor:
    """|x| as integers: [..., 64, D / group, group] for K, [..., 64 / group, group, D] for V.

    The bits of |x| order as its values do and order NaN above infinity, so that no path of ours
    depends on how a comparison treats NaN.
    """
    integer, magnitude_bits = {
        2: (torch.int16, 0x7FFF),
        4: (torch.int32, 0x7FFFFFFF),
    }[x.dtype.itemsize]
    bits = x.contiguous().view(integer) & magnitude_bits
    axis = x.dim() - 1 if side == Side.K else x.dim() - 2
    if x.shape[axis] % group:
        raise ValueError(f"groups of {group} do not divide {x.shape[axis]}")
    grouped: Tensor = bits.unflatten(axis, (x.shape[axis] // group, group))
    return grouped


# --- packing ------------------------------------------------------------------------------------


def pack_blocks(
    x: Tensor,
    side: Side,
    fmt: BlockFormat,
    keep: Tensor | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """uint8 [N, sparse_bytes] of x [N, 64, D].

    `keep` (bool, as x) is the element mask, by default `keep_2_4`; at most two of a group. A group
    with fewer stores zeros for what is missing. `values` (as x) are stored instead of x.
    """
    _check_blocks(x, fmt)
    mask = keep_2_4(x, side) if keep is None else keep
    stored = (x if values is None else values).to(fmt.torch_dtype)
    if not fmt.packed:
        return stored.masked_fill(~mask, 0).contiguous().view(torch.uint8).flatten(1)
    n, rows, depth = x.shape[0], fmt.rows(side), fmt.depth(side)
    tables = _pack_tables(side, fmt, x.device)

    groups = (n, rows, depth // GROUP, GROUP)
    mask = (mask if side == Side.K else mask.transpose(1, 2)).reshape(groups)
    stored = (stored if side == Side.K else stored.transpose(1, 2)).reshape(groups)
    stored = stored.masked_fill(~mask, 0)

    bits = (mask.to(torch.uint8) << tables.positions).sum(-1)
    pair = tables.pairs[bits]
    if bool((pair < 0).any()):
        raise ValueError("a group of four keeps more than two positions")

    nonzeros = stored.gather(-1, pair).reshape(n, fmt.elements // 2)[:, tables.nonzero_order]
    nibbles = (pair[..., 0] | pair[..., 1] << 2).to(torch.uint8).reshape(n, fmt.elements // GROUP)
    halves = nibbles[:, tables.nibble_order].view(n, fmt.metadata_bytes, 2)
    metadata = halves[..., 0] | halves[..., 1] << 4
    return torch.cat([metadata, nonzeros.contiguous().view(torch.uint8)], dim=1)


def unpack_blocks(raw: Tensor, side: Side, fmt: BlockFormat) -> Tensor:
    """[N, 64, D] in fmt.torch_dtype of raw uint8 [N, sparse_bytes]; pruned positions are zero."""
    if raw.dtype != torch.uint8 or raw.dim() != 2 or raw.shape[1] != fmt.sparse_bytes:
        raise ValueError(f"raw is {raw.dtype} {list(raw.shape)}, not uint8 [N, {fmt.sparse_bytes}]")
    blocks = torch.cat([_expand(part.contiguous(), side, fmt) for part in raw.split(BATCH)])
    return blocks.transpose(1, 2) if side == Side.K else blocks


def _expand(raw: Tensor, side: Side, fmt: BlockFormat) -> Tensor:
    """[N, depth, rows] of contiguous raw uint8 [N, sparse_bytes]: each operand, transposed.

    K comes with channels before tokens and V with tokens before channels, so that both are
    written in whole rows, and both are the right operand of a product of few query rows.
    """
    n, rows, groups = raw.shape[0], fmt.rows(side), fmt.depth(side) // GROUP
    if not fmt.packed:
        blocks = raw.view(fmt.torch_dtype).view(n, fmt.block_size, fmt.head_dim)
        return blocks.transpose(1, 2) if side == Side.K else blocks
    tables = _unpack_tables(side, fmt, raw.device)
    # As floats, because only for these does torch gather columns with vector instructions.
    words = raw.view(torch.float32).index_select(1, tables.words).view(torch.int32)
    values, metadata = words.split((tables.value_words, groups * rows), dim=1)
    if fmt.itemsize == 4:
        integer = torch.int32
        first, second = values.chunk(2, dim=1)
    else:
        integer = torch.int16
        first, second = values.view(integer).unflatten(1, (groups * rows, KEPT)).unbind(-1)
    # The two bits of a kept position go to the top of an integer as wide as an element. As a
    # shift, 0 there keeps the value, and anything else is negative or out of range: zero.
    first_at = _narrow(metadata << tables.first_up & TOP_BITS, integer)
    second_at = _narrow(metadata << tables.second_up & TOP_BITS, integer)
    first, second, first_at, second_at = (
        x.view(n, groups, rows) for x in (first, second, first_at, second_at)
    )
    out = torch.empty((n, groups, GROUP, rows), dtype=integer, device=raw.device)
    p0, p1, p2, p3 = out.unbind(2)
    top = 8 * fmt.itemsize - 2
    one, two, three = 1 << top, -2 << top, -1 << top
    torch.bitwise_left_shift(first, first_at, out=p0)
    torch.bitwise_or(first << (first_at ^ one), second << (second_at ^ one), out=p1)
    torch.bitwise_or(first << (first_at ^ two), second << (second_at ^ two), out=p2)
    torch.bitwise_left_shift(second, second_at ^ three, out=p3)
    return out.view(fmt.torch_dtype).view(n, groups * GROUP, rows)


def _narrow(top_bits: Tensor, integer: torch.dtype) -> Tensor:
    """The high half of int32 words, if `integer` is int16."""
    return top_bits if integer == torch.int32 else (top_bits >> 16).to(integer)


@dataclass(frozen=True, slots=True)
class _PackTables:
    nonzero_order: Tensor  # stored element -> value, int64
    nibble_order: Tensor  # stored nibble -> group, int64
    pairs: Tensor  # bits of a mask -> two positions, int64
    positions: Tensor


@dataclass(frozen=True, slots=True)
class _UnpackTables:
    words: Tensor  # columns of 4 bytes: the values, then the metadata word of each group, int64
    value_words: int
    first_up: Tensor  # int32 [groups * rows]: left shift that brings a group's first position up
    second_up: Tensor


@cache
def _pack_tables(side: Side, fmt: BlockFormat, device: torch.device) -> _PackTables:
    rows, depth = fmt.rows(side), fmt.depth(side)
    return _PackTables(
        nonzero_order=torch.tensor(nonzero_place(rows, depth), device=device).argsort(),
        nibble_order=torch.tensor(metadata_place(rows, depth), device=device).argsort(),
        pairs=torch.tensor(pair_of_keeps(), device=device),
        positions=torch.arange(GROUP, dtype=torch.uint8, device=device),
    )


@cache
def _unpack_tables(side: Side, fmt: BlockFormat, device: torch.device) -> _UnpackTables:
    rows, depth = fmt.rows(side), fmt.depth(side)
    pairs = nonzero_place(rows, depth).reshape(rows, depth // GROUP, KEPT).transpose(2, 1, 0)
    values = pairs if fmt.itemsize == 4 else pairs[0] // KEPT
    nibbles = metadata_place(rows, depth).reshape(rows, depth // GROUP).T
    words = np.concatenate([fmt.metadata_bytes // 4 + values.ravel(), nibbles.ravel() // 8])
    first_up = torch.tensor(30 - nibbles.ravel() % 8 * 4, dtype=torch.int32, device=device)
    return _UnpackTables(
        words=torch.tensor(words, device=device),
        value_words=values.size,
        first_up=first_up,
        second_up=first_up - 2,
    )


def _check_blocks(x: Tensor, fmt: BlockFormat) -> None:
    if x.dim() != 3 or tuple(x.shape[1:]) != (fmt.block_size, fmt.head_dim):
        raise ValueError(f"blocks are {list(x.shape)}, not [N, {fmt.block_size}, {fmt.head_dim}]")


# --- the arena ----------------------------------------------------------------------------------


def dense_slots(arena: Tensor, fmt: BlockFormat, heads: int) -> Tensor:
    """View [slots, heads, 64, D] of the arena uint8 [bytes]; slot 0 is inside superblock 0."""
    slots = arena.numel() // (heads * fmt.dense_bytes)
    used = arena[: slots * heads * fmt.dense_bytes].view(fmt.torch_dtype)
    return used.view(slots, heads, fmt.block_size, fmt.head_dim)


def sparse_slots(arena: Tensor, fmt: BlockFormat, heads: int) -> Tensor:
    """View uint8 [slots, heads, sparse_bytes] of the same bytes."""
    slots = arena.numel() // (heads * fmt.sparse_bytes)
    return arena[: slots * heads * fmt.sparse_bytes].view(slots, heads, fmt.sparse_bytes)


def write_dummy(arena: Tensor, fmt: BlockFormat, heads: int) -> None:
    """Fill what ref 0 reads, sparse slot 0, with zeros under valid metadata."""
    dummy = sparse_slots(arena, fmt, heads)[0]
    dummy[:, : fmt.metadata_bytes] = DUMMY_METADATA_BYTE
    dummy[:, fmt.metadata_bytes :] = 0


def store_blocks(
    blocks: Tensor,
    side: Side,
    arena: Tensor,
    refs: Tensor,
    fmt: BlockFormat,
    keep: Tensor | None = None,
    weights: Tensor | None = None,
    means: Tensor | None = None,
    factor: Tensor | None = None,
    values: Tensor | None = None,
    token_weights: Tensor | None = None,
) -> None:
    """Write blocks [N, Hkv, 64, D] as their refs int32 [N, Hkv] say; see `ops.store_blocks`."""
    heads = blocks.shape[1]
    n, head = (refs > 0).nonzero(as_tuple=True)
    dense_slots(arena, fmt, heads)[refs[n, head].long(), head] = blocks[n, head]
    if factor is not None and weights is not None:
        keep, values = compensate(blocks, weights, factor)
        weights = None
    n, head = (refs < 0).nonzero(as_tuple=True)
    if not n.numel():
        return
    slots, chosen = -refs[n, head].long(), blocks[n, head]
    if means is not None:
        mean = chosen.to(torch.float32).mean(1).to(chosen.dtype)
        means[slots, head] = mean
        chosen = (chosen.to(torch.float32) - mean[:, None].to(torch.float32)).to(chosen.dtype)
    mask, stored = (None if x is None else x[n, head] for x in (keep, values))
    if weights is not None:
        scaled = chosen.abs().to(torch.float32) * weights[head][:, None]
        mask = keep_2_4(scaled, side)
    if token_weights is not None:
        scaled = chosen.abs().to(torch.float32) * token_weights[n, head][..., None]
        mask = keep_2_4(scaled, side)
    raw = pack_blocks(chosen, side, fmt, mask, stored)
    sparse_slots(arena, fmt, heads)[slots, head] = raw


def load_pages(
    arena: Tensor, refs: Tensor, side: Side, fmt: BlockFormat, means: Tensor | None = None
) -> Tensor:
    """[heads, n * 64, D] of the pages of refs int32 [n, heads], in order.

    In fmt.torch_dtype as stored. With `means` [sparse slots, heads, D] of V each sparse block has
    its mean added, and the result is f32, since the sum is not rounded.
    """
    n, heads = refs.shape
    shape = (heads, n * fmt.block_size, fmt.head_dim)
    if bool((refs > 0).all()):
        pages = dense_slots(arena, fmt, heads).flatten(0, 1)[_block_index(refs)]
        return (pages if means is None else pages.to(torch.float32)).view(shape)
    pages = torch.empty(
        (heads * n, fmt.block_size, fmt.head_dim), dtype=fmt.torch_dtype, device=arena.device
    )
    for at, blocks in _load_blocks(arena, refs, side, fmt):
        pages[at] = blocks
    if means is not None:
        pages = pages.to(torch.float32) + _load_means(means, refs)[:, None]
    return pages.view(shape)


def _load_means(means: Tensor, refs: Tensor) -> Tensor:
    """f32 [heads * n, D]: the mean of each V block of refs int32 [n, heads], head by head; zero for
    a dense one. The dummy's is zero, too, because nothing is stored in sparse slot 0."""
    of_sparse = (refs <= 0).T.reshape(-1, 1)
    slots = (-refs).clamp(min=0).T.reshape(-1).long()
    head = torch.arange(refs.shape[1], device=refs.device).repeat_interleave(refs.shape[0])
    return torch.where(of_sparse, means[slots, head].to(torch.float32), 0.0)


def _block_index(refs: Tensor) -> Tensor:
    """int64 [heads * n]: which block of its kind each ref int32 [n, heads] names, head by head."""
    heads = refs.shape[1]
    head = torch.arange(heads, device=refs.device)
    return (refs.abs().to(torch.int64) * heads + head).T.reshape(-1)


def _load_blocks(
    arena: Tensor, refs: Tensor, side: Side, fmt: BlockFormat
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (at int64 [m], blocks [m, 64, D]), each block of refs int32 [n, heads] once.

    `at` is head * n + page. Blocks come by kind, at most `BATCH` at a time, and are copies.
    """
    heads = refs.shape[1]
    index, is_dense = _block_index(refs), (refs > 0).T.reshape(-1)
    dense = dense_slots(arena, fmt, heads).flatten(0, 1)
    for at in is_dense.nonzero()[:, 0].split(BATCH):
        if at.numel():
            yield at, dense.index_select(0, index[at])
    sparse = sparse_slots(arena, fmt, heads).flatten(0, 1)
    for at in (~is_dense).nonzero()[:, 0].split(BATCH):
        if at.numel():
            blocks = _expand(sparse.index_select(0, index[at]), side, fmt)
            yield at, blocks.transpose(1, 2) if side == Side.K else blocks


# --- attention ----------------------------------------------------------------------------------


def decode_attention(
    q: Tensor,
    arena: Tensor,
    refs: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    fmt: BlockFormat,
    num_splits: int = 1,
    means: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One query token for each request over its pages, in `num_splits` partials that are merged.

    q [R, Hq, D], refs int32 [2, P, Hkv], page_table int32 [R, max_pages], seq_lens int32 [R],
    means [sparse slots, Hkv, D] of V blocks. Gives out [R, Hq, D] in q's dtype and lse f32
    [R, Hq]; an empty sequence gives 0 and -inf.
    """
    requests, q_heads, head_dim = q.shape
    heads = refs.shape[2]
    out = torch.zeros_like(q)
    lse = torch.full((requests, q_heads), -torch.inf, dtype=torch.float32, device=q.device)
    rows = q.view(requests, heads, q_heads // heads, head_dim).to(torch.float32) * scale
    for r, length in enumerate(seq_lens.tolist()):
        if length == 0:
            continue
        num_pages = -(-length // fmt.block_size)
        share = -(-num_pages // num_splits)
        pages = page_table[r, :num_pages].to(torch.int64)
        parts = [
            _decode_split(
                rows[r], arena, refs[:, split], length - i * share * fmt.block_size, fmt, means
            )
            for i, split in enumerate(pages.split(share))
        ]
        o, z = parts[0]
        if len(parts) > 1:
            o, z = merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
        out[r] = o.view(q_heads, head_dim)
        lse[r] = z.view(q_heads)
    return out, lse


def _decode_split(
    q: Tensor, arena: Tensor, refs: Tensor, length: int, fmt: BlockFormat, means: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out f32 [Hkv, G, D] and lse f32 [Hkv, G] of scaled q [Hkv, G, D] over pages [2, n, Hkv].

    Positions from `length` on are not read. Blocks are multiplied where they come, kind by kind;
    their order matters to the softmax only.
    """
    heads, group = q.shape[:2]
    n, size = refs.shape[1], fmt.block_size
    scores = q.new_empty((heads * n, group, size))
    for at, k in _load_blocks(arena, refs[Side.K], Side.K, fmt):
        scores[at] = torch.bmm(q[at // n], k.to(torch.float32).transpose(1, 2))
    scores = scores.view(heads, n, group, size).transpose(1, 2).reshape(heads, group, n * size)
    scores[..., length:] = -torch.inf
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp_().view(heads, group, n, size)
    weights = weights.transpose(1, 2).reshape(heads * n, group, size)
    out = q.new_zeros(q.shape)
    for at, v in _load_blocks(arena, refs[Side.V], Side.V, fmt):
        if length < n * size:
            # Past the end of a sequence a dense page holds anything, NaN included.
            v[at % n == n - 1, length - (n - 1) * size :] = 0
        out.index_add_(0, at // n, torch.bmm(weights[at], v.to(torch.float32)))
    if means is not None:  # (sum of a block's weights) x (its mean)
        mean = _load_means(means, refs[Side.V]).view(heads, n, -1)
        mass = weights.sum(-1).view(heads, n, group)
        out += torch.bmm(mass.transpose(1, 2), mean)
    return out, lse


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arena: Tensor,
    refs: Tensor,
    plan: PrefillPlan,
    scale: float,
    fmt: BlockFormat,
    means: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a batch of chunks over mixed pages; see `PrefillPlan`.

    q [T, Hq, D], k and v [T, Hkv, D] of the chunks, refs int32 [2, P, Hkv], means
    [sparse slots, Hkv, D] of V blocks. Gives out [T, Hq, D] in q's dtype and lse f32 [T, Hq].
    """
    tokens, q_heads, head_dim = q.shape
    heads = k.shape[1]
    out = torch.zeros_like(q)
    lse = torch.full((tokens, q_heads), -torch.inf, dtype=torch.float32, device=q.device)
    begins, tiles = plan.cu_seqlens.tolist(), plan.tile_offsets.tolist()
    all_frontiers, tail_first = plan.frontiers.tolist(), plan.tail_first.tolist()
    for r, a in enumerate(plan.prefix_lens.tolist()):
        begin, end = begins[r], begins[r + 1]
        if begin == end:
            continue
        b = a + end - begin
        frontiers = [max(0, page) for page in all_frontiers[tiles[r] : tiles[r + 1]]]
        if len(frontiers) != -(-b // TILE) - a // TILE:
            raise ValueError(f"request {r}: {len(frontiers)} frontiers for rows [{a}, {b})")
        keys = [
            _KeySource(
                stored=load_pages(
                    arena,
                    refs[side][plan.page_table[r, : max(frontiers)]],
                    side,
                    fmt,
                    means if side == Side.V else None,
                ).to(torch.float32),
                tail=_load_tail(
                    arena, plan.tail_slots[r, side], tail_first[r], min(frontiers), a, heads, fmt
                ),
                tail_start=min(frontiers) * fmt.block_size,
                own=x[begin:end].transpose(0, 1).to(torch.float32),
                own_start=a,
            )
            for side, x in ((Side.K, k), (Side.V, v))
        ]
        rows = q[begin:end].reshape(b - a, heads, q_heads // heads, head_dim)
        rows = rows.permute(1, 2, 0, 3).to(torch.float32) * scale
        for lo, hi, frontier in _runs(a, b, frontiers):
            k_seen, v_seen = (source.until(hi, frontier * fmt.block_size) for source in keys)
            o, z = _attend_causally(rows[:, :, lo - a : hi - a], k_seen, v_seen)
            at = slice(begin + lo - a, begin + hi - a)
            out[at] = o.permute(2, 0, 1, 3).reshape(hi - lo, q_heads, head_dim)
            lse[at] = z.permute(2, 0, 1).reshape(hi - lo, q_heads)
    return out, lse


@dataclass(frozen=True, slots=True)
class _KeySource:
    """One side of a request's keys, f32 [Hkv, n, D] each: what refs say of the pages before the
    highest frontier, the dense tail from `tail_start` to `own_start`, and the chunk's own."""

    stored: Tensor
    tail: Tensor
    tail_start: int
    own: Tensor
    own_start: int

    def until(self, end: int, frontier: int) -> Tensor:
        """[Hkv, end, D]: positions before `frontier` as stored, the others dense."""
        stored = self.stored[:, : min(frontier, end)]
        tail = self.tail[:, frontier - self.tail_start :]
        own = self.own[:, max(0, frontier - self.own_start) : max(0, end - self.own_start)]
        keys = torch.cat([stored, tail, own], dim=1)
        if keys.shape[1] != end:
            raise ValueError(f"the plan covers {keys.shape[1]} of {end} positions")
        return keys


def _load_tail(
    arena: Tensor, slots: Tensor, first: int, begin: int, end: int, heads: int, fmt: BlockFormat
) -> Tensor:
    """f32 [Hkv, n, D]: from page `begin` to position `end`; slots[i] holds page `first` + i."""
    tokens = max(0, end - begin * fmt.block_size)
    pages = -(-tokens // fmt.block_size)
    used = slots[begin - first : begin - first + pages] if pages else slots[:0]
    blocks = dense_slots(arena, fmt, heads)[used.to(torch.int64)].transpose(0, 1)
    return blocks.reshape(heads, pages * fmt.block_size, fmt.head_dim)[:, :tokens].float()


def _runs(a: int, b: int, frontiers: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (lo, hi, frontier): the rows [a, b) cut where the frontier of their tiles changes."""
    lo = a
    for j, frontier in enumerate(frontiers):
        hi = min(b, (a // TILE + j + 1) * TILE)
        if j + 1 == len(frontiers) or frontiers[j + 1] != frontier:
            yield lo, hi, frontier
            lo = hi


def _attend_causally(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out f32 [Hkv, G, M, D] and lse f32 [Hkv, G, M] of scaled q [Hkv, G, M, D] over k, v
    [Hkv, N, D], whose last M positions are those of the rows."""
    group, rows = q.shape[1:3]
    k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))
    before = k.shape[2] - rows
    out, lse = _attend(q, k[:, :, before:], v[:, :, before:], causal=True)
    if before:
        o, z = _attend(q, k[:, :, :before], v[:, :, :before], causal=False)
        out, lse = merge_states(torch.stack([out, o]), torch.stack([lse, z]))
    return out, lse


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """out f32 [Hkv, G, M, D] and lse f32 [Hkv, G, M] of scaled q over k, v [Hkv, G, N, D]."""
    if q.device.type == "cpu":
        # torch's own blocked softmax: the scores of a long prefix are never whole in memory.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=causal, scale=1.0
        )
        return out, lse
    return attend_by_definition(q, k, v, causal)


def attend_by_definition(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """`_attend` in plain operations, for other devices."""
    outs, lses = [], []
    for start in range(0, q.shape[2], ROWS):
        scores = torch.matmul(q[:, :, start : start + ROWS], k.transpose(-2, -1))
        if causal:
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
            scores.masked_fill_(future.triu(1 + start), -torch.inf)
        lses.append(scores.logsumexp(dim=-1))
        outs.append(torch.matmul(torch.exp(scores - lses[-1][..., None]), v))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Join partials outs [S, ..., D] and lses [S, ...] in fp32; one of lse -inf counts nothing."""
    top = lses.amax(dim=0)
    finite_top = torch.where(top == -torch.inf, torch.zeros_like(top), top)
    weights = torch.exp(lses - finite_top)
    total = weights.sum(dim=0)
    weighted = torch.where(weights[..., None] > 0, outs * weights[..., None], 0.0).sum(dim=0)
    out = torch.where(total[..., None] > 0, weighted / total[..., None], 0.0)
    return out, finite_top + torch.log(total)
