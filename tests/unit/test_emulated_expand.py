"""The kernel that unpacks blocks, against the reference, without a device."""

import ctypes

import pytest
import torch

from hs_kernels import build, ops
from hs_kernels.block_format import BlockFormat
from tests.support import emulated
from tests.support.cases import build_cache


@pytest.mark.parametrize("means", [False, True])
@pytest.mark.parametrize("fmt", emulated.FORMATS.values(), ids=str)
def test_blocks_of_both_kinds_are_unpacked_to_the_bit(fmt: BlockFormat, means: bool) -> None:
    try:
        build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    heads = 2
    cache = build_cache(fmt, heads, 6, (0.5, 0.5))
    refs = cache.refs.clone()
    refs[:, 2, 1] = 0  # the dummy
    assert (refs > 0).any() and (refs < 0).any()
    side = torch.zeros((1 - int(refs.min()), heads, fmt.head_dim), dtype=fmt.torch_dtype)
    side[1:] = torch.randn(side[1:].shape).to(fmt.torch_dtype)
    chosen = side if means else None
    want = ops.expand_blocks(cache.arena, refs, fmt, chosen)
    got = torch.zeros_like(want)
    function = emulated.library("expand").expand_blocks
    function.argtypes = [ctypes.c_int, *4 * [ctypes.c_void_p], ctypes.c_int, ctypes.c_int]
    function.restype = None
    function(
        *(fmt.head_dim, cache.arena.data_ptr(), refs.data_ptr()),
        *(side.data_ptr() if means else None, got.data_ptr(), refs.shape[1], heads),
    )
    assert torch.equal(got, want)
