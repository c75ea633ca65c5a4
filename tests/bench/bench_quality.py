"""From a folder that quality.sh has filled to one JSON line for each row of the quality table.

    python tests/bench/bench_quality.py --results DIR --output tests/bench/results/cpu/quality.jsonl

`ours` is the calibrated pruner, `baseline` the paper's magnitude pruner in the same run. Of KL,
`ratio` is ours over the baseline (less is better); `interval` is its 90 % bootstrap over documents.
Of the passkey it is the share of prompts answered, and `ratio` ours over dense.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from hs_runtime.calibration import digest  # noqa: E402
from hs_runtime.evaluation.records import Record, Records  # noqa: E402

OURS, BASELINE = "pruner=calibrated", "pruner=magnitude"
RESAMPLES = 2000


# What the pruners are seen beside: the paper's own rule, masks that are not 2:4, and FP8.
REFERENCES = (
    (
        "kl@6144",
        "max+pruner=magnitude+anchor=chunk+chunk=1024",
        "prefill",
        "chunks decide, as in the paper",
    ),
    (
        "kl@3072",
        "decode=1/1+pruner=unstructured",
        "decode",
        "half of each token's channels, not 2:4",
    ),
    ("kl@3072", "fp8", "decode", "stock SGLang with its KV in FP8"),
)


@dataclass(frozen=True)
class Setting:
    """One row of the table: `bar` is what the ratio has to be below."""

    suite: str
    arm: str
    part: str
    bar: float


SETTINGS = (
    Setting("kl@3072", "decode=1/1", "decode", 0.13),
    Setting("kl@3072", "decode=1/0", "decode", 0.045),
    Setting("kl@3072", "decode=0/1", "decode", 0.60),
    Setting("copy@1400", "decode=1/1", "decode", 0.25),
    Setting("kl@6144", "prefill=1/1", "prefill", 0.20),
    Setting("kl@6144", "prefill=0/1", "prefill", 0.75),
    Setting("kl@6144", "prefill=1/0", "prefill", 0.06),
)


def by_case(records: list[Record], suite: str, arm: str) -> dict[str, Record]:
    return {each.case: each for each in records if (each.suite, each.arm) == (suite, arm)}


def mean_kl(records: list[Record], part: str) -> float:
    sums = [record.parts[part] for record in records]
    return sum(each.kl for each in sums) / sum(each.tokens for each in sums)


def kl_lines(records: list[Record]) -> Iterator[dict[str, Any]]:
    for setting in SETTINGS:
        ours = by_case(records, setting.suite, f"{setting.arm}+{OURS}")
        base = by_case(records, setting.suite, f"{setting.arm}+{BASELINE}")
        cases = sorted(set(ours) & set(base))
        if len(cases) < 2:
            continue
        pairs = [(ours[case], base[case]) for case in cases]
        rng, ratios = random.Random(0), []
        for _ in range(RESAMPLES):
            drawn = rng.choices(pairs, k=len(pairs))
            kl = [mean_kl([pair[side] for pair in drawn], setting.part) for side in (0, 1)]
            ratios.append(kl[0] / kl[1])
        ratios.sort()
        found = [mean_kl([pair[side] for pair in pairs], setting.part) for side in (0, 1)]
        sums = [pair[0].parts[setting.part] for pair in pairs]
        yield {
            "bench": "quality_kl",
            "case": {
                "suite": setting.suite,
                "policy": setting.arm,
                "part": setting.part,
                "documents": len(cases),
                "tokens": sum(each.tokens for each in sums),
            },
            "unit": "nats/token",
            "ours": round(found[0], 5),
            "baseline": round(found[1], 5),
            "baseline_name": "magnitude",
            "ratio": round(found[0] / found[1], 4),
            "interval": [round(ratios[RESAMPLES // 20], 4), round(ratios[-RESAMPLES // 20], 4)],
            "bar": setting.bar,
            "agreement": round(sum(s.agrees for s in sums) / sum(s.tokens for s in sums), 4),
        }


def reference_lines(records: list[Record]) -> Iterator[dict[str, Any]]:
    for suite, arm, part, name in REFERENCES:
        found = [each.parts[part] for each in by_case(records, suite, arm).values()]
        if not found:
            continue
        tokens = sum(each.tokens for each in found)
        yield {
            "bench": "quality_reference",
            "case": {
                "suite": suite,
                "policy": arm,
                "part": part,
                "documents": len(found),
                "tokens": tokens,
                "name": name,
            },
            "unit": "nats/token",
            "ours": round(sum(each.kl for each in found) / tokens, 5),
            "agreement": round(sum(each.agrees for each in found) / tokens, 4),
        }


def answer_lines(records: list[Record]) -> Iterator[dict[str, Any]]:
    suites = sorted({each.suite for each in records if each.score is not None and each.parts})
    for suite in suites:
        arms = {
            name: by_case(records, suite, arm)
            for name, arm in (
                ("dense", "dense"),
                ("ours", f"decode=1/1+{OURS}"),
                ("magnitude", f"decode=1/1+{BASELINE}"),
            )
        }
        cases = set.intersection(*(set(found) for found in arms.values()))
        if not cases:
            continue
        share = {
            name: sum(found[case].score or 0 for case in cases) / len(cases)
            for name, found in arms.items()
        }
        yield {
            "bench": "quality_exact",
            "case": {"suite": suite, "policy": "decode=1/1", "prompts": len(cases)},
            "unit": "share of prompts",
            "ours": share["ours"],
            "baseline": share["dense"],
            "baseline_name": "dense",
            "ratio": round(share["ours"] / share["dense"], 4) if share["dense"] else None,
            "magnitude": share["magnitude"],
        }


def agreement_lines(records: list[Record], others: list[Record]) -> Iterator[dict[str, Any]]:
    """The same documents elsewhere: what the device changes."""
    for suite, arm in sorted({(each.suite, each.arm) for each in records}):
        mine, theirs = by_case(records, suite, arm), by_case(others, suite, arm)
        cases = sorted(set(mine) & set(theirs))
        for part in sorted({name for case in cases for name in mine[case].parts}):
            pairs = [(mine[case].parts[part], theirs[case].parts[part]) for case in cases]
            if any(ours.tokens != other.tokens for ours, other in pairs):
                raise ValueError(f"{suite} {arm}: other tokens are scored")
            tokens = sum(ours.tokens for ours, _ in pairs)
            found = [sum(pair[side].kl for pair in pairs) / tokens for side in (0, 1)]
            apart = max(abs(ours.kl - other.kl) / ours.tokens for ours, other in pairs)
            yield {
                "bench": "quality",
                "case": {
                    "suite": suite,
                    "policy": arm,
                    "part": part,
                    "documents": len(cases),
                    "tokens": tokens,
                },
                "unit": "nats/token",
                "ours": round(found[0], 6),
                "baseline": round(found[1], 6),
                "baseline_name": "float32 on the CPU",
                "ratio": round(found[1] / found[0], 4) if found[0] else None,
                "largest_difference_of_a_document": round(apart, 6),
            }


def markdown(lines: list[dict[str, Any]]) -> str:
    versions, date = lines[0]["versions"], lines[0]["date"]
    text = [
        f"# Calibrated over magnitude, {versions['model']}, held-out novels, {versions['device']}",
        "",
        "KL(dense || arm) of the next token in nats; the interval is a 90 % bootstrap over 10 "
        "documents (20 where they are copied).",
        f"{date}, calibration `{versions.get('calibration', 'not given')}`, by "
        "`tests/bench/quality.sh`.",
        "",
        "| setting | tokens | magnitude | calibrated | ratio (90 %) | bar |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        case = line["case"]
        if line["bench"] == "quality_kl":
            low, high = line["interval"]
            text.append(
                f"| {case['suite']} `{case['policy']}`, {case['part']} KL | {case['tokens']} "
                f"| {line['baseline']:.4f} | {line['ours']:.4f} "
                f"| {line['ratio']:.3f} ({low:.3f} to {high:.3f}) | {line['bar']} |"
            )
        elif line["bench"] == "quality_reference":
            text.append(
                f"| {case['suite']} `{case['policy']}`, {case['part']} KL: {case['name']} "
                f"| {case['tokens']} | | {line['ours']:.4f} | | |"
            )
        else:
            text.append(
                f"| {case['suite']} `{case['policy']}`, exact of {case['prompts']} "
                f"(dense {line['baseline']:.3f}) | | {line['magnitude']:.3f} | {line['ours']:.3f} "
                "| | |"
            )
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--device", default="CPU, float32")
    parser.add_argument("--calibration", type=Path, help="the file that was used")
    parser.add_argument("--against", type=Path, help="results of the CPU: append how far these are")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch

    records = list(Records(args.results).all())
    versions = {"model": args.model, "device": args.device, "torch": torch.__version__}
    if args.calibration:
        versions["calibration"] = digest(args.calibration)[:12]
    common = {"versions": versions, "date": datetime.date.today().isoformat()}
    if args.against:
        others = list(Records(args.against).all())
        text = "".join(
            json.dumps({**line, **common}) + "\n" for line in agreement_lines(records, others)
        )
        print(text)
        if args.output:
            with args.output.open("a") as file:
                file.write(text)
        return
    of_all = (*kl_lines(records), *reference_lines(records), *answer_lines(records))
    lines = [{**line, **common} for line in of_all]
    print(markdown(lines))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
        args.output.with_suffix(".md").write_text(markdown(lines))


if __name__ == "__main__":
    main()
