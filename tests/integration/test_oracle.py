"""The engine answers what a naive computation of the rules answers, token by token.

The oracle (`tests/support/oracle.py`) knows one request, no cache and none of the runtime's code,
so an error in what is read in which form cannot be made twice. Prompts end at every kind of
boundary, and answers are long enough for pages and segments to leave the window.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hs_runtime.policies import PRESETS
from tests.support.engines import Ask, EngineOptions, Engines, policy, token_ids
from tests.support.golden import TOLERANCE, Golden, assert_answer

pytestmark = pytest.mark.integration

POLICIES = {
    **PRESETS,
    "half": policy((500, 500)),
    "half_of_v": policy((0, 500)),
    "thirds_then_more": policy((300, 0), (750, 500)),
    "light_fractions": policy((0, 0), (500, 250)),
    "half_then_all": policy((500, 250), (1000, 1000)),
    "all_k_then_half_v": policy((1000, 0), (1000, 500)),
    "a_thousandth": policy((1, 999), (999, 1000)),
}
LENGTHS = (300, 513, 704)
# Around the page, the sink, the window, segments, and where a window's end meets a segment's.
EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 319, 320, 321, 383, 384)
NEW = 80


def test_the_tiny_model_notices_every_policy(golden: Golden, small: EngineOptions) -> None:
    """What makes the rest of this file a test: each policy has an answer of its own, and no answer
    is certain of its tokens."""
    prompt = token_ids(704, 1)
    answers = [golden.answer(small, each, prompt, NEW) for each in POLICIES.values()]
    assert len({tuple(each.tokens) for each in answers}) == len(POLICIES)
    for each in answers:
        assert -3 < sum(each.logprobs) / NEW < -0.2
        assert len(set(each.tokens)) > 30


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("length", LENGTHS)
def test_answers_are_those_of_the_rules(
    engines: Engines, golden: Golden, small: EngineOptions, name: str, length: int
) -> None:
    chosen = POLICIES[name]
    prompt = golden.prompt(small, [chosen], length, max_new=NEW)
    got = engines.get(small).cold(Ask(prompt, chosen, NEW))
    assert_answer(f"{name} at {length}", got, golden.answer(small, chosen, prompt, NEW))
    assert (got.report["sparse_blocks"] > 0) == (not chosen.is_dense)


@pytest.mark.parametrize("name", ["fast", "max", "thirds_then_more"])
def test_prompts_that_end_at_boundaries_are_answered_by_the_rules(
    engines: Engines, golden: Golden, small: EngineOptions, name: str
) -> None:
    """All at once: what a request is answered does not depend on its company."""
    chosen = POLICIES[name]
    prompts = [golden.prompt(small, [chosen], length, max_new=NEW) for length in EDGES]
    engine = engines.get(small)
    engine.flush()
    answers = engine.run(*(Ask(prompt, chosen, NEW) for prompt in prompts))
    for prompt, got in zip(prompts, answers, strict=True):
        want = golden.answer(small, chosen, prompt, NEW)
        assert_answer(f"{name} at {len(prompt)}", got, want)


@pytest.mark.parametrize("name", ["balanced", "max", "half"])
def test_prompt_log_probabilities_are_those_of_the_rules(
    engines: Engines, golden: Golden, small: EngineOptions, name: str
) -> None:
    """Asked for from the first token on, cold and when the prefix is cached already."""
    chosen = POLICIES[name]
    prompt = golden.prompt(small, [chosen], 700, max_new=3)
    want = golden.answer(small, chosen, prompt, 3)
    engine = engines.get(small)
    cold = engine.cold(Ask(prompt, chosen, 3, logprob_start=0))
    (warm,) = engine.run(Ask(prompt, chosen, 3))
    assert warm.cached > 0
    (again,) = engine.run(Ask(prompt, chosen, 3, logprob_start=0))
    (partly,) = engine.run(Ask(prompt, chosen, 3, logprob_start=500))
    assert partly.cached > 0
    for case, got, first in (("cold", cold, 0), ("again", again, 0), ("partly", partly, 500)):
        assert_answer(case, got, want)
        pairs = zip(got.prompt_logprobs, want.prompt_logprobs[first:], strict=True)
        worst = max(abs(a - b) for a, b in pairs)
        assert worst < TOLERANCE, f"{case}: prompt log-probabilities off by {worst:.2g}"


@pytest.mark.parametrize("kernel", ["expanded", "torch"])
@pytest.mark.parametrize("name", ["dense", "balanced", "max", "thirds_then_more"])
def test_prefill_that_unpacks_what_it_reads_answers_by_the_rules(
    engines: Engines, golden: Golden, small: EngineOptions, name: str, kernel: str
) -> None:
    """Several requests in a chunk, cold and with cached prefixes."""
    options = replace(small, chunk=512, runtime=(("prefill_kernel", kernel),))
    engine, chosen = engines.get(options), POLICIES[name]
    engine.flush()
    prompts = [golden.prompt(options, [chosen], length, max_new=24) for length in (700, 321, 900)]
    for case in ("cold", "warm"):
        answers = engine.run(*(Ask(prompt, chosen, 24) for prompt in prompts))
        for prompt, got in zip(prompts, answers, strict=True):
            want = golden.answer(options, chosen, prompt, 24)
            assert_answer(f"{case}, {len(prompt)} tokens", got, want)
        assert (sum(got.cached for got in answers) > 0) == (case == "warm")
