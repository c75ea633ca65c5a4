"""Request headers and body object -> SparsityPolicy, and back into response headers.

    HieraSparse-Policy: balanced             a preset (an RFC 8941 token)
    HieraSparse-Prefill: k=0.0, v=1.0        RFC 8941 dictionaries; either key may be left out
    HieraSparse-Decode: k=1.0, v=1.0

and the same in the body, for clients that cannot set headers:

    "hierasparse": {"policy": "balanced", "prefill": {"k": 0, "v": 1}, "decode": {"v": 1}}

Every number comes from the headers if they give it (as a number or through a preset), else from
the body; within one of the two a number wins over its preset. What is malformed, unknown with our
prefix or said twice is refused: a policy that a proxy or a typo changed must not be served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any

import http_sf

from hs_runtime.policies import (
    PRESETS,
    PolicyError,
    ServerConstants,
    SparsityPolicy,
    Wish,
    parse_thousandths,
    preset,
    resolve,
)

POLICY, PREFILL, DECODE = "HieraSparse-Policy", "HieraSparse-Prefill", "HieraSparse-Decode"
PRUNER = "HieraSparse-Pruner"  # in responses only
REQUEST_HEADERS = (POLICY, PREFILL, DECODE)
RESPONSE_HEADERS = (POLICY, PREFILL, DECODE, PRUNER)
BODY_FIELD = "hierasparse"
MAX_VALUE_LENGTH = 64  # the longest sensible value, "k=0.125, v=0.125", has 16 characters

_PREFIXES = (b"hierasparse", b"x-hierasparse")  # an unknown name with either is a typo of ours
_KNOWN = {name.lower().encode("ascii"): name for name in REQUEST_HEADERS}
_KEYS = ("k", "v")

RawHeaders = Iterable[tuple[bytes, bytes]]


class JsonNumber(str):
    """A number of the request body in the client's own spelling, so that 1e0 is not taken for 1."""


def effective_policy(headers: RawHeaders, body: object, default: SparsityPolicy) -> SparsityPolicy:
    """The policy of a request: `headers` as ASGI gives them, `body` the parsed `hierasparse` field.

    `body` holds its numbers as `JsonNumber`; None is "not given". Raises `PolicyError`.
    """
    return resolve((header_wish(headers), body_wish(body)), default)


def response_headers(policy: SparsityPolicy, constants: ServerConstants) -> dict[str, str]:
    """What a response says about the policy that was applied."""
    return {
        POLICY: policy.preset,
        PREFILL: policy.prefill.header_value(),
        DECODE: policy.decode.header_value(),
        PRUNER: constants.pruner,
    }


def header_wish(headers: RawHeaders) -> Wish:
    """What the headers ask for; raises `PolicyError` on the first thing that is wrong with them."""
    values: dict[str, bytes] = {}
    for raw_name, raw_value in headers:
        name = raw_name.lower()
        if not name.startswith(_PREFIXES):
            continue
        if name not in _KNOWN:
            shown = _shown(raw_name)
            raise PolicyError(
                f"unknown header {shown}: choose {', '.join(REQUEST_HEADERS)}",
                shown,
                "unknown_policy_header",
            )
        header = _KNOWN[name]
        value = _checked(header, raw_value)
        if values.setdefault(header, value) != value:
            raise PolicyError(
                f"{header} is given as both {_shown(values[header])!r} and {_shown(value)!r}: "
                "choose one",
                header,
                "conflicting_policy_headers",
            )
    return Wish(
        preset=_token(values[POLICY]) if POLICY in values else None,
        prefill=_dictionary(PREFILL, values[PREFILL]) if PREFILL in values else (None, None),
        decode=_dictionary(DECODE, values[DECODE]) if DECODE in values else (None, None),
        params=REQUEST_HEADERS,
    )


def _checked(header: str, raw: bytes) -> bytes:
    """The value without surrounding blanks (RFC 9110 5.5), if it can be one at all."""
    value = raw.strip(b" \t")
    if not value:
        raise PolicyError(
            f"{header} is empty: {_choices(header)}", header, "malformed_policy_header"
        )
    if len(value) > MAX_VALUE_LENGTH:
        raise PolicyError(
            f"{header} has {len(value)} characters, at most {MAX_VALUE_LENGTH} are allowed: "
            f"{_choices(header)}",
            header,
            "policy_header_too_long",
        )
    if any(byte > 0x7E or (byte < 0x20 and byte != 0x09) for byte in value):
        raise PolicyError(
            f"{header} holds characters outside printable ASCII: {_choices(header)}",
            header,
            "malformed_policy_header",
        )
    return value


def _token(value: bytes) -> str:
    token, parameters = _parsed(POLICY, value, "item")
    if not isinstance(token, http_sf.Token) or parameters:
        raise _malformed(POLICY, value)
    preset(str(token), POLICY)
    return str(token)


def _dictionary(header: str, value: bytes) -> tuple[int | None, int | None]:
    """(K, V) in thousandths, None where the key is absent."""
    members = _parsed(header, value, "dictionary")
    # The library keeps the last of duplicate keys and cannot tell -0 from 0: the text can.
    texts: dict[str, str] = {}
    for member in value.decode("ascii").split(","):
        key, equals, text = member.strip(" \t").partition("=")
        if key in texts:
            raise PolicyError(
                f"{header} gives {key} twice ({_shown(value)!r}): choose one",
                header,
                "duplicate_policy_key",
            )
        if not equals or key not in _KEYS:
            raise _malformed(header, value)
        texts[key] = text
    for item, parameters in members.values():
        if parameters or isinstance(item, bool) or not isinstance(item, int | Decimal):
            raise _malformed(header, value)
    return _pair(texts, header)


def _parsed(header: str, value: bytes, kind: str) -> Any:
    try:
        return http_sf.parse(value, tltype=kind)
    except (http_sf.StructuredFieldError, ValueError):
        raise _malformed(header, value) from None


def body_wish(body: object) -> Wish:
    """What the `hierasparse` object of a body asks for; raises `PolicyError`."""
    params = tuple(f"{BODY_FIELD}.{part}" for part in ("policy", "prefill", "decode"))
    if body is None:
        return Wish()
    parts = _object(body, BODY_FIELD, ("policy", "prefill", "decode", "bits"))
    bits = parts.get("bits", JsonNumber("16"))
    if not isinstance(bits, JsonNumber) or bits != "16":
        raise PolicyError(
            f"bits={_spelled(bits)} is not supported: choose 16",
            f"{BODY_FIELD}.bits",
            "invalid_bits",
        )
    name = parts.get("policy")
    if name is not None:
        if isinstance(name, JsonNumber):
            raise PolicyError(
                f"{params[0]} is the number {_spelled(name)}: choose a preset's name",
                params[0],
                "unknown_policy",
            )
        preset(name, params[0])
    return Wish(
        preset=name,
        prefill=_body_pair(parts.get("prefill"), params[1]),
        decode=_body_pair(parts.get("decode"), params[2]),
        params=(params[0], params[1], params[2]),
    )


def _body_pair(part: object, param: str) -> tuple[int | None, int | None]:
    if part is None:
        return None, None
    numbers = _object(part, param, _KEYS)
    for key, number in numbers.items():
        if not isinstance(number, JsonNumber):
            raise PolicyError(
                f"{param}.{key} is {_spelled(number)}: choose a number from 0 to 1 with at most "
                "three decimals",
                f"{param}.{key}",
                "invalid_sparsity",
            )
    return _pair(numbers, param)


def _object(value: object, param: str, keys: tuple[str, ...]) -> dict[str, Any]:
    """`value` as an object of the known keys, without those that are null."""
    if not isinstance(value, dict):
        raise PolicyError(
            f"{param} is {_spelled(value)}: choose an object with {', '.join(keys)}",
            param,
            "malformed_policy",
        )
    for key in value:
        if key not in keys:
            raise PolicyError(
                f"unknown field {param}.{_spelled(key)}: choose {', '.join(keys)}",
                param,
                "unknown_policy_field",
            )
    return {key: item for key, item in value.items() if item is not None}


def _pair(texts: Mapping[str, str], param: str) -> tuple[int | None, int | None]:
    k, v = (parse_thousandths(str(texts[key]), param) if key in texts else None for key in _KEYS)
    return k, v


def _malformed(header: str, value: bytes) -> PolicyError:
    return PolicyError(
        f"{header}: {_shown(value)!r} is not understood: {_choices(header)}",
        header,
        "malformed_policy_header",
    )


def _choices(header: str) -> str:
    if header == POLICY:
        return f"choose {', '.join(PRESETS)}"
    return "choose k=N, v=N or one of them, N from 0 to 1 with at most three decimals"


def _shown(raw: bytes) -> str:
    """A header's text for a message: what a client sent may hold anything."""
    return raw[:MAX_VALUE_LENGTH].decode("ascii", "backslashreplace")


def _spelled(value: object) -> str:
    return str(value)[:40] if isinstance(value, JsonNumber) else repr(value)[:40]
