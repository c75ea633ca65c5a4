"""The rules of compression for one request alone, over contents small enough for many histories.

What a token leaves behind is a function of its id, its position and of every page that its query
read, in the form in which it was read. Reading a page in another form, or a page that was computed
differently, changes everything after it; so the laws are equalities, and `rules_say` (one request
alone, straight from the rules) knows the right answer for every history.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from hs_kernels.block_format import Side
from hs_runtime.policies import SparsityPolicy
from hs_runtime.policies.policy import Sparsity
from hs_runtime.scheduler.lifecycle import SIDES, Lifecycle

LAYERS, HEADS = 2, 2
VOCAB, STOP = 3, 29  # few token ids make shared prefixes; a hash divisible by STOP ends
SHARES = (0, 250, 300, 500, 750, 1000)


def mix(*parts: Any) -> int:
    return hash(parts) & (2**61 - 1)


# ---- contents: what a token leaves behind, and what a query learns from a page of it -------------


class Content(Protocol):
    def empty(self, tokens: int) -> Any:
        """Room for the contents of one (layer, side, head)."""

    def token(self, layer: int, side: int, head: int, x: int) -> Any:
        """What a token whose state is x leaves behind."""

    def dense(self, tokens: Any) -> int:
        """What a query learns from the plain tokens of a page, or of its beginning."""

    def sparse(self, side: int, tokens: Any) -> int:
        """What a query learns from a pruned page."""

    def sparse_part(self, side: int, tokens: Any, count: int) -> int:
        """What a query learns from the first `count` tokens of a pruned page."""

    def ranked(self, side: int, blocks: Sequence[Any]) -> list[int]:
        """Indices of blocks by ascending loss, ties to the lower index."""


class Hashes:
    """A content is an int. Few loss values, so that ties occur."""

    def empty(self, tokens: int) -> list[int]:
        return [0] * tokens

    def token(self, layer: int, side: int, head: int, x: int) -> int:
        return mix(4, layer, side, head, x)

    def dense(self, tokens: Sequence[int]) -> int:
        return mix(0, *tokens)

    def sparse(self, side: int, tokens: Sequence[int]) -> int:
        return mix(1, *tokens)

    def sparse_part(self, side: int, tokens: Sequence[int], count: int) -> int:
        return self.part_of(self.sparse(side, tokens), count)

    def part_of(self, page: int, count: int) -> int:
        return mix(7, page, count)

    def ranked(self, side: int, blocks: Sequence[Sequence[int]]) -> list[int]:
        return sorted(range(len(blocks)), key=lambda i: (mix(2, *blocks[i]) % 8, i))


class Vectors:
    """A content is a vector [D] of integers from -3 to 3, which every element type holds exactly;
    a page is read as one weighted sum, which float64 holds exactly in any order."""

    def __init__(self, page: int, head_dim: int) -> None:
        rng = np.random.default_rng(7)
        shape = (LAYERS, len(SIDES), HEADS, head_dim)
        self.multipliers = rng.integers(1, 2**62, shape, dtype=np.uint64) * 2 + 1
        self.weights = rng.integers(1, 2**20, (page, head_dim)).astype(np.float64)
        self._last: tuple[tuple[int, int], Any] = ((-1, -1), None)

    def empty(self, tokens: int) -> Any:
        return np.zeros((tokens, self.weights.shape[1]))

    def rows(self, layer: int, xs: Sequence[int]) -> Any:
        """[T, sides, heads, D]"""
        states = np.array(xs, dtype=np.uint64)[:, None, None, None]
        return ((states * self.multipliers[layer]) >> np.uint64(57)).astype(np.float64) % 7 - 3

    def token(self, layer: int, side: int, head: int, x: int) -> Any:
        if self._last[0] != (layer, x):
            self._last = (layer, x), self.rows(layer, [x])[0]
        return self._last[1][side, head]

    def dense(self, tokens: Any) -> int:
        return int((tokens * self.weights[: len(tokens)]).sum())

    def pruned(self, side: int, tokens: Any) -> Any:
        grouped = tokens if side == Side.K else tokens.T
        fours = grouped.reshape(*grouped.shape[:-1], -1, 4)
        order = np.argsort(-np.abs(fours), axis=-1, kind="stable")
        kept = np.zeros_like(fours)
        np.put_along_axis(kept, order[..., :2], 1.0, axis=-1)
        out = (fours * kept).reshape(grouped.shape)
        return out if side == Side.K else out.T

    def sparse(self, side: int, tokens: Any) -> int:
        return self.dense(self.pruned(side, tokens))

    def sparse_part(self, side: int, tokens: Any, count: int) -> int:
        return self.dense(self.pruned(side, tokens)[:count])

    def ranked(self, side: int, blocks: Sequence[Any]) -> list[int]:
        losses = [np.abs(x).sum() - np.abs(self.pruned(side, x)).sum() for x in blocks]
        return sorted(range(len(blocks)), key=lambda i: (losses[i], i))


# ---- the rules for one request, with nothing cached, chunked or evicted --------------------------


def rules_say(
    rules: Lifecycle,
    content: Content,
    prompt: Sequence[int],
    policy: SparsityPolicy,
    max_new: int,
    stop: int = STOP,
) -> list[int]:
    """The states of the last prompt token and of every generated token.

    Takes the sizes of `rules` and none of its functions.
    """
    page, segment_pages, sink_pages = (
        rules.page,
        rules.segment // rules.page,
        rules.sink // rules.page,
    )
    window_pages = rules.window // page
    n, tokens, outputs = len(prompt), list(prompt), []
    kv = {
        (layer, side, head): content.empty(n + max_new)
        for layer in range(LAYERS)
        for head in range(HEADS)
        for side in SIDES
    }
    ranks: dict[Any, list[int]] = {}
    learnt: dict[Any, int] = {}

    def block(key: Any, p: int) -> Any:
        return kv[key][p * page : (p + 1) * page]

    def sparse_pages(key: Any, t: int, end: int) -> set[int]:
        """Pages that the query at t reads sparse; `end` is where its chunk ends."""
        side, out = key[1], set()
        share = (policy.decode if t >= n else policy.prefill).of(side)
        if t >= n:
            first_dense = t // page - window_pages
        elif rules.chunk_anchor:
            first_dense = (end - rules.window) // page
        else:
            first_dense = t // rules.segment * segment_pages
        if share == 1000 and (t >= n or rules.chunk_anchor):
            return set(range(sink_pages, max(first_dense, 0)))
        for segment in range(max(first_dense, 0) // segment_pages if share else 0):
            pages = [
                p
                for p in range(segment * segment_pages, (segment + 1) * segment_pages)
                if p >= sink_pages
            ]
            if (key, segment) not in ranks:
                ranks[key, segment] = content.ranked(side, [block(key, p) for p in pages])
            count = -(-share * len(pages) // 1000)
            out |= {pages[i] for i in ranks[key, segment][:count]}
        return out

    def reads(key: Any, t: int, end: int) -> tuple[int, int]:
        """What the query at t learns from the pages before its own, and from its own."""
        p, side = t // page, key[1]
        place = key, p, t >= n, end
        if place not in learnt:
            sparse = sparse_pages(key, t, end)
            views = [
                content.sparse(side, block(key, q)) if q in sparse else content.dense(block(key, q))
                for q in range(p)
            ]
            learnt[place] = mix(6, *views)
            pruned[place] = p in sparse
        if pruned[place]:
            return learnt[place], content.sparse_part(side, block(key, p), t % page + 1)
        return learnt[place], content.dense(kv[key][p * page : t + 1])

    pruned: dict[Any, bool] = {}
    start = 0
    while start < len(tokens):
        # A run: its keys and values are there before any of its queries reads.
        end = min(n, (start // rules.segment + 1) * rules.segment) if start < n else start + 1
        xs = [mix(3, tokens[t], t) for t in range(start, end)]
        for layer in range(LAYERS):
            keys = [(layer, side, head) for head in range(HEADS) for side in SIDES]
            for key in keys:
                for t in range(start, end):
                    kv[key][t] = content.token(*key, xs[t - start])
            xs = [
                mix(5, xs[t - start], *(x for key in keys for x in reads(key, t, end)))
                for t in range(start, end)
            ]
        start = end
        if end >= n:
            outputs.append(xs[-1])
            if len(outputs) < max_new and xs[-1] % stop:
                tokens.append(xs[-1] % VOCAB)
    return outputs


# ---- random requests ----------------------------------------------------------------------------


def policy(prefill: tuple[int, int], decode: tuple[int, int]) -> SparsityPolicy:
    return SparsityPolicy(Sparsity(*prefill), Sparsity(*decode))


def some_policy(rng: random.Random, *, fractions: bool = True) -> SparsityPolicy:
    if not fractions:
        prefill = [rng.choice([0, 1000]) for _ in SIDES]
        decode = [max(p, rng.choice([0, 1000])) for p in prefill]
        return policy((prefill[0], prefill[1]), (decode[0], decode[1]))
    prefill = [rng.choice(SHARES) if rng.random() < 0.5 else rng.choice([0, 1000]) for _ in SIDES]
    decode = [
        p if rng.random() < 0.4 else rng.choice([s for s in SHARES if s >= p]) for p in prefill
    ]
    return policy((prefill[0], prefill[1]), (decode[0], decode[1]))


def some_tokens(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(n)]
