"""Comparison of tensors that says what differs, where, and by how much."""

import torch
from torch import Tensor

# Largest error of an attention output, relative to the larger of 1 and the wanted value.
TOLERANCE = {
    torch.float32: 5e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def assert_close(name: str, got: Tensor, want: Tensor, tol: float | None = None) -> None:
    """Fail unless |got - want| <= tol * max(1, |want|) everywhere; infinities must be equal.

    `tol` is by default that of got's dtype. Compared in fp64.
    """
    if tol is None:
        tol = TOLERANCE[got.dtype]
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, want {list(want.shape)}"
    if got.numel() == 0:
        return
    x, y = got.detach().cpu().double(), want.detach().cpu().double()
    bad = ~((x == y) | ((x - y).abs() <= tol * y.abs().clamp(min=1.0)))
    if not bool(bad.any()):
        return
    error = torch.where(x == y, 0.0, (x - y).abs()).nan_to_num(nan=torch.inf)
    worst = torch.unravel_index(error.argmax(), error.shape)
    at = tuple(int(i) for i in worst)
    finite = torch.isfinite(x) & torch.isfinite(y)
    cosine = torch.nn.functional.cosine_similarity(x[finite], y[finite], dim=0).item()
    raise AssertionError(
        f"{name}: {int(bad.sum())} of {x.numel()} values off by more than {tol:g}; "
        f"worst at {at}: got {x[at].item():.8g}, want {y[at].item():.8g}; "
        f"nan {int(x.isnan().sum())} (want {int(y.isnan().sum())}), "
        f"inf {int(x.isinf().sum())} (want {int(y.isinf().sum())}), cosine {cosine:.6f}"
    )
