"""Ranks that count alike pass; the first batch that differs is named, with what differs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from hs_runtime.pool.block_pool import Bind, Drop
from hs_runtime.scheduler.rank_check import RankCheck, RanksDiffer


class Ranks:
    """Two ranks in two threads."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.values: list[Any] = [None, None]

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found

    def run(
        self, first: Sequence[tuple[dict[str, int], list[object]]], second: Sequence[Any]
    ) -> list[str]:
        """What each rank raised, '' for nothing."""
        raised = ["", ""]

        def work(rank: int, batches: Sequence[Any]) -> None:
            check = RankCheck(lambda value: self.gather(rank, value))
            try:
                for counters, operations in batches:
                    check.compare(counters, operations)
            except RanksDiffer as error:
                raised[rank] = str(error)

        threads = [threading.Thread(target=work, args=each) for each in ((0, first), (1, second))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return raised


SAME = ({"dense": 5, "sparse": 3}, [Bind(0, 7, -2)])


def test_equal_ranks_pass() -> None:
    assert Ranks().run([SAME, SAME], [SAME, SAME]) == ["", ""]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (({"dense": 5, "sparse": 4}, [Bind(0, 7, -2)]), "batch 2: sparse 3 / 4"),
        (({"dense": 5, "sparse": 3}, [Bind(0, 7, -3)]), "ref=-2"),
        (({"dense": 5, "sparse": 3}, [Bind(0, 7, -2), Drop(7)]), "Drop(page=7)"),
    ],
)
def test_all_ranks_name_what_differs(other: Any, said: str) -> None:
    raised = Ranks().run([SAME, SAME], [SAME, other])
    assert all(said in each for each in raised)
    assert all(each.startswith("batch 2: ") for each in raised)


def test_a_difference_is_not_forgotten() -> None:
    """Also when it is gone by the time ranks are compared: the hash is of all that was."""
    check = RankCheck(lambda value: [value, value])
    check.compare(*SAME)
    stranger = (1, b"another", {"dense": 5, "sparse": 3}, repr(SAME[1]))
    check._gather = lambda value: [value, (value[0], b"another", *stranger[2:])]
    with pytest.raises(RanksDiffer, match="not in an earlier batch"):
        check.compare(*SAME)
