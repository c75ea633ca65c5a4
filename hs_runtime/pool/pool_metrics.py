"""The pool's state as Prometheus sees it, set by the scheduler whenever a batch is planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from hs_runtime.metrics import metrics
from hs_runtime.pool.block_pool import DENSE, SPARSE, BlockPool

_KIND_LABELS = ((DENSE, "dense"), (SPARSE, "sparse"))


class PlainBytes(Protocol):
    """What the layers that stay dense take."""

    def plain_bytes(self) -> tuple[int, int, int]:
        """Bytes in use, of these evictable, and of all page ids."""


class PoolMetrics:
    """Gauges and counters of one rank's `BlockPool`, and in bytes also of its layers that stay
    dense. Reads counts only, never the device."""

    def __init__(self, pool: BlockPool, plain: PlainBytes | None = None) -> None:
        self.pool, self.plain = pool, plain
        self._formed: dict[tuple[str, str], int] = {}
        names = metrics()
        self._bytes = {state: names.kv_bytes.labels(state) for state in ("used", "evictable")}
        self._free = names.kv_bytes.labels("free")
        self._blocks = [(kind, names.kv_blocks.labels(label)) for kind, label in _KIND_LABELS]
        self._dense_equivalent = names.dense_equivalent_bytes
        self.publish({})

    def publish(self, formed: Mapping[tuple[str, str], int]) -> None:
        """Gauges from the pool; `formed` counts (phase, kind) -> blocks since the start."""
        pool = self.pool
        of_plain = self.plain.plain_bytes() if self.plain is not None else (0, 0, 0)
        used, evictable = pool.used_bytes + of_plain[0], pool.evictable_bytes + of_plain[1]
        self._bytes["used"].set(used - evictable)
        self._bytes["evictable"].set(evictable)
        self._free.set(pool.total_bytes + of_plain[2] - used)
        for kind, gauge in self._blocks:
            gauge.set(pool.ledger.used[kind])
        slots = sum(pool.ledger.used.values())
        self._dense_equivalent.set(slots * pool.slot_bytes[DENSE] + of_plain[0])
        for key, count in formed.items():
            if more := count - self._formed.get(key, 0):
                metrics().compressed_blocks.labels(*key).inc(more)
                self._formed[key] = count

    def planned(self, phase: str, seconds: float) -> None:
        metrics().plan_seconds.labels(phase).observe(seconds)

    def evicted(self, returned: int) -> None:
        """Bytes that an eviction gave back."""
        metrics().evicted_bytes.inc(returned)

    def compression_failed(self) -> None:
        metrics().compression_failures.inc()

    def retracted(self, preset: str) -> None:
        metrics().retractions.labels(preset).inc()
