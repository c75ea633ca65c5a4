"""A real SGLang on the GPU, CUDA graphs on, answers what the rules say in float32.

The engine computes in float16, so where the rules' float32 decides by less than that rounds, it may
decide otherwise. What holds all the same: log-probabilities of the prompt and of the answer's
tokens stay near those of the request's own policy, and far from those of every other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hs_runtime.policies import PRESETS
from tests.support.calibrations import write_calibration
from tests.support.checkpoints import tiny_llama
from tests.support.engines import (
    Answer,
    Ask,
    EngineOptions,
    Engines,
    forced_retraction,
    policy,
    token_ids,
    with_environment,
)
from tests.support.golden import Golden
from tests.support.oracle import Calibrated, Greedy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

POLICIES = {
    **PRESETS,
    "half": policy((500, 500)),
    "thirds_then_more": policy((300, 0), (750, 500)),
}
NEW = 48
LENGTH = 1100
NEAR = 0.03  # mean distance of log-probabilities, float16 against float32
CLOSE_CALL = 0.3  # at most, between the best two of the rules where another is taken; 0.25 was seen


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"), dtype=torch.float16)


@pytest.fixture(scope="module")
def golden(model: Path) -> Golden:
    found = Golden(model)
    found.model.weights = {name: w.float() for name, w in found.model.weights.items()}
    return found


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    pytest.importorskip("sglang")
    running = Engines(tmp_path_factory.mktemp("engines"))
    yield running
    running.close()


@pytest.fixture(scope="module")
def options(model: Path) -> EngineOptions:
    """Segments of two pages, a window of one, chunks of four segments."""
    arguments = (
        ("device", "cuda"),
        ("dtype", "float16"),
        ("disable_cuda_graph", False),
        ("cuda_graph_backend_prefill", "disabled"),
        ("cuda_graph_max_bs_decode", 8),
        ("mem_fraction_static", 0.3),
    )
    return EngineOptions(model, segment=128, window=64, chunk=512, arguments=arguments)


def distance(got: Answer, want: Greedy) -> float:
    """Mean |difference| of log-probabilities over the prompt and the answers' common tokens."""
    pairs = list(zip(got.prompt_logprobs, want.prompt_logprobs, strict=False))
    for a, b, x, y in zip(got.tokens, want.tokens, got.logprobs, want.logprobs, strict=True):
        pairs.append((x, y))
        if a != b:
            break
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


def common(got: Answer, want: Greedy) -> int:
    """How many tokens are equal before the first that is not."""
    equal = [a == b for a, b in zip(got.tokens, want.tokens, strict=True)]
    return equal.index(False) if False in equal else len(equal)


def assert_near(name: str, got: Answer, want: Greedy) -> None:
    assert got.finish == "length"
    far, first = distance(got, want), common(got, want)
    assert far < NEAR, f"{name}: log-probabilities off by {far:.3g} on average"
    if first < len(want.tokens):
        gap = want.gaps[first]
        assert gap < CLOSE_CALL, f"{name}: another token at {first}, {gap:.3g} below the best"


@pytest.mark.parametrize("name", POLICIES)
def test_answers_are_those_of_the_rules(
    engines: Engines, golden: Golden, options: EngineOptions, name: str
) -> None:
    prompt, chosen = token_ids(LENGTH, 7), POLICIES[name]
    engine = engines.get(options)
    engine.flush()
    (cold,) = engine.run(Ask(prompt, chosen, NEW, logprob_start=0))
    want = golden.answer(options, chosen, prompt, NEW)
    assert_near(name, cold, want)
    assert (cold.report["sparse_blocks"] > 0) == (not chosen.is_dense)
    others = {
        other: distance(cold, golden.answer(options, each, prompt, NEW))
        for other, each in POLICIES.items()
        if each != chosen
    }
    nearest = min(others, key=others.__getitem__)
    # Policies that prefill alike differ in the answer's few tokens alone.
    assert distance(cold, want) < others[nearest], f"{name}: nearer to {nearest}"
    (warm,) = engine.run(Ask(prompt, chosen, NEW))
    assert warm.cached > 0
    assert_near(f"{name}, cached", warm, want)


def test_a_batch_of_all_policies_answers_as_each_alone(
    engines: Engines, golden: Golden, options: EngineOptions
) -> None:
    engine = engines.get(options)
    engine.flush()
    prompts = {name: token_ids(400 + 90 * i, i) for i, name in enumerate(POLICIES)}
    answers = engine.run(*(Ask(prompts[n], POLICIES[n], NEW) for n in POLICIES))
    for name, got in zip(POLICIES, answers, strict=True):
        assert_near(name, got, golden.answer(options, POLICIES[name], prompts[name], NEW))


def test_retracted_requests_answer_as_if_they_had_not_been(
    engines: Engines, golden: Golden, options: EngineOptions
) -> None:
    engine = engines.get(with_environment(options, *forced_retraction(7)))
    names = ("dense", "balanced", "fast", "max")
    prompts = {name: token_ids(300 + 111 * i, 40 + i) for i, name in enumerate(names)}
    answers = engine.run(*(Ask(prompts[n], POLICIES[n], NEW) for n in names))
    assert sum(each.retractions for each in answers) > 0
    for name, got in zip(names, answers, strict=True):
        assert_near(name, got, golden.answer(options, POLICIES[name], prompts[name], NEW))


def test_without_cuda_graphs_answers_are_the_same(
    engines: Engines, golden: Golden, options: EngineOptions
) -> None:
    arguments = dict(options.arguments) | {"disable_cuda_graph": True}
    engine = engines.get(replace(options, arguments=tuple(arguments.items())))
    for name in ("dense", "half", "max"):
        prompt = token_ids(LENGTH, 7)
        (got,) = engine.run(Ask(prompt, POLICIES[name], NEW, logprob_start=0))
        assert_near(name, got, golden.answer(options, POLICIES[name], prompt, NEW))


def test_dense_layers_are_never_pruned(
    engines: Engines, golden: Golden, options: EngineOptions
) -> None:
    """Nearer to the rules that spare the first layer than to those that prune both or none."""
    spared, prompt = replace(options, dense_layers=(0,)), token_ids(LENGTH, 7)
    engine = engines.get(spared)
    for name in ("max", "half"):
        want = golden.answer(spared, POLICIES[name], prompt, NEW)
        (cold,) = engine.run(Ask(prompt, POLICIES[name], NEW, logprob_start=0))
        assert_near(name, cold, want)
        for other in (POLICIES[name], PRESETS["dense"]):
            whole = golden.answer(options, other, prompt, NEW)
            assert distance(cold, want) < distance(cold, whole)
        (warm,) = engine.run(Ask(prompt, POLICIES[name], NEW))
        assert warm.cached > 0
        assert_near(f"{name}, cached", warm, want)


def test_the_calibrated_pruner_answers_as_its_rules_say(
    engines: Engines, model: Path, options: EngineOptions, tmp_path: Path
) -> None:
    """Block means are there for every policy, `dense` too."""
    file = write_calibration(tmp_path / "calibration", model)
    calibrated = replace(options, pruner="calibrated", calibration=file)
    golden = Golden(model, Calibrated(load_file(file)))
    golden.model.weights = {name: w.float() for name, w in golden.model.weights.items()}
    engine, prompt = engines.get(calibrated), token_ids(LENGTH, 7)
    for name in ("dense", "light", "balanced"):
        (got,) = engine.run(Ask(prompt, POLICIES[name], NEW, logprob_start=0))
        assert_near(name, got, golden.answer(calibrated, POLICIES[name], prompt, NEW))
