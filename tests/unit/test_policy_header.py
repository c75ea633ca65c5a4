"""Headers and body objects to policies: what is understood, and what each refusal says."""

from __future__ import annotations

import json

import pytest

from hs_runtime.policies import PRESETS, PolicyError, ServerConstants, SparsityPolicy
from hs_server.policy_header import (
    DECODE,
    MAX_VALUE_LENGTH,
    POLICY,
    PREFILL,
    JsonNumber,
    effective_policy,
    response_headers,
)

DENSE = PRESETS["dense"]


def effective(
    *headers: tuple[str, str | bytes], body: object = None, default: SparsityPolicy = DENSE
) -> str:
    """The policy's canonical JSON; `body` is written as JSON and read as the server reads it."""
    raw = [
        (name.lower().encode(), value if isinstance(value, bytes) else value.encode())
        for name, value in headers
    ]
    text = body if isinstance(body, str) else json.dumps(body)
    read = json.loads(text, parse_int=JsonNumber, parse_float=JsonNumber)
    return effective_policy(raw, read, default).to_json()


def numbers(prefill: tuple[int, int], decode: tuple[int, int]) -> str:
    return json.dumps(
        {"bits": 16, "decode": list(decode), "prefill": list(prefill)}, separators=(",", ":")
    )


def refused(*headers: tuple[str, str | bytes], body: object = None) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        effective(*headers, body=body)
    assert caught.value.message and caught.value.param and caught.value.code
    return caught.value


# ---- understood -------------------------------------------------------------------------------


def test_no_header_is_the_server_default() -> None:
    assert effective(("Accept", "*/*"), default=PRESETS["fast"]) == PRESETS["fast"].to_json()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_token(name: str) -> None:
    assert effective((POLICY, name)) == PRESETS[name].to_json()
    assert effective((POLICY, f" {name}\t")) == PRESETS[name].to_json()
    assert effective(body={"policy": name}) == PRESETS[name].to_json()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("k=0.0, v=1.0", (0, 1000)),
        ("v=1.0,k=0.0", (0, 1000)),
        ("v=1", (0, 1000)),
        ("k=0.125,\tv=0.5", (125, 500)),
        ("k=0.50 ,  v=0.5", (500, 500)),
    ],
)
def test_numbers_are_a_dictionary_of_k_and_v(value: str, expected: tuple[int, int]) -> None:
    assert effective((PREFILL, value)) == numbers(expected, expected)


def test_decode_numbers_stand_beside_prefill_numbers() -> None:
    assert effective((PREFILL, "v=0.25"), (DECODE, "k=1.0, v=0.5")) == numbers(
        (0, 250), (1000, 500)
    )


def test_numbers_win_over_the_preset() -> None:
    assert effective((POLICY, "light"), (DECODE, "k=0.5")) == numbers((0, 0), (500, 1000))


def test_the_header_wins_over_the_body() -> None:
    assert effective((POLICY, "dense"), body={"policy": "max"}) == PRESETS["dense"].to_json()
    assert effective((DECODE, "k=1.0"), body={"decode": {"k": 0, "v": 1}}) == numbers(
        (0, 0), (1000, 1000)
    )


def test_a_header_said_twice_the_same_way_is_said_once() -> None:
    assert effective((POLICY, "max"), (POLICY, "max ")) == PRESETS["max"].to_json()


def test_the_body_says_the_same_as_the_headers() -> None:
    body = {"policy": "light", "prefill": {"v": 0.25}, "decode": {"k": 1, "v": None}, "bits": 16}
    assert effective(body=body) == numbers((0, 250), (1000, 1000))
    assert effective(body=None) == effective(body={}) == DENSE.to_json()


def test_the_response_names_what_was_applied() -> None:
    assert response_headers(PRESETS["fast"], ServerConstants()) == {
        "HieraSparse-Policy": "fast",
        "HieraSparse-Prefill": "k=0.0, v=1.0",
        "HieraSparse-Decode": "k=1.0, v=1.0",
        "HieraSparse-Pruner": "magnitude",
    }


# ---- refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    ['"max"', "max;q=1", "max, max", "max max", "?1", "1", "(max)", ":bWF4:", "max=1", "@1",
     "*max?"],
)  # fmt: skip
def test_a_policy_that_is_no_bare_token_is_malformed(value: str) -> None:
    error = refused((POLICY, value))
    assert (error.param, error.code) == (POLICY, "malformed_policy_header")
    assert "choose dense, light, balanced, fast, max" in error.message


@pytest.mark.parametrize("value", ["turbo", "DENSE", "Max", "custom", "dense.", "*"])
def test_an_unknown_preset_is_refused_with_the_choices(value: str) -> None:
    error = refused((POLICY, value))
    assert (error.param, error.code) == (POLICY, "unknown_policy")
    assert error.message == f"unknown policy '{value}': choose dense, light, balanced, fast, max"


@pytest.mark.parametrize(
    "value",
    ["v", "v=?1", "v=(1 0)", "v=1;a", "v=1;a=2", 'v="1"', 'v="1,k=1"', "v=one", "v=:MQ==:",
     "V=1", "x=1", "bits=16", "v=1,", ",v=1", "v=1,,k=1", "v =1", "v= 1", "v=1 k=1", "v=1. ",
     "v=.5", "v=+1", "v=1e0", "v=nan", "v=inf", "v=50%", "v=0.1234", "v=0_5", "v=@1", "=1",
     "v=1k=1", "k=0x1"],
)  # fmt: skip
@pytest.mark.parametrize("header", [PREFILL, DECODE])
def test_what_is_no_dictionary_of_numbers_is_malformed(header: str, value: str) -> None:
    error = refused((header, value))
    assert error.param == header
    assert error.code in ("malformed_policy_header", "invalid_sparsity")


@pytest.mark.parametrize("value", ["v=1.001", "v=2", "v=-1", "v=-0", "v=-0.0", "v=00.5", "v=01"])
def test_numbers_out_of_range_are_refused(value: str) -> None:
    error = refused((PREFILL, value))
    assert (error.param, error.code) == (PREFILL, "invalid_sparsity")
    assert repr(value.removeprefix("v=")) in error.message


@pytest.mark.parametrize("value", ["v=1, v=1", "v=0.5,k=0,v=1", "k=1,k=1;x", 'k="a",k=1'])
def test_a_key_said_twice_is_refused_even_if_the_library_would_keep_one(value: str) -> None:
    error = refused((PREFILL, value))
    assert (error.param, error.code) == (PREFILL, "duplicate_policy_key")


def test_lines_of_one_header_that_differ_are_refused() -> None:
    error = refused((PREFILL, "k=0.5"), (PREFILL, "v=1.0"))
    assert (error.param, error.code) == (PREFILL, "conflicting_policy_headers")
    assert "'k=0.5'" in error.message and "'v=1.0'" in error.message


@pytest.mark.parametrize(
    "name",
    ["HieraSparse-Prefil", "HieraSparse-Policy-K", "HieraSparse", "HieraSparse-Pruner",
     "HieraSparse_Policy", "X-HieraSparse-Policy", "HieraSparse-"],
)  # fmt: skip
def test_an_unknown_header_with_our_prefix_is_refused(name: str) -> None:
    error = refused((name, "max"))
    assert (error.param, error.code) == (name.lower(), "unknown_policy_header")
    assert f"choose {POLICY}, {PREFILL}, {DECODE}" in error.message


@pytest.mark.parametrize("header", [POLICY, PREFILL, DECODE])
@pytest.mark.parametrize("value", ["", " ", "\t \t"])
def test_an_empty_header_is_refused(header: str, value: str) -> None:
    assert refused((header, value)).code == "malformed_policy_header"


@pytest.mark.parametrize("value", ["k=0." + "0" * 100, "m" * (MAX_VALUE_LENGTH + 1)])
def test_an_over_long_value_is_refused_by_its_length(value: str) -> None:
    error = refused((PREFILL, value))
    assert error.code == "policy_header_too_long"
    assert str(len(value)) in error.message and len(error.message) < 200


@pytest.mark.parametrize("value", ["v=٠".encode(), b"v=1\xff", b"\xef\xbb\xbfv=1", b"v=1\x00"])
def test_bytes_outside_ascii_are_refused(value: bytes) -> None:
    assert refused((PREFILL, value)).code == "malformed_policy_header"
    assert refused((POLICY, value)).code == "malformed_policy_header"


def test_a_given_decode_number_below_prefill_is_refused() -> None:
    error = refused((POLICY, "max"), (DECODE, "k=0.5"))
    assert (error.param, error.code) == (DECODE, "decode_below_prefill")
    error = refused((PREFILL, "k=1"), body={"decode": {"k": 0}})
    assert (error.param, error.code) == ("hierasparse.decode", "decode_below_prefill")


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ([], "hierasparse", "malformed_policy"),
        ("max", "hierasparse", "malformed_policy"),
        (True, "hierasparse", "malformed_policy"),
        ({"polcy": "max"}, "hierasparse", "unknown_policy_field"),
        ({"policy": "turbo"}, "hierasparse.policy", "unknown_policy"),
        ({"policy": 1}, "hierasparse.policy", "unknown_policy"),
        ({"policy": ["max"]}, "hierasparse.policy", "unknown_policy"),
        ({"policy": {}}, "hierasparse.policy", "unknown_policy"),
        ({"prefill": 1}, "hierasparse.prefill", "malformed_policy"),
        ({"prefill": "v=1"}, "hierasparse.prefill", "malformed_policy"),
        ({"prefill": {"V": 1}}, "hierasparse.prefill", "unknown_policy_field"),
        ({"prefill": {"k": True}}, "hierasparse.prefill.k", "invalid_sparsity"),
        ({"prefill": {"k": "0.5"}}, "hierasparse.prefill.k", "invalid_sparsity"),
        ({"decode": {"v": [1]}}, "hierasparse.decode.v", "invalid_sparsity"),
        ({"decode": {"v": 1.5}}, "hierasparse.decode", "invalid_sparsity"),
        ({"decode": {"v": 0.1234}}, "hierasparse.decode", "invalid_sparsity"),
        ({"bits": 8}, "hierasparse.bits", "invalid_bits"),
        ({"bits": "16"}, "hierasparse.bits", "invalid_bits"),
    ],
)
def test_a_wrong_body_object_is_refused_by_its_part(body: object, param: str, code: str) -> None:
    error = refused(body=json.dumps(body))
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize("spelling", ["1e0", "1E0", "5e-1", "-0", "-0.0", "1.0000", "0.50000"])
def test_a_body_number_is_judged_by_its_spelling(spelling: str) -> None:
    error = refused(body='{"prefill": {"k": %s}}' % spelling)  # noqa: UP031
    assert error.code == "invalid_sparsity"
    assert spelling in error.message


def test_a_wrong_body_is_refused_even_when_the_header_wins() -> None:
    assert refused((POLICY, "max"), body={"policy": "turbo"}).param == "hierasparse.policy"
