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
    losses  f32 [N, H], lower is pruned first; None when no ranking was asked for, or where it is by
            what the kernels' rule drops
    weights f32 [H, D], without `keep`: the two largest |x| * weight, by channel
    factor  f32 [H, D, D], with `weights`: kept values take over what is pruned (the kernels'
            `compensate`)
    query   f32 [H, D], without `keep`: of V, the two largest |x| * exp(query k), by token, where k
            is the token's key: as it was computed, unless prefill pruned it before
    """

    keep: Tensor | None = None
    values: Tensor | None = None
    losses: Tensor | None = None
    weights: Tensor | None = None
    factor: Tensor | None = None
    query: Tensor | None = None


class Pruner(Protocol):
    """A way to prune, without state of its own: equal blocks get equal answers, whatever else is
    in the batch. Otherwise cached prefixes would depend on who shared the forward pass."""

    @property
    def name(self) -> str:
        """Its key in `PRUNERS`; part of every cache namespace."""

    @property
    def needs_calibration(self) -> bool:
        """Whether `prune` must be given a layer's calibration constants, and the channels of Q and
        K are in calibrated order."""

    @property
    def centers_values(self) -> bool:
        """Whether V blocks are stored without the mean over their tokens of each channel, which is
        kept beside them. `prune` is given plain blocks all the same."""

    @property
    def is_stored(self) -> bool:
        """Whether what it keeps is 2:4. If not it can be simulated, but not served."""

    def prune(
        self,
        blocks: Tensor,
        side: int,
        calibration: Mapping[str, Tensor] | None = None,
        *,
        ranked: bool = True,
    ) -> PrunedBlocks:
        """Prune candidate pages `blocks` [N, H, 64, D] of one layer; `side` is 0 (K) or 1 (V).

        Blocks and constants of several layers have a first dimension more, and so has the answer.

        K is grouped by four neighbouring channels of a token, V by four neighbouring tokens of a
        channel. `calibration` holds the layer's constants by the names of `Calibration`.
        `ranked=False` says that all N will be sparse, so losses are not needed. N may be 0. Does
        not mutate `blocks` and does not synchronise.
        """


@dataclass(frozen=True, slots=True)
class MagnitudePruner:
    """The paper's: keep the two largest |x| of four; a block's loss is the L1 norm it drops."""

    name: str = "magnitude"
    needs_calibration: bool = False
    centers_values: bool = False
    is_stored: bool = True

    def prune(
        self,
        blocks: Tensor,
        side: int,
        calibration: Mapping[str, Tensor] | None = None,
        *,
        ranked: bool = True,
    ) -> PrunedBlocks:
        return PrunedBlocks(losses=dropped_norm(blocks, side) if ranked else None)


@dataclass(frozen=True, slots=True)
class CalibratedPruner:
    """Ours. K: channels in calibrated order, chosen by |k| times the RMS of the query channel, and
    kept values that take over what is pruned. V: what differs from the block's mean, chosen by its
    magnitude times exp(s / 8), where s is the score that an average query gives the token's key:
    what is attended to more counts a little more. Larger shares of s hurt the retrieval of tokens
    that nothing has asked for yet.
    """

    name: str = "calibrated"
    needs_calibration: bool = True
    centers_values: bool = True
    is_stored: bool = True

    def prune(
        self,
        blocks: Tensor,
        side: int,
        calibration: Mapping[str, Tensor] | None = None,
        *,
        ranked: bool = True,
    ) -> PrunedBlocks:
        constants = _given(self.name, calibration)
        if side == V_SIDE:
            return PrunedBlocks(query=constants["mean_score"] / 8)
        return PrunedBlocks(weights=constants["query_rms"], factor=constants["factor"])


@dataclass(frozen=True, slots=True)
class ChannelPruner:
    """Static channel masks as in ThinK and LeanK: of K, in every token, the channels whose typical
    |q| |k| is largest, half of each group of four in calibrated order. V by magnitude, since the
    methods leave it alone."""

    name: str = "channel"
    needs_calibration: bool = True
    centers_values: bool = False
    is_stored: bool = True

    def prune(
        self,
        blocks: Tensor,
        side: int,
        calibration: Mapping[str, Tensor] | None = None,
        *,
        ranked: bool = True,
    ) -> PrunedBlocks:
        constants = _given(self.name, calibration)
        if side == V_SIDE:
            return MagnitudePruner().prune(blocks, side, ranked=ranked)
        strength = constants["query_rms"] * constants["key_rms"]
        by_block = strength.unsqueeze(-2).unsqueeze(-4)  # [..., 1, H, 1, D]
        keep = keep_two(by_block, side).expand(blocks.shape)
        return PrunedBlocks(keep, losses=_dropped_by(blocks, keep) if ranked else None)


@dataclass(frozen=True, slots=True)
class RandomPruner:
    """A floor for comparisons: two of every four by a hash of the element's own bits and place, so
    that equal blocks get equal masks."""

    name: str = "random"
    needs_calibration: bool = False
    centers_values: bool = False
    is_stored: bool = True

    def prune(
        self,
        blocks: Tensor,
        side: int,
        calibration: Mapping[str, Tensor] | None = None,
        *,
        ranked: bool = True,
    ) -> PrunedBlocks:
        bits = blocks.to(torch.float32).contiguous().view(torch.int32).to(torch.int64)
        tokens, channels = blocks.shape[-2:]
        place = torch.arange(tokens * channels, device=bits.device).view(tokens, channels)
        mixed = bits + 0x9E3779B9 * (1 + place)
        for shift, odd in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):
            mixed = ((mixed ^ (mixed >> shift)) * odd) & 0x7FFFFFFF
        keep = keep_two(mixed, side)
        return PrunedBlocks(keep, losses=_dropped_by(blocks, keep) if ranked else None)


@dataclass(frozen=True, slots=True)
class UnstructuredPruner:
    """The larger half of each token's channels by magnitude, as in MUSTAFAR: what 2:4 can at best
    approach. Its masks are not 2:4, so its blocks are simulated at their full size."""

    name: str = "unstructured"
    needs_calibration: bool = False
    centers_values: bool = False
    is_stored: bool = False

    def prune(
        self,
        blocks: Tensor,
        side: int,
        calibration: Mapping[str, Tensor] | None = None,
        *,
        ranked: bool = True,
    ) -> PrunedBlocks:
        order = torch.sort(blocks.abs(), dim=-1, descending=True, stable=True).indices
        keep = torch.zeros(blocks.shape, dtype=torch.bool, device=blocks.device)
        keep.scatter_(-1, order[..., : blocks.shape[-1] // 2], True)
        return PrunedBlocks(keep, losses=_dropped_by(blocks, keep) if ranked else None)


def _given(name: str, calibration: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    if calibration is None:
        raise ValueError(f"the pruner {name!r} prunes with calibration constants, and got none")
    return calibration


def keep_two(scores: Tensor, side: int) -> Tensor:
    """bool, as `scores` [..., rows, D]: the two highest of every group of four along the side's
    axis, the lower index winning a tie."""
    axis = -1 if side == K_SIDE else -2
    groups = scores.unflatten(axis, (-1, 4))  # the same axis, counted from the end, is the four's
    order = torch.sort(groups, dim=axis, descending=True, stable=True).indices
    keep = torch.zeros(groups.shape, dtype=torch.bool, device=scores.device)
    return keep.scatter_(axis, order.narrow(axis, 0, 2), True).reshape(scores.shape)


def _dropped_by(blocks: Tensor, keep: Tensor) -> Tensor:
    """L1 norm (f32 [...]) of what `keep` drops of blocks [..., 64, D], summed in f64."""
    dropped = blocks.abs().to(torch.float64).masked_fill(keep, 0.0)
    return dropped.sum((-2, -1)).to(torch.float32)


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
    "calibrated": CalibratedPruner,
    "channel": ChannelPruner,
    "random": RandomPruner,
    "unstructured": UnstructuredPruner,
}


def build_pruner(name: str) -> Pruner:
    """The pruner of that name; raises `ValueError` with the choices."""
    if name not in PRUNERS:
        raise ValueError(f"unknown pruner {name!r}: choose {', '.join(PRUNERS)}")
    return PRUNERS[name]()
