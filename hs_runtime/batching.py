"""From a scheduled batch to a plan: slots first, then the plan, then what the tree may know.

The order is the point. Assigning slots may move other slots, so a batch is planned only after all
its rows have theirs; and what is freed or handed to the tree afterwards reaches the device with
the next forward, on the same stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hs_runtime.attention.plan import (
    TILE,
    AttnPlan,
    ExtendRow,
    build_decode_plan,
    build_extend_plan,
    tile_count,
)
from hs_runtime.compression import ChunkWork, RequestState, RequestStorage
from hs_runtime.compression.compressor import PageGroup, PageSource
from hs_runtime.compression.request_storage import in_order
from hs_runtime.scheduler.lifecycle import SIDES


class BatchPlanner:
    """Plans the batches of one scheduler. `insert(state, limit)` hands the pages before `limit`
    tokens of a prompt to the prefix cache."""

    def __init__(
        self, storage: RequestStorage, insert: Callable[[RequestState, int], None]
    ) -> None:
        self.storage, self.insert = storage, insert
        self.rules, self.pool = storage.rules, storage.pool

    def plan_extend(self, chunks: Sequence[tuple[RequestState, int, Sequence[int]]]) -> AttnPlan:
        """(request, end of its chunk, page ids that the chunk opens) for each row, in row order."""
        storage = self.storage
        for state, _, _ in chunks:
            if state.decoding:
                storage.convert_due(state)
        works = [
            (storage.replay_chunk if state.decoding else storage.allocate_chunk)(state, end, pages)
            for state, end, pages in chunks
        ]
        rows, groups, first = [], [], 0
        for work in works:
            rows.append(self._extend_row(work))
            groups += self._groups(work, first)
            first += work.end - work.start
        # A first chunk whose frontiers are all 0, as that of a short prompt, reads no stored page.
        read = [
            work.state.policy.decode if work.replay else work.state.policy.prefill
            for work, row in zip(works, rows, strict=True)
            if row.start > 0 or max(row.frontiers) > 0
        ]
        sparse = (any(each.key for each in read), any(each.value for each in read))
        plan = build_extend_plan(
            rows,
            self.pool.take_operations(),
            groups,
            sparse,
            self.rules.page,
            self.pool.device,
            self.pool.heads,
        )
        for work in works:
            state = work.state
            storage.finish_chunk(work)
            if not work.replay:
                self.insert(state, self.rules.insert_limit(state.policy, work.end, state.n))
                if work.end == state.n:
                    storage.end_of_prompt(state)
        return plan

    def _extend_row(self, work: ChunkWork) -> ExtendRow:
        rules, state, start = self.rules, work.state, work.start
        tiles = tile_count(start, work.end)
        if not work.replay:
            first = start // TILE * TILE
            frontiers = [rules.frontier(first + i * TILE, work.end) for i in range(tiles)]
        elif state.policy.is_dense:
            frontiers = [start // rules.page] * tiles
        else:
            frontiers = [max(rules.window_page(start), 0)] * tiles
        begun = range(frontiers[0], rules.pages(start))
        tail = [
            tuple(self.storage.dense_slot(state, p, side).index for p in begun) for side in SIDES
        ]
        return ExtendRow(
            start,
            work.end,
            tuple(state.pages),
            tuple(frontiers),
            frontiers[0],
            (tail[0], tail[1]),
            tuple((p, side, slot.index) for p, side, slot in work.writes),
        )

    def _groups(self, work: ChunkWork, first: int) -> list[PageGroup]:
        """`first` is the row of the batch's K/V that holds position `work.start`."""
        state, page = work.state, self.rules.page

        def source(p: int, side: int) -> PageSource:
            if p * page >= work.start:
                return PageSource(first + p * page - work.start, 0)
            return PageSource(-1, state.tail[p, side].index)

        return [
            PageGroup(
                side,
                tuple(state.pages[p] for p in pages),
                tuple(source(p, side) for p in pages),
                tuple(slot.ref for slot in slots),
                sparse,
            )
            for side, pages, slots, sparse in work.compress
        ]

    def convert_due(self, states: Sequence[RequestState]) -> None:
        """First half of a decode step, before its page ids are taken."""
        for state in in_order(states):
            self.storage.convert_due(state)

    def plan_decode(self, steps: Sequence[tuple[RequestState, Sequence[int]]]) -> AttnPlan:
        """(request, page ids that its token opens) for each row, in row order."""
        for state, pages in steps:
            self.storage.open_pages(state, pages)
        rows = []
        for state, _ in steps:
            p = state.position // self.rules.page
            for side in SIDES:
                self.storage.dense_slot(state, p, side)  # raises if the token has no place
            rows.append((state.position, state.pages[p]))
            state.position += 1
        return build_decode_plan(
            rows, self.pool.take_operations(), self.rules.page, self.pool.device
        )


def seq_lens_agree(states: Sequence[RequestState], seq_lens: Any) -> bool:
    """Whether SGLang's lengths after a decode step are ours."""
    return [state.position for state in states] == list(seq_lens)
