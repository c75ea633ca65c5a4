"""Times what the channel permutation of the calibrated pruner adds to a layer.

    python tests/bench/bench_permutation.py --fa3-library LIBRARY --output tests/bench/results/h200

`ours` is a layer that permutes Q and K, `baseline` the same layer without, in microseconds, and
`added` the permutation's share of it. A layer is that of Llama-3.1-8B in bf16: its four products as
torch runs them (no norms, no RoPE, no activation), storing K and V, and attention: in decode over
stored pages of K and V all sparse, in prefill FlashAttention-3 over the chunk. Every part is timed
alone and times are added up, since two runs of a layer differ by more than a thousandth of it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from hs_kernels import ops  # noqa: E402
from hs_kernels.reference import write_dummy  # noqa: E402
from tests.bench.bench import PAGE, Shape, build_cache, decode_calls, fa3_forward  # noqa: E402
from tests.support.timing import time_calls  # noqa: E402

HIDDEN, INTERMEDIATE = 4096, 14336
COPIES = 4  # of what is read, so that L2 keeps none of it
DECODE = [(1, 32768), (1, 131072), (8, 32768), (32, 32768)]
PREFILL = [32768]


def products(shape: Shape, rows: int) -> float:
    """Microseconds of a layer's products."""
    qkv = (shape.q_heads + 2 * shape.heads) * shape.head_dim
    sizes = (
        *((HIDDEN, qkv), (shape.q_heads * shape.head_dim, HIDDEN)),
        *((HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN)),
    )
    total = 0.0
    for inner, outer in sizes:
        x = torch.randn((rows, inner), device="cuda").bfloat16()
        weights = [torch.randn((inner, outer), device="cuda").bfloat16() for _ in range(COPIES)]
        calls = [lambda x=x, w=w: x @ w for w in weights]
        total += time_calls(calls).micros
    return total


def stores(shape: Shape, rows: int, permuted: bool, decode: bool) -> float:
    """Microseconds of storing the K and V of `rows` new tokens, with or without permuting: one
    launch in decode; in prefill the permutation of Q and K goes before."""
    fmt, heads = shape.fmt, shape.heads
    pages = rows if decode else -(-rows // PAGE)
    supers = 2 + 2 * pages // fmt.dense_per_superblock
    order = torch.stack([torch.randperm(shape.head_dim) for _ in range(heads)]).int().cuda()
    order_given = order if permuted else None
    slots = 1 + torch.arange(2 * (pages + 1), dtype=torch.int32, device="cuda")
    refs = slots.view(2, -1, 1).expand(-1, -1, heads).contiguous()
    place = torch.arange(rows, device="cuda")
    locations = (1 + place) * PAGE + 5 if decode else PAGE + place
    calls = []
    for _ in range(COPIES):
        arena = torch.empty(supers * heads * fmt.superblock_bytes, dtype=torch.uint8, device="cuda")
        write_dummy(arena, fmt, heads)
        q, k, v = (
            torch.randn((rows, n, shape.head_dim), device="cuda").bfloat16()
            for n in (shape.q_heads, heads, heads)
        )

        def call(arena=arena, q=q, k=k, v=v) -> None:  # type: ignore[no-untyped-def]
            if decode:
                ops.store_tokens(k, v, q, arena, refs, locations, fmt, order_given)
                return
            if permuted:
                q, k = ops.permute_channels(q, order), ops.permute_channels(k, order)
            ops.store_tokens(k, v, q, arena, refs, locations, fmt)

        calls.append(call)
    return time_calls(calls).micros


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fa3-library", type=Path, help="a shared library with sgl_kernel::fwd")
    parser.add_argument("--output", type=Path, help="folder that results are appended to")
    arguments = parser.parse_args()
    fa3 = fa3_forward(arguments.fa3_library)
    if fa3 is None:
        parser.error("prefill's attention is FlashAttention-3: install sgl_kernel or give its path")
    shape = Shape()
    cases = [(b, n, "decode") for b, n in DECODE] + [(1, n, "prefill") for n in PREFILL]
    for batch, length, phase in cases:
        decode = phase == "decode"
        rows = batch if decode else length
        if decode:
            cache = build_cache(shape, batch, length, (1.0, 1.0), COPIES)
            attention = time_calls(decode_calls(shape, cache, batch, length)[0]).micros
            del cache
        else:
            q, k, v = (
                torch.randn((1, rows, n, shape.head_dim), device="cuda").bfloat16()
                for n in (shape.q_heads, shape.heads, shape.heads)
            )
            calls = [lambda q=q, k=k, v=v: fa3(q, k, v, None, None, True)]
            attention = time_calls(calls, repeats=3, graph=False).micros
        with_it, without = (stores(shape, rows, permuted, decode) for permuted in (True, False))
        rest = products(shape, rows) + attention
        line = {
            "bench": phase,
            "case": {"B": batch, "L": length, "part": "channel permutation", "policy": "max"},
            "unit": "us",
            "ours": round(rest + with_it, 2),
            "baseline": round(rest + without, 2),
            "baseline_name": "the same layer without",
            "ratio": round((rest + without) / (rest + with_it), 4),
            "added": round((with_it - without) / (rest + without), 5),
            "parts": {
                "attention": round(attention, 2),
                "store": round(without, 2),
                "store, permuted": round(with_it, 2),
            },
            "versions": {"device": torch.cuda.get_device_name(), "torch": torch.__version__},
            "date": datetime.date.today().isoformat(),
        }
        print(phase, line["case"], line["parts"], f"added {100 * line['added']:.2f} %", flush=True)
        if arguments.output:
            arguments.output.mkdir(parents=True, exist_ok=True)
            with (arguments.output / f"{phase}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
