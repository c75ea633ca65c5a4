"""Plots of a run, if matplotlib is installed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from hs_runtime.config import ConfigError
from hs_runtime.evaluation.layers import EDGES, SIDES, LayerStatistics
from hs_runtime.evaluation.report import Row

_LEAST_KL: Final = 1e-6  # where a logarithmic axis ends; dense is drawn there
_STEP: Final = "TPOT ms"
INSTALL: Final = "pip install 'hierasparse-runtime[plots]'"


def _pyplot() -> Any:
    """Raises ConfigError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigError(f"plots: matplotlib is not installed ({INSTALL})") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def can_plot() -> bool:
    try:
        _pyplot()
    except ConfigError:
        return False
    return True


def plot_pareto(rows: Sequence[Row], folder: Path) -> list[Path]:
    """KL to dense against the share of a dense cache's bytes, one file for each suite that compares
    with dense; against the time of a token too, where the arms' speed was measured."""
    steps = {row.arm: row.values[_STEP] for row in rows if _STEP in row.values}
    made = []
    for suite, group in groupby(rows, key=lambda row: row.suite):
        compared = [row for row in group if not math.isnan(row.kl)]
        if not compared:
            continue
        stem = suite.replace("@", "-")
        points = [(row, row.kv_share) for row in compared if not math.isnan(row.kv_share)]
        name = "KV bytes, share of a dense cache"
        made.append(_pareto(points, suite, name, folder / f"pareto-bytes-{stem}.png"))
        timed = [(row, steps[row.arm]) for row in compared if row.arm in steps]
        if timed:
            name = "time per output token, ms"
            made.append(_pareto(timed, suite, name, folder / f"pareto-speed-{stem}.png"))
    return made


def _pareto(points: Sequence[tuple[Row, float]], title: str, label: str, path: Path) -> Path:
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for part, marker in (("prefill", "s"), ("decode", "o")):
        shown = [(row, x) for row, x in points if getattr(row, part)]
        if not shown:
            continue
        kl = [max(_LEAST_KL, getattr(row, part).kl) for row, _ in shown]
        errors = [getattr(row, part).kl_error for row, _ in shown]
        axes.errorbar(
            [x for _, x in shown],
            kl,
            yerr=[0.0 if math.isnan(error) else error for error in errors],
            fmt=marker,
            label=part,
        )
        for (row, x), y in zip(shown, kl, strict=True):
            axes.annotate(row.arm, (x, y), textcoords="offset points", xytext=(5, 4), fontsize=7)
    axes.set(yscale="log", xlabel=label, ylabel="KL to dense, nats a token", title=title)
    axes.legend()
    return _saved(figure, path)


def plot_layers(found: LayerStatistics, pruner: str, folder: Path) -> list[Path]:
    """The paper's Figures 2 and 6b: mean |x| of every channel, and what 2:4 drops."""
    plt = _pyplot()
    layers, _, heads, channels = found.magnitude.shape
    figure, both = plt.subplots(2, 1, figsize=(10, 8), layout="constrained")
    for side, axes in enumerate(both):
        image = found.magnitude[:, side].reshape(layers, heads * channels)
        shown = axes.imshow(image, aspect="auto", interpolation="nearest")
        axes.set(title=f"mean |{SIDES[side]}|, pruner {pruner}", ylabel="layer")
        axes.set_xlabel(f"channel of each of {heads} heads")
        figure.colorbar(shown, ax=axes)
    made = [_saved(figure, folder / "layers-channels.png")]

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for side, name in enumerate(SIDES):
        counts = found.histogram[:, side].sum(0)
        left.step(range(len(counts)), counts / counts.sum(), where="mid", label=name)
        loss = found.loss[:, side].mean(-1) * found.magnitude[:, side].mean((-2, -1))
        right.plot(range(layers), loss, marker=".", label=name)
    ticks = range(0, len(EDGES), 3)
    left.set_xticks([tick + 0.5 for tick in ticks], [f"{EDGES[tick]:g}" for tick in ticks])
    left.set(xlabel="|x|", ylabel="share of elements", title="magnitudes")
    right.set(xlabel="layer", ylabel="mean |x| dropped", title="loss of 2:4 by magnitude")
    left.legend()
    right.legend()
    return [*made, _saved(figure, folder / "layers-loss.png")]


def _saved(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    _pyplot().close(figure)
    return path
