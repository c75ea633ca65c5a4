"""Two ranks, each with one kv head, on the CPU: the answers are those of the rules, both ranks
count alike after every batch, and a rank that does not is noticed.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from hs_runtime.policies import PRESETS
from tests.support.engine_process import SKEWED
from tests.support.engines import (
    STRICT_CHECKS,
    Ask,
    EngineFailed,
    EngineOptions,
    Engines,
    forced_retraction,
    policy,
    with_environment,
)
from tests.support.golden import Golden, assert_answer

pytestmark = pytest.mark.integration

POLICIES = {**PRESETS, "half": policy((500, 500)), "more": policy((300, 0), (750, 500))}
NEW = 30


@pytest.fixture(scope="module")
def two_ranks(small: EngineOptions) -> EngineOptions:
    runtime = (("check_integrity_always", True), ("check_ranks", True))
    options = replace(small, chunk=512, runtime=runtime, arguments=(("tp_size", 2),))
    cores = ("SGLANG_CPU_OMP_THREADS_BIND", "0|1" if (os.cpu_count() or 1) > 1 else "0|0")
    return with_environment(options, cores, *STRICT_CHECKS, *forced_retraction(5))


def test_two_ranks_answer_by_the_rules_through_hits_and_retractions(
    engines: Engines, golden: Golden, two_ranks: EngineOptions
) -> None:
    engine = engines.get(two_ranks)
    prompts = {
        name: golden.prompt(two_ranks, [each], 300 + 70 * i, max_new=NEW)
        for i, (name, each) in enumerate(POLICIES.items())
    }
    for case in ("cold", "cached"):
        answers = engine.run(*(Ask(prompts[n], POLICIES[n], NEW) for n in POLICIES))
        for name, got in zip(POLICIES, answers, strict=True):
            want = golden.answer(two_ranks, POLICIES[name], prompts[name], NEW)
            assert_answer(f"{name}, {case}", got, want)
            pages = -(-(len(prompts[name]) + NEW - 1) // 64)
            blocks = 2 * golden.model.layers * golden.model.kv_heads * pages  # of both ranks
            assert got.report["dense_blocks"] + got.report["sparse_blocks"] == blocks
        assert sum(each.retractions for each in answers) > 0
        assert (sum(each.cached for each in answers) > 0) == (case == "cached")


def test_a_rank_that_counts_otherwise_ends_the_server(
    engines: Engines, golden: Golden, two_ranks: EngineOptions
) -> None:
    engine = engines.get(two_ranks)
    prompt = golden.prompt(two_ranks, [PRESETS["max"]], 300, max_new=NEW)
    with pytest.raises(EngineFailed, match=r"RanksDiffer: .*retractions \d+ / \d+"):
        engine.run(Ask(prompt, PRESETS["max"], NEW, rid=SKEWED))
