"""Calibrations that were not measured: random orders, weights and factors, of any shape."""

from __future__ import annotations

from pathlib import Path

import torch

from hs_runtime.calibration import Calibration, fingerprint, save_calibration


def random_calibration(
    layers: int = 2, heads: int = 2, channels: int = 64, *, seed: int = 0, fingerprint: str = "none"
) -> Calibration:
    rng = torch.Generator().manual_seed(seed)
    shape = (layers, heads, channels)
    order = torch.rand(shape, generator=rng).argsort(-1)
    query_rms, key_rms = (0.5 + torch.rand(shape, generator=rng) for _ in range(2))
    upper = torch.randn((*shape, channels), generator=rng).triu(1) / channels**0.5
    return Calibration(
        permutation=order.to(torch.int32),
        query_rms=query_rms,
        mean_score=torch.randn(shape, generator=rng) / channels**0.5,
        key_rms=key_rms,
        factor=upper + torch.diag_embed(0.5 + torch.rand(shape, generator=rng)),
        fingerprint=fingerprint,
        text="",
        tokens=0,
    )


def write_calibration(path: Path, model: Path | None = None, **shape: int) -> Path:
    """A random one in a file, with the fingerprint of the model in a folder."""
    found = fingerprint(str(model)) if model is not None else "none"
    save_calibration(random_calibration(**shape, fingerprint=found), path)
    return path
