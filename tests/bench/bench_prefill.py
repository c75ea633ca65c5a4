"""Times prefill attention in turn with FlashAttention-3, one JSON line for each case.

    python tests/bench/bench_prefill.py --fa3-library LIBRARY --output tests/bench/results/h200
    python tests/bench/bench_prefill.py --fa3-library LIBRARY --curve --cases 1x32768
    python tests/bench/bench_prefill.py --fa3-library LIBRARY --ablation --cases 8x32768

One layer, causal, a whole context in one chunk under the segment rule: of every complete segment
the named share of the pages after the sink is sparse, and pages lie in shuffled slots. `ours` and
`baseline` are TFLOP/s of the dense computation (4 D Hq L^2 / 2 a sequence), `ratio` above 1 says
that ours is faster. `error` is the root mean square error of sampled rows against fp64 on the same
(pruned) data, relative to the root mean square of the rows; `baseline_error` that of FA3 on the
dense data. `cudnn` is the rate of cuDNN, in turn with FA3, once for each context.

The two take turns of about `--burst` milliseconds, since a card at its power limit slows down with
time; `burst_ms` is how long a turn was. Short turns favour the one that draws more power, whose
clock the other's turn has let rise: give at least 250 for what either does on its own, and 1,500
for what a long prompt sees.

`--curve` walks the share of sparse blocks, of V alone and of both. `--ablation` tells what the
general kernels cost from what sparse blocks gain: `kernel` names the sides for which the kernel
takes sparse blocks, which is the fastest that can read the pages unless it says otherwise.
`--expanded` times what serving does by default instead: sparse blocks unpacked into a scratch arena
(timed with it), then the dense kernel; with block means of V, too (`means`).
"""

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from hs_kernels import ops  # noqa: E402
from hs_kernels.block_format import BlockFormat, Side  # noqa: E402
from hs_kernels.reference import (  # noqa: E402
    TILE,
    PrefillPlan,
    dense_slots,
    keep_2_4,
    pack_blocks,
    sparse_slots,
    write_dummy,
)
from tests.bench.bench import fa3_forward  # noqa: E402

PAGE, SINK, SEGMENT = 64, 64, 1024
CASES = [(1, 32768), (8, 32768), (1, 131072)]
SHARES = [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)]
STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
CURVE = [(0.0, s) for s in STEPS] + [(s, s) for s in STEPS[1:]]
# (share, kernel): each kernel on dense pages, then on what it is for.
ABLATION = [
    ((0.0, 0.0), ""),
    ((0.0, 0.0), "v"),
    ((0.0, 1.0), "v"),
    ((0.0, 0.0), "kv"),
    ((0.0, 1.0), "kv"),
    ((1.0, 0.0), "kv"),
    ((1.0, 1.0), "kv"),
]
EXPANDED = [(share, "expanded") for share in SHARES[1:]] + [(SHARES[1], "expanded, means")]
# Bounds of PREFILL_NOTES.md over the same bound of the dense kernel, for D = 128.
PREDICTED = {(0.0, 0.0): 1.0, (0.0, 1.0): 931 / 895, (1.0, 1.0): 854 / 895}
SEED = 1


@dataclass(frozen=True)
class Layer:
    """One layer of `batch` sequences of `length` tokens; q, k, v [batch * length, heads, D]."""

    fmt: BlockFormat
    batch: int
    length: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def scale(self) -> float:
        return float(self.fmt.head_dim**-0.5)

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.length**2 * self.q.shape[1] * self.fmt.head_dim


def build_layer(fmt: BlockFormat, batch: int, length: int, q_heads: int, heads: int) -> Layer:
    torch.manual_seed(SEED)
    q, k, v = (
        torch.randn((batch * length, n, fmt.head_dim), device="cuda", dtype=fmt.torch_dtype)
        for n in (q_heads, heads, heads)
    )
    return Layer(fmt, batch, length, q, k, v)


@dataclass(frozen=True)
class Stored:
    arena: torch.Tensor
    refs: torch.Tensor
    plan: PrefillPlan
    sparse_pages: tuple[torch.Tensor, torch.Tensor]  # bool [pages] of K and of V
    means: torch.Tensor  # [sparse slots, heads, D], all zero: what they cost, not what they change

    @cached_property
    def expanded(self) -> torch.Tensor:
        """Refs into the scratch arena that `ops.expand_blocks` makes of all pages."""
        _, pages, heads = self.refs.shape
        refs = torch.zeros_like(self.refs)
        slots = 1 + torch.arange(2 * (pages - 1), device=refs.device, dtype=torch.int32)
        refs[:, 1:] = slots.view(2, pages - 1, 1).expand(-1, -1, heads)
        return refs


def store(layer: Layer, share: tuple[float, float]) -> Stored:
    """The pages of the layer as prefill leaves them; every head has the same sparse ones."""
    fmt, heads = layer.fmt, layer.k.shape[1]
    pages = layer.batch * layer.length // PAGE
    sink = torch.arange(pages, device="cuda") % (layer.length // PAGE) < SINK // PAGE
    candidates = (~sink).nonzero()[:, 0]
    masks = []
    for s in share:
        mask = torch.zeros_like(sink)
        order = torch.randperm(len(candidates), device="cuda")
        mask[candidates[order[: round(s * len(candidates))]]] = True
        masks.append(mask)
    sparse_count = sum(int(mask.sum()) for mask in masks)
    dense_count = 2 * pages - sparse_count
    dense_supers = -(-dense_count // fmt.dense_per_superblock)
    total = 1 + dense_supers + -(-sparse_count // fmt.sparse_per_superblock)
    arena = torch.zeros(total * heads * fmt.superblock_bytes, dtype=torch.uint8, device="cuda")
    write_dummy(arena, fmt, heads)
    first_dense = fmt.dense_per_superblock
    first_sparse = (1 + dense_supers) * fmt.sparse_per_superblock
    free_dense = first_dense + torch.randperm(dense_count, device="cuda")
    free_sparse = first_sparse + torch.randperm(max(1, sparse_count), device="cuda")
    dense, sparse = dense_slots(arena, fmt, heads), sparse_slots(arena, fmt, heads)
    refs = torch.zeros((2, pages + 1, heads), dtype=torch.int32, device="cuda")
    for side, x in ((Side.K, layer.k), (Side.V, layer.v)):
        blocks = x.view(pages, PAGE, heads, fmt.head_dim).transpose(1, 2)
        is_sparse = masks[side]
        where = (~is_sparse).nonzero()[:, 0]
        slots, free_dense = free_dense[: len(where)], free_dense[len(where) :]
        dense[slots] = blocks[where]
        refs[side, 1 + where] = slots.int()[:, None]
        where = is_sparse.nonzero()[:, 0]
        slots, free_sparse = free_sparse[: len(where)], free_sparse[len(where) :]
        for i in range(0, len(where), 256):
            part = blocks[where[i : i + 256]].flatten(0, 1)
            sparse[slots[i : i + 256]] = pack_blocks(part, side, fmt).view(
                -1, heads, fmt.sparse_bytes
            )
        refs[side, 1 + where] = -slots.int()[:, None]
    tiles = layer.length // TILE
    starts = torch.arange(tiles, device="cuda") * TILE

    def int32(x: torch.Tensor) -> torch.Tensor:
        return x.to(device="cuda", dtype=torch.int32)

    plan = PrefillPlan(
        cu_seqlens=int32(torch.arange(layer.batch + 1) * layer.length),
        prefix_lens=int32(torch.zeros(layer.batch)),
        page_table=int32(1 + torch.arange(pages)).view(layer.batch, -1),
        tail_first=int32(torch.zeros(layer.batch)),
        tail_slots=int32(torch.zeros((layer.batch, 2, 1))),
        tile_offsets=int32(torch.arange(layer.batch + 1) * tiles),
        frontiers=int32(starts // SEGMENT * SEGMENT // PAGE).repeat(layer.batch),
    )
    shape = (total * fmt.sparse_per_superblock, heads, fmt.head_dim)
    means = torch.zeros(shape, device="cuda", dtype=fmt.torch_dtype)
    return Stored(arena, refs, plan, (masks[0], masks[1]), means)


def kernel_for(share: tuple[float, float]) -> str:
    """The sides that may be sparse, as the serving path chooses them: K's kernel takes V's too."""
    return "kv" if share[Side.K] > 0 else "v" if share[Side.V] > 0 else ""


def attend(layer: Layer, stored: Stored, kernel: str) -> torch.Tensor:
    """`kernel` names the sides that may be sparse, or is "expanded" or "expanded, means"."""
    arena, refs = stored.arena, stored.refs
    if kernel.startswith("expanded"):
        means = stored.means if kernel.endswith("means") else None
        arena = ops.expand_blocks(arena, refs[:, 1:].contiguous(), layer.fmt, means)
        refs, kernel = stored.expanded, ""
    out, _ = ops.prefill_attention(
        *(layer.q, layer.k, layer.v, arena, refs, stored.plan),
        *(layer.scale, layer.fmt),
        sparse_k="k" in kernel,
        sparse_v="v" in kernel,
    )
    return out


def sampled_error(layer: Layer, out: torch.Tensor, stored: Stored | None, rows: int = 24) -> float:
    """Of rows at random positions, all heads, against fp64 on what those rows may read."""
    rng = torch.Generator().manual_seed(3)
    group = layer.q.shape[1] // layer.k.shape[1]
    error = norm = 0.0
    for r in torch.randint(layer.batch * layer.length, (rows,), generator=rng).tolist():
        begin, t = r // layer.length * layer.length, r % layer.length
        edge = t // SEGMENT * SEGMENT
        kv = []
        for side, x in ((Side.K, layer.k), (Side.V, layer.v)):
            own = x[begin : begin + t + 1].double()
            if stored is not None and edge > 0:
                blocks = x[begin : begin + edge].view(-1, PAGE, *x.shape[1:]).transpose(1, 2)
                pages = slice(begin // PAGE, (begin + edge) // PAGE)
                pruned = stored.sparse_pages[side][pages, None, None, None]
                kept = torch.where(keep_2_4(blocks, side) | ~pruned, blocks, 0.0)
                own[:edge] = kept.transpose(1, 2).flatten(0, 1).double()
            kv.append(own.repeat_interleave(group, dim=1))
        weights = (torch.einsum("hd,nhd->hn", layer.q[r].double(), kv[0]) * layer.scale).softmax(-1)
        want = torch.einsum("hn,nhd->hd", weights, kv[1])
        error += float((out[r].double() - want).square().sum())
        norm += float(want.square().sum())
    return float((error / norm) ** 0.5)


@dataclass(frozen=True)
class Rate:
    """TFLOP/s: the median over turns, and (max - min) / median."""

    tflops: float
    spread: float


def measure_in_turn(
    calls: list[Callable[[], object]], layer: Layer, burst_ms: float, turns: int
) -> tuple[list[Rate], float]:
    """The rates of calls that run in turn, and the milliseconds of the longest turn."""

    def turn(call: Callable[[], object], count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / count

    counts = []
    for call in calls:
        turn(call, 1)
        counts.append(max(1, round(burst_ms / turn(call, 1))))
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(turns):
        for call, count, times in zip(calls, counts, taken, strict=True):
            times.append(turn(call, count))
    rates = [
        Rate(layer.flops / median(times) / 1e9, (max(times) - min(times)) / median(times))
        for times in taken
    ]
    longest = max(c * max(times) for c, times in zip(counts, taken, strict=True))
    return rates, longest


def read_clock(call: Callable[[], object], layer: Layer, rate: Rate) -> str:
    """What the driver reports of clock and power while calls run for about 0.6 s."""
    for _ in range(max(1, int(0.6 * rate.tflops * 1e12 / layer.flops))):
        call()
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    torch.cuda.synchronize()
    return said


def cudnn_forward(qkv: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Causal attention of q [B, L, Hq, D] and k, v [B, L, Hkv, D] by cuDNN, through torch."""
    q, k, v = (x.transpose(1, 2) for x in qkv)

    def forward() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return forward


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fa3-library", type=Path)
    parser.add_argument("--output", type=Path, help="folder; results are appended to prefill.jsonl")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cases", default="", help="B x L, as 1x32768,8x32768")
    parser.add_argument("--burst", type=float, default=250.0, help="milliseconds of a turn")
    parser.add_argument("--turns", type=int, default=5)
    walk = parser.add_mutually_exclusive_group()
    walk.add_argument("--curve", action="store_true", help="shares of sparse blocks from 0 to 1")
    walk.add_argument("--ablation", action="store_true", help="every kernel on dense pages too")
    walk.add_argument("--expanded", action="store_true", help="unpacking, then the dense kernel")
    arguments = parser.parse_args()
    fa3 = fa3_forward(arguments.fa3_library)
    if fa3 is None:
        parser.error("the baseline is FlashAttention-3: install sgl_kernel or give --fa3-library")
    cases = [tuple(map(int, c.split("x"))) for c in arguments.cases.split(",") if c] or CASES
    if arguments.ablation:
        wanted = ABLATION
    elif arguments.expanded:
        wanted = EXPANDED
    else:
        shares = CURVE if arguments.curve else SHARES
        wanted = [(share, kernel_for(share)) for share in shares]
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    fmt = BlockFormat(arguments.head_dim, arguments.dtype)
    for batch, length in cases:
        layer = build_layer(fmt, batch, length, q_heads=32, heads=8)
        dense = [x.view(batch, length, -1, fmt.head_dim) for x in (layer.q, layer.k, layer.v)]

        def baseline(dense: list[torch.Tensor] = dense) -> torch.Tensor:
            return fa3(*dense, None, None, True)

        base_error = sampled_error(layer, baseline().view_as(layer.q), None)
        (cudnn, _), _ = measure_in_turn(
            [cudnn_forward(dense), baseline], layer, arguments.burst, arguments.turns
        )
        for share, kernel in wanted:
            stored = store(layer, share)

            def ours(layer=layer, stored=stored, kernel=kernel) -> torch.Tensor:  # type: ignore[no-untyped-def]
                return attend(layer, stored, kernel)

            (rate, base), turn_ms = measure_in_turn(
                [ours, baseline], layer, arguments.burst, arguments.turns
            )
            case = {
                "B": batch,
                "L": length,
                "sk": share[0],
                "sv": share[1],
                "bits": 16,
                "D": fmt.head_dim,
                "dtype": fmt.dtype,
                "Hq": 32,
                "Hkv": 8,
            }
            if kernel != kernel_for(share):
                case["kernel"] = kernel
            predicted = PREDICTED.get(share) if kernel == kernel_for(share) else None
            line = {
                "bench": "prefill",
                "case": case,
                "unit": "TFLOP/s",
                "ours": round(rate.tflops, 1),
                "baseline": round(base.tflops, 1),
                "baseline_name": "FA3",
                "cudnn": round(cudnn.tflops, 1),
                "ratio": round(rate.tflops / base.tflops, 3),
                "predicted": predicted and round(predicted, 3),
                "spread": round(rate.spread, 3),
                "baseline_spread": round(base.spread, 3),
                "burst_ms": round(turn_ms),
                "error": sampled_error(layer, ours(), stored),
                "baseline_error": base_error,
                "versions": versions,
                "date": datetime.date.today().isoformat(),
            }
            text = json.dumps(line)
            if arguments.output:
                with (arguments.output / "prefill.jsonl").open("a") as f:
                    f.write(text + "\n")
            print(
                f"B={batch} L={length} sk={share[0]:g} sv={share[1]:g} {kernel or 'dense'} kernel: "
                f"{rate.tflops:.0f} TFLOP/s, FA3 {base.tflops:.0f}, x{line['ratio']}, "
                f"cuDNN {cudnn.tflops:.0f}, "
                f"error {line['error']:.2e} (FA3 {base_error:.2e}), "
                f"{read_clock(ours, layer, rate)}",
                flush=True,
            )
            del stored
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
