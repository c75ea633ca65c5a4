"""What pruning costs in each layer: how it is measured, what a file says of it, and how the
costliest layers are chosen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import load_pages, store_blocks
from hs_runtime.calibration import (
    FILE_NAME,
    Calibration,
    digest,
    fingerprint,
    load_calibration,
    read_layer_costs,
    save_calibration,
)
from hs_runtime.calibration.file import DEMO_FILE
from hs_runtime.calibration.layer_costs import (
    attend_as_decode,
    build_stretches,
    cut_stretches,
    divergence,
    prune_pages,
    scored_tokens,
)
from hs_runtime.cli import app
from hs_runtime.config import ConfigError
from hs_runtime.evaluation.arms import parse_arm
from hs_runtime.policies.policy import Costliest, ServerConstants, parse_layers
from hs_runtime.scheduler.lifecycle import Lifecycle
from tests.support.calibrations import random_calibration
from tests.support.checkpoints import tiny_llama

LAYERS = 4
COSTS = (0.5, 0.125, 2.0, 0.5)


def with_costs(path: Path, model: Path | None = None, costs: tuple[float, ...] = COSTS) -> Path:
    found = fingerprint(str(model)) if model is not None else "none"
    made = random_calibration(LAYERS, fingerprint=found)
    save_calibration(replace(made, layer_cost=torch.tensor(costs)), path)
    return path


# ---- the measurement ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [512, 3071, 3072, 9216])
@pytest.mark.parametrize("context", [0, 512, 2048, 131072])
def test_stretches_are_whole_pages_of_the_text_within_the_context(
    tokens: int, context: int
) -> None:
    ids = list(range(1, tokens + 1))
    for start in ([], [0]):
        stretches = cut_stretches(ids, start, context)
        (length,) = {len(each) for each in stretches}
        assert length % 64 == 0 and length <= min(3072, context or 3072)
        assert all(each[: len(start)] == start for each in stretches)
        read = [token for each in stretches for token in each[len(start) :]]
        assert read == ids[: len(read)]
        assert tokens - len(read) < length
        scored = scored_tokens(length)
        assert scored % 64 == 0
        assert length - scored >= 64 + 256 + 64, "something is sparse for the first scored token"
    assert len(cut_stretches(ids, [], 0)) == max(1, tokens // 3072)


@pytest.mark.parametrize("tokens", [512, 1024, 3072, 9216])
def test_stretches_end_in_what_stood_out_of_the_window(tokens: int) -> None:
    ids = list(range(tokens))
    for plain, each in zip(
        cut_stretches(ids, [], 8192), build_stretches(ids, [], 8192), strict=True
    ):
        scored = scored_tokens(len(each))
        repeated = scored // 4
        assert each[:-repeated] == plain[:-repeated]
        passage = each[-repeated:]
        at = plain.index(passage[0])
        assert plain[at : at + repeated] == passage
        assert 64 <= at and at + repeated <= len(each) - scored - 256


def test_pages_come_back_as_the_served_blocks_give_them() -> None:
    fmt, heads, pages = BlockFormat(64, "float32"), 2, 3
    calibration = random_calibration(2, heads)
    k, v = torch.randn(2, heads, pages * 64, 64, generator=torch.Generator().manual_seed(0))
    constants, order = calibration.layers[1], calibration.permutation[1].long()
    ordered = k.gather(2, order[:, None].expand(k.shape))
    arena = torch.zeros(4 * fmt.superblock_bytes * heads, dtype=torch.uint8)
    refs = -torch.arange(1, pages + 1, dtype=torch.int32)[:, None].expand(-1, heads)
    means = torch.zeros(pages + 1, heads, 64)

    def blocks(x: torch.Tensor) -> torch.Tensor:
        return x.view(heads, pages, 64, 64).transpose(0, 1)

    weights = constants["query_rms"]
    store_blocks(
        blocks(ordered), Side.K, arena, refs, fmt, weights=weights, factor=constants["factor"]
    )
    want_k = load_pages(arena, refs, Side.K, fmt)
    scores = (blocks(ordered) * (constants["mean_score"] / 8)[:, None]).sum(-1)
    store_blocks(blocks(v), Side.V, arena, refs, fmt, means=means, token_weights=scores.exp())
    want_v = load_pages(arena, refs, Side.V, fmt, means)
    got_k, got_v = prune_pages(k, v, calibration, 1)
    assert torch.equal(got_k.gather(2, order[:, None].expand(k.shape)), want_k)
    torch.testing.assert_close(got_v, want_v, rtol=0, atol=1e-6)
    assert not torch.equal(got_k, k)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_every_query_reads_what_a_decode_step_reads(is_sparse: bool) -> None:
    heads, group, tokens, count, rules = 2, 3, 640, 192, Lifecycle()
    rng = torch.Generator().manual_seed(1)
    q = torch.randn(heads * group, count, 64, generator=rng)
    k, v, pruned_k, pruned_v = torch.randn(4, heads, tokens, 64, generator=rng)
    dense, sparse = (k, v), (pruned_k, pruned_v)
    got = attend_as_decode(q, dense, sparse if is_sparse else None, 0.125)
    for row in range(count):
        t = tokens - count + row
        seen = [x[:, : t + 1].clone() for x in dense]
        if is_sparse:
            own = slice(rules.sink, 64 * max(rules.window_page(t), rules.sink_pages))
            for mixed, pruned in zip(seen, sparse, strict=True):
                mixed[:, own] = pruned[:, own]
        keys, values = (x.repeat_interleave(group, dim=0) for x in seen)
        scores = 0.125 * (keys @ q[:, row, :, None])[..., 0]
        want = (scores.softmax(-1)[:, None] @ values)[:, 0]
        torch.testing.assert_close(got[:, row], want, rtol=1e-4, atol=1e-5)


def test_divergence_is_the_mean_over_rows() -> None:
    a, b = torch.randn(2, 200, 30, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    want = torch.nn.functional.kl_div(b, a, log_target=True, reduction="batchmean")
    assert divergence(a, b) == pytest.approx(float(want), rel=1e-5)
    assert divergence(a, a) == 0


# ---- the file -----------------------------------------------------------------------------------


def test_costs_are_read_back_and_those_of_older_files_are_said_to_be_missing(
    tmp_path: Path,
) -> None:
    path = with_costs(tmp_path / "new")
    assert read_layer_costs(path) == list(COSTS)
    loaded = load_calibration(path)
    for ranks in (1, 2):
        mine = loaded.to(torch.device("cpu")).of_rank(ranks - 1, ranks).layer_cost
        assert mine is not None and mine.tolist() == list(COSTS)
    save_calibration(random_calibration(LAYERS), tmp_path / "old")
    assert load_calibration(tmp_path / "old").layer_cost is None
    with pytest.raises(ConfigError, match=r"old does not say .*`hs-runtime calibrate"):
        read_layer_costs(tmp_path / "old")


def test_a_file_is_known_by_what_decides_how_blocks_are_pruned(tmp_path: Path) -> None:
    """Caches, records and measured tables go by the digest: it stays what it was without costs."""
    made: Calibration = random_calibration(LAYERS)
    save_calibration(made, tmp_path / "without")
    known = digest(tmp_path / "without")
    for costs in (COSTS, (1.0, 2.0, 3.0, 4.0)):
        path = with_costs(tmp_path / "with", costs=costs)
        assert path.read_bytes() != (tmp_path / "without").read_bytes()
        assert digest(path) == known
    save_calibration(replace(made, query_rms=2 * made.query_rms), tmp_path / "other")
    assert digest(tmp_path / "other") != known
    assert digest(DEMO_FILE) == "cff0d961d56b72169f3a06baca23a34b85ad05ca16900c018225ebabaeb65102"


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        (torch.tensor([1.0, 2.0]), r"is \[2\], not \[4\]"),
        (torch.ones(4, 1), r"is \[4, 1\], not \[4\]"),
        (torch.tensor([1.0, 2.0, torch.nan, 4.0]), "is not finite"),
        (torch.tensor([1.0, 2.0, torch.inf, 4.0]), "is not finite"),
        (torch.tensor([1.0, 2.0, -0.5, 4.0]), "is below 0"),
        (torch.tensor([1, 2, 3, 4]), "is int64, not float32"),
        (torch.ones(4, dtype=torch.float64), "is float64, not float32"),
    ],
)
def test_costs_that_cannot_be_are_refused(tmp_path: Path, costs: torch.Tensor, said: str) -> None:
    path = with_costs(tmp_path / "file")
    about = {"hierasparse": json.dumps({"version": 1, "fingerprint": "", "text": "", "tokens": 0})}
    save_file(load_file(path) | {"layer_cost": costs}, path, about)
    with pytest.raises(ConfigError, match=rf"damaged \(layer_cost {said}\)"):
        load_calibration(path)


def test_the_shipped_file_says_what_layers_of_the_demonstration_model_cost() -> None:
    costs = read_layer_costs(DEMO_FILE)
    assert len(costs) == 30 and all(cost > 0 for cost in costs)


# ---- the choice ---------------------------------------------------------------------------------


def test_the_costliest_layers_by_number_and_the_lower_of_two_that_cost_the_same() -> None:
    chosen = [Costliest(count).of(COSTS) for count in (1, 2, 3)]
    assert chosen == [(2,), (0, 2), (0, 2, 3)]
    for count in (0, 4, 5):
        with pytest.raises(
            ValueError, match="has 4 layers, choose from costliest:1 to costliest:3"
        ):
            Costliest(count).of(COSTS)
    assert parse_layers("costliest:8") == Costliest(8)
    for text in ("costliest", "costliest:", "costliest:-1", "costliest:1.5", "costliest:3,7"):
        with pytest.raises(ValueError, match="costliest:N"):
            parse_layers(text)
    with pytest.raises(ValueError, match=r"'x' is no number .* from 1 to one less than the model"):
        parse_layers("costliest:x")


def test_an_arm_names_layers_by_cost() -> None:
    def costs() -> tuple[float, ...]:
        return COSTS

    arm = parse_arm("max+dense_layers=costliest:2", ServerConstants(), "", costs)
    assert arm.constants == ServerConstants(dense_layers=(0, 2))
    assert arm.to_json() == parse_arm("max+dense_layers=0/2", ServerConstants()).to_json()
    with pytest.raises(ConfigError, match="--calibration"):
        parse_arm("max+dense_layers=costliest:2", ServerConstants())
    with pytest.raises(ConfigError, match=r"arms: .*has 4 layers"):
        parse_arm("max+dense_layers=costliest:9", ServerConstants(), "", costs)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model", layers=LAYERS)


def command(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.output


def served_layers(*words: str) -> list[int]:
    code, printed = command("serve", "--dry-run", "--device", "cpu", *words)
    assert code == 0, printed
    layers: list[int] = json.loads(printed[printed.index("{") :])["config"]["constants"][
        "dense_layers"
    ]
    return layers


def test_a_server_has_the_numbers_of_the_costliest_layers(model: Path, tmp_path: Path) -> None:
    words = ("--model", str(model), "--dense-layers", "costliest:2")
    given = with_costs(tmp_path / "given", model, costs=(0.0, 4.0, 3.0, 1.0))
    assert served_layers(*words, "--calibration", str(given)) == [1, 2]
    with_costs(model / FILE_NAME, model)
    assert served_layers(*words) == [0, 2]
    assert served_layers(*words, "--pruner", "magnitude") == [0, 2]
    code, printed = command("doctor", "--capacity", "--device", "cpu", *words)
    assert code == 0 and "Always dense: layers 0, 2." in printed


@pytest.mark.parametrize("first", ["serve", "doctor", "eval", "arms"])
def test_what_cannot_be_chosen_is_refused(model: Path, tmp_path: Path, first: str) -> None:
    measure = ("eval", "--output", str(tmp_path / "out"))
    words, wish = {
        "serve": (("serve", "--dry-run", "--dense-layers"), "costliest:{}"),
        "doctor": (("doctor", "--capacity", "--dense-layers"), "costliest:{}"),
        "eval": ((*measure, "--dense-layers"), "costliest:{}"),
        "arms": ((*measure, "--arms"), "light+dense_layers=costliest:{}"),
    }[first]

    def refusal(count: int) -> str:
        value = wish.format(count)
        code, printed = command(*words, value, "--device", "cpu", "--model", str(model))
        assert code == 2, printed
        return " ".join(printed.split())

    def is_helpful(said: str) -> bool:
        way_out = f"`hs-runtime calibrate --model {model}`, or choose layers by number"
        return "costliest:2': " in said and said.endswith(way_out)

    assert is_helpful(refusal(2)) and "there is none" in refusal(2)
    save_calibration(
        random_calibration(LAYERS, fingerprint=fingerprint(str(model))), model / FILE_NAME
    )
    assert is_helpful(refusal(2)) and "does not say what pruning costs" in refusal(2)
    with_costs(model / FILE_NAME, model)
    for count in (0, 4):
        assert "choose from costliest:1 to costliest:3" in refusal(count)


def test_a_file_that_cannot_be_read_is_refused_with_the_wish_that_needs_it(model: Path) -> None:
    file = model / FILE_NAME
    fixed = ("--device", "cpu", "--model", str(model))
    for data in (b"", with_costs(file, model).read_bytes()[:-4]):
        file.write_bytes(data)
        for words, way_out in {
            ("serve", "--dry-run"): ", or choose --pruner magnitude and layers by number",
            ("doctor", "--capacity"): "",
        }.items():
            code, printed = command(*words, *fixed, "--dense-layers", "costliest:2")
            said = " ".join(printed.split())
            assert code == 2 and f"dense_layers='costliest:2': calibration: {file} is" in said
            assert said.endswith(f"`hs-runtime calibrate --model {model}`{way_out}")
    code, printed = command("serve", "--dry-run", *fixed)
    assert code == 2 and printed.rstrip().endswith("or choose --pruner magnitude")
    by_number = ("--pruner", "magnitude", "--dense-layers", "1,2")
    assert served_layers("--model", str(model), *by_number) == [1, 2], "which is the way out"


def test_calibrating_a_model_of_a_hub_takes_its_folder() -> None:
    words = ("serve", "--dry-run", "--device", "cpu", "--model", "hub/name")
    for wish in (("--dense-layers", "costliest:2"), ("--pruner", "calibrated"), ()):
        _, printed = command(*words, *wish)
        assert "`hs-runtime calibrate` needs a folder: download hub/name" in printed


def test_costs_under_another_pruner_are_said_to_be_so(model: Path) -> None:
    with_costs(model / FILE_NAME, model)
    words = ("serve", "--dry-run", "--device", "cpu", "--model", str(model))
    note = "costs of layers were measured with pruner calibrated; with magnitude"
    by_cost = (*words, "--dense-layers", "costliest:2")
    assert note in command(*by_cost, "--pruner", "magnitude")[1]
    assert note not in command(*by_cost)[1]
    assert note not in command(*words, "--dense-layers", "0,2", "--pruner", "magnitude")[1]
    arms = "max+dense_layers=costliest:2,light+pruner=magnitude+dense_layers=costliest:2"
    fixed = ("--device", "cpu", "--model", str(model), "--output", str(model / "out"))
    refused_later = ("--suite", "longbench")
    assert command("eval", *fixed, "--arms", arms, *refused_later)[1].count(note) == 1
