"""Which pages are compressed when, and in which form a query reads them: functions of positions.

Nothing here sees data, the cache or the scheduler; that is why answers depend on none of them.
`side` is 0 for K and 1 for V; shares are thousandths; positions are tokens, `page` and `segment`
are indices.
"""

from __future__ import annotations

from dataclasses import dataclass

from hs_runtime.policies import ServerConstants, SparsityPolicy

SIDES = (0, 1)


def sparse_count(share: int, candidates: int) -> int:
    """ceil(share * candidates), exactly: how many of a segment's candidates are sparse."""
    return -(-share * candidates // 1000)


def is_fractional(share: int) -> bool:
    return 0 < share < 1000


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """The rules of one server: sizes in tokens, all multiples of the page.

    `segment` is what is matched, inserted and evicted together under sparse prefill. With
    `chunk_anchor`, the paper's rule, it is the chunk: chunks end at its multiples and at the
    prompt's end, and all before the last `window` tokens of a chunk is compressed for its queries.
    """

    page: int = 64
    sink: int = 64
    window: int = 256
    segment: int = 1024
    chunk_anchor: bool = False

    @classmethod
    def of(cls, constants: ServerConstants) -> Lifecycle:
        by_chunk = constants.anchor == "chunk"
        return cls(
            constants.page, constants.sink, constants.window, constants.granularity, by_chunk
        )

    @property
    def segment_pages(self) -> int:
        return self.segment // self.page

    @property
    def sink_pages(self) -> int:
        return self.sink // self.page

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page)

    def candidates(self, segment: int) -> range:
        """Pages of a segment that may be sparse: all but the sink."""
        first = segment * self.segment_pages
        return range(max(first, self.sink_pages), first + self.segment_pages)

    def frontier(self, t: int, end: int) -> int:
        """First page after the sink that a prefill query at t reads dense, in a chunk up to end."""
        if self.chunk_anchor:
            return self.compressed_pages(end)
        return t // self.segment * self.segment_pages

    def compressed_pages(self, end: int) -> int:
        """First page that is not compressed, as far as prefill does, when `end` tokens are in."""
        if self.chunk_anchor:
            return max(0, end - self.window) // self.page
        return end // self.segment * self.segment_pages

    def compress_groups(self, start: int, end: int, hit: int) -> list[range]:
        """Pages that the chunk [start, end) of a prompt with `hit` cached tokens compresses; a
        block mask ranks the pages of one group."""
        if self.chunk_anchor:
            done = hit // self.page if start == hit else self.compressed_pages(start)
            groups = [range(max(done, self.sink_pages), self.compressed_pages(end))]
        else:
            complete = range(start // self.segment, end // self.segment)
            groups = [self.candidates(segment) for segment in complete]
        return [group for group in groups if group]

    def chunk_end(self, start: int, stop: int, tokens: int) -> int:
        """Where a chunk from `start` ends that may have `tokens` tokens: at `stop` or a page, by
        chunk anchor at a multiple of the chunk; `start` if it would not get that far."""
        if self.chunk_anchor:
            end = min(stop, (start // self.segment + 1) * self.segment)
            return end if end - start <= tokens else start
        return stop if stop - start <= tokens else (start + tokens) // self.page * self.page

    def window_page(self, t: int) -> int:
        """First page after the sink that a decode query at t reads dense; may be negative."""
        return t // self.page - self.window // self.page

    def granularity(self, policy: SparsityPolicy) -> int:
        """Tokens of the prefix cache's unit in the policy's namespace."""
        return self.page if policy.prefill.is_dense else self.segment

    def reuse_limit(self, policy: SparsityPolicy, n: int) -> int:
        """Tokens that a prompt of n tokens inserts into the prefix cache, and a repeat may hit."""
        if policy.prefill.is_dense:
            return n // self.page * self.page
        return max(0, (n - self.window) // self.segment * self.segment)

    def insert_limit(self, policy: SparsityPolicy, end: int, n: int) -> int:
        """Tokens that the prefix cache holds after a chunk up to `end` of a prompt of n tokens."""
        if self.chunk_anchor:
            return min(self.reuse_limit(policy, end), self.reuse_limit(policy, n))
        unit = self.granularity(policy)
        return min(end, self.reuse_limit(policy, n)) // unit * unit

    def kept_copies(self, policy: SparsityPolicy, n: int, side: int) -> range:
        """Pages of complete segments of which a prompt of n tokens keeps a dense copy too."""
        share, end = policy.prefill.of(side), n // self.segment * self.segment_pages
        limit = self.reuse_limit(policy, n)
        if self.chunk_anchor or not share or end * self.page <= limit:
            return range(0)
        whole = is_fractional(share) or is_fractional(policy.decode.of(side))
        first = limit // self.page if whole else self.window_page(n)
        return range(min(max(first, self.sink_pages), end), end)

    def changes_at_decode(self, policy: SparsityPolicy, protected_pages: int) -> bool:
        """Whether decode compresses more of the first `protected_pages` pages than prefill did."""
        for side in SIDES:
            before, after = policy.prefill.of(side), policy.decode.of(side)
            if before == after:
                continue
            for segment in range(-(-protected_pages // self.segment_pages)):
                pages = self.candidates(segment)
                if pages.start >= protected_pages:
                    continue
                if sparse_count(before, len(pages)) != sparse_count(after, len(pages)):
                    return True
        return False

    def next_replay_end(self, position: int, known: int) -> int:
        """Where a replay extend from `position` on ends: the next page, or the last known token."""
        return min(known, (position // self.page + 1) * self.page)
