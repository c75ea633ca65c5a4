"""Policies, server constants, digests, and what pruners choose: on numbers worked out by hand."""

from __future__ import annotations

import hashlib

import pytest
import torch

from hs_kernels import ops
from hs_kernels.block_format import BlockFormat, Side
from hs_runtime.policies import (
    PRESETS,
    PolicyError,
    ServerConstants,
    Sparsity,
    SparsityPolicy,
    Wish,
    format_thousandths,
    namespace,
    parse_policy,
    parse_thousandths,
    preset,
    resolve,
)
from hs_runtime.policies.pruner import (
    K_SIDE,
    PRUNERS,
    V_SIDE,
    MagnitudePruner,
    PrunedBlocks,
    build_pruner,
    select,
    sparse_count,
)

TABLE = {
    "dense": ((0, 0), (0, 0)),
    "light": ((0, 0), (0, 1000)),
    "balanced": ((0, 1000), (0, 1000)),
    "fast": ((0, 1000), (1000, 1000)),
    "max": ((1000, 1000), (1000, 1000)),
}


def policy(prefill: tuple[int, int], decode: tuple[int, int]) -> SparsityPolicy:
    return SparsityPolicy(Sparsity(*prefill), Sparsity(*decode))


# ---- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("1", 1000), ("0.5", 500), ("0.25", 250), ("0.001", 1), ("1.000", 1000)],
)
def test_plain_decimals_are_thousandths(text: str, value: int) -> None:
    assert parse_thousandths(text) == value


@pytest.mark.parametrize(
    "text",
    ["", " 0", "0 ", "00", "01", ".5", "1.", "-0", "+1", "-0.5", "1.001", "2", "0.1234", "0,5",
     "0_5", "1e0", "0.5e-1", "nan", "inf", "Infinity", "50%", "0x1", "٠", "０.５", "0.٥", "0.5\n"],
)  # fmt: skip
def test_other_spellings_of_numbers_are_refused(text: str) -> None:
    with pytest.raises(PolicyError, match="choose a plain decimal from 0 to 1") as caught:
        parse_thousandths(text, "HieraSparse-Prefill")
    assert (caught.value.param, caught.value.code) == ("HieraSparse-Prefill", "invalid_sparsity")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0.0"), (1000, "1.0"), (500, "0.5"), (125, "0.125"), (10, "0.01")]
)
def test_thousandths_are_written_as_structured_decimals(value: int, text: str) -> None:
    assert format_thousandths(value) == text


@pytest.mark.parametrize("number", [-1, 1001, 0.5, True, "0", None])
def test_sparsity_takes_whole_thousandths_only(number: object) -> None:
    with pytest.raises(PolicyError, match="integer from 0 to 1000"):
        Sparsity(number, 0)  # type: ignore[arg-type]


# ---- policies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_presets_are_the_documented_table(name: str) -> None:
    prefill, decode = TABLE[name]
    assert preset(name) == policy(prefill, decode)
    assert preset(name).preset == name
    assert list(PRESETS) == list(TABLE)


def test_unknown_preset_names_the_wish_and_the_choices() -> None:
    with pytest.raises(PolicyError) as caught:
        preset("turbo", "HieraSparse-Policy")
    assert (
        caught.value.message == "unknown policy 'turbo': choose dense, light, balanced, fast, max"
    )
    assert (caught.value.param, caught.value.code) == ("HieraSparse-Policy", "unknown_policy")


def test_a_policy_without_a_name_is_custom() -> None:
    assert policy((0, 0), (500, 1000)).preset == "custom"


def test_the_default_policy_is_dense() -> None:
    assert SparsityPolicy() == preset("dense")
    assert SparsityPolicy().is_dense
    assert not preset("light").is_dense


@pytest.mark.parametrize("bits", [8, 4, 0, "16", 16.0, True])
def test_other_element_widths_are_refused_with_the_choices(bits: object) -> None:
    with pytest.raises(PolicyError, match="choose 16") as caught:
        SparsityPolicy(bits=bits)  # type: ignore[arg-type]
    assert caught.value.code == "invalid_bits"


@pytest.mark.parametrize(
    ("prefill", "decode", "side"), [((1, 0), (0, 0), "k"), ((0, 1000), (1000, 999), "v")]
)
def test_decode_below_prefill_is_no_policy(
    prefill: tuple[int, int], decode: tuple[int, int], side: str
) -> None:
    with pytest.raises(PolicyError, match=f"decode {side}=") as caught:
        policy(prefill, decode)
    assert caught.value.code == "decode_below_prefill"


def test_json_is_canonical_and_comes_back() -> None:
    written = preset("fast").to_json()
    assert written == '{"bits":16,"decode":[1000,1000],"prefill":[0,1000]}'
    assert SparsityPolicy.from_json(written) == preset("fast")
    assert preset("fast").digest == hashlib.sha256(written.encode()).hexdigest()


@pytest.mark.parametrize(
    "text",
    ["", "null", "[]", "{}", '{"bits":16,"decode":[0,0]}', '{"bits":16,"decode":[0],"prefill":[0]}',
     '{"bits":16,"decode":[0,0],"prefill":[0,0],"more":1}',
     '{"bits":8,"decode":[0,0],"prefill":[0,0]}',
     '{"bits":16,"decode":[0,0],"prefill":[0,0.5]}',
     '{"bits":16,"decode":[0,0],"prefill":[0,1]}'],
)  # fmt: skip
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(PolicyError):
        SparsityPolicy.from_json(text)


def test_configuration_names_a_preset_or_writes_the_policy_out() -> None:
    assert parse_policy("max") == preset("max")
    assert parse_policy(preset("fast").to_json()) == preset("fast")


# ---- what several sources add up to ------------------------------------------------------------


def test_nothing_asked_for_is_the_server_default() -> None:
    assert resolve([Wish(), Wish()], preset("balanced")) == preset("balanced")


def test_a_decode_number_that_nobody_gave_is_the_prefill_number() -> None:
    assert resolve([Wish(prefill=(250, None))]) == policy((250, 0), (250, 0))


def test_a_prefill_number_that_nobody_gave_is_zero_whatever_the_default() -> None:
    assert resolve([Wish(decode=(None, 1000))], preset("max")) == preset("light")


def test_numbers_win_over_the_preset_of_the_same_source() -> None:
    wish = Wish(preset="light", decode=(500, None))
    assert resolve([wish]) == policy((0, 0), (500, 1000))


def test_the_stronger_source_wins_number_by_number() -> None:
    header, body = Wish(decode=(1000, None)), Wish(preset="light", decode=(0, 500))
    assert resolve([header, body]) == policy((0, 0), (1000, 500))


def test_a_preset_of_the_stronger_source_wins_over_numbers_of_the_weaker() -> None:
    assert resolve([Wish(preset="dense"), Wish(decode=(1000, 1000))]) == preset("dense")


def test_a_given_decode_number_below_prefill_is_refused() -> None:
    wish = Wish(prefill=(None, 1000), decode=(None, 500), params=("P", "Prefill", "Decode"))
    with pytest.raises(PolicyError, match=r"decode v=0\.5 is below prefill v=1\.0") as caught:
        resolve([wish])
    assert (caught.value.param, caught.value.code) == ("Decode", "decode_below_prefill")


def test_a_prefill_number_above_its_preset_is_refused_by_the_name_of_the_number() -> None:
    wish = Wish(preset="dense", prefill=(1000, None), params=("P", "Prefill", "Decode"))
    with pytest.raises(PolicyError, match="of preset 'dense'") as caught:
        resolve([wish])
    assert caught.value.param == "Prefill"


def test_an_unknown_preset_is_refused_even_when_outvoted() -> None:
    with pytest.raises(PolicyError, match="unknown policy"):
        resolve([Wish(preset="max"), Wish(preset="nope")])


# ---- server constants and namespaces -----------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"page": 32}, {"sink": 32}, {"sink": -64}, {"sink": 1088}, {"window": 0}, {"window": 100},
     {"segment": 0}, {"segment": 64}, {"segment": 1000}, {"anchor": "page"}, {"chunk": 0},
     {"chunk": 100}, {"chunk": True}, {"segment": 1024.0}, {"pruner": ""}, {"pruner": "no such"},
     {"calibration": None}],
)  # fmt: skip
def test_impossible_constants_are_refused_by_name(change: dict[str, object]) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=f"{name}="):
        ServerConstants(**change)  # type: ignore[arg-type]


def test_what_is_reused_together_is_a_segment_or_a_chunk() -> None:
    assert ServerConstants(segment=512).granularity == 512
    assert ServerConstants(anchor="chunk", chunk=2048).granularity == 2048


def test_policies_of_one_prefill_share_a_namespace() -> None:
    constants = ServerConstants()
    spaces = {name: namespace(preset(name), constants) for name in TABLE}
    assert spaces["dense"] == spaces["light"]
    assert spaces["balanced"] == spaces["fast"]
    assert len(set(spaces.values())) == 3


@pytest.mark.parametrize(
    "change",
    [{"sink": 128}, {"window": 512}, {"segment": 512}, {"anchor": "chunk"}, {"chunk": 2048},
     {"pruner": "calibrated"}, {"calibration": "a"}],
)  # fmt: skip
def test_every_constant_is_part_of_the_namespace(change: dict[str, object]) -> None:
    changed = ServerConstants(**change)  # type: ignore[arg-type]
    assert namespace(preset("max"), changed) != namespace(preset("max"), ServerConstants())


# ---- pruners ----------------------------------------------------------------------------------


def test_loss_is_the_norm_of_the_two_smallest_of_four() -> None:
    block = torch.zeros(1, 1, 64, 64)
    block[0, 0, 0, :4] = torch.tensor([1.0, -8.0, 4.0, -2.0])  # one token: K drops 1 and 2
    block[0, 0, 4:8, 9] = torch.tensor([16.0, 0.5, -0.25, 32.0])  # one channel: V drops the middle
    pruner = MagnitudePruner()
    k, v = (pruner.prune(block, side).losses for side in (K_SIDE, V_SIDE))
    assert k is not None and v is not None
    assert k.tolist() == [[3.0]]  # the four tokens of channel 9 are in K groups of their own
    assert v.tolist() == [[0.75]]


CONSTANTS = {
    "query_rms": torch.rand(2, 64, generator=torch.Generator().manual_seed(1)),
    "key_rms": torch.rand(2, 64, generator=torch.Generator().manual_seed(2)),
    "mean_score": torch.randn(2, 64, generator=torch.Generator().manual_seed(3)),
    "factor": torch.eye(64).repeat(2, 1, 1),
}


def pruned(name: str, blocks: torch.Tensor, side: int, *, ranked: bool = True) -> PrunedBlocks:
    """By the pruner of that name, with constants."""
    return build_pruner(name).prune(blocks, side, CONSTANTS, ranked=ranked)


@pytest.mark.parametrize("side", [K_SIDE, V_SIDE])
@pytest.mark.parametrize("name", PRUNERS)
def test_answers_do_not_depend_on_the_batch(name: str, side: int) -> None:
    blocks = torch.randn(9, 2, 64, 64).to(torch.bfloat16)
    together, alone = pruned(name, blocks, side), [pruned(name, x[None], side) for x in blocks]
    assert together.losses is None or together.losses.shape == (9, 2)
    for field in ("losses", "keep", "values"):
        whole = getattr(together, field)
        if whole is not None:
            assert torch.equal(whole, torch.cat([getattr(each, field) for each in alone])), field


@pytest.mark.parametrize("side", [K_SIDE, V_SIDE])
@pytest.mark.parametrize("name", PRUNERS)
def test_blocks_need_not_be_contiguous(name: str, side: int) -> None:
    blocks = torch.randn(3, 64, 2, 64).transpose(1, 2)  # as they lie in a chunk's K or V
    strided, packed = (pruned(name, each, side) for each in (blocks, blocks.contiguous()))
    for field in ("losses", "keep", "values"):
        one, other = getattr(strided, field), getattr(packed, field)
        assert one is other is None or torch.equal(one, other), field


@pytest.mark.parametrize("name", PRUNERS)
def test_no_losses_are_computed_unless_asked_for(name: str) -> None:
    blocks = torch.randn(2, 2, 64, 64)
    for side in (K_SIDE, V_SIDE):
        assert pruned(name, blocks, side, ranked=False).losses is None


@pytest.mark.parametrize("side", [K_SIDE, V_SIDE])
@pytest.mark.parametrize("name", PRUNERS)
def test_no_pages_are_no_losses(name: str, side: int) -> None:
    losses = pruned(name, torch.empty(0, 2, 64, 64), side).losses
    if losses is None:
        losses = ops.block_losses(torch.empty(0, 2, 64, 64), Side(side), BlockFormat(64, "float32"))
    assert losses.shape == (0, 2)
    assert select(losses, 500).sparse.shape == (0, 2)


@pytest.mark.parametrize("side", [K_SIDE, V_SIDE])
@pytest.mark.parametrize("name", PRUNERS)
def test_masks_that_are_stored_keep_two_of_four(name: str, side: int) -> None:
    """And losses are what they drop."""
    pruner, blocks = build_pruner(name), torch.randn(3, 2, 64, 64)
    answer = pruned(name, blocks, side)
    if answer.keep is None:
        assert pruner.is_stored
        return
    kept = answer.keep.unflatten(3 if side == K_SIDE else 2, (16, 4))
    kept = kept.sum(-1 if side == K_SIDE else 3)
    assert (kept == 2).all() == pruner.is_stored
    assert answer.keep.sum() == blocks.numel() // 2
    dropped = blocks.masked_fill(answer.keep, 0).abs().sum((2, 3))
    torch.testing.assert_close(answer.losses, dropped)


@pytest.mark.parametrize("name", [name for name in PRUNERS if build_pruner(name).needs_calibration])
def test_a_pruner_without_its_constants_says_so(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' prunes with calibration constants"):
        build_pruner(name).prune(torch.zeros(1, 2, 64, 64), K_SIDE)


def test_calibrated_pruning_is_a_rule_of_the_kernels() -> None:
    k, v = (pruned("calibrated", torch.randn(2, 2, 64, 64), side) for side in (K_SIDE, V_SIDE))
    assert k.weights is CONSTANTS["query_rms"] and k.factor is CONSTANTS["factor"]
    assert k.query is None and v.weights is None and v.factor is None
    assert torch.equal(v.query, CONSTANTS["mean_score"] / 8)
    for answer in (k, v):
        assert (answer.keep, answer.values, answer.losses) == (None, None, None)


def test_static_masks_are_the_same_channels_in_every_token() -> None:
    blocks = torch.randn(2, 2, 64, 64)
    keep = pruned("channel", blocks, K_SIDE).keep
    assert (keep == keep[:1, :, :1]).all()
    strength = (CONSTANTS["query_rms"] * CONSTANTS["key_rms"]).view(2, 16, 4)
    kept = keep[0, :, 0].view(2, 16, 4)
    weakest_kept = strength.masked_fill(~kept, torch.inf).amin(-1)
    assert (weakest_kept >= strength.masked_fill(kept, 0).amax(-1)).all()


def test_random_masks_follow_from_the_content() -> None:
    blocks = torch.randn(1, 1, 64, 64)
    keep, other = (pruned("random", x, V_SIDE).keep for x in (blocks, blocks + 1))
    agreement = (keep == other).float().mean()
    assert 0.45 < agreement < 0.65, "a third of the pairs would agree in both, a sixth in none"
    assert abs(keep[:, :, ::4].float().mean() - 0.5) < 0.1


def test_the_lowest_losses_are_selected_and_ties_go_to_the_lower_index() -> None:
    losses = torch.tensor([[3.0, 1.0], [1.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    mask = select(losses, 500)
    assert mask.sparse[:, 0].tolist() == [False, True, False, True]
    assert mask.sparse[:, 1].tolist() == [True, False, False, True]
    assert mask.order[:, 0].tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize(
    ("share", "candidates", "count"),
    [(0, 15, 0), (1, 15, 1), (500, 15, 8), (667, 3, 3), (666, 3, 2), (999, 15, 15), (1000, 16, 16),
     (1, 1000, 1), (1, 1001, 2), (300, 10, 3), (700, 10, 7)],
)  # fmt: skip
def test_counts_are_exact_ceilings(share: int, candidates: int, count: int) -> None:
    assert sparse_count(share, candidates) == count
    assert select(torch.zeros(candidates, 2), share).sparse.sum(0).tolist() == [count, count]


def test_pruners_are_found_by_name_and_others_refused_with_the_choices() -> None:
    for name in PRUNERS:
        assert build_pruner(name).name == name
    with pytest.raises(ValueError, match="unknown pruner 'psychic': choose magnitude"):
        build_pruner("psychic")
