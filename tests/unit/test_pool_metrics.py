"""What /metrics says of the pool is what the pool counts, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY

from hs_kernels.block_format import BlockFormat
from hs_runtime.pool.block_pool import DENSE, SPARSE, BlockPool
from hs_runtime.pool.pool_metrics import PoolMetrics
from hs_runtime.sglang_seam import _token_info

FORMAT = BlockFormat(64, "float32")
LAYERS, HEADS = 2, 2


@pytest.fixture
def pool() -> BlockPool:
    """Two dense and one sparse slot in use; the sparse one and a dense one could be evicted."""
    pool = BlockPool(FORMAT, layers=LAYERS, heads=HEADS, superblocks=4, pages=16)
    pool.bind_dense(0, 1, pool.allocate(DENSE))
    pool.bind_dense(0, 2, pool.allocate(DENSE))
    pool.bind(1, [2], [pool.allocate(SPARSE)])
    pool.bind(1, [1], [])
    pool.set_idle([2], True)
    return pool


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(f"hierasparse_{name}", labels) or 0.0


def rise(change: Callable[[], None], name: str, **labels: str) -> float:
    before = sample(name, **labels)
    change()
    return sample(name, **labels) - before


def test_bytes_of_the_three_states_add_up_to_the_arena(pool: BlockPool) -> None:
    PoolMetrics(pool)
    dense, sparse = (LAYERS * HEADS * each for each in (FORMAT.dense_bytes, FORMAT.sparse_bytes))
    assert sample("kv_bytes", state="used") == dense
    assert sample("kv_bytes", state="evictable") == dense + sparse
    states = ("used", "evictable", "free")
    assert sum(sample("kv_bytes", state=state) for state in states) == pool.total_bytes
    assert (sample("kv_blocks", kind="dense"), sample("kv_blocks", kind="sparse")) == (2, 1)
    assert sample("kv_dense_equivalent_bytes") == 3 * dense


def test_counters_follow_the_storage_and_never_count_twice(pool: BlockPool) -> None:
    metrics, formed = PoolMetrics(pool), {("prefill", "sparse"): 12, ("prefill", "dense"): 0}
    labels = {"phase": "prefill", "kind": "sparse"}
    assert rise(lambda: metrics.publish(formed), "blocks_total", **labels) == 12
    assert rise(lambda: metrics.publish(formed), "blocks_total", **labels) == 0
    formed["prefill", "sparse"] += 3
    assert rise(lambda: metrics.publish(formed), "blocks_total", **labels) == 3
    assert rise(lambda: metrics.evicted(640), "evicted_bytes_total") == 640
    assert rise(lambda: metrics.retracted("max"), "retractions_total", preset="max") == 1
    assert rise(lambda: metrics.planned("decode", 2e-3), "plan_seconds_sum", phase="decode") == (
        pytest.approx(2e-3)
    )


def test_usage_is_a_share_of_bytes_and_the_page_ledger_stays(pool: BlockPool) -> None:
    observer = SimpleNamespace(tree_cache=SimpleNamespace(block_pool=pool))
    stats = SimpleNamespace(full_num_used=128, full_token_usage=0.9, full_available_size=896)
    seen = _token_info(stats, observer)
    used = LAYERS * HEADS * FORMAT.dense_bytes
    assert seen.full_token_usage == pytest.approx(used / pool.total_bytes)
    assert (seen.full_num_used, seen.full_available_size) == (128, 896)
    stock = SimpleNamespace(tree_cache=SimpleNamespace())
    assert _token_info(SimpleNamespace(full_token_usage=0.5), stock).full_token_usage == 0.5
