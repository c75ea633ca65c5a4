"""`hs-runtime calibrate` on a tiny model, and engines that serve with what it made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from hs_runtime.calibration import FILE_NAME, load_calibration, read_layer_costs
from hs_runtime.calibration.layer_costs import build_stretches
from hs_runtime.calibration.model import ReadModel, attend_causally
from hs_runtime.cli import app
from hs_runtime.policies import PRESETS
from tests.support.checkpoints import tiny_llama
from tests.support.engines import (
    Ask,
    EngineOptions,
    Engines,
    forced_retraction,
    policy,
    with_environment,
)
from tests.support.golden import Golden, assert_answer
from tests.support.oracle import Calibrated, Llama, Request, Rules, Shares

pytestmark = pytest.mark.integration

NEW = 40
LENGTH = 450
POLICIES = {
    **{name: PRESETS[name] for name in ("light", "balanced", "fast", "max")},
    "half": policy((500, 500)),
}
# V is pruned after K: with the keys that are left, which the oracle does not model.
KEYS_FIRST = policy((500, 0), (1000, 1000))


def run_calibrate(*words: str) -> Path:
    result = CliRunner().invoke(app, ["calibrate", "--device", "cpu", *words])
    assert result.exit_code == 0, result.output
    return Path(result.stdout.split(":")[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("calibrated"))


@pytest.fixture(scope="module")
def calibration(model: Path) -> Path:
    return run_calibrate("--model", str(model), "--tokens", "1024")


@pytest.fixture(scope="module")
def served(model: Path, calibration: Path) -> EngineOptions:
    return EngineOptions(
        model, segment=128, window=64, pruner="calibrated", calibration=calibration
    )


@pytest.fixture(scope="module")
def calibrated_golden(model: Path, calibration: Path) -> Golden:
    return Golden(model, Calibrated(load_file(calibration)))


@pytest.fixture(scope="module")
def prompt(served: EngineOptions, calibrated_golden: Golden) -> list[int]:
    return calibrated_golden.prompt(served, POLICIES.values(), LENGTH, max_new=NEW)


def test_the_file_lies_beside_the_model_and_is_made_again_the_same(
    model: Path, calibration: Path, tmp_path: Path
) -> None:
    assert calibration == model / FILE_NAME
    again = run_calibrate(
        "--model", str(model), "--tokens", "1024", "--output", str(tmp_path / "again")
    )
    assert again.read_bytes() == calibration.read_bytes()
    load_calibration(calibration, str(model))


def test_queries_and_keys_are_measured_after_rope(model: Path, calibration: Path) -> None:
    """Against the oracle's own Llama, on the tokens that were read."""
    from transformers import AutoTokenizer

    from hs_runtime.calibration.calibrate import read_text

    llama, made = Llama(model), load_calibration(calibration)
    tokens = torch.tensor(AutoTokenizer.from_pretrained(model)(read_text(None))["input_ids"][:1024])
    h = llama.norm(
        llama.weights["model.embed_tokens.weight"][tokens], "model.layers.0.input_layernorm"
    )
    q, k = (
        llama.rotate(
            llama.linear(h, f"model.layers.0.self_attn.{each}_proj").view(1024, -1, 64),
            torch.arange(1024),
        )
        for each in "qk"
    )
    order = made.permutation[0].long()
    for head in range(2):
        mine = q[:, 2 * head : 2 * head + 2].reshape(-1, 64)[:, order[head]]
        keys = k[:, head][:, order[head]]
        torch.testing.assert_close(made.query_rms[0, head], mine.square().mean(0).sqrt())
        torch.testing.assert_close(made.key_rms[0, head], keys.square().mean(0).sqrt())
        torch.testing.assert_close(made.mean_score[0, head], mine.mean(0) / 8, atol=1e-5, rtol=1e-3)


def test_costs_of_layers_are_those_of_the_rules(model: Path, calibration: Path) -> None:
    """Token by token with the oracle, each layer sparse alone: the last quarter of what was
    read."""
    from transformers import AutoTokenizer

    from hs_runtime.calibration.calibrate import read_text

    llama, pruning = Llama(model), Calibrated(load_file(calibration))
    text = AutoTokenizer.from_pretrained(model)(read_text(None))["input_ids"][:1024]
    (tokens,) = build_stretches(text, [], 8192)
    past, shares = 768, Shares(decode=(1000, 1000))

    def log_probs(*dense_layers: int) -> torch.Tensor:
        request = Request(llama, Rules(dense_layers=dense_layers), shares, past, 1024, pruning)
        for start in range(0, past, 256):
            request.forward(tokens[start : start + 256], start)
        return torch.cat([request.forward([tokens[t]], t) for t in range(past, 1024)])

    dense = log_probs(0, 1)
    for layer, cost in enumerate(read_layer_costs(calibration)):
        other = log_probs(1 - layer)
        want = torch.nn.functional.kl_div(other, dense, log_target=True, reduction="batchmean")
        assert cost == pytest.approx(float(want), rel=1e-2), layer


@torch.inference_mode()
def test_a_model_of_narrow_weights_is_measured_in_f32(tmp_path: Path) -> None:
    """What it predicts is what a model in f32 with these weights predicts, and its weights are then
    as they were."""
    folder = tiny_llama(tmp_path, dtype=torch.bfloat16)
    narrow, wide = ReadModel(str(folder), "cpu", "auto"), ReadModel(str(folder), "cpu")
    tokens, positions = list(range(200)), range(200)

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        return attend_causally(q, k, v, scale)

    before = narrow.log_probs(tokens, positions, attend)
    with narrow.in_float32():
        inside = narrow.log_probs(tokens, positions, attend)
    want = wide.log_probs(tokens, positions, attend)
    assert torch.equal(inside, want)
    assert torch.equal(narrow.log_probs(tokens, positions, attend), before)
    assert not torch.equal(before, want)


def test_a_text_that_is_too_short_is_refused(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "short"
    text.write_text("too short")
    words = ["calibrate", "--device", "cpu", "--model", str(model), "--text", str(text)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "9 tokens" in result.stderr


@pytest.mark.parametrize("name", POLICIES)
def test_warm_equals_cold(
    engines: Engines,
    calibrated_golden: Golden,
    served: EngineOptions,
    prompt: list[int],
    name: str,
) -> None:
    chosen, engine = POLICIES[name], engines.get(served)
    want = calibrated_golden.answer(served, chosen, prompt, NEW)
    ask = Ask(prompt, chosen, NEW)
    cold = engine.cold(ask)
    assert_answer("cold", cold, want)
    (warm,) = engine.run(ask)
    assert_answer("warm", warm, want)
    assert warm.cached > 0 and warm.report == cold.report


def test_dense_is_stock_in_another_order_of_channels(
    engines: Engines, golden: Golden, served: EngineOptions
) -> None:
    """What is permuted but not pruned answers as the same weights do under any pruner."""
    asked = golden.prompt(served, [PRESETS["dense"]], LENGTH, max_new=NEW)
    want = golden.answer(served, PRESETS["dense"], asked, NEW)
    assert_answer("dense", engines.get(served).cold(Ask(asked, PRESETS["dense"], NEW)), want)


def test_retractions_and_chunks_do_not_change_answers(
    engines: Engines, calibrated_golden: Golden, served: EngineOptions, prompt: list[int]
) -> None:
    engine = engines.get(served)
    cold = engine.cold(Ask(prompt, KEYS_FIRST, NEW))
    (warm,) = engine.run(Ask(prompt, KEYS_FIRST, NEW))
    assert warm.cached > 0 and warm.tokens == cold.tokens
    options = with_environment(replace(served, chunk=128), *forced_retraction(7))
    engine = engines.get(options)
    engine.flush()
    every = [KEYS_FIRST, *POLICIES.values()]
    first, *answers = engine.run(*(Ask(prompt, chosen, NEW) for chosen in every))
    assert first.tokens == cold.tokens
    for name, answer in zip(POLICIES, answers, strict=True):
        want = calibrated_golden.answer(served, POLICIES[name], prompt, NEW)
        assert_answer(name, answer, want)
    assert sum(answer.retractions for answer in answers) > 0
    engine.assert_nothing_leaked()


def test_means_are_in_every_figure(
    engines: Engines, served: EngineOptions, prompt: list[int]
) -> None:
    report = engines.get(served).cold(Ask(prompt, PRESETS["max"], NEW)).report
    dense, sparse, mean = 64 * 64 * 4, 64 * 64 * 2 + 64 * 64 // 8, 64 * 4
    expected = report["dense_blocks"] * dense + report["sparse_blocks"] * (sparse + mean)
    assert report["sparse_blocks"] > 0
    assert report["kv_bytes"] == expected
    assert report["dense_equivalent_bytes"] == dense * sum(
        report[f"{kind}_blocks"] for kind in ("dense", "sparse")
    )


def test_a_simulated_pruner_saves_nothing_and_is_cached_like_others(
    engines: Engines, served: EngineOptions, prompt: list[int]
) -> None:
    engine = engines.get(replace(served, pruner="unstructured", calibration=None))
    cold = engine.cold(Ask(prompt, PRESETS["max"], NEW))
    (warm,) = engine.run(Ask(prompt, PRESETS["max"], NEW))
    assert warm.cached > 0 and warm.tokens == cold.tokens
    assert cold.report["kv_bytes"] == cold.report["dense_equivalent_bytes"]
    assert cold.report["sparse_blocks"] > 0
    (dense,) = engine.run(Ask(prompt, PRESETS["dense"], NEW))
    assert dense.tokens != cold.tokens, "nothing was pruned"
