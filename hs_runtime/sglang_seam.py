"""Where the runtime meets SGLang 0.5.17: registries, hooks, refusals, and the check that they took.

Everything that SGLang would swallow (a plugin that fails to import, a hook whose target is gone) is
turned into a start-up error here: a server that silently keeps dense KV would look healthy.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from hs_runtime.config import BACKEND_NAME, RuntimeConfig, is_published

logger = logging.getLogger(__name__)

SGLANG_VERSION = "0.5.17"


@dataclass(frozen=True, slots=True)
class Refusal:
    """An option that cannot be served: a ServerArgs field, when it is refused, what is legal."""

    option: str
    refused: Callable[[Any], bool]
    reason: str
    legal: str


def _is_set(value: Any) -> bool:
    return bool(value)


def _above_one(value: Any) -> bool:
    return value is not None and value > 1


def _off(option: str, reason: str) -> Refusal:
    return Refusal(option, _is_set, reason, "leave it off")


_BY_SLOT = "it addresses KV rows by token slot, and ours are virtual"
_UNTESTED = "it is not tested with compressed blocks"

REFUSALS: tuple[Refusal, ...] = (
    Refusal("page_size", lambda v: v != 64, "a KV block holds 64 tokens", "--page-size 64"),
    Refusal(
        "chunked_prefill_size",
        lambda v: v is None or v < 128 or v % 128,
        "prefill compresses as it goes, in chunks",
        "a multiple of 128",
    ),
    Refusal(
        "kv_cache_dtype",
        lambda v: v not in ("auto", "bf16", "bfloat16", "fp16", "float16"),
        "blocks hold 16-bit or 32-bit elements",
        "auto, bfloat16 or float16",
    ),
    Refusal(
        "radix_cache_backend",
        lambda v: v != BACKEND_NAME,
        "the prefix cache must know segments",
        BACKEND_NAME,
    ),
    Refusal(
        "prefill_attention_backend",
        lambda v: v not in (None, BACKEND_NAME),
        "prefill and decode read the same blocks",
        BACKEND_NAME,
    ),
    Refusal(
        "decode_attention_backend",
        lambda v: v not in (None, BACKEND_NAME),
        "prefill and decode read the same blocks",
        BACKEND_NAME,
    ),
    Refusal(
        "disaggregation_mode",
        lambda v: v not in (None, "null"),
        _BY_SLOT,
        "--disaggregation-mode null",
    ),
    Refusal(
        "schedule_policy",
        lambda v: v not in ("fcfs", "lpm", "lof", "random", "dfs-weight"),
        _UNTESTED,
        "fcfs, lpm, lof, random or dfs-weight",
    ),
    Refusal("speculative_algorithm", lambda v: v is not None, _BY_SLOT, "no speculative decoding"),
    _off("enable_hierarchical_cache", _BY_SLOT),
    _off("enable_hisparse", _BY_SLOT),
    _off("enable_lmcache", _BY_SLOT),
    _off("enable_flexkv", _BY_SLOT),
    _off("enable_lora", _UNTESTED),
    _off("lora_paths", _UNTESTED),
    _off("enable_pdmux", _UNTESTED),
    _off("enable_two_batch_overlap", _UNTESTED),
    _off("enable_single_batch_overlap", _UNTESTED),
    _off("enable_mixed_chunk", "a batch is either prefill or decode"),
    _off("enable_dynamic_chunking", "chunk ends decide what is stored"),
    _off("enable_streaming_session", _BY_SLOT),
    _off("enable_session_radix_cache", _BY_SLOT),
    _off("enable_unified_memory", _BY_SLOT),
    _off("enable_memory_saver", _BY_SLOT),
    _off("enable_priority_scheduling", "preemption counts tokens, admission counts bytes"),
    _off("enable_deterministic_inference", "its chunk alignment is relative"),
    _off("strip_thinking_cache", _BY_SLOT),
    _off("prefill_only_disable_kv_cache", "there would be no KV cache to compress"),
    _off("enable_dp_attention", _UNTESTED),
    _off("use_ray", "workers would not load the plugin"),
    _off("kv_events_config", "events name pages that change owner"),
    Refusal(
        "kv_canary", lambda v: v not in (None, False, "", "none", "off"), _BY_SLOT, "leave it off"
    ),
    *(
        Refusal(option, _above_one, _UNTESTED, "1")
        for option in ("dp_size", "pp_size", "dcp_size", "attn_cp_size")
    ),
    Refusal(
        "tokenizer_worker_num",
        _above_one,
        "further tokenizer workers do not load the plugin",
        "1",
    ),
)


class StartupRefused(ValueError):
    """This combination of options, model or hooks cannot be served."""


def refusals_of(server_args: Any) -> list[str]:
    """One sentence for each option that cannot be served; it names the legal alternative."""
    found = []
    for refusal in REFUSALS:
        value = getattr(server_args, refusal.option, None)
        if refusal.refused(value):
            flag = "--" + refusal.option.replace("_", "-")
            found.append(f"{flag} {value!r} cannot be served: {refusal.reason} ({refusal.legal})")
    return found


def environment_refusals() -> list[str]:
    """Switches of SGLang's environment that cannot be served."""
    from sglang.srt.environ import envs

    switches = (
        "SGLANG_EXPERIMENTAL_CPP_RADIX_TREE",
        "SGLANG_ENABLE_UNIFIED_RADIX_TREE",
        "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING",
        "SGLANG_RUST_SERVER",
    )
    return [
        f"{name} cannot be served: it replaces parts that the plugin needs (unset it)"
        for name in switches
        if hasattr(envs, name) and getattr(envs, name).get()
    ]


def model_refusals(model_config: Any) -> list[str]:
    """What a model needs that blocks cannot give; each with what is served."""
    found = []
    hf = getattr(model_config, "hf_text_config", None) or model_config.hf_config
    kind = getattr(model_config, "attention_arch", None)
    if kind is not None and kind.name != "MHA":
        found.append(f"attention {kind.name} cannot be served (choose an MHA or GQA model)")
    if getattr(model_config, "is_hybrid_swa", False):
        found.append("sliding-window layers cannot be served (choose a model without them)")
    if getattr(model_config, "is_encoder_decoder", False):
        found.append("encoder-decoder models cannot be served (choose a decoder-only model)")
    if getattr(hf, "attn_logit_softcapping", None):
        found.append("capped attention logits cannot be served (choose a model without them)")
    v_head_dim = getattr(model_config, "v_head_dim", model_config.head_dim)
    if v_head_dim not in (None, model_config.head_dim):
        found.append(f"head_dim {model_config.head_dim} for K and {v_head_dim} for V must be equal")
    return found


# ---- hooks --------------------------------------------------------------------------------------


def _ours(batch: Any) -> bool:
    from hs_runtime.pool.radix_cache import HieraRadixCache

    return isinstance(batch.tree_cache, HieraRadixCache)


def _build_pool(orig: Callable[..., Any], self: Any, **kw: Any) -> Any:
    from hs_runtime.pool.kv_pool import HieraKVPool

    if problems := model_refusals(self.model_config):
        raise StartupRefused("; ".join(problems))
    kw["mha_pool_class"] = HieraKVPool
    return orig(self, **kw)


def _build_allocator(orig: Callable[..., Any], self: Any, **kw: Any) -> Any:
    from sglang.srt.runtime_context import get_schedule

    from hs_runtime.pool.allocator import HieraAllocator

    if kw.get("token_to_kv_pool_allocator") is not None:
        return orig(self, **kw)
    return HieraAllocator(
        kw["sizes"].max_total_num_tokens,
        page_size=get_schedule().page_size,
        dtype=self.kv_cache_dtype,
        device=self.device,
        kvcache=kw["token_to_kv_pool"],
        need_sort=False,
    )


def _resolve_memory(orig: Callable[..., Any], self: Any, *args: Any) -> Any:
    """SGLang's profile says how many dense tokens fit; the arena gets those bytes, and page ids are
    made for what they hold when all is sparse. Layers that stay dense take their bytes by page
    id."""
    from sglang.srt.runtime_context import get_parallel

    from hs_runtime.policies.pruner import build_pruner
    from hs_runtime.pool.kv_pool import HieraKVPool, block_format
    from hs_runtime.pool.sizing import dense_tokens_of, size_pool

    config = orig(self, *args)
    runtime = RuntimeConfig.from_env()
    constants = runtime.constants
    pruner = build_pruner(constants.pruner)
    dtype = self.kv_cache_dtype
    fmt = block_format(self.model_config.head_dim, dtype, packed=pruner.is_stored)
    heads = self.model_config.get_num_kv_heads(get_parallel().attn_tp_size)
    layers = self.layer_info.num_effective_layers
    try:
        constants.mixed_layers(layers)
    except ValueError as error:
        raise StartupRefused(str(error)) from error
    dense = constants.dense_layers
    size_bytes = config.max_total_num_tokens // 64 * 2 * fmt.dense_bytes * heads * layers
    if runtime.kv_cache_bytes:
        size_bytes = min(size_bytes, runtime.kv_cache_bytes)
    centered = pruner.centers_values
    spare = (constants.window + 2 * constants.segment) // 64 * config.max_running_requests
    tokens = dense_tokens_of(
        fmt,
        size_bytes,
        layers=layers,
        heads=heads,
        centered=centered,
        dense_layers=len(dense),
        spare_pages=spare,
    )
    size = size_pool(fmt, tokens, spare_pages=spare, centered=centered, dense_layers=dense)
    HieraKVPool.next_size = size
    config.max_total_num_tokens = size.pages * 64
    return config


def _init_req(orig: Callable[..., Any], self: Any, *args: Any, **kw: Any) -> None:
    from hs_runtime.scheduler.request_slots import attach_policy

    orig(self, *args, **kw)
    config = RuntimeConfig.from_env()
    attach_policy(self, config.default_policy, config.constants)


def _prepare_for_extend(orig: Callable[..., Any], self: Any) -> Any:
    result = orig(self)
    if _ours(self):
        self.tree_cache.plan_extend(self)
    return result


def _prepare_for_decode(orig: Callable[..., Any], self: Any) -> Any:
    if not _ours(self):
        return orig(self)
    self.tree_cache.convert_due(self)
    result = orig(self)
    self.tree_cache.plan_decode(self)
    return result


def _check_decode_mem(orig: Callable[..., Any], self: Any, selected_indices: Any = None) -> bool:
    if not _ours(self):
        return bool(orig(self, selected_indices))
    chosen = range(len(self.reqs)) if selected_indices is None else selected_indices
    return bool(self.tree_cache.step_fits([self.reqs[i] for i in chosen]))


def _retract_decode(orig: Callable[..., Any], self: Any, server_args: Any) -> Any:
    if not _ours(self):
        return orig(self, server_args)
    return self.tree_cache.retract_decode(self, server_args)


def _get_new_batch_prefill(orig: Callable[..., Any], self: Any, running_batch: Any) -> Any:
    storage = getattr(self.tree_cache, "storage", None)
    if storage is not None and storage.has_more_room():
        running_batch.batch_is_full = False  # SGLang asks again only when a request has ended
    plan = orig(self, running_batch)
    retracted = getattr(self.tree_cache, "retracted_replays", None)
    while retracted:
        self._add_request_to_queue(retracted.pop(), is_retracted=True)
    return plan


def _init_max_new(orig: Callable[..., Any], self: Any, req: Any) -> Any:
    result = orig(self, req)
    limit = getattr(self.tree_cache, "limit_new_tokens", None)
    if limit is not None:
        limit(req)
    return result


def _validate_length(orig: Callable[..., Any], req: Any, *args: Any, **kw: Any) -> str | None:
    error: str | None = getattr(req, "hs_error", None) or orig(req, *args, **kw)
    return error


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """Stands for the result of a batch whose requests have been answered already."""

    delay_sample_func: None = None  # SGLang's loop looks at it


def _run_batch(orig: Callable[..., Any], self: Any, batch: Any, *args: Any, **kw: Any) -> Any:
    """A failed compression costs the requests of its batch and not the server, unless there are
    several ranks, which must agree on what runs."""
    from hs_runtime.pool.block_pool import CompressionError

    try:
        return orig(self, batch, *args, **kw)
    except CompressionError as error:
        if not _ours(batch) or self.ps.tp_size > 1:
            raise
        logger.exception("compression failed: %d requests are answered 500", len(batch.reqs))
        for req in batch.reqs:
            _fail_request(self, req, f"compression failed ({error})")
        batch.tree_cache.withdraw_batch()
        return FailedBatch()


def _fail_request(scheduler: Any, req: Any, message: str) -> None:
    """Ends a request of a batch that did not run: 500 to its client, its pages return."""
    from sglang.srt.managers.io_struct import AbortReq
    from sglang.srt.managers.schedule_batch import FINISH_ABORT
    from sglang.srt.mem_cache.common import release_kv_cache

    if req.finished():
        return
    req.finished_reason = FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "internal_error")
    req.finished_output = True  # it is sent here, not with the results of a batch before this one
    release_kv_cache(req, scheduler.tree_cache, is_insert=False)
    if scheduler.chunked_req is req:
        scheduler.chunked_req = None
    reason = req.finished_reason.to_json()
    scheduler.ipc_channels.send_to_tokenizer.send_output(
        AbortReq(rid=req.rid, finished_reason=reason), req
    )


def _process_batch_result(
    orig: Callable[..., Any], self: Any, batch: Any, result: Any, *args: Any, **kw: Any
) -> Any:
    if not isinstance(result, FailedBatch):
        return orig(self, batch, result, *args, **kw)
    return None


def _on_idle(result: Any, self: Any, *args: Any, **kw: Any) -> Any:
    check = getattr(self.tree_cache, "check_idle", None)
    if check is not None:
        check()
    return result


def _token_info(result: Any, self: Any) -> Any:
    """Usage in bytes, since routers read it; the counts stay page ids, which leak checks add up."""
    pool = getattr(self.tree_cache, "block_pool", None)
    if pool is not None:
        result.full_token_usage = (pool.used_bytes - pool.evictable_bytes) / pool.total_bytes
        if getattr(self.tree_cache, "plain", None) is not None:  # page ids may be scarcer
            used, evictable, total = self.tree_cache.plain_bytes()
            result.full_token_usage = max(result.full_token_usage, (used - evictable) / total)
    return result


def _default_server_args(self: Any, *args: Any, **kw: Any) -> None:
    """Before SGLang resolves its arguments: our backend implies our prefix cache."""
    if self.attention_backend == BACKEND_NAME and not self.radix_cache_backend:
        self.radix_cache_backend = BACKEND_NAME


def _check_server_args(result: Any, self: Any, *args: Any, **kw: Any) -> Any:
    if self.attention_backend != BACKEND_NAME:
        if is_published():
            raise StartupRefused(
                f"--attention-backend {self.attention_backend!r} cannot be served by hs-runtime "
                f"(leave it out: it is {BACKEND_NAME})"
            )
        return result
    problems = refusals_of(self) + environment_refusals()
    constants = RuntimeConfig.from_env().constants
    if constants.anchor == "chunk" and self.chunked_prefill_size != constants.chunk:
        problems.append(
            f"--chunked-prefill-size {self.chunked_prefill_size} cannot be served with "
            f"anchor=chunk: chunks decide what is stored ({constants.chunk})"
        )
    if constants.anchor == "chunk" and constants.window >= constants.chunk:
        problems.append(f"window {constants.window} must be below the chunk, {constants.chunk}")
    if problems:
        raise StartupRefused("; ".join(problems))
    return result


def _no_fused_write(*args: Any, **kw: Any) -> bool:
    return False  # the RoPE kernel would write K and V at virtual token slots


def _support_triton(orig: Callable[..., Any], backend: str) -> bool:
    """SGLang decides by the backend's name; what matters is the device."""
    import torch

    return bool(orig(backend)) and (backend != BACKEND_NAME or torch.cuda.is_available())


def _allocate_bitmask(orig: Callable[..., Any], vocab_size: int, batch_size: int) -> Any:
    """What a grammar allows: int32 [batch, ceil(vocab / 32)], all of it. SGLang's is in pinned
    memory, of which a machine without a GPU has none."""
    import torch
    from xgrammar import bitmask_dtype, get_bitmask_shape

    if torch.cuda.is_available():
        return orig(vocab_size, batch_size)
    return torch.full(get_bitmask_shape(batch_size, vocab_size), -1, dtype=bitmask_dtype)


def _mask_logits(orig: Callable[..., Any], self: Any, logits: Any, vocab_mask: Any) -> None:
    """SGLang has kernels of accelerators for this; xgrammar has one of the CPU."""
    if logits.device.type != "cpu":
        return orig(self, logits, vocab_mask)
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)


def _hooks() -> dict[str, tuple[str, Any]]:
    """Target -> (type, hook). The start-up check demands every one of them."""
    from hs_runtime.scheduler.prefill_adder import HieraPrefillAdder

    root = "sglang.srt."
    configurator = root + "mem_cache.kv_cache_configurator.KVCacheConfigurator."
    batch = root + "managers.schedule_batch.ScheduleBatch."
    scheduler = root + "managers.scheduler.Scheduler."
    xgrammar = root + "constrained.xgrammar_backend."
    return {
        _SERVER_ARGS + "__post_init__": ("BEFORE", _default_server_args),
        _SERVER_ARGS + "check_server_args": ("AFTER", _check_server_args),
        configurator + "_build_mha_kv_pool": ("AROUND", _build_pool),
        configurator + "_build_token_to_kv_pool_allocator": ("AROUND", _build_allocator),
        configurator + "_resolve_memory_pool_config": ("AROUND", _resolve_memory),
        root + "managers.schedule_batch.Req.__init__": ("AROUND", _init_req),
        batch + "prepare_for_extend": ("AROUND", _prepare_for_extend),
        batch + "prepare_for_decode": ("AROUND", _prepare_for_decode),
        batch + "check_decode_mem": ("AROUND", _check_decode_mem),
        batch + "retract_decode": ("AROUND", _retract_decode),
        root + "managers.schedule_policy.PrefillAdder": ("REPLACE", HieraPrefillAdder),
        scheduler + "get_new_batch_prefill": ("AROUND", _get_new_batch_prefill),
        scheduler + "init_req_max_new_tokens": ("AROUND", _init_max_new),
        scheduler + "on_idle": ("AFTER", _on_idle),
        scheduler + "run_batch": ("AROUND", _run_batch),
        scheduler + "process_batch_result": ("AROUND", _process_batch_result),
        root + "managers.scheduler_components.pool_stats_observer."
        "SchedulerPoolStatsObserver._get_token_info": ("AFTER", _token_info),
        root + "managers.utils.validate_input_length": ("AROUND", _validate_length),
        root + "models.utils.enable_fused_set_kv_buffer": ("REPLACE", _no_fused_write),
        root + "utils.common.support_triton": ("AROUND", _support_triton),
        xgrammar + "_allocate_token_bitmask": ("AROUND", _allocate_bitmask),
        xgrammar + "XGrammarGrammar.apply_vocab_mask": ("AROUND", _mask_logits),
    }


REQUIRED_HOOKS: tuple[str, ...] = ()
_SERVER_ARGS = "sglang.srt.server_args.ServerArgs."


def register() -> None:
    """Entry point of the plugin group `sglang.srt.plugins`; runs once in every SGLang process.

    Without a published configuration (a stock `sglang serve` in the same environment) only names
    are registered and nothing of SGLang is hooked.
    """
    global REQUIRED_HOOKS
    import sglang
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.server_args import add_attention_backend_choices

    if sglang.__version__ != SGLANG_VERSION:
        raise StartupRefused(
            f"SGLang {sglang.__version__} cannot be served (install {SGLANG_VERSION})"
        )
    register_attention_backend(BACKEND_NAME)(create_backend)
    add_attention_backend_choices([BACKEND_NAME])
    register_radix_cache_backend(BACKEND_NAME, create_radix_cache)
    if not is_published():
        return
    hooks = _hooks()
    for target, (kind, hook) in hooks.items():
        HookRegistry.register(target, hook, HookType[kind])
    REQUIRED_HOOKS = tuple(hooks)


def verify() -> None:
    """Raises StartupRefused with the name of everything that did not take."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    if BACKEND_NAME not in ATTENTION_BACKENDS:
        raise StartupRefused(
            "the hierasparse plugin is not loaded: install this project in the environment of "
            "SGLang, and let SGLANG_PLUGINS name hierasparse or be unset"
        )
    if not REQUIRED_HOOKS:
        raise StartupRefused(
            "the hierasparse plugin has no configuration: start the server with `hs-runtime serve`"
        )
    verify_hooks(REQUIRED_HOOKS)


# ---- the evaluation's tap ------------------------------------------------------------------------

TAP_HOOKS = (
    "sglang.srt.model_executor.model_runner.ModelRunner.sample",
    "sglang.srt.layers.logits_processor.LogitsProcessor.forward",
)
LAYER_HOOK = "hs_runtime.compression.compressor.Compressor.apply"


def register_tap(tap: Any) -> None:
    """Let `tap` (an `evaluation.tap.ServingTap`) force tokens and see logits in this process. For
    the process target of the evaluation alone, before the plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def sample(orig: Callable[..., Any], self: Any, logits_output: Any, batch: Any) -> Any:
        chosen = orig(self, logits_output, batch)
        tap.force(batch.rids, batch.seq_lens.tolist(), logits_output.next_token_logits, chosen)
        return chosen

    def logits(
        orig: Callable[..., Any],
        self: Any,
        ids: Any,
        hidden: Any,
        head: Any,
        batch: Any,
        *rest: Any,
    ) -> Any:
        from sglang.srt.layers.logits_processor import LogitsMetadata
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        if isinstance(batch, ForwardBatch) and batch.forward_mode.is_extend() and batch.rids:
            metadata = LogitsMetadata.from_forward_batch(batch)

            def logits_of(rows: Any) -> Any:
                states = hidden[rows.to(hidden.device)]
                return self._get_logits(states, head, metadata, use_logits_buffer=False)

            lengths = batch.extend_seq_lens_cpu
            tap.read_prompt(batch.rids, batch.extend_prefix_lens_cpu, lengths, logits_of)
        return orig(self, ids, hidden, head, batch, *rest)

    for target, hook in zip(TAP_HOOKS, (sample, logits), strict=True):
        HookRegistry.register(target, hook, HookType.AROUND)


def register_layer_tap(tap: Any) -> None:
    """Let `tap` (an `evaluation.layers.LayerTap`) see the K and V that prefill stores."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def apply(orig: Callable[..., Any], self: Any, layer: int, k: Any, v: Any) -> Any:
        tap.observe(layer, k, v)
        if layer == self.pool.layers - 1:
            tap.save()
        return orig(self, layer, k, v)

    HookRegistry.register(LAYER_HOOK, apply, HookType.AROUND)


def verify_hooks(targets: Sequence[str]) -> None:
    """Raises StartupRefused with the names of those that did not take."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = [target for target in targets if target not in HookRegistry._patched]
    if missing:
        raise StartupRefused(f"hooks did not apply: {', '.join(missing)}")


# ---- factories ----------------------------------------------------------------------------------


def create_backend(runner: Any) -> Any:
    """The attention backend, after the checks of everything it depends on."""
    from hs_runtime.attention.backend import HieraAttnBackend
    from hs_runtime.compression import Compressor
    from hs_runtime.launch import EXPANDED_PAGES
    from hs_runtime.policies.pruner import build_pruner
    from hs_runtime.pool.allocator import HieraAllocator
    from hs_runtime.pool.kv_pool import HieraKVPool

    verify()
    problems = refusals_of(runner.server_args)
    if not isinstance(runner.token_to_kv_pool, HieraKVPool):
        problems.append(f"the KV pool is {type(runner.token_to_kv_pool).__name__}, not HieraKVPool")
    if not isinstance(runner.token_to_kv_pool_allocator, HieraAllocator):
        name = type(runner.token_to_kv_pool_allocator).__name__
        problems.append(f"the allocator is {name}, not HieraAllocator")
    if problems:
        raise StartupRefused("; ".join(problems))
    config = RuntimeConfig.from_env()
    pool, pruner = runner.token_to_kv_pool, build_pruner(config.constants.pruner)
    if not pruner.is_stored and pool.block_pool.device.type != "cpu":
        raise StartupRefused(f"pruner {pruner.name!r} is simulated on the CPU alone (--device cpu)")
    calibration = None
    if pruner.needs_calibration:
        calibration = _calibration_of_rank(config, runner.model_config.model_path, pool)
    compressor = Compressor(
        pool.block_pool,
        pruner,
        [calibration.layers[layer] for layer in pool.mixed_layers] if calibration else None,
        fault=_injected_fault(config.injected_fault),
    )
    logger.info("hierasparse serves with %s", config.constants.to_json())
    from sglang.srt.runtime_context import get_parallel

    return HieraAttnBackend(
        pool,
        runner.req_to_token_pool,
        compressor,
        q_heads=runner.model_config.num_attention_heads // get_parallel().attn_tp_size,
        max_rows=runner.req_to_token_pool.size,
        permutation=calibration.permutation if calibration else None,
        prefill_kernel=_prefill_kernel(config.prefill_kernel, pool.block_pool),
        expanded_pages=EXPANDED_PAGES,
    )


def _prefill_kernel(wanted: str, pool: Any) -> str:
    """What "auto" is on the pool's device; StartupRefused for what does not exist there."""
    import torch

    from hs_kernels.cuda import PREFILL_HEAD_DIMS

    if pool.device.type != "cuda":
        return "sparse" if wanted == "auto" else wanted
    hopper = torch.cuda.get_device_capability(pool.device) == (9, 0)
    has_ours = hopper and pool.format.head_dim in PREFILL_HEAD_DIMS
    if wanted == "auto":
        return "expanded" if has_ours else "torch"
    if wanted != "torch" and not has_ours:
        raise StartupRefused(
            f"prefill_kernel {wanted!r} is for compute capability 9.0 and {PREFILL_HEAD_DIMS} "
            f"channels, not for {torch.cuda.get_device_name(pool.device)} and "
            f"{pool.format.head_dim} (choose 'auto' or 'torch')"
        )
    if wanted == "sparse" and pool.means is not None:
        raise StartupRefused(
            "prefill_kernel 'sparse' does not add the block means of this pruner "
            "(choose 'auto', 'expanded' or 'torch')"
        )
    return wanted


def _calibration_of_rank(config: RuntimeConfig, model_path: str, pool: Any) -> Any:
    """This rank's part of the calibration file, on the pool's device; StartupRefused if the file is
    not the one that the constants name, or not of this model."""
    from pathlib import Path

    from hs_runtime.calibration import digest, load_calibration

    path = Path(config.calibration_path)
    if not path.is_file() or digest(path) != config.constants.calibration:
        raise StartupRefused(f"calibration: {path} is gone or has changed (start the server anew)")
    loaded = load_calibration(path, model_path if Path(model_path).is_dir() else None)
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    part = loaded.of_rank(parallel.attn_tp_rank, parallel.attn_tp_size)
    expected = (pool.layer_num, pool.head_num, pool.head_dim)
    if tuple(part.permutation.shape) != expected:
        raise StartupRefused(
            f"calibration: {path} has {list(part.permutation.shape)} layers, kv heads and "
            f"channels, not {list(expected)}"
        )
    return part.to(pool.block_pool.device)


def _injected_fault(text: str) -> Callable[[], None] | None:
    """`RuntimeConfig.injected_fault` as what the compressor calls."""
    from hs_runtime.compression.compressor import every

    if not text:
        return None
    kind, _, period = text.partition(":")
    error = ValueError if kind == "compression" else RuntimeError
    return every(int(period), error(f"injected fault: {text}"))


def create_radix_cache(context: Any) -> Any:
    from sglang.srt.runtime_context import get_parallel

    from hs_runtime.pool.radix_cache import HieraRadixCache

    verify()
    # What is loaded stays: the collector need not walk all of torch and SGLang (0.2 s) in a step.
    gc.collect()
    gc.freeze()
    context.params.disable = context.disable_radix_cache
    config = RuntimeConfig.from_env()
    return HieraRadixCache(
        context.params,
        config.constants,
        check=config.check_integrity,
        check_always=config.check_integrity_always,
        check_ranks=config.check_ranks,
        ranks=get_parallel().attn_tp_size,
    )


@functools.cache
def refusal_table() -> Sequence[dict[str, str]]:
    """The refusals for people: option, reason, legal alternative."""
    return tuple(
        {"option": "--" + r.option.replace("_", "-"), "reason": r.reason, "legal": r.legal}
        for r in REFUSALS
    )
