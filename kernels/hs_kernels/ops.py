"""The only door to the kernels: checks shapes, then dispatches on the device of the arena.

CPU tensors go to `reference`, CUDA tensors to the custom ops of `cuda`, which compile csrc on first
use. Nothing falls back silently: a device without kernels is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hs_kernels import reference
from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import PrefillPlan

if TYPE_CHECKING:
    from hs_kernels.cuda import DecodeWorkspace

__all__ = [
    "PrefillPlan",
    "assign_refs",
    "block_losses",
    "compress_blocks",
    "copy_slots",
    "decode_attention",
    "decode_workspace",
    "expand_blocks",
    "merge_states",
    "permute_channels",
    "plan_decode",
    "prefill_attention",
    "rank_blocks",
    "store_blocks",
    "store_pages",
    "store_tokens",
    "token_weights",
    "update_refs",
]


_CENTERED = "block means are of V, and a given mask comes with centered values"


def compress_blocks(
    blocks: Tensor,
    side: Side,
    arena: Tensor,
    slots: Tensor,
    fmt: BlockFormat,
    keep: Tensor | None = None,
    values: Tensor | None = None,
    weights: Tensor | None = None,
    means: Tensor | None = None,
    factor: Tensor | None = None,
    token_weights: Tensor | None = None,
) -> None:
    """Prune blocks [N, Hkv, 64, D] and pack them into sparse slots of the arena.

    `slots` int32 [N, Hkv] are sparse slot numbers above 0; every (slot, head) may appear once. The
    rest is as in `store_blocks`.
    """
    store_blocks(
        blocks, side, arena, -slots, fmt, keep, weights, means, factor, values, token_weights
    )


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
    """Write blocks [N, Hkv, 64, D] as their refs int32 [N, Hkv] say.

    A negative ref: pruned and packed. A positive one: dense. 0: left out. Blocks may be any view
    with adjacent channels, so that a chunk's own K and V need no copy. Mutates the arena.

    `keep` (bool, as blocks) or `weights` f32 [Hkv, D], which scale magnitudes by channel, replace
    the choice by magnitude; `values` (as blocks) are stored in sparse blocks in place of the
    blocks. With `means` [sparse slots, Hkv, D] in the blocks' dtype, the mean over the tokens
    of each channel of a sparse V block goes there and is subtracted before pruning. `factor` f32
    [Hkv, D, D], with `weights`, makes the kept values of K take over what is pruned: see
    `reference.compensate`. `token_weights` f32 [N, Hkv, 64] scale magnitudes of V by token.

    Blocks of L layers, end to end and equally many of each, take `weights` [L, Hkv, D] and `factor`
    [L, Hkv, D, D]; their refs are of one arena that holds all layers.
    """
    _check_blocks(blocks, refs, fmt, "refs")
    _check_rules(blocks, side, keep, weights, token_weights)
    _check(means is None or (side == Side.V and keep is None), _CENTERED)
    if values is not None and keep is None:
        keep = reference.keep_2_4(blocks, side)  # of the blocks, not of what is stored
    _check_arena(arena)
    _check_devices(arena, blocks=blocks, refs=refs)
    channels = fmt.head_dim
    if factor is not None:
        _check(side == Side.K and weights is not None, "compensation is of K, and takes weights")
        assert weights is not None
        shape = (*weights.shape, channels)
        _check(
            tuple(factor.shape) == shape and factor.dtype == torch.float32,
            f"factor is {factor.dtype} {list(factor.shape)}, not f32 {list(shape)}",
        )
    if arena.is_cuda:
        from hs_kernels import cuda

        _check(fmt.packed, "blocks that are not packed are for the reference alone")
        if factor is not None:
            assert weights is not None
            cuda.store_compensated(blocks, arena, refs, weights, factor)
            return
        if values is not None:
            stored = values.to(fmt.torch_dtype)
            sparse = refs.clamp(max=0)
            cuda.store_blocks(stored, int(side), arena, sparse, 1, keep, None, None, None)
            refs, keep = refs.clamp(min=0), None  # what is left is dense
        cuda.store_blocks(blocks, int(side), arena, refs, 1, keep, weights, means, token_weights)
        return
    _require_cpu("store_blocks", arena)
    if weights is not None and weights.dim() == 3:
        count = len(blocks) // len(weights)
        for layer in range(len(weights)):
            rows = slice(layer * count, (layer + 1) * count)
            own_keep, own_values = (None if x is None else x[rows] for x in (keep, values))
            own_factor = None if factor is None else factor[layer]
            reference.store_blocks(
                *(blocks[rows], side, arena, refs[rows], fmt, own_keep, weights[layer], means),
                *(own_factor, own_values),
            )
        return
    reference.store_blocks(
        blocks, side, arena, refs, fmt, keep, weights, means, factor, values, token_weights
    )


def store_pages(k: Tensor, v: Tensor, arena: Tensor, refs: Tensor, fmt: BlockFormat) -> None:
    """`store_blocks` of both sides of the same pages, in one launch.

    k, v [N, Hkv, 64, D], refs int32 [2, N, Hkv].
    """
    for blocks, of_side in zip((k, v), refs, strict=True):
        _check_blocks(blocks, of_side, fmt, "refs")
    _check_arena(arena)
    _check_devices(arena, k=k, v=v, refs=refs)
    if arena.is_cuda:
        from hs_kernels import cuda

        cuda.store_pages(k, v, arena, refs)
        return
    for side, blocks in zip(Side, (k, v), strict=True):
        store_blocks(blocks, side, arena, refs[side], fmt)


def block_losses(
    blocks: Tensor,
    side: Side,
    fmt: BlockFormat,
    keep: Tensor | None = None,
    weights: Tensor | None = None,
    centered: bool = False,
    token_weights: Tensor | None = None,
) -> Tensor:
    """f32 [N, Hkv]: the magnitude that each of blocks [N, Hkv, 64, D] loses when it is pruned.

    `keep` (bool, as blocks) is the element mask, by default the two largest of four; `weights` f32
    [Hkv, D] scale magnitudes by channel, in the choice and in the loss, and `token_weights` f32
    [N, Hkv, 64] those of V by token. `centered` subtracts from V the mean over the tokens of each
    channel first, as `store_blocks` does with `means`.
    """
    _check_rules(blocks, side, keep, weights, token_weights)
    _check(not centered or (side == Side.V and keep is None), _CENTERED)
    if blocks.is_cuda:
        from hs_kernels import cuda

        result: Tensor = cuda.block_losses(
            blocks, int(side), keep, weights, centered, token_weights
        )
        return result
    _require_cpu("block_losses", blocks)
    if centered:
        mean = blocks.to(torch.float32).mean(2, keepdim=True).to(blocks.dtype)
        blocks = (blocks.to(torch.float32) - mean.to(torch.float32)).to(blocks.dtype)
    if weights is not None:
        scaled = blocks.abs().to(torch.float32) * _by_block(weights, blocks)
        return reference.block_losses(scaled, side)
    if token_weights is not None:
        scaled = blocks.abs().to(torch.float32) * token_weights[..., None]
        return reference.block_losses(scaled, side)
    return reference.block_losses(blocks, side, keep)


def token_weights(keys: Tensor, query: Tensor) -> Tensor:
    """f32 [N, Hkv, 64]: exp(query key), for keys [N, Hkv, 64, D], any view, and query f32 [Hkv, D],
    or [L, Hkv, D] for keys of L layers end to end.

    What `store_blocks` weighs the tokens of V with. Rows are independent of their company.
    """
    _check(keys.dim() == 4, f"keys are {list(keys.shape)}, not [N, Hkv, 64, D]")
    _check_constants("query", query, keys)
    if keys.is_cuda:
        from hs_kernels import cuda

        weights: Tensor = cuda.token_weights(keys, query)
        return weights
    return (keys.to(torch.float32) * _by_block(query, keys)).sum(-1).exp()


def rank_blocks(losses: Tensor) -> Tensor:
    """int32 [..., C]: how many candidates have a lower loss, or the same and a lower index. The
    `count` blocks to compress are those of rank below `count`."""
    if losses.is_cuda:
        from hs_kernels import cuda

        result: Tensor = cuda.rank_blocks(losses)
        return result
    _require_cpu("rank_blocks", losses)
    order = torch.sort(losses, dim=-1, stable=True).indices
    places = torch.arange(losses.shape[-1], dtype=torch.int32).expand(losses.shape)
    return torch.empty_like(places, memory_format=torch.contiguous_format).scatter_(
        -1, order, places
    )


def decode_attention(
    q: Tensor,
    arena: Tensor,
    refs: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    fmt: BlockFormat,
    num_splits: int = 1,
    workspace: DecodeWorkspace | None = None,
    means: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One query token for each request over its mixed pages.

    q [R, Hq, D], refs int32 [2, P, Hkv], page_table int32 [R, max_pages], seq_lens int32 [R].
    Gives out [R, Hq, D] in q's dtype and lse f32 [R, Hq]; an empty sequence gives 0 and -inf.
    `workspace` was planned for these pages and lengths by `plan_decode` (once for all layers);
    without one, a CUDA call plans for itself. `num_splits` is the reference's.
    With `means` [sparse slots, Hkv, D] a V block behind a sparse ref is what is stored there plus
    the mean of its slot.
    """
    _check_queries(q, refs, fmt)
    _check(
        page_table.dim() == 2 and page_table.shape[0] == q.shape[0],
        lambda: f"page_table is {list(page_table.shape)}, not [{q.shape[0]}, max_pages]",
    )
    _check(
        tuple(seq_lens.shape) == (q.shape[0],),
        lambda: f"seq_lens is {list(seq_lens.shape)}, not [{q.shape[0]}]",
    )
    _check(num_splits >= 1, lambda: f"num_splits is {num_splits}")
    _check_arena(arena)
    _check_means(means, refs, fmt)
    _check_devices(arena, q=q, refs=refs, page_table=page_table, seq_lens=seq_lens)
    if arena.is_cuda:
        from hs_kernels import cuda

        _check(
            refs.is_contiguous() and page_table.stride(1) == 1 and seq_lens.is_contiguous(),
            "refs, rows of the page table and seq_lens must be contiguous",
        )
        for name, x in (("page_table", page_table), ("seq_lens", seq_lens)):
            if x.dtype != torch.int32:
                raise ValueError(f"{name} is {x.dtype}, not int32")
        if workspace is None:
            workspace = decode_workspace(q.shape[0], q.shape[1], refs.shape[2], fmt, q.device)
            plan_decode(workspace, refs, page_table, seq_lens)
        _check(
            (workspace.q_heads, workspace.heads) == (q.shape[1], refs.shape[2]),
            lambda: (
                f"the workspace is for {workspace.q_heads} query and {workspace.heads} kv heads"
            ),
        )
        states: tuple[Tensor, Tensor] = cuda.decode_attention(
            q.contiguous(),
            arena,
            refs,
            page_table,
            seq_lens,
            workspace.boundaries,
            workspace.first_pages,
            workspace.partials,
            workspace.states,
            scale,
            None if means is None else means.contiguous(),
        )
        return states
    _require_cpu("decode_attention", arena)
    return reference.decode_attention(
        q, arena, refs, page_table, seq_lens, scale, fmt, num_splits, means
    )


def decode_workspace(
    max_rows: int, q_heads: int, heads: int, fmt: BlockFormat, device: torch.device
) -> DecodeWorkspace:
    """Buffers of `decode_attention` for up to `max_rows` requests on one CUDA stream."""
    from hs_kernels import cuda

    return cuda.decode_workspace(max_rows, q_heads, heads, fmt, device)


def plan_decode(
    workspace: DecodeWorkspace, refs: Tensor, page_table: Tensor, seq_lens: Tensor
) -> None:
    """Cuts one step's work into equal shares of bytes, on the device: once for all layers.

    `refs` int32 [2, P, Hkv] are those of any one layer, since the counts of sparse blocks are the
    same in all. Reads nothing on the host, so it may be captured with the step.
    """
    from hs_kernels import cuda

    _check(
        seq_lens.shape[0] <= workspace.costs.shape[0],
        f"{seq_lens.shape[0]} requests in a workspace for {workspace.costs.shape[0]}",
    )
    cuda.plan_decode(
        refs,
        page_table,
        seq_lens,
        workspace.boundaries,
        workspace.first_pages,
        workspace.costs,
        workspace.pairs_per_row,
    )


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arena: Tensor,
    refs: Tensor,
    plan: PrefillPlan,
    scale: float,
    fmt: BlockFormat,
    *,
    sparse_k: bool = True,
    sparse_v: bool = True,
    means: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a batch of chunks over mixed pages; see `PrefillPlan`.

    q [T, Hq, D], k and v [T, Hkv, D] of the chunks, refs int32 [2, P, Hkv]. Gives out [T, Hq, D]
    in q's dtype and lse f32 [T, Hq].

    `sparse_k` or `sparse_v` False promises that no ref of that side before a frontier is sparse,
    and takes a faster kernel; a promise broken is an error on the device. `scale` is positive.
    With `means` [sparse slots, Hkv, D] a V block behind a sparse ref is what is stored there plus
    the mean of its slot; the CUDA kernels do not add them (NotImplementedError with `sparse_v`),
    `expand_blocks` does.
    """
    _check_queries(q, refs, fmt)
    expected = (q.shape[0], refs.shape[2], fmt.head_dim)
    for name, x in (("k", k), ("v", v)):
        if tuple(x.shape) != expected:
            raise ValueError(f"{name} is {list(x.shape)}, not {list(expected)}")
    _check_arena(arena)
    _check_means(means, refs, fmt)
    _check_devices(arena, q=q, k=k, v=v, refs=refs, page_table=plan.page_table)
    _check(scale > 0, lambda: f"scale is {scale}")
    if arena.is_cuda:
        from hs_kernels import cuda

        _check(
            q.dtype == k.dtype == v.dtype == fmt.torch_dtype, lambda: f"q, k, v are not {fmt.dtype}"
        )
        if means is not None and sparse_v:
            raise NotImplementedError("prefill kernels add no block means: unpack first")
        result: tuple[Tensor, Tensor] = cuda.prefill_attention(
            *(q, k, v, arena, refs, plan.cu_seqlens, plan.prefix_lens, plan.page_table),
            *(plan.tail_first, plan.tail_slots, plan.tile_offsets, plan.frontiers),
            *(scale, sparse_k, sparse_v),
        )
        return result
    _require_cpu("prefill_attention", arena)
    _check_promise(refs, plan, fmt, (sparse_k, sparse_v))
    return reference.prefill_attention(q, k, v, arena, refs, plan, scale, fmt, means)


def _check_promise(
    refs: Tensor, plan: PrefillPlan, fmt: BlockFormat, sparse: tuple[bool, bool]
) -> None:
    """What kernels trap on: a sparse ref before a frontier, on a side that was said to be dense."""
    if all(sparse):
        return
    cuts, tiles = plan.cu_seqlens.tolist(), plan.tile_offsets.tolist()
    frontiers = plan.frontiers.tolist()
    for row, prefix in enumerate(plan.prefix_lens.tolist()):
        end = prefix + cuts[row + 1] - cuts[row]
        read = max(frontiers[tiles[row] : tiles[row + 1]], default=0)
        pages = plan.page_table[row, : min(read, -(-end // fmt.block_size))].long()
        for side in Side:
            if not sparse[side] and bool((refs[side, pages] <= 0).any()):
                raise ValueError(f"request {row} reads sparse blocks of {side.name}, said dense")


def expand_blocks(
    arena: Tensor, refs: Tensor, fmt: BlockFormat, means: Tensor | None = None
) -> Tensor:
    """A scratch arena of dense slots: block n of side s of refs int32 [2, N, Hkv], of either kind,
    is unpacked into slot 1 + s * N + n. uint8 [(1 + 2 N) * Hkv * dense_bytes]; slot 0 is not
    written.

    With `means` [sparse slots, Hkv, D] a sparse V block comes with its mean added, rounded to the
    format's dtype. Then a dense kernel computes what a sparse one would, from more bytes.
    """
    _check(
        refs.dim() == 3 and refs.shape[0] == 2,
        lambda: f"refs are {list(refs.shape)}, not [2, N, Hkv]",
    )
    _check(refs.dtype == torch.int32, lambda: f"refs are {refs.dtype}, not int32")
    _check_arena(arena)
    _check_means(means, refs, fmt)
    _check_devices(arena, refs=refs)
    if arena.is_cuda:
        from hs_kernels import cuda

        result: Tensor = cuda.expand_blocks(
            arena, refs.contiguous(), fmt.head_dim, fmt.torch_dtype, means
        )
        return result
    _require_cpu("expand_blocks", arena)
    _, blocks, heads = refs.shape
    out = torch.zeros((1 + 2 * blocks) * heads * fmt.dense_bytes, dtype=torch.uint8)
    slots = reference.dense_slots(out, fmt, heads)
    for side in Side:
        of_side = means if side == Side.V else None
        pages = reference.load_pages(arena, refs[side], side, fmt, of_side)
        first = 1 + side * blocks
        expanded = pages.view(heads, blocks, fmt.block_size, fmt.head_dim).transpose(0, 1)
        slots[first : first + blocks] = expanded.to(fmt.torch_dtype)
    return out


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Join partials outs [S, ..., D] and lses [S, ...]; a partial of lse -inf counts nothing."""
    _check(
        outs.shape[:-1] == lses.shape,
        f"outs are {list(outs.shape)} and lses {list(lses.shape)}",
    )
    if outs.is_cuda:
        from hs_kernels import cuda

        result: tuple[Tensor, Tensor] = cuda.merge_states(outs, lses)
        return result
    _require_cpu("merge_states", outs)
    return reference.merge_states(outs, lses)


def update_refs(refs: Tensor, index: Tensor, value: Tensor) -> None:
    """refs.view(-1)[index] = value on the current stream; index int64 [N], each at most once."""
    _check(refs.is_contiguous(), "refs must be contiguous")
    _check(index.shape == value.shape, f"{list(index.shape)} places, {list(value.shape)} values")
    if refs.is_cuda:
        from hs_kernels import cuda

        cuda.update_refs(refs, index, value)
        return
    _require_cpu("update_refs", refs)
    refs.view(-1)[index] = value


def assign_refs(
    refs: Tensor, pages: Tensor, slots: Tensor, counts: Tensor, ranks: Tensor | None = None
) -> Tensor:
    """Point the pages of segments at their slots, by rank; gives the refs int32 [S, C, Hkv].

    refs int32 [P, Hkv] of one layer and side; pages and slots int32 [S, C]; counts int32 [S]: the
    blocks of rank below it are sparse; ranks int32 [S, Hkv, C] as from `rank_blocks`, by default
    page order. Slot r of a segment belongs, for each head, to its page of rank r.
    """
    if refs.is_cuda:
        from hs_kernels import cuda

        result: Tensor = cuda.assign_refs(refs, pages, slots, counts, ranks)
        return result
    _require_cpu("assign_refs", refs)
    if ranks is None:
        shape = (pages.shape[0], refs.shape[1], pages.shape[1])
        ranks = torch.arange(pages.shape[1], dtype=torch.int32).expand(shape)
    by_page = ranks.transpose(1, 2).long()  # [S, C, Hkv]
    slot = slots.gather(1, by_page.flatten(1)).view(by_page.shape)
    assigned = torch.where(by_page < counts[:, None, None], -slot, slot)
    refs[pages.long()] = assigned
    return assigned


def copy_slots(arenas: Sequence[Tensor], source: Tensor, target: Tensor, slot_bytes: int) -> None:
    """In every arena uint8 [bytes], copy slots `source` onto `target` (int32 [N]), slot_bytes each.

    Slots count in units of slot_bytes: heads * dense_bytes or heads * sparse_bytes. No slot may be
    both read and written. Must stay out of a CUDA graph.
    """
    if not arenas or not source.numel():
        return
    if arenas[0].is_cuda:
        from hs_kernels import cuda

        addresses = torch.tensor([a.data_ptr() for a in arenas], dtype=torch.int64)
        cuda.copy_slots(addresses.to(arenas[0].device), source, target, slot_bytes)
        return
    for arena in arenas:
        _require_cpu("copy_slots", arena)
        slots = arena[: arena.numel() // slot_bytes * slot_bytes].view(-1, slot_bytes)
        slots[target.long()] = slots[source.long()]


def store_tokens(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    arena: Tensor,
    refs: Tensor,
    locations: Tensor,
    fmt: BlockFormat,
    permutation: Tensor | None = None,
) -> Tensor:
    """Write k, v [T, Hkv, D] into the dense blocks of their pages; gives the q to attend with.

    refs int32 [2, P, Hkv] of one layer; locations int64 [T], page * 64 + offset. A token whose
    block is not dense, such as the padding of a captured batch on page 0, is dropped, and one with
    a negative location. With
    `permutation` int32 [Hkv, D] the channels of K are stored, and those of q [T, Hq, D] returned,
    in its order (`permute_channels`); without, q is returned as it is.
    """
    _check(
        k.dim() == 3 and k.shape == v.shape and k.shape[2] == fmt.head_dim,
        lambda: f"k is {list(k.shape)} and v {list(v.shape)}, not [T, Hkv, {fmt.head_dim}]",
    )
    _check(
        q.dim() == 3 and q.shape[::2] == k.shape[::2] and q.shape[1] % k.shape[1] == 0,
        lambda: f"q is {list(q.shape)}, not [{k.shape[0]}, Hq, {fmt.head_dim}]",
    )
    _check(
        tuple(locations.shape) == (k.shape[0],) and locations.dtype == torch.int64,
        lambda: (
            f"locations are {locations.dtype} {list(locations.shape)}, not int64 [{k.shape[0]}]"
        ),
    )
    for name, x in (("k", k), ("v", v), ("q", q)):
        if x.dtype != fmt.torch_dtype:
            raise ValueError(f"{name} is {x.dtype}, not {fmt.torch_dtype}")
    _check_arena(arena)
    _check_devices(arena, k=k, v=v, q=q, refs=refs, locations=locations)
    if arena.is_cuda:
        from hs_kernels import cuda

        _check(refs.is_contiguous() and locations.is_contiguous(), "refs and locations have gaps")
        moved: Tensor = cuda.store_tokens(k, v, q, arena, refs, locations, permutation)
        return q if permutation is None else moved
    _require_cpu("store_tokens", arena)
    if permutation is not None:
        q, k = permute_channels(q, permutation), permute_channels(k, permutation)
    dense = reference.dense_slots(arena, fmt, k.shape[1])
    for side, tokens in zip(Side, (k, v), strict=True):
        ref = refs[side, locations.clamp(min=0) // fmt.block_size]
        t, head = ((ref > 0) & (locations >= 0)[:, None]).nonzero(as_tuple=True)
        dense[ref[t, head].long(), head, locations[t] % fmt.block_size] = tokens[t, head]
    return q


def permute_channels(x: Tensor, permutation: Tensor) -> Tensor:
    """x [T, H, D] with channel c of head h taken from channel permutation[h * Hp / H, c].

    permutation int32 [Hp, D] for kv heads; H is a multiple of Hp (query heads share their kv
    head's).
    """
    _check(
        x.shape[1] % permutation.shape[0] == 0 and x.shape[2] == permutation.shape[1],
        lambda: f"x {list(x.shape)} does not fit permutation {list(permutation.shape)}",
    )
    if x.is_cuda:
        from hs_kernels import cuda

        result: Tensor = cuda.permute_channels(x, permutation)
        return result
    _require_cpu("permute_channels", x)
    group = x.shape[1] // permutation.shape[0]
    return x.gather(2, permutation.long().repeat_interleave(group, 0).expand(x.shape))


def _check(claim: bool, otherwise: str | Callable[[], str]) -> None:
    """Checks of each layer's calls come with a function, since writing messages takes time."""
    if not claim:
        raise ValueError(otherwise if isinstance(otherwise, str) else otherwise())


def _check_rules(
    blocks: Tensor,
    side: Side,
    keep: Tensor | None,
    weights: Tensor | None,
    token_weights: Tensor | None,
) -> None:
    rules = sum(x is not None for x in (keep, weights, token_weights))
    _check(rules <= 1, "keep, weights and token_weights are rules; a block has one")
    if weights is not None:
        _check_constants("weights", weights, blocks)
    if token_weights is None:
        return
    shape = tuple(blocks.shape[:3])
    _check(side == Side.V, "token weights are of V")
    _check(
        tuple(token_weights.shape) == shape and token_weights.dtype == torch.float32,
        f"token_weights are {token_weights.dtype} {list(token_weights.shape)}, not f32 "
        f"{list(shape)}",
    )


def _check_constants(name: str, constants: Tensor, blocks: Tensor) -> None:
    """f32 [Hkv, D], or [L, Hkv, D] for blocks [N, Hkv, 64, D] of L layers."""
    of_one, layers = (blocks.shape[1], blocks.shape[3]), constants.shape[0]
    fits = constants.dim() == 2 or (constants.dim() == 3 and len(blocks) % max(1, layers) == 0)
    _check(
        fits and tuple(constants.shape[-2:]) == of_one and constants.dtype == torch.float32,
        f"{name} {constants.dtype} {list(constants.shape)} do not fit: f32 {list(of_one)}, or that "
        f"of layers which share {len(blocks)} blocks",
    )


def _by_block(constants: Tensor, blocks: Tensor) -> Tensor:
    """[N, Hkv, 1, D] of constants by layer, or [Hkv, 1, D] of those of one."""
    if constants.dim() == 3:
        constants = constants.repeat_interleave(len(blocks) // len(constants), 0)
    return constants.unsqueeze(-2)


def _check_blocks(blocks: Tensor, of_blocks: Tensor, fmt: BlockFormat, name: str) -> None:
    _check(
        blocks.dim() == 4 and tuple(blocks.shape[2:]) == (fmt.block_size, fmt.head_dim),
        f"blocks are {list(blocks.shape)}, not [N, Hkv, {fmt.block_size}, {fmt.head_dim}]",
    )
    _check(blocks.dtype == fmt.torch_dtype, f"blocks are {blocks.dtype}, not {fmt.torch_dtype}")
    _check(
        of_blocks.shape == blocks.shape[:2],
        f"{name} are {list(of_blocks.shape)}, not {list(blocks.shape[:2])}",
    )


def _check_queries(q: Tensor, refs: Tensor, fmt: BlockFormat) -> None:
    _check(
        q.dim() == 3 and q.shape[2] == fmt.head_dim,
        lambda: f"q is {list(q.shape)}, not [rows, Hq, {fmt.head_dim}]",
    )
    _check(
        refs.dim() == 3 and refs.shape[0] == len(Side) and refs.dtype == torch.int32,
        lambda: f"refs are {refs.dtype} {list(refs.shape)}, not int32 [2, P, Hkv]",
    )
    _check(
        q.shape[1] % refs.shape[2] == 0,
        lambda: f"{q.shape[1]} query heads do not share {refs.shape[2]} kv heads evenly",
    )


def _check_means(means: Tensor | None, refs: Tensor, fmt: BlockFormat) -> None:
    if means is None:
        return
    wanted = (refs.shape[2], fmt.head_dim)
    _check(
        means.dim() == 3 and tuple(means.shape[1:]) == wanted and means.dtype == fmt.torch_dtype,
        f"means are {means.dtype} {list(means.shape)}, not {fmt.torch_dtype} "
        f"[sparse slots, {wanted[0]}, {wanted[1]}]",
    )
    _check(means.device == refs.device, f"means are on {means.device}, not on {refs.device}")


def _check_arena(arena: Tensor) -> None:
    _check(
        arena.dtype == torch.uint8 and arena.dim() == 1 and arena.is_contiguous(),
        lambda: f"the arena is {arena.dtype} {list(arena.shape)}, not contiguous uint8 [bytes]",
    )


def _check_devices(arena: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.device != arena.device:
            raise ValueError(f"{name} is on {tensor.device}, not on {arena.device}")


def _require_cpu(op: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise RuntimeError(f"{op} has no kernel for {tensor.device.type} tensors")
