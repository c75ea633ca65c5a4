"""The only door to the kernels: checks shapes, then dispatches on the device of the arena.

CPU tensors go to `reference`. Nothing falls back silently: a device without kernels is an error.
"""

import torch
from torch import Tensor

from hs_kernels import reference
from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import PrefillPlan

__all__ = [
    "PrefillPlan",
    "compress_blocks",
    "decode_attention",
    "merge_states",
    "prefill_attention",
]


def compress_blocks(
    blocks: Tensor,
    side: Side,
    arena: Tensor,
    slots: Tensor,
    fmt: BlockFormat,
    keep: Tensor | None = None,
    values: Tensor | None = None,
) -> None:
    """Prune blocks [N, Hkv, 64, D] and pack them into sparse slots of the arena.

    `slots` int32 [N, Hkv] are sparse slot numbers; every (slot, head) may appear once. `keep` (bool,
    shaped as blocks) is the element mask, by default the two largest |x| of four; `values` (as
    blocks) are stored in place of the blocks. Mutates the arena uint8 [bytes].
    """
    _check(
        blocks.dim() == 4 and tuple(blocks.shape[2:]) == (fmt.block_size, fmt.head_dim),
        f"blocks are {list(blocks.shape)}, not [N, Hkv, {fmt.block_size}, {fmt.head_dim}]",
    )
    _check(blocks.dtype == fmt.torch_dtype, f"blocks are {blocks.dtype}, not {fmt.torch_dtype}")
    _check(
        slots.shape == blocks.shape[:2],
        f"slots are {list(slots.shape)}, not {list(blocks.shape[:2])}",
    )
    _check_arena(arena)
    _check_devices(arena, blocks=blocks, slots=slots)
    _require_cpu("compress_blocks", arena)
    reference.compress_blocks(blocks, side, arena, slots, fmt, keep, values)


def decode_attention(
    q: Tensor,
    arena: Tensor,
    refs: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    fmt: BlockFormat,
    num_splits: int = 1,
) -> tuple[Tensor, Tensor]:
    """One query token for each request over its mixed pages.

    q [R, Hq, D], refs int32 [2, P, Hkv], page_table int32 [R, max_pages], seq_lens int32 [R].
    Gives out [R, Hq, D] in q's dtype and lse f32 [R, Hq]; an empty sequence gives 0 and -inf.
    """
    _check_queries(q, refs, fmt)
    _check(
        page_table.dim() == 2 and page_table.shape[0] == q.shape[0],
        f"page_table is {list(page_table.shape)}, not [{q.shape[0]}, max_pages]",
    )
    _check(
        tuple(seq_lens.shape) == (q.shape[0],),
        f"seq_lens is {list(seq_lens.shape)}, not [{q.shape[0]}]",
    )
    _check(num_splits >= 1, f"num_splits is {num_splits}")
    _check_arena(arena)
    _check_devices(arena, q=q, refs=refs, page_table=page_table, seq_lens=seq_lens)
    _require_cpu("decode_attention", arena)
    return reference.decode_attention(q, arena, refs, page_table, seq_lens, scale, fmt, num_splits)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arena: Tensor,
    refs: Tensor,
    plan: PrefillPlan,
    scale: float,
    fmt: BlockFormat,
) -> tuple[Tensor, Tensor]:
    """Causal attention of a batch of chunks over mixed pages; see `PrefillPlan`.

    q [T, Hq, D], k and v [T, Hkv, D] of the chunks, refs int32 [2, P, Hkv]. Gives out [T, Hq, D]
    in q's dtype and lse f32 [T, Hq].
    """
    _check_queries(q, refs, fmt)
    expected = (q.shape[0], refs.shape[2], fmt.head_dim)
    for name, x in (("k", k), ("v", v)):
        _check(tuple(x.shape) == expected, f"{name} is {list(x.shape)}, not {list(expected)}")
    _check_arena(arena)
    _check_devices(arena, q=q, k=k, v=v, refs=refs, page_table=plan.page_table)
    _require_cpu("prefill_attention", arena)
    return reference.prefill_attention(q, k, v, arena, refs, plan, scale, fmt)


def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Join partials outs [S, ..., D] and lses [S, ...]; a partial of lse -inf counts nothing."""
    _check(
        outs.shape[:-1] == lses.shape,
        f"outs are {list(outs.shape)} and lses {list(lses.shape)}",
    )
    _require_cpu("merge_states", outs)
    return reference.merge_states(outs, lses)


def _check(claim: bool, otherwise: str) -> None:
    if not claim:
        raise ValueError(otherwise)


def _check_queries(q: Tensor, refs: Tensor, fmt: BlockFormat) -> None:
    _check(
        q.dim() == 3 and q.shape[2] == fmt.head_dim,
        f"q is {list(q.shape)}, not [rows, Hq, {fmt.head_dim}]",
    )
    _check(
        refs.dim() == 3 and refs.shape[0] == len(Side) and refs.dtype == torch.int32,
        f"refs are {refs.dtype} {list(refs.shape)}, not int32 [2, P, Hkv]",
    )
    _check(
        q.shape[1] % refs.shape[2] == 0,
        f"{q.shape[1]} query heads do not share {refs.shape[2]} kv heads evenly",
    )


def _check_arena(arena: Tensor) -> None:
    _check(
        arena.dtype == torch.uint8 and arena.dim() == 1 and arena.is_contiguous(),
        f"the arena is {arena.dtype} {list(arena.shape)}, not contiguous uint8 [bytes]",
    )


def _check_devices(arena: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        _check(
            tensor.device == arena.device, f"{name} is on {tensor.device}, not on {arena.device}"
        )


def _require_cpu(op: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise RuntimeError(f"{op} has no kernel for {tensor.device.type} tensors")
