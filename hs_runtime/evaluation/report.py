"""From records to figures: one row for each suite and arm, as JSON and as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, stdev
from typing import Final

from hs_runtime.evaluation.records import DECODE, PREFILL, Record

_LEGEND: Final = (
    "A suite is `kind@context in tokens`. KL is KL(dense || arm) of the next token in nats, the "
    "mean over scored tokens ± its standard error over cases; ΔNLL is the arm's negative "
    "log-likelihood of the text less that of dense; top-1 is how often the likeliest token is the "
    "same. An arm whose prefill is dense has the prefill of dense."
)


@dataclass(frozen=True, slots=True)
class Part:
    """Means over the scored tokens of prefill or decode. `kl_error` is the standard error of the
    mean over cases, NaN of a single one; `nll_gain` the arm's NLL over the dense arm's."""

    tokens: int
    kl: float
    kl_error: float
    nll: float
    nll_gain: float
    agreement: float
    accuracy: float

    @classmethod
    def of(cls, records: Sequence[Record], name: str) -> Part | None:
        sums = [record.parts[name] for record in records if name in record.parts]
        if not sums:
            return None
        tokens = sum(each.tokens for each in sums)
        means = [each.kl / each.tokens for each in sums]
        return cls(
            tokens=tokens,
            kl=math.fsum(each.kl for each in sums) / tokens,
            kl_error=stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan,
            nll=math.fsum(each.nll for each in sums) / tokens,
            nll_gain=math.fsum(each.nll - each.dense_nll for each in sums) / tokens,
            agreement=sum(each.agrees for each in sums) / tokens,
            accuracy=sum(each.correct for each in sums) / tokens,
        )


@dataclass(frozen=True, slots=True)
class Row:
    """One arm in one suite. `score` is the mean over cases, None where there is none to give;
    `kv_share` the KV bytes over those of a dense cache, NaN where the engine does not say."""

    suite: str
    arm: str
    cases: int
    prefill: Part | None
    decode: Part | None
    score: float | None
    categories: Mapping[str, float]
    kv_share: float
    values: Mapping[str, float]

    @property
    def kl(self) -> float:
        """The larger of the two parts' KL; NaN if nothing was compared."""
        return max((part.kl for part in (self.prefill, self.decode) if part), default=math.nan)


def rows_of(records: Sequence[Record]) -> list[Row]:
    """Suites in the order in which they were first measured, and arms likewise."""
    suites = list(dict.fromkeys(record.suite for record in records))
    arms = list(dict.fromkeys(record.arm for record in records))
    rows = []
    for suite in suites:
        for arm in arms:
            chosen = [each for each in records if (each.suite, each.arm) == (suite, arm)]
            if chosen:
                rows.append(_row(suite, arm, chosen))
    return rows


def _row(suite: str, arm: str, records: Sequence[Record]) -> Row:
    scores = [record.score for record in records if record.score is not None]
    dense = sum(record.dense_bytes for record in records)
    named = sorted((r for r in records if r.category and r.score is not None), key=_category)
    values = dict.fromkeys(name for record in records for name in record.values)
    return Row(
        suite=suite,
        arm=arm,
        cases=len(records),
        prefill=Part.of(records, PREFILL),
        decode=Part.of(records, DECODE),
        score=fmean(scores) if scores else None,
        categories={
            name: fmean(record.score or 0.0 for record in group)
            for name, group in groupby(named, key=_category)
        },
        kv_share=sum(record.kv_bytes for record in records) / dense if dense else math.nan,
        values={
            name: fmean(r.values[name] for r in records if name in r.values) for name in values
        },
    )


def _category(record: Record) -> str:
    return record.category


def markdown(rows: Sequence[Row], heading: str) -> str:
    """A section for each suite."""
    text = [f"# {heading}", "", _LEGEND, ""]
    for suite, group in groupby(rows, key=lambda row: row.suite):
        text += [f"## {suite}", "", *_table(list(group)), ""]
    return "\n".join(text)


def _table(rows: Sequence[Row]) -> list[str]:
    columns: list[tuple[str, list[str]]] = [
        ("arm", [f"`{row.arm}`" for row in rows]),
        ("cases", [str(row.cases) for row in rows]),
        ("KV of dense", [_number(row.kv_share, 3) for row in rows]),
    ]
    for name in (PREFILL, DECODE):
        parts = [getattr(row, name) for row in rows]
        if any(parts):
            columns += [
                (
                    f"{name} KL",
                    [_with_error(part, row) for part, row in zip(parts, rows, strict=True)],
                ),
                (f"{name} ΔNLL", [_signed(part.nll_gain) if part else "" for part in parts]),
                (f"{name} top-1", [f"{part.agreement:.3f}" if part else "" for part in parts]),
            ]
    if any(row.score is not None for row in rows):
        columns.append(("score", [_number(row.score, 3) for row in rows]))
    for name in dict.fromkeys(name for row in rows for name in row.categories):
        columns.append((name, [_number(row.categories.get(name), 3) for row in rows]))
    for name in dict.fromkeys(name for row in rows for name in row.values):
        columns.append((name, [_number(row.values.get(name), 4) for row in rows]))
    lines = zip(*(cells for _, cells in columns), strict=True)
    return [
        "| " + " | ".join(name for name, _ in columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(line) + " |" for line in lines),
    ]


def _with_error(part: Part | None, row: Row) -> str:
    if part is None:
        return "dense" if row.decode else ""
    error = "" if math.isnan(part.kl_error) else f" ± {part.kl_error:.4f}"
    return f"{part.kl:.4f}{error}"


def _signed(value: float) -> str:
    return f"{round(value, 4) + 0.0:+.4f}"  # without a minus before zero


def _number(value: float | None, digits: int) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.{digits}f}"


def recommend(rows: Sequence[Row], budget: float) -> Row | None:
    """Of the arms whose KL is within `budget` in every suite that compares with dense, the one
    with the least KV; ties go to the smaller KL. None if no arm is."""
    worst: dict[str, Row] = {}
    for row in rows:
        if math.isnan(row.kl) or math.isnan(row.kv_share):
            continue
        if row.arm not in worst or row.kl > worst[row.arm].kl:
            worst[row.arm] = row
    fitting = [row for row in worst.values() if row.kl <= budget]
    return min(fitting, key=lambda row: (row.kv_share, row.kl), default=None)
