"""Random histories: some requests over shared prefixes, in few bytes, under any scheduling."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hs_kernels.block_format import BlockFormat
from hs_runtime.scheduler import admission
from hs_runtime.scheduler.admission import BlockSizes
from hs_runtime.scheduler.lifecycle import Lifecycle
from tests.support.contents import STOP, Hashes, rules_say, some_policy, some_tokens
from tests.support.tiny_engine import Engine, Request

F16 = BlockFormat(64, "float16")
SIZES = BlockSizes(F16.dense_bytes, F16.sparse_bytes, F16.superblock_bytes)

# Pages of 4 tokens, and tiles of two pages as in production.
SMALL = Lifecycle(page=4, sink=4, window=8, segment=16)
SMALL_TILE = 8
CHUNKS = [4, 8, 12, 16, 20, 36, 64, 200]


@dataclass(frozen=True)
class History:
    """What is served, and how: `chunks` are budgets of prefill tokens a step; prefill comes before
    decode with the probability `eagerness`."""

    rules: Lifecycle
    requests: list[Any]
    chunks: list[int]
    eagerness: float
    superblocks: int
    pages: int
    cached: bool
    options: dict[str, Any]


def need_of(rules: Lifecycle, sizes: BlockSizes, r: Request) -> int:
    return admission.request_need(rules, sizes, r.policy, r.n, r.max_new)


def small_history(
    seed: int, rng: random.Random, request: Callable[..., Request] = Request
) -> History:
    """Every fourth history is crowded: long prompts that are prefilled in small pieces while others
    decode, in few bytes. Every fifth follows the paper's rule."""
    crowded, by_chunk = seed % 4 == 0, seed % 5 == 0
    rules = Lifecycle(
        4, rng.choice([4, 4, 0, 8, 16]), rng.choice([8, 8, 4, 12, 20]), rng.choice([16, 16, 8, 24])
    )
    chunks = CHUNKS[:1] if crowded else CHUNKS
    if by_chunk:
        rules = replace(rules, segment=rng.choice([24, 32, 48]), chunk_anchor=True)
        chunks = [rules.segment, rules.segment + 8, 2 * rules.segment]
    count = rng.choice([1, 2, 3])
    policies = [some_policy(rng, fractions=not by_chunk) for _ in range(count)]
    base, requests = some_tokens(rng, 120), []
    for rid in range(rng.randint(2, 7)):
        n = rng.randint(30 if crowded else 1, 90)
        shared = rng.randint(0, n) if rng.random() < 0.7 else n
        prompt = base[:shared] + some_tokens(rng, n - shared)
        requests.append(request(rid, prompt, rng.choice(policies), rng.randint(1, 20)))
    spare = [0, 1, 2] if crowded else [0, 0, 1, 2, 4, 20]
    options = {
        "overlap": rng.random() < 0.5,
        "growth": 0.0 if crowded else rng.choice([0.0, 0.5, 1.0]),
    }
    return History(
        rules,
        requests,
        chunks,
        eagerness=0.3 if crowded else 0.7,
        superblocks=max(need_of(rules, SIZES, r) for r in requests) + rng.choice(spare),
        pages=rng.choice([60, 80, 200, 1000]),
        cached=rng.random() < 0.9,
        options=options,
    )


def run_history(e: Engine, history: History, rng: random.Random) -> None:
    """Requests arrive, are aborted and are retracted at random; everything is checked each step."""
    pending = list(history.requests)
    for _ in range(5000):
        if not pending and not e.busy:
            e.check_empty()
            return
        if pending and rng.random() < 0.4:
            assert e.submit(pending.pop(0))
        if rng.random() < 0.03 and e.busy:
            e.finish(rng.choice([s.owner for s in e.running] + e.waiting), "aborted")
        decoding = [s.owner for s in e.running if s.decoding]
        if rng.random() < 0.03 and decoding:
            e.retract(rng.choice(decoding))
        e.step(rng.choice(history.chunks), rng.random() < history.eagerness)
        e.check()
    raise AssertionError("livelock")


def check_answers(requests: Sequence[Request], say: Callable[[Request], list[int]]) -> None:
    for r in requests:
        want = say(r)
        assert r.outputs == want[: len(r.outputs)], f"request {r.rid} ({r.policy}) differs"
        assert r.status == "aborted" or len(r.outputs) == len(want)


def small_answer(rules: Lifecycle, stop: int = STOP) -> Callable[[Request], list[int]]:
    return lambda r: rules_say(rules, Hashes(), r.prompt, r.policy, r.max_new, stop)
