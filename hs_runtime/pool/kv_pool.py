"""`HieraKVPool`: SGLang's view of all KV storage, and the hand-over of plans to the backend."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from sglang.srt.mem_cache.memory_pool import KVCache

from hs_kernels.block_format import HEAD_DIMS, BlockFormat, Side
from hs_runtime.pool.block_pool import BlockPool
from hs_runtime.pool.plain_layers import PlainLayers
from hs_runtime.pool.sizing import PoolSize

logger = logging.getLogger(__name__)

_DTYPES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


def block_format(head_dim: int, dtype: torch.dtype, *, packed: bool = True) -> BlockFormat:
    """The block format of a model, or a ValueError that names what is served."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim {head_dim} cannot be served (choose a model with {HEAD_DIMS})")
    if dtype not in _DTYPES:
        raise ValueError(
            f"--kv-cache-dtype {dtype} cannot be served (choose auto, bfloat16, float16 or float32)"
        )
    return BlockFormat(head_dim, _DTYPES[dtype], packed=packed)


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """Where one layer's blocks lie, at addresses that never move. `mixed` is the layer's number in
    the `BlockPool`, None for one that stays dense (`PlainLayers`)."""

    arena: torch.Tensor  # uint8 [bytes]
    refs: torch.Tensor  # int32 [2, P, Hkv]
    means: torch.Tensor | None  # of V, [sparse slots, Hkv, D]
    mixed: int | None


class HieraKVPool(KVCache):
    """KV storage by blocks. Token slots are virtual, so nothing may index buffers by them.

    `size` is the number of virtual tokens (page ids x 64); the arena comes from `next_size`, which
    the memory configuration sets just before. The `block_pool` has the layers `mixed_layers`; the
    others stay dense and are `plain` (None if there are none). `layers` says of each layer of the
    model where its blocks are.
    """

    next_size: ClassVar[PoolSize | None] = None

    def __init__(
        self,
        size: int,
        *,
        page_size: int,
        dtype: torch.dtype,
        head_num: int,
        head_dim: int,
        layer_num: int,
        device: str,
        enable_memory_saver: bool,
        v_head_dim: int | None = None,
        start_layer: int | None = None,
        end_layer: int | None = None,
        post_capture_active: bool = False,
        **ignored: Any,
    ) -> None:
        super().__init__(
            size, page_size, dtype, layer_num, device, enable_memory_saver, start_layer, end_layer
        )
        if v_head_dim not in (None, head_dim):
            raise ValueError(f"K has head_dim {head_dim} and V {v_head_dim}: they must be equal")
        if post_capture_active:
            raise ValueError(
                "post-capture KV sizing cannot be served: unset its environment switch"
            )
        if self.next_size is None or self.next_size.pages * page_size != size:
            raise RuntimeError(
                f"pool of {size} tokens was not sized by this plugin: {self.next_size}"
            )
        self.head_num, self.head_dim = head_num, head_dim
        fmt = block_format(head_dim, dtype, packed=self.next_size.packed)
        dense = self.next_size.dense_layers
        self.mixed_layers = [layer for layer in range(layer_num) if layer not in dense]
        self.block_pool = BlockPool(
            fmt,
            layers=len(self.mixed_layers),
            heads=head_num,
            superblocks=self.next_size.superblocks,
            pages=self.next_size.pages,
            device=device,
            centered=self.next_size.centered,
        )
        self.plain: PlainLayers | None = None
        if dense:
            self.plain = PlainLayers(
                fmt, layers=len(dense), heads=head_num, pages=self.next_size.pages, device=device
            )
        self.layers = [self._blocks_of(layer, dense) for layer in range(layer_num)]
        self._next_plan: Any = None
        # Plans are made on the scheduler's stream and read on the forward's: their memory must
        # outlive the forward, which may run one batch behind.
        self._recent_plans: deque[Any] = deque(maxlen=4)
        self._finalize_allocation_log(size)

    def _blocks_of(self, layer: int, dense: tuple[int, ...]) -> LayerBlocks:
        pool, plain = self.block_pool, self.plain
        if plain is not None and layer in dense:
            return LayerBlocks(plain.arena[dense.index(layer)], plain.refs, None, None)
        mixed = self.mixed_layers.index(layer)
        means = pool.means_of(mixed, Side.V)
        return LayerBlocks(pool.arena[mixed], pool.refs[mixed], means, mixed)

    # plans: made by the scheduler, taken by the backend of the same process, one for each forward

    def offer_plan(self, plan: Any) -> None:
        if self._next_plan is not None and not self._next_plan.begun:
            raise RuntimeError("a batch was planned while the one before it has not run")
        self._next_plan = plan
        self._recent_plans.append(plan)

    @property
    def has_plan(self) -> bool:
        """Whether any batch was planned yet: warm-ups and captures run before the first."""
        return self._next_plan is not None

    def current_plan(self) -> Any:
        if self._next_plan is None:
            raise RuntimeError("a forward came without a plan: the batch hooks did not run")
        return self._next_plan

    def get_kv_size_bytes(self) -> int:
        pool, plain = self.block_pool, self.plain.arena if self.plain else []
        means = sum(mean.numel() * mean.itemsize for mean in pool.means or ())
        return sum(arena.numel() for arena in (*pool.arena, *plain)) + means

    def get_kv_buffer_shape(self) -> tuple[torch.Size, torch.Size]:
        shape = torch.Size((self.size, self.head_num, self.head_dim))
        return shape, shape

    def _no_rows(self, what: str) -> Any:
        raise NotImplementedError(
            f"{what}: KV is stored by blocks under virtual token slots; only the hierasparse "
            "attention backend can read it"
        )

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        return self._no_rows("get_key_buffer")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        return self._no_rows("get_value_buffer")

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._no_rows("get_kv_buffer")

    def set_kv_buffer(self, *args: Any, **kwargs: Any) -> None:
        self._no_rows("set_kv_buffer")

    def move_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        self._no_rows("move_kv_cache")

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> Any:
        return self._no_rows("get_cpu_copy")

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> None:
        self._no_rows("load_cpu_copy")

    def get_contiguous_buf_infos(self) -> Any:
        return self._no_rows("get_contiguous_buf_infos")
