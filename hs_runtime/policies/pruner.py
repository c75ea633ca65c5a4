"""Which two of four elements a sparse block keeps, and which blocks of a segment become sparse.

A `Pruner` looks at candidate pages and answers with keeps, values and losses; `select` turns the
losses and a share into a `BlockMask` (the paper's M). Neither touches storage.

Shapes: N candidate pages, H kv heads, C candidates of one segment, D channels, 64 tokens a page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

K_SIDE, V_SIDE = 0, 1


@dataclass(frozen=True, slots=True)
class PrunedBlocks:
    """A pruner's answer for N pages of H heads.

    keep    bool [N, H, 64, D], exactly two of each group of four; None: the two largest |x|, the
            lower index winning ties, which is what the compress kernel does unasked
    values  [N, H, 64, D] like the input, what is stored where `keep` holds; None: the input itself
    losses  f32 [N, H], lower is pruned first; None when no ranking was asked for
    """

    keep: Tensor | None
    values: Tensor | None
    losses: Tensor | None


class Pruner(Protocol):
    """A way to prune, without state of its own: equal blocks get equal answers, whatever else is
    in the batch. Otherwise cached prefixes would depend on who shared the forward pass."""

    @property
    def name(self) -> str:
        """Its key in `PRUNERS`; part of every cache namespace."""

    @property
    def needs_calibration(self) -> bool:
        """Whether `prune` must be given a layer's calibration constants."""

    def prune(
        self,
        blocks: Tensor,
        side: int,
        calibration: Mapping[str, Tensor] | None = None,
        *,
        ranked: bool = True,
    ) -> PrunedBlocks:
        """Prune candidate pages `blocks` [N, H, 64, D] of one layer; `side` is 0 (K) or 1 (V).

        K is grouped by four neighbouring channels of a token, V by four neighbouring tokens of a
        channel. `ranked=False` says that all N will be sparse, so losses are not needed. N may be
        0. Does not mutate `blocks` and does not synchronise.
        """


@dataclass(frozen=True, slots=True)
class MagnitudePruner:
    """The paper's: keep the two largest |x| of four; a block's loss is the L1 norm it drops."""

    name: str = "magnitude"
    needs_calibration: bool = False

    def prune(
        self,
        blocks: Tensor,
        side: int,
        calibration: Mapping[str, Tensor] | None = None,
        *,
        ranked: bool = True,
    ) -> PrunedBlocks:
        return PrunedBlocks(None, None, dropped_norm(blocks, side) if ranked else None)


def dropped_norm(blocks: Tensor, side: int) -> Tensor:
    """L1 norm (f32 [...]) of the smaller two |x| of every group of four in `blocks` [..., 64, D].

    Summed in f64, so that the order in which a device adds cannot change which block is smaller.
    """
    *batch, tokens, channels = blocks.shape
    if side == K_SIDE:
        a, b, c, d = blocks.abs().reshape(*batch, tokens, channels // 4, 4).unbind(-1)
    else:
        a, b, c, d = blocks.abs().reshape(*batch, tokens // 4, 4, channels).unbind(-2)
    low, high = torch.minimum(a, b), torch.maximum(a, b)
    other_low, other_high = torch.minimum(c, d), torch.maximum(c, d)
    smallest = torch.minimum(low, other_low)
    second = torch.minimum(torch.maximum(low, other_low), torch.minimum(high, other_high))
    total = smallest.sum((-2, -1), dtype=torch.float64) + second.sum((-2, -1), dtype=torch.float64)
    return total.to(torch.float32)


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Which of a segment's C candidates are sparse, per head.

    order  int64 [C, H]: candidates by ascending loss, ties to the lower index; the first `count`
           are sparse. A higher share of the same segment changes a prefix of the same order.
    """

    order: Tensor
    count: int

    @property
    def sparse(self) -> Tensor:
        """bool [C, H]"""
        mask = torch.zeros(self.order.shape, dtype=torch.bool, device=self.order.device)
        return mask.scatter_(0, self.order[: self.count], True)


def sparse_count(share: int, candidates: int) -> int:
    """How many of `candidates` are sparse at `share` thousandths: the exact ceiling."""
    return -(-share * candidates // 1000)


def select(losses: Tensor, share: int) -> BlockMask:
    """The mask of one segment from its losses [C, H], with `sparse_count(share, C)` per head."""
    order = torch.argsort(losses, dim=0, stable=True)
    return BlockMask(order, sparse_count(share, losses.shape[0]))


PRUNERS: dict[str, Callable[[], Pruner]] = {
    "magnitude": MagnitudePruner,
}


def build_pruner(name: str) -> Pruner:
    """The pruner of that name; raises `ValueError` with the choices."""
    if name not in PRUNERS:
        raise ValueError(f"unknown pruner {name!r}: choose {', '.join(PRUNERS)}")
    return PRUNERS[name]()
