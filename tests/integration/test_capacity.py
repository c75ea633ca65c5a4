"""The scheduler admits exactly as many requests as the byte formula says, and `max` many more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hs_kernels.block_format import BlockFormat
from hs_runtime.policies import PRESETS, SparsityPolicy
from hs_runtime.pool.sizing import size_pool
from hs_runtime.scheduler.admission import BlockSizes, requests_at_once
from hs_runtime.scheduler.lifecycle import Lifecycle
from tests.support.checkpoints import tiny_llama
from tests.support.engines import Ask, Engine, EngineOptions, Engines, token_ids

pytestmark = pytest.mark.integration

NEW = 60  # tokens of an answer to a prompt of 64 m + 1 tokens: no page opens, so nothing grows


def expected(options: EngineOptions, policy: SparsityPolicy, n: int) -> int:
    fmt = BlockFormat(64, "float32")
    sizes = BlockSizes(fmt.dense_bytes, fmt.sparse_bytes, fmt.superblock_bytes)
    superblocks = size_pool(fmt, options.tokens, spare_pages=0).superblocks
    rules = Lifecycle(segment=options.segment, window=options.window)
    return requests_at_once(rules, sizes, superblocks, policy, n, NEW)


def decoding_together(
    engine: Engine, policy: SparsityPolicy, n: int, sent: int, name: str
) -> tuple[int, int]:
    """The most requests in one decode step when `sent` different prompts arrive at once, and how
    often one was retracted. All are answered in full."""
    engine.flush()
    asks = [Ask(token_ids(n, seed), policy, NEW, rid=f"{name}-{n}-{seed}") for seed in range(sent)]
    answers = engine.run_as_one(*asks)
    assert [len(answer.tokens) for answer in answers] == [NEW] * sent
    rids = {ask.rid for ask in asks}
    steps = [event["rows"] for event in engine.events("decode")]
    most = max(len(rows) for rows in steps if rows[0][0] in rids)
    return most, sum(answer.retractions for answer in answers)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tokens", [4096, 4928])  # 4,928: full of dense slots, none to turn
def test_as_many_requests_decode_at_once_as_the_formula_says(
    engines: Engines, small: EngineOptions, name: str, tokens: int
) -> None:
    options = replace(small, tokens=tokens)
    n, count = 9 * 64 + 1, expected(options, PRESETS[name], 9 * 64 + 1)
    assert 4 < count < 16  # below SGLang's own bound
    got = decoding_together(engines.get(options), PRESETS[name], n, count + 3, name)
    assert got == (count, 0)


def test_at_8k_tokens_max_admits_more_than_one_and_a_half_times_dense(
    engines: Engines, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Decided by the ledger: at least 1.6 times, exactly the formula, and nobody is retracted."""
    folder: Path = tmp_path_factory.mktemp("long")
    model = tiny_llama(folder, heads=2, kv_heads=1, context=16384)
    options = EngineOptions(model, segment=256, chunk=4096, tokens=5 * 8192 + 1024)
    n, engine, counts = 8192 - 63, engines.get(options), {}
    for name in ("dense", "max"):
        count = expected(options, PRESETS[name], n)
        got = decoding_together(engine, PRESETS[name], n, count + 1, name)
        assert got == (count, 0)
        counts[name] = count
    assert counts["max"] >= 1.6 * counts["dense"]
