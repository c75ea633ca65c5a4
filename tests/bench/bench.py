"""Times the kernels next to the dense ones of other libraries, one JSON line for each case.

    python tests/bench/bench.py --op decode --preset max --batch 8 --length 32768
    python tests/bench/bench.py --op compress --output tests/bench/results/h200

Decode is timed back to back in a CUDA graph; by single launches ("attention, one launch": each
between two events, with nothing in L2); and behind the kernel that a step runs before it
("attention behind store": K and V of the new tokens are stored, then attended to; the baseline
likewise).

Baselines are what the machine has: cuDNN through torch, FlashAttention-3 through sgl_kernel (or
the library given by --fa3-library), FlashInfer. `ours` and `baseline` are microseconds of a layer,
`ratio` is baseline / ours, `predicted` the same by counting bytes. Data is random, pages are
shuffled, and calls rotate over enough copies that L2 holds none of them.
"""

import argparse
import datetime
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from hs_kernels import ops  # noqa: E402
from hs_kernels.block_format import BlockFormat, Side  # noqa: E402
from hs_kernels.reference import dense_slots, write_dummy  # noqa: E402
from tests.support.timing import Timing, time_calls, time_one_by_one  # noqa: E402

PAGE = 64
SINK_PAGES, WINDOW_PAGES = 1, 4  # stay dense
DECODE_CASES = [(1, 32768), (8, 32768), (32, 32768), (1, 131072)]
SHARES = {
    "dense": (0.0, 0.0),
    "light": (0.0, 1.0),
    "max": (1.0, 1.0),
    "quarter": (0.25, 0.25),
    "half": (0.5, 0.5),
    "three quarters": (0.75, 0.75),
}
MEANS = ("light", "max")  # timed with block means of V, too
BEHIND = ((0.0, 0.0), (0.0, 1.0), (1.0, 1.0))  # shares timed behind the store
PARTS = {False: "attention behind store", True: "attention behind store, permuted"}
ROTATED_BYTES = 400 << 20  # more than any L2
Call = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """Query and kv heads and channels of one layer."""

    q_heads: int = 32
    heads: int = 8
    head_dim: int = 128

    @property
    def fmt(self) -> BlockFormat:
        return BlockFormat(self.head_dim, "bfloat16")


class Report:
    """Prints lines, and appends them to OUTPUT/<bench>.jsonl if there is an output folder."""

    def __init__(self, output: Path | None) -> None:
        self.output = output
        self.versions = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }

    def add(
        self,
        bench: str,
        case: dict[str, Any],
        ours: Timing,
        baselines: dict[str, Timing],
        predicted: float | None,
    ) -> None:
        best = min(baselines, key=lambda name: baselines[name].micros, default=None)
        base = baselines[best].micros if best else None
        line = {
            "bench": bench,
            "case": case,
            "unit": "us",
            "ours": round(ours.micros, 2),
            "spread": round(ours.spread, 4),
            "baseline": base and round(base, 2),
            "baseline_name": best,
            "ratio": base and round(base / ours.micros, 3),
            "predicted": predicted and round(predicted, 3),
            "baselines": {name: round(t.micros, 2) for name, t in baselines.items()},
            "versions": self.versions,
            "date": datetime.date.today().isoformat(),
        }
        short = {k: line[k] for k in ("ours", "spread", "baseline", "ratio", "predicted")}
        print(bench, case, short, line["baseline_name"], flush=True)
        if self.output:
            self.output.mkdir(parents=True, exist_ok=True)
            with (self.output / f"{bench}.jsonl").open("a") as file:
                file.write(json.dumps(line) + "\n")


# --- the cache of a decode case ------------------------------------------------------------------


@dataclass(frozen=True)
class Cache:
    """One layer's arena with `copies` batches behind shuffled pages and slots."""

    arena: torch.Tensor
    refs: torch.Tensor
    tables: list[torch.Tensor]
    stored_bytes: int  # of one copy
    mean_bytes: int  # of its sparse V blocks, if they are stored without their means
    means: torch.Tensor | None = None

    def with_means(self, fmt: BlockFormat) -> "Cache":
        heads = self.refs.shape[2]
        slots = self.arena.numel() // (heads * fmt.sparse_bytes)
        means = torch.randn((slots, heads, fmt.head_dim), device="cuda").to(fmt.torch_dtype)
        return replace(self, means=means, stored_bytes=self.stored_bytes + self.mean_bytes)


def build_cache(
    shape: Shape, batch: int, length: int, share: tuple[float, float], copies: int
) -> Cache:
    fmt, heads = shape.fmt, shape.heads
    pages = -(-length // PAGE)
    total = batch * pages * copies
    candidate = torch.ones(pages, dtype=torch.bool, device="cuda")
    candidate[:SINK_PAGES] = candidate[max(0, pages - WINDOW_PAGES) :] = False
    count = int(candidate.sum())
    sparse = torch.zeros((2, batch * copies, pages), dtype=torch.bool, device="cuda")
    for side in Side:
        rank = torch.rand(batch * copies, count, device="cuda").argsort(-1).argsort(-1)
        sparse[side][:, candidate] = rank < -(-int(share[side] * 1000) * count // 1000)
    table = (1 + torch.randperm(total, device="cuda")).view(batch * copies, pages).int()

    num_sparse = int(sparse.sum())
    num_dense = sparse.numel() - num_sparse
    dense_supers = 1 + -(-num_dense // fmt.dense_per_superblock)
    supers = dense_supers + -(-num_sparse // fmt.sparse_per_superblock)
    dense_free = torch.randperm(num_dense, device="cuda") + fmt.dense_per_superblock
    sparse_free = (
        torch.randperm(num_sparse, device="cuda") + dense_supers * fmt.sparse_per_superblock
    )
    arena = torch.empty(supers * heads * fmt.superblock_bytes, dtype=torch.uint8, device="cuda")
    write_dummy(arena, fmt, heads)
    dense = dense_slots(arena, fmt, heads)
    dense[: num_dense + fmt.dense_per_superblock].normal_()

    of_page = torch.zeros((2, total + 1), dtype=torch.int32, device="cuda")
    ref = torch.empty(sparse.shape, dtype=torch.int32, device="cuda")
    ref[~sparse] = dense_free.int()
    ref[sparse] = -sparse_free.int()
    for side in Side:
        of_page[side][table.flatten().long()] = ref[side].flatten()
        mine = ref[side][sparse[side]]
        for chunk in mine.split(2048):
            blocks = torch.randn(
                (len(chunk), heads, PAGE, shape.head_dim), dtype=torch.bfloat16, device="cuda"
            )
            ops.store_blocks(blocks, side, arena, chunk[:, None].expand(-1, heads), fmt)
    write_dummy(arena, fmt, heads)
    refs = of_page[:, :, None].expand(-1, -1, heads).contiguous()
    stored = heads * (num_dense * fmt.dense_bytes + num_sparse * fmt.sparse_bytes) // copies
    mean_bytes = heads * int(sparse[Side.V].sum()) * fmt.head_dim * fmt.itemsize // copies
    return Cache(arena, refs, list(table.view(copies, batch, pages)), stored, mean_bytes)


@dataclass(frozen=True)
class Step:
    """Q, K and V of a decode step, and how the channels of Q and K are reordered, if they are."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    order: torch.Tensor | None

    @classmethod
    def random(cls, shape: Shape, batch: int, permuted: bool) -> "Step":
        q, k, v = (
            torch.randn((batch, heads, shape.head_dim), device="cuda").bfloat16()
            for heads in (shape.q_heads, shape.heads, shape.heads)
        )
        if not permuted:
            return cls(q, k, v, None)
        orders = torch.rand((shape.heads, shape.head_dim), device="cuda").argsort(-1)
        return cls(q, k, v, orders.int())

    def store(
        self, arena: torch.Tensor, refs: torch.Tensor, locations: torch.Tensor, fmt: BlockFormat
    ) -> torch.Tensor:
        return ops.store_tokens(self.k, self.v, self.q, arena, refs, locations, fmt, self.order)


def decode_calls(
    shape: Shape, cache: Cache, batch: int, length: int, step: Step | None = None
) -> tuple[list[Call], Call]:
    """Attention over each copy, behind the store of `step` if there is one, and the plan of one."""
    q = torch.randn((batch, shape.q_heads, shape.head_dim), device="cuda").bfloat16()
    lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
    scale = shape.head_dim**-0.5

    def call(table: torch.Tensor) -> Call:
        workspace = ops.decode_workspace(batch, shape.q_heads, shape.heads, shape.fmt, q.device)
        ops.plan_decode(workspace, cache.refs, table, lens)
        last = length - 1
        locations = (table[:, last // PAGE].long() * PAGE + last % PAGE).contiguous()

        def attend() -> object:
            queries = q
            if step is not None:
                queries = step.store(cache.arena, cache.refs, locations, shape.fmt)
            return ops.decode_attention(
                *(queries, cache.arena, cache.refs, table, lens, scale, shape.fmt),
                workspace=workspace,
                means=cache.means,
            )

        return attend

    first = ops.decode_workspace(batch, shape.q_heads, shape.heads, shape.fmt, q.device)

    def plan() -> None:
        ops.plan_decode(first, cache.refs, cache.tables[0], lens)

    return [call(table) for table in cache.tables], plan


# --- baselines ----------------------------------------------------------------------------------


def fa3_forward(library: Path | None) -> Callable[..., torch.Tensor] | None:
    """FlashAttention-3's forward with the arguments that the benchmarks vary, or None."""
    if library is not None:
        torch.ops.load_library(str(library))
    elif importlib.util.find_spec("sgl_kernel") is not None:
        importlib.import_module("sgl_kernel.flash_attn")
    else:
        return None

    def forward(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lens: torch.Tensor | None,
        table: torch.Tensor | None,
        causal: bool,
        pack_gqa: bool | None = None,
    ) -> torch.Tensor:
        before = [q, k, v, None, None, None, None, None, None, None, None, lens, None, None]
        before += [table, *[None] * 5, None, None, None, q.shape[-1] ** -0.5, causal, -1, -1]
        after = [0, 0.0, True, None, 0, pack_gqa, 0, None, None, False]
        result: torch.Tensor = torch.ops.sgl_kernel.fwd.default(*before, *after)[0]
        return result

    return forward


@dataclass
class Baselines:
    """Times of the dense kernels by name: in a graph, by single launches, and of cuDNN behind the
    store of a step, by whether that permutes."""

    graph: dict[str, Timing] = field(default_factory=dict)
    single: dict[str, Timing] = field(default_factory=dict)
    behind: dict[bool, dict[str, Timing]] = field(default_factory=lambda: {x: {} for x in PARTS})

    def time(self, name: str, calls: list[Call]) -> None:
        self.graph[name] = time_calls(calls)
        self.single[name] = time_one_by_one(calls[0])


def decode_baselines(
    shape: Shape, batch: int, length: int, fa3: Callable[..., torch.Tensor] | None
) -> Baselines:
    bytes_each = 2 * batch * length * shape.heads * shape.head_dim * 2
    copies = max(1, min(4, -(-ROTATED_BYTES // bytes_each)))
    pages = length // PAGE
    q = torch.randn((batch, shape.q_heads, shape.head_dim), device="cuda").bfloat16()
    found = Baselines()
    if fa3 is not None:
        shape_k = (copies * batch * pages, PAGE, shape.heads, shape.head_dim)
        k, v = (torch.randn(shape_k, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        order = torch.randperm(copies * batch * pages, device="cuda")
        tables = order.int().view(copies, batch, pages)
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        for name, pack in (("FA3", None), ("FA3 pack_gqa", True)):
            calls = [
                lambda t=t, pack=pack: fa3(q[:, None], k, v, lens, t, False, pack) for t in tables
            ]
            found.time(name, calls)
        del k, v
    _flashinfer_decode(found, shape, q, batch, length, copies)
    kv = [
        torch.randn(
            (2, batch, shape.heads, length, shape.head_dim), dtype=torch.bfloat16, device="cuda"
        )
        for _ in range(copies)
    ]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        calls = [
            lambda x=x: scaled_dot_product_attention(q[:, :, None], x[0], x[1], enable_gqa=True)
            for x in kv
        ]
        found.time("cuDNN", calls)
        for permuted in PARTS:
            store = _store_elsewhere(shape, Step.random(shape, batch, permuted))
            pairs = [lambda call=call: (store(), call()) for call in calls]  # noqa: B023
            found.behind[permuted] = {"cuDNN": time_calls(pairs)}
    return found


def _store_elsewhere(shape: Shape, step: Step) -> Call:
    """The step's tokens into pages of an arena of their own."""
    fmt, heads, batch = shape.fmt, shape.heads, len(step.k)
    size = (2 * batch + 1) * heads * fmt.dense_bytes
    arena = torch.empty(size, dtype=torch.uint8, device="cuda")
    slots = torch.arange(2 * batch + 1, device="cuda").int()
    sides = torch.stack([slots[: batch + 1], slots.roll(-batch)[: batch + 1]])
    sides[:, 0] = 0
    refs = sides[:, :, None].expand(-1, -1, heads).contiguous()
    locations = PAGE * torch.arange(1, batch + 1, device="cuda") + PAGE - 1
    return lambda: step.store(arena, refs, locations, fmt)


def _flashinfer_decode(
    found: Baselines, shape: Shape, q: torch.Tensor, batch: int, length: int, copies: int
) -> None:
    if importlib.util.find_spec("flashinfer") is None:
        return
    flashinfer = importlib.import_module("flashinfer")
    pages = length // PAGE
    shape_kv = (copies * batch * pages, 2, PAGE, shape.heads, shape.head_dim)
    kv = torch.randn(shape_kv, dtype=torch.bfloat16, device="cuda")
    order = torch.randperm(copies * batch * pages, device="cuda").int().view(copies, -1)
    calls = []
    for indices in order:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(512 << 20, dtype=torch.uint8, device="cuda"), use_tensor_cores=True
        )
        indptr = torch.arange(batch + 1, dtype=torch.int32) * pages
        last = torch.full((batch,), PAGE, dtype=torch.int32)
        wrapper.plan(
            *(indptr, indices, last, shape.q_heads, shape.heads, shape.head_dim, PAGE),
            q_data_type=torch.bfloat16,
        )
        calls.append(lambda w=wrapper: w.run(q, kv))
    found.time("FlashInfer", calls)


# --- the benchmarks -----------------------------------------------------------------------------


def bench_decode(arguments: argparse.Namespace, report: Report) -> None:
    shape = Shape()
    fa3 = fa3_forward(arguments.fa3_library)
    cases = [(b, n) for b in arguments.batch for n in arguments.length]
    for batch, length in cases or DECODE_CASES:
        base = Baselines()
        if not arguments.no_baselines:
            base = decode_baselines(shape, batch, length, fa3)
        dense_bytes = 2 * batch * length * shape.heads * shape.head_dim * 2
        for preset in arguments.preset or list(SHARES):
            share = SHARES[preset]
            copies = max(1, min(8, -(-ROTATED_BYTES // (dense_bytes // 2))))
            cache = build_cache(shape, batch, length, share, copies)
            case = {
                "B": batch,
                "L": length,
                "sk": share[0],
                "sv": share[1],
                "bits": 16,
                "policy": preset,
                "part": "attention",
            }
            calls, plan = decode_calls(shape, cache, batch, length)
            predicted = dense_bytes / cache.stored_bytes
            report.add("decode", case, time_calls(calls), base.graph, predicted)
            single = case | {"part": "attention, one launch"}
            report.add("decode", single, time_one_by_one(calls[0]), base.single, predicted)
            for permuted, part in PARTS.items() if share in BEHIND else ():
                step = Step.random(shape, batch, permuted)
                pairs, _ = decode_calls(shape, cache, batch, length, step)
                pair = case | {"part": part}
                report.add("decode", pair, time_calls(pairs), base.behind[permuted], predicted)
                del pairs
            if preset == "max" and not arguments.no_plan:
                report.add("decode", case | {"part": "plan"}, time_calls([plan]), {}, None)
            if preset in MEANS:
                cache = cache.with_means(shape.fmt)
                ours = time_calls(decode_calls(shape, cache, batch, length)[0])
                case["part"] = "attention, block means"
                report.add("decode", case, ours, base.graph, dense_bytes / cache.stored_bytes)
            del cache, calls, plan
            torch.cuda.empty_cache()


def bench_compress(arguments: argparse.Namespace, report: Report) -> None:
    shape = Shape()
    fa3 = None if arguments.no_baselines else fa3_forward(arguments.fa3_library)
    for length in arguments.length or [32768, 131072]:
        _bench_compress(shape, length, fa3, report)


def _bench_compress(
    shape: Shape, length: int, fa3: Callable[..., torch.Tensor] | None, report: Report
) -> None:
    fmt, heads, pages = shape.fmt, shape.heads, length // PAGE
    tokens = (length, heads, shape.head_dim)
    kv = [torch.randn(tokens, dtype=torch.bfloat16, device="cuda") for _ in Side]
    q = torch.randn((length, shape.q_heads, shape.head_dim), device="cuda").bfloat16()
    base: dict[str, Timing] = {}
    if fa3 is not None:
        attention = [lambda: fa3(q[None], kv[0][None], kv[1][None], None, None, True)]
        base["FA3 prefill"] = time_calls(attention, rounds=1, repeats=3, graph=False)
    supers = 2 + 4 * pages // fmt.dense_per_superblock
    arena = torch.empty(supers * heads * fmt.superblock_bytes, dtype=torch.uint8, device="cuda")
    refs = torch.zeros((2, pages + 1, heads), dtype=torch.int32, device="cuda")
    slots = (fmt.sparse_per_superblock + torch.randperm(2 * pages, device="cuda")).int()
    slots = slots.view(2, pages)
    blocks = [x.view(pages, PAGE, heads, shape.head_dim).transpose(1, 2) for x in kv]

    chosen = -slots[:, :, None].expand(-1, -1, heads).contiguous()

    def whole(side: Side) -> Call:
        """Every page sparse: one pass."""
        return lambda: ops.store_blocks(blocks[side], side, arena, chosen[side], fmt)

    def half() -> Call:
        """Half of each segment of 16 pages sparse: losses, ranks, refs, then both kinds stored."""
        segment = min(16, pages)
        table = torch.arange(1, pages + 1, device="cuda").int().view(-1, segment)
        counts = torch.full((len(table),), segment // 2, dtype=torch.int32, device="cuda")

        def call() -> None:
            for side in Side:
                losses = ops.block_losses(blocks[side], side, fmt).view(-1, segment, heads)
                ranks = ops.rank_blocks(losses.transpose(1, 2))
                mine = slots[side].view(-1, segment)
                assigned = ops.assign_refs(refs[side], table, mine, counts, ranks)
                ops.store_blocks(blocks[side], side, arena, assigned.flatten(0, 1), fmt)

        return call

    mix = torch.randn((heads, shape.head_dim, shape.head_dim), device="cuda").double()
    covariance = mix @ mix.mT / shape.head_dim + 0.1 * torch.eye(shape.head_dim, device="cuda")
    factor = torch.linalg.cholesky(torch.linalg.inv(covariance), upper=True).float()
    weights = torch.rand((heads, shape.head_dim), device="cuda") + 0.5
    slots_of_arena = arena.numel() // (heads * fmt.sparse_bytes)
    means = torch.zeros((slots_of_arena, heads, shape.head_dim), device="cuda").bfloat16()
    query = torch.randn((heads, shape.head_dim), device="cuda") * shape.head_dim**-0.5

    def calibrated(side: Side) -> Call:
        """Every page sparse, as the calibrated pruner wants it."""

        def keys() -> None:
            ops.store_blocks(
                *(blocks[Side.K], Side.K, arena, chosen[Side.K], fmt),
                weights=weights,
                factor=factor,
            )

        def values() -> None:
            ops.store_blocks(
                *(blocks[Side.V], Side.V, arena, chosen[Side.V], fmt),
                means=means,
                token_weights=ops.token_weights(blocks[Side.K], query),
            )

        return keys if side == Side.K else values

    read, written = pages * heads * fmt.dense_bytes, pages * heads * fmt.sparse_bytes
    mean_bytes = pages * heads * shape.head_dim * fmt.itemsize
    both = 2 * (read + written)
    for name, pruner, call, share, moved in (
        ("values", "magnitude", whole(Side.V), (0.0, 1.0), read + written),
        ("keys", "magnitude", whole(Side.K), (1.0, 0.0), read + written),
        (
            *("both", "magnitude"),
            lambda: ops.store_pages(*blocks, arena, chosen, fmt),
            *((1.0, 1.0), both),
        ),
        ("both, ranked", "magnitude", half(), (0.5, 0.5), 4 * read + read + written),
        ("values", "calibrated", calibrated(Side.V), (0.0, 1.0), 2 * read + written + mean_bytes),
        ("keys", "calibrated", calibrated(Side.K), (1.0, 0.0), read + written),
    ):
        case = {
            "L": length,
            "sk": share[0],
            "sv": share[1],
            "bits": 16,
            "part": name,
            "pruner": pruner,
            "bytes": moved,
        }
        report.add("compress", case, time_calls([call]), base, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", choices=["decode", "compress"], action="append")
    parser.add_argument("--preset", choices=list(SHARES), action="append")
    parser.add_argument("--batch", type=int, action="append", default=[])
    parser.add_argument("--length", type=int, action="append", default=[])
    parser.add_argument("--output", type=Path, help="folder that results are appended to")
    parser.add_argument("--fa3-library", type=Path, help="a shared library with sgl_kernel::fwd")
    parser.add_argument("--no-baselines", action="store_true")
    parser.add_argument("--no-plan", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks need a CUDA device")
    report = Report(arguments.output)
    for op in arguments.op or ["decode", "compress"]:
        {"decode": bench_decode, "compress": bench_compress}[op](arguments, report)


if __name__ == "__main__":
    main()
