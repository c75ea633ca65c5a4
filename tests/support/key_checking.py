"""A compressor that looks at what it is given: the keys that come with V are of the same tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hs_kernels.block_format import Side
from hs_runtime.compression import Compressor
from hs_runtime.policies.pruner import MagnitudePruner, PrunedBlocks
from hs_runtime.pool.block_pool import BlockPool
from tests.support.contents import Vectors

STRIDE = 7  # of the rows that are looked at


class KeyedPruner(MagnitudePruner):
    """By magnitude, and asks for the keys of V, by which all tokens weigh the same."""

    def prune(self, blocks: Tensor, side: int, *_: Any, **__: Any) -> PrunedBlocks:
        *layers, _, heads, _, channels = blocks.shape
        query = torch.zeros(*layers, heads, channels) if side == Side.V else None
        return PrunedBlocks(query=query)


class KeyChecking(Compressor):
    """Keys must be as the tokens left them, or as they were pruned before.

    `watch` is told of the contents that tokens get. `chosen` V blocks were pruned, `checked` of
    their rows looked at (blocks that are packed already are given as garbage, and are not), and
    `wrong` of these came with the keys of other tokens.
    """

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool, KeyedPruner())
        self.keys: defaultdict[tuple[int, int, bytes], set[bytes]] = defaultdict(set)
        self.chosen = self.checked = self.wrong = 0

    def watch(self, vectors: Vectors, layer: int, rows: Any) -> None:
        """rows [T, sides, heads, D]"""
        for k, v in rows:
            for head in range(len(k)):
                known = self.keys[layer, head, _bytes(v[head])]
                known.add(_bytes(k[head]))
                known.add(_bytes(vectors.pruned(Side.K, k[head][None])[0]))

    def _choose(
        self,
        layers: int | range,
        side: int,
        blocks: Tensor,
        keys_of: Callable[[], Tensor],
        **ranked: bool,
    ) -> Any:
        if side == Side.V:
            keys = keys_of()
            assert keys.shape == blocks.shape
            if isinstance(layers, range):
                for own in zip(layers, blocks, keys, strict=True):
                    self._look_at(*own)
            else:
                self._look_at(layers, blocks, keys)
        return super()._choose(layers, side, blocks, keys_of, **ranked)

    def _look_at(self, layer: int, blocks: Tensor, keys: Tensor) -> None:
        """Of one layer, both [N, H, 64, D]."""
        self.chosen += blocks.shape[0]
        for n, head in torch.cartesian_prod(*map(torch.arange, blocks.shape[:2])).tolist():
            for t in range(n % STRIDE, 64, STRIDE):
                known = self.keys.get((layer, head, _bytes(blocks[n, head, t].float().numpy())))
                if known is None:
                    break
                self.checked += 1
                found = _bytes(keys[n, head, t].float().numpy())
                self.wrong += found not in known


def _bytes(row: Any) -> bytes:
    """Of small integers in any element type."""
    return bytes((row.astype("float64") + 0.0).astype("int8"))
