"""Mixed caches, batches and the slow, obvious attention that every operator is compared with.

Everything here is built from values that are known before they are packed, so an oracle never
reads a packed block. Unused arena bytes are NaN in every element type: a read of the wrong slot,
or of a tail past the end of a sequence, does not go unnoticed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hs_kernels.block_format import HEAD_DIMS, BlockFormat, Side, dense_ref, sparse_ref
from hs_kernels.reference import (
    TILE,
    PrefillPlan,
    dense_slots,
    keep_2_4,
    pack_blocks,
    sparse_slots,
    write_dummy,
)

PAGE = 64
DTYPES = ("float16", "bfloat16", "float32")
ALL_FORMATS = [BlockFormat(head_dim, dtype) for head_dim in HEAD_DIMS for dtype in DTYPES]

# Share of sparse blocks of (K, V): what a batch can hold, each alone and mixed.
ALL_SHARES = [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0), (0.5, 0.5), (0.0, 0.5), (0.5, 1.0)]

# Lengths around every boundary that decode knows: nothing, pages, many pages.
EDGE_LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 320, 640, 1000]


@dataclass(frozen=True)
class MixedCache:
    """An arena with `num_pages` pages behind random refs, and what they hold.

    contents [2, P, Hkv, 64, D] in the format's dtype is what a reader of refs must see; spare
    names dense slots that no page uses. With means [sparse slots, Hkv, D] (see `with_means`),
    contents are f32.
    """

    fmt: BlockFormat
    heads: int
    arena: Tensor
    refs: Tensor
    contents: Tensor
    spare: list[int]
    means: Tensor | None = None

    def to(self, device: torch.device | str) -> "MixedCache":
        means = None if self.means is None else self.means.to(device)
        return replace(self, arena=self.arena.to(device), refs=self.refs.to(device), means=means)


def build_cache(
    fmt: BlockFormat,
    heads: int,
    num_pages: int,
    share: tuple[float, float] = (0.5, 0.5),
    *,
    spare: int = 0,
    seed: int = 0,
) -> MixedCache:
    """Pages 1 .. num_pages - 1 in shuffled slots; each block is sparse with its side's share."""
    rng = torch.Generator().manual_seed(seed)
    blocks = 2 * num_pages
    dense_supers = -(-(blocks + spare) // fmt.dense_per_superblock)
    sparse_supers = -(-blocks // fmt.sparse_per_superblock)
    total = 1 + dense_supers + sparse_supers
    arena = torch.full((total * heads * fmt.superblock_bytes,), 0xFF, dtype=torch.uint8)
    write_dummy(arena, fmt, heads)

    order = (1 + torch.randperm(total - 1, generator=rng)).tolist()
    dense_free = _slots_of(order[:dense_supers], fmt.dense_per_superblock, rng)
    sparse_free = _slots_of(order[dense_supers:], fmt.sparse_per_superblock, rng)

    shape = (2, num_pages, heads, fmt.block_size, fmt.head_dim)
    values = torch.randn(shape, generator=rng).to(fmt.torch_dtype)
    refs = torch.zeros(shape[:3], dtype=torch.int32)
    contents = torch.zeros(shape, dtype=fmt.torch_dtype)
    dense, sparse = dense_slots(arena, fmt, heads), sparse_slots(arena, fmt, heads)
    for side in Side:
        is_sparse = torch.rand((num_pages, heads), generator=rng) < share[side]
        for page in range(1, num_pages):
            dense_slot, sparse_slot = dense_free.pop(), sparse_free.pop()
            x = values[side, page]
            pruned = torch.where(keep_2_4(x, side), x, torch.zeros_like(x))
            packed = pack_blocks(x, side, fmt)
            for head in range(heads):
                if is_sparse[page, head]:
                    sparse[sparse_slot, head] = packed[head]
                    contents[side, page, head] = pruned[head]
                    refs[side, page, head] = sparse_ref(sparse_slot)
                else:
                    dense[dense_slot, head] = x[head]
                    contents[side, page, head] = x[head]
                    refs[side, page, head] = dense_ref(dense_slot)
    return MixedCache(fmt, heads, arena, refs, contents, dense_free)


def with_means(cache: MixedCache, seed: int = 0) -> MixedCache:
    """The same blocks, with a mean of large numbers for every sparse V block; those of slots that
    hold no V block are NaN, and slot 0's is zero."""
    rng = torch.Generator().manual_seed(seed + 7)
    slots = sparse_slots(cache.arena, cache.fmt, cache.heads).shape[0]
    shape = (slots, cache.heads, cache.fmt.head_dim)
    means = torch.full(shape, torch.nan, dtype=cache.fmt.torch_dtype)
    means[0] = 0
    contents = cache.contents.float()
    refs = cache.refs[Side.V]
    for page, head in (refs < 0).nonzero().tolist():
        mean = 4 * torch.randn(cache.fmt.head_dim, generator=rng)
        means[-refs[page, head], head] = mean.to(cache.fmt.torch_dtype)
        contents[Side.V, page, head] += means[-refs[page, head], head].float()
    return replace(cache, contents=contents, means=means)


def _slots_of(supers: Sequence[int], per: int, rng: torch.Generator) -> list[int]:
    slots = torch.tensor([s * per + i for s in supers for i in range(per)])
    return slots[torch.randperm(len(slots), generator=rng)].tolist()


# --- decode -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DecodeCase:
    """Inputs of `decode_attention`; q [R, Hq, D]."""

    cache: MixedCache
    q: Tensor
    page_table: Tensor
    seq_lens: Tensor
    scale: float


def build_decode_case(
    fmt: BlockFormat,
    heads: int,
    group: int,
    lengths: Sequence[int],
    share: tuple[float, float] = (0.5, 0.5),
    *,
    seed: int = 0,
) -> DecodeCase:
    """A ragged batch; rows of the page table share pages, as prefixes do, and end in page 0."""
    rng = torch.Generator().manual_seed(seed + 1)
    most = max([1, *(-(-n // PAGE) for n in lengths)])
    cache = build_cache(fmt, heads, most + 4, share, seed=seed)
    table = torch.zeros((len(lengths), most + 1), dtype=torch.int32)
    for r, n in enumerate(lengths):
        used = -(-n // PAGE)
        table[r, :used] = 1 + torch.randperm(most + 3, generator=rng)[:used].to(torch.int32)
    q = torch.randn((len(lengths), heads * group, fmt.head_dim), generator=rng)
    lens = torch.tensor(lengths, dtype=torch.int32)
    return DecodeCase(cache, q.to(fmt.torch_dtype), table, lens, fmt.head_dim**-0.5)


def naive_decode(case: DecodeCase) -> tuple[Tensor, Tensor]:
    """out f64 [R, Hq, D] and lse f64 [R, Hq], key by key as the definition says."""
    rows = []
    for r, n in enumerate(case.seq_lens.tolist()):
        pages = case.page_table[r, : -(-n // PAGE)].long()
        k, v = (
            case.cache.contents[side][pages].transpose(0, 1).flatten(1, 2)[:, :n] for side in Side
        )
        rows.append(_naive_row(case.q[r], k, v, case.scale))
    return torch.stack([o for o, _ in rows]), torch.stack([z for _, z in rows])


def _naive_row(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """One query q [Hq, D] over k, v [Hkv, n, D], in fp64."""
    group = q.shape[0] // k.shape[0]
    k, v = (x.double().repeat_interleave(group, dim=0) for x in (k, v))
    if k.shape[1] == 0:
        return torch.zeros(q.shape).double(), torch.full(q.shape[:1], -torch.inf).double()
    scores = torch.einsum("hd,hnd->hn", q.double(), k) * scale
    return torch.einsum("hn,hnd->hd", scores.softmax(-1), v), scores.logsumexp(-1)


# --- prefill ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """Rows [a, b) of one request and the frontier page of each of its tiles."""

    a: int
    b: int
    frontiers: tuple[int, ...]


def num_tiles(a: int, b: int) -> int:
    return -(-b // TILE) - a // TILE if b > a else 0


def segment_chunk(a: int, b: int, segment: int) -> Chunk:
    """The segment rule: the frontier is the first page of the tile's own segment."""
    starts = [(a // TILE + j) * TILE for j in range(num_tiles(a, b))]
    return Chunk(a, b, tuple(t // segment * segment // PAGE for t in starts))


def anchored_chunk(a: int, b: int, window: int) -> Chunk:
    """anchor="chunk": one frontier before the last `window` tokens of the chunk's end."""
    return Chunk(a, b, (max(0, b - window) // PAGE,) * num_tiles(a, b))


@dataclass(frozen=True)
class PrefillCase:
    """Inputs of `prefill_attention`; q [T, Hq, D], k and v [T, Hkv, D].

    tails[r][side] [Hkv, n, D] are the dense tokens of request r from page tail_first[r] to `a`.
    """

    cache: MixedCache
    chunks: tuple[Chunk, ...]
    q: Tensor
    k: Tensor
    v: Tensor
    plan: PrefillPlan
    tails: list[list[Tensor]]
    scale: float


def build_prefill_case(
    fmt: BlockFormat,
    heads: int,
    group: int,
    chunks: Sequence[Chunk],
    share: tuple[float, float] = (0.5, 0.5),
    *,
    early_tail: int = 0,
    extra: int = 0,
    seed: int = 0,
) -> PrefillCase:
    """A ragged batch. The tail slots begin `early_tail` pages before the lowest frontier.

    The cache has at least `extra` dense slots to spare besides those of the tails.

    Tail tokens are unrelated to what refs say of the same pages, so reading one for the other is
    an error that shows; a begun page is NaN from `a` on.
    """
    rng = torch.Generator().manual_seed(seed + 2)
    pages = max([1, *(-(-c.b // PAGE) for c in chunks)])
    lowest = [min(c.frontiers, default=0) for c in chunks]
    first = [max(0, low - early_tail) for low in lowest]
    counts = [max(0, -(-c.a // PAGE) - f) for c, f in zip(chunks, first, strict=True)]
    cache = build_cache(fmt, heads, pages + 3, share, spare=2 * sum(counts) + extra, seed=seed)
    dense = dense_slots(cache.arena, fmt, heads)
    spare = list(cache.spare)

    table = torch.zeros((len(chunks), pages + 1), dtype=torch.int32)
    tail_slots = torch.zeros((len(chunks), 2, max([1, *counts])), dtype=torch.int32)
    tails: list[list[Tensor]] = []
    for r, chunk in enumerate(chunks):
        reach = max(chunk.frontiers, default=0)
        table[r, :reach] = 1 + torch.randperm(pages + 2, generator=rng)[:reach].to(torch.int32)
        tails.append([])
        for side in Side:
            length = max(0, chunk.a - first[r] * PAGE)
            x = torch.randn((heads, length, fmt.head_dim), generator=rng).to(fmt.torch_dtype)
            for i in range(counts[r]):
                slot = spare.pop()
                tail_slots[r, side, i] = slot
                part = x[:, i * PAGE : (i + 1) * PAGE]
                dense[slot, :, : part.shape[1]] = part
            tails[r].append(x)

    tokens = sum(c.b - c.a for c in chunks)
    q = torch.randn((tokens, heads * group, fmt.head_dim), generator=rng).to(fmt.torch_dtype)
    k, v = (
        torch.randn((tokens, heads, fmt.head_dim), generator=rng).to(fmt.torch_dtype)
        for _ in range(2)
    )
    plan = PrefillPlan(
        cu_seqlens=_offsets([c.b - c.a for c in chunks]),
        prefix_lens=_int32([c.a for c in chunks]),
        page_table=table,
        tail_first=_int32(first),
        tail_slots=tail_slots,
        tile_offsets=_offsets([len(c.frontiers) for c in chunks]),
        frontiers=_int32([f for c in chunks for f in c.frontiers]),
    )
    cache = replace(cache, spare=spare)
    return PrefillCase(cache, tuple(chunks), q, k, v, plan, tails, fmt.head_dim**-0.5)


def naive_prefill(case: PrefillCase) -> tuple[Tensor, Tensor]:
    """out f64 [T, Hq, D] and lse f64 [T, Hq], row by row as the rules say."""
    rows: list[tuple[Tensor, Tensor]] = []
    begins = case.plan.cu_seqlens.tolist()
    for r, chunk in enumerate(case.chunks):
        first = int(case.plan.tail_first[r])
        for t in range(chunk.a, chunk.b):
            frontier = chunk.frontiers[t // TILE - chunk.a // TILE]
            stored = range(min(frontier * PAGE, t + 1))
            tail = range(len(stored), min(chunk.a, t + 1))
            own = range(max(len(stored), chunk.a), t + 1)
            k, v = (
                torch.cat(
                    [
                        _positions(case.cache, side, case.plan.page_table[r], stored),
                        case.tails[r][side][:, [p - first * PAGE for p in tail]],
                        x[[begins[r] + p - chunk.a for p in own]].transpose(0, 1),
                    ],
                    dim=1,
                )
                for side, x in ((Side.K, case.k), (Side.V, case.v))
            )
            rows.append(_naive_row(case.q[len(rows)], k, v, case.scale))
    if not rows:
        return case.q.double(), case.q.double()[..., 0]
    return torch.stack([o for o, _ in rows]), torch.stack([z for _, z in rows])


def _positions(cache: MixedCache, side: Side, pages: Tensor, positions: range) -> Tensor:
    """[Hkv, n, D] of the stored contents at positions of the sequence with these pages."""
    at = torch.arange(positions.start, positions.stop)
    return cache.contents[side][pages[at // PAGE].long(), :, at % PAGE].transpose(0, 1)


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _offsets(counts: Sequence[int]) -> Tensor:
    return torch.cat([torch.zeros(1), torch.tensor(counts).cumsum(0)]).to(torch.int32)
