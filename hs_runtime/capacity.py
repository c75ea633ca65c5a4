"""How many requests a KV cache holds at once: the byte ledger asked in advance, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hs_kernels.block_format import HEAD_DIMS, BlockFormat
from hs_runtime.config import ConfigError
from hs_runtime.device import Device
from hs_runtime.launch import GPU_CHUNK, memory_fraction, plan_launch, reserve_bytes
from hs_runtime.policies import PRESETS, SparsityPolicy
from hs_runtime.policies.policy import ServerConstants
from hs_runtime.pool.sizing import dense_tokens_of, size_pool
from hs_runtime.scheduler.admission import (
    BlockSizes,
    Slots,
    decode_form,
    requests_at_once,
    requests_by_page_ids,
)
from hs_runtime.scheduler.lifecycle import Lifecycle

LENGTHS: Final = (1 << 10, 8 << 10, 32 << 10, 128 << 10)
ANSWER_TOKENS: Final = 256
# What keeps one more request out, and what people are told of it. Both forms of K and of V are more
# than those of V alone, so that of short prompts `max` may fit one less than `fast`.
BOUNDS: Final = {
    "bytes": "",
    "prefill": "one more would fit once it decodes, but not while its prompt is prefilled: more of "
    "it is dense then, or in both forms for a moment",
    "page ids": "bytes are left, but no page ids, which dense layers make as dear",
}
_AMPLE: Final = 1 << 40  # spare page ids: more than are made, however many requests SGLang runs
_DTYPES: Final = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class KVShape:
    """What a token's KV needs on one rank."""

    format: BlockFormat
    layers: int
    heads: int

    @classmethod
    def of(cls, config: Mapping[str, Any], device: Device, ranks: int = 1) -> KVShape:
        """From a model's config.json. Raises ConfigError for a model that cannot be served."""
        try:
            heads = int(config["num_attention_heads"])
            kv_heads = int(config.get("num_key_value_heads") or heads)
            head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
            layers = int(config["num_hidden_layers"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                f"model: its config.json does not tell its KV heads ({error!r})"
            ) from (error)
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
        if device.kind == "cpu":
            dtype = "float32"
        if head_dim not in HEAD_DIMS or dtype not in _DTYPES:
            raise ConfigError(
                f"model: head_dim {head_dim} of {dtype} cannot be served (choose {HEAD_DIMS} and "
                f"{', '.join(_DTYPES)})"
            )
        return cls(BlockFormat(head_dim, dtype), layers, max(1, kv_heads // ranks))


@dataclass(frozen=True, slots=True)
class Capacity:
    """`requests[length][preset]`: prompts of that many tokens served at once, each with an answer
    of `answer_tokens`. `bounds`, alike, says what keeps the next one out (`BOUNDS`). `kv_bytes` is
    the arena of all layers on one rank."""

    kv_bytes: int
    dense_tokens: int
    answer_tokens: int
    requests: dict[int, dict[str, int]]
    bounds: dict[int, dict[str, str]]


def capacity(
    shape: KVShape,
    kv_bytes: int,
    constants: ServerConstants,
    lengths: Sequence[int] = LENGTHS,
    answer_tokens: int = ANSWER_TOKENS,
    *,
    centered: bool = False,
) -> Capacity:
    """What the scheduler would admit to an empty cache of `kv_bytes`, by its own functions.

    `centered`: the pruner keeps means beside sparse blocks, which take their share. Raises
    ConfigError when the model has not the layers that `constants` keep dense.
    """
    fmt, rules, dense = shape.format, Lifecycle.of(constants), constants.dense_layers
    try:
        mixed = len(constants.mixed_layers(shape.layers))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    tokens = dense_tokens_of(
        fmt,
        kv_bytes,
        layers=shape.layers,
        heads=shape.heads,
        centered=centered,
        dense_layers=len(dense),
        spare_pages=_AMPLE,
    )
    size = size_pool(fmt, tokens, spare_pages=_AMPLE, dense_layers=dense)
    superblocks = size.superblocks
    sizes = BlockSizes(fmt.dense_bytes, fmt.sparse_bytes, fmt.superblock_bytes)

    def fits(policy: SparsityPolicy, n: int) -> tuple[int, str]:
        count = requests_at_once(rules, sizes, superblocks, policy, n, answer_tokens)
        if dense:
            by_page_ids = requests_by_page_ids(rules, size.pages, policy, n, answer_tokens)
            if by_page_ids < count:
                return by_page_ids, "page ids"
        decoding = decode_form(rules, policy, n + answer_tokens)
        more = Slots(*((count + 1) * slots for slots in decoding))
        return count, "prefill" if sizes.superblocks(more) <= superblocks else "bytes"

    found = {n: {name: fits(policy, n) for name, policy in PRESETS.items()} for n in lengths}
    requests = {n: {name: count for name, (count, _) in row.items()} for n, row in found.items()}
    bounds = {n: {name: bound for name, (_, bound) in row.items()} for n, row in found.items()}
    superblock = fmt.superblock_bytes
    if centered:
        superblock += fmt.sparse_per_superblock * fmt.mean_bytes
    arena = superblocks * superblock * mixed * shape.heads
    arena += size.pages * 2 * fmt.dense_bytes * len(dense) * shape.heads
    return Capacity(arena, tokens, answer_tokens, requests, bounds)


def kv_bytes_of(device: Device, model_path: str, config: Mapping[str, Any]) -> int:
    """What `serve` would give the KV cache: a GPU's share for weights and cache without the
    weights on disk, or the bound for a CPU."""
    if device.kind == "cpu":
        return plan_launch(device, model_path, config).kv_cache_bytes
    weights = sum(file.stat().st_size for file in Path(model_path).glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"model: {model_path} has no *.safetensors (give --kv-cache SIZE)")
    share = memory_fraction(device, reserve_bytes(config, GPU_CHUNK, 1), GPU_CHUNK)
    left = int(device.total_bytes * share) - weights
    if left <= 0:
        raise ConfigError(f"model: its weights leave no room for a KV cache on the {device.name}")
    return left
