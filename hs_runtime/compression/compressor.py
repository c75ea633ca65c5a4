"""Prunes, packs and re-points: the device side of compression, on the forward stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count

import torch
from torch import Tensor

from hs_kernels import ops
from hs_kernels.block_format import BlockKind, Side
from hs_kernels.reference import unpack_blocks
from hs_runtime.policies.pruner import Pruner, select
from hs_runtime.pool.block_pool import DENSE, SPARSE, BlockPool, CompressionError, Convert

# What a pruner or a shape may raise. Anything else, an error of the device above all, leaves memory
# in an unknown state and must end the process.
RECOVERABLE = (
    ArithmeticError,
    AssertionError,
    LookupError,
    TypeError,
    ValueError,
    torch.OutOfMemoryError,
)
PAGES_AT_ONCE = 512  # bounds the copies of blocks that conversions read before they write,
BLOCKS_AT_ONCE = 2048  # in all layers that are converted together


@dataclass(frozen=True, slots=True)
class PageSource:
    """Where the plain content of one page is during a forward: `token` >= 0 is its first row in the
    batch's own K/V tensors, else `slot` is a dense slot."""

    token: int
    slot: int


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Pages of one side that are compressed together.

    `pages` are page ids; `refs` the slots' refs in rank order, of which the first `sparse` are
    sparse: rank r of the ascending losses goes to refs[r], for every (layer, head) on its own.
    """

    side: int
    pages: tuple[int, ...]
    sources: tuple[PageSource, ...]
    refs: tuple[int, ...]
    sparse: int


@dataclass(frozen=True, slots=True)
class _Singles:
    """All groups of one page, of one side: their only slot is sparse.

    `runs` are (first row of the batch's K/V, pages) of neighbours, whose refs come first and in
    that order in `refs` int32 [N, H]; the rest are pages in the dense slots `stored` int64, and the
    dense slots of their K are `stored_keys` int64, with their page ids where that is for refs to
    say (slot -1).
    """

    runs: tuple[tuple[int, int], ...]
    stored: Tensor
    refs: Tensor
    stored_keys: Tensor
    stored_pages: Tensor


@dataclass(frozen=True, slots=True)
class _Conversions:
    """Conversions of one side, end to end, as index tensors: int64 page ids, old and new refs."""

    side: int
    pages: Tensor
    old: Tensor
    new: Tensor
    sparse_keys: bool


@dataclass(frozen=True, slots=True)
class _Choice:
    """What `ops.store_blocks` is told of blocks, and their losses (empty where nobody asked)."""

    keep: Tensor | None
    values: Tensor | None
    weights: Tensor | None
    factor: Tensor | None
    token_weights: Tensor | None
    losses: Tensor


def _batches(conversions: Sequence[Convert]) -> Iterator[list[Convert]]:
    """In order, of at most `PAGES_AT_ONCE` pages each, or of one conversion."""
    batch: list[Convert] = []
    pages = 0
    for conversion in conversions:
        pages += len(conversion.pages)
        if batch and pages > PAGES_AT_ONCE:
            yield batch
            batch, pages = [], len(conversion.pages)
        batch.append(conversion)
    if batch:
        yield batch


def _as_it_is(x: Tensor) -> Tensor:
    return x


@contextmanager
def _failing_as_compression() -> Iterator[None]:
    try:
        yield
    except RECOVERABLE as error:
        raise CompressionError(f"{type(error).__name__}: {error}") from error


def every(period: int, error: Exception) -> Callable[[], None]:
    """A fault for tests: raises at every `period`-th call."""
    calls = count(1)

    def strike() -> None:
        if next(calls) % period == 0:
            raise type(error)(*error.args)

    return strike


class Compressor:
    """Turns dense pages into sparse ones: `begin` once for each batch, then `apply` for each layer.

    Also carries out the pool's conversions at the decode side, for all layers at once (`convert`).
    """

    def __init__(
        self,
        pool: BlockPool,
        pruner: Pruner,
        calibration: Sequence[Mapping[str, Tensor]] | None = None,
        *,
        fault: Callable[[], None] | None = None,
    ) -> None:
        self.pool, self.pruner = pool, pruner
        self.calibration: dict[str, Tensor] | None = None  # by name, [layers, ...]
        if calibration is not None:
            names = calibration[0]
            self.calibration = {n: torch.stack([each[n] for each in calibration]) for n in names}
        self._fault = fault
        self._first_layer = torch.arange(pool.layers, device=pool.device)
        self._singles: dict[int, _Singles] = {}
        self._groups: list[PageGroup] = []
        self._key_sources: dict[int, PageSource] = {}

    def begin(self, groups: Sequence[PageGroup]) -> None:
        """Prepares the compression of one extend batch and writes the refs that are the same for
        all layers and heads. Must stay out of CUDA graphs."""
        pool = self.pool
        self._groups = [g for g in groups if len(g.pages) > 1 or not g.sparse]
        self._singles = {}
        self._key_sources = {
            page: source
            for group in groups
            if group.side == Side.K
            for page, source in zip(group.pages, group.sources, strict=True)
        }
        for side in Side:
            single = [g for g in groups if g.side == side and len(g.pages) == 1 and g.sparse]
            if not single:
                continue
            chunk = [g for g in single if g.sources[0].token >= 0]
            stored = [g for g in single if g.sources[0].token < 0]
            ordered = chunk + stored
            runs: list[tuple[int, int]] = []
            for token in (g.sources[0].token for g in chunk):
                if runs and token == runs[-1][0] + 64 * runs[-1][1]:
                    runs[-1] = (runs[-1][0], runs[-1][1] + 1)
                else:
                    runs.append((token, 1))
            refs = self._index([g.refs[0] for g in ordered]).to(torch.int32)
            pool.refs[:, side, self._index([g.pages[0] for g in ordered])] = refs[None, :, None]
            self._singles[side] = _Singles(
                runs=tuple(runs),
                stored=self._index([g.sources[0].slot for g in stored]),
                refs=refs[:, None].expand(-1, pool.heads).contiguous(),
                stored_keys=self._index([self._key_slot(g.pages[0]) for g in stored]),
                stored_pages=self._index([g.pages[0] for g in stored]),
            )

    def _key_slot(self, page: int) -> int:
        """The dense slot of a page's K that is compressed by this batch, too; else -1."""
        source = self._key_sources.get(page)
        return source.slot if source is not None and source.token < 0 else -1

    def apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Compresses the batch's pages of one layer from k, v [T, Hkv, D] and the dense slots.

        Raises CompressionError if a block cannot be pruned or packed.
        """
        with _failing_as_compression():
            if self._fault and layer == self.pool.layers - 1 and (self._singles or self._groups):
                self._fault()
            self._apply(layer, k, v)

    def _apply(self, layer: int, k: Tensor, v: Tensor) -> None:
        for side, singles in self._singles.items():
            rows, done = (k, v)[side], 0
            for first, pages in singles.runs:
                of_run = slice(first, first + 64 * pages)
                blocks, keys = (
                    x[of_run].unflatten(0, (pages, 64)).transpose(1, 2) for x in (rows, k)
                )
                choice = self._choose(layer, side, blocks, partial(_as_it_is, keys))
                self._store_layer(layer, side, blocks, singles.refs[done : done + pages], choice)
                done += pages
            if singles.stored.numel():
                stored = self.pool.dense_view(layer)[singles.stored]
                keys_of = partial(
                    self._keys_of_layer, layer, singles.stored_pages, singles.stored_keys
                )
                choice = self._choose(layer, side, stored, keys_of)
                self._store_layer(layer, side, stored, singles.refs[done:], choice)
        for group in self._groups:
            blocks = torch.stack([self._load(layer, (k, v)[group.side], s) for s in group.sources])
            choice = self._choose(
                layer, group.side, blocks, partial(self._group_keys, layer, k, group), ranked=True
            )
            self._place(layer, group, blocks, choice)

    def convert(self, conversions: Sequence[Convert]) -> None:
        """Pages take their decode form, in all layers: dense slots to sparse ones of the same page,
        or a segment's pages to a set of slots in rank order. Must stay out of CUDA graphs.

        A conversion may be given bytes that an earlier one gives up, so all that are carried out
        together are read before any of them is written. Raises CompressionError as `apply` does.
        """
        with _failing_as_compression():
            if self._fault:
                self._fault()
            self._convert(conversions)

    def _convert(self, conversions: Sequence[Convert]) -> None:
        for batch in _batches(conversions):
            single = [[c for c in batch if c.side == side and len(c.pages) == 1] for side in Side]
            parts = [self._indices(rows) for rows in single if rows]
            segments = [self._indices([c]) for c in batch if len(c.pages) > 1]
            at_once = max(1, BLOCKS_AT_ONCE // sum(len(c.pages) for c in batch))
            for first in range(0, self.pool.layers, at_once):
                layers = range(first, min(first + at_once, self.pool.layers))
                steps = [self._convert_singles(layers, each) for each in parts]
                steps += [self._convert_segment(n, each) for n in layers for each in segments]
                for step in steps:
                    next(step)
                for step in steps:
                    next(step, None)

    def _indices(self, rows: Sequence[Convert]) -> _Conversions:
        fields = zip(*((c.pages, c.old, c.new) for c in rows), strict=True)
        pages, old, new = (self._index([*chain.from_iterable(field)]) for field in fields)
        return _Conversions(rows[0].side, pages, old, new, any(c.sparse_keys for c in rows))

    def _converted_keys(self, layers: range, c: _Conversions) -> Tensor:
        """K blocks [L, N, H, 64, D] of V's pages, as they are: V is converted before K."""
        keys = self._keys(layers, c.pages)
        if not c.sparse_keys:
            return keys
        pool = self.pool
        refs = pool.refs[layers.start : layers.stop, Side.K, c.pages].long()
        head = torch.arange(pool.heads, device=pool.device)
        slots = self._whole_slots(layers, SPARSE, (-refs).clamp(min=0))
        packed = pool.sparse_view()[slots, head].flatten(0, 2)
        pruned = unpack_blocks(packed, Side.K, pool.format).view(keys.shape)
        return torch.where((refs < 0)[..., None, None], pruned, keys)

    def _keys(self, layers: range, pages: Tensor, slots: Tensor | None = None) -> Tensor:
        """[L, N, H, 64, D]: K of pages in the dense slots `slots`, or, at -1, those of their
        refs."""
        pool = self.pool
        index = pool.refs[layers.start : layers.stop, Side.K, pages].long()
        if slots is not None:
            index = torch.where(slots[:, None] >= 0, slots[:, None], index)
        head = torch.arange(pool.heads, device=pool.device)
        return pool.dense_view()[self._whole_slots(layers, DENSE, index.clamp(min=0)), head]

    def _keys_of_layer(self, layer: int, pages: Tensor, slots: Tensor) -> Tensor:
        return self._keys(range(layer, layer + 1), pages, slots)[0]

    def _whole_slots(self, layers: range, kind: BlockKind, slots: Tensor) -> Tensor:
        """Slots [..., N, H] or [N] of each layer as slots of the pool's `whole_arena`, [L, ...]."""
        first = self._first_layer[layers.start : layers.stop] * self.pool.slots_per_layer[kind]
        return slots + first.view(-1, *[1] * max(1, slots.dim() - 1))

    def _convert_singles(self, layers: range, c: _Conversions) -> Iterator[None]:
        """Dense pages, each to a sparse slot, in some layers at once. Reads, yields, then
        writes."""
        pool = self.pool
        blocks = pool.dense_view()[self._whole_slots(layers, DENSE, c.old)]  # [L, N, H, 64, D]
        choice = self._choose(layers, c.side, blocks, partial(self._converted_keys, layers, c))
        yield
        slots = self._whole_slots(layers, SPARSE, -c.new)
        refs = (-slots).to(torch.int32)[..., None].expand(-1, -1, pool.heads).flatten(0, 1)
        means = pool.whole_means if c.side == Side.V else None
        self._store(pool.whole_arena, means, c.side, blocks.flatten(0, 1), refs, choice)
        pool.refs[layers.start : layers.stop, c.side, c.pages] = c.new.to(torch.int32)[:, None]

    def _convert_segment(self, layer: int, c: _Conversions) -> Iterator[None]:
        """Pages that are sparse already go first, in the order of their slots; then the dense ones
        by ascending loss. Reads, yields, then writes."""
        pool, heads, total = self.pool, self.pool.heads, c.pages.numel()
        head = torch.arange(heads, device=pool.device).expand(total, -1)
        rank = torch.arange(total, device=pool.device)[:, None].expand(-1, heads)
        target = c.new[:, None].expand(-1, heads)
        dense, sparse = pool.dense_view(layer), pool.sparse_view(layer)
        refs = pool.refs[layer, c.side, c.pages].long()  # [C, H]
        blocks = dense[refs.clamp(min=0), head]  # [C, H, 64, D]
        packed = sparse[(-refs).clamp(min=0), head]  # uint8 [C, H, sparse_bytes]
        means = pool.means_of(layer, c.side)
        if means is not None:
            old_means = means[(-refs).clamp(min=0), head]
        choice = self._choose(
            layer,
            c.side,
            blocks,
            lambda: self._converted_keys(range(layer, layer + 1), c)[0],
            ranked=True,
        )
        yield
        was_sparse = refs < 0
        losses = torch.where(was_sparse, torch.inf, choice.losses)
        by_loss = torch.argsort(losses, dim=0, stable=True)
        position = torch.empty_like(by_loss).scatter_(0, by_loss, rank)
        old_rank = (refs[..., None] == c.old).int().argmax(-1)
        order = torch.where(was_sparse, old_rank, total + position).argsort(dim=0)
        fresh = target != refs.gather(0, order)
        repacked = was_sparse.gather(0, order)

        moved = fresh & (target < 0) & repacked
        slot, source, of = -target[moved], order[moved], head[moved]
        sparse[slot, of] = packed[source, of]
        if means is not None:
            means[slot, of] = old_means[source, of]
        names = ("keep", "values", "token_weights")
        given = {name: x for name in names if (x := getattr(choice, name)) is not None}
        in_order = replace(choice, **{name: x[order, head] for name, x in given.items()})
        stored = torch.where(fresh & ~moved, target, 0).to(torch.int32)
        self._store_layer(layer, c.side, blocks[order, head], stored, in_order)
        pool.refs[layer, c.side, c.pages] = (
            torch.empty_like(refs).scatter_(0, order, target).to(torch.int32)
        )

    def _place(self, layer: int, group: PageGroup, blocks: Tensor, choice: _Choice) -> None:
        """Blocks [C, H, 64, D] of a segment onto its slots in rank order; refs follow."""
        pool, heads = self.pool, self.pool.heads
        order = select(choice.losses, 0).order  # [C, H]
        new = self._index(list(group.refs))[:, None].expand(-1, heads)
        pages = self._index(list(group.pages))
        refs = torch.empty_like(order).scatter_(0, order, new).to(torch.int32)
        self._store_layer(layer, group.side, blocks, refs, choice)
        pool.refs[layer, group.side, pages] = refs

    def _store_layer(
        self, layer: int, side: int, blocks: Tensor, refs: Tensor, choice: _Choice
    ) -> None:
        """Blocks [N, H, 64, D], any view, as refs int32 [N, H] say; sparse ones as chosen."""
        pool = self.pool
        self._store(pool.arena[layer], pool.means_of(layer, side), side, blocks, refs, choice)

    def _store(
        self,
        arena: Tensor,
        means: Tensor | None,
        side: int,
        blocks: Tensor,
        refs: Tensor,
        choice: _Choice,
    ) -> None:
        ops.store_blocks(
            blocks,
            Side(side),
            arena,
            refs,
            self.pool.format,
            keep=choice.keep,
            weights=choice.weights,
            means=means,
            factor=choice.factor,
            values=choice.values,
            token_weights=choice.token_weights,
        )

    def _choose(
        self,
        layers: int | range,
        side: int,
        blocks: Tensor,
        keys_of: Callable[[], Tensor],
        *,
        ranked: bool = False,
    ) -> _Choice:
        """What the pruner says of blocks [N, H, 64, D] of one layer, or of [L, N, H, 64, D]: then
        the answer has them end to end, [L * N, ...]. With losses, if they are to be ranked.
        `keys_of` gives the K blocks of the same pages."""
        pool = self.pool
        own = layers if isinstance(layers, int) else slice(layers.start, layers.stop)
        constants = None
        if self.calibration is not None:
            constants = {name: x[own] for name, x in self.calibration.items()}

        def flat(x: Tensor) -> Tensor:
            return x.flatten(0, 1) if isinstance(layers, range) else x

        pruned = self.pruner.prune(blocks, side, constants, ranked=ranked)
        keep, values, losses = (
            None if x is None else flat(x) for x in (pruned.keep, pruned.values, pruned.losses)
        )
        query = pruned.query
        token_weights = None if query is None else ops.token_weights(flat(keys_of()), query)
        if ranked and losses is None:
            losses = ops.block_losses(
                flat(blocks),
                Side(side),
                pool.format,
                keep=keep,
                weights=pruned.weights,
                centered=pool.means is not None and side == Side.V,
                token_weights=token_weights,
            )
        return _Choice(
            keep=keep,
            values=values,
            weights=pruned.weights,
            factor=pruned.factor,
            token_weights=token_weights,
            losses=blocks.new_empty(0) if losses is None else losses,
        )

    def _group_keys(self, layer: int, k: Tensor, group: PageGroup) -> Tensor:
        """K blocks [C, H, 64, D] of a group of V."""
        return torch.stack(
            [
                self._load(layer, k, source)
                if source.token >= 0
                else self._keys_of_layer(
                    layer, self._index([page]), self._index([self._key_slot(page)])
                )[0]
                for page, source in zip(group.pages, group.sources, strict=True)
            ]
        )

    def _load(self, layer: int, own: Tensor, source: PageSource) -> Tensor:
        """[H, 64, D] of one page."""
        if source.token >= 0:
            return own[source.token : source.token + 64].transpose(0, 1)
        return self.pool.dense_view(layer)[source.slot]

    def _index(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.long).to(self.pool.device, non_blocking=True)
