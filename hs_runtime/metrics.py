"""Counters, gauges and histograms by name; no logic.

SGLang exports `sglang:*` from several processes through one directory (prometheus_client's
multi-process mode); ours join it under `hierasparse_*`, in base units. prometheus_client decides
on that mode when it is imported, so nothing here imports it before the first call of `metrics`.

Every label has a closed list of values: a number chosen by clients would be a series each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hs_runtime.policies import PRESETS

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

PRESET_LABELS = (*PRESETS, "custom")
OUTCOMES = ("ok", "refused", "unavailable", "failed", "disconnected")
PHASES = ("prefill", "decode", "transition")
KINDS = ("dense", "sparse")
BYTE_STATES = ("used", "evictable", "free")


@dataclass(frozen=True, slots=True)
class Metrics:
    """Label names stand in brackets; `OUTCOMES` and the other tuples above list their values."""

    requests: Counter  # [preset, outcome] requests that reached a generation route
    rejected: Counter  # [reason] policies refused, by the error's code
    first_token_seconds: Histogram  # [preset] request received to first event of a stream
    request_seconds: Histogram  # [preset] request received to its last byte
    in_flight: Gauge  # generation requests being served
    kv_bytes: Gauge  # [state] of the arenas of all layers, on this rank; they add up to the arenas
    kv_blocks: Gauge  # [kind] blocks of one layer, whose form policies choose, and kv head
    dense_equivalent_bytes: Gauge  # what those of all such layers and heads would take if all dense
    compressed_blocks: Counter  # [phase, kind] blocks given their form by a policy
    plan_seconds: Histogram  # [phase] time of the host in planning a batch and its compression
    evicted_bytes: Counter  # taken from the prefix tree
    compression_failures: Counter  # batches whose requests were answered 500 because of it
    retractions: Counter  # [preset] requests sent back to the queue for want of bytes


@functools.cache
def metrics() -> Metrics:
    """The metrics of this process, made at the first call."""
    from prometheus_client import Counter, Gauge, Histogram

    waits = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
    moments = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1)
    live = "mostrecent"  # one scheduler rank writes each gauge; dead processes do not add up
    return Metrics(
        requests=Counter(
            "hierasparse_requests", "Generation requests by outcome.", ["preset", "outcome"]
        ),
        rejected=Counter("hierasparse_policy_rejected", "Policies refused.", ["reason"]),
        first_token_seconds=Histogram(
            "hierasparse_first_token_seconds",
            "From request to first streamed event.",
            ["preset"],
            buckets=waits,
        ),
        request_seconds=Histogram(
            "hierasparse_request_seconds",
            "From request to last byte.",
            ["preset"],
            buckets=waits,
        ),
        in_flight=Gauge(
            "hierasparse_requests_in_flight",
            "Generation requests being served.",
            multiprocess_mode=live,
        ),
        kv_bytes=Gauge(
            "hierasparse_kv_bytes",
            "Bytes of the KV arena by state.",
            ["state"],
            multiprocess_mode=live,
        ),
        kv_blocks=Gauge(
            "hierasparse_kv_blocks",
            "KV blocks of requests and prefix cache, of a head and layer that is not kept dense.",
            ["kind"],
            multiprocess_mode=live,
        ),
        dense_equivalent_bytes=Gauge(
            "hierasparse_kv_dense_equivalent_bytes",
            "Bytes of the KV blocks of requests and prefix cache if all were dense.",
            multiprocess_mode=live,
        ),
        compressed_blocks=Counter(
            "hierasparse_blocks", "Blocks given their form by a policy.", ["phase", "kind"]
        ),
        plan_seconds=Histogram(
            "hierasparse_plan_seconds",
            "Host time in planning a batch and its compression.",
            ["phase"],
            buckets=moments,
        ),
        evicted_bytes=Counter("hierasparse_evicted_bytes", "Bytes evicted from the prefix tree."),
        compression_failures=Counter(
            "hierasparse_compression_failures", "Batches that failed in compression."
        ),
        retractions=Counter(
            "hierasparse_retractions", "Requests retracted for want of bytes.", ["preset"]
        ),
    )


def exposition(multiprocess: bool) -> tuple[bytes, str]:
    """The text of /metrics and its content type; `multiprocess` adds up all of SGLang's processes.

    Call only after SGLang has set up its metrics directory if `multiprocess` is true.
    """
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    metrics()
    registry = REGISTRY
    if multiprocess:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)
    return generate_latest(registry), CONTENT_TYPE_LATEST
