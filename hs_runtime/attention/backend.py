"""SGLang's attention backend `hierasparse`: write, compress, attend. It knows no policy."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch import Tensor

from hs_kernels import ops
from hs_kernels.block_format import Side
from hs_runtime.attention.plan import AttnPlan, BatchCompressor
from hs_runtime.pool.kv_pool import HieraKVPool


class HieraAttnBackend(AttentionBackend):
    """Attention over mixed blocks. Plans come from the scheduler through the pool; everything that
    changes refs or slots happens in `init_forward_metadata`, on the forward stream."""

    def __init__(
        self, pool: HieraKVPool, req_to_token_pool: Any, compressor: BatchCompressor
    ) -> None:
        super().__init__()
        self.token_to_kv_pool, self.req_to_token_pool = pool, req_to_token_pool
        self.pool, self.compressor = pool.block_pool, compressor
        self.plan: AttnPlan | None = None

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        plan: AttnPlan = self.token_to_kv_pool.current_plan()
        if plan.num_rows != forward_batch.batch_size:
            raise RuntimeError(
                f"{forward_batch.batch_size} requests in the forward, {plan.num_rows} in its plan"
            )
        if not plan.begun:
            self.pool.apply(plan.operations, self.compressor.convert)
            self.compressor.begin(plan.groups)
            plan.begun = True
        self.plan = plan

    def _write(self, layer: int, k: Tensor, v: Tensor) -> None:
        assert self.plan is not None
        dense = self.pool.dense_view(layer)
        for side, rows in zip(Side, (k, v), strict=True):
            writes = self.plan.writes[side]
            dense[writes.slots, :, writes.offsets] = rows[writes.rows]

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
        plan = self.plan
        assert plan is not None and plan.prefill is not None and save_kv_cache
        q, k, v = self._heads(q, k, v, layer, extra)
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        self._write(index, k, v)
        self.compressor.apply(index, k, v)
        out, _ = ops.prefill_attention(
            q,
            k,
            v,
            self.pool.arena[index],
            self.pool.refs[index],
            plan.prefill,
            layer.scaling,
            self.pool.format,
        )
        return out.reshape(out.shape[0], -1)

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
        plan = self.plan
        assert plan is not None and plan.page_table is not None and plan.seq_lens is not None
        assert save_kv_cache
        q, k, v = self._heads(q, k, v, layer, extra)
        index = layer.layer_id - self.token_to_kv_pool.start_layer
        self._write(index, k, v)
        out, _ = ops.decode_attention(
            q,
            self.pool.arena[index],
            self.pool.refs[index],
            plan.page_table,
            plan.seq_lens,
            layer.scaling,
            self.pool.format,
        )
        return out.reshape(out.shape[0], -1)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1
