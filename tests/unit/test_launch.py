"""What SGLang is started with: our defaults for the device, and never against what was passed."""

from __future__ import annotations

import pytest

from hs_runtime.config import ConfigError
from hs_runtime.device import Device
from hs_runtime.launch import expanded_bytes, passed_value, plan_launch, reserve_bytes, token_bytes

GIB = 1 << 30
CPU = Device("cpu", "a CPU", total_bytes=64 * GIB, free_bytes=40 * GIB)
LLAMA_8B = {
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


def gpu(gib: float) -> Device:
    return Device("cuda", "a GPU", total_bytes=int(gib * GIB), capability=(9, 0))


def value(arguments: tuple[str, ...], flag: str) -> str | None:
    return passed_value(arguments, flag)


def test_a_gpu_prefills_in_32k_chunks_with_decode_graphs_only() -> None:
    plan = plan_launch(gpu(80), "m", LLAMA_8B)
    assert plan.chunk == 32768
    assert value(plan.arguments, "--chunked-prefill-size") == "32768"
    assert value(plan.arguments, "--max-prefill-tokens") == "32768"
    assert value(plan.arguments, "--attention-backend") == "hierasparse"
    assert value(plan.arguments, "--page-size") == "64"
    assert "--disable-prefill-cuda-graph" in plan.arguments
    assert "--disable-decode-cuda-graph" not in plan.arguments
    assert "--dtype" not in plan.arguments
    assert plan.kv_cache_bytes == 0


def test_a_cpu_computes_in_float32_without_graphs_and_with_a_bounded_cache() -> None:
    plan = plan_launch(CPU, "m", None)
    assert plan.chunk == 2048
    assert value(plan.arguments, "--device") == "cpu"
    assert value(plan.arguments, "--dtype") == "float32"
    assert "--disable-decode-cuda-graph" in plan.arguments
    assert "--mem-fraction-static" not in plan.arguments
    assert plan.kv_cache_bytes == 2 * GIB
    small = Device("cpu", "a small CPU", total_bytes=8 * GIB, free_bytes=4 * GIB)
    assert plan_launch(small, "m", None).kv_cache_bytes == GIB


@pytest.mark.parametrize("gib", [24, 48, 80, 141])
def test_the_memory_fraction_leaves_the_reserve_free(gib: int) -> None:
    fraction = float(
        value(plan_launch(gpu(gib), "m", LLAMA_8B).arguments, "--mem-fraction-static") or 0
    )
    reserve = reserve_bytes(LLAMA_8B, 32768, 1)
    assert 0.3 <= fraction < 1
    assert (1 - fraction) * gib * GIB == pytest.approx(reserve, abs=0.001 * gib * GIB)


def test_the_reserve_grows_with_the_chunk_and_shrinks_with_the_ranks() -> None:
    assert reserve_bytes(LLAMA_8B, 65536, 1) > reserve_bytes(LLAMA_8B, 32768, 1)
    assert token_bytes(LLAMA_8B, 2) < token_bytes(LLAMA_8B, 1)
    assert token_bytes({"hidden_size": "?"}, 1) == token_bytes(None, 1) > token_bytes(LLAMA_8B, 1)


def test_the_reserve_holds_the_pages_that_prefill_unpacks() -> None:
    """4,096 pages of 8 heads of 128 channels are 1 GiB; a longer request has its own size."""
    assert expanded_bytes(LLAMA_8B, 1, 131072) == expanded_bytes({}, 1, 0) == GIB
    assert expanded_bytes(LLAMA_8B, 2, 131072) == GIB // 2
    assert expanded_bytes(LLAMA_8B, 1, 1 << 20) == 4 * GIB
    more = reserve_bytes(LLAMA_8B, 32768, 1, 1 << 20) - reserve_bytes(LLAMA_8B, 32768, 1, 131072)
    assert more == 3 * GIB


def test_a_token_of_an_8b_model_is_counted_by_its_widths() -> None:
    stream = 3 * 4096 * 2
    mlp = 3 * 14336 * 2
    attention_and_pruning = 2 * (32 + 16) * 128 * 2 + 6 * 2 * 8 * 128 * 4
    assert token_bytes(LLAMA_8B, 1) == stream + max(mlp, attention_and_pruning)


def test_a_gpu_too_small_for_the_chunk_is_refused_with_the_dial() -> None:
    with pytest.raises(ConfigError, match="--chunked-prefill-size"):
        plan_launch(gpu(5), "m", LLAMA_8B)
    assert plan_launch(gpu(6), "m", LLAMA_8B, ["--chunked-prefill-size", "2048"]).chunk == 2048
    assert plan_launch(gpu(5), "m", LLAMA_8B, ["--mem-fraction-static", "0.5"]).chunk == 32768


@pytest.mark.parametrize(
    "passed",
    [["--chunked-prefill-size", "4096"], ["--chunked-prefill-size=4096"]],
    ids=["two words", "one word"],
)
def test_a_passed_flag_replaces_the_default(passed: list[str]) -> None:
    plan = plan_launch(CPU, "m", None, passed)
    assert plan.chunk == 4096
    assert sum(word.startswith("--chunked-prefill-size") for word in plan.arguments) == 1
    assert value(plan.arguments, "--chunked-prefill-size") == "4096"
    assert value(plan.arguments, "--max-prefill-tokens") == "4096"


def test_other_flags_pass_through_in_order() -> None:
    passed = ["--context-length", "4096", "--disable-radix-cache"]
    assert plan_launch(CPU, "m", None, passed).arguments[-3:] == tuple(passed)


@pytest.mark.parametrize(
    ("flag", "instead"),
    [("--host", "--host ADDRESS"), ("--api-key", "--api-key-file"), ("--config", "one by one")],
)
def test_a_flag_that_an_option_stands_for_is_refused(flag: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=instead):
        plan_launch(CPU, "m", None, [flag, "x"])


def test_a_chunk_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="whole number"):
        plan_launch(CPU, "m", None, ["--chunked-prefill-size", "big"])


def test_the_last_passed_value_counts() -> None:
    assert passed_value(["--a", "1", "--a=2"], "--a") == "2"
    assert passed_value(["--a", "--b"], "--a") == ""
    assert passed_value(["--ab", "1"], "--a") is None
