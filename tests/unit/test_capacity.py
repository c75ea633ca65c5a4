"""Capacity is the scheduler's own ledger asked in advance; fragmentation is bounded as stated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hs_kernels.block_format import BlockFormat
from hs_runtime.capacity import BOUNDS, KVShape, capacity, kv_bytes_of
from hs_runtime.cli import app
from hs_runtime.config import ConfigError
from hs_runtime.device import Device
from hs_runtime.policies import PRESETS, SparsityPolicy
from hs_runtime.policies.policy import ServerConstants
from hs_runtime.pool.block_pool import DENSE, SPARSE, Arena
from hs_runtime.scheduler.admission import (
    BlockSizes,
    decode_form,
    prefill_form,
    prefill_need,
    request_need,
    requests_at_once,
)
from hs_runtime.scheduler.lifecycle import Lifecycle

GIB = 1 << 30
CPU = Device("cpu", "a CPU", total_bytes=32 * GIB)
H200 = Device("cuda", "a GPU", total_bytes=140 * GIB, capability=(9, 0))
LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
RULES = Lifecycle()
FORMAT = BlockFormat(128, "bfloat16")
SIZES = BlockSizes(FORMAT.dense_bytes, FORMAT.sparse_bytes, FORMAT.superblock_bytes)


def test_a_shape_is_read_from_the_config_and_bounds_what_is_served() -> None:
    shape = KVShape.of(LLAMA_8B, H200)
    assert (shape.layers, shape.heads, shape.format) == (32, 8, FORMAT)
    assert KVShape.of(LLAMA_8B, CPU).format.dtype == "float32"
    assert KVShape.of(LLAMA_8B, H200, ranks=4).heads == 2
    with pytest.raises(ConfigError, match="head_dim 96"):
        KVShape.of({**LLAMA_8B, "head_dim": 96}, H200)
    with pytest.raises(ConfigError, match="does not tell"):
        KVShape.of({"hidden_size": 64}, H200)


@pytest.mark.parametrize("policy", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("n", [1 << 10, 8 << 10, 32 << 10])
def test_one_more_request_never_fits(policy: SparsityPolicy, n: int) -> None:
    """Counted again one by one, in slots: the last admitted fits, the next does not."""
    superblocks, new = 60_000, 256

    def fits(count: int) -> bool:
        held = decode_form(RULES, policy, n + new)
        need = prefill_need(RULES, policy, n, 0)
        growth = (
            max(0, held.dense - decode_form(RULES, policy, n).dense),
            max(0, held.sparse - decode_form(RULES, policy, n).sparse),
        )
        resident = decode_form(RULES, policy, n).plus(growth)
        dense = (count - 1) * resident.dense + need.dense + growth[0]
        sparse = (count - 1) * resident.sparse + need.sparse + growth[1]
        # The last one's slots turn sparse one by one, each new one beside the old.
        turning = decode_form(RULES, policy, n).sparse - prefill_form(RULES, policy, n).sparse
        states = [(dense, sparse), *((dense - k, sparse + k + 1) for k in range(turning))]
        return all(-(-d // 9) + -(-s // 16) <= superblocks for d, s in states)

    count = requests_at_once(RULES, SIZES, superblocks, policy, n, new)
    assert count > 1 and fits(count) and not fits(count + 1)


def test_what_never_fits_is_zero_and_more_sparsity_never_fits_less() -> None:
    found = capacity(KVShape.of(LLAMA_8B, H200), 40 * GIB, ServerConstants())
    for n, fits in found.requests.items():
        ordered = [fits[name] for name in ("dense", "light", "fast", "max")]
        assert ordered == sorted(ordered), f"{n}: {fits}"
        assert fits["max"] > (1.4 if n == 1024 else 1.6) * fits["dense"] > 0
    assert found.kv_bytes <= 40 * GIB < found.kv_bytes * 1.001
    assert found.dense_tokens == pytest.approx(40 * GIB / (128 << 10), rel=1e-3)
    small = capacity(KVShape.of(LLAMA_8B, H200), GIB, ServerConstants(), lengths=[128 << 10])
    assert set(small.requests[128 << 10].values()) == {0}
    for policy in PRESETS.values():
        need = request_need(RULES, SIZES, policy, 4096, 256)
        assert requests_at_once(RULES, SIZES, need, policy, 4096, 256) == 1
        assert requests_at_once(RULES, SIZES, need - 1, policy, 4096, 256) == 0


def test_what_keeps_the_next_request_out_is_said() -> None:
    """Of short prompts one less of `max` than of `fast` may fit, since the last one's prefill holds
    both forms of K, too. That is a request, never more."""
    shape, seen = KVShape.of(LLAMA_8B, H200), set()
    for dense_layers in ((), (7, 14, 20), tuple(range(8))):
        constants = ServerConstants(dense_layers=dense_layers)
        for gib in (2, 40, 90):
            found = capacity(shape, gib * GIB, constants, centered=True)
            for n, fits in found.requests.items():
                bounds = found.bounds[n]
                seen |= set(bounds.values())
                if fits["max"] < fits["fast"]:
                    assert (fits["fast"] - fits["max"], bounds["max"]) == (1, "prefill")
                assert dense_layers or "page ids" not in bounds.values()
                assert bounds["dense"] == "bytes", "a dense block has one form"
    assert seen == set(BOUNDS)


def test_bytes_are_those_that_serve_would_take(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"\0" * 1000)
    assert kv_bytes_of(CPU, str(tmp_path), LLAMA_8B) == 2 * GIB
    on_gpu = kv_bytes_of(H200, str(tmp_path), LLAMA_8B)
    assert 100 * GIB < on_gpu < 140 * GIB - 1000
    with pytest.raises(ConfigError, match="--kv-cache"):
        kv_bytes_of(H200, str(tmp_path / "none"), LLAMA_8B)


def test_the_command_prints_the_same_numbers_as_text_and_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    words = ["doctor", "--capacity", "--device", "cpu", "--model", str(tmp_path)]
    words += ["--kv-cache", "40GiB"]
    as_json = CliRunner().invoke(app, [*words, "--json"])
    as_text = CliRunner().invoke(app, words)
    assert as_json.exit_code == as_text.exit_code == 0, as_json.output + as_text.output
    told = json.loads(as_json.stdout)
    found = told["requests"]
    assert (told["dtype"], told["dense_layers"]) == ("float32", [])
    assert (
        found["8192"]
        == capacity(KVShape.of(LLAMA_8B, CPU), 40 * GIB, ServerConstants()).requests[8192]
    )
    rows = [line.split() for line in as_text.stdout.splitlines()]
    assert ["prompt", *PRESETS] in rows
    bounds = json.loads(as_json.stdout)["bounds"]["8192"]
    marks = {"bytes": "", "prefill": "'", "page ids": "*"}
    assert ["8K", *(f"{found['8192'][name]}{marks[bounds[name]]}" for name in PRESETS)] in rows
    wrong = CliRunner().invoke(app, ["doctor", "--capacity", "--model", str(tmp_path / "no")])
    assert wrong.exit_code == 2 and "is no folder" in wrong.output
    alone = CliRunner().invoke(app, ["doctor", "--dense-layers", "costliest:8"])
    assert alone.exit_code == 2 and "go with --capacity" in alone.output


# ---- fragmentation ------------------------------------------------------------------------------


@pytest.mark.parametrize("superblocks", [2, 5])
def test_stranded_bytes_reach_their_bound(superblocks: int) -> None:
    """All superblocks are taken while 8 dense and 15 sparse slots are free. Once a kind has filled
    its holes, its next slot is refused and the other kind's holes lie idle: that is the most.
    """
    dense, sparse = 9 * (superblocks - 2) + 1, 1
    free_kib = superblocks * 144 - 16 * dense - 9 * sparse
    assert free_kib == 2 * 144 - 16 - 9
    for kind, holes in ((DENSE, 8), (SPARSE, 15)):
        arena = Arena(superblocks, 9, 16, lambda *_: None)
        for _ in range(dense):
            arena.allocate(DENSE)
        for _ in range(sparse):
            arena.allocate(SPARSE)
        for _ in range(holes):
            arena.allocate(kind)
        used = arena.used
        assert not arena.fits(used[DENSE] + (kind == DENSE), used[SPARSE] + (kind == SPARSE))
        with pytest.raises(RuntimeError, match="out of KV bytes"):
            arena.allocate(kind)
