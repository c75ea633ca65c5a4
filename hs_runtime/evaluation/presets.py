"""What each preset was measured to cost: made by a run of the suite `kl`, shipped with the package.

The shipped file says which model, text and day its numbers are of; they are an example of the order
of magnitude, not a promise for another model. `hs-runtime eval` makes the same for any model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, Final

from hs_runtime.config import ConfigError
from hs_runtime.evaluation.arms import Arm, parse_arm
from hs_runtime.evaluation.report import Part, Row
from hs_runtime.policies import PRESETS
from hs_runtime.policies.policy import ServerConstants

FILE: Final = "presets.json"
_SHAPING: Final = ("pruner", "segment", "window", "sink", "anchor")
_DIGITS: Final = 5


def preset_numbers(
    rows: Sequence[Row], constants: ServerConstants, calibration: str, about: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One set for each pruner (and other constants) under which presets ran in a suite `kl`; of
    several contexts the longest counts.

    `about` says of what the numbers are: model, text, device, date.
    """
    sets: dict[str, dict[str, Any]] = {}
    for row in rows:
        kind, _, context = row.suite.partition("@")
        arm = _arm_of(row, constants, calibration)
        if kind != "kl" or arm is None or arm.stock or row.decode is None:
            continue
        if arm.policy.preset == "custom" or arm.constants.dense_layers:
            continue
        shaping = {name: getattr(arm.constants, name) for name in _SHAPING}
        found = sets.setdefault(json.dumps(shaping), {**about, "constants": shaping, "presets": {}})
        known = found["presets"].get(arm.policy.preset)
        if known is None or known["context"] < int(context):
            found["presets"][arm.policy.preset] = {
                "context": int(context),
                "documents": row.cases,
                "kv_share": _rounded(row.kv_share),
                "prefill": _part(row.prefill),
                "decode": _part(row.decode),
            }
    return [found for found in sets.values() if len(found["presets"]) > 1]


def _arm_of(row: Row, constants: ServerConstants, calibration: str) -> Arm | None:
    """None for a row whose arm this command line does not know how to make."""
    try:
        return parse_arm(row.arm, constants, calibration)
    except ConfigError:
        return None


def _part(part: Part | None) -> dict[str, float]:
    """Dense prefill is not measured: it is what the others are compared with."""
    if part is None:
        return {"tokens": 0, "kl": 0.0, "nll_gain": 0.0, "agreement": 1.0}
    return {
        "tokens": part.tokens,
        "kl": _rounded(part.kl),
        "nll_gain": _rounded(part.nll_gain),
        "agreement": _rounded(part.agreement),
    }


def _rounded(value: float) -> float:
    return round(value, _DIGITS) + 0.0


def shipped_presets() -> list[dict[str, Any]]:
    """The sets that come with the package."""
    text = resources.files(__package__).joinpath("data", FILE).read_text(encoding="utf-8")
    sets: list[dict[str, Any]] = json.loads(text)
    return sets


def measured_presets(constants: ServerConstants) -> dict[str, Any] | None:
    """The shipped set of a server with these constants; None if none was measured with them."""
    if constants.dense_layers:
        return None
    shaping = {name: getattr(constants, name) for name in _SHAPING}
    return next((found for found in shipped_presets() if found["constants"] == shaping), None)


def preset_table(sets: Sequence[Mapping[str, Any]]) -> str:
    """Markdown, one table for each set."""
    text = []
    for found in sets:
        constants = found["constants"]
        text += [
            f"{found['model']}, {found['text']}, pruner `{constants['pruner']}`, "
            f"segment {constants['segment']}, {found['device']}, {found['date']}:",
            "",
            "| preset | context | KV of dense | prefill KL | top-1 | decode KL | top-1 |",
            "|---|---|---|---|---|---|---|",
        ]
        for name in PRESETS:
            if name in found["presets"]:
                row = found["presets"][name]
                prefill, decode = row["prefill"], row["decode"]
                text.append(
                    f"| `{name}` | {row['context']} | {row['kv_share']:.3f} "
                    f"| {prefill['kl']:.4f} | {prefill['agreement']:.3f} "
                    f"| {decode['kl']:.4f} | {decode['agreement']:.3f} |"
                )
        text.append("")
    return "\n".join(text)
