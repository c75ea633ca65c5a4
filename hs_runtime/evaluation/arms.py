"""What is compared: an arm is a policy under a set of server constants.

`light`                                   a preset, with the constants of the command line
`decode=1/1`                              S_K = S_V = 1 in decode only
`prefill=0/1+decode=1/1+pruner=random`    numbers of both phases, another pruner
`max+dense_layers=3/7`                    layers 3 and 7 stay dense
`max+dense_layers=costliest:8`            those 8 that the calibration file says cost most
`paper`                                   all sparse by magnitude, under the paper's chunk rule
`fp8`                                     stock SGLang with an FP8 KV cache (CUDA devices)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from hs_runtime.config import ConfigError
from hs_runtime.policies.policy import (
    DENSE,
    PRESETS,
    Costliest,
    PolicyError,
    ServerConstants,
    SparsityPolicy,
    Wish,
    parse_layers,
    parse_thousandths,
    resolve,
)

ALIASES: Final = {
    "paper": "max+pruner=magnitude+anchor=chunk",
    "unstructured": "max+pruner=unstructured",
}
FP8: Final = "fp8"
_NUMBERS: Final = ("segment", "window", "sink", "chunk")
_WORDS: Final = ("pruner", "anchor")
_LAYERS: Final = "dense_layers"


@dataclass(frozen=True, slots=True)
class Arm:
    """`name` is how the user wrote it. `stock` is SGLang's own backend and FP8 KV."""

    name: str
    policy: SparsityPolicy
    constants: ServerConstants
    stock: bool = False

    def to_json(self) -> str:
        """Canonical: what the arm computes, without its name."""
        if self.stock:
            return json.dumps({"stock": FP8})
        values = {"policy": self.policy.to_json(), "constants": self.constants.as_dict()}
        return json.dumps(values, sort_keys=True)

    def serve_options(self, own_pruner: str) -> list[str]:
        """What tells `serve` to give this arm: its policy, and constants that are not the usual
        ones. `own_pruner` is what `serve` takes unless told. Not of a stock arm."""
        usual, mine = ServerConstants(pruner=own_pruner), self.constants
        preset = self.policy.preset
        words = ["--default-policy", self.policy.to_json() if preset == "custom" else preset]
        for name in ("pruner", "segment", "window", "sink", "anchor"):
            if getattr(mine, name) != getattr(usual, name):
                words += [f"--{name}", str(getattr(mine, name))]
        if mine.anchor == "chunk":
            words += ["--chunked-prefill-size", str(mine.chunk)]
        if mine.dense_layers:
            words += ["--dense-layers", ",".join(map(str, mine.dense_layers))]
        return words


def parse_arm(
    text: str,
    constants: ServerConstants,
    calibration: str = "",
    costs: Callable[[], Sequence[float]] | None = None,
) -> Arm:
    """An arm in the syntax above; `constants` are those of the command line, `calibration` the
    digest of the file for pruners that need one, `costs` reads what it says of layers. Raises
    ConfigError."""
    if text == FP8:
        return Arm(text, DENSE, constants, stock=True)
    preset: str | None = None
    changes: dict[str, Any] = {}
    shares: dict[str, tuple[int | None, int | None]] = {}
    for word in ALIASES.get(text, text).split("+"):
        name, equals, value = word.partition("=")
        if not equals and preset is None:
            preset = name
        elif name in ("prefill", "decode") and value:
            shares[name] = _shares(text, value)
        elif name in _WORDS and value:
            changes[name] = value
        elif name in _NUMBERS and value.isdecimal():
            changes[name] = int(value)
        elif name == _LAYERS and value:
            changes[name] = _layers(text, value, costs)
        else:
            raise ConfigError(f"arms: {word!r} of {text!r} (choose {_grammar()})")
    try:
        given = (None, None)
        wish = Wish(preset, shares.get("prefill", given), shares.get("decode", given))
        policy = resolve([wish])
    except PolicyError as error:
        raise ConfigError(f"arms: {text!r}: {error.message} (or {_grammar()})") from error
    return Arm(text, policy, _changed(text, constants, changes, calibration))


def _changed(
    text: str, constants: ServerConstants, changes: dict[str, Any], calibration: str
) -> ServerConstants:
    from hs_runtime.policies.pruner import build_pruner  # torch, which `--help` need not wait for

    try:
        changed = replace(constants, **changes)
        needed = build_pruner(changed.pruner).needs_calibration
    except ValueError as error:
        raise ConfigError(f"arms: {text!r}: {error}") from error
    if needed and not calibration:
        raise ConfigError(f"arms: {text!r}: pruner {changed.pruner!r} needs --calibration FILE")
    return replace(changed, calibration=calibration if needed else "")


def _layers(text: str, value: str, costs: Callable[[], Sequence[float]] | None) -> tuple[int, ...]:
    try:
        layers = parse_layers(value, "/")
        if not isinstance(layers, Costliest):
            return layers
        if costs is None:
            raise ValueError("which layers cost most is in the calibration file (--calibration)")
        return layers.of(costs())
    except ValueError as error:
        raise ConfigError(f"arms: {text!r}: {error}") from error


def _shares(text: str, value: str) -> tuple[int, int]:
    try:
        key, other = (parse_thousandths(each) for each in value.split("/"))
    except ValueError as error:
        raise ConfigError(f"arms: {value!r} of {text!r} (K and V in [0, 1], e.g. 0/1)") from error
    return key, other


def _grammar() -> str:
    names = ", ".join((*PRESETS, *ALIASES, FP8))
    return f"{names}, or parts joined by '+': prefill=K/V, decode=K/V, " + ", ".join(
        f"{name}=..." for name in (*_WORDS, *_NUMBERS, _LAYERS)
    )


def parse_arms(
    texts: list[str],
    constants: ServerConstants,
    calibration: str = "",
    costs: Callable[[], Sequence[float]] | None = None,
) -> list[Arm]:
    """Of a repeatable, comma-separated option. Raises ConfigError on a repeated arm."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("arms: none given")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"arms: {', '.join(twice)} given twice")
    for before, name in pairwise(names):
        numbers = before.partition(f"{_LAYERS}=")[2].replace("/", "")
        if numbers.isdecimal() and name.partition("+")[0].isdecimal():
            raise ConfigError(
                f"arms: {name!r} after {before!r} (',' separates arms, and '/' the layers of one: "
                f"{before}/{name})"
            )
    return [parse_arm(name, constants, calibration, costs) for name in names]
