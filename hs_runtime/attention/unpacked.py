"""Prefill over unpacked pages with torch's own attention: for devices that our kernels do not know.

Slower than the dense kernel of Hopper, because the keys of every segment are put side by side
first, and right everywhere: torch picks FlashAttention-2 where it can.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import dense_slots
from hs_runtime.attention.plan import ExpandedPlan, ExpandedRow


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scratch: Tensor,
    plan: ExpandedPlan,
    scale: float,
    fmt: BlockFormat,
) -> Tensor:
    """out [T, Hq, D] of the plan's rows q [T, Hq, D], k and v [T, Hkv, D], over `scratch` of
    `ops.expand_blocks`."""
    slots = dense_slots(scratch, fmt, k.shape[1])
    out = torch.empty_like(q)
    for part in plan.rows:
        keys = [_Keys(slots, plan, part, side, own) for side, own in ((Side.K, k), (Side.V, v))]
        for begin, end, frontier in part.runs():
            at = slice(part.first + begin - part.row.start, part.first + end - part.row.start)
            seen_k, seen_v = (each.until(end, frontier) for each in keys)
            attended = scaled_dot_product_attention(
                q[at].transpose(0, 1)[None],
                seen_k[None],
                seen_v[None],
                attn_mask=causal_lower_right(end - begin, end),
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out[at] = attended[0].transpose(0, 1)
    return out


class _Keys:
    """One side of a request's keys [Hkv, n, D]: as stored before the highest frontier, and dense
    from the first tail page on."""

    def __init__(
        self, slots: Tensor, plan: ExpandedPlan, part: ExpandedRow, side: int, own: Tensor
    ) -> None:
        row, blocks = part.row, plan.refs.shape[1]
        page, tail = (1 + side * blocks + first for first in (part.page, part.tail))
        self.page = slots.shape[2]
        before = max(0, row.start - row.tail_first * self.page)  # tokens of the tail
        self.dense_from = row.start - before
        self.stored = _joined(slots[page : page + min(max(row.frontiers), len(row.pages))])
        begun = _joined(slots[tail : tail + len(row.tail[side])])[:, :before]
        chunk = own[part.first : part.first + row.end - row.start].transpose(0, 1)
        self.dense = torch.cat([begun, chunk], dim=1)

    def until(self, end: int, frontier: int) -> Tensor:
        border = min(frontier * self.page, end)
        dense = self.dense[:, max(0, border - self.dense_from) : end - self.dense_from]
        return torch.cat([self.stored[:, :border], dense], dim=1)


def _joined(pages: Tensor) -> Tensor:
    """[n, Hkv, 64, D] -> [Hkv, n * 64, D]"""
    return pages.transpose(0, 1).flatten(1, 2)
