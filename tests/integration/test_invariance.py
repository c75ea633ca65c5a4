"""Answers do not depend on what was cached, on how prompts were cut, or on retractions.

Every run is compared with the oracle of the rules, so equal runs are also right ones. Each test
asserts that what it is about did happen: tokens came from the cache, a prompt was cut where it
says, requests were retracted and replayed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from hs_runtime.policies import PRESETS, SparsityPolicy
from tests.support.engines import (
    Ask,
    EngineOptions,
    Engines,
    forced_retraction,
    policy,
    with_environment,
)
from tests.support.golden import Golden, assert_answer

pytestmark = pytest.mark.integration

POLICIES = {
    **{name: PRESETS[name] for name in ("light", "balanced", "fast", "max")},
    "half": policy((500, 500)),
    "thirds_then_more": policy((300, 0), (750, 500)),
}
NEW = 40
ATTEMPTS = 4  # for two requests to run beside each other


@dataclass(frozen=True)
class Setting:
    """Constants of a server, and a prompt of several segments that is clear under all policies."""

    name: str
    options: EngineOptions
    prompt: tuple[int, ...]

    def reused(self, chosen: SparsityPolicy, shared: int) -> int:
        """Tokens that a prompt of this length takes from the cache when `shared` were computed."""
        n, segment, window = len(self.prompt), self.options.segment, self.options.window
        if chosen.prefill.is_dense:
            return min(shared, n - 1) // 64 * 64
        return min(shared // segment, (n - window) // segment) * segment


LENGTHS = {"small": 700, "default": 3000}


@pytest.fixture(scope="module", params=LENGTHS)
def setting(request: pytest.FixtureRequest, golden: Golden) -> Setting:
    name: str = request.param
    options: EngineOptions = request.getfixturevalue(name)
    prompt = golden.prompt(options, POLICIES.values(), LENGTHS[name], max_new=NEW)
    return Setting(name, options, tuple(prompt))


@pytest.mark.parametrize("name", POLICIES)
def test_warm_equals_cold(engines: Engines, golden: Golden, setting: Setting, name: str) -> None:
    chosen, engine = POLICIES[name], engines.get(setting.options)
    ask = Ask(setting.prompt, chosen, NEW)
    want = golden.answer(setting.options, chosen, setting.prompt, NEW)
    cold = engine.cold(ask)
    assert_answer("cold", cold, want)
    assert cold.report["sparse_blocks"] > 0
    for case in ("warm", "warm again"):
        (warm,) = engine.run(ask)
        assert_answer(case, warm, want)
        assert warm.cached == setting.reused(chosen, len(setting.prompt)) > 0
        assert warm.report == cold.report


@pytest.mark.parametrize("name", POLICIES)
def test_a_prefix_that_ends_inside_a_segment_is_reused_up_to_it(
    engines: Engines, golden: Golden, setting: Setting, name: str
) -> None:
    """Two prompts part in the middle of a page; the first is asked for again after the second, and
    the second meets what the first left."""
    chosen, engine = POLICIES[name], engines.get(setting.options)
    shared = 2 * setting.options.segment - 37
    other = golden.prompt(
        setting.options,
        [chosen],
        len(setting.prompt),
        max_new=NEW,
        prefix=setting.prompt[:shared],
    )
    engine.flush()
    prompts = [setting.prompt, tuple(other), setting.prompt, tuple(other)]
    computed = [0, shared, len(setting.prompt), len(setting.prompt)]
    for prompt, already in zip(prompts, computed, strict=True):
        (got,) = engine.run(Ask(prompt, chosen, NEW))
        assert_answer(f"after {already}", got, golden.answer(setting.options, chosen, prompt, NEW))
        assert got.cached == setting.reused(chosen, already)
        assert (got.cached > 0) == (already > 0)


@pytest.mark.parametrize(("first", "second"), [("dense", "light"), ("balanced", "fast")])
def test_only_equal_prefill_settings_share_pages(
    engines: Engines, golden: Golden, setting: Setting, first: str, second: str
) -> None:
    """`light` reads what `dense` left and `fast` what `balanced` left, and nobody else anything."""
    engine = engines.get(setting.options)
    engine.flush()
    engine.run(Ask(setting.prompt, PRESETS[first], NEW))
    for name in ("max", "half", "thirds_then_more", second):
        chosen = POLICIES[name]
        (got,) = engine.run(Ask(setting.prompt, chosen, NEW))
        want = golden.answer(setting.options, chosen, setting.prompt, NEW)
        assert_answer(f"{name} after {first}", got, want)
        assert got.cached == (setting.reused(chosen, len(setting.prompt)) if name == second else 0)


def retracting(setting: Setting) -> EngineOptions:
    """Sends a request back at every seventh forward, but never one that is alone."""
    return with_environment(replace(setting.options, chunk=2048), *forced_retraction(7))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("chunk", [512, 2048])
def test_chunk_sizes_do_not_change_answers(
    engines: Engines, golden: Golden, setting: Setting, chunk: int, name: str
) -> None:
    """The tests above have chunks of 1024."""
    others = {512: replace(setting.options, chunk=512), 2048: retracting(setting)}
    chosen, engine = POLICIES[name], engines.get(others[chunk])
    want = golden.answer(setting.options, chosen, setting.prompt, NEW)
    rid = f"{name}-{chunk}"
    assert_answer("cold", engine.cold(Ask(setting.prompt, chosen, NEW, rid=rid)), want)
    n = len(setting.prompt)
    ends = [row[2] for event in engine.events("extend") for row in event["rows"] if row[0] == rid]
    assert ends == [*range(chunk, n, chunk), n]
    (warm,) = engine.run(Ask(setting.prompt, chosen, NEW))
    assert_answer("warm", warm, want)
    assert warm.cached == setting.reused(chosen, n) > 0


@pytest.mark.parametrize("name", ["dense", *POLICIES])
def test_a_retracted_request_continues_as_if_it_had_not_been(
    engines: Engines, golden: Golden, setting: Setting, name: str
) -> None:
    """Beside a shorter request, which SGLang prefers, it goes back to the queue again and again, at
    other places of a page each time: cold, and then with its prefix cached."""
    engine = engines.get(retracting(setting))
    chosen, companion = PRESETS.get(name) or POLICIES[name], PRESETS["light"]
    short = golden.prompt(setting.options, [companion], 100, max_new=100)
    for case in ("cold", "warm"):
        for attempt in range(ATTEMPTS):
            if case == "cold":
                engine.flush()
            rid = f"{case}-{name}-{attempt}"
            beside, got = engine.run(
                Ask(short, companion, 100), Ask(setting.prompt, chosen, NEW, rid=rid)
            )
            assert_answer("beside", beside, golden.answer(setting.options, companion, short, 100))
            assert_answer(case, got, golden.answer(setting.options, chosen, setting.prompt, NEW))
            assert (got.report["sparse_blocks"] > 0) == (name != "dense")
            assert (got.cached > 0) == (case == "warm")
            if got.retractions:
                break  # on a busy machine the short one may be done before the other arrives
        assert got.retractions >= 3
        rows = [row for event in engine.events("extend") for row in event["rows"] if row[0] == rid]
        replays = {row[2] for row in rows if row[4]}
        assert len(replays) >= 3, f"{case}: replayed up to {sorted(replays)}"
    engine.assert_nothing_leaked()


@pytest.mark.parametrize("name", POLICIES)
def test_without_a_prefix_cache_answers_are_the_same(
    engines: Engines, golden: Golden, setting: Setting, name: str
) -> None:
    options = replace(setting.options, arguments=(("disable_radix_cache", True),))
    chosen, engine = POLICIES[name], engines.get(options)
    want = golden.answer(setting.options, chosen, setting.prompt, NEW)
    for case in ("first", "second"):
        (got,) = engine.run(Ask(setting.prompt, chosen, NEW))
        assert_answer(case, got, want)
        assert got.cached == 0
