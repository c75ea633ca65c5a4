"""Custom ops without a device: what their fakes promise to a tracer."""

import pytest
import torch
from torch import Tensor
from torch._library import simple_registry
from torch._subclasses.fake_tensor import FakeTensorMode

from hs_kernels import cuda
from hs_kernels.block_format import BlockFormat

OPS = (
    cuda.plan_decode,
    cuda.decode_attention,
    cuda.prefill_attention,
    cuda.store_blocks,
    cuda.store_compensated,
    cuda.store_pages,
    cuda.block_losses,
    cuda.token_weights,
    cuda.rank_blocks,
    cuda.update_refs,
    cuda.assign_refs,
    cuda.store_tokens,
    cuda.expand_blocks,
    cuda.merge_states,
    cuda.permute_channels,
)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def ints(*shape: int) -> Tensor:
    return tensor(*shape, dtype=torch.int32)


def test_every_custom_op_is_listed_here() -> None:
    assert set(OPS) == {x for x in vars(cuda).values() if isinstance(x, cuda._CustomOp)}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op._name)
def test_every_op_has_a_fake_and_names_what_it_writes_to(op: cuda._CustomOp) -> None:  # type: ignore[type-arg]
    assert simple_registry.singleton.find(f"hierasparse::{op._name}").fake_impl.kernel is not None
    schema = op._op._schema
    written = {a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write}
    assert written == set(op.mutates)


def test_attention_gives_rows_of_queries_and_their_sums() -> None:
    with FakeTensorMode():
        q, kv, refs = tensor(5, 8, 64), tensor(5, 2, 64), ints(2, 3, 2)
        arena = tensor(100, dtype=torch.uint8)
        out, lse = cuda.prefill_attention(
            q, kv, kv, arena, refs, *[ints(4)] * 7, 0.125, False, False
        )
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
            (5, 8, 64),
            torch.bfloat16,
            (5, 8),
            torch.float32,
        )
        assert out.device.type == "cuda"
        rows = ints(5)
        states = [tensor(4, 8, 64, dtype=torch.float32), tensor(4, 8, 2, dtype=torch.float32)]
        out, lse = cuda.decode_attention(
            q, arena, refs, ints(5, 9), rows, ints(3, 8), ints(2, 256), *states, 0.125, None
        )
        assert (out.shape, lse.shape) == ((5, 8, 64), (5, 8))


def test_queries_come_back_permuted_or_not_at_all() -> None:
    with FakeTensorMode():
        q, kv = tensor(5, 8, 64), tensor(5, 2, 64)
        rest = (tensor(100, dtype=torch.uint8), ints(2, 3, 2), tensor(5, dtype=torch.int64))
        assert cuda.store_tokens(kv, kv, q, *rest, ints(2, 64)).shape == q.shape
        assert cuda.store_tokens(kv, kv, q, *rest, None).numel() == 0


def test_an_arena_of_unpacked_blocks_has_a_dummy_slot() -> None:
    fmt = BlockFormat(64, "bfloat16")
    with FakeTensorMode():
        arena = tensor(100, dtype=torch.uint8)
        scratch = cuda.expand_blocks(arena, ints(2, 7, 2), 64, fmt.torch_dtype, None)
        assert scratch.numel() == (1 + 2 * 7) * 2 * 64 * 64 * 2
