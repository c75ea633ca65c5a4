"""From lists to the tensors of one forward."""

from __future__ import annotations

import pytest
import torch

from hs_kernels.block_format import Side
from hs_runtime.attention.plan import (
    TILE,
    ExtendRow,
    build_decode_plan,
    build_extend_plan,
    tile_count,
)
from hs_runtime.pool.block_pool import Drop
from tests.support.devices import written

CPU = torch.device("cpu")
K, V = Side.K, Side.V


def places(row: int, slot: int, offset: int, count: int) -> list[tuple[int, int, int]]:
    return [(row + i, slot, offset + i) for i in range(count)]


# A first chunk that opens a prompt, and a replay that begins and ends inside pages.
FIRST = ExtendRow(
    start=0,
    end=150,
    pages=(7, 3, 9),
    frontiers=(0, 0),
    tail_first=0,
    tail=((), ()),
    writes=((0, 0, 21), (0, 1, 22), (2, 1, 23)),
)
REPLAY = ExtendRow(
    start=200,
    end=260,
    pages=(5, 2, 8, 4, 6),
    frontiers=(2, 2),
    tail_first=2,
    tail=((31, 32), (33, 34)),
    writes=((3, 0, 32), (3, 1, 34), (4, 0, 35), (4, 1, 36)),
)


@pytest.mark.parametrize(
    ("start", "end", "tiles"),
    [
        (0, 1, 1),
        (0, 128, 1),
        (0, 129, 2),
        (127, 129, 2),
        (128, 256, 1),
        (200, 260, 2),
        (64, 128, 1),
    ],
)
def test_tiles_are_cut_at_absolute_multiples(start: int, end: int, tiles: int) -> None:
    assert tile_count(start, end) == tiles == len({t // TILE for t in range(start, end)})


def test_an_extend_s_tensors_by_hand() -> None:
    operations, groups = [Drop(1)], ["a group"]
    plan = build_extend_plan([FIRST, REPLAY], operations, groups, (True, False), 64, CPU, 2)
    assert plan.operations is operations and not plan.begun
    assert (plan.num_rows, plan.longest) == (2, 260)
    assert plan.seq_lens is None and plan.locations is None
    tensors = plan.prefill
    assert tensors is not None
    assert tensors.groups is groups and tensors.sparse == (True, False)
    assert (tensors.bounds, tensors.prefixes, tensors.longest_chunk) == (
        [0, 150, 210],
        [0, 200],
        150,
    )
    attention = tensors.attention
    want = {
        "cu_seqlens": [0, 150, 210],
        "prefix_lens": [0, 200],
        "page_table": [[7, 3, 9, 0, 0], [5, 2, 8, 4, 6]],
        "tail_first": [0, 2],
        "tail_slots": [[[0, 0], [0, 0]], [[31, 32], [33, 34]]],
        "tile_offsets": [0, 2, 4],
        "frontiers": [0, 0, 2, 2],
    }
    for name, values in want.items():
        tensor = getattr(attention, name)
        assert tensor.dtype == torch.int32 and tensor.tolist() == values, name


def test_an_extend_writes_each_token_of_its_pages_once() -> None:
    """Pages that are compressed from the chunk are not written; a page may be begun before."""
    plan = build_extend_plan([FIRST, REPLAY], [], [], (True, True), 64, CPU, 2)
    assert plan.prefill is not None
    writes = plan.prefill.writes
    replayed = [(150, 32, 8, 56), (206, 35, 0, 4)]
    assert written(writes, K) == places(0, 21, 0, 64) + [
        x for each in replayed for x in places(*each)
    ]
    first = places(0, 22, 0, 64) + places(128, 23, 0, 22)
    assert written(writes, V) == first + places(150, 34, 8, 56) + places(206, 36, 0, 4)
    assert writes.locations.dtype == torch.int64 and writes.refs.dtype == torch.int32
    assert writes.locations.shape == (210,) and writes.refs.shape[::2] == (2, 2)


def test_an_extend_without_tails_and_writes_has_empty_indices() -> None:
    row = ExtendRow(128, 256, (4, 5, 6, 7), (2,), 2, ((), ()), ())
    plan = build_extend_plan([row], [], [], (True, True), 64, CPU, 2)
    assert plan.prefill is not None
    assert plan.prefill.attention.tail_slots.shape == (1, 2, 1)
    assert bool((plan.prefill.writes.locations == -1).all())


def test_a_row_without_a_frontier_for_each_tile_is_an_error() -> None:
    row = ExtendRow(100, 300, (1, 2, 3, 4, 5), (0,), 0, ((1, 2), (3, 4)), ())
    with pytest.raises(ValueError, match=r"1 frontiers for rows \[100, 300\)"):
        build_extend_plan([row], [], [], (True, True), 64, CPU, 2)


def test_a_decode_s_tensors_by_hand() -> None:
    """The new token counts, and goes to its page's place."""
    operations = [Drop(2)]
    plan = build_decode_plan([(0, 9), (63, 4), (64, 5), (1000, 77)], operations, 64, CPU)
    assert plan.operations is operations and plan.prefill is None and not plan.begun
    assert (plan.num_rows, plan.longest) == (4, 1001)
    assert plan.seq_lens is not None and plan.locations is not None
    assert plan.seq_lens.dtype == torch.int32 and plan.locations.dtype == torch.int64
    assert plan.seq_lens.tolist() == [1, 64, 65, 1001]
    assert plan.locations.tolist() == [9 * 64, 4 * 64 + 63, 5 * 64, 77 * 64 + 1000 % 64]


def test_a_decode_of_nothing_is_empty() -> None:
    plan = build_decode_plan([], [], 64, CPU)
    assert plan.seq_lens is not None and plan.locations is not None
    assert (plan.num_rows, plan.longest) == (0, 0)
    assert plan.seq_lens.numel() == plan.locations.numel() == 0
