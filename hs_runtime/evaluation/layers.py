"""Where a model's K and V are large, and what 2:4 pruning by magnitude drops of them, by layer.

`LayerTap` looks at K and V of every prefill in the scheduler process, in the channel order in which
they are stored (so after a calibrated permutation).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy
import torch
from torch import Tensor

from hs_runtime.policies.pruner import dropped_norm

FILE: Final = "layers.npz"
SIDES: Final = ("K", "V")
_BLOCK: Final = 64
# Of |x|, in powers of two: what is below the first edge or above the last goes to the outer bins.
EDGES: Final = tuple(2.0**power for power in range(-10, 9))


@dataclass(slots=True)
class _Sums:
    """Of one layer's side: sums of |x| and of what is dropped, [H, D] and [H]; |x| by size."""

    tokens: int
    magnitude: Tensor
    dropped: Tensor
    pruned: Tensor
    histogram: Tensor


class LayerTap:
    """Adds up what prefill puts into the cache. Blocks are cut at the start of each forward."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sums: dict[tuple[int, int], _Sums] = {}

    def observe(self, layer: int, k: Tensor, v: Tensor) -> None:
        """K and V [T, H, D] of one forward."""
        for side, rows in enumerate((k, v)):
            sums = self._sums.get((layer, side))
            if sums is None:
                heads, channels = rows.shape[1:]
                sums = self._sums[layer, side] = _Sums(
                    0,
                    torch.zeros(heads, channels, dtype=torch.float64),
                    torch.zeros(heads, dtype=torch.float64),
                    torch.zeros(heads, dtype=torch.float64),
                    torch.zeros(len(EDGES) + 1, dtype=torch.float64),
                )
            size = rows.float().abs()
            sums.tokens += rows.shape[0]
            sums.magnitude += size.sum(0, dtype=torch.float64).cpu()
            bins = torch.bucketize(size, torch.tensor(EDGES, device=size.device))
            sums.histogram += torch.bincount(bins.flatten(), minlength=len(EDGES) + 1).cpu()
            whole = rows.shape[0] // _BLOCK * _BLOCK
            blocks = size[:whole].reshape(-1, _BLOCK, *size.shape[1:]).transpose(1, 2)
            sums.dropped += dropped_norm(blocks, side).sum(0, dtype=torch.float64).cpu()
            sums.pruned += blocks.sum((0, 2, 3), dtype=torch.float64).cpu()

    def save(self) -> None:
        """Everything so far, as one array for each quantity: [layers, sides, ...]."""
        layers = 1 + max(layer for layer, _ in self._sums)

        def stacked(name: str) -> Any:
            return numpy.stack(
                [
                    numpy.stack([getattr(self._sums[layer, side], name) for side in (0, 1)])
                    for layer in range(layers)
                ]
            )

        partial = self._path.with_suffix(".partial.npz")
        numpy.savez(
            partial,
            tokens=self._sums[0, 0].tokens,
            magnitude=stacked("magnitude") / self._sums[0, 0].tokens,
            loss=stacked("dropped") / stacked("pruned"),
            histogram=stacked("histogram"),
        )
        partial.replace(self._path)


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """`magnitude` [L, 2, H, D]: mean |x|. `loss` [L, 2, H]: share of the L1 norm that 2:4 by
    magnitude drops. `histogram` [L, 2, bins]: elements by |x| between EDGES. 2 is K, then V."""

    tokens: int
    magnitude: Any
    loss: Any
    histogram: Any

    @classmethod
    def load(cls, path: Path) -> LayerStatistics:
        with numpy.load(path) as arrays:
            names = ("magnitude", "loss", "histogram")
            return cls(int(arrays["tokens"]), *(arrays[name] for name in names))

    def as_json(self) -> dict[str, Any]:
        """For people: by layer and head, rounded."""
        return {
            "tokens": self.tokens,
            "layers": [
                {
                    "layer": layer,
                    **{
                        side: {
                            "mean": [round(float(x), 5) for x in self.magnitude[layer, s].mean(-1)],
                            "largest_channel": [
                                int(x) for x in self.magnitude[layer, s].argmax(-1)
                            ],
                            "loss": [round(float(x), 5) for x in self.loss[layer, s]],
                        }
                        for s, side in enumerate(SIDES)
                    },
                }
                for layer in range(self.magnitude.shape[0])
            ],
        }


def markdown(found: LayerStatistics, pruner: str) -> str:
    """A table of layers; what is in heads is averaged."""
    lines = [
        f"# K and V by layer ({found.tokens} tokens, stored order of pruner `{pruner}`)",
        "",
        "Loss: the share of the L1 norm that 2:4 by magnitude drops; per element it is the mean "
        "magnitude times the share.",
        "",
        "| layer | mean K | mean V | loss K | loss V | loss per element, K over V |",
        "|---|---|---|---|---|---|",
    ]
    mean, loss = found.magnitude.mean((-2, -1)), found.loss.mean(-1)
    for layer in range(mean.shape[0]):
        ratio = mean[layer, 0] * loss[layer, 0] / (mean[layer, 1] * loss[layer, 1])
        lines.append(
            f"| {layer} | {mean[layer, 0]:.4f} | {mean[layer, 1]:.4f} | {loss[layer, 0]:.4f} "
            f"| {loss[layer, 1]:.4f} | {ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"
