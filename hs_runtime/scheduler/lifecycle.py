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
    """The rules of one server: sizes in tokens, all multiples of the page."""

    page: int = 64
    sink: int = 64
    window: int = 256
    segment: int = 1024

    @classmethod
    def of(cls, constants: ServerConstants) -> Lifecycle:
        return cls(constants.page, constants.sink, constants.window, constants.segment)

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

    def frontier(self, t: int) -> int:
        """First page that a prefill query at position t reads dense (apart from the sink)."""
        return t // self.segment * self.segment_pages

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

    def kept_copies(self, policy: SparsityPolicy, n: int, side: int) -> range:
        """Pages of complete segments of which a prompt of n tokens keeps a dense copy too."""
        share, end = policy.prefill.of(side), n // self.segment * self.segment_pages
        limit = self.reuse_limit(policy, n)
        if not share or end * self.page <= limit:
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
