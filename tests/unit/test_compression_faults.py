"""What may fail in compression and be survived, and what must not be."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hs_kernels.block_format import BlockFormat
from hs_runtime import sglang_seam
from hs_runtime.compression import Compressor
from hs_runtime.compression.compressor import PageGroup, PageSource, every
from hs_runtime.config import ConfigError, RuntimeConfig
from hs_runtime.policies.pruner import MagnitudePruner, PrunedBlocks
from hs_runtime.pool.block_pool import (
    DENSE,
    SPARSE,
    Bind,
    BlockPool,
    CompressionError,
    Convert,
    Move,
)
from hs_runtime.sglang_seam import FailedBatch, _injected_fault, _process_batch_result, _run_batch

FORMAT = BlockFormat(64, "float32")


def pool() -> BlockPool:
    return BlockPool(FORMAT, layers=2, heads=1, superblocks=3, pages=8)


class Failing:
    """A pruner that raises."""

    name, needs_calibration = "failing", False

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def prune(self, *args: Any, **kwargs: Any) -> PrunedBlocks:
        raise self.error


GROUP = PageGroup(0, (1,), (PageSource(0, 0),), (-1,), 1)
CONVERSION = Convert(0, (1,), (1,), (-1,))


@pytest.mark.parametrize("call", ["apply", "convert"])
@pytest.mark.parametrize(
    "error", [ValueError("no"), IndexError("no"), torch.OutOfMemoryError("no")]
)
def test_what_a_pruner_raises_can_be_survived(call: str, error: Exception) -> None:
    compressor = Compressor(pool(), Failing(error))
    rows = torch.zeros(64, 1, 64)
    with pytest.raises(CompressionError, match=f"{type(error).__name__}: no"):
        if call == "apply":
            compressor.begin([GROUP])
            compressor.apply(0, rows, rows)
        else:
            compressor.convert([CONVERSION])


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), SystemError(), KeyboardInterrupt()])
def test_what_the_device_raises_is_not_taken_for_less(error: BaseException) -> None:
    compressor = Compressor(pool(), Failing(error))
    with pytest.raises(type(error)):
        compressor.convert([CONVERSION])


def test_a_failed_conversion_keeps_the_operations_that_are_not_the_batchs() -> None:
    """Slots of others move and pages of others are bound, before and after it."""
    storage = pool()
    storage.refs[:, 1, 5] = 1
    order: list[str] = []

    def convert(run: Sequence[Convert]) -> None:
        order.append("convert")
        raise CompressionError("broken")

    operations = [Bind(0, 3, 7), CONVERSION, Move(DENSE, 1, 2), CONVERSION, Bind(1, 4, -6)]
    with pytest.raises(CompressionError, match="broken"):
        storage.apply(operations, convert)
    assert order == ["convert", "convert"]
    for (side, page), ref in {(0, 3): 7, (1, 5): 2, (1, 4): -6}.items():
        assert (storage.refs[:, side, page] == ref).all()


def test_a_fault_strikes_periodically_and_only_where_something_is_compressed() -> None:
    strike = every(3, ValueError("struck"))
    seen = []
    for _ in range(7):
        try:
            strike()
            seen.append(False)
        except ValueError:
            seen.append(True)
    assert seen == [False, False, True, False, False, True, False]
    storage, rows = pool(), torch.zeros(64, 1, 64)
    compressor = Compressor(storage, MagnitudePruner(), fault=every(1, ValueError("struck")))
    compressor.begin([])
    for layer in range(2):
        compressor.apply(layer, rows, rows)  # nothing to compress, nothing to fail
    storage.bind(0, [1], [storage.allocate(SPARSE)])
    compressor.begin([GROUP])
    compressor.apply(0, rows, rows)
    with pytest.raises(CompressionError, match="struck"):
        compressor.apply(1, rows, rows)


def test_faults_are_named_in_the_configuration() -> None:
    assert _injected_fault("") is None
    for text, error in (("compression:1", ValueError), ("device:1", RuntimeError)):
        strike = _injected_fault(RuntimeConfig(injected_fault=text).injected_fault)
        assert strike is not None
        with pytest.raises(error, match=text):
            strike()
    for text in ("compression", "compression:0", "compression:-1", "memory:2", "device:x"):
        with pytest.raises(ConfigError, match="injected_fault"):
            RuntimeConfig(injected_fault=text)


def test_a_failed_batch_ends_the_process_if_ranks_must_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_seam, "_ours", lambda batch: True)

    def fails(*_: Any) -> None:
        raise CompressionError("broken")

    withdrawn: list[bool] = []
    tree = SimpleNamespace(withdraw_batch=lambda: withdrawn.append(True))
    batch = SimpleNamespace(tree_cache=tree, reqs=[])
    with pytest.raises(CompressionError):
        _run_batch(fails, SimpleNamespace(ps=SimpleNamespace(tp_size=2)), batch)
    assert not withdrawn
    result = _run_batch(fails, SimpleNamespace(ps=SimpleNamespace(tp_size=1)), batch)
    assert isinstance(result, FailedBatch) and withdrawn


def test_results_of_failed_batches_are_not_processed() -> None:
    calls = []
    for result in (FailedBatch(), "a result"):
        _process_batch_result(lambda *args: calls.append(args[-1]), None, None, result)
    assert calls == ["a result"]
