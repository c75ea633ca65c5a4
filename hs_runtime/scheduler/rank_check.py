"""A debug mode: do all ranks of a tensor-parallel server count alike?

Every rank has its own heads and plans for itself, from the same requests by the same pure rules;
nothing is sent. So what the ranks count, and the operations they queue, must be equal after every
batch. `RankCheck` folds both into a running hash and compares it between the ranks: a difference
is found in the batch that made it, before the ranks wait for each other in different collectives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Gather = Callable[[Any], Sequence[Any]]


class RanksDiffer(RuntimeError):
    """Ranks of one server planned different batches: its answers would be wrong from here on."""


class RankCheck:
    """The running hash of one rank. `gather(value)` gives every rank's value, in rank order."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._digest = b""
        self.compared = 0

    def compare(self, counters: Mapping[str, Any], operations: Sequence[object]) -> None:
        """After a batch was planned, on every rank. Raises RanksDiffer with what differs."""
        text = repr((sorted(counters.items()), operations))
        self._digest = hashlib.blake2b(self._digest + text.encode(), digest_size=16).digest()
        self.compared += 1
        ranks = self._gather((self.compared, self._digest, dict(counters), repr(operations)))
        if all(each[:2] == ranks[0][:2] for each in ranks):
            return
        raise RanksDiffer(f"batch {self.compared}: {difference(ranks)}")


def difference(ranks: Sequence[tuple[int, bytes, Mapping[str, Any], str]]) -> str:
    """Of (batches, hash, counters, operations) of every rank, what is not the same everywhere."""
    found = {name: [each[2].get(name) for each in ranks] for name in ranks[0][2]}
    found |= {"batches": [each[0] for each in ranks], "operations": [each[3] for each in ranks]}
    parts = [
        f"{name} {' / '.join(map(str, values))}"
        for name, values in found.items()
        if any(value != values[0] for value in values)
    ]
    return "; ".join(parts) or "the same now, but not in an earlier batch"


def gather_over(group: Any) -> Gather:
    """Over a `torch.distributed` group of the CPU."""
    from torch import distributed

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(values, value, group=group)
        return values

    return gather
