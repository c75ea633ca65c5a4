"""The kernels of csrc run thread by thread on the CPU (emulator/device.h), so that they are tested
without a device. Needs nvcc, for CUDA's headers, and a host compiler."""

import ctypes
import hashlib
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hs_kernels import build
from hs_kernels.block_format import BlockFormat, Side
from hs_kernels.reference import dense_slots
from tests.support.cases import DecodeCase

EMULATOR = Path(__file__).parent / "emulator"
FLAGS = ("-std=c++20", "-O1", "-shared", "-Xcompiler", "-fPIC,-w")
PTR, INT, LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
MAGNITUDE, WEIGHTED, GIVEN, BY_TOKEN = range(4)


def _without_launchers(source: str) -> str:
    """Kernels of a .cu file as C++: no host functions, no launch bounds, shared memory by macro."""
    source = source[: source.index("\n}  // namespace\n}  // namespace hs\n")]
    source = re.sub(r'#include (<cudaTypedefs.h>|"hs/launch.h")\n', "", source)
    source = re.sub(r"^(template <[^\n]*>\n)?cudaError_t .*?^}\n", "", source, flags=re.M | re.S)
    source = re.sub(r"__launch_bounds__\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", "", source)
    dynamic = r"extern __shared__ (?:__align__\(\d+\) )?([\w: ]+) (\w+)\[\];"
    source = re.sub(dynamic, r"DYNAMIC_SHARED(\1, \2);", source)
    return source + "\n}\n}\n"


@cache
def library(name: str) -> ctypes.CDLL:
    """emulator/NAME.cpp with csrc/NAME.cu; raises BuildError without a compiler."""
    kernels = _without_launchers((build.SOURCES / f"{name}.cu").read_text())
    h = hashlib.sha256(kernels.encode())
    headers = [*sorted(EMULATOR.rglob("*.*")), *sorted((build.SOURCES / "include").rglob("*.*h"))]
    for path in headers:
        h.update(path.read_bytes())
    folder = build.BUILT.parent / "emulator" / h.hexdigest()[:16]
    made = folder / f"{name}.so"
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.inc").write_text(kernels)
        command = [str(build.find_compiler().path), *FLAGS]
        command += [f"-I{EMULATOR}", f"-I{folder}", f"-I{build.SOURCES / 'include'}"]
        partial = folder / f"{name}.partial.so"
        command += [str(EMULATOR / f"{name}.cpp"), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0:
            raise build.BuildError(f"emulator/{name}.cpp: {done.stdout}{done.stderr}")
        partial.replace(made)
    return ctypes.CDLL(str(made))


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def decode_attention(
    case: DecodeCase,
    columns: int,
    ctas: int,
    seed: int = 0,
    *,
    bulk: bool = True,
    behind_store: bool = False,
    planned: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [R, Hq, D] and lse [R, Hq]; what is not written is NaN. `seed` orders the warps; `bulk`
    is the kernel of sm_90, else that of sm_8x. With `behind_store` Q and the dense blocks of last
    tokens are NaN until every thread waits for the kernel in front. The shares are cut for the
    refs `planned`, by default the case's own."""
    cache_, (rows, q_heads, head_dim) = case.cache, case.q.shape
    heads, pages = cache_.heads, cache_.refs.shape[1]
    arena = torch.empty(cache_.arena.numel() + 1024, dtype=torch.uint8)
    start = -arena.data_ptr() % 1024
    arena = arena[start : start + cache_.arena.numel()].copy_(cache_.arena)
    refs, table = cache_.refs.contiguous(), case.page_table.contiguous()
    stored, queries, q = arena, case.q, case.q
    if behind_store:
        stored, q = arena.clone(), torch.full_like(case.q, torch.nan)
        dense = dense_slots(arena, cache_.fmt, heads)
        for row, length in enumerate(case.seq_lens.tolist()):
            if length == 0:
                continue
            last = refs[:, table[row, (length - 1) // 64].long()].flatten()
            head = torch.arange(heads).repeat(2)[last > 0]
            dense[last[last > 0].long(), head] = torch.nan

    def unset(*shape: int) -> Tensor:
        return torch.full(shape, -1, dtype=torch.int32)

    boundaries, first_pages, costs = unset(ctas + 1, 8), unset(ctas, 256), unset(max(1, rows))
    partials, states = unset(2 * ctas, columns, head_dim), unset(2 * ctas, columns, 2)
    out = torch.full_like(case.q, torch.nan)
    lse = torch.full((rows, q_heads), torch.nan)
    group = q_heads // heads
    functions = library("decode")
    functions.plan_decode.argtypes = [*6 * [PTR], *6 * [INT]]
    functions.plan_decode.restype = None
    types: list[Any] = [
        ctypes.c_uint,
        ctypes.c_bool,
        INT,
        INT,
        *12 * [PTR],
        *6 * [INT],
        ctypes.c_float,
        *(ctypes.c_bool, PTR, LONG, PTR, LONG),
    ]
    functions.decode_attention.argtypes = types
    functions.decode_attention.restype = ctypes.c_bool
    pairs = heads * -(-group // columns)
    inputs = (refs, table, case.seq_lens)
    planned = refs if planned is None else planned.contiguous()
    functions.plan_decode(
        *map(_pointer, (planned, table, case.seq_lens, costs, boundaries, first_pages)),
        *(rows, pages, heads, pairs, table.stride(0), ctas),
    )
    known = functions.decode_attention(
        *(seed, bulk, head_dim, columns),
        *map(_pointer, (q, arena, *inputs, boundaries, first_pages, cache_.means)),
        *map(_pointer, (partials, states, out, lse)),
        *(rows, pages, heads, group, table.stride(0), ctas, case.scale),
        *(behind_store, queries.data_ptr(), queries.nbytes, stored.data_ptr(), stored.numel()),
    )
    assert known, f"no instance for {head_dim} channels and {columns} columns"
    assert bool((partials == -1).all() and (states == -1).all()), "a partial was left behind"
    return out, lse


def store_blocks(
    blocks: Tensor,
    side: Side,
    arena: Tensor | None,
    refs: Tensor | None,
    rule: int = MAGNITUDE,
    *,
    keep: Tensor | None = None,
    weights: Tensor | None = None,
    means: Tensor | None = None,
    centered: bool = False,
    losses: Tensor | None = None,
) -> None:
    """hs_store_blocks; with `losses` f32 [N, H] those alone. `weights`: of channels or tokens."""
    function = library("compress").store_blocks
    types: list[Any] = [INT, INT, INT, PTR, *3 * [LONG], *4 * [PTR], ctypes.c_bool]
    function.argtypes = [*types, PTR, PTR, INT, INT, INT]
    function.restype = None
    function(
        *(blocks.shape[3], int(side), rule, blocks.data_ptr(), *blocks.stride()[:3]),
        *map(_pointer, (keep, weights, arena, refs)),
        *(centered or means is not None, _pointer(means), _pointer(losses)),
        *blocks.shape[:2],
        weights.shape[0] if rule == WEIGHTED and weights is not None and weights.dim() == 3 else 1,
    )


def token_weights(keys: Tensor, query: Tensor) -> Tensor:
    weights = torch.full(keys.shape[:3], torch.nan)
    function = library("compress").token_weights
    function.argtypes = [INT, PTR, *3 * [LONG], PTR, PTR, INT, INT, INT]
    function.restype = None
    function(
        *(keys.shape[3], keys.data_ptr(), *keys.stride()[:3]),
        *(query.data_ptr(), weights.data_ptr(), *keys.shape[:2]),
        query.shape[0] if query.dim() == 3 else 1,
    )
    return weights


def store_compensated(
    blocks: Tensor, arena: Tensor, refs: Tensor, weights: Tensor, factor: Tensor
) -> None:
    factor = factor.contiguous()  # torch's triangles are views
    function = library("compensate").store_compensated
    function.argtypes = [INT, PTR, *3 * [LONG], *4 * [PTR], INT, INT, INT]
    function.restype = None
    function(
        *(blocks.shape[3], blocks.data_ptr(), *blocks.stride()[:3]),
        *map(_pointer, (weights, factor, arena, refs)),
        *blocks.shape[:2],
        weights.shape[0] if weights.dim() == 3 else 1,
    )


def store_tokens(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    arena: Tensor,
    refs: Tensor,
    locations: Tensor,
    permutation: Tensor | None,
) -> Tensor:
    """hs_store_tokens; gives the queries to attend with."""
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    size = k.element_size()
    function = library("refs").store_tokens
    types: list[Any] = [*3 * [PTR, LONG, LONG], *3 * [PTR], LONG, *2 * [PTR], *4 * [INT]]
    function.argtypes = types
    function.restype = None
    function(
        *(y for x in (k, v, q) for y in (x.data_ptr(), x.stride(0) * size, x.stride(1) * size)),
        *(out.data_ptr(), arena.data_ptr(), refs.data_ptr(), refs.stride(0)),
        *(locations.data_ptr(), _pointer(permutation)),
        *(k.shape[0], k.shape[1], q.shape[1], k.shape[2] * size),
    )
    return q if permutation is None else out


FORMATS = {
    head_dim: BlockFormat(head_dim, "bfloat16" if head_dim == 128 else "float16")
    for head_dim in (64, 128, 256)
}
