"""Requests of every shape: several answers, batches, twins, turns, early ends, and their limits.

One engine whose laws, ours and SGLang's, are checked after every batch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hs_runtime.policies import PRESETS
from tests.support.engine_process import PAGE_DIGESTS
from tests.support.engines import (
    STRICT_CHECKS,
    Answer,
    Ask,
    Engine,
    EngineOptions,
    Engines,
    policy,
    token_ids,
    with_environment,
)
from tests.support.golden import TOLERANCE, Golden, assert_answer

pytestmark = pytest.mark.integration

POLICIES = {**PRESETS, "half": policy((500, 500)), "more": policy((300, 0), (750, 500))}
NEW = 24


@pytest.fixture(scope="module")
def strict(small: EngineOptions) -> EngineOptions:
    options = replace(small, chunk=512, tokens=6144, runtime=(("check_integrity_always", True),))
    return with_environment(options, *STRICT_CHECKS, (PAGE_DIGESTS, "1"))


@pytest.fixture
def engine(engines: Engines, strict: EngineOptions) -> Engine:
    """Empty at the beginning of each test."""
    running = engines.get(strict)
    running.flush()
    return running


def prompt_of(golden: Golden, options: EngineOptions, name: str, length: int) -> list[int]:
    return golden.prompt(options, [POLICIES[name]], length, max_new=NEW)


@pytest.mark.parametrize("name", POLICIES)
def test_several_answers_to_one_prompt(
    engine: Engine, golden: Golden, strict: EngineOptions, name: str
) -> None:
    """Greedy ones are equal, each is the lone answer; drawn ones are as long as they should be."""
    chosen, prompt = POLICIES[name], prompt_of(golden, strict, name, 700)
    want = golden.answer(strict, chosen, prompt, NEW)
    answers = engine.take_all(engine.send(Ask(prompt, chosen, NEW, sampling={"n": 3})))
    assert len(answers) == 3
    for got in answers:
        assert_answer(name, got, want)
    drawn = engine.take_all(
        engine.send(Ask(prompt, chosen, NEW, sampling={"n": 3, "temperature": 1.5}))
    )
    assert [len(got.tokens) for got in drawn] == [NEW] * 3
    assert len({tuple(got.tokens) for got in drawn}) == 3
    engine.assert_nothing_leaked()


def test_a_batch_may_give_each_prompt_its_policy(
    engine: Engine, golden: Golden, strict: EngineOptions
) -> None:
    lengths = dict(zip(POLICIES, (65, 200, 257, 449, 640, 700, 900), strict=True))
    asks = [
        Ask(prompt_of(golden, strict, name, length), POLICIES[name], NEW)
        for name, length in lengths.items()
    ]
    orders = [ask.order()["fields"] for ask in asks]
    whole = Ask(
        [],
        fields={name: [each[name] for each in orders] for name in ("input_ids", "sampling_params")},
    )
    answers = engine.take_all(engine.send(whole))
    for (name, length), ask, got in zip(lengths.items(), asks, answers, strict=True):
        want = golden.answer(strict, POLICIES[name], ask.prompt, NEW)
        assert_answer(f"{name} at {length}", got, want)
    engine.assert_nothing_leaked()


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("length", [448, 1100])
def test_twins_and_prefixes_in_one_batch(
    engine: Engine, golden: Golden, strict: EngineOptions, name: str, length: int
) -> None:
    """Equal prompts that are computed beside each other, and prompts that are the beginning of
    others: pages that the cache has by then are given back, and nobody is disturbed."""
    chosen, prompt = POLICIES[name], prompt_of(golden, strict, name, length)
    half = golden.prompt(strict, [chosen], length // 2 + 3, max_new=NEW, prefix=prompt[:-3][:200])
    prompts = [prompt, half, prompt, prompt, half]
    for case in ("cold", "warm"):
        answers = engine.run(*(Ask(each, chosen, NEW) for each in prompts))
        for each, got in zip(prompts, answers, strict=True):
            want = golden.answer(strict, chosen, each, NEW)
            assert_answer(f"{case}, {len(each)} tokens", got, want)
        reusable = [a.cached > 0 for a, p in zip(answers, prompts, strict=True) if p is prompt]
        assert case == "cold" or all(reusable)
    engine.assert_nothing_leaked()


def test_overlapping_requests_leave_the_pages_of_their_prefix_as_they_were(
    engine: Engine, golden: Golden, strict: EngineOptions
) -> None:
    """One prefix with dense prefill, answered under four decode settings at once: each as alone,
    and not a bit of the shared pages changes, though three of the four made them sparse."""
    decodes = {"dense": (0, 0), "light": (0, 1000), "both": (1000, 1000), "halves": (500, 250)}
    policies = {name: policy((0, 0), shares) for name, shares in decodes.items()}
    prefix = golden.prompt(strict, policies.values(), 512, max_new=NEW)
    engine.run(Ask([*prefix, 1], PRESETS["dense"], NEW))
    before = engine.page_digests()
    assert len(before) >= 8
    prompts = {
        name: golden.prompt(strict, [each], 513 + 40 * i, max_new=NEW, prefix=prefix)
        for i, (name, each) in enumerate(policies.items())
    }
    answers = engine.run(*(Ask(prompts[name], policies[name], NEW) for name in policies))
    for name, got in zip(policies, answers, strict=True):
        assert got.cached == 512
        assert_answer(name, got, golden.answer(strict, policies[name], prompts[name], NEW))
    assert [a.report["sparse_blocks"] > 0 for a in answers] == [False, True, True, True]
    after = engine.page_digests()
    assert {page: after[page] for page in before} == before
    assert len(after) > len(before)
    engine.assert_nothing_leaked()


@pytest.mark.parametrize("name", POLICIES)
def test_the_next_turn_reuses_what_the_rules_allow(
    engine: Engine, golden: Golden, strict: EngineOptions, name: str
) -> None:
    """Generated tokens are reused under `dense` alone: other policies computed them otherwise than
    a prompt's tokens are."""
    chosen, prompt = POLICIES[name], prompt_of(golden, strict, name, 500)
    (first,) = engine.run(Ask(prompt, chosen, 150))
    history = [*prompt, *first.tokens]
    turn = golden.prompt(strict, [chosen], len(history) + 100, max_new=NEW, prefix=history)
    (second,) = engine.run(Ask(turn, chosen, NEW))
    assert_answer("second turn", second, golden.answer(strict, chosen, turn, NEW))
    if name == "dense":
        assert second.cached == (len(history) - 1) // 64 * 64
    elif chosen.prefill.is_dense:
        assert second.cached == len(prompt) // 64 * 64
    else:
        assert second.cached == (len(prompt) - strict.window) // strict.segment * strict.segment
    (third,) = engine.run(Ask(turn, chosen, NEW))
    assert third.cached > second.cached
    assert_answer("again", third, golden.answer(strict, chosen, turn, NEW))
    engine.assert_nothing_leaked()


@pytest.mark.parametrize("name", POLICIES)
def test_an_answer_may_end_early_and_leaves_nothing(
    engine: Engine, golden: Golden, strict: EngineOptions, name: str
) -> None:
    """By a stop token, after one token, and before the first."""
    chosen, prompt = POLICIES[name], prompt_of(golden, strict, name, 700)
    want = golden.answer(strict, chosen, prompt, NEW)
    place = next(i for i in range(5, NEW) if want.tokens[i] not in want.tokens[:i])
    assert 256 not in want.tokens[:place], "the model ends by itself: choose another prompt"
    stop = {"stop_token_ids": [want.tokens[place]], "ignore_eos": False}
    (stopped,) = engine.run(Ask(prompt, chosen, NEW, sampling=stop))
    assert stopped.finish == "stop" and stopped.tokens == want.tokens[: place + 1]
    (one,) = engine.run(Ask(prompt, chosen, 1))
    assert one.tokens == want.tokens[:1] and one.cached > 0
    (none,) = engine.run(Ask(prompt, chosen, 0, logprob_start=0))
    assert none.finish == "length"
    pairs = zip(none.prompt_logprobs, want.prompt_logprobs, strict=True)
    assert max(abs(a - b) for a, b in pairs) < TOLERANCE
    (streamed,) = engine.run(Ask(prompt, chosen, NEW, abort_after=NEW + 1))
    assert_answer("streamed", streamed, want)
    engine.assert_nothing_leaked()


@pytest.mark.parametrize("name", ["dense", "balanced"])
def test_clients_with_other_keys_do_not_share_pages(
    engine: Engine, golden: Golden, strict: EngineOptions, name: str
) -> None:
    """`extra_key` separates clients, and cannot be made to look like our own part of the key."""
    chosen, prompt = POLICIES[name], prompt_of(golden, strict, name, 700)
    engine.run(Ask(prompt, chosen, NEW))
    for key in ("tenant", "\x1fhs:" + 64 * "0"):
        (other,) = engine.run(Ask(prompt, chosen, NEW, fields={"extra_key": key}))
        assert other.cached == 0
        assert_answer(key, other, golden.answer(strict, chosen, prompt, NEW))
        (same,) = engine.run(Ask(prompt, chosen, NEW, fields={"extra_key": key}))
        assert same.cached > 0
    engine.assert_nothing_leaked()


def test_an_answer_without_end_gets_what_the_memory_holds(
    engines: Engines, golden: Golden, strict: EngineOptions
) -> None:
    """6,000 new tokens are asked for where two superblocks exist. A lone request surely completes
    in one of them, which holds 17 dense blocks: 7 pages and a segment being converted. Sparser
    policies get more, and all of it is right."""
    engine = engines.get(replace(strict, tokens=640))
    given = {}
    for name in ("dense", "light", "more", "max"):
        chosen = POLICIES[name]
        prompt = golden.prompt(strict, [chosen], 130, max_new=NEW)
        (got,) = engine.run(Ask(prompt, chosen, 6000))
        assert got.finish == "length"
        given[name] = len(got.tokens)
        want = golden.answer(strict, chosen, prompt, given[name])
        same = sum(a == b for a, b in zip(got.tokens, want.tokens, strict=True))
        assert same == given[name] or want.margin < 5e-6, f"{name}: {same} of {given[name]}"
        engine.assert_nothing_leaked()
    assert given["dense"] == 7 * 64 - 1 - 130
    assert given["dense"] < given["light"] < given["more"] < given["max"]


def test_reports_name_what_the_request_held(engine: Engine, strict: EngineOptions) -> None:
    """Blocks at the end of a lone `max` request: sink and window dense, all between sparse."""
    answer: Answer = engine.cold(Ask(token_ids(700), PRESETS["max"], 30))
    pages, last = -(-729 // 64), 729 // 64  # the last token's own K and V are never computed
    window = 728 // 64 - strict.window // 64
    layers, heads = 2, 2
    sparse = 2 * layers * heads * (window - 1)
    assert pages == last + 1
    assert answer.report["sparse_blocks"] == sparse
    assert answer.report["dense_blocks"] == 2 * layers * heads * pages - sparse
