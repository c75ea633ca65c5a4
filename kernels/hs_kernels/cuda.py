"""The kernels of csrc as torch custom ops: shapes are checked in `ops`, memory is allocated here.

Every op launches on the current stream and synchronises nothing, so all of them may be captured.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from hs_kernels import build
from hs_kernels.block_format import BlockFormat, Side

P = ParamSpec("P")
R = TypeVar("R")

_P, _I, _L, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong, ctypes.c_float

# Argument types of the C interface, in order; the last pointer is the stream.
_SIGNATURES: dict[str, list[type]] = {
    "hs_decode_columns": [_I, _I],
    "hs_decode_plan": [*6 * [_P], *6 * [_I], _P],
    "hs_decode_attention": [_I, _I, _P, _P, _L, *10 * [_P], *6 * [_I], _F, _P],
    "hs_prefill_attention": [
        *6 * [_P],
        *(_L, _P, _L, _P, _I, _P, _P, _I),
        *4 * [_P],
        *7 * [_I],
        *6 * [_L],
        *(_F, _I, _I, _P, _I, _P),
    ],
    "hs_store_blocks": [*4 * [_I], _P, *3 * [_L], *4 * [_P], _I, _I, _P, _P, *3 * [_I], _P],
    "hs_store_pair": [_I, _I, _P, _P, *3 * [_L], *3 * [_P], _I, _I, _P],
    "hs_store_compensated": [_I, _I, _P, *3 * [_L], *4 * [_P], *4 * [_I], _P],
    "hs_token_weights": [_I, _I, _P, *3 * [_L], _P, _P, *3 * [_I], _P],
    "hs_rank_blocks": [_P, _P, _I, _I, _P],
    "hs_update_refs": [_P, _P, _P, _L, _P],
    "hs_assign_refs": [*6 * [_P], *3 * [_I], _P],
    "hs_copy_slots": [_P, _P, _P, _I, _I, _L, _P],
    "hs_store_tokens": [*3 * [_P, _L, _L], *3 * [_P], _L, *2 * [_P], *4 * [_I], _P],
    "hs_merge_states": [*4 * [_P], _I, _L, _I, _P],
    "hs_expand_blocks": [_I, _I, *4 * [_P], _I, _I, _P],
    "hs_permute_channels": [_I, _P, _L, _P, _L, _P, _L, _I, _I, _P],
}
_DTYPE_CODES = {torch.float16: 0, torch.bfloat16: 1}
MAGNITUDE, WEIGHTED, GIVEN, BY_TOKEN = range(4)  # rules of hs_store_blocks


class KernelError(RuntimeError):
    """A launch that CUDA refused."""


@cache
def _library(device: int) -> ctypes.CDLL:
    return build.load(build.target_of(torch.cuda.get_device_capability(device)))


@cache
def symbol(device: int, name: str) -> "ctypes._NamedFuncPointer":
    """A function of the library for this device, with its argument types."""
    function: ctypes._NamedFuncPointer = getattr(_library(device), name)
    function.argtypes = _SIGNATURES[name]
    function.restype = ctypes.c_int
    return function


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def launch(device: torch.device, name: str, *arguments: int | float | None) -> None:
    """Calls a launcher on the current stream of the device; raises KernelError on a CUDA error."""
    current = torch.cuda.current_device()
    index = current if device.index is None else device.index
    if index != current:
        with torch.cuda.device(index):
            launch(device, name, *arguments)
        return
    code = symbol(index, name)(*arguments, torch.cuda.current_stream(index).cuda_stream)
    if code != 0:
        reason = _library(index).hs_error_string(code).decode()
        raise KernelError(f"{name}: {reason} (CUDA error {code})")


def pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def dtype_code(dtype: torch.dtype) -> int:
    if dtype not in _DTYPE_CODES:
        raise TypeError(f"the kernels take float16 and bfloat16, not {dtype}")
    return _DTYPE_CODES[dtype]


_LIBRARY = torch.library.Library("hierasparse", "DEF")


class _CustomOp(Generic[P, R]):
    """`hierasparse::NAME`, called as the function that it was made of."""

    def __init__(self, function: Callable[P, R], mutates: tuple[str, ...]) -> None:
        self.__doc__, self._name = function.__doc__, function.__name__
        self.mutates = mutates
        _LIBRARY.define(self._name + torch.library.infer_schema(function, mutates_args=mutates))
        _LIBRARY.impl(self._name, function, "CUDA")
        self._op = getattr(torch.ops.hierasparse, self._name).default

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._op(*args, **kwargs)
        return result

    def register_fake(self, function: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.register_fake(f"hierasparse::{self._name}", function, lib=_LIBRARY)
        return function


def _custom_op(*mutates: str) -> Callable[[Callable[P, R]], _CustomOp[P, R]]:
    """A custom op of torch, for CUDA; `mutates` are the arguments that it writes to.

    `torch.library.custom_op` would say the same, and refuse `backward`, but it compares the memory
    of all results with that of all arguments at each call, which on a CUDA device takes tens of
    microseconds of the CPU: too much for ops of every layer.
    """
    return lambda function: _CustomOp(function, mutates)


# --- decode -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Buffers of `decode_attention` on one stream; their addresses never change.

    boundaries  int32 [ctas + 1, 8]         the work list of the step, written by `plan_decode`
    first_pages int32 [ctas, 256]           the pages with which each CTA begins, likewise
    costs       int32 [max_rows]            relative bytes of each request
    partials    f32 [2 * ctas, columns, D]  results of shares that end inside a (request, head)
    states      f32 [2 * ctas, columns, 2]  their maximum and sum

    Between launches every bit of partials and states is set, which means that nothing is there.
    """

    boundaries: Tensor
    first_pages: Tensor
    costs: Tensor
    partials: Tensor
    states: Tensor
    q_heads: int
    heads: int

    @property
    def ctas(self) -> int:
        return self.first_pages.shape[0]

    @property
    def pairs_per_row(self) -> int:
        group, columns = self.q_heads // self.heads, self.partials.shape[1]
        return self.heads * -(-group // columns)


def decode_workspace(
    max_rows: int, q_heads: int, heads: int, fmt: BlockFormat, device: torch.device
) -> DecodeWorkspace:
    index = torch.cuda.current_device() if device.index is None else device.index
    # One CTA of the bulk-copy kernel fills an SM; of the smaller rings of sm_8x, two fit.
    bulk = torch.cuda.get_device_capability(index) == (9, 0)
    processors = _processors(torch.device("cuda", index))
    ctas = processors if bulk else 2 * processors
    columns = symbol(index, "hs_decode_columns")(fmt.head_dim, q_heads // heads)

    def buffer(*shape: int) -> Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=device)

    return DecodeWorkspace(
        boundaries=buffer(ctas + 1, 8),
        first_pages=buffer(ctas, 256),
        costs=buffer(max(1, max_rows)),
        partials=buffer(2 * ctas, columns, fmt.head_dim).view(torch.float32),
        states=buffer(2 * ctas, columns, 2).view(torch.float32),
        q_heads=q_heads,
        heads=heads,
    )


@_custom_op("boundaries", "first_pages", "costs")
def plan_decode(
    refs: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    boundaries: Tensor,
    first_pages: Tensor,
    costs: Tensor,
    pairs_per_row: int,
) -> None:
    launch(
        refs.device,
        "hs_decode_plan",
        *map(pointer, (refs, page_table, seq_lens, costs, boundaries, first_pages)),
        *(seq_lens.shape[0], refs.shape[1], refs.shape[2], pairs_per_row),
        *(page_table.stride(0), boundaries.shape[0] - 1),
    )


@plan_decode.register_fake
def _(
    refs: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    boundaries: Tensor,
    first_pages: Tensor,
    costs: Tensor,
    pairs_per_row: int,
) -> None:
    return None


@_custom_op("partials", "states")
def decode_attention(
    q: Tensor,
    arena: Tensor,
    refs: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    boundaries: Tensor,
    first_pages: Tensor,
    partials: Tensor,
    states: Tensor,
    scale: float,
    means: Tensor | None,
) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    launch(
        q.device,
        "hs_decode_attention",
        *(dtype_code(q.dtype), q.shape[2], q.data_ptr(), arena.data_ptr(), arena.numel()),
        *map(pointer, (refs, page_table, seq_lens, boundaries, first_pages, means)),
        *map(pointer, (partials, states, out, lse)),
        *(q.shape[0], refs.shape[1], refs.shape[2], q.shape[1] // refs.shape[2]),
        *(page_table.stride(0), first_pages.shape[0], scale),
    )
    return out, lse


@decode_attention.register_fake
def _(
    q: Tensor,
    arena: Tensor,
    refs: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    boundaries: Tensor,
    first_pages: Tensor,
    partials: Tensor,
    states: Tensor,
    scale: float,
    means: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)


# --- prefill ------------------------------------------------------------------------------------

PREFILL_HEAD_DIMS = (64, 128)


@_custom_op()
def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    arena: Tensor,
    refs: Tensor,
    cu_seqlens: Tensor,
    prefix_lens: Tensor,
    page_table: Tensor,
    tail_first: Tensor,
    tail_slots: Tensor,
    tile_offsets: Tensor,
    frontiers: Tensor,
    scale: float,
    sparse_k: bool,
    sparse_v: bool,
) -> tuple[Tensor, Tensor]:
    tokens, q_heads, head_dim = q.shape
    device = q.device
    if head_dim not in PREFILL_HEAD_DIMS:
        raise ValueError(f"head_dim is {head_dim}; prefill has kernels for {PREFILL_HEAD_DIMS}")
    if not _is_hopper(device):
        raise RuntimeError(
            f"prefill has kernels for sm_90, not {torch.cuda.get_device_name(device)}"
        )
    out = torch.empty(q.shape, dtype=q.dtype, device=device)
    lse = torch.empty((tokens, q_heads), dtype=torch.float32, device=device)
    if tokens == 0:
        return out, lse
    q, k, v = _loadable(q), _loadable(k), _loadable(v)
    requests, tiles = prefix_lens.shape[0], frontiers.shape[0]
    workspace = torch.empty(8 + 12 * tiles, dtype=torch.int32, device=device)
    plan = [x.contiguous() for x in (cu_seqlens, prefix_lens, tile_offsets, frontiers)]
    tail_first, tail_slots, refs = (x.contiguous() for x in (tail_first, tail_slots, refs))
    page_table = page_table if page_table.stride(1) == 1 else page_table.contiguous()
    launch(
        device,
        "hs_prefill_attention",
        *map(pointer, (out, lse, q, k, v, arena)),
        arena.numel(),
        *(refs.data_ptr(), refs.stride(0), page_table.data_ptr(), page_table.stride(0)),
        *(tail_first.data_ptr(), tail_slots.data_ptr(), tail_slots.shape[2]),
        *map(pointer, plan),
        *(requests, tiles, tokens, q_heads, k.shape[1], head_dim, dtype_code(q.dtype)),
        *(x for t in (q, k, v) for x in t.stride()[:2]),
        *(scale, sparse_k, sparse_v, workspace.data_ptr(), _processors(device)),
    )
    return out, lse


@prefill_attention.register_fake
def _(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


# --- compression --------------------------------------------------------------------------------


def _loadable(blocks: Tensor) -> Tensor:
    """The same values with channels adjacent and every row on 16 bytes."""
    aligned = blocks.data_ptr() % 16 == 0 and all(s % 8 == 0 for s in blocks.stride()[:-1])
    return blocks if blocks.stride(-1) == 1 and aligned else blocks.contiguous()


def _layers(constants: Tensor | None) -> int:
    """Of [layers, H, D] as many, of [H, D] one."""
    return constants.shape[0] if constants is not None and constants.dim() == 3 else 1


@_custom_op("arena", "means")
def store_blocks(
    blocks: Tensor,
    side: int,
    arena: Tensor,
    refs: Tensor,
    ref_sign: int,
    keep: Tensor | None,
    weights: Tensor | None,
    means: Tensor | None,
    token_weights: Tensor | None,
) -> None:
    rules = (keep, weights, token_weights)
    _store(blocks, side, arena, refs, ref_sign, rules, means is not None, means, None)


@store_blocks.register_fake
def _(
    blocks: Tensor,
    side: int,
    arena: Tensor,
    refs: Tensor,
    ref_sign: int,
    keep: Tensor | None,
    weights: Tensor | None,
    means: Tensor | None,
    token_weights: Tensor | None,
) -> None:
    return None


@_custom_op("arena")
def store_compensated(
    blocks: Tensor, arena: Tensor, refs: Tensor, weights: Tensor, factor: Tensor
) -> None:
    blocks, refs = _loadable(blocks), refs.contiguous()
    weights, factor = weights.contiguous(), factor.contiguous()
    launch(
        blocks.device,
        "hs_store_compensated",
        *(dtype_code(blocks.dtype), blocks.shape[3], blocks.data_ptr()),
        *(blocks.stride(0), blocks.stride(1), blocks.stride(2)),
        *map(pointer, (weights, factor, arena, refs)),
        *(blocks.shape[0], blocks.shape[1], _layers(weights)),
        _processors(blocks.device),
    )


@store_compensated.register_fake
def _(blocks: Tensor, arena: Tensor, refs: Tensor, weights: Tensor, factor: Tensor) -> None:
    return None


@_custom_op("arena")
def store_pages(k: Tensor, v: Tensor, arena: Tensor, refs: Tensor) -> None:
    k, v = _loadable(k), _loadable(v)
    if k.stride() != v.stride():
        k, v = k.contiguous(), v.contiguous()
    refs = refs.contiguous()
    launch(
        k.device,
        "hs_store_pair",
        *(dtype_code(k.dtype), k.shape[3], k.data_ptr(), v.data_ptr()),
        *(k.stride(0), k.stride(1), k.stride(2)),
        *map(pointer, (arena, refs[Side.K], refs[Side.V])),
        *(k.shape[0], k.shape[1]),
    )


@store_pages.register_fake
def _(k: Tensor, v: Tensor, arena: Tensor, refs: Tensor) -> None:
    return None


@_custom_op()
def block_losses(
    blocks: Tensor,
    side: int,
    keep: Tensor | None,
    weights: Tensor | None,
    centered: bool,
    token_weights: Tensor | None,
) -> Tensor:
    losses = torch.empty(blocks.shape[:2], dtype=torch.float32, device=blocks.device)
    rules = (keep, weights, token_weights)
    _store(blocks, side, None, None, 1, rules, centered, None, losses)
    return losses


@block_losses.register_fake
def _(
    blocks: Tensor,
    side: int,
    keep: Tensor | None,
    weights: Tensor | None,
    centered: bool,
    token_weights: Tensor | None,
) -> Tensor:
    return blocks.new_empty(blocks.shape[:2], dtype=torch.float32)


def _store(
    blocks: Tensor,
    side: int,
    arena: Tensor | None,
    refs: Tensor | None,
    ref_sign: int,
    rules: tuple[Tensor | None, Tensor | None, Tensor | None],
    centered: bool,
    means: Tensor | None,
    losses: Tensor | None,
) -> None:
    """`rules` are a mask, weights of channels and weights of tokens; a block has one at most."""
    keep, weights, token_weights = (None if x is None else x.contiguous() for x in rules)
    if sum(x is not None for x in rules) > 1:
        raise ValueError("keep, weights and token_weights are rules; a block has one")
    of_v = centered or token_weights is not None
    if (centered and keep is not None) or (of_v and side != Side.V):
        raise ValueError("block means and token weights are of V, and a mask comes without means")
    blocks = _loadable(blocks)
    refs = None if refs is None else refs.contiguous()
    rule, scales = MAGNITUDE, None
    if keep is not None:
        rule = GIVEN
    elif weights is not None:
        rule, scales = WEIGHTED, weights
    elif token_weights is not None:
        rule, scales = BY_TOKEN, token_weights
    launch(
        blocks.device,
        "hs_store_blocks",
        *(dtype_code(blocks.dtype), blocks.shape[3], side, rule, blocks.data_ptr()),
        *(blocks.stride(0), blocks.stride(1), blocks.stride(2)),
        *map(pointer, (keep, scales, arena, refs)),
        *(ref_sign, int(centered), pointer(means), pointer(losses)),
        *(blocks.shape[0], blocks.shape[1], _layers(weights)),
    )


@_custom_op()
def token_weights(keys: Tensor, query: Tensor) -> Tensor:
    keys, query = _loadable(keys), query.contiguous()
    weights = torch.empty(keys.shape[:3], dtype=torch.float32, device=keys.device)
    launch(
        keys.device,
        "hs_token_weights",
        *(dtype_code(keys.dtype), keys.shape[3], keys.data_ptr()),
        *(keys.stride(0), keys.stride(1), keys.stride(2)),
        *(query.data_ptr(), weights.data_ptr(), keys.shape[0], keys.shape[1], _layers(query)),
    )
    return weights


@token_weights.register_fake
def _(keys: Tensor, query: Tensor) -> Tensor:
    return keys.new_empty(keys.shape[:3], dtype=torch.float32)


@_custom_op()
def rank_blocks(losses: Tensor) -> Tensor:
    losses = losses.contiguous()
    ranks = torch.empty(losses.shape, dtype=torch.int32, device=losses.device)
    candidates = losses.shape[-1]
    rows = losses.numel() // candidates if candidates else 0
    launch(losses.device, "hs_rank_blocks", losses.data_ptr(), ranks.data_ptr(), rows, candidates)
    return ranks


@rank_blocks.register_fake
def _(losses: Tensor) -> Tensor:
    return losses.new_empty(losses.shape, dtype=torch.int32)


# --- refs and slots -----------------------------------------------------------------------------


@_custom_op("refs")
def update_refs(refs: Tensor, index: Tensor, value: Tensor) -> None:
    launch(refs.device, "hs_update_refs", *map(pointer, (refs, index, value)), index.numel())


@update_refs.register_fake
def _(refs: Tensor, index: Tensor, value: Tensor) -> None:
    return None


@_custom_op("refs")
def assign_refs(
    refs: Tensor, pages: Tensor, slots: Tensor, counts: Tensor, ranks: Tensor | None
) -> Tensor:
    segments, candidates = pages.shape
    heads = refs.shape[1]
    assigned = torch.empty((segments, candidates, heads), dtype=torch.int32, device=refs.device)
    launch(
        refs.device,
        "hs_assign_refs",
        *map(pointer, (refs, pages, slots, counts, ranks, assigned)),
        *(segments, candidates, heads),
    )
    return assigned


@assign_refs.register_fake
def _(refs: Tensor, pages: Tensor, slots: Tensor, counts: Tensor, ranks: Tensor | None) -> Tensor:
    return refs.new_empty((*pages.shape, refs.shape[1]))


def copy_slots(addresses: Tensor, source: Tensor, target: Tensor, slot_bytes: int) -> None:
    """Not a custom op: what it changes is known only by address (int64 [layers])."""
    launch(
        addresses.device,
        "hs_copy_slots",
        *map(pointer, (addresses, source, target)),
        *(source.shape[0], addresses.shape[0], slot_bytes),
    )


@_custom_op("arena")
def store_tokens(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    arena: Tensor,
    refs: Tensor,
    locations: Tensor,
    permutation: Tensor | None,
) -> Tensor:
    size = k.element_size()
    k, v = _loadable(k), _loadable(v)
    out = q.new_empty(q.shape if permutation is not None else 0)
    rows = ((x.data_ptr(), x.stride(0) * size, x.stride(1) * size) for x in (k, v, q))
    launch(
        k.device,
        "hs_store_tokens",
        *(value for row in rows for value in row),
        *map(pointer, (out, arena, refs)),
        refs.shape[1] * refs.shape[2],
        *map(pointer, (locations, permutation)),
        *(k.shape[0], k.shape[1], q.shape[1], k.shape[2] * size),
    )
    return out


@store_tokens.register_fake
def _(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    arena: Tensor,
    refs: Tensor,
    locations: Tensor,
    permutation: Tensor | None,
) -> Tensor:
    return q.new_empty(q.shape if permutation is not None else 0)


# --- the rest -----------------------------------------------------------------------------------


@_custom_op()
def expand_blocks(
    arena: Tensor, refs: Tensor, head_dim: int, dtype: torch.dtype, means: Tensor | None
) -> Tensor:
    _, blocks, heads = refs.shape
    slot_bytes = heads * 64 * head_dim * dtype.itemsize
    out = torch.empty((1 + 2 * blocks) * slot_bytes, dtype=torch.uint8, device=arena.device)
    launch(
        arena.device,
        "hs_expand_blocks",
        *(dtype_code(dtype), head_dim, *map(pointer, (arena, refs, means, out)), blocks, heads),
    )
    return out


@expand_blocks.register_fake
def _(
    arena: Tensor, refs: Tensor, head_dim: int, dtype: torch.dtype, means: Tensor | None
) -> Tensor:
    _, blocks, heads = refs.shape
    return arena.new_empty((1 + 2 * blocks) * heads * 64 * head_dim * dtype.itemsize)


@_custom_op()
def merge_states(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    outs, lses = outs.to(torch.float32).contiguous(), lses.to(torch.float32).contiguous()
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    launch(
        outs.device,
        "hs_merge_states",
        *map(pointer, (outs, lses, out, lse)),
        *(outs.shape[0], lse.numel(), outs.shape[-1]),
    )
    return out, lse


@merge_states.register_fake
def _(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return (
        outs.new_empty(outs.shape[1:], dtype=torch.float32),
        lses.new_empty(lses.shape[1:], dtype=torch.float32),
    )


@_custom_op()
def permute_channels(x: Tensor, permutation: Tensor) -> Tensor:
    if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dtype_code(x.dtype)  # elements are moved as 16 bits
    launch(
        x.device,
        "hs_permute_channels",
        *(x.shape[2], x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)),
        *(permutation.data_ptr(), x.shape[0], x.shape[1], x.shape[1] // permutation.shape[0]),
    )
    return out


@permute_channels.register_fake
def _(x: Tensor, permutation: Tensor) -> Tensor:
    return x.new_empty(x.shape)
