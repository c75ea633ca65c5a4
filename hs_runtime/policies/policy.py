"""What a request may choose (`SparsityPolicy`), what the server fixes (`ServerConstants`), and the
digests of both.

Sparsity numbers are decimals with at most three places, kept as integers in thousandths: they are
counted with, hashed and compared, and floats would make `0.1 + 0.2` a cache miss. Nothing here
needs torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

CUSTOM_PARAM = (
    "hs_policy"  # the key of sampling_params.custom_params that carries SparsityPolicy.to_json()
)
BITS = (16,)  # element widths of stored nonzeros that the kernels can read
ANCHORS = ("segment", "chunk")
PHASES = ("prefill", "decode")
SIDES = ("k", "v")

_DECIMAL = re.compile(r"(?:0|1)(?:\.[0-9]{1,3})?", re.ASCII)
_COSTLIEST = "costliest:"
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}", re.ASCII)


class PolicyError(ValueError):
    """A wish that cannot be granted.

    `message` names it and the choices, `param` is the header or field, `code` a stable string.
    """

    def __init__(
        self, message: str, param: str | None = None, code: str = "invalid_policy"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


def parse_thousandths(text: str, param: str | None = None) -> int:
    """`"0.25"` -> 250. At most three decimals, 0 to 1; anything else raises `PolicyError`."""
    if not isinstance(text, str) or not _DECIMAL.fullmatch(text):
        raise _bad_number(text, param)
    whole, _, fraction = text.partition(".")
    value = 1000 * int(whole) + int(fraction.ljust(3, "0"))
    if value > 1000:
        raise _bad_number(text, param)
    return value


def format_thousandths(value: int) -> str:
    """250 -> `"0.25"`, 1000 -> `"1.0"`: the shortest decimal that parses back."""
    text = f"{value // 1000}.{value % 1000:03d}".rstrip("0")
    return text + "0" if text.endswith(".") else text


def _bad_number(wish: object, param: str | None) -> PolicyError:
    shown = wish if isinstance(wish, str) else repr(wish)
    return PolicyError(
        f"{shown[:40]!r} is not a sparsity: choose a plain decimal from 0 to 1 with at most three "
        "decimals, such as 0.5",
        param,
        "invalid_sparsity",
    )


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Share of candidate blocks that become 2:4 sparse, in thousandths (0..1000), of K and of V."""

    key: int = 0
    value: int = 0

    def __post_init__(self) -> None:
        for number in (self.key, self.value):
            if type(number) is not int or not 0 <= number <= 1000:
                raise PolicyError(
                    f"{number!r} is no sparsity in thousandths: choose an integer from 0 to 1000",
                    code="invalid_sparsity",
                )

    @property
    def is_dense(self) -> bool:
        return self.key == 0 and self.value == 0

    def of(self, side: int) -> int:
        """Thousandths of side 0 (K) or 1 (V)."""
        return (self.key, self.value)[side]

    def header_value(self) -> str:
        """As an RFC 8941 dictionary: `k=0.0, v=1.0`."""
        return f"k={format_thousandths(self.key)}, v={format_thousandths(self.value)}"

    def as_numbers(self) -> dict[str, float]:
        """As JSON numbers for people and clients: `{"k": 0.0, "v": 1.0}`."""
        return {"k": self.key / 1000, "v": self.value / 1000}


@dataclass(frozen=True, slots=True)
class SparsityPolicy:
    """Sparsity of the two phases; the default is dense.

    Decode is never below prefill on either side, since what was pruned is gone.
    """

    prefill: Sparsity = Sparsity()
    decode: Sparsity = Sparsity()
    bits: int = 16

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BITS:
            raise PolicyError(
                f"bits={self.bits!r} is not supported: choose {_listed(BITS)}",
                "bits",
                "invalid_bits",
            )
        for side, name in enumerate(SIDES):
            low, high = self.prefill.of(side), self.decode.of(side)
            if high < low:
                raise PolicyError(_below(name, low, high), "decode", "decode_below_prefill")

    @property
    def is_dense(self) -> bool:
        return self.prefill.is_dense and self.decode.is_dense

    @property
    def preset(self) -> str:
        """The preset with these numbers, or `"custom"`: a closed list, safe as a metric label."""
        return next((name for name, policy in PRESETS.items() if policy == self), "custom")

    def to_json(self) -> str:
        """Canonical: equal policies give equal text. One line, integers in thousandths, [K, V]."""
        return _canonical(
            {
                "bits": self.bits,
                "decode": [self.decode.key, self.decode.value],
                "prefill": [self.prefill.key, self.prefill.value],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> SparsityPolicy:
        """Inverse of `to_json`; raises `PolicyError` on other keys, shapes or numbers."""
        try:
            data = json.loads(text)
            (prefill_k, prefill_v), (decode_k, decode_v), bits = (
                data["prefill"],
                data["decode"],
                data["bits"],
            )
            known = set(data) == {"bits", "decode", "prefill"}
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise PolicyError(
                f"{str(text)[:80]!r} is not a policy in canonical JSON", code="malformed_policy"
            )
        return cls(Sparsity(prefill_k, prefill_v), Sparsity(decode_k, decode_v), bits)

    @property
    def digest(self) -> str:
        """SHA-256 of `to_json()`, hex."""
        return hashlib.sha256(self.to_json().encode("ascii")).hexdigest()


def _preset(prefill_k: int, prefill_v: int, decode_k: int, decode_v: int) -> SparsityPolicy:
    return SparsityPolicy(Sparsity(prefill_k, prefill_v), Sparsity(decode_k, decode_v))


PRESETS: dict[str, SparsityPolicy] = {
    "dense": _preset(0, 0, 0, 0),  # upstream behaviour
    "light": _preset(0, 0, 0, 1000),  # smallest loss; shares prefixes with dense
    "balanced": _preset(0, 1000, 0, 1000),  # both phases, safe
    "fast": _preset(0, 1000, 1000, 1000),  # the paper's differentiated setting
    "max": _preset(1000, 1000, 1000, 1000),  # most memory and speed
}
POLICIES = PRESETS
DENSE = PRESETS["dense"]


def preset(name: str, param: str | None = None) -> SparsityPolicy:
    """The preset of that name, or a `PolicyError` that lists the names."""
    if not isinstance(name, str) or name not in PRESETS:
        shown = name if isinstance(name, str) else repr(name)
        raise PolicyError(
            f"unknown policy {shown[:40]!r}: choose {_listed(PRESETS)}", param, "unknown_policy"
        )
    return PRESETS[name]


def parse_policy(text: str) -> SparsityPolicy:
    """A preset's name or the canonical JSON of a policy (for configuration, not for clients)."""
    return SparsityPolicy.from_json(text) if text.startswith("{") else preset(text)


@dataclass(frozen=True, slots=True)
class Wish:
    """What one source (headers or body) asks for: (K, V) in thousandths, None where not given.

    `params` are the names by which errors call the three parts: preset, prefill, decode.
    """

    preset: str | None = None
    prefill: tuple[int | None, int | None] = (None, None)
    decode: tuple[int | None, int | None] = (None, None)
    params: tuple[str, str, str] = field(default=("policy", "prefill", "decode"), compare=False)

    @property
    def is_empty(self) -> bool:
        return self.preset is None and not any(n is not None for n in (*self.prefill, *self.decode))


def resolve(wishes: Sequence[Wish], default: SparsityPolicy = DENSE) -> SparsityPolicy:
    """The policy that `wishes` (strongest first) add up to; `default` if none asks for anything.

    Each number comes from the first wish that gives it, as a number or through its preset; within a
    wish the number wins. A number that nobody gives: prefill 0, decode the prefill number of that
    side. A *given* decode number below the prefill number raises `PolicyError`, and so does an
    unknown preset, even of a wish that is outvoted.
    """
    asked = [
        (wish, None if wish.preset is None else preset(wish.preset, wish.params[0]))
        for wish in wishes
    ]
    if all(wish.is_empty for wish, _ in asked):
        return default

    def given(phase: int, side: int) -> tuple[int | None, str, str]:
        """The number, the param that gave it, and a clause that says how."""
        for wish, base in asked:
            number = (wish.prefill, wish.decode)[phase][side]
            if number is not None:
                return number, wish.params[1 + phase], ""
            if base is not None:
                return (
                    (base.prefill, base.decode)[phase].of(side),
                    wish.params[0],
                    f" (of preset {wish.preset!r})",
                )
        return None, "", ""

    prefill, decode = [0, 0], [0, 0]
    for side, name in enumerate(SIDES):
        low, low_param, low_how = given(0, side)
        high, high_param, high_how = given(1, side)
        prefill[side] = low or 0
        decode[side] = prefill[side] if high is None else high
        if decode[side] < prefill[side]:
            raise PolicyError(
                _below(name, prefill[side], decode[side], low_how, high_how),
                low_param if high_how and not low_how else high_param,
                "decode_below_prefill",
            )
    return SparsityPolicy(Sparsity(*prefill), Sparsity(*decode))


@dataclass(frozen=True, slots=True)
class ServerConstants:
    """What every request of one server shares, in tokens; impossible settings raise `ValueError`.

    `anchor="segment"`: a prefill query reads its own segment dense. `anchor="chunk"`: the paper's
    rule, everything before the last `window` tokens of a chunk is compressed for all its queries,
    and `chunk` is the reuse granularity. `calibration` identifies the calibration file by its
    content, "" without one. `dense_layers` are the layers, counted from 0, whose KV stays dense
    whatever a request's policy says.
    """

    page: int = 64
    sink: int = 64
    window: int = 256
    segment: int = 1024
    anchor: str = "segment"
    chunk: int = 32768
    pruner: str = "magnitude"
    calibration: str = ""
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dense_layers", _layer_numbers(self.dense_layers))
        for name in ("page", "sink", "window", "segment", "chunk"):
            if type(getattr(self, name)) is not int:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose a whole number of tokens")
        if self.page != 64:
            raise ValueError(f"page={self.page}: the kernels read pages of 64 tokens, choose 64")
        for name, unit, least in (
            ("sink", 64, 0),
            ("window", 64, 64),
            ("segment", 128, 128),
            ("chunk", 128, 128),
        ):
            number = getattr(self, name)
            if number < least or number % unit:
                raise ValueError(f"{name}={number}: choose a multiple of {unit} from {least} on")
        if self.anchor not in ANCHORS:
            raise ValueError(f"anchor={self.anchor!r}: choose {_listed(ANCHORS)}")
        if self.sink > self.granularity:
            raise ValueError(
                f"sink={self.sink}: choose at most one {self.anchor}, {self.granularity} tokens"
            )
        if not isinstance(self.pruner, str) or not _NAME.fullmatch(self.pruner):
            raise ValueError(f"pruner={self.pruner!r}: choose the name of a registered pruner")
        if not isinstance(self.calibration, str):
            raise ValueError(
                f"calibration={self.calibration!r}: choose a content digest, or '' for none"
            )

    @property
    def granularity(self) -> int:
        """Tokens compressed, matched, inserted and evicted together under sparse prefill."""
        return self.segment if self.anchor == "segment" else self.chunk

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON and digests. Without dense layers the name is left out, so that
        both are what they were before it existed."""
        values = asdict(self)
        if not self.dense_layers:
            del values["dense_layers"]
        return values

    def to_json(self) -> str:
        return _canonical(self.as_dict())

    def mixed_layers(self, layers: int) -> tuple[int, ...]:
        """Of a model with so many layers those whose blocks a policy may make sparse. Raises
        `ValueError` when a dense layer is not one of them, or none is left."""
        if unknown := [layer for layer in self.dense_layers if layer >= layers]:
            raise ValueError(
                f"dense_layers={_listed(unknown)}: the model has layers 0 to {layers - 1}"
            )
        mixed = tuple(layer for layer in range(layers) if layer not in self.dense_layers)
        if not mixed:
            raise ValueError(
                f"dense_layers={_listed(self.dense_layers)}: these are all layers of the model, "
                "choose fewer (policy dense keeps all of them dense)"
            )
        return mixed


@dataclass(frozen=True, slots=True)
class Costliest:
    """A wish for that many dense layers: those that pruning costs most."""

    count: int

    def __str__(self) -> str:
        return f"{_COSTLIEST}{self.count}"

    def of(self, costs: Sequence[float]) -> tuple[int, ...]:
        """The layers, by what pruning costs in each; the lower of two that cost the same.
        `ValueError` when some other number of them must be wished for."""
        layers = len(costs)
        if not 1 <= self.count < layers:
            raise ValueError(
                f"dense_layers='{self}': the model has {layers} layers, choose "
                f"from {_COSTLIEST}1 to {_COSTLIEST}{layers - 1}"
            )
        return tuple(sorted(sorted(range(layers), key=lambda i: (-costs[i], i))[: self.count]))


def parse_layers(text: str, separator: str = ",") -> tuple[int, ...] | Costliest:
    """`"3,7,12"` -> (3, 7, 12), in any order, `"costliest:8"` -> Costliest(8); `ValueError` on
    anything else."""
    if text.startswith(_COSTLIEST):
        count = text.removeprefix(_COSTLIEST)
        if count.isascii() and count.isdecimal():
            return Costliest(int(count))
        raise ValueError(
            f"dense_layers={text!r}: {count!r} is no number of layers, choose N of {_COSTLIEST}N "
            "from 1 to one less than the model has"
        )
    words = [word.strip() for word in text.split(separator)] if text else []
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise ValueError(
            f"dense_layers={text!r}: choose layer numbers from 0 on, such as "
            f"{separator.join(('3', '7', '12'))}, or {_COSTLIEST}N"
        )
    return _layer_numbers(sorted(map(int, words)))


def _layer_numbers(layers: Any) -> tuple[int, ...]:
    wish = f"dense_layers={layers!r}: "
    if not isinstance(layers, list | tuple):
        raise ValueError(f"{wish}choose a list of layer numbers, such as [3, 7, 12]")
    if not all(type(layer) is int and layer >= 0 for layer in layers):
        raise ValueError(f"{wish}choose whole numbers from 0 on")
    if list(layers) != sorted(set(layers)):
        raise ValueError(f"{wish}name every layer once, in ascending order")
    return tuple(layers)


@lru_cache(maxsize=256)
def namespace(policy: SparsityPolicy, constants: ServerConstants) -> str:
    """SHA-256 (hex) of all that shapes a prefix's stored pages: the prefill part and the constants.

    Decode settings are absent, so policies that differ only there share prefixes (`light` reads
    those of `dense`), and so are dense layers where prefill is dense in all.
    """
    shaping = constants.as_dict()
    if policy.prefill.is_dense:
        shaping.pop("dense_layers", None)
    part = {
        "bits": policy.bits,
        "prefill": [policy.prefill.key, policy.prefill.value],
        "constants": shaping,
    }
    return hashlib.sha256(_canonical(part).encode("utf-8")).hexdigest()


def _canonical(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _below(side: str, low: int, high: int, low_how: str = "", high_how: str = "") -> str:
    choices = "1.0" if low == 1000 else f"from {format_thousandths(low)} to 1.0"
    return (
        f"decode {side}={format_thousandths(high)}{high_how} is below prefill "
        f"{side}={format_thousandths(low)}{low_how}, but what prefill pruned is gone: "
        f"choose decode {side} {choices}, or give neither preset nor number for decode"
    )


def _listed(choices: Any) -> str:
    return ", ".join(str(choice) for choice in choices)
