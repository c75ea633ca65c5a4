"""Which SGLang arguments a server is started with: our defaults, then whatever the user passed.

Pure: the device and the model's config are handed in. A flag that the user passed is never
overridden here; what cannot work is refused later, by the seam, which sees the parsed result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hs_runtime.config import BACKEND_NAME, ConfigError
from hs_runtime.device import Device

GPU_CHUNK: Final = 32768
CPU_CHUNK: Final = 2048
PAGE: Final = 64
EXPANDED_PAGES: Final = 4096  # of one layer that prefill unpacks at once, or those of one request

_GIB: Final = 1 << 30
_CPU_CACHE_BYTES: Final = 2 * _GIB  # 40 thousand dense float32 tokens of the demonstration model
CPU_MAX_REQUESTS: Final = 16
_UNKNOWN_MODEL_TOKEN_BYTES: Final = 256 << 10  # above that of a dense 70B model on two GPUs
_UNKNOWN_MODEL_EXPANDED_BYTES: Final = _GIB  # 4,096 pages of 8 kv heads of 128 channels
_LEAST_RESERVE_BYTES: Final = 4 * _GIB
_LEAST_FRACTION: Final = 0.3
_GRAPH_BYTES_PER_REQUEST: Final = 2 << 20  # SGLang's own estimate
_GRAPH_REQUESTS: Final = 256
_SLACK: Final = 1.5  # what the caching allocator may leave between two activations

# Flags that one of our options stands for; SGLang must not be told something else behind its back.
_OURS: Final = {
    "--model": "--model PATH",
    "--model-path": "--model PATH",
    "--served-model-name": "--served-model-name NAME",
    "--host": "--host ADDRESS",
    "--port": "--port NUMBER",
    "--device": "--device auto|cpu|cuda",
    "--api-key": "--api-key-file PATH (a key on a command line is visible to every user)",
    "--admin-api-key": "--api-key-file PATH (a key on a command line is visible to every user)",
    "--config": "the flags of that file, one by one",
}


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """`arguments` as SGLang's command line takes them; `kv_cache_bytes` 0 is SGLang's profile."""

    arguments: tuple[str, ...]
    chunk: int
    kv_cache_bytes: int


def passed_value(passed: Sequence[str], *names: str) -> str | None:
    """The value of the last `--name value` or `--name=value`; "" of a flag that has none."""
    found = None
    for index, word in enumerate(passed):
        name, equals, value = word.partition("=")
        if name not in names:
            continue
        if not equals:
            after = passed[index + 1] if index + 1 < len(passed) else ""
            value = "" if after.startswith("--") else after
        found = value
    return found


def plan_launch(
    device: Device,
    model_path: str,
    model_config: Mapping[str, Any] | None,
    passed: Sequence[str] = (),
    *,
    kv_cache_bytes: int = 0,
) -> LaunchPlan:
    """`model_config` is the model's config.json, None if it is not on this disk.

    Raises ConfigError for a passed flag that an option of ours stands for, and when the device is
    too small for the chunk.
    """
    for name, instead in _OURS.items():
        if passed_value(passed, name) is not None:
            raise ConfigError(f"{name} cannot be passed on to SGLang: use {instead}")
    on_gpu = device.kind == "cuda"
    chunk = _whole(passed, GPU_CHUNK if on_gpu else CPU_CHUNK, "--chunked-prefill-size")
    defaults: dict[str, str | None] = {
        "--attention-backend": BACKEND_NAME,
        "--page-size": str(PAGE),
        "--chunked-prefill-size": str(chunk),
        "--max-prefill-tokens": str(chunk),
        "--disable-prefill-cuda-graph": None,
        "--enable-metrics": None,
        "--enable-cache-report": None,
        "--log-level": "warning",
    }
    if on_gpu and passed_value(passed, "--mem-fraction-static") is None:
        ranks = _whole(passed, 1, "--tp-size", "--tp", "--tensor-parallel-size")
        context = _whole(passed, 0, "--context-length")
        reserve = reserve_bytes(model_config, chunk, ranks, context)
        defaults["--mem-fraction-static"] = f"{memory_fraction(device, reserve, chunk):.3f}"
    if not on_gpu:
        # float32 is what the reference operators compute in; SGLang would choose bfloat16.
        defaults["--dtype"] = "float32"
        defaults["--disable-decode-cuda-graph"] = None
        defaults["--max-running-requests"] = str(CPU_MAX_REQUESTS)
        if not kv_cache_bytes:
            available = device.free_bytes or device.total_bytes
            kv_cache_bytes = min(_CPU_CACHE_BYTES, available // 4)
    arguments = ["--model-path", model_path, "--device", device.kind]
    for name, value in defaults.items():
        if passed_value(passed, name) is None:
            arguments += [name] if value is None else [name, value]
    return LaunchPlan((*arguments, *passed), chunk, kv_cache_bytes)


def memory_fraction(device: Device, reserve: int, chunk: int) -> float:
    """Share of the device for weights and KV cache; the rest is for the forward pass.

    SGLang's own default reserves 1.5 MB a token of the chunk, 48 GiB for a chunk of 32,768.
    """
    fraction = 1 - reserve / device.total_bytes
    if fraction < _LEAST_FRACTION:
        raise ConfigError(
            f"--chunked-prefill-size {chunk} needs {reserve / _GIB:.1f} GiB for the forward pass "
            f"and the {device.name} has {device.total_bytes / _GIB:.1f} GiB: pass a smaller "
            "--chunked-prefill-size (a multiple of 128), or --mem-fraction-static"
        )
    return fraction


def reserve_bytes(
    model_config: Mapping[str, Any] | None, chunk: int, ranks: int, context: int = 0
) -> int:
    """Device memory of one rank to keep free for activations, sampling, CUDA graphs and unpacked
    pages. `context` is the longest request in tokens; 0 is the model's."""
    vocabulary = int((model_config or {}).get("vocab_size", 256 << 10))
    sampling = 3 * 4 * vocabulary * _GRAPH_REQUESTS  # float32 logits, probabilities, sorted
    graphs = _GRAPH_BYTES_PER_REQUEST * _GRAPH_REQUESTS
    activations = int(_SLACK * chunk * token_bytes(model_config, ranks))
    unpacked = expanded_bytes(model_config, ranks, context)
    return max(_LEAST_RESERVE_BYTES, activations + sampling + graphs + unpacked)


def expanded_bytes(model_config: Mapping[str, Any] | None, ranks: int, context: int) -> int:
    """The most that prefill unpacks at once on one rank: K and V of `EXPANDED_PAGES`, or of the
    longest request if that has more."""
    config = model_config or {}
    try:
        heads = int(config.get("num_key_value_heads") or config["num_attention_heads"])
        hidden, all_heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        head_dim = int(config.get("head_dim") or hidden // all_heads)
        context = context or int(config["max_position_embeddings"])
    except (KeyError, TypeError, ValueError):
        return _UNKNOWN_MODEL_EXPANDED_BYTES
    pages = max(EXPANDED_PAGES, -(-context // PAGE))
    return 2 * pages * PAGE * max(1, heads // ranks) * head_dim * 2


def token_bytes(model_config: Mapping[str, Any] | None, ranks: int) -> int:
    """Peak activation memory of one prefill token on one rank, from the widths of the layers."""
    config = model_config or {}
    try:
        hidden = int(config["hidden_size"])
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        inner = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    except (KeyError, TypeError, ValueError):
        return _UNKNOWN_MODEL_TOKEN_BYTES
    experts = int(config.get("num_experts_per_tok") or 1)
    width = 2  # bytes of an activation
    stream = 3 * hidden * width  # residual, its normed copy, the layer's output
    mlp = 3 * inner * experts * width // ranks + (hidden * experts * width if experts > 1 else 0)
    attention = 2 * (heads + 2 * kv_heads) * head_dim * width // ranks  # q k v, permuted q k, out
    pruning = 6 * 2 * kv_heads * head_dim * 4 // ranks  # K and V of the chunk in float32, ranked
    return stream + max(mlp, attention + pruning)


def _whole(passed: Sequence[str], default: int, *names: str) -> int:
    text = passed_value(passed, *names)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{names[0]}: {text!r} (a whole number)") from None
