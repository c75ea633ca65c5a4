"""Times prefill attention next to FlashAttention-3, one JSON line for each case.

    python tests/bench/bench_prefill.py --fa3-library LIBRARY --output tests/bench/results/h200

One layer, causal, a whole context in one chunk under the segment rule: of every complete segment
all pages after the sink are sparse where the share is 1, and pages lie in shuffled slots. `ours`
and `baseline` are TFLOP/s of the dense computation (4 D Hq L^2 / 2 a sequence), `ratio` above 1
says that ours is faster. `error` is the root mean square error of sampled rows against fp64 on the
same (pruned) data, relative to the root mean square of the rows; `baseline_error` that of FA3 on
the dense data.
"""

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

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
from tests.support.timing import Timing, time_calls  # noqa: E402

PAGE, SINK, SEGMENT = 64, 64, 1024
CASES = [(1, 32768), (8, 32768), (1, 131072)]
SHARES = [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)]
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


def store(layer: Layer, share: tuple[float, float]) -> Stored:
    """The pages of the layer as prefill leaves them; a share is 0 or 1."""
    fmt, heads = layer.fmt, layer.k.shape[1]
    pages = layer.batch * layer.length // PAGE
    sparse_sides = [s > 0 for s in share]
    sink = torch.arange(pages, device="cuda") % (layer.length // PAGE) < SINK // PAGE
    dense_count = sum(int(sink.sum()) if s else pages for s in sparse_sides)
    sparse_count = sum(pages for s in sparse_sides if s)
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
        is_sparse = ~sink if sparse_sides[side] else torch.zeros_like(sink)
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
    return Stored(arena, refs, plan)


def attend(layer: Layer, stored: Stored, share: tuple[float, float]) -> torch.Tensor:
    out, _ = ops.prefill_attention(
        *(layer.q, layer.k, layer.v, stored.arena, stored.refs, stored.plan),
        *(layer.scale, layer.fmt),
        sparse_k=share[0] > 0,
        sparse_v=share[1] > 0,
    )
    return out


def sampled_error(
    layer: Layer, out: torch.Tensor, share: tuple[float, float], rows: int = 24
) -> float:
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
            if share[side] > 0 and edge > SINK:
                blocks = x[begin + SINK : begin + edge].view(-1, PAGE, *x.shape[1:]).transpose(1, 2)
                kept = torch.where(keep_2_4(blocks, side), blocks, 0.0)
                own[SINK:edge] = kept.transpose(1, 2).flatten(0, 1).double()
            kv.append(own.repeat_interleave(group, dim=1))
        weights = (torch.einsum("hd,nhd->hn", layer.q[r].double(), kv[0]) * layer.scale).softmax(-1)
        want = torch.einsum("hn,nhd->hd", weights, kv[1])
        error += float((out[r].double() - want).square().sum())
        norm += float(want.square().sum())
    return float((error / norm) ** 0.5)


def measure(call: Callable[[], object], layer: Layer) -> tuple[Timing, float]:
    """Time and TFLOP/s. No graph: a call lasts milliseconds."""
    timing = time_calls([call], rounds=2, repeats=7, graph=False)
    return timing, layer.flops / timing.micros / 1e6


def read_clock(call: Callable[[], object], micros: float) -> str:
    """What the driver reports of clock and power while calls run for about 0.6 s."""
    for _ in range(max(1, int(6e5 / micros))):
        call()
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    torch.cuda.synchronize()
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--fa3-library", type=Path)
    parser.add_argument("--output", type=Path, help="folder; results are appended to prefill.jsonl")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cases", default="", help="B x L, as 1x32768,8x32768")
    arguments = parser.parse_args()
    fa3 = fa3_forward(arguments.fa3_library)
    if fa3 is None:
        parser.error("the baseline is FlashAttention-3: install sgl_kernel or give --fa3-library")
    cases = [tuple(map(int, c.split("x"))) for c in arguments.cases.split(",") if c] or CASES
    versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    fmt = BlockFormat(arguments.head_dim, arguments.dtype)
    for batch, length in cases:
        layer = build_layer(fmt, batch, length, q_heads=32, heads=8)
        dense = [x.view(batch, length, -1, fmt.head_dim) for x in (layer.q, layer.k, layer.v)]

        def baseline(dense: list[torch.Tensor] = dense) -> torch.Tensor:
            return fa3(*dense, None, None, True)

        base, base_rate = measure(baseline, layer)
        base_error = sampled_error(layer, baseline().view_as(layer.q), (0.0, 0.0))
        print(
            f"FA3 B={batch} L={length}: {base_rate:.0f} {read_clock(baseline, base.micros)}",
            flush=True,
        )
        for share in SHARES:
            stored = store(layer, share)

            def ours(layer=layer, stored=stored, share=share) -> torch.Tensor:  # type: ignore[no-untyped-def]
                return attend(layer, stored, share)

            timing, rate = measure(ours, layer)
            again, again_rate = measure(baseline, layer)
            line = {
                "bench": "prefill",
                "case": {
                    "B": batch,
                    "L": length,
                    "sk": share[0],
                    "sv": share[1],
                    "bits": 16,
                    "D": fmt.head_dim,
                    "dtype": fmt.dtype,
                    "Hq": 32,
                    "Hkv": 8,
                },
                "unit": "TFLOP/s",
                "ours": round(rate, 1),
                "baseline": round((base_rate + again_rate) / 2, 1),
                "baseline_name": "FA3",
                "ratio": round(rate * 2 / (base_rate + again_rate), 3),
                "predicted": round(PREDICTED[share], 3),
                "spread": round(timing.spread, 3),
                "baseline_spread": round(max(base.spread, again.spread), 3),
                "error": sampled_error(layer, ours(), share),
                "baseline_error": base_error,
                "versions": versions,
                "date": datetime.date.today().isoformat(),
            }
            text = json.dumps(line)
            if arguments.output:
                with (arguments.output / "prefill.jsonl").open("a") as f:
                    f.write(text + "\n")
            print(
                f"B={batch} L={length} sk={share[0]:g} sv={share[1]:g}: {rate:.0f} TFLOP/s, "
                f"x{line['ratio']}, error {line['error']:.2e} (FA3 {base_error:.2e}), "
                f"{read_clock(ours, timing.micros)}",
                flush=True,
            )
            del stored
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
