"""SGLang's attention backend `hierasparse`: write, compress, attend. It knows no policy.

What changes refs or slots happens in `init_forward_metadata`, on the forward stream and outside
CUDA graphs. A captured decode reads refs, slots and the static buffers of `_DecodeBuffers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from hs_kernels import ops
from hs_kernels.block_format import Side
from hs_kernels.reference import dense_slots
from hs_runtime.attention import unpacked
from hs_runtime.attention.plan import (
    AttnPlan,
    BatchCompressor,
    ExpandedPlan,
    ExtendRow,
    ExtendTensors,
    PlainExtend,
    build_expanded_plans,
    build_plain_extend,
    is_crowded,
)
from hs_runtime.pool.kv_pool import HieraKVPool, LayerBlocks


@dataclass(frozen=True, slots=True)
class _DecodeBuffers:
    """Inputs of `decode_attention` at addresses that never move; rows of a captured batch that are
    padding have length 0 and write to the dummy page."""

    page_table: Tensor  # int32 [rows, pages]
    seq_lens: Tensor  # int32 [rows]
    locations: Tensor  # int64 [rows]
    workspace: Any  # None on the CPU

    @classmethod
    def allocate(
        cls, rows: int, pages: int, workspace: Any, device: torch.device
    ) -> _DecodeBuffers:
        return cls(
            torch.zeros((rows, pages), dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            workspace,
        )

    def head(self, rows: int) -> _DecodeBuffers:
        return _DecodeBuffers(
            self.page_table[:rows], self.seq_lens[:rows], self.locations[:rows], self.workspace
        )


class HieraAttnBackend(AttentionBackend):
    """Attention over mixed blocks. Plans come from the scheduler through the pool.

    With `permutation` int32 [layers, Hkv, D] the channels of Q and K are reordered as they come, so
    K lies in the cache in that order, dense blocks included, and scores are what they were.
    `prefill_kernel` "sparse" reads blocks as they lie; "expanded" and "torch" unpack them first,
    `expanded_pages` at a time, and attend with our dense kernel or with torch's.
    """

    def __init__(
        self,
        pool: HieraKVPool,
        req_to_token_pool: Any,
        compressor: BatchCompressor,
        *,
        q_heads: int,
        max_rows: int,
        prefill_kernel: str,
        expanded_pages: int,
        permutation: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.token_to_kv_pool, self.req_to_token_pool = pool, req_to_token_pool
        self.pool, self.compressor, self.q_heads = pool.block_pool, compressor, q_heads
        self.permutation = permutation
        self.plan: AttnPlan | None = None
        self.decode: _DecodeBuffers | None = None
        self._on_cuda = self.pool.device.type == "cuda"
        self._prefill_kernel, self._expanded_pages = prefill_kernel, expanded_pages
        self._dense_attention = (
            _hopper_dense_attention() if self._on_cuda and prefill_kernel == "torch" else None
        )
        self._crowded = False  # this extend's prefixes are too long to be gathered at once
        self._expanded: list[ExpandedPlan] = []
        self._plain: PlainExtend | None = None  # of the layers that stay dense
        self._plain_expanded: list[ExpandedPlan] = []
        self._allocate(max_rows)

    def _allocate(self, rows: int) -> None:
        pool, workspace = self.pool, None
        if self._on_cuda:
            workspace = ops.decode_workspace(
                rows, self.q_heads, pool.heads, pool.format, pool.device
            )
        pages = -(-self.req_to_token_pool.req_to_token.shape[1] // self.token_to_kv_pool.page_size)
        self._buffers = _DecodeBuffers.allocate(rows, pages, workspace, pool.device)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        if max_bs > self._buffers.seq_lens.shape[0]:
            self._allocate(max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        decoding = forward_batch.forward_mode.is_decode()
        if in_capture or not self.token_to_kv_pool.has_plan:
            # Recording, or a warm-up before the first request: nothing may change.
            self.plan = None
            if decoding:
                self._fill(forward_batch.batch_size, None, None)
            return
        plan: AttnPlan = self.token_to_kv_pool.current_plan()
        rows = forward_batch.batch_size - (getattr(forward_batch, "num_padding", 0) or 0)
        if plan.num_rows != rows or decoding != (plan.prefill is None):
            raise RuntimeError(
                f"{rows} requests in the forward, {plan.num_rows} in its plan; "
                f"decode is {decoding} and {plan.prefill is None}"
            )
        if not plan.begun:
            plan.begun = True
            if self.token_to_kv_pool.plain is not None:
                self.token_to_kv_pool.plain.apply(plan.operations)
            self.pool.apply(plan.operations, self.compressor.convert)
            if plan.prefill is not None:
                self.compressor.begin(plan.prefill.groups)
        self.plan, self._expanded = plan, []
        if plan.prefill is not None:
            page, prefixes = self.token_to_kv_pool.page_size, plan.prefill.prefixes
            self._crowded = is_crowded(prefixes, page, self._expanded_pages)
            if self._unpacks(plan.prefill):
                self._expanded = self._expand(plan.prefill.rows)
            if self.token_to_kv_pool.plain is not None:
                self._begin_plain(plan.prefill)
        if decoding:
            self._fill(forward_batch.batch_size, plan, forward_batch.req_pool_indices[:rows])

    def _begin_plain(self, plan: ExtendTensors) -> None:
        page = self.token_to_kv_pool.page_size
        self._plain = build_plain_extend(plan, page, self.pool.device)
        unpacks = self._prefill_kernel == "torch" and not self._gathers
        self._plain_expanded = self._expand(self._plain.rows) if unpacks else []

    def _expand(self, rows: Sequence[ExtendRow]) -> list[ExpandedPlan]:
        return build_expanded_plans(rows, self.pool.heads, self._expanded_pages, self.pool.device)

    def _unpacks(self, plan: ExtendTensors) -> bool:
        return self._prefill_kernel == "torch" or (
            self._prefill_kernel == "expanded" and any(plan.sparse)
        )

    @property
    def _gathers(self) -> bool:
        """Whether what is all dense goes through a dense kernel that is not ours."""
        return self._dense_attention is not None and not self._crowded

    def _fill(self, rows: int, plan: AttnPlan | None, slots: Tensor | None) -> None:
        """Static inputs of this decode step: a snapshot, since SGLang goes on writing its rows."""
        buffers = self._buffers.head(rows)
        used = 0
        if plan is not None and slots is not None:
            assert plan.seq_lens is not None and plan.locations is not None
            used, page = plan.num_rows, self.token_to_kv_pool.page_size
            table = self.req_to_token_pool.req_to_token[slots, : plan.longest : page] // page
            buffers.page_table[:used, : table.shape[1]] = table
            buffers.seq_lens[:used] = plan.seq_lens
            buffers.locations[:used] = plan.locations
        if used < rows:
            buffers.seq_lens[used:] = 0
            buffers.locations[used:] = 0
            buffers.page_table[used:] = 0
        if buffers.workspace is not None:
            ops.plan_decode(
                buffers.workspace, self.pool.refs[0], buffers.page_table, buffers.seq_lens
            )
        self.decode = buffers

    def _heads(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, extra: dict[str, Any]
    ) -> list[Tensor]:
        wanted = [name for name, value in extra.items() if value is not None]
        if k is None or v is None or wanted or layer.logit_cap or layer.sliding_window_size > 0:
            raise NotImplementedError(
                f"layer {layer.layer_id}: shared KV, soft-capped, windowed attention and {wanted} "
                "cannot be served by hierasparse"
            )
        dim = layer.head_dim
        return [x.reshape(x.shape[0], -1, dim) for x in (q, k, v)]

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        """q [T, Hq * D], k and v [T, Hkv * D] of the chunks; gives [T, Hq * D]."""
        q, k, v = self._heads(q, k, v, layer, extra)
        if self.plan is None:
            return torch.zeros_like(q).reshape(q.shape[0], -1)  # a warm-up, before any request
        plan, pool = self.plan.prefill, self.pool
        assert plan is not None and save_kv_cache
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        if self.permutation is not None:
            q, k = (ops.permute_channels(x, self.permutation[index]) for x in (q, k))
        blocks = self.token_to_kv_pool.layers[index]
        if blocks.mixed is None:  # all tokens go to their pages, and are read as they were computed
            assert self._plain is not None
            targets, locations = blocks.refs, self._plain.locations
            attention, expanded = self._plain.attention, self._plain_expanded
            sparse_k = sparse_v = False
        else:
            targets, locations = plan.writes.refs, plan.writes.locations
            attention, expanded = plan.attention, self._expanded
            sparse_k, sparse_v = plan.sparse
        ops.store_tokens(k, v, q, blocks.arena, targets, locations, pool.format)
        if blocks.mixed is not None:
            self.compressor.apply(blocks.mixed, k, v)
        if self._gathers and not (sparse_k or sparse_v):
            out = self._attend_dense(blocks, q, k, v, plan, layer.scaling)
        elif expanded:
            out = self._attend_expanded(blocks, expanded, q, k, v, layer.scaling)
        else:
            out, _ = ops.prefill_attention(
                q,
                k,
                v,
                blocks.arena,
                blocks.refs,
                attention,
                layer.scaling,
                pool.format,
                sparse_k=sparse_k,
                sparse_v=sparse_v,
                means=blocks.means,
            )
        return out.reshape(out.shape[0], -1)

    def _attend_expanded(
        self,
        blocks: LayerBlocks,
        plans: Sequence[ExpandedPlan],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
    ) -> Tensor:
        """Unpacks what the queries read, then attends densely: on Hopper because that takes no
        longer than the sparse kernels, and adds block means (csrc/PREFILL_NOTES.md); elsewhere for
        want of kernels."""
        fmt = self.pool.format
        outs = []
        for plan in plans:
            sources = plan.sources(blocks.refs)
            scratch = ops.expand_blocks(blocks.arena, sources, fmt, blocks.means)
            own = plan.tokens
            if self._prefill_kernel == "torch":
                out = unpacked.attend(q[own], k[own], v[own], scratch, plan, scale, fmt)
            else:
                out, _ = ops.prefill_attention(
                    q[own],
                    k[own],
                    v[own],
                    scratch,
                    plan.refs,
                    plan.attention,
                    scale,
                    fmt,
                    sparse_k=False,
                    sparse_v=False,
                )
            outs.append(out)
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _attend_dense(
        self,
        blocks: LayerBlocks,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: ExtendTensors,
        scale: float,
    ) -> Tensor:
        """All pages of all rows are dense: FlashAttention-3, on gathered prefixes."""
        assert self._dense_attention is not None and self.plan is not None
        attention, rows = plan.attention, (k, v)
        heads = self.pool.heads
        dense = dense_slots(blocks.arena, self.pool.format, heads)
        head = torch.arange(heads, device=q.device)
        gathered: list[Tensor] = []
        for side in Side:
            parts = []
            for r, prefix in enumerate(plan.prefixes):
                if prefix:
                    pages = attention.page_table[r, : -(-prefix // 64)].long()
                    refs = blocks.refs[side, pages].long()
                    stored = dense[refs, head].transpose(1, 2).reshape(-1, heads, q.shape[2])
                    parts.append(stored[:prefix])
                parts.append(rows[side][plan.bounds[r] : plan.bounds[r + 1]])
            gathered.append(torch.cat(parts) if len(parts) > 1 else parts[0])
        prefix_sum = torch.nn.functional.pad(attention.prefix_lens.cumsum(0), (1, 0))
        out: Tensor = self._dense_attention(
            q.contiguous(),
            gathered[Side.K].contiguous(),
            gathered[Side.V].contiguous(),
            attention.cu_seqlens,
            (attention.cu_seqlens + prefix_sum).to(torch.int32),
            max_seqlen_q=plan.longest_chunk,
            max_seqlen_k=self.plan.longest,
            softmax_scale=scale,
            causal=True,
        )
        return out

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **extra: Any,
    ) -> Tensor:
        """One token for each request: q [R, Hq * D], k and v [R, Hkv * D]; gives [R, Hq * D]."""
        decode, pool = self.decode, self.pool
        assert decode is not None and save_kv_cache
        q, k, v = self._heads(q, k, v, layer, extra)
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        order = None if self.permutation is None else self.permutation[index]
        blocks = self.token_to_kv_pool.layers[index]
        arena, refs = blocks.arena, blocks.refs
        q = ops.store_tokens(k, v, q, arena, refs, decode.locations, pool.format, order)
        out, _ = ops.decode_attention(
            q,
            arena,
            refs,
            decode.page_table,
            decode.seq_lens,
            layer.scaling,
            pool.format,
            workspace=decode.workspace,
            means=blocks.means,
        )
        return out.reshape(out.shape[0], -1)


def _hopper_dense_attention() -> Any:
    """FlashAttention-3 where this device has it, for head dimensions that our kernel lacks; else
    None. Where ours has an instance it is as fast (csrc/PREFILL_NOTES.md)."""
    if torch.cuda.get_device_capability() != (9, 0):
        return None
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func
