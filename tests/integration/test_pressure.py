"""Many requests of several policies at once, where memory is short, requests are sent back to the
queue and clients leave: every answer is still the one that the rules give, and nothing leaks.

SGLang's checks and ours run after every batch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from hs_runtime.policies import PRESETS
from tests.support.engines import (
    STRICT_CHECKS,
    Ask,
    Engine,
    EngineOptions,
    Engines,
    forced_retraction,
    policy,
    token_ids,
    with_environment,
)
from tests.support.golden import Golden, assert_answer

pytestmark = pytest.mark.integration

POLICIES = {**PRESETS, "half": policy((500, 500)), "more": policy((300, 0), (750, 500))}


def strict(options: EngineOptions, tokens: int) -> EngineOptions:
    always = (("check_integrity_always", True),)
    return with_environment(
        replace(options, chunk=512, tokens=tokens, runtime=always), *STRICT_CHECKS
    )


def rows(engine: Engine, rid: str, *kinds: str) -> list[list[object]]:
    events = [event for event in engine.events() if event["kind"] in kinds]
    return [row for event in events for row in event["rows"] if row[0] == rid]


def test_eight_requests_of_four_policies_are_retracted_while_others_are_aborted(
    engines: Engines, golden: Golden, small: EngineOptions
) -> None:
    """One client leaves while its request waits, one between two chunks of its prompt, one while
    its answer is written. Twice: cold, and with a prefix cache."""
    options = with_environment(strict(small, 8192), *forced_retraction(3))
    engine, new = engines.get(options), 40
    names = ("dense", "balanced", "max", "more")
    lengths = (130, 300, 449, 640, 700, 129, 513, 900)
    asks = [
        Ask(
            golden.prompt(options, [POLICIES[names[i % 4]]], n, max_new=new),
            POLICIES[names[i % 4]],
            new,
        )
        for i, n in enumerate(lengths)
    ]
    for case in ("cold", "warm"):
        numbers = [engine.send(ask) for ask in asks[:4]]
        writing = engine.send(Ask(token_ids(333), PRESETS["fast"], 500, abort_after=6))
        chunked, waiting = f"{case}-chunked-", f"{case}-waiting-"
        gone = [engine.send(Ask(token_ids(6000, 1), PRESETS["max"], 400, rid=chunked))]
        engine.await_extend(chunked)
        numbers += [engine.send(ask) for ask in asks[4:]]
        gone.append(engine.send(Ask(token_ids(2000, 2), POLICIES["half"], 400, rid=waiting)))
        engine.abort(waiting)
        engine.abort(chunked)
        gone.append(writing)
        for number in gone:
            answer = engine.take(number)
            assert answer.finish == "abort" and len(answer.tokens) < 100
        assert not rows(engine, waiting, "extend", "decode"), "it did not wait"
        assert 0 < max(row[2] for row in rows(engine, chunked, "extend")) < 6000, "no middle chunk"
        answers = [engine.take(number) for number in numbers]
        for ask, got in zip(asks, answers, strict=True):
            assert ask.policy is not None
            want = golden.answer(options, ask.policy, ask.prompt, new)
            assert_answer(f"{case}: {ask.policy.preset} at {len(ask.prompt)}", got, want)
        assert sum(got.retractions > 0 for got in answers) >= 2
        assert sum(got.retractions for got in answers) >= 8
        assert sum(got.cached > 0 for got in answers) >= (case == "warm") * 6
    engine.assert_nothing_leaked()


@pytest.mark.parametrize(
    "chosen", [tuple(POLICIES), ("dense",), ("max",), ("dense", "more", "half")]
)
def test_where_not_all_fit_requests_are_retracted_and_lose_nothing(
    engines: Engines, golden: Golden, small: EngineOptions, chosen: tuple[str, ...]
) -> None:
    """Admission is made to hope that answers stay short, and they do not: memory runs out while
    requests decode."""
    hopeful = (("schedule_conservativeness", 0.05),)
    options = replace(strict(small, 2048), arguments=hopeful)
    engine, new = engines.get(options), 200
    engine.flush()
    asks = []
    for i in range(10):
        name = chosen[i % len(chosen)]
        prompt = golden.prompt(options, [POLICIES[name]], 110 + 9 * i, max_new=new)
        asks.append(Ask(prompt, POLICIES[name], new))
    retractions = 0
    for _ in range(3):  # on a busy machine requests may arrive so slowly that all fit
        answers = engine.run(*asks)
        for ask, got in zip(asks, answers, strict=True):
            assert ask.policy is not None
            want = golden.answer(options, ask.policy, ask.prompt, new)
            assert_answer(f"{ask.policy.preset} at {len(ask.prompt)}", got, want)
        retractions += sum(got.retractions for got in answers)
        if retractions:
            break
        engine.flush()
    assert retractions >= 1
    engine.assert_nothing_leaked()
