"""Layers that stay dense whatever a request's policy says: answers are those of the rules, however
prompts were cut, cached or retracted, and bytes are those of the formula."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from hs_kernels.block_format import BlockFormat
from hs_runtime.policies import PRESETS
from hs_runtime.policies.policy import Sparsity
from hs_runtime.scheduler.admission import BlockSizes, requests_at_once
from hs_runtime.scheduler.lifecycle import Lifecycle
from tests.support.calibrations import write_calibration
from tests.support.checkpoints import tiny_llama
from tests.support.engines import (
    STRICT_CHECKS,
    Ask,
    EngineFailed,
    EngineOptions,
    Engines,
    forced_retraction,
    policy,
    token_ids,
    with_environment,
)
from tests.support.golden import Golden, assert_answer
from tests.support.oracle import Calibrated

pytestmark = pytest.mark.integration

LAYERS, HEADS, DIM, ITEM = 3, 2, 64, 4
POLICIES = {
    **{name: PRESETS[name] for name in ("dense", "light", "balanced", "fast", "max")},
    "half": policy((500, 500)),
    "thirds_then_more": policy((300, 0), (750, 500)),
}
NEW = 40
LENGTH = 500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("three-layers"), layers=LAYERS)


@pytest.fixture(scope="module")
def served(model: Path) -> EngineOptions:
    """The middle one of three layers stays dense."""
    return EngineOptions(model, segment=128, window=64, dense_layers=(1,))


@pytest.fixture(scope="module")
def golden(model: Path) -> Golden:
    return Golden(model)


@pytest.fixture(scope="module")
def prompt(served: EngineOptions, golden: Golden) -> list[int]:
    return golden.prompt(served, POLICIES.values(), LENGTH, max_new=NEW)


def test_the_model_notices_which_layers_are_dense(
    golden: Golden, served: EngineOptions, prompt: list[int]
) -> None:
    """What makes the rest of this file a test."""
    for name, chosen in POLICIES.items():
        settings = [replace(served, dense_layers=layers) for layers in ((), (1,), (0, 2))]
        answers = {tuple(golden.answer(each, chosen, prompt, NEW).logprobs) for each in settings}
        assert len(answers) == (1 if name == "dense" else 3), name


@pytest.mark.parametrize("name", POLICIES)
def test_cold_and_warm_answers_are_those_of_the_rules(
    engines: Engines, golden: Golden, served: EngineOptions, prompt: list[int], name: str
) -> None:
    chosen, engine = POLICIES[name], engines.get(served)
    want = golden.answer(served, chosen, prompt, NEW)
    cold = engine.cold(Ask(prompt, chosen, NEW))
    assert_answer("cold", cold, want)
    assert (cold.report["sparse_blocks"] > 0) == (name != "dense")
    for case in ("warm", "warm again"):
        (warm,) = engine.run(Ask(prompt, chosen, NEW))
        assert_answer(case, warm, want)
        assert warm.cached > 0 and warm.report == cold.report


def test_rows_that_become_private_take_the_dense_layers_with_them(
    engines: Engines, golden: Golden, served: EngineOptions, prompt: list[int]
) -> None:
    """`light` decodes on page ids of its own, over pages that `dense` left and goes on reading."""
    engine = engines.get(served)
    engine.flush()
    asks = [Ask(prompt, PRESETS[name], NEW) for name in ("dense", "light", "light", "dense")]
    for case in ("first", "then"):
        for ask, got in zip(asks, engine.run(*asks), strict=True):
            assert ask.policy is not None
            assert_answer(case, got, golden.answer(served, ask.policy, prompt, NEW))
    private = [event for event in engine.events("private") if event["pages"] > 4]
    assert len(private) >= 4
    engine.assert_nothing_leaked()


def chunked_and_retracted(served: EngineOptions) -> EngineOptions:
    always = (("check_integrity_always", True),)
    options = replace(served, chunk=256, tokens=8192, runtime=always)
    return with_environment(options, *STRICT_CHECKS, *forced_retraction(3))


def test_chunks_and_retractions_do_not_change_answers(
    engines: Engines, golden: Golden, served: EngineOptions, prompt: list[int]
) -> None:
    """All policies at once: prompts are cut, and requests go back to the queue and are replayed."""
    engine = engines.get(chunked_and_retracted(served))
    others = [golden.prompt(served, [PRESETS["max"]], n, max_new=NEW) for n in (130, 321, 449)]
    asks = [Ask(prompt, chosen, NEW) for chosen in POLICIES.values()]
    asks += [Ask(other, PRESETS["max"], NEW) for other in others]
    for case in ("cold", "warm"):
        answers = engine.run(*asks)
        for ask, got in zip(asks, answers, strict=True):
            assert ask.policy is not None
            want = golden.answer(served, ask.policy, ask.prompt, NEW)
            assert_answer(f"{case}: {ask.policy.to_json()}", got, want)
        assert sum(got.retractions for got in answers) >= 8, case
        assert (sum(got.cached > 0 for got in answers) > 6) == (case == "warm")
    replays = [row for event in engine.events("extend") for row in event["rows"] if row[4]]
    assert len(replays) >= 8
    engine.assert_nothing_leaked()


@pytest.mark.parametrize("name", ["dense", "balanced", "max", "thirds_then_more"])
def test_prefill_that_unpacks_what_it_reads_answers_by_the_rules(
    engines: Engines, golden: Golden, served: EngineOptions, prompt: list[int], name: str
) -> None:
    """Here the outer layers stay dense, and several requests share a chunk."""
    options = replace(
        served, chunk=512, dense_layers=(0, 2), runtime=(("prefill_kernel", "torch"),)
    )
    engine, chosen = engines.get(options), POLICIES[name]
    engine.flush()
    prompts = [golden.prompt(options, [chosen], length, max_new=NEW) for length in (300, 77, 449)]
    for case in ("cold", "warm"):
        answers = engine.run(*(Ask(each, chosen, NEW) for each in prompts))
        for each, got in zip(prompts, answers, strict=True):
            assert_answer(case, got, golden.answer(options, chosen, each, NEW))
        assert (sum(got.cached for got in answers) > 0) == (case == "warm")


def test_the_calibration_of_a_layer_stays_with_it(
    engines: Engines, model: Path, served: EngineOptions, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("calibration") / "model.calibration"
    write_calibration(file, model, layers=LAYERS)
    options = replace(served, pruner="calibrated", calibration=file)
    golden = Golden(model, Calibrated(load_file(file)))
    chosen = [PRESETS["light"], PRESETS["balanced"], PRESETS["max"], POLICIES["half"]]
    prompt = golden.prompt(options, chosen, 450, max_new=NEW)
    engine = engines.get(options)
    for each in chosen:
        cold = engine.cold(Ask(prompt, each, NEW))
        assert_answer(each.to_json(), cold, golden.answer(options, each, prompt, NEW))


def block_bytes(kind: str) -> int:
    elements = 64 * DIM
    return elements * ITEM if kind == "dense" else elements // 2 * ITEM + elements // 4 // 2


@pytest.mark.parametrize("name", ["dense", "light", "balanced", "fast", "max"])
def test_bytes_are_those_of_the_formula(engines: Engines, served: EngineOptions, name: str) -> None:
    """Ten pages, of which the sink and the window are dense in the other two layers as well."""
    n, pages, dense_layers, mixed = 640, 10, 1, 2
    answer = engines.get(served).cold(Ask(token_ids(n, 5), PRESETS[name], 1))
    prefill, decode = PRESETS[name].prefill, PRESETS[name].decode

    def sparse(shares: Sparsity) -> int:
        return mixed * HEADS * sum(pages - 2 for share in (shares.key, shares.value) if share)

    def total(sparse_blocks: int) -> int:
        mixed_dense = mixed * HEADS * 2 * pages - sparse_blocks
        plain = dense_layers * HEADS * 2 * pages
        return (mixed_dense + plain) * block_bytes("dense") + sparse_blocks * block_bytes("sparse")

    report = answer.report
    assert report["prompt_kv_bytes"] == total(sparse(prefill))
    assert report["dense_equivalent_bytes"] == total(0)
    assert report["kv_bytes"] in (total(sparse(prefill)), total(sparse(decode)))
    assert report["kv_bytes"] == total(report["sparse_blocks"])
    assert report["dense_blocks"] + report["sparse_blocks"] == LAYERS * HEADS * 2 * pages


def test_few_page_ids_are_enough(engines: Engines, golden: Golden, served: EngineOptions) -> None:
    """There are hardly more than the pages of an arena that is all sparse, and rows that change
    form need theirs twice for a moment. Eight requests at once, more than there are bytes for."""
    always = (("check_integrity_always", True),)
    options = with_environment(replace(served, tokens=3072, runtime=always), *STRICT_CHECKS)
    engine, new = engines.get(options), 100
    for name in ("max", "light", "fast", "dense"):
        chosen = POLICIES[name]
        prompts = [golden.prompt(options, [chosen], 300 + 40 * i, max_new=new) for i in range(8)]
        answers = engine.run(*(Ask(each, chosen, new) for each in prompts))
        for each, got in zip(prompts, answers, strict=True):
            assert_answer(f"{name} at {len(each)}", got, golden.answer(options, chosen, each, new))
    books = engine.books()
    all_sparse = books["superblocks"] * 32 // 2
    assert all_sparse <= books["pages"] <= all_sparse * 17 // 16
    engine.assert_nothing_leaked()


@pytest.mark.parametrize("name", PRESETS)
def test_as_many_requests_decode_at_once_as_the_formula_says(
    engines: Engines, served: EngineOptions, name: str
) -> None:
    """Of the bytes of 5,120 tokens in three layers; no page opens after the prompt."""
    fmt, n, new = BlockFormat(DIM, "float32"), 9 * 64 + 1, 60
    kv_bytes = 5120 // 64 * 2 * LAYERS * HEADS * fmt.dense_bytes
    pages = 16 * 17 / 16  # of one superblock, a sixteenth of them spare
    one = HEADS * (2 * fmt.superblock_bytes + pages * 2 * fmt.dense_bytes)
    sizes = BlockSizes(fmt.dense_bytes, fmt.sparse_bytes, fmt.superblock_bytes)
    rules, chosen = Lifecycle(segment=served.segment, window=served.window), PRESETS[name]
    count = requests_at_once(rules, sizes, int(kv_bytes // one), chosen, n, new)
    engine = engines.get(replace(served, tokens=5120))
    engine.flush()
    rids = [f"{name}-{seed}" for seed in range(count + 3)]
    asks = [Ask(token_ids(n, seed), chosen, new, rid=rid) for seed, rid in enumerate(rids)]
    assert sum(answer.retractions for answer in engine.run(*asks)) == 0
    steps = [event["rows"] for event in engine.events("decode")]
    assert max(len(rows) for rows in steps if rows[0][0] in rids) == count


@pytest.mark.parametrize(("layers", "said"), [((1, 7), "0 to 2"), ((0, 1, 2), "all layers")])
def test_layers_that_the_model_has_not_stop_the_start(
    engines: Engines, served: EngineOptions, layers: tuple[int, ...], said: str
) -> None:
    with pytest.raises(EngineFailed, match=said):
        engines.get(replace(served, dense_layers=layers))
