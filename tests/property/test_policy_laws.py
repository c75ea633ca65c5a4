"""Laws of policies, their headers, and block selection."""

from __future__ import annotations

import json

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hs_runtime.policies import (
    DENSE,
    PRESETS,
    PolicyError,
    ServerConstants,
    Sparsity,
    SparsityPolicy,
    Wish,
    format_thousandths,
    namespace,
    parse_thousandths,
    resolve,
)
from hs_runtime.policies.pruner import K_SIDE, V_SIDE, MagnitudePruner, select, sparse_count
from hs_server.policy_header import (
    DECODE,
    POLICY,
    PREFILL,
    JsonNumber,
    body_wish,
    effective_policy,
    header_wish,
    response_headers,
)

thousandths = st.integers(0, 1000)
sparsities = st.builds(Sparsity, thousandths, thousandths)
optional = st.none() | thousandths
pairs = st.tuples(optional, optional)
wishes = st.builds(Wish, preset=st.none() | st.sampled_from(list(PRESETS)), prefill=pairs,
                   decode=pairs)  # fmt: skip


@st.composite
def policies(draw: st.DrawFn) -> SparsityPolicy:
    k, v = draw(thousandths), draw(thousandths)
    return SparsityPolicy(
        Sparsity(k, v), Sparsity(draw(st.integers(k, 1000)), draw(st.integers(v, 1000)))
    )


constants = st.builds(
    ServerConstants,
    sink=st.sampled_from((0, 64, 128)),
    window=st.sampled_from((64, 256, 512)),
    segment=st.sampled_from((128, 512, 1024)),
    chunk=st.sampled_from((2048, 32768)),
    calibration=st.text(max_size=3),
)


# ---- numbers and policies ----------------------------------------------------------------------


@given(thousandths)
def test_decimals_come_back(value: int) -> None:
    assert parse_thousandths(format_thousandths(value)) == value


@given(st.text(alphabet="01.25 -+e_,%٠\n", max_size=8) | st.text(max_size=8))
@example("1.000")
@example("0.0005")
def test_a_text_is_a_plain_decimal_or_refused(text: str) -> None:
    """Whatever is accepted, a stranger's parser would read as the same number from 0 to 1."""
    try:
        value = parse_thousandths(text)
    except PolicyError:
        return
    assert text.isascii() and set(text) <= set("0123456789.")
    assert 0 <= value <= 1000 and abs(float(text) - value / 1000) < 1e-9
    assert len(text.partition(".")[2]) <= 3


@given(policies(), policies())
def test_json_digest_and_equality_agree(a: SparsityPolicy, b: SparsityPolicy) -> None:
    assert SparsityPolicy.from_json(a.to_json()) == a
    assert (a == b) == (a.to_json() == b.to_json()) == (a.digest == b.digest)


@given(policies(), policies(), constants, constants)
def test_namespaces_are_equal_iff_prefill_and_constants_are(
    a: SparsityPolicy, b: SparsityPolicy, first: ServerConstants, second: ServerConstants
) -> None:
    same = (a.prefill, first) == (b.prefill, second)
    assert (namespace(a, first) == namespace(b, second)) == same


@given(policies(), constants)
def test_prefill_without_sparsity_reads_what_dense_wrote(
    policy: SparsityPolicy, server: ServerConstants
) -> None:
    light = SparsityPolicy(Sparsity(0, 0), policy.decode)
    assert namespace(light, server) == namespace(DENSE, server)


# ---- resolution -------------------------------------------------------------------------------


@given(st.lists(wishes, max_size=3), policies())
def test_each_number_comes_from_the_first_that_gives_it(
    asked: list[Wish], default: SparsityPolicy
) -> None:
    def given_by(wish: Wish, phase: str, side: int) -> int | None:
        number = getattr(wish, phase)[side]
        if number is None and wish.preset is not None:
            return getattr(PRESETS[wish.preset], phase).of(side)  # type: ignore[no-any-return]
        return number  # type: ignore[no-any-return]

    expected: list[tuple[int, int]] = []
    for side in (0, 1):
        low, high = (
            next((n for wish in asked if (n := given_by(wish, phase, side)) is not None), None)
            for phase in ("prefill", "decode")
        )
        expected.append((low or 0, (low or 0) if high is None else high))
    try:
        policy = resolve(asked, default)
    except PolicyError as error:
        assert error.code == "decode_below_prefill"
        assert any(high < low for low, high in expected)
        return
    if all(wish == Wish() for wish in asked):
        assert policy == default
    else:
        assert [(policy.prefill.of(s), policy.decode.of(s)) for s in (0, 1)] == expected


# ---- headers and bodies ------------------------------------------------------------------------


@given(policies())
def test_response_headers_ask_for_the_policy_they_report(policy: SparsityPolicy) -> None:
    reported = response_headers(policy, ServerConstants())
    lines = [(name.lower().encode(), reported[name].encode()) for name in (PREFILL, DECODE)]
    assert effective_policy(lines, None, DENSE) == policy
    if policy.preset != "custom":
        line = (POLICY.lower().encode(), reported[POLICY].encode())
        assert effective_policy([line], None, DENSE) == policy


def json_object(members: dict[str, str]) -> str:
    """From texts that are JSON already, so that numbers keep their spelling."""
    return "{" + ", ".join(f'"{name}": {text}' for name, text in members.items()) + "}"


@given(wishes)
def test_headers_and_body_say_the_same(wish: Wish) -> None:
    lines, body = [], {}
    if wish.preset is not None:
        lines.append((b"hierasparse-policy", wish.preset.encode()))
        body["policy"] = json.dumps(wish.preset)
    for phase, pair in (("prefill", wish.prefill), ("decode", wish.decode)):
        texts = {
            key: format_thousandths(number)
            for key, number in zip("kv", pair, strict=True)
            if number is not None
        }
        if texts:
            line = ", ".join(f"{key}={text}" for key, text in texts.items())
            lines.append((f"hierasparse-{phase}".encode(), line.encode()))
        body[phase] = json_object(texts)
    read = json.loads(json_object(body), parse_int=JsonNumber, parse_float=JsonNumber)
    assert header_wish(lines) == body_wish(read) == wish


fragments = st.sampled_from(
    ["k", "v", "=", ",", " ", "\t", ";", "(", ")", "?1", '"', "0", "1", ".", "0.5", "-", "a", "*",
     "max", "dense", "@", ":", "%", "\x7f", "\xff"]
)  # fmt: skip
garbage = st.binary(max_size=80) | st.lists(fragments, max_size=14).map(
    lambda parts: "".join(parts).encode("latin-1")
)
names = st.sampled_from(
    [b"hierasparse-policy", b"hierasparse-prefill", b"HieraSparse-Decode", b"hierasparse-x",
     b"x-hierasparse-policy", b"accept"]
)  # fmt: skip


@given(st.lists(st.tuples(names, garbage), max_size=4))
def test_any_bytes_in_headers_are_a_policy_or_a_refusal_that_helps(
    lines: list[tuple[bytes, bytes]],
) -> None:
    try:
        policy = effective_policy(lines, None, DENSE)
    except PolicyError as error:
        assert error.param and error.code and "choose" in error.message
        assert error.message.isprintable() and len(error.message) < 400
        return
    ours = [value for name, value in lines if name != b"accept"]
    assert ours or policy == DENSE
    assert all(name.lower() not in (b"hierasparse-x", b"x-hierasparse-policy") for name, _ in lines)


@given(garbage)
def test_an_accepted_dictionary_says_each_number_once(value: bytes) -> None:
    try:
        wish = header_wish([(b"hierasparse-prefill", value)])
    except PolicyError:
        return
    for key, number in zip("kv", wish.prefill, strict=True):
        assert value.count(key.encode()) == (number is not None)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["policy", "prefill", "decode", "bits", "k", "v", "x"]),
                      inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@given(json_values)
def test_any_json_in_the_body_is_a_policy_or_a_refusal_that_helps(value: object) -> None:
    read = json.loads(json.dumps(value), parse_int=JsonNumber, parse_float=JsonNumber)
    try:
        body_wish(read)
    except PolicyError as error:
        assert str(error.param).startswith("hierasparse") and error.code
        assert "choose" in error.message and len(error.message) < 400


# ---- selection --------------------------------------------------------------------------------

losses = st.integers(1, 20).flatmap(
    lambda count: st.lists(
        st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=count, max_size=count
    )
)


@given(losses, thousandths)
def test_selection_is_exact_lowest_first_and_stable(rows: list[list[int]], share: int) -> None:
    values = torch.tensor(rows, dtype=torch.float32)
    mask = select(values, share).sparse
    count = sparse_count(share, len(rows))
    assert count * 1000 >= share * len(rows) > (count - 1) * 1000
    for head in range(2):
        ranked = sorted(range(len(rows)), key=lambda page: (rows[page][head], page))
        assert mask[:, head].nonzero().flatten().tolist() == sorted(ranked[:count])


@given(losses, thousandths, thousandths)
def test_a_higher_share_only_adds_sparse_blocks(rows: list[list[int]], a: int, b: int) -> None:
    values = torch.tensor(rows, dtype=torch.float32)
    low, high = select(values, min(a, b)).sparse, select(values, max(a, b)).sparse
    assert bool((low <= high).all())


@given(st.integers(0, 2**31 - 1), st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
def test_the_dropped_norm_is_what_sorting_says(seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Few values, so that ties occur.
    blocks = torch.randint(-4, 5, (2, 1, 64, 16), generator=generator).to(dtype)
    for side in (K_SIDE, V_SIDE):
        grouped = blocks if side == K_SIDE else blocks.transpose(-1, -2)
        groups = grouped.abs().double().reshape(2, 1, -1, 4)
        expected = groups.sort(-1).values[..., :2].sum((-1, -2)).float()
        answer = MagnitudePruner().prune(blocks, side).losses
        assert answer is not None and torch.equal(answer, expected)
